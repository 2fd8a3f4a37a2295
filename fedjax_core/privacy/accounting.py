r"""Client-level differential privacy: what a run with clipping and noise guarantees.

Every client's update is clipped to norm at most ``clip_norm``, the server adds Gaussian
noise to the **sum** over the cohort and only ever uses the noisy sum. Two populations
are neighbours if they differ in one client:

* ``"add-or-remove"``: one client more or less; the sum moves by at most ``clip_norm``.
* ``"replace-one"``: one client exchanged for another; the sum moves by at most
  ``2 * clip_norm``.

`noise_multiplier` is the standard deviation of the noise on the sum over ``clip_norm``,
for both relations: `epsilon` accounts for the factor 2 itself. Whoever turns the sum
into a mean must divide by a number that does not depend on who took part, such as the
expected cohort size: the guarantee is for the sum, not for the size of the cohort.
"""

import fractions
import functools
import math
from typing import Any, Literal, get_args

import numpy as np
from scipy import optimize, special

from fedjax_core import check
from fedjax_core import participation as participation_lib
from fedjax_core.participation import Participation

Adjacency = Literal["add-or-remove", "replace-one"]

# Integer orders only: for fractional ones dp_accounting sums alternating series that
# cancel, and orders near 1 never give the best epsilon at a delta worth having.
# Few beyond 32: an order a up to 256 costs a^2 without replacement, and for weak
# releases L of `epsilon` is the better bound anyway.
_ORDERS = np.array([*range(2, 33), 40, 48, 64, 96, 128, 512, 1024, 2048, 4096])

# More noise than this leaves the formulas for sampling no digits; less is on the safe
# side.
_MAX_NOISE = 1e6

# With less noise one round has losses near 10 / noise and the grid gets long.
_MIN_NOISE_PLD = 0.5

# The relations that each participation has a guarantee for; the first is the default.
_ADJACENCIES: dict[type, tuple[Adjacency, ...]] = {
    participation_lib.Full: ("add-or-remove", "replace-one"),
    participation_lib.Poisson: ("add-or-remove",),
    participation_lib.Uniform: ("replace-one",),
    participation_lib.Availability: ("replace-one",),
}


def sensitivity(clip_norm: float, adjacency: Adjacency) -> float:
    """Most that the sum of clipped updates moves between neighbouring populations.

    Args:
      clip_norm: bound on the norm of one client's update, > 0.
      adjacency: "add-or-remove" or "replace-one".

    Returns:
      `clip_norm` for "add-or-remove", `2 * clip_norm` for "replace-one".

    Raises:
      ValueError: if an argument is out of range.
    """
    check.positive(clip_norm=clip_norm)
    check.one_of(get_args(Adjacency), adjacency=adjacency)
    return clip_norm if adjacency == "add-or-remove" else 2 * clip_norm


