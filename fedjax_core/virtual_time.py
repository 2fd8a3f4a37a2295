r"""Virtual time: how long rounds take on devices of unequal speed.

Clients' turns take simulated seconds, drawn on the host by identity. `Synchronous`
waits for a cohort's slowest client, or drops those that come late; `Asynchronous` never
waits: it aggregates the first K updates that arrive, each made from the model as it was
when its client started. Both are participations, so that every method runs under them;
`simulate` then records "virtual_seconds", how long each round took.

References:
  Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS
  2022, Algorithm 1.
  Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019,
  Section 2.2: more clients are selected than are waited for.
"""

import dataclasses
import functools
import heapq
import threading
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from fedjax_core import check
from fedjax_core.participation import (
    Participation,
    generator,
    numbers,
    one_each,
)
from fedjax_core.random import hash64
from fedjax_core.types import Checked, NonNegative, Positive

_DEVICE, _LINK, _TURN = 0xDE71CE, 0x117C, 0x7124


def _normal(*identity: int | np.ndarray) -> np.ndarray:
    """Standard normal numbers by identity."""
    # The highest 53 bits, in the middle of their intervals: never 0 or 1.
    return ndtri(((hash64(*identity) >> np.uint64(11)) + 0.5) / 2.0**53)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices(Checked):
    """How fast the clients' devices are: log-normal, each drawn once.

    Attributes:
      step_seconds: median time of a local step.
      spread: standard deviation of its logarithm over devices; 0 makes all alike.
      bytes_per_second: median rate of a client's link, infinite by default.
      link_spread: as `spread`, of the rate.
      seed: of the draws, which are by client.
    """

    step_seconds: Positive = 1.0
    spread: NonNegative = 0.0
    bytes_per_second: float = float("inf")
    link_spread: NonNegative = 0.0
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if not self.bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second must be > 0, got {self.bytes_per_second!r}."
            )

    def seconds(self, steps: npt.ArrayLike, num_bytes: float = 0.0) -> np.ndarray:
        """How long a turn of each client takes, ``[N]`` float64.

        Args:
          steps: ``[N]`` local steps, see `fedjax_core.plan.num_steps`.
          num_bytes: what a client receives and sends in a turn.
        """
        steps = np.asarray(steps, np.float64)
        client = np.arange(len(steps))

        def drawn(median: float, spread: float, what: int) -> np.ndarray:
            return median * np.exp(spread * _normal(self.seed, what, client))

        rate = drawn(self.bytes_per_second, self.link_spread, _LINK)
        return steps * drawn(self.step_seconds, self.spread, _DEVICE) + num_bytes / rate


