"""Convolution and pooling that run fast where the simulator runs.

XLA's CPU backend is an order of magnitude slower on `lax.conv_general_dilated` inside
a loop than outside, and a round is a loop. On a GPU clients side by side, each with a
kernel of its own, turn it into a grouped convolution, half as fast as the products it
stands for. On both a convolution is better written as the matrix
product of image patches with the kernel (im2col), on CPU a few examples at a time so
that their patches stay in the cache, or for 3 x 3 kernels in Winograd's form, and
pooling as a maximum over the axes of a reshaped array. A depthwise convolution has no
product to make: there it is the sum of shifted images times a weight each, which XLA
turns into one loop. Elsewhere all are XLA's own operations. All images are
[B, H, W, C], all kernels [h, w, C, F].

The "patches" forms and Winograd's define their own reverse derivative: forward-mode
differentiation (`jax.jvp`, `jax.hessian`) needs the lowering "lax".
"""

from functools import partial
from typing import Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import lax

from fedjax_core import check
from fedjax_core.arrays import as_float
from fedjax_core.models import winograd

Array: TypeAlias = jax.Array
Lowering: TypeAlias = Literal["auto", "patches", "lax"]
Padding: TypeAlias = Literal["VALID", "SAME"]

_GLOROT = nn.initializers.glorot_uniform()


def conv(
    x: Array,
    kernel: Array,
    padding: Padding = "VALID",
    lowering: Lowering = "auto",
    stride: int = 1,
) -> Array:
    """Cross-correlates images with a kernel.

    Args:
      x: [B, H, W, C], integers and bools are converted.
      kernel: [h, w, C, F] float.
      padding: "VALID" or "SAME" (zeros, the odd one after), as in `lax`.
      lowering: "patches", "lax", or "auto": patches on CPU and GPU, on CPU Winograd's
        form where it pays, lax elsewhere.
      stride: rows and columns from one output to the next.

    Returns:
      [B, H', W', F]: at stride 1 H' is H - h + 1 for "VALID" and H for "SAME", and of
      these every stride-th, rounded up.

    Raises:
      ValueError: the channels differ, the kernel does not fit into the image, stride is
        not >= 1, or padding or lowering is unknown.
    """
    check.one_of(("VALID", "SAME"), padding=padding)
    check.positive_int(stride=stride)
    x, kernel = promote_dtype(x, kernel)
    if x.shape[-1] != kernel.shape[-2]:
        raise ValueError(
            f"kernel must take the {x.shape[-1]} channels of x, "
            f"got kernel.shape {kernel.shape}."
        )
    if padding == "VALID" and min(_valid_size(x, kernel, stride)) < 1:
        raise ValueError(
            f"kernel must fit into the image, {x.shape[1]} x {x.shape[2]}, "
            f"got kernel.shape {kernel.shape}."
        )
    if _resolve(lowering) == "lax":
        return _lax_conv(x, kernel, padding, stride)
    if kernel.shape[:2] == (1, 1):
        return x[:, ::stride, ::stride] @ kernel[0, 0]
    x = _padded(x, kernel, padding, stride)
    if lowering == "auto" and _on_cpu() and stride == 1 and winograd.pays(x, kernel):
        return winograd.conv(x, kernel)
    return _patch_conv(x, kernel, stride)


def depthwise_conv(
    x: Array, kernel: Array, stride: int = 1, lowering: Lowering = "auto"
) -> Array:
    """Cross-correlates every channel with a kernel of its own, padded as "SAME".

    Args:
      x: [B, H, W, C] float.
      kernel: [h, w, 1, C] float.
      stride: rows and columns from one output to the next.
      lowering: as of `conv`; both can be differentiated in either direction.

    Returns:
      [B, ceil(H / stride), ceil(W / stride), C].
    """
    x, kernel = promote_dtype(x, kernel)
    if _resolve(lowering) == "lax":
        return _lax_conv(x, kernel, "SAME", stride)
    x = _padded(x, kernel, "SAME", stride)
    weights = kernel.reshape(-1, 1, 1, 1, kernel.shape[-1])
    shifts = _shifts(x, kernel, stride)
    total = jnp.zeros((), x.dtype)
    for weight, shift in zip(weights, shifts, strict=True):
        total += weight * shift
    return total


