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

import functools
import math
from typing import Literal, get_args

import numpy as np
from scipy import integrate, special

from fedjax_core import check
from fedjax_core import participation as participation_lib
from fedjax_core.participation import Participation
from fedjax_core.privacy.calibration import gaussian_log_delta, least

Adjacency = Literal["add-or-remove", "replace-one"]

# More noise leaves the formulas for sampling no digits; less is on the safe side.
_MAX_NOISE = 1e6

# The relations that each participation has a guarantee for; the first is the default.
_ADJACENCIES: dict[type, tuple[Adjacency, ...]] = {
    participation_lib.Full: ("add-or-remove", "replace-one"),
    participation_lib.Poisson: ("add-or-remove",),
    participation_lib.Uniform: ("replace-one",),
    participation_lib.Availability: ("replace-one",),
}


def sensitivity(clip_norm: float, adjacency: Adjacency) -> float:
    """Most that the sum of clipped updates moves between neighbouring populations.

    It is `clip_norm` > 0 for "add-or-remove", `2 * clip_norm` for "replace-one".
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
    `Poisson`       add-or-remove                min(G, L)
    `Uniform`       replace-one                  min(G, L)
    `Availability`  replace-one                  G: no amplification by sampling
    `Weighted`      none                         an error
    ==============  ===========================  ======================================

    G is the exact curve of the Gaussian mechanism [1, theorem 8]. L composes the
    privacy loss distribution of one round, on a grid that rounds against us [2]; for
    Uniform that of the pair which dominates sampling without replacement under
    replacement [3, 4]. Its floating-point error would count at a delta below 1e-10.
    There R takes the place of L: the Rényi divergences of the same pairs at orders down
    to 1.001, turned into epsilon by [5, proposition 12]. Each bounds adaptive rounds
    from above, hence so does the smaller.

    Under replace-one all formulas take the noise over the sensitivity, which is
    ``noise_multiplier / 2``: with every client sampled, `Uniform` is a Gaussian
    mechanism of sensitivity ``2 * clip_norm``. For `Availability`, `available_fn` must
    not depend on the clients' data.

    With very much noise the formal answer is 0: delta alone covers everything that
    leaks. That would read as "nothing leaks", so the result is never less than
    ``rounds / 2 * q^2 s^2``, with q the sampling rate and s the sensitivity over the
    noise: a lower bound on the Kullback-Leibler divergence, equal to it for much noise.
    This exceeds the bounds only where delta is about the total variation between
    neighbours or more.

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
      ICML 2018. [2] Doroshenko et al., "Connect the dots", PETS 2022, algorithm 1.
      [3] Balle, Barthe and Gaboardi, "Privacy amplification by subsampling", NeurIPS
      2018 (one round: delta(e') <= q delta(e) with exp(e') = 1 + q (exp(e) - 1)).
      [4] Zhu, Dong and Wang, "Optimal accounting of differential privacy via
      characteristic function", AISTATS 2022 (dominating pairs compose). [5] Canonne,
      Kamath and Steinke, "The discrete Gaussian for differential privacy", NeurIPS
      2020; of the two Poisson pairs the first has the larger divergences (Mironov,
      Talwar and Zhang, "Rényi differential privacy of the sampled Gaussian mechanism",
      arXiv 1908.10530, theorem 5).
    """
    adjacency = _adjacency(participation, adjacency)
    participation.max_cohort_size(num_clients)  # raises if no cohort can be drawn
    check.positive_int(rounds=rounds)
    check.non_negative(noise_multiplier=noise_multiplier)
    check.open_interval(0, 1, delta=delta)
    if noise_multiplier == 0:
        return math.inf

    # From here on the noise is in units of the sensitivity.
    noise = noise_multiplier / sensitivity(1.0, adjacency)
    # Telling the adversary all cohorts only helps them, so this holds for every one.
    bound = _gaussian_epsilon(noise / math.sqrt(rounds), delta)
    rate = 1.0  # amplifies the guarantee
    if isinstance(participation, participation_lib.Poisson):
        rate = participation.rate
    elif isinstance(participation, participation_lib.Uniform):
        rate = participation.cohort_size / num_clients
    if rate < 1:
        noise = min(noise, _MAX_NOISE)
        sampled = _loss_epsilon if delta >= 1e-10 else _renyi_epsilon
        replace = adjacency == "replace-one"
        bound = min(bound, sampled(rate, noise, rounds, delta, replace))
    return max(bound, rounds / 2 * (rate / noise) ** 2)


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

    Args and errors are those of the function `epsilon`, which reports at most `epsilon`
    > 0, what may be spent, at the result.
    """
    check.positive(epsilon=epsilon)

    run = {"num_clients": num_clients, "rounds": rounds, "delta": delta}

    @functools.cache
    def excess(noise: float) -> float:
        spent = _epsilon(
            participation, noise_multiplier=noise, adjacency=adjacency, **run
        )
        return math.log(spent / epsilon)

    return least(excess, 5e-5)


def compose(*guarantees: tuple[float, float]) -> tuple[float, float]:
    """The guarantee of several releases together: epsilons and deltas add.

    Basic composition, for any releases, also such that look at earlier ones. All have
    to be for the same neighbours: a guarantee for the exchange of a client is one for
    the exchange of an example of it, so that what training and a release for examples
    give away adds up for examples.

    Args:
      *guarantees: (epsilon, delta) of each, >= 0 and in [0, 1).

    Returns:
      (epsilon, delta), delta 1 where they add up to more: it says nothing.

    References:
      Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014,
      theorem 3.16.
    """
    for epsilon, delta in guarantees:
        check.non_negative(epsilon=epsilon)
        check.fraction(delta=delta)
    return sum(e for e, _ in guarantees), min(1, sum(d for _, d in guarantees))


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


def _gaussian_epsilon(noise: float, delta: float) -> float:
    """Exact epsilon of one Gaussian release of sensitivity 1, >= 0."""

    def excess(epsilon: float) -> float:
        return gaussian_log_delta(noise, epsilon) - math.log(delta)

    return least(excess, 1e-13) if excess(0) > 0 else 0.0


def _loss_epsilon(
    rate: float, noise: float, rounds: int, delta: float, replace: bool
) -> float:
    """L of `epsilon`: from composed privacy loss distributions.

    With P = N(1, s^2), Q = N(0, s^2) and M = rate P + (1 - rate) Q a Poisson-sampled
    round has the losses log(M / Q) under M and, the client added, log(Q / M) under Q.

    Without replacement the hockey-stick divergences at exp(e) are at most those of
    (M, Q) for e >= 0 and of (Q, M) for e < 0: the first is the bound of one round in
    `epsilon`'s [3], the second the same with the neighbours exchanged. A pair with
    these divergences is symmetric: a loss of -e has exp(-e) times the probability of a
    loss of e, and what is missing from 1 sits at 0.
    """
    try:
        from dp_accounting import pld  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "accounting for sampled cohorts needs dp_accounting: "
            "pip install 'fedjax_core[privacy]'"
        ) from error
    step, size = _grid(rate, noise, rounds)
    losses = step * np.arange(0 if replace else -size, size + 1)
    # Where log(M / Q) reaches each loss, and the tails of M and Q from there on.
    with np.errstate(divide="ignore"):  # it never falls to log(1 - rate)
        low = np.log1p(np.maximum(np.expm1(np.minimum(losses, 1)) / rate, -1))
    high = losses - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.abs(losses)))
    x = 0.5 + noise**2 * np.where(losses < 1, low, high)
    tail_q = special.ndtr(-x / noise)
    tail_m = rate * special.ndtr((1 - x) / noise) + (1 - rate) * tail_q
    cell_m, cell_q = -np.diff(tail_m), -np.diff(tail_q)
    forth = _connect_dots(losses, cell_m, cell_q)
    if replace:
        mirrored = forth * np.exp(-losses)
        at_zero = 1 - tail_m[0] - tail_q[0] + forth[0] + mirrored[0]
        forth = np.concatenate([mirrored[:0:-1], [at_zero], forth[1:]])
        sides = [(forth, tail_m[-1])]
    else:
        back = _connect_dots(losses, cell_q[::-1], cell_m[::-1])
        forth[0] += 1 - tail_m[0]
        back[0] += tail_q[-1]
        sides = [(forth, tail_m[-1]), (back, 1 - tail_q[0])]
    # Masses near the smallest float overflow in dp_accounting's quotients.
    sides = [(np.where(mass > 1e-280, mass, 0), infinite) for mass, infinite in sides]
    pair = [pld.pld_pmf.DensePLDPmf(step, -size, *side, True) for side in sides]
    composed = pld.privacy_loss_distribution.PrivacyLossDistribution(*pair)
    return composed.self_compose(rounds).get_epsilon_for_delta(delta)


def _connect_dots(losses: np.ndarray, cell: np.ndarray, other: np.ndarray):
    """Each cell's mass at its two ends, so that both distributions keep theirs."""
    step = losses[1] - losses[0]
    # Far out, where `other` underflows, all goes to the upper end.
    part = np.where(losses < 600, np.exp(np.minimum(losses, 600)), 0)[:-1] * other
    upper = np.clip((cell - part) / -math.expm1(-step), 0, cell)
    return np.append(cell - upper, 0.0) + np.append(0.0, upper)