def epsilon(
    participation: Participation,
    *,
    num_clients: int,
    rounds: int,
    noise_multiplier: float,
    delta: float,
    adjacency: Adjacency | None = None,
) -> float:
    r"""Epsilon such that `rounds` noisy sums are (epsilon, delta)-DP for a client.

    ==============  ===========================  ======================================
    participation   adjacency (first: default)   bound
    ==============  ===========================  ======================================
    `Full`          add-or-remove, replace-one   G
    `Poisson`       add-or-remove                min(G, R, L)
    `Uniform`       replace-one                  min(G, R, L)
    `Availability`  replace-one                  G: no amplification by sampling
    `Weighted`      none                         an error
    ==============  ===========================  ======================================

    G is the exact curve of the Gaussian mechanism [1, theorem 8]. R is Rényi accounting
    at integer orders ([2] for Poisson, [3, theorem 27] for Uniform), turned into
    epsilon by [4, proposition 12]. L composes the privacy loss distribution of one
    round, on a grid that rounds against us [5]; for Uniform that of the pair which
    dominates sampling without replacement under replacement [6, 7]. Each bounds
    adaptive rounds from above, hence so does the smallest, normally L. L is left out
    where its grid would be long (noise over sensitivity below 0.5, or another bound
    above 50) and where its floating-point error would count (delta below 1e-10).

    Under replace-one all formulas take the noise over the sensitivity, which is
    ``noise_multiplier / 2``: with every client sampled, `Uniform` is a Gaussian
    mechanism of sensitivity ``2 * clip_norm``. For `Availability`, `available_fn` must
    not depend on the clients' data.

    With very much noise the formal answer is 0: delta alone covers everything that
    leaks. That would read as "nothing leaks", so the result is never less than
    ``rounds / 2 * log(1 + q^2 (exp(s^2) - 1))``, half the Rényi divergence of order 2,
    with q the sampling rate and s the sensitivity over the noise. This exceeds the
    bounds only where delta is about the total variation between neighbours or more.

    Args:
      participation: how the cohorts are drawn, the object used for training.
      num_clients: N, the size of the population.
      rounds: number of noisy sums, >= 1.
      noise_multiplier: standard deviation of the noise on the sum over the clip norm,
        >= 0.
      delta: in (0, 1); should be well below 1 / `num_clients`.
      adjacency: the neighbouring relation; None takes the default of the table.

    Returns:
      A float > 0, `inf` without noise. It does not fall with `rounds` or the sampling
      rate, nor grow with `noise_multiplier`, up to the 0.1 % or so of L's grid.

    Raises:
      ValueError: if an argument is out of range, or there is no guarantee for this
        participation or for this adjacency with it.
      TypeError: if `participation` is none of the table.
      ImportError: if sampling needs dp_accounting and it is not installed.

    References:
      [1] Balle and Wang, "Improving the Gaussian mechanism for differential privacy",
      ICML 2018. [2] Mironov, Talwar and Zhang, "Rényi differential privacy of the
      sampled Gaussian mechanism", arXiv 1908.10530. [3] Wang, Balle and
      Kasiviswanathan, "Subsampled Rényi differential privacy and analytical moments
      accountant", AISTATS 2019. [4] Canonne, Kamath and Steinke, "The discrete Gaussian
      for differential privacy", NeurIPS 2020. [5] Doroshenko et al., "Connect the
      dots", PETS 2022, algorithm 1. [6] Balle, Barthe and Gaboardi, "Privacy
      amplification by subsampling", NeurIPS 2018 (one round: delta(e') <= q delta(e)
      with exp(e') = 1 + q (exp(e) - 1)). [7] Zhu, Dong and Wang, "Optimal accounting of
      differential privacy via characteristic function", AISTATS 2022 (dominating pairs
      compose).
    """
    adjacency = _adjacency(participation, adjacency)
    participation.max_cohort_size(num_clients)  # raises if no cohort can be drawn
    check.positive_int(rounds=rounds)
    check.non_negative(noise_multiplier=noise_multiplier)
    _open_unit_interval(delta=delta)
    if noise_multiplier == 0:
        return math.inf

    # From here on the noise is in units of the sensitivity.
    noise = noise_multiplier / sensitivity(1.0, adjacency)
    # Telling the adversary all cohorts only helps them, so this holds for every one.
    bound = _gaussian_epsilon(noise / math.sqrt(rounds), delta)
    rate = _sampling_rate(participation, num_clients)
    if rate < 1:
        replace = adjacency == "replace-one"
        noise = min(noise, _MAX_NOISE)
        one_round = _without_replacement_rdp if replace else _poisson_rdp
        bound = min(bound, _epsilon_from_rdp(rounds * one_round(rate, noise), delta))
        if noise >= _MIN_NOISE_PLD and bound <= 50 and delta >= 1e-10:
            losses = _without_replacement_pld if replace else _poisson_pld
            composed = losses(rate, noise).self_compose(rounds)
            bound = min(bound, composed.get_epsilon_for_delta(delta))
    return max(bound, rounds * _floor(rate, noise))


