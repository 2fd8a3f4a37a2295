r"""Aggregation rules that tolerate some arbitrary values.

A rule ``rule(values, weights)`` makes one value of K: `values` is a pytree of leaves
``[K, ...]``, and a value of weight 0 is not there. The server's reductions apply a rule
to the updates of a cohort, a node of a network to its neighbours' messages
(``network.aggregate_by(rule)``, which makes FedRelax, say, robust). The number b of
suspected values is bound by `functools.partial`, or follows the number of neighbours:
``lambda v, w: trim_extremes(v, w, suspects_among(w, 0.2))``.

Order statistics are taken entry by entry. With at most b arbitrary values among K and
2b < K, `clip_extremes` and `trim_extremes` stay between the smallest and the largest of
the others. NaN counts as a largest value.

A known weight that is negative or not finite raises ValueError.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import along_rows, flat_rows, is_known, norms, wide
from fedjax_core.reduce import Cast, Reduction, stack
from fedjax_core.robust.median import weiszfeld
from fedjax_core.types import PyTree

Rule = Callable[[PyTree, jax.Array], PyTree]


def average(values: PyTree, weights: jax.Array) -> PyTree:
    r"""The weighted mean :math:`\sum_j A_j w_j / \sum_j A_j`; zero of nothing.

    Of leaves ``[K, ...]`` and weights ``[K]``, >= 0; bool weighs equally what is True.
    """
    check.each_non_negative("value", weights=weights)
    return _weighted_mean(values, jnp.asarray(weights))


def clip_extremes(values: PyTree, weights: jax.Array, b: Any) -> PyTree:
    r"""The weighted mean of values clipped to the range of all but 2b of them.

    .. math::

      \frac{1}{\sum_j A_j} \sum_j A_j \tau(w_j), \qquad
      \tau(w) = \min(\max(w, \tau_l), \tau_u)

    with :math:`\tau_l` the (b+1)-th smallest and :math:`\tau_u` the (b+1)-th largest.
    The lowest branch of eq. (188) is printed as a; it is :math:`\tau_l`. Jung, eq.
    (187) and (188).

    Args:
      values: leaves ``[K, ...]``.
      weights: ``[K]``, >= 0; bool weighs equally what is True.
      b: suspected values, an int or a traced ``[]``; ``2 b`` must be less than the
        number of values. Where it is not and only the device knows, the result is NaN.

    Raises:
      ValueError: b is negative or 2b >= K.
      TypeError: b is no int.
    """
    weights, present, n = _present(weights, b)
    ends = jnp.clip(jnp.stack([b, n - 1 - b]), 0, weights.shape[0] - 1)

    def one(x: jax.Array) -> jax.Array:
        x = _with_largest(x, present)
        low, high = jnp.sort(x, axis=0)[ends]
        return jnp.clip(x, low[None], high[None])

    clipped = _weighted_mean(jax.tree.map(one, values), weights)
    return _refuse(clipped, n, b)


def trim_extremes(values: PyTree, weights: jax.Array, b: Any) -> PyTree:
    r"""The weighted mean without the b smallest and the b largest values.

    Weights are renormalised over what is kept, :math:`\sum A_j w_j / \sum A_j`. The
    factor :math:`|N| / |kept|` of eq. (189) is a mean only for equal weights; with
    others the result can leave the range of the values. Jung, eq. (187) and (189).

    Args:
      values: as for `clip_extremes`, and the same errors.
      weights: as there; bool is faster. Of equal values with different weights, those
        at the front count as the smaller.
      b: as there.
    """
    weights, present, n = _present(weights, b)
    rank = jnp.arange(weights.shape[0])
    kept = (rank >= b) & (rank < n - b)

    def one(x: jax.Array) -> jax.Array:
        # What is not there sorts last, past every rank that is kept.
        x = _with_largest(x, present)
        keep = along_rows(kept, x)
        if weights.dtype == bool:
            ordered = jnp.where(keep, jnp.sort(x, axis=0), 0.0)
            return ordered.sum(0) / jnp.maximum(n - 2 * b, 1)
        w = jnp.broadcast_to(along_rows(weights, x).astype(x.dtype), x.shape)
        x, w = lax.sort((x, w), dimension=0, num_keys=1)
        w = jnp.where(keep, w, 0)
        total = w.sum(0)
        return jnp.where(keep, w * x, 0).sum(0) / jnp.where(total > 0, total, 1)

    return _refuse(jax.tree.map(one, values), n, b)


def suspects_among(weights: ArrayLike, fraction: float) -> jax.Array:
    r"""How many of the values to suspect, :math:`\lfloor \beta K \rfloor`; ``[]`` int.

    K counts the weights > 0, beta in [0, 0.5) is the share of attacked values. At least
    one value in the middle is always left.
    """
    check.fraction(0.5, fraction=fraction)
    weights = jnp.asarray(weights)
    n = (weights > 0).sum()
    # In float64, for every n there can be.
    suspects = _count(fraction, np.arange(weights.shape[0] + 1))
    return jnp.asarray(suspects, n.dtype)[n]


def _count(fraction: float, counts: ArrayLike) -> np.ndarray:
    counts = np.asarray(counts)
    # The factor keeps 0.29 * 100 at 29 where floating point would give 28.
    suspects = np.floor(fraction * counts * (1 + 1e-12)).astype(np.int32)
    return np.minimum(suspects, np.maximum(counts - 1, 0) // 2)


def trimmed_mean(trim_fraction: float) -> Reduction:
    r"""Coordinate-wise trimmed mean.

    Of the n valid clients' values of a coordinate, the :math:`b = \lfloor \beta n
    \rfloor` smallest and the b largest are dropped and the rest averaged with equal
    weights; zero when no client counts. A share that drops nobody protects from nobody:
    with :math:`0 < \beta < 1 / n` the mean is NaN, which ends the run in that round.
    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", ICML 2018, Definition 2.

    Args:
      trim_fraction: beta, in [0, 0.5).

    Raises:
      ValueError: beta is out of range or, when a round is traced, too small for any
        cohort that fits.
    """
    check.fraction(0.5, trim_fraction=trim_fraction)
    return _by_share(trim_extremes, "trim", trim_fraction)


def clipped_mean(clip_fraction: float) -> Reduction:
    r"""Coordinate-wise mean of values clipped to their inner order statistics.

    As `trimmed_mean`, with :math:`\beta` in [0, 0.5), but the :math:`b = \lfloor \beta
    n \rfloor` smallest values are raised to the next one and the b largest lowered to
    theirs (the winsorised mean; Jung, (187) and (188)).
    """
    check.fraction(0.5, clip_fraction=clip_fraction)
    return _by_share(clip_extremes, "clip", clip_fraction)


def _by_share(rule: Callable[..., PyTree], verb: str, fraction: float) -> Reduction:
    """The rule with b for a share of the valid clients; `verb` is "trim" or "clip"."""

    def finish(updates: PyTree, cast: Cast) -> PyTree:
        slots = cast.valid.shape[0]
        if fraction and not _count(fraction, slots):
            raise ValueError(
                f"{verb}_fraction must be 0 or at least 1 / {slots}, a cohort's size, "
                f"to {verb} anybody, got {fraction}."
            )
        b = suspects_among(cast.valid, fraction)
        nobody = (b == 0) & cast.valid.any() & (fraction > 0)
        # The rules turn a b that is out of range into NaN.
        return rule(updates, cast.valid, jnp.where(nobody, -1, b))

    name = f"{verb}{verb[-1]}ed_mean({verb}_fraction={fraction})"
    return stack(finish)._replace(name=name)


def geometric_median(iterations: int = 100) -> Reduction:
    r"""The update :math:`\arg\min_u \sum_i \lVert u_i - u \rVert_2` of valid clients.

    The norm is over all coordinates of all leaves, and clients count equally. Zero when
    no client counts. By so many iterations of `weiszfeld`; Jung, eq. (175).
    """
    check.positive_int(iterations=iterations)
    rule = stack(lambda updates, cast: weiszfeld(updates, cast.valid, iterations))
    return rule._replace(name=f"geometric_median({iterations})")


def coordinate_median() -> Reduction:
    """The median of valid clients in every coordinate, of two in the middle their mean.

    Zero when no client counts. Yin et al., "Byzantine-Robust Distributed Learning:
    Towards Optimal Statistical Rates", ICML 2018, Definition 1.
    """

    def finish(updates: PyTree, cast: Cast) -> PyTree:
        n = cast.valid.sum()

        def one(x: jax.Array) -> jax.Array:
            ordered = jnp.sort(_with_largest(x, cast.valid), axis=0)
            low, high = (ordered[jnp.maximum(k, 0)] for k in ((n - 1) // 2, n // 2))
            return jnp.where(n > 0, low + (high - low) / 2, 0)

        return jax.tree.map(one, updates)

    return stack(finish)._replace(name="coordinate_median")


def krum(num_attackers: int) -> Reduction:
    """The update that is closest to most others.

    Of n valid clients with f >= 0 attackers among them, the one whose squared distances
    to its n - f - 2 nearest others have the smallest sum. What is proven needs n > 2 f
    + 2. It is NaN, which ends the run, in a round with fewer than f + 3; zero when no
    client counts.

    References:
      Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient
      Descent", NeurIPS 2017, section 4.
    """
    check.non_negative(num_attackers=num_attackers)

    def finish(updates: PyTree, cast: Cast) -> PyTree:
        flat = [wide(flat_rows(x)) for x in jax.tree.leaves(updates)]
        valid, n = cast.valid, cast.valid.sum()

        def score(i: jax.Array) -> jax.Array:
            square = sum(jnp.square(norms(x - x[i][None])) for x in flat)
            others = valid & (jnp.arange(len(valid)) != i)
            nearest = jnp.sort(jnp.where(others, square, jnp.inf))
            near = jnp.arange(len(valid)) < n - num_attackers - 2
            return jnp.where(near, nearest, 0).sum()

        scores = lax.map(score, jnp.arange(len(valid)))
        best = jnp.where(valid, scores, jnp.inf).argmin()
        few = (n > 0) & (n < num_attackers + 3)
        return jax.tree.map(lambda x: jnp.where(few, jnp.nan, wide(x)[best]), updates)

    return stack(finish)._replace(name=f"krum({num_attackers})")


def require_int(b: Any) -> None:
    """Raises TypeError unless b is made of ints."""
    if not jnp.issubdtype(jnp.result_type(b), jnp.integer):
        raise TypeError(f"b must be an int, got {b!r}.")


def _present(weights: jax.Array, b: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checked weights ``[K]``, which values are there and how many."""
    check.each_non_negative("value", weights=weights)
    require_int(b)
    weights = jnp.asarray(weights)
    slots = weights.shape[0]
    if is_known(b) and not 0 <= b < slots - b:
        raise ValueError(
            f"b must be >= 0 and 2b less than the number of values, {slots}, got {b}."
        )
    return weights, weights > 0, (weights > 0).sum()


def _weighted_mean(values: PyTree, weights: jax.Array) -> PyTree:
    def one(x: jax.Array) -> jax.Array:
        x = wide(x)
        w = along_rows(weights.astype(x.dtype), x)
        total = w.sum()
        # What is not there may hold anything, NaN included.
        terms = jnp.where(w > 0, w * x, 0)
        return terms.sum(0) / jnp.where(total > 0, total, 1)

    return jax.tree.map(one, values)


def _with_largest(x: jax.Array, present: jax.Array) -> jax.Array:
    x = wide(x)
    return jnp.where(along_rows(present, x) & ~jnp.isnan(x), x, jnp.inf)


def _refuse(result: PyTree, n: jax.Array, b: Any) -> PyTree:
    """NaN where b of n values leave nothing in the middle; loud, not wrong."""
    nothing = (n > 0) & ((b < 0) | (b >= n - b))
    return jax.tree.map(lambda x: jnp.where(nothing, jnp.nan, x), result)
