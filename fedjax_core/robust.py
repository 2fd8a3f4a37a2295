"""Aggregation rules that tolerate some arbitrary updates."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core.reduce import Cast, Reduction, stack
from fedjax_core.types import PyTree


def trimmed_mean(trim_fraction: float) -> Reduction:
    r"""Coordinate-wise trimmed mean.

    Of the n valid clients' values of a coordinate, the :math:`b = \lfloor \beta n
    \rfloor` smallest and the b largest are dropped and the rest averaged with equal
    weights. With :math:`\beta = 0` this is the uniform mean. Zero when no client
    counts.

    Args:
      trim_fraction: beta, in [0, 0.5).

    References:
      Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
      Rates", ICML 2018, Definition 2.
    """
    if not 0 <= trim_fraction < 0.5:
        raise ValueError(f"trim_fraction must be in [0, 0.5), got {trim_fraction!r}.")

    def finish(updates: PyTree, cast: Cast) -> PyTree:
        slots = cast.valid.shape[0]
        # In float64, for every n there can be. The factor keeps 0.29 * 100 at 29 where
        # floating point would give 28; somebody is always left.
        counts = np.arange(slots + 1)
        trims = np.floor(trim_fraction * counts * (1 + 1e-12)).astype(np.int32)
        trims = np.minimum(trims, np.maximum(counts - 1, 0) // 2)
        n = cast.valid.sum()
        b = jnp.asarray(trims, n.dtype)[n]
        rank = jnp.arange(slots)
        kept = (rank >= b) & (rank < n - b)

        def one(u: jax.Array) -> jax.Array:
            shape = (-1, *[1] * (u.ndim - 1))
            u = u.astype(jnp.promote_types(u.dtype, jnp.float32))
            # Invalid clients sort last, past every rank that is kept.
            ordered = jnp.sort(jnp.where(cast.valid.reshape(shape), u, jnp.inf), axis=0)
            ordered = jnp.where(kept.reshape(shape), ordered, 0.0)
            return ordered.sum(0) / jnp.maximum(n - 2 * b, 1)

        return jax.tree.map(one, updates)

    return stack(finish)._replace(name=f"trimmed_mean({trim_fraction})")