def noise_multiplier_for(
    participation: Participation,
    *,
    num_clients: int,
    rounds: int,
    epsilon: float,
    delta: float,
    adjacency: Adjacency | None = None,
) -> float:
    """Smallest noise multiplier, to 0.01 %, whose guarantee is (epsilon, delta)-DP.

    Args:
      participation: how the cohorts are drawn, the object used for training.
      num_clients: N, the size of the population.
      rounds: number of noisy sums, >= 1.
      epsilon: what may be spent, > 0.
      delta: in (0, 1).
      adjacency: the neighbouring relation; None takes the participation's default.

    Returns:
      A noise multiplier at which the function `epsilon` reports at most `epsilon`.

    Raises:
      As the function `epsilon` does.
    """
    check.positive(epsilon=epsilon)

    @functools.cache
    def excess(log_noise: float) -> float:
        spent = _epsilon(
            participation,
            num_clients=num_clients,
            rounds=rounds,
            noise_multiplier=math.exp(log_noise),
            delta=delta,
            adjacency=adjacency,
        )
        return math.log(spent / epsilon)

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + 1
    while low == high or excess(low) <= 0:
        low, high = low - 1, low
    tolerance = 5e-5
    root: Any = optimize.brentq(excess, low, high, xtol=tolerance)
    while excess(root) > 0:  # brentq may stop on either side
        root += tolerance
    return math.exp(root)


# Inside `noise_multiplier_for` the name is taken by what may be spent.
_epsilon = epsilon


def _adjacency(participation: Participation, adjacency: Adjacency | None) -> Adjacency:
    if isinstance(participation, participation_lib.Weighted):
        raise ValueError(
            "participation must not be Weighted for a privacy guarantee: none is known "
            "for it, and its weights may themselves depend on the clients' data; use "
            "Poisson, Uniform or Full."
        )
    if type(participation) not in _ADJACENCIES:
        names = ", ".join(kind.__name__ for kind in _ADJACENCIES)
        raise TypeError(f"participation must be one of {names}, got {participation!r}.")
    allowed = _ADJACENCIES[type(participation)]
    if adjacency is None:
        return allowed[0]
    check.one_of(get_args(Adjacency), adjacency=adjacency)
    if adjacency not in allowed:
        raise ValueError(
            f"adjacency must be {' or '.join(map(repr, allowed))} with "
            f"{type(participation).__name__} participation, got {adjacency!r}."
        )
    return adjacency


def _sampling_rate(participation: Participation, num_clients: int) -> float:
    """The rate that amplifies the guarantee, 1 where nothing does."""
    if isinstance(participation, participation_lib.Poisson):
        return participation.rate
    if isinstance(participation, participation_lib.Uniform):
        return participation.cohort_size / num_clients
    return 1.0


def _open_unit_interval(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} must be > 0 and < 1, got {value!r}.")


def _gaussian_epsilon(noise: float, delta: float) -> float:
    """Exact epsilon of one Gaussian release of sensitivity 1, >= 0."""

    def log_excess(epsilon: float) -> float:
        # log of Phi(1/(2s) - es) - exp(e) Phi(-1/(2s) - es), minus log delta.
        first = special.log_ndtr(0.5 / noise - epsilon * noise)
        second = epsilon + special.log_ndtr(-0.5 / noise - epsilon * noise)
        ratio = second - first  # < 0 but for rounding
        gap = math.log(-math.expm1(ratio)) if ratio < 0 else -math.inf
        return max(float(first) + gap - math.log(delta), -1e300)  # brentq needs finite

    if log_excess(0) <= 0:
        return 0.0
    high = 1.0
    while log_excess(high) > 0:
        high *= 2
    root: Any = optimize.brentq(log_excess, 0, high, xtol=1e-12)
    return root


def _poisson_rdp(rate: float, noise: float) -> np.ndarray:
    """Rényi divergences of one Poisson-sampled release at `_ORDERS`."""
    dp = _dp_accounting()
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
    return _rdp(event, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)


def _without_replacement_rdp(rate: float, noise: float) -> np.ndarray:
    """Rényi divergences of one release without replacement at `_ORDERS`."""
    dp = _dp_accounting()

    # Only the ratio of sample to population enters.
    ratio = fractions.Fraction(rate).limit_denominator(10**9)

    def rdp(size: int, population: int, noise: float) -> np.ndarray:
        gaussian = dp.GaussianDpEvent(noise)
        event = dp.SampledWithoutReplacementDpEvent(population, size, gaussian)
        return _rdp(event, dp.NeighboringRelation.REPLACE_ONE)

    # dp_accounting documents an event's noise as being over the clip norm but, up to
    # 0.6, reads it as over the sensitivity (google/differential-privacy issue 378).
    # With everyone sampled and noise 1, order a gives a / 2 if it is over the
    # sensitivity and 2 a if it is over the clip norm; asking is right under both.
    units = math.sqrt(rdp(1, 1, 1.0)[0] / (_ORDERS[0] / 2))
    return rdp(ratio.numerator, ratio.denominator, noise * units)


