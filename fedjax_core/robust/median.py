r"""The geometric median :math:`\arg\min_w \sum_j A_j \lVert w_j - w \rVert_2`.

With h honest points within distance r of a centre and b < h arbitrary others, equally
weighted, it lies within :math:`r / \sqrt{1 - (b/h)^2}` of that centre. The mean has no
such bound.

A known weight that is negative or not finite raises ValueError. Jung is "Federated
Learning: From Theory to Practice".
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from fedjax_core import check
from fedjax_core.arrays import flat_rows, norms, wide
from fedjax_core.types import PyTree


def weiszfeld(values: PyTree, weights: jax.Array, iterations: int = 100) -> PyTree:
    """The weighted geometric median by Weiszfeld's iteration; Jung, eq. (175).

    It starts at the median of every coordinate, steps off points it meets unless they
    are optimal (Vardi and Zhang), does not slow down near points, and ends at the
    nearest one if that is the answer. For one coordinate it is the median.
    `subgradient_residual` says how good it is.

    Args:
      values: leaves ``[K, ...]``; the norm is over all of them together. A value that
        is not finite is left out.
      weights: ``[K]``, >= 0; bool weighs equally what is True.
      iterations: fixed; some ten are enough in most cases.

    Returns:
      Leaves ``[...]`` in float32 or wider; zero of nothing.

    References:
      Vardi and Zhang, "The multivariate L1-median and associated data depth", PNAS
      2000, eq. 2.6.
    """
    check.positive_int(iterations=iterations)
    x, w, restore = _usable(values, weights)
    if not len(x):
        return restore(jnp.zeros(x.shape[1], x.dtype))

    def step(_, y):
        force, held, stiffness = _pull(x, w, y)
        size = norms(force)
        # A point under y holds on with its weight.
        move = jnp.where(size > held, 1 - held / jnp.where(size > 0, size, 1), 0)
        y = y + move * force / jnp.where(stiffness > 0, stiffness, 1)
        other = _along_the_ray(x, w, y)
        return jnp.where(_gain(x, w, y, other) > 0, other, y)

    y = lax.fori_loop(0, iterations, step, _coordinate_median(x, w))
    nearest = x[_nearest(x, w, y)]
    slack = 4 * jnp.finfo(x.dtype).eps * w.sum()
    snap = (_excess(x, w, nearest) <= slack) & (_excess(x, w, y) > slack)
    return restore(jnp.where(snap, nearest, y))


def subgradient_residual(
    values: PyTree, weights: jax.Array, point: PyTree
) -> jax.Array:
    r"""How far `point` is from optimal: the smallest sub-gradient over the weight.

    .. math::

      \min_{\lVert u \rVert \le 1} \Bigl\lVert
      \sum_{w_j \ne w} A_j \frac{w_j - w}{\lVert w_j - w \rVert}
      + \sum_{w_j = w} A_j u \Bigr\rVert \Big/ \sum_j A_j

    Zero exactly at a geometric median, at most 1 anywhere. The point has leaves
    ``[...]``, values and weights are those of `weiszfeld`. The vectors printed in Jung,
    eq. (176), are minus the sub-gradients, which changes no sum that is zero.
    """
    x, w, _ = _usable(values, weights)
    excess = _excess(x, w, ravel_pytree(point)[0].astype(x.dtype))
    total = w.sum()
    return jnp.maximum(excess, 0) / jnp.where(total > 0, total, 1)


def _usable(
    values: PyTree, weights: jax.Array
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], PyTree]]:
    """Values ``[K, d]``, 0 without weight, their weights, and the way back from [d]."""
    check.each_non_negative("value", weights=weights)
    values = jax.tree.map(wide, values)
    first = jax.tree.map(lambda v: jnp.zeros(v.shape[1:], v.dtype), values)
    x = jnp.concatenate([flat_rows(v) for v in jax.tree.leaves(values)], axis=1)
    w = jnp.asarray(weights).astype(x.dtype)
    w = jnp.where(jnp.isfinite(x).all(1), w, 0)
    return jnp.where(w[:, None] > 0, x, 0), w, ravel_pytree(first)[1]


def _pull(
    x: jax.Array, w: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unit forces towards the points: their sum, the weight under y, sum A / dist."""
    away = x - y[None]
    distance = norms(away)
    # Closer than rounding can tell is there.
    rounding = 4 * jnp.finfo(x.dtype).eps * jnp.abs(x).max(1)
    here = jnp.abs(away).max(1) <= rounding
    c = jnp.where(here, 0, w / jnp.where(here, 1, distance))
    return (c[:, None] * away).sum(0), jnp.where(here, w, 0).sum(), c.sum()


def _excess(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """By how much the forces on y are stronger than what holds it there."""
    force, held, _ = _pull(x, w, y)
    return norms(force) - held


def _gain(x: jax.Array, w: jax.Array, y: jax.Array, other: jax.Array) -> jax.Array:
    """By how much the sum of distances is smaller at `other` than at y."""
    # Point by point, lest a point far away swallows the difference.
    gain = norms(x - y[None]) - norms(x - other[None])
    return (w * jnp.where(jnp.isfinite(gain), gain, 0)).sum()


def _nearest(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.argmin(jnp.where(w > 0, norms(x - y[None]), jnp.inf))


def _along_the_ray(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """A Newton step on the ray from the nearest point through y.

    Close to a point Weiszfeld's steps become tiny, as its stiffness grows without
    bound. It is all across the ray, though: along the ray the point pulls steadily.
    """
    origin = x[_nearest(x, w, y)]
    length = norms(y - origin)
    ray = (y - origin) / jnp.where(length > 0, length, 1)
    away = x - y[None]
    distance = norms(away)
    unit = away / jnp.where(distance > 0, distance, 1)[:, None]
    along = unit @ ray
    bend = (w * (1 - along**2) / jnp.where(distance > 0, distance, 1)).sum()
    step = (w * along).sum() / jnp.where(bend > 0, bend, 1)
    return origin + jnp.clip(length + step, 0.1 * length, 10 * length) * ray


def _coordinate_median(x: jax.Array, w: jax.Array) -> jax.Array:
    last = x.shape[0] - 1
    present = (w > 0)[:, None]
    w = jnp.broadcast_to(w[:, None], x.shape)
    x, w = lax.sort((jnp.where(present, x, jnp.inf), w), dimension=0, num_keys=1)
    below, half = jnp.cumsum(w, axis=0), 0.5 * w.sum(0, keepdims=True)
    middle = jnp.zeros((), x.dtype)
    for rank in ((below < half).sum(0), (below <= half).sum(0)):
        at = jnp.minimum(rank, last)[None]
        middle += 0.5 * jnp.take_along_axis(x, at, axis=0)[0]
    return jnp.where(half[0] > 0, middle, 0)
