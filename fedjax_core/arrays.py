"""Operations on arrays for every room: along rows, safe norms, known values.

Rows are those of a leading axis of clients or nodes, ``[n, ...]``. A value is known
unless jax traces it; only known values can be looked at from Python.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core.types import PyTree


def as_float(x: ArrayLike) -> jax.Array:
    """An array of floats, known if it was; ints become the default float type."""
    # Inside jit NumPy's arrays would become traced.
    known = is_known(*jax.tree.leaves(x))
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
        if type(x) is np.ndarray and x.dtype.kind in "biufc":
            floats = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else float
            return from_host(x, jax.dtypes.canonicalize_dtype(floats))
        x = jnp.asarray(x)
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return x if inexact else x.astype(jnp.result_type(float))


def from_host(x: ArrayLike, dtype: Any) -> jax.Array:
    """A copy of what is on the host, in a dtype that JAX has.

    Cast there: ``jnp.asarray`` would compile a program for each shape.
    """
    return jnp.asarray(np.array(x, dtype), dtype)


def check_finite(**arrays: ArrayLike) -> None:
    """Raises ValueError if a known array has a NaN or an infinity."""
    for name, x in arrays.items():
        if not isinstance(x, Tracer) and not np.isfinite(np.asarray(x)).all():
            raise ValueError(f"{name} must be finite, got NaN or infinity.")


def along_rows(by_row: jax.Array, like: jax.Array) -> jax.Array:
    """One number per row, ``[n]``, shaped to multiply `like`, ``[n, ...]``."""
    return by_row.reshape(by_row.shape + (1,) * (like.ndim - 1))


def keep_rows(active: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """The new rows where `active` ``[n]`` holds and the old ones elsewhere, by bit."""
    return jax.tree.map(lambda a, b: jnp.where(along_rows(active, a), a, b), new, old)


def flat_rows(x: jax.Array) -> jax.Array:
    """Every row as a vector, ``[n, ...]`` to ``[n, k]``; n may be 0."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))  # -1 fails without rows


def as_mask(name: str, value: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array:
    """A bool array of the given shape; raises ValueError for a list of indices.

    None is all True.
    """
    if type(value) is np.ndarray and value.dtype == bool:
        value = from_host(value, bool)
    mask = jnp.ones(shape, bool) if value is None else jnp.asarray(value)
    if mask.dtype != bool or mask.shape != shape:
        raise ValueError(
            f"{name} must be bool of shape {shape}, got {mask.dtype} {mask.shape}."
        )
    return mask


def is_known(*arrays: Any) -> bool:
    """Whether no array is traced."""
    return not any(isinstance(x, Tracer) for x in arrays)


@contextlib.contextmanager
def wide_if_known(*arrays: Any) -> Iterator[Any]:
    """A context to compute in, and the dtype: float64 unless an array is traced."""
    if not is_known(*arrays):
        yield jnp.result_type(*arrays)
        return
    # Inside jit too, where what is known would become traced.
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        yield jnp.dtype(jnp.float64)


def norms(x: jax.Array) -> jax.Array:
    """L2 norms over the last axis, also of entries whose squares overflow."""
    # Relative to the largest entry, squares stay in range.
    unit = divisor(jnp.abs(x).max(axis=-1, keepdims=True))
    return unit[..., 0] * jnp.sqrt(jnp.square(x / unit).sum(-1))


def divisor(size: jax.Array) -> jax.Array:
    """Sizes >= 0 to divide by: neither 0 nor so large that 1 / size is flushed to 0."""
    limits = jnp.finfo(size.dtype)
    return jnp.clip(size, limits.tiny, limits.max / 64)


def by_row(value: ArrayLike, like: jax.Array) -> jax.Array:
    """One number, or one per row, shaped and typed to multiply rows of `like`.

    Raises:
      ValueError: several numbers, but not one per row.
      TypeError: `like` holds ints, to which no rate can be rounded.
    """
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        raise TypeError(f"parameters must be floats, got dtype {like.dtype}.")
    value = jnp.asarray(value, like.dtype)
    if value.shape not in ((), like.shape[:1]):
        raise ValueError(
            f"rows of shape {like.shape} need one number or one each, shape "
            f"{like.shape[:1]}, got shape {value.shape}."
        )
    return along_rows(value, like) if value.ndim else value


def wide(x: jax.Array) -> jax.Array:
    """At least float32, to compute in: halves lose squares and counts."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def numpy_of(x: Any) -> Any:
    """NumPy for its own arrays, which stay on the host, and jax's for all others."""
    return np if isinstance(x, np.ndarray) else jnp


def name_of(path: Any) -> str:
    """The path of a parameter as text, "Dense_0/kernel", of Flax and of NNX alike."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def num_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a pytree, or of what has their shapes and dtypes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def repeat_rows(one: PyTree, num_rows: int) -> PyTree:
    """The same row for everyone, leaves ``[num_rows, ...]``."""
    return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], num_rows, 0), one)
