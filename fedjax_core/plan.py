"""Plans a round on the host: who trains on which examples, where and in what order.

Everything is vectorised NumPy over the clients of the cohort. The plan of a round is a
function of (seed, round, client ids); capacities are rounded up so that rounds of
different sizes share one compiled program.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_core.data.packed import Packed
from fedjax_core.devices import ship, ship_cohort
from fedjax_core.random import hash64, mix64
from fedjax_core.types import Cohort, Execution, LocalWork, Queue

_BATCH_STREAM = 0xBA7C
_LAPS = 64  # that are dealt by what devices have to do


def pow2(n: int | float) -> int:
    """The smallest power of two that is at least `n` and at least 1."""
    return 1 << max(int(np.ceil(n)) - 1, 0).bit_length()


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Static sizes of a plan."""

    slots: int  # C, clients
    blocks: int  # M, blocks per device
    rows: int  # R, batches per device
    examples: int  # per device, where each round ships its own; else unused


def num_steps(sizes: np.ndarray, work: LocalWork) -> np.ndarray:
    """Local steps in a round of clients with `sizes` examples; int64, same shape."""
    per_epoch = work.steps_per_epoch(np.asarray(sizes, np.int64))
    if work.steps is None:
        return per_epoch * work.epochs
    return np.where(per_epoch > 0, work.steps, 0)


