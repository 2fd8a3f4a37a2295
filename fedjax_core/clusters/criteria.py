"""Whether clusters should be split, from one round's updates of their members."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_core.clusters.bipartition import Cut, bipartition
from fedjax_core.clusters.members import by_cluster, cluster_means
from fedjax_core.clusters.similarity import row_norms, similarity
from fedjax_core.clusters.theory import alpha_threshold
from fedjax_core.types import PyTree


class Inspection(NamedTuple):
    """What the updates of a round say of K clusters.

    The norm of a mean falls to 0 at a stationary point of the cluster, the largest of
    a member only where the members agree; that is 0 without members.
    """

    similarity: jax.Array  # [C, C], cosines of the updates
    cut: Cut  # the best one of each
    mean_norm: jax.Array  # [K], of the cluster's mean update
    max_norm: jax.Array  # [K], the largest of a member's update


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
    means = cluster_means(updates, cluster, weights, num_clusters)
    sizes = by_cluster(row_norms(updates), cluster, num_clusters, jax.ops.segment_max)
    cut = bipartition(S, cluster, num_clusters)
    return Inspection(S, cut, row_norms(means), jnp.maximum(sizes, 0))


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
    apart = (seen.cut.cross < alpha_threshold(gamma_max)) & (seen.max_norm >= eps2)
    return apart if eps1 is None else apart & (seen.mean_norm < eps1)
