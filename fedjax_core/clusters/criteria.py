"""Whether clusters should be split, from one round's updates of their members."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_core.clusters.bipartition import bipartition
from fedjax_core.clusters.members import cluster_means
from fedjax_core.clusters.similarity import row_norms, similarity
from fedjax_core.clusters.theory import alpha_threshold
from fedjax_core.types import PyTree


class Inspection(NamedTuple):
    """What the updates of a round say of K clusters.

    Attributes:
      similarity: ``[C, C]``, cosines of the updates.
      part: ``[C]`` bool, who is in the second part of its cluster's best cut.
      cross: ``[K]``, the largest similarity across it, infinite for less than two.
      mean_norm: ``[K]``, of the cluster's mean update: it falls to 0 at a stationary
        point of the cluster.
      max_norm: ``[K]``, the largest norm of a member's update: it falls to 0 only
        where the members agree; 0 without members.
    """

    similarity: jax.Array
    part: jax.Array
    cross: jax.Array
    mean_norm: jax.Array
    max_norm: jax.Array


def inspect(
    updates: PyTree, cluster: jax.Array, weights: jax.Array, num_clusters: int
) -> Inspection:
    """Measures the clusters of a round.

    Args:
      updates: leaves ``[C, ...]``.
      cluster: ``[C]`` ints in -1..K-1, -1 for none.
      weights: ``[C]``, of the mean updates.
      num_clusters: K.
    """
    S = similarity(updates)
    cut = bipartition(S, cluster, num_clusters)
    means = cluster_means(updates, cluster, weights, num_clusters)
    largest = by_cluster(row_norms(updates), cluster, num_clusters, largest=True)
    return Inspection(S, cut.part, cut.cross, row_norms(means), jnp.maximum(largest, 0))


def worth_splitting(
    seen: Inspection, eps1: float | None, eps2: float, gamma_max: float
) -> jax.Array:
    r"""Which clusters meet all criteria of a split, ``[K]`` bool.

    :math:`\lVert \Delta_c \rVert < \varepsilon_1`, unless that is None;
    :math:`\max_i \lVert u_i \rVert \ge \varepsilon_2`; and
    :math:`\alpha_{cross}^{max} < 1 - 2 \gamma_{max}^2`, which is
    :math:`\gamma_{max} < \sqrt{(1 - \alpha_{cross}^{max}) / 2}`.

    References:
      Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from
      Distributed Data", TU Berlin 2021, section on when to split.
    """
    apart = seen.cross < alpha_threshold(gamma_max)
    apart &= seen.max_norm >= eps2
    return apart if eps1 is None else apart & (seen.mean_norm < eps1)


def by_cluster(
    values: jax.Array, cluster: jax.Array, num_clusters: int, *, largest: bool = False
) -> jax.Array:
    """Sums, or the largest, of `values` ``[C]`` by cluster ``[C]``; ``[K]``.

    Those of cluster -1 are left out. Bools are counted.
    """
    values = values.astype(jnp.int32) if values.dtype == bool else values
    place = jnp.where(cluster < 0, num_clusters, cluster)
    reduce = jax.ops.segment_max if largest else jax.ops.segment_sum
    return reduce(values, place, num_clusters + 1)[:num_clusters]