class Draft:
    """One round before its capacities are fixed, of drawn clients ``[c]``.

    Client i owns examples ``offsets[i]:offsets[i + 1]``; seed and round decide their
    order. `start_rounds` are as `Cohort.start_round`, by default `round`.

    Raises:
      TypeError, ValueError: an id that is no client's or is there twice, or a client
        with more local steps than ``execution.max_steps`` allows.
    """

    def __init__(
        self,
        client_ids: np.ndarray,
        offsets: np.ndarray,
        work: LocalWork,
        *,
        seed: int,
        round: int,
        execution: Execution,
        start_rounds: np.ndarray | None = None,
    ):
        client_ids = np.asarray(client_ids)
        if client_ids.size and client_ids.dtype.kind not in "iu":
            raise TypeError(f"client_ids must be ints, got dtype {client_ids.dtype}.")
        self.client_ids = client_ids.astype(np.int64)
        _check_ids(self.client_ids, len(offsets) - 1)
        self.offsets, self.work, self.execution = offsets, work, execution
        self.seed, self.round = seed, round
        self.start_rounds = round if start_rounds is None else start_rounds
        self.sizes = offsets[self.client_ids + 1] - offsets[self.client_ids]
        self.steps = num_steps(self.sizes, work)
        most = self.steps.max(initial=0)
        if 0 < execution.max_steps < most:
            raise ValueError(
                f"execution.max_steps must be at least {most}, the local steps of the "
                f"cohort's longest client, got {execution.max_steps}."
            )
        self._deal()

    def _deal(self) -> None:
        """Sorts clients longest first and deals blocks to devices, a lap at a time.

        Sorted, a block's clients are of similar length. In a lap every device gets one
        block, and the longest goes where the fewest steps are: block counts differ by
        at most one and steps by one client. Laps after the first 64 are too short to
        matter much and go 0, 1, 1, 0, ..., without a loop: one client more at most.
        """
        devices, block = self.execution.num_devices, self.execution.block_size
        # Ties go by id, so that the order of the drawn ids can't matter.
        order = np.lexsort((self.client_ids, -self.steps))
        order = order[: np.count_nonzero(self.steps)]
        group = np.arange(len(order)) // block
        lap, turn = np.divmod(group, devices)
        self.order = order  # [c'] slots that have work, in queue order
        self.device = np.where(lap % 2 == 0, turn, devices - 1 - turn)
        longest, load = self.steps[order[::block]], np.zeros(devices)
        for first in range(0, min(len(longest), _LAPS * devices), devices):
            steps = longest[first : first + devices]
            to = np.argsort(load, kind="stable")[: len(steps)]
            load[to] += steps
            at = slice(first * block, (first + devices) * block)
            self.device[at] = to[turn[at]]
        self.block, self.lane = lap, np.arange(len(order)) % block
        # Rows, and examples where they are shipped, follow each other in queue order.
        self.row_start, self.device_rows = self._pack(self.steps[order])
        self.example_start, self.device_examples = self._pack(self.sizes[order])

    def _pack(self, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each client of the queue starts on its device, and device totals."""
        start = np.zeros(len(length), np.int64)
        totals = np.zeros(self.execution.num_devices, np.int64)
        for d in range(len(totals)):
            mine = self.device == d
            ends = np.cumsum(length[mine])
            start[mine] = ends - length[mine]
            totals[d] = length[mine].sum()
        return start, totals

    @property
    def need(self) -> Capacity:
        """The least capacity that holds this round."""
        blocks = int(self.block[-1]) + 1 if len(self.order) else 1
        rows, examples = self.device_rows.max(), self.device_examples.max()
        return Capacity(len(self.client_ids), blocks, int(rows), int(examples))

    def local_examples(self) -> list[np.ndarray]:
        """For each device, the examples of its clients in the order it holds them."""
        out = []
        for d in range(self.execution.num_devices):
            slots = self.order[self.device == d]
            group, rank = _members(self.sizes[slots])
            out.append(self.offsets[self.client_ids[slots]][group] + rank)
        return out

    def _visits(self, local: bool, row_capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Every visit to an example: (position in the rows of all devices, example).

        Devices have `row_capacity` rows each. Examples are numbered as in the
        population or, `local`, as their device holds them.
        """
        slots, batch = self.order, self.work.batch_size
        per_epoch = self.work.steps_per_epoch(self.sizes[slots])
        steps = self.steps[slots]
        epochs = -(-steps // np.maximum(per_epoch, 1))
        client, epoch = _members(epochs)  # a walk is one client in one epoch
        length = self.sizes[slots][client]
        walk, rank = _members(length)
        start = self.offsets[self.client_ids[slots]][client]
        example = start[walk] + rank
        # An epoch's order sorts by a hash of who the example is, so it depends neither
        # on the cohort nor on the schedule; one sort serves every walk.
        of_epoch = hash64(self.seed, _BATCH_STREAM, self.round, epoch)
        draw = mix64(of_epoch[walk] ^ mix64(example.view(np.uint64)))
        if local:
            start = self.example_start[client]
        example = start[walk] + _shuffle_within(walk, rank, draw)
        rows_before = self.device[client] * row_capacity + self.row_start[client]
        first = (rows_before + epoch * per_epoch[client]) * batch
        kept = np.minimum(per_epoch[client] * batch, length)
        kept = np.minimum(kept, (steps[client] - epoch * per_epoch[client]) * batch)
        if (kept < length).any():
            keep = rank < kept[walk]
            walk, rank, example = walk[keep], rank[keep], example[keep]
        return first[walk] + rank, example

    def build(
        self,
        capacity: Capacity,
        *,
        num_clients: int,
        sharded_state: bool = False,
        local: bool = False,
    ) -> Cohort:
        """Lays the round out in arrays of the given capacity, without examples.

        Args:
          capacity: at least `need`.
          num_clients: N, the size of the population.
          sharded_state: as in `Cohort`.
          local: `queue.rows` points into `local_examples` rather than the population.

        Returns:
          A `Cohort` of NumPy arrays with ``examples=None``.
        """
        slots, blocks, rows, _ = dataclasses.astuple(capacity)
        devices, batch = self.execution.num_devices, self.work.batch_size
        queue = (devices, blocks, self.execution.block_size)
        drawn, where = slice(len(self.client_ids)), (self.device, self.block, self.lane)

        def filled(shape: Any, fill: int, at: Any, values: Any) -> Any:
            out = np.full(shape, fill, np.int32)
            out[at] = values
            return out

        place = np.ravel_multi_index(where, queue)
        rows_of = (self.order, place) if sharded_state else (drawn, self.client_ids)
        used = np.bincount(self.device[self.lane == 0], minlength=devices)
        visits = filled(devices * rows * batch, -1, *self._visits(local, rows))
        return Cohort(  # of NumPy's arrays, until it is shipped
            client_id=filled(slots, -1, drawn, self.client_ids),
            num_examples=filled(slots, 0, drawn, self.sizes),
            num_steps=filled(slots, 0, drawn, self.steps),
            state_row=filled(slots, max(num_clients, math.prod(queue)), *rows_of),
            start_round=filled(slots, self.round, drawn, self.start_rounds),
            position=filled(slots, 0, self.order, place),
            num_clients=np.int32(num_clients),  # type: ignore[arg-type]
            round=np.int32(self.round),  # type: ignore[arg-type]
            queue=Queue(
                filled(queue, slots, where, self.order),
                filled(queue, 0, where, self.row_start),
                visits.reshape(devices, rows, batch),
                used.astype(np.int32),  # type: ignore[arg-type]
            ),
            examples=None,
            work=self.work,
            execution=self.execution,
            sharded_state=sharded_state,
        )


def _members(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the members of groups so large, one after the other: group, place in it."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


def _check_ids(ids: np.ndarray, num_clients: int) -> None:
    outside = ids[(ids < 0) | (ids >= num_clients)]
    if outside.size:
        raise ValueError(
            f"client_ids must be in 0..{num_clients - 1}, got {outside[0]}."
        )
    ids = np.sort(ids)
    again = ids[1:][ids[1:] == ids[:-1]]
    if again.size:
        raise ValueError(f"client_ids must be distinct, got {again[0]} twice.")


def _shuffle_within(walk: np.ndarray, rank: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """The ranks in each walk in the order of their draws, ``[n]`` int64.

    `walk` does not decrease, `rank` counts 0, 1, ... within each, draws are uint64.
    """
    if not len(walk):
        return rank
    high, low = int(walk[-1]).bit_length(), int(rank.max()).bit_length()
    # Walk, draw and rank in one number: sorting values takes a third of the time of
    # finding the order of two keys. What of the draws does not fit hardly ever matters,
    # and paying for the exact order then costs nothing.
    mask = np.uint64((1 << low) - 1)
    key = (draw >> np.uint64(high)) & ~mask
    key |= rank.view(np.uint64)
    if high:
        key |= walk.view(np.uint64) << np.uint64(64 - high)
    key.sort()
    if ((key[1:] ^ key[:-1]) <= mask).any():
        return rank[np.lexsort((draw, walk))]
    return (key & mask).view(np.int64)


def usual_capacity(
    sizes: np.ndarray, work: LocalWork, execution: Execution, cohort_size: int
) -> Capacity:
    """A capacity that nearly every cohort of at most `cohort_size` clients fits."""
    devices = execution.num_devices
    blocks = -(-cohort_size // (execution.block_size * devices))

    def share(lengths: np.ndarray) -> int:
        # A mean cohort with five standard deviations to spare, but never more than the
        # longest clients together could fill.
        rows = cohort_size * lengths.mean() + 5 * lengths.std() * cohort_size**0.5
        count = min(cohort_size, len(lengths))
        rows = min(rows, np.partition(lengths, -count)[-count:].sum())
        return pow2(rows / devices + lengths.max())

    return Capacity(cohort_size, blocks, share(num_steps(sizes, work)), share(sizes))


def fit(drafts: Sequence[Draft], usual: Capacity) -> Capacity:
    """The usual capacity, grown to a power of two wherever a round exceeds it."""
    need = np.max([dataclasses.astuple(draft.need) for draft in drafts], axis=0)
    return Capacity(
        *(
            have if want <= have else pow2(want)
            for want, have in zip(need, dataclasses.astuple(usual), strict=True)
        )
    )


def plan_round(
    client_ids: np.ndarray | Sequence[int],
    train: Packed,
    work: LocalWork,
    *,
    seed: int,
    round: int,
    execution: Execution | None = None,
    cohort_size: int | None = None,
    public: Mapping[str, np.ndarray] | None = None,
) -> Cohort:
    """Plans a single round with the population's examples, ready for `map_clients`.

    Args:
      client_ids: the clients of the cohort, without repeats.
      train: the population.
      work: local work per client.
      seed: seed of the run.
      round: number of the round.
      execution: blocks and devices, by default one device and blocks of one.
      cohort_size: slots of the cohort; more than clients given leaves padding.
      public: data of the server.
    """
    execution = execution or Execution()
    draft = Draft(
        np.asarray(client_ids),
        train.offsets,
        work,
        seed=seed,
        round=round,
        execution=execution,
    )
    size = cohort_size or max(len(draft.client_ids), 1)
    capacity = fit([draft], usual_capacity(train.sizes, work, execution, size))
    cohort = draft.build(capacity, num_clients=train.num_clients)
    examples: Any = dict(train.examples)
    return dataclasses.replace(
        ship_cohort(dataclasses.replace(cohort, examples=examples), execution.mesh),
        public=ship(dict(public or {}), execution.mesh),
    )