def max_pool(
    x: Array, window: tuple[int, int] = (2, 2), lowering: Lowering = "auto"
) -> Array:
    """Maximum over windows side by side; what does not fill a window is dropped.

    Where a maximum occurs more than once its gradient goes to the first place, in
    rows then columns, whatever the lowering.

    Args:
      x: [B, H, W, C], integers and bools are converted.
      window: height and width of a window, and the stride.
      lowering: "patches" reshapes, which needs a window that divides the image;
        "lax" is `lax.reduce_window`; "auto" reshapes on CPU and GPU where possible.

    Returns:
      [B, H // height, W // width, C].

    Raises:
      ValueError: "patches" with a window that does not divide the image.
    """
    x = as_float(x)
    batch, height, width, channels = x.shape
    rows, columns = window
    divides = height % rows == 0 and width % columns == 0
    if lowering == "patches" and not divides:
        raise ValueError(
            f"window must divide the image, {height} x {width}, got {window}."
        )
    if _resolve(lowering) == "lax" or not divides:
        strides = (1, rows, columns, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, strides, strides, "VALID")
    shape = (batch, height // rows, rows, width // columns, columns, channels)
    return _max_of_windows(x.reshape(shape))


class Conv(nn.Module):
    """A convolution; see `conv`.

    Attributes:
      features: F, channels of the output.
      kernel_size: height and width of the kernel.
      padding: "VALID" or "SAME".
      lowering: how it is computed; does not change the parameters.
      kernel_init: initialiser of the kernel [h, w, C, F]; the bias [F] starts at 0.
      stride: rows and columns from one output to the next.
      use_bias: whether there is a bias.
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    padding: Padding = "VALID"
    lowering: Lowering = "auto"
    kernel_init: nn.initializers.Initializer = _GLOROT
    stride: int = 1
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [B, H, W, C] to [B, H', W', F]."""
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        y = conv(x, kernel, self.padding, self.lowering, self.stride)
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return y + bias[None, None, None]


class DepthwiseConv(nn.Module):
    """A convolution of every channel alone, without bias; see `depthwise_conv`.

    Attributes:
      kernel_size: height and width of the kernel.
      stride: rows and columns from one output to the next.
      lowering: how it is computed; does not change the parameters.
      kernel_init: initialiser of the kernel, given the shape [h, w, 1, C].
    """

    kernel_size: tuple[int, int] = (3, 3)
    stride: int = 1
    lowering: Lowering = "auto"
    kernel_init: nn.initializers.Initializer = _GLOROT

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [B, H, W, C] to [B, H', W', C]."""
        shape = (*self.kernel_size, 1, x.shape[-1])
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        return depthwise_conv(x, kernel, self.stride, self.lowering)


class Dense(nn.Module):
    """An affine map whose kernel is stored [F, C], one row per output.

    That is the transpose of flax's own, for output layers: the number of classes seldom
    fills vector registers, the number of features does, and the products of the
    backward pass and the update then run along rows of features.

    Attributes:
      features: F, features of the output.
      kernel_init: initialiser of the kernel, given the shape [F, C]; the bias [F]
        starts at 0.
    """

    features: int
    kernel_init: nn.initializers.Initializer = nn.initializers.glorot_uniform(
        in_axis=-1, out_axis=-2
    )

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [B, C] to [B, F]."""
        shape = (self.features, x.shape[-1])
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        x, kernel, bias = promote_dtype(x, kernel, bias)
        product = _by_rows if _on_cpu() else _times_transposed
        return product(x, kernel) + bias[None]


def _times_transposed(x: Array, kernel: Array) -> Array:
    """[B, C] times the transpose of [F, C]: [B, F]."""
    return lax.dot_general(x, kernel, (((1,), (1,)), ((), ())))


@jax.custom_jvp
def _by_rows(x: Array, kernel: Array) -> Array:
    """`_times_transposed`, computed as its transpose.

    A product copies its right operand into tiles first. With the kernel on the left the
    copied one is the batch, which is smaller; the barrier keeps XLA from turning the
    product around again. Derivatives are those of the plain form.
    """
    return lax.optimization_barrier(kernel @ x.T).T


@_by_rows.defjvp
def _by_rows_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    tangent = _times_transposed(dx, kernel) + _times_transposed(x, dkernel)
    return _by_rows(x, kernel), tangent


def _resolve(lowering: Lowering) -> Lowering:
    check.one_of(("auto", "patches", "lax"), lowering=lowering)
    if lowering == "auto":
        return "patches" if jax.default_backend() in ("cpu", "gpu") else "lax"
    return lowering


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _lax_conv(x: Array, kernel: Array, padding: Padding, stride: int) -> Array:
    """`conv`; depthwise where the kernel takes one channel of several."""
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // kernel.shape[-2],
    )


def _padded(x: Array, kernel: Array, padding: Padding, stride: int) -> Array:
    if padding == "VALID":
        return x
    sides = lax.padtype_to_pads(
        x.shape[1:3], kernel.shape[:2], (stride, stride), padding
    )
    return jnp.pad(x, ((0, 0), *sides, (0, 0)))


# ---- convolution as a matrix product ----