def _rdp(event: Any, relation: Any) -> np.ndarray:
    accountant = _dp_accounting().rdp.RdpAccountant(_ORDERS, relation)
    # The pad covers the rounding of sums of terms near 1, which can even turn the
    # divergence of a weak release negative.
    return np.maximum(accountant.compose(event).rdp, 0) + 1e-14


def _epsilon_from_rdp(rdp: np.ndarray, delta: float) -> float:
    """Proposition 12 of Canonne et al., at the best of `_ORDERS`; may be negative."""
    slack = (math.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1)
    return float(np.min(rdp + np.log1p(-1 / _ORDERS) - slack))


def _poisson_pld(rate: float, noise: float) -> Any:
    """Privacy loss distribution of one Poisson-sampled release."""
    return _dp_accounting().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=_grid_step(rate, noise),
    )


def _without_replacement_pld(rate: float, noise: float) -> Any:
    """Privacy loss distribution of one release without replacement.

    With P = N(1, s^2), Q = N(0, s^2) and M = rate P + (1 - rate) Q, the hockey-stick
    divergences at exp(e) are at most those of (M, Q) for e >= 0 and of (Q, M) for
    e < 0: the first is the bound of one round in `epsilon`'s [6], the second the same
    with the neighbours exchanged. A pair with these divergences is symmetric: a loss of
    -e has exp(-e) times the probability of a loss of e, and what is missing from 1 sits
    at 0.
    """
    pld = _dp_accounting().pld
    step = _grid_step(rate, noise)
    size = math.ceil(_max_loss(rate, noise) / step)
    losses = step * np.arange(size + 1)
    # Where log(M / Q) reaches each loss, and the tails of M and Q from there on.
    x = 0.5 + noise**2 * np.log1p(np.expm1(losses) / rate)
    tail_q = special.ndtr(-x / noise)
    tail_m = rate * special.ndtr((1 - x) / noise) + (1 - rate) * tail_q
    # Each cell's mass goes to its two ends so that both M and Q keep theirs.
    cell_m, cell_q = -np.diff(tail_m), -np.diff(tail_q)
    upper = (cell_m - np.exp(losses[:-1]) * cell_q) / -math.expm1(-step)
    upper = np.clip(upper, 0, cell_m)
    mass = np.append(cell_m - upper, 0.0) + np.append(0.0, upper)
    mirrored = mass * np.exp(-losses)
    at_zero = 1 - tail_m[0] - tail_q[0] + mass[0] + mirrored[0]
    probabilities = np.concatenate([mirrored[:0:-1], [at_zero], mass[1:]])
    pmf = pld.pld_pmf.DensePLDPmf(step, -size, probabilities, tail_m[-1], True)
    return pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _max_loss(rate: float, noise: float) -> float:
    """log(M / Q) ten standard deviations beyond the mean of P."""
    return math.log1p(rate * math.expm1((0.5 + 10 * noise) / noise**2))


def _grid_step(rate: float, noise: float) -> float:
    # A tenth of the losses' standard deviation, at most dp_accounting's own step, and
    # no more than a few hundred thousand points for one round.
    deviation = math.sqrt(2 * _floor(rate, noise))
    return max(min(1e-4, deviation / 10), _max_loss(rate, noise) / 2e5)


def _floor(rate: float, noise: float) -> float:
    """log(1 + q^2 (exp(1 / noise^2) - 1)) / 2 in a form that does not overflow."""
    log_square = -2 * math.log(noise)
    if log_square < -30:
        log_expm1 = log_square
    elif log_square > math.log(700):
        log_expm1 = noise**-2
    else:
        log_expm1 = math.log(math.expm1(noise**-2))
    return float(np.logaddexp(0, 2 * math.log(rate) + log_expm1)) / 2


def _dp_accounting() -> Any:
    try:
        import dp_accounting  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "accounting for sampled cohorts needs dp_accounting: "
            "pip install 'fedjax_core[privacy]'"
        ) from error
    return dp_accounting
