"""Convolution and pooling that run fast where the simulator runs.

XLA's CPU backend is an order of magnitude slower on `lax.conv_general_dilated` inside
a loop than outside, and a round is a loop. There a convolution is better written as
the matrix product of image patches with the kernel (im2col), and pooling as a
maximum over the axes of a reshaped array. Elsewhere both are XLA's own operations.
All images are [B, H, W, C], all kernels [h, w, C, F], all strides of a convolution 1.
"""

from typing import Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_core import check

Array: TypeAlias = jax.Array
Lowering: TypeAlias = Literal["auto", "patches", "lax"]
Padding: TypeAlias = Literal["VALID", "SAME"]

_LOWERINGS = ("auto", "patches", "lax")
_PADDINGS = ("VALID", "SAME")


def conv(
    x: Array, kernel: Array, padding: Padding = "VALID", lowering: Lowering = "auto"
) -> Array:
    """Cross-correlates images with a kernel at stride 1.

    Args:
      x: [B, H, W, C] float.
      kernel: [h, w, C, F] float.
      padding: "VALID" or "SAME" (zeros, the odd one after), as in `lax`.
      lowering: "patches", "lax", or "auto": patches on CPU, lax elsewhere.

    Returns:
      [B, H - h + 1, W - w + 1, F] for "VALID", [B, H, W, F] for "SAME".

    Raises:
      ValueError: the channels differ, or padding or lowering is unknown.
    """
    check.one_of(_PADDINGS, padding=padding)
    if x.shape[-1] != kernel.shape[-2]:
        raise ValueError(
            f"kernel must take the {x.shape[-1]} channels of x, "
            f"got kernel.shape {kernel.shape}."
        )
    if _resolve(lowering) == "lax":
        return lax.conv_general_dilated(
            x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    h, w, channels, features = kernel.shape
    if padding == "SAME":
        rows, columns = ((k - 1) // 2 for k in (h, w))
        x = jnp.pad(
            x, ((0, 0), (rows, h - 1 - rows), (columns, w - 1 - columns), (0, 0))
        )
    patches = _patches(x, h, w)
    return patches @ kernel.reshape(h * w * channels, features)


def max_pool(
    x: Array, window: tuple[int, int] = (2, 2), lowering: Lowering = "auto"
) -> Array:
    """Maximum over windows side by side; what does not fill a window is dropped.

    Args:
      x: [B, H, W, C] float.
      window: height and width of a window, and the stride.
      lowering: "patches" reshapes, which needs a window that divides the image;
        "lax" is `lax.reduce_window`; "auto" reshapes on CPU where possible.

    Returns:
      [B, H // height, W // width, C].

    Raises:
      ValueError: "patches" with a window that does not divide the image.
    """
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
    x = x.reshape(batch, height // rows, rows, width // columns, columns, channels)
    return x.max((2, 4))


class Conv(nn.Module):
    """A convolution with bias at stride 1; see `conv`.

    Attributes:
      features: F, channels of the output.
      kernel_size: height and width of the kernel.
      padding: "VALID" or "SAME".
      lowering: how it is computed; does not change the parameters.
      kernel_init: initialiser of the kernel [h, w, C, F]; the bias [F] starts at 0.
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    padding: Padding = "VALID"
    lowering: Lowering = "auto"
    kernel_init: nn.initializers.Initializer = nn.initializers.glorot_uniform()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [B, H, W, C] to [B, H', W', F]."""
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return conv(x, kernel, self.padding, self.lowering) + bias[None, None, None]


def _resolve(lowering: Lowering) -> Lowering:
    check.one_of(_LOWERINGS, lowering=lowering)
    if lowering == "auto":
        return "patches" if jax.default_backend() == "cpu" else "lax"
    return lowering


def _patches(x: Array, h: int, w: int) -> Array:
    """[B, H, W, C] to [B, H - h + 1, W - w + 1, h * w * C], channels fastest."""
    rows, columns = x.shape[1] - h + 1, x.shape[2] - w + 1
    shifts = [x[:, i : i + rows, j : j + columns] for i in range(h) for j in range(w)]
    return jnp.concatenate(shifts, axis=-1)