# Measured on an EMNIST CNN: about the size of a core's cache, with room to spare for
# products large enough to run at full speed. Accelerators only want the products large.
_PATCH_BYTES_CPU, _PATCH_BYTES = 2 * 2**20, 64 * 2**20


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _patch_conv(x: Array, kernel: Array, stride: int) -> Array:
    """`conv` without padding."""
    y = lax.map(
        lambda images: _patches(images, kernel, stride) @ _as_matrix(kernel),
        _chunk(x, kernel, stride),
    )
    return y.reshape(x.shape[0], *_valid_size(x, kernel, stride), kernel.shape[-1])


def _patch_conv_forward(
    x: Array, kernel: Array, stride: int
) -> tuple[Array, tuple[Array, Array]]:
    return _patch_conv(x, kernel, stride), (x, kernel)


def _patch_conv_backward(
    stride: int, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, kernel = saved

    def one(images_and_dy: tuple[Array, Array]) -> tuple[Array, Array]:
        images, dy = images_and_dy
        dy = dy.reshape(-1, kernel.shape[-1])
        transposed = _patches(images, kernel, stride).T
        if _on_cpu():
            # Left to itself XLA folds this transpose into the product and sends it to a
            # routine half as fast as the one for row-major operands.
            transposed = lax.optimization_barrier(transposed)
        dpatches = dy @ _as_matrix(kernel).T
        return _add_patches(dpatches, images, kernel, stride), transposed @ dy

    images = _chunk(x, kernel, stride)
    dx, dkernel = lax.map(one, (images, dy.reshape(*images.shape[:2], *dy.shape[1:])))
    return dx.reshape(x.shape), dkernel.sum(0).reshape(kernel.shape)


_patch_conv.defvjp(_patch_conv_forward, _patch_conv_backward)


def _chunk(x: Array, kernel: Array, stride: int) -> Array:
    """[B, ...] to [B / b, b, ...], b the largest whose patches fit the limit."""
    rows, columns = _valid_size(x, kernel, stride)
    patch_bytes = rows * columns * _as_matrix(kernel).shape[0] * x.dtype.itemsize
    limit = _PATCH_BYTES_CPU if _on_cpu() else _PATCH_BYTES
    return winograd.chunked(x, patch_bytes, limit)


def _valid_size(x: Array, kernel: Array, stride: int) -> tuple[int, int]:
    height, width = (x.shape[i + 1] - kernel.shape[i] for i in range(2))
    return height // stride + 1, width // stride + 1


def _as_matrix(kernel: Array) -> Array:
    return kernel.reshape(-1, kernel.shape[-1])


def _shifts(x: Array, kernel: Array, stride: int) -> list[Array]:
    """What every place of the kernel sees: h * w arrays [b, rows, columns, C]."""
    rows, columns = (stride * (n - 1) + 1 for n in _valid_size(x, kernel, stride))
    return [
        x[:, i : i + rows : stride, j : j + columns : stride]
        for i in range(kernel.shape[0])
        for j in range(kernel.shape[1])
    ]


def _patches(x: Array, kernel: Array, stride: int) -> Array:
    """[b, H, W, C] to [b * rows * columns, h * w * C], channels fastest."""
    shifts = _shifts(x, kernel, stride)
    return jnp.concatenate(shifts, axis=-1).reshape(-1, _as_matrix(kernel).shape[0])


def _add_patches(patches: Array, x: Array, kernel: Array, stride: int) -> Array:
    """The transpose of `_patches`: every patch added where it was cut out of `x`."""
    height, width, channels = kernel.shape[:3]
    rows, columns = _valid_size(x, kernel, stride)
    patches = patches.reshape(-1, rows, columns, height, width, channels)
    zero = jnp.zeros((), patches.dtype)

    def margin(axis: int, before: int, count: int) -> tuple[int, int, int]:
        after = x.shape[axis] - before - stride * (count - 1) - 1
        return before, after, stride - 1

    total = zero
    for i in range(height):
        for j in range(width):
            margins = (0, 0, 0), margin(1, i, rows), margin(2, j, columns), (0, 0, 0)
            total += lax.pad(patches[:, :, :, i, j], zero, margins)
    return total


# ---- pooling as a reduction of a reshaped array ----


@jax.custom_vjp
def _max_of_windows(x: Array) -> Array:
    """[B, H', rows, W', columns, C] to [B, H', W', C]."""
    return x.max((2, 4))


def _max_of_windows_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    x, y = saved
    taken = jnp.zeros(y.shape, bool)
    by_row = []
    for i in range(x.shape[2]):
        in_row = []
        for j in range(x.shape[4]):
            first = (x[:, :, i, :, j] == y) & ~taken
            taken |= first
            in_row.append(jnp.where(first, dy, 0))
        by_row.append(jnp.stack(in_row, 3))
    return (jnp.stack(by_row, 2),)


def _max_of_windows_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    y = _max_of_windows(x)
    return y, (x, y)


_max_of_windows.defvjp(_max_of_windows_forward, _max_of_windows_backward)