@runtime_checkable
class Timed(Participation, Protocol):
    """A participation that knows how long rounds take."""

    def start_rounds(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """``[C]`` int64, from which round's model each client of the cohort starts."""
        ...

    def round_seconds(self, seed: int, round: int, num_clients: int) -> float:
        """Virtual seconds from the end of the round before to the end of this one."""
        ...


# eq=False: the generated comparison fails on arrays.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Synchronous(Timed):
    """Rounds that end with the slowest client they wait for.

    Attributes:
      participation: who is selected.
      seconds: ``[N]``, of a turn of each client, > 0; see `Devices`.
      wait_for: how many of those that are selected a round waits for: the fastest. The
        others' updates are dropped. By default all of them.
      jitter: standard deviation of the logarithm of a turn's time over turns.
    """

    participation: Participation
    seconds: npt.ArrayLike
    wait_for: int | None = None
    jitter: float = 0.0

    def __post_init__(self):
        check.instance(Participation, participation=self.participation)
        _check_seconds(self)
        if self.wait_for is not None:
            check.positive_int(wait_for=self.wait_for)

    def _fastest(
        self, seed: int, round: int, num_clients: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The clients that are waited for, by id, and how long each takes."""
        one_each(num_clients, seconds=self.seconds)
        ids = self.participation.draw(seed, round, num_clients)
        takes = _turns(self, seed, round, ids)
        first = np.sort(np.argsort(takes, kind="stable")[: self.wait_for])
        return ids[first], takes[first]

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """The clients that are waited for."""
        return self._fastest(seed, round, num_clients)[0]

    def start_rounds(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """This round's, for everybody."""
        return np.full(len(self.draw(seed, round, num_clients)), round)

    def round_seconds(self, seed: int, round: int, num_clients: int) -> float:
        """The slowest client's; 0 if nobody is selected."""
        return float(self._fastest(seed, round, num_clients)[1].max(initial=0))

    def max_cohort_size(self, num_clients: int) -> int:
        """That of `participation`, or as many as are waited for."""
        size = self.participation.max_cohort_size(num_clients)
        return min(size, self.wait_for or size)

    def expected_cohort_size(self, num_clients: int) -> float:
        """As `max_cohort_size`."""
        size = self.participation.expected_cohort_size(num_clients)
        return min(size, self.wait_for or size)


class _Update(NamedTuple):
    """An aggregation of K updates that arrived."""

    time: float
    client_ids: np.ndarray  # [K], ascending
    start_rounds: np.ndarray  # [K]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Asynchronous(Timed):
    """Rounds that end when `buffer_size` updates have arrived, whoever sent them.

    `concurrency` clients train at any time. When one is done, its update goes into the
    buffer, and one drawn uniformly from those that neither train nor wait in the buffer
    starts in its place from the newest model. Give it to a method that looks at
    `Cohort.start_round`, as FedBuff does: others train from the newest model.

    Attributes:
      concurrency: clients that train at the same time.
      buffer_size: K, updates of a round.
      seconds: ``[N]``, of a turn of each client, > 0; see `Devices`.
      jitter: standard deviation of the logarithm of a turn's time over turns.
    """

    concurrency: int
    buffer_size: int
    seconds: npt.ArrayLike
    jitter: float = 0.0

    def __post_init__(self):
        check.positive_int(concurrency=self.concurrency, buffer_size=self.buffer_size)
        num_clients = _check_seconds(self)
        most = num_clients - self.buffer_size + 1
        if self.concurrency > most:
            raise ValueError(
                f"concurrency must be <= {most}, so that somebody is idle while "
                f"{self.buffer_size - 1} of {num_clients} clients wait in the buffer, "
                f"got {self.concurrency}."
            )

    @functools.cached_property
    def _timelines(self):
        return threading.Lock(), {}  # draws come from the feed's thread, too

    def _update(self, seed: int, round: int, num_clients: int) -> _Update:
        one_each(num_clients, seconds=self.seconds)
        lock, runs = self._timelines
        with lock:
            events, updates = runs.setdefault(seed, (self._events(seed), []))
            while len(updates) <= round:
                updates.append(next(events))
            return updates[round]

    def _events(self, seed: int):
        """Yields one `_Update` after the other, from the start of the run."""
        rng = generator(seed, 0)
        num_clients = len(np.asarray(self.seconds))
        busy = set(rng.choice(num_clients, self.concurrency, replace=False).tolist())
        training: list[tuple[float, int, int]] = []  # (ends, client, started)

        def start(client: int, now: float, round: int, turn: int) -> None:
            takes = _turns(self, seed, turn, np.array([client]))
            heapq.heappush(training, (now + float(takes[0]), client, round))

        for client in sorted(busy):
            start(client, 0.0, 0, 0)
        buffer: list[tuple[int, int]] = []
        round = turn = 0
        while True:
            now, client, started = heapq.heappop(training)
            buffer.append((client, started))
            if len(buffer) == self.buffer_size:
                ids, starts = np.array(sorted(buffer)).T
                yield _Update(now, ids, starts)
                busy -= {client for client, _ in buffer}
                buffer, round = [], round + 1
            turn += 1
            fresh = int(rng.integers(num_clients))
            while fresh in busy:
                fresh = int(rng.integers(num_clients))
            busy.add(fresh)
            start(fresh, now, round, turn)

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """The clients whose updates the round aggregates."""
        return self._update(seed, round, num_clients).client_ids

    def start_rounds(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        """When each of them started."""
        return self._update(seed, round, num_clients).start_rounds

    def round_seconds(self, seed: int, round: int, num_clients: int) -> float:
        """From one aggregation to the next."""
        end = self._update(seed, round, num_clients).time
        return end - (self._update(seed, round - 1, num_clients).time if round else 0)

    def max_cohort_size(self, num_clients: int) -> int:
        """K."""
        one_each(num_clients, seconds=self.seconds)
        return self.buffer_size


def _turns(
    of: Synchronous | Asynchronous, seed: int, turn: int, ids: np.ndarray
) -> np.ndarray:
    """How long a turn takes each of the clients `ids`."""
    mean = np.asarray(of.seconds)[ids]
    if not of.jitter:
        return mean
    return mean * np.exp(of.jitter * _normal(seed, _TURN, turn, ids))


def _check_seconds(of: Synchronous | Asynchronous) -> int:
    """Keeps a copy of how long turns take; returns of how many clients."""
    seconds = numbers("seconds", of.seconds)
    if not (seconds > 0).all():
        raise ValueError(f"seconds must be > 0, got {seconds.min()}.")
    check.non_negative(jitter=of.jitter)
    object.__setattr__(of, "seconds", seconds)
    return len(seconds)
