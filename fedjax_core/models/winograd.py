r"""Convolution with 3 x 3 kernels in a quarter of the multiplications.

Of a tile :math:`d` of 6 x 6 pixels and a kernel :math:`g` Winograd's minimal filtering
F(4 x 4, 3 x 3) makes 4 x 4 outputs,

.. math::

  Y = A^\top \bigl[ (G g G^\top) \odot (B^\top d B) \bigr] A ,

with 36 multiplications instead of 144. Tiles overlap by two pixels. Summed over
channels the elementwise product is one matrix product for each of the 36 places of a
tile, and so are both derivatives. But for rounding that is the convolution: errors are
about ten times those of the plain sum, some 1e-6 of the largest output in float32, and
float32 overflows from 1e36 on.

References:
  Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array: TypeAlias = jax.Array

_OUT, _IN = 4, 6  # pixels of a tile along one axis
_TILE_BYTES = 64 * 2**20  # of a part of a client's large batch

# Transforms of both axes at once: [36, 36], [36, 9] and [16, 36].
_B, _G, _A = (
    np.kron(matrix, matrix)
    for matrix in map(
        np.array,
        (
            [
                [4, 0, -5, 0, 1, 0],
                [0, -4, -4, 1, 1, 0],
                [0, 4, -4, -1, 1, 0],
                [0, -2, -1, 2, 1, 0],
                [0, 2, -1, -2, 1, 0],
                [0, 4, 0, -5, 0, 1],
            ],
            [
                [1 / 4, 0, 0],
                [-1 / 6, -1 / 6, -1 / 6],
                [-1 / 6, 1 / 6, -1 / 6],
                [1 / 24, 1 / 12, 1 / 6],
                [1 / 24, -1 / 12, 1 / 6],
                [0, 0, 1],
            ],
            [
                [1, 1, 1, 1, 1, 0],
                [0, 1, -1, 2, -2, 0],
                [0, 1, 1, 4, 4, 0],
                [0, 1, -1, 8, -8, 1],
            ],
        ),
    )
)


def pays(x: Array, kernel: Array) -> bool:
    """Whether `conv` takes these and is faster than a product of patches on CPU.

    Measured by `benchmarks/convolutions.py`: not from few channels, or from some to
    many more, whose transforms cost more than their products, not with few tiles or
    tiles that reach far over the edge. With numbers of 16 bits too much is lost.
    """
    if kernel.shape[:2] != (3, 3) or jnp.finfo(x.dtype).bits < 32:
        return False
    batch, height, width, channels = x.shape
    wide = channels >= 4 and kernel.shape[-1] <= 4 * channels
    rows, columns = (-(-(n - 2) // _OUT) for n in (height, width))
    used = (height - 2) * (width - 2) / (rows * columns * _OUT**2)
    return wide and batch * rows * columns >= 16 and used >= 0.5


def conv(x: Array, kernel: Array) -> Array:
    """Cross-correlates images with a kernel, without padding.

    Args:
      x: [B, H, W, C] float.
      kernel: [3, 3, C, F] of the same dtype.

    Returns:
      [B, H - 2, W - 2, F].
    """
    height, width = (n - 2 for n in x.shape[1:3])
    margins = ((0, -height % _OUT), (0, -width % _OUT))
    x = jnp.pad(x, ((0, 0), *margins, (0, 0)))
    batch, rows, columns = _grid(x)
    channels = sum(kernel.shape[2:])  # of tiles and of products, all held at once
    tile_bytes = rows * columns * _IN**2 * channels * x.dtype.itemsize
    parts = chunked(x, tile_bytes, _TILE_BYTES)
    if len(parts) == 1:
        return _conv(x, kernel)[:, :height, :width]
    y = lax.map(lambda images: _conv(images, kernel), parts)
    return y.reshape(batch, *y.shape[2:])[:, :height, :width]


def chunked(x: Array, bytes_each: int, limit: int) -> Array:
    """[B, ...] to [B / b, b, ...], b the largest whose bytes fit the limit."""
    batch = len(x)
    fitting = min(batch, max(1, limit // max(1, bytes_each)))
    size = max(b for b in range(1, fitting + 1) if batch % b == 0)
    return x.reshape(batch // size, size, *x.shape[1:])


@jax.custom_vjp
def _conv(x: Array, kernel: Array) -> Array:
    """`conv` of images that tiles fill."""
    products = _by_place(_tiles(x), _spread(kernel), (2, 1))
    y = _times(_A, products)
    return _image(y.reshape(_OUT, _OUT, *_grid(x), kernel.shape[-1]))


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _conv(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    batch, rows, columns = _grid(x)
    dy = dy.reshape(batch, rows, _OUT, columns, _OUT, -1).transpose(2, 4, 0, 1, 3, 5)
    dproducts = _times(_A.T, dy.reshape(_OUT**2, -1, kernel.shape[-1]))
    dkernel = _times(_G.T, _by_place(_tiles(x), dproducts, (1, 1)))
    dtiles = _times(_B.T, _by_place(dproducts, _spread(kernel), (2, 2)))
    dtiles = dtiles.reshape(_IN, _IN, batch, rows, columns, -1)
    dx = _image(_joined(_joined(dtiles, 0, 3), 1, 4))
    return dx[:, : x.shape[1], : x.shape[2]], dkernel.reshape(kernel.shape)


_conv.defvjp(_forward, _backward)


def _grid(x: Array) -> tuple[int, int, int]:
    """Images, and rows and columns of tiles."""
    return x.shape[0], (x.shape[1] - 2) // _OUT, (x.shape[2] - 2) // _OUT


def _tiles(x: Array) -> Array:
    """[B, H, W, C] to transformed tiles, [36, tiles, C]."""
    _, rows, columns = _grid(x)
    places = [
        x[:, i : i + _OUT * rows - 3 : _OUT, j : j + _OUT * columns - 3 : _OUT]
        for i in range(_IN)
        for j in range(_IN)
    ]
    return _times(_B, jnp.stack(places).reshape(_IN**2, -1, x.shape[-1]))


def _spread(kernel: Array) -> Array:
    """[3, 3, C, F] to the transformed kernel, [36, C, F]."""
    return _times(_G, kernel.reshape(9, *kernel.shape[2:]))


def _times(matrix: np.ndarray, x: Array) -> Array:
    """A transform of places, [p, ...] to [q, ...]."""
    y = jnp.asarray(matrix, x.dtype) @ x.reshape(len(x), -1)
    return y.reshape(-1, *x.shape[1:])


def _by_place(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """A product of matrices for each place, summed over an axis of either."""
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((0,), (0,))))


def _joined(tiles: Array, place: int, tile: int) -> Array:
    """Adds the last two pixels of each tile to the first two of the next, on two axes.

    Of 6 pixels in n tiles there remain 4 in n + 1.
    """
    own, over = jnp.split(tiles, [_OUT], place)
    margins = dict.fromkeys(range(tiles.ndim), (0, 0))
    here, next_one = margins | {tile: (0, 1)}, margins | {tile: (1, 0), place: (0, 2)}
    return jnp.pad(own, [*here.values()]) + jnp.pad(over, [*next_one.values()])


def _image(tiles: Array) -> Array:
    """[h, w, B, rows, columns, C] to [B, rows * h, columns * w, C]."""
    height, width, batch, rows, columns, _ = tiles.shape
    x = tiles.transpose(2, 3, 0, 4, 1, 5)
    return x.reshape(batch, rows * height, columns * width, -1)
