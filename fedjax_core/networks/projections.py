"""Projections onto the sets that constrain parameters.

A network's parameters are leaves ``[n, ...]``; the means act on all nodes. The ball and
the box are for one node's parameters, `jax.vmap` them for a constraint at every node.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 3.2 (consensus), 4.5
  (projected gradient steps) and 5.4.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, by_row, wide
from fedjax_core.networks.graph import (
    check_ints,
    check_labels,
    check_shapes,
    unless_cut,
)
from fedjax_core.types import PyTree


def consensus(W: PyTree, weight: ArrayLike | None = None) -> PyTree:
    r"""Replaces every row of W ``[n, ...]`` by the mean row, :math:`P_S W`.

    Nodes count their weight ``[n]``, >= 0, in the mean, by default alike; it is then
    the projection in the norm that weights the nodes so. A row of weight 0 may hold
    NaN. Where all are 0 the rows stay.

    Raises:
      ValueError: a negative or non-finite weight, or one of another length.
    """
    if weight is None:
        return jax.tree.map(
            lambda w: jnp.broadcast_to(w.mean(0, keepdims=True), w.shape), W
        )
    n = jax.tree.leaves(W)[0].shape[0]
    if np.shape(weight) != (n,):
        raise ValueError(
            f"weight must have one entry per node, shape ({n},), got shape "
            f"{np.shape(weight)}."
        )
    check.each_non_negative("node", weight=weight)
    weight = jnp.asarray(weight)

    def project(w):
        by_node = by_row(weight, w)
        total = by_node.sum()
        rows = by_node * unless_cut(weight, w)
        mean = rows.sum(0, keepdims=True) / jnp.where(total > 0, total, 1)
        return jnp.where(total > 0, mean, w)

    return jax.tree.map(project, W)


def deviation(W: PyTree) -> PyTree:
    """W - P_S W, what is left of every row without the mean row (Jung, (45))."""
    return jax.tree.map(lambda w: w - w.mean(0, keepdims=True), W)


def check_clusters(cluster: ArrayLike, n: int, num_clusters: int) -> None:
    """Refuses what is no assignment ``[n]`` of ints in 0..num_clusters-1.

    Raises:
      ValueError: another length or a cluster out of range.
      TypeError: clusters that are not ints.
    """
    check.positive_int(num_clusters=num_clusters)
    check_shapes(f"({n},)", cluster=cluster)
    if isinstance(cluster, Tracer):
        return
    check_ints(cluster=np.asarray(cluster))
    check_labels("node", num_clusters, cluster=cluster)


def ball(w: PyTree, radius: float, centre: PyTree | None = None) -> PyTree:
    """The nearest point of a Euclidean ball over all leaves together.

    A point of the ball is returned as it is, and NaN for one that is not finite.

    The radius is >= 0, else a ValueError, the centre by default the origin.
    """
    check.non_negative(radius=radius)
    w = jax.tree.map(as_float, w)
    u = jax.tree.map(wide, w)
    if centre is not None:
        u = jax.tree.map(lambda x, c: x - wide(as_float(c)), u, centre)
    # Relative to the largest entry no square overflows.
    leaves = jax.tree.leaves(u)
    most = jnp.stack([jnp.abs(x).max(initial=0) for x in leaves]).max()
    unit = jax.lax.stop_gradient(jnp.where(most > 0, most, 1))
    u = jax.tree.map(lambda x: x / unit.astype(x.dtype), u)
    square = jnp.stack([jnp.square(x).sum() for x in jax.tree.leaves(u)]).sum()
    outside = ~(square <= (radius / unit) ** 2)  # NaN is not inside
    # The square root has no slope at 0.
    scale = jnp.where(outside, radius / jnp.sqrt(jnp.where(outside, square, 1)), 1)

    def shorten(x, u, c=0.0):
        moved = c + scale.astype(u.dtype) * u
        return jnp.where(outside, moved.astype(x.dtype), x)

    return jax.tree.map(shorten, w, u, *(() if centre is None else (centre,)))


def box(w: PyTree, low: ArrayLike, high: ArrayLike) -> PyTree:
    """The nearest point with every parameter in [low, high]; ints become floats.

    Bounds are numbers, or arrays that broadcast to every leaf, infinities included;
    low > high somewhere, an empty set, or NaN raises ValueError.
    """
    known = not isinstance(low, Tracer) and not isinstance(high, Tracer)
    if known and not np.all(np.asarray(low) <= np.asarray(high)):
        raise ValueError(f"low must be <= high, got low={low!r}, high={high!r}.")
    return jax.tree.map(
        lambda x: jnp.clip(x, jnp.asarray(low), jnp.asarray(high)).astype(x.dtype),
        jax.tree.map(as_float, w),
    )
