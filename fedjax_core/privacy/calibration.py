r"""How much noise one release needs: Gaussian and Laplace, exactly and as in the book.

A release is f(D) plus independent noise. Its sensitivity is the most that f moves
between neighbouring datasets, in the Euclidean norm for normal noise and in the sum of
absolute values for Laplace noise. What neighbours are is a choice; Jung's default is
that one data point has other features or another label. For many releases of a training
run, and cohorts that are sampled, see `privacy`.

Arguments out of the ranges given, and probabilities that are none, raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 9.1 and 9.2.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from fedjax_core import check


def gaussian_sigma_classical(
    epsilon: float,
    delta: float,
    sensitivity: float = 1.0,
    *,
    allow_large_epsilon: bool = False,
) -> float:
    r"""The textbook standard deviation of normal noise.

    .. math:: \sigma = \sqrt{2 \ln(1.25 / \delta)} \, D / \varepsilon

    The book prints it without a range. It is proved for epsilon < 1 and wrong for large
    ones: with delta = 1e-5 and epsilon = 10 the true delta is 2.27e-5. Below 1 it is
    right but generous; `gaussian_sigma` is as small as it may be.

    Args:
      epsilon: > 0, and < 1 unless allowed.
      delta: in (0, 1).
      sensitivity: D, in the Euclidean norm, > 0.
      allow_large_epsilon: return the number for epsilon >= 1 too, to compare with it.

    References:
      Jung, Section 9.2, below (181); Dwork and Roth, "The Algorithmic Foundations of
      Differential Privacy", 2014, theorem A.1.
    """
    check.positive(epsilon=epsilon, sensitivity=sensitivity)
    check.open_interval(0, 1, delta=delta)
    if epsilon >= 1 and not allow_large_epsilon:
        raise ValueError(
            f"epsilon must be < 1 for the classical formula, got {epsilon!r}; use "
            "gaussian_sigma, or pass allow_large_epsilon=True for the bare number."
        )
    return math.sqrt(2 * math.log(1.25 / delta)) * sensitivity / epsilon


def gaussian_delta(sigma: float, epsilon: float, sensitivity: float = 1.0) -> float:
    r"""The smallest delta with which normal noise is (epsilon, delta)-DP.

    .. math::

      \delta(\varepsilon) = \Phi\Bigl(\frac{D}{2\sigma} - \frac{\varepsilon\sigma}{D}
      \Bigr) - e^\varepsilon \Phi\Bigl(-\frac{D}{2\sigma} - \frac{\varepsilon\sigma}{D}
      \Bigr)

    of Balle and Wang, "Improving the Gaussian mechanism for differential privacy", ICML
    2018, theorem 8.

    Args:
      sigma: standard deviation of the noise on every entry, > 0.
      epsilon: > 0.
      sensitivity: D, in the Euclidean norm, > 0.
    """
    check.positive(sigma=sigma, epsilon=epsilon, sensitivity=sensitivity)
    return math.exp(gaussian_log_delta(sigma / sensitivity, epsilon))


def gaussian_log_delta(noise: float, epsilon: float) -> float:
    """The logarithm of `gaussian_delta`; -inf where floating point ends.

    The noise is over the sensitivity, > 0, and epsilon >= 0.
    """
    first = float(special.log_ndtr(0.5 / noise - epsilon * noise))
    second = epsilon + float(special.log_ndtr(-0.5 / noise - epsilon * noise))
    ratio = second - first  # < 0 but for rounding
    return first + math.log(-math.expm1(ratio)) if ratio < 0 else -math.inf


def gaussian_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest standard deviation of normal noise that is (epsilon, delta)-DP.

    Inverts `gaussian_delta`, to about ten digits and rounded to the safe side. Where
    epsilon and delta are both close to the rounding of floats it can fall short: with
    1e-15 and 1e-14 the true delta is 1.0044 times the one asked for. Epsilon is > 0,
    delta in (0, 1), the sensitivity > 0 in the Euclidean norm.
    """
    check.positive(epsilon=epsilon, sensitivity=sensitivity)
    check.open_interval(0, 1, delta=delta)

    def excess(noise: float) -> float:
        return gaussian_log_delta(noise, epsilon) - math.log(delta)

    return least(excess, 1e-13) * sensitivity


def least(excess: Callable[[float], float], tolerance: float) -> float:
    """The least number > 0, but for a relative tolerance, at which `excess` is <= 0.

    `excess` falls with the number from above 0 to below, and may be infinite. Where it
    is that of a privacy guarantee the result is on the safe side.
    """

    def bounded(log: float) -> float:  # brentq needs finite values
        return min(max(excess(math.exp(log)), -1e300), 1e300)

    low = high = 0.0
    while bounded(high) > 0:
        low, high = high, high + 1
    while low == high or bounded(low) <= 0:
        low, high = low - 1, low
    root: Any = optimize.brentq(bounded, low, high, xtol=tolerance)
    while bounded(root) > 0:  # brentq may stop on either side
        root += tolerance
    return math.exp(root)


