r"""Participation: which clients make up the cohort of a round.

A participation draws client ids on the host. The draw is a pure function of
``(seed, round, num_clients)``: round 7 can be drawn without rounds 0 to 6, a resumed
run draws what the uninterrupted one would have drawn, and NumPy's global generator is
neither read nor changed. Ids come back in ascending order, so the first few of a cohort
are no random sample of it.

================  =============  ==================================================
participation     cohort         a client takes part with probability
================  =============  ==================================================
`Full`            N              1
`Uniform`         C              C / N, without replacement
`Poisson`         Binomial       `rate`, independently of all others
`Weighted`        C              growing with its weight, without replacement
`Availability`    C              C / (number available this round) if available
`Failing`         random         that of another one, times 1 - `rate`
================  =============  ==================================================

On devices of unequal speed see `fedjax_core.virtual_time`.

Anything with the three methods of `Participation` can be passed where these can; take
the random numbers of such a class from `generator`. The same seed gives the same
cohorts under the same NumPy; a new release may change what its `Generator` returns.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedjax_core import check

# Keep the draws apart from any other use of the experiment's seed.
_STREAM = 0x636F_686F  # "coho"
_FAILURES = 0x6661_696C  # "fail"


def generator(seed: int, round: int, stream: int = _STREAM) -> np.random.Generator:
    """Returns a fresh Philox generator that draws the cohort of one round.

    Args:
      seed: the experiment's seed, an int >= 0 of any size.
      round: the number of the round, an int >= 0 of any size.
      stream: what else is drawn with the same seed and round has another one.

    Raises:
      TypeError, ValueError: if `seed` or `round` is not an int, or negative.
    """
    check.non_negative_int(seed=seed, round=round)
    # The seed is the entropy and the rest the spawn key: NumPy pads the entropy to 128
    # bits, so that (seed, round) pairs cannot run into each other.
    sequence = np.random.SeedSequence(int(seed), spawn_key=(stream, int(round)))
    return np.random.Generator(np.random.Philox(sequence))


@runtime_checkable
class Participation(Protocol):
    """How cohorts are drawn from a population of `num_clients` = N clients."""

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """Draws the cohort of one round.

        Args:
          seed: the experiment's seed, an int >= 0.
          round: the number of the round, an int >= 0.
          num_clients: N, the size of the population.

        Returns:
          `[C]` int64 ids in [0, N), ascending, no id twice.

        Raises:
          TypeError, ValueError: if an argument is not an int, or out of range, or the
            cohort cannot be drawn.
        """
        ...

    def max_cohort_size(self, num_clients: int) -> int:
        """Number of rows to reserve for a cohort; raises as `draw` does."""
        ...

    def expected_cohort_size(self, num_clients: int) -> float:
        """Mean size of a cohort; raises as `draw` does."""
        return float(self.max_cohort_size(num_clients))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Participation):
    """Every client takes part in every round."""

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """Returns all ids; `seed` and `round` are checked and otherwise unused."""
        check.non_negative_int(seed=seed, round=round)
        return np.arange(self.max_cohort_size(num_clients), dtype=np.int64)

    def max_cohort_size(self, num_clients: int) -> int:
        """N."""
        check.positive_int(num_clients=num_clients)
        return int(num_clients)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfSize(Participation):
    """Cohorts of `cohort_size` clients."""

    cohort_size: int

    def __post_init__(self):
        check.positive_int(cohort_size=self.cohort_size)

    def max_cohort_size(self, num_clients: int) -> int:
        """C; a ValueError if there are fewer clients."""
        check.positive_int(num_clients=num_clients)
        if self.cohort_size > num_clients:
            raise ValueError(
                f"cohort_size must be <= num_clients={num_clients}, got "
                f"{self.cohort_size}: a client takes part at most once in a round."
            )
        return int(self.cohort_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform(_OfSize):
    """A uniformly random subset of `cohort_size` clients, without replacement.

    Attributes:
      cohort_size: C, at most the number of clients.
    """

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """Draws `[C]` ids in time O(C) when C is small against N."""
        rng = generator(seed, round)
        return _subset(rng, num_clients, self.max_cohort_size(num_clients))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisson:
    """Each client takes part independently with probability `rate`.

    The size of a cohort is Binomial(N, rate), so a cohort can be empty. This is the
    sampling that most privacy accounting assumes.

    Attributes:
      rate: probability of a client to take part in a round, in (0, 1].
    """

    rate: float

    def __post_init__(self):
        check.positive(rate=self.rate)
        check.in_range(0, 1, rate=self.rate)

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """Draws `[Binomial(N, rate)]` ids, possibly none."""
        rng = generator(seed, round)
        check.positive_int(num_clients=num_clients)
        # A binomial size and a uniform subset of that size have the law of N coins, in
        # time proportional to the cohort instead of the population.
        return _subset(rng, num_clients, int(rng.binomial(num_clients, self.rate)))

    def max_cohort_size(self, num_clients: int) -> int:
        """Mean plus six standard deviations, rounded up, at most N.

        Not a bound on `draw`: a larger cohort is rare (probability below 4e-4 a round,
        below 3e-9 once the mean is 1,000) and is to be served by growing the buffers,
        since cutting the cohort would void the privacy guarantee.
        """
        check.positive_int(num_clients=num_clients)
        mean = num_clients * self.rate
        spread = math.sqrt(mean * (1 - self.rate))
        return min(int(num_clients), math.ceil(mean + 6 * spread))

    def expected_cohort_size(self, num_clients: int) -> float:
        """N * rate."""
        check.positive_int(num_clients=num_clients)
        return float(num_clients * self.rate)


# eq=False: the generated comparison fails on arrays.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weighted(_OfSize):
    r"""A subset of `cohort_size` clients drawn one by one in proportion to `weights`.

    Successive sampling: the first client is :math:`i` with probability
    :math:`w_i / \sum_j w_j`, and each next one likewise among those that are left. The
    cohort is drawn at once as the C largest of :math:`\log w_i + G_i`, with independent
    standard Gumbel :math:`G_i`. A client of weight 0 is never drawn. For C > 1 the
    probability of a client to take part grows with its weight but is not proportional
    to it.

    Attributes:
      cohort_size: C, at most the number of clients with a positive weight.
      weights: `[N]` finite numbers >= 0, kept as a read-only float64 copy.

    References:
      Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information
      Processing Letters 97(5), 2006, Algorithm A: its keys :math:`u_i^{1/w_i}` under
      the increasing map :math:`k \mapsto -\log(-\log k)`.
    """

    weights: npt.ArrayLike

    def __post_init__(self):
        super().__post_init__()
        weights = numbers("weights", self.weights)
        object.__setattr__(self, "weights", weights)
        num_positive = int(np.count_nonzero(weights))
        if num_positive < self.cohort_size:
            raise ValueError(
                f"weights must have at least cohort_size={self.cohort_size} positive "
                f"values, got {num_positive} among {weights.size}."
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weighted):
            return NotImplemented
        same = np.array_equal(self.weights, other.weights)
        return self.cohort_size == other.cohort_size and same

    def __hash__(self) -> int:
        return hash((self.cohort_size, np.asarray(self.weights).tobytes()))

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """Draws `[C]` ids; a ValueError unless there are `num_clients` weights."""
        rng = generator(seed, round)
        size = self.max_cohort_size(num_clients)
        weights = np.asarray(self.weights)
        candidates = np.flatnonzero(weights)
        # One number for every client, so that a client's weight going to zero does not
        # hand its random number to the next client.
        scores = rng.gumbel(size=num_clients)[candidates] + np.log(weights[candidates])
        first = scores.size - size
        chosen = candidates[np.argpartition(scores, first)[first:]]
        return np.sort(chosen).astype(np.int64)

    def max_cohort_size(self, num_clients: int) -> int:
        """C; a ValueError unless there are `num_clients` weights."""
        check.positive_int(num_clients=num_clients)
        one_each(num_clients, weights=self.weights)
        return int(self.cohort_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Availability(_OfSize):
    """A uniform subset of `cohort_size` among the clients that are available.

    Attributes:
      cohort_size: C, at most the number of clients available in any round drawn.
      available_fn: `available_fn(round)` returns who can take part in that round: a
        bool mask `[N]`, or integer ids in [0, N) in any order (a repeated id counts
        once). It must depend on nothing but `round` for draws to be reproducible.
    """

    available_fn: Callable[[int], npt.ArrayLike]

    def __post_init__(self):
        super().__post_init__()
        if not callable(self.available_fn):
            raise TypeError(
                f"available_fn must be callable, available_fn(round), "
                f"got {self.available_fn!r}."
            )

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """Draws `[C]` ids; a ValueError naming the round if too few are available."""
        rng = generator(seed, round)
        size = self.max_cohort_size(num_clients)
        available = _available_ids(self.available_fn(round), round, num_clients)
        if available.size < size:
            raise ValueError(
                f"cohort_size must be <= the number of available clients, got "
                f"cohort_size={size} in round {round} with {available.size} of "
                f"{num_clients} clients available."
            )
        return available[_subset(rng, available.size, size)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing:
    """Cohorts of which each client fails with probability `rate`, before it answers.

    The round goes on with the others, perhaps with nobody: what a client that fails
    would have sent is lost, what it keeps stays as it was, and bytes sent to it are not
    counted. Who fails does not depend on who else is drawn.

    Attributes:
      participation: who is drawn.
      rate: in [0, 1).
    """

    participation: Participation
    rate: float

    def __post_init__(self):
        check.instance(Participation, participation=self.participation)
        check.fraction(rate=self.rate)

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """Those that are drawn and answer."""
        ids = self.participation.draw(seed, round, num_clients)
        fails = generator(seed, round, _FAILURES).random(num_clients) < self.rate
        return ids[~fails[ids]]

    def max_cohort_size(self, num_clients: int) -> int:
        """That of `participation`."""
        return self.participation.max_cohort_size(num_clients)

    def expected_cohort_size(self, num_clients: int) -> float:
        """That of `participation`, times 1 - rate."""
        drawn = self.participation.expected_cohort_size(num_clients)
        return drawn * (1 - self.rate)


def _subset(rng: np.random.Generator, population: int, size: int) -> np.ndarray:
    """Ascending `[size]` int64, a uniformly random subset of range(population)."""
    # shuffle=False saves the work of a random order, which sorting would undo.
    ids = rng.choice(int(population), size, replace=False, shuffle=False)
    return np.sort(ids.astype(np.int64, copy=False))


def numbers(name: str, values: npt.ArrayLike) -> np.ndarray:
    """A read-only float64 copy of `values`, checked to be 1-D, finite and >= 0."""
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be numbers, got {values!r}.") from None
    if array.ndim != 1:
        raise ValueError(f"{name} must have shape (num_clients,), got {array.shape}.")
    check.each_non_negative("client", **{name: array})
    array.setflags(write=False)
    return array


def one_each(num_clients: int, **values: npt.ArrayLike) -> None:
    """Raises ValueError unless arrays hold one value per client."""
    for name, array in values.items():
        if np.shape(array) != (num_clients,):
            raise ValueError(
                f"{name} must hold one value per client, shape ({num_clients},), got "
                f"shape {np.shape(array)}."
            )


def _available_ids(
    available: npt.ArrayLike, round: int, num_clients: int
) -> np.ndarray:
    """Ascending int64 ids from what a user's `available_fn` returned."""
    array = np.asarray(available)

    def error(kind: type[Exception], got: str) -> Exception:
        return kind(
            f"available_fn must return a bool mask of shape ({num_clients},) or 1-D "
            f"int ids in [0, {num_clients}), got {got} in round {round}."
        )

    if array.dtype == bool:
        if array.shape != (num_clients,):
            raise error(ValueError, f"a mask of shape {array.shape}")
        return np.flatnonzero(array).astype(np.int64)
    if array.ndim != 1:
        raise error(ValueError, f"shape {array.shape}")
    if array.size == 0:  # an empty list arrives as float64
        return np.empty(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise error(TypeError, f"dtype {array.dtype}")
    bad = array[(array < 0) | (array >= num_clients)]
    if bad.size:
        raise error(ValueError, f"id {bad[0]}")
    return np.unique(array).astype(np.int64)
