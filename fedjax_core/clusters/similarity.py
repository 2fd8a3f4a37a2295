"""Cosine similarities of clients' updates, a block of coordinates at a time.

Rows are normalised and multiplied in float32 or wider at the highest precision, since
decisions compare cosines with numbers like 0.02. Beside the updates nothing larger than
a block ``[M, block]`` is made; those of a NumPy array, a memory-mapped file say, come
to the device block by block, so that it need not fit there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core import check
from fedjax_core.arrays import divisor, flat_rows, norms, wide
from fedjax_core.types import PyTree

_BLOCK = 2**14  # coordinates


def similarity(updates: PyTree, block: int = _BLOCK) -> jax.Array:
    r"""Cosines between all pairs of updates, ``[M, M]``.

    .. math::

      S_{ij} = \frac{\langle u_i, u_j \rangle}{\lVert u_i \rVert \lVert u_j \rVert}

    of leaves ``[M, ...]``, gradients or weight-updates, `block` coordinates at a time.
    It is 1 on the diagonal and 0 beside it for an update that is 0; ValueError without
    leaves. Sattler, Müller and Samek, "Clustered Federated Learning", IEEE TNNLS 2021.
    """
    unit = divisor(row_norms(updates, block))
    M = len(unit)

    def add(gram, x):
        x = x.astype(gram.dtype) / unit[:, None]
        return gram + jnp.matmul(x, x.T, precision="highest")

    gram = _over_blocks(add, jnp.zeros((M, M), unit.dtype), updates, block)
    # 1 on the diagonal, unless a norm is beyond the numbers that one can divide by.
    size = jnp.sqrt(jnp.diagonal(gram))
    size = jnp.where(size > 0, size, 1)
    S = jnp.clip(gram / size[:, None] / size[None], -1, 1)
    return jnp.where(jnp.eye(M, dtype=bool), 1, S)


def row_norms(updates: PyTree, block: int = _BLOCK) -> jax.Array:
    """L2 norms ``[M]`` over all leaves ``[M, ...]``, a block at a time."""
    check.positive_int(block=block)
    leaves = jax.tree.leaves(updates)
    if not leaves:
        raise ValueError("updates must have coordinates, got none.")
    dtypes = [jax.dtypes.canonicalize_dtype(x.dtype) for x in leaves]
    dtype = jnp.result_type(*dtypes, jnp.float32)

    def add(size, x):
        return jnp.hypot(size, norms(x).astype(dtype)) if x.shape[1] else size

    return _over_blocks(add, jnp.zeros(len(leaves[0]), dtype), updates, block)


def _over_blocks(
    add: Callable[[jax.Array, jax.Array], jax.Array],
    total: jax.Array,
    updates: PyTree,
    block: int,
) -> jax.Array:
    """Folds ``add(total, x)`` over blocks x ``[M, block]`` of coordinates."""
    on_device = jax.jit(add)
    for x in map(flat_rows, jax.tree.leaves(updates)):
        whole = x.shape[1] // block
        if isinstance(x, np.ndarray):
            for start in range(0, x.shape[1], block):
                part = jnp.asarray(np.ascontiguousarray(x[:, start : start + block]))
                # One at a time: blocks in flight would add up.
                total = on_device(total, wide(part)).block_until_ready()
            continue

        def one(k, total, x=x):
            part = lax.dynamic_slice_in_dim(x, k * block, block, 1)
            return add(total, wide(part))

        if whole:
            total = lax.fori_loop(0, whole, one, total)
        if x.shape[1] % block:
            total = add(total, wide(x[:, whole * block :]))
    return total