def _grid(rate: float, noise: float, rounds: int) -> tuple[float, int]:
    """The step of the grid of losses, and the steps to the largest loss."""
    # log(M / Q) ten standard deviations beyond the mean of P.
    exponent = (0.5 + 10 * noise) / noise**2
    largest = float(np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))
    # Of one loss: the root of the Rényi divergence of order 2, which is
    # log(1 + rate^2 (exp(1 / noise^2) - 1)).
    square = noise**-2
    log_expm1 = square + math.log(-math.expm1(-square))
    deviation = math.sqrt(np.logaddexp(0, 2 * math.log(rate) + log_expm1))
    # Of the sum of losses. The deviation overstates rare and large ones.
    typical = min(deviation, math.sqrt(rate) * largest)
    spread = largest + 20 * math.sqrt(rounds) * typical
    # A small part of the deviation, but few points in all.
    step = max(min(1e-3, deviation / 20), spread / 4e5)
    return step, math.ceil(largest / step)


def _renyi_epsilon(
    rate: float, noise: float, rounds: int, delta: float, replace: bool
) -> float:
    """R of `epsilon`, for the pairs of `_loss_epsilon`; may be negative."""
    log_rest, log_rate = math.log1p(-rate), math.log(rate)

    def divergence(order: float) -> float:
        # The moment minus 1 as an integral of what is positive: nothing cancels.
        def excess(x: float) -> float:
            loss = np.logaddexp(log_rest, log_rate + (x - 0.5) / noise**2)
            rest = -order * math.expm1(loss)
            if replace:
                rest = math.expm1((1 - order) * loss) - math.expm1(loss)
            return (math.expm1(order * loss) + rest) * math.exp(-0.5 * (x / noise) ** 2)

        low, high = (0.5 if replace else -12 * noise), order + 12 * noise
        inside = [x for x in (0.0, order) if low < x < high]
        area, error = integrate.quad(excess, low, high, points=inside, limit=200)[:2]
        moment = max(area + error, 0) / (noise * math.sqrt(2 * math.pi))
        return math.log1p(moment) / (order - 1)

    best = math.inf
    for order in 1 + np.geomspace(1e-3, 4095, 60):
        try:
            spent = rounds * (divergence(order) + 1e-14)
        except OverflowError:  # and all the more at larger orders
            break
        slack = (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, spent + math.log1p(-1 / order) - slack)
    return best