def laplace_scale(epsilon: float, sensitivity: float = 1.0) -> float:
    """The scale b of Laplace noise, density exp(-|x|/b)/(2b), that is (epsilon, 0)-DP.

    The sensitivity, > 0, is in the sum of absolute values of all entries; epsilon > 0.
    """
    check.positive(epsilon=epsilon, sensitivity=sensitivity)
    return sensitivity / epsilon


def gaussian_rdp(order: float, sigma: float, sensitivity: float = 1.0) -> float:
    """Rényi divergence of normal noise: order * sensitivity^2 / (2 sigma^2).

    Args:
      order: the a of (a, gamma)-RDP, > 1.
      sigma: standard deviation of the noise, > 0.
      sensitivity: in the Euclidean norm, > 0.

    Returns:
      The gamma of one release; those of several releases add up, order by order.

    References:
      Jung, Definition 2; Mironov, "Rényi Differential Privacy", CSF 2017, prop. 7.
    """
    check.positive(sigma=sigma, sensitivity=sensitivity)
    check.open_interval(1, math.inf, order=order)
    return order * (sensitivity / sigma) ** 2 / 2


def rdp_epsilon(order: float, gamma: float, delta: float) -> float:
    """Epsilon such that (order, gamma)-RDP implies (epsilon, delta)-DP.

    gamma + log(1/delta) / (order - 1); take the smallest over several orders. The book
    only says that some epsilon follows. `privacy.epsilon` converts more tightly.

    Args:
      order: > 1.
      gamma: >= 0.
      delta: in (0, 1).

    References:
      Mironov, "Rényi Differential Privacy", CSF 2017, proposition 3.
    """
    check.non_negative(gamma=gamma)
    check.open_interval(1, math.inf, order=order)
    check.open_interval(0, 1, delta=delta)
    return gamma + math.log(1 / delta) / (order - 1)


def renyi_divergence(p: ArrayLike, q: ArrayLike, order: float) -> float:
    r"""The Rényi divergence :math:`\log \sum q (p/q)^a / (a - 1)` of two distributions.

    Jung, Section 9.1, above Definition 2.

    Args:
      p: [K] probabilities of an output for one dataset.
      q: [K] those for its neighbour.
      order: a > 1.

    Returns:
      A float >= 0, `inf` where q rules out what p allows.
    """
    p, q = _distributions(p, q)
    check.open_interval(1, math.inf, order=order)
    seen = p > 0
    if np.any(q[seen] == 0):
        return math.inf
    terms = order * np.log(p[seen]) + (1 - order) * np.log(q[seen])
    return max(float(np.logaddexp.reduce(terms)) / (order - 1), 0.0)


def finite_delta(p: ArrayLike, q: ArrayLike, epsilon: float) -> float:
    r"""The smallest delta of Definition 1 for an output with finitely many values.

    The worst set in :math:`P(S) \le e^\varepsilon Q(S) + \delta` is where :math:`p >
    e^\varepsilon q`; both directions are looked at. Jung, Definition 1.

    Args:
      p: [K] probabilities of the output for one dataset.
      q: [K] those for its neighbour.
      epsilon: >= 0; at 0 the result is the total variation distance.
    """
    p, q = _distributions(p, q)
    check.non_negative(epsilon=epsilon)
    # In two halves, which don't overflow. Above 750 nothing changes any more: times the
    # smallest positive float e^750 is > 1.
    half = math.exp(min(epsilon, 750) / 2)
    with np.errstate(over="ignore"):
        forth, back = p - half * (half * q), q - half * (half * p)
    return float(max(np.maximum(forth, 0).sum(), np.maximum(back, 0).sum()))


def _distributions(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    p, q = probabilities("p", p, 1), probabilities("q", q, 1)
    if q.shape != p.shape:
        raise ValueError(f"q must have shape {p.shape}, got {q.shape}.")
    return p, q


def probabilities(name: str, value: ArrayLike, ndim: int) -> np.ndarray:
    """The value in float64; ValueError unless it holds probabilities on `ndim` axes."""
    value = np.asarray(value, np.float64)
    if value.ndim != ndim or not value.size:
        raise ValueError(f"{name} must have {ndim} axes, got shape {value.shape}.")
    if not (np.all(value >= 0) and abs(value.sum() - 1) < 1e-9):
        raise ValueError(f"{name} must be probabilities that sum to 1.")
    return value
