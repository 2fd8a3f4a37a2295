"""The best way to cut clusters in two, and how well clusters are separated."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import is_known
from fedjax_core.clusters.members import by_cluster

_APART = -2.0  # less than any cosine: no edge between clusters


class Cut(NamedTuple):
    """Every cluster cut in two.

    Attributes:
      part: ``[M]`` bool, who is in the second part; the first holds the member that
        comes first.
      cross: ``[K]``, the largest similarity across the cut, alpha_cross^max; infinite
        for a cluster of less than two.
    """

    part: jax.Array
    cross: jax.Array


def bipartition(
    similarity: ArrayLike, cluster: ArrayLike | None = None, num_clusters: int = 1
) -> Cut:
    r"""The bi-partition of every cluster that minimises the similarity across.

    .. math::

      (c_1, c_2) = \arg\min_{c_1 \cup c_2 = c} \max_{i \in c_1, j \in c_2} S_{ij}

    It is found by removing the weakest edge of the cluster's maximum spanning tree,
    which is where merging the most similar clients first stops at two components
    (single linkage). One pass of Prim's algorithm, M steps of O(M), finds the trees of
    all clusters.

    Args:
      similarity: ``[M, M]``, S, symmetric, in [-1, 1].
      cluster: ``[M]`` ints in -1..K-1, whose member each is; -1 is in none. None puts
        all into one.
      num_clusters: K.

    Raises:
      ValueError: where known, a matrix that is not square, of less than two, not
        finite, out of range or not symmetric; clusters of another shape or range.

    References:
      Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from
      Distributed Data", TU Berlin 2021, (6.31) and Algorithm 9.
    """
    S, cluster = _checked(similarity, cluster, num_clusters)
    M = len(cluster)
    everyone = jnp.arange(M)
    S = jnp.where(_together(cluster), (S + S.T) / 2, _APART)

    def join(_, carry):
        best, parent, weight, left = carry
        j = jnp.argmax(jnp.where(left, best, 2 * _APART))
        this, edge = everyone == j, best[j] > _APART  # without one j starts a tree
        weight = jnp.where(this & edge, best[j], weight)
        parent = jnp.where(this & ~edge, j, parent)
        left = left & ~this
        closer = left & (S[j] > best)
        return jnp.where(closer, S[j], best), jnp.where(closer, j, parent), weight, left

    alone = jnp.full(M, _APART, S.dtype), everyone, jnp.full(M, jnp.inf, S.dtype)
    _, parent, weight, _ = lax.fori_loop(0, M, join, (*alone, jnp.ones(M, bool)))
    least = jax.ops.segment_min
    cross = by_cluster(weight, cluster, num_clusters, least)
    weakest = jnp.where(jnp.isfinite(weight) & (weight == cross[cluster]), everyone, M)
    part = everyone == by_cluster(weakest, cluster, num_clusters, least)[cluster]
    # Who descends from the cut: jumps twice as far up each time.
    for _ in range(M.bit_length()):
        part, parent = part | part[parent], parent[parent]
    return Cut(part, cross)


class Separation(NamedTuple):
    """How well clusters separate the distributions in them.

    Attributes:
      intra: ``[K]``, the smallest similarity of two clients of one distribution,
        alpha_intra^min; 1 where there are no two.
      cross: ``[K]``, alpha_cross^max, see `Cut`.
      gap: ``[K]``, their difference. Where it is > 0 the cut parts no two such clients.
    """

    intra: jax.Array
    cross: jax.Array
    gap: jax.Array


def separation(
    similarity: ArrayLike,
    truth: ArrayLike,
    cluster: ArrayLike | None = None,
    num_clusters: int = 1,
    *,
    cut: Cut | None = None,
) -> Separation:
    """Measures the separation gap where it is known who has which distribution.

    Args:
      similarity: ``[M, M]``, as for `bipartition`, whose errors are raised.
      truth: ``[M]``, the distribution of each client.
      cluster: see `bipartition`.
      num_clusters: K.
      cut: what `bipartition` makes of these, where that is known already.

    References:
      Sattler, 2021, Definition of g and Corollary 2.
    """
    cut = cut or bipartition(similarity, cluster, num_clusters)
    S, cluster = _checked(similarity, cluster, num_clusters)
    truth = jnp.asarray(truth)
    pairs = _together(cluster) & (truth[:, None] == truth[None, :])
    pairs &= ~jnp.eye(len(truth), dtype=bool)
    nearest = jnp.where(pairs, S, 1).min(1)
    intra = by_cluster(nearest, cluster, num_clusters, jax.ops.segment_min)
    intra = jnp.minimum(intra, 1)
    return Separation(intra, cut.cross, intra - cut.cross)


def _together(cluster: jax.Array) -> jax.Array:
    return (cluster[:, None] == cluster[None, :]) & (cluster >= 0)[:, None]


def _checked(
    similarity: ArrayLike, cluster: ArrayLike | None, num_clusters: int
) -> tuple[jax.Array, jax.Array]:
    check.positive_int(num_clusters=num_clusters)
    S = jnp.asarray(similarity)
    if S.ndim != 2 or S.shape[0] != S.shape[1] or len(S) < 2:
        raise ValueError(f"similarity must be [M, M] with M >= 2, got {S.shape}.")
    cluster = jnp.zeros(len(S), int) if cluster is None else jnp.asarray(cluster)
    if cluster.shape != S.shape[:1]:
        raise ValueError(f"cluster must have shape {S.shape[:1]}, got {cluster.shape}.")
    if is_known(S, cluster):
        known = np.asarray(S)
        if not (np.abs(known) <= 1 + 1e-5).all():
            raise ValueError("similarity must be finite and in [-1, 1].")
        error = np.abs(known - known.T).max()
        if error > 1e-5:
            raise ValueError(f"similarity must be symmetric, is off by {error:.3g}.")
        check.each_in_range(-1, num_clusters - 1, cluster=cluster)
    return S, cluster
