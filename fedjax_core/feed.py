"""Feeds: draw, plan and ship the cohorts of coming rounds while a round runs.

Both kinds make the same cohorts.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from fedjax_core.data.memmap import gather, row_blocks
from fedjax_core.data.packed import Packed
from fedjax_core.devices import ship, ship_cohort
from fedjax_core.execution import round_operations
from fedjax_core.participation import Participation
from fedjax_core.plan import Capacity, Draft, fit, num_steps, usual_capacity
from fedjax_core.types import Cohort, Execution, LocalWork
from fedjax_core.virtual_time import Timed

# About a second of rounds, by what a CPU and an accelerator can do in one.
_CHUNK_OPERATIONS_CPU, _CHUNK_OPERATIONS = 5e10, 1e13
_CHUNK_BYTES = 2**26
_CHUNK_ROUNDS = 64


class Chunk(NamedTuple):
    """Consecutive rounds, ready to run."""

    first: int  # the first round's number
    client_ids: list[list[np.ndarray]]  # [rounds][seeds]
    cohorts: Cohort  # leaves [K, S, ...]; K - rounds at the end are padding


def check_trainable(train: Packed, work: LocalWork) -> None:
    """Raises where nobody could ever train, or jax can't hold examples as they are."""
    if not num_steps(train.sizes, work).any():
        raise ValueError(
            f"data must give some client a local step, got at most "
            f"{train.sizes.max()} examples a client for {work}."
        )
    limits = np.iinfo(np.int32)
    for name, array in train.examples.items():
        if array.dtype.kind in "SUmM":
            raise TypeError(
                f"examples {name!r} must be numbers to train on, got {array.dtype}."
            )
        held = jax.dtypes.canonicalize_dtype(array.dtype)
        narrowed = array.dtype.kind in "iu" and held != array.dtype
        # In pieces, as a memory-mapped array may not fit into memory.
        for piece in row_blocks(array) if narrowed and array.size else ():
            low, high = piece.min(), piece.max()
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"examples {name!r} must fit int32, got values in [{low}, {high}]."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feed:
    """Makes chunks of cohorts for `seeds` side by side, of `max_rounds` K at most.

    They are drawn by `participation` from the examples of `train`, planned for the work
    of a client and laid out for an `execution`. Client state travels with cohorts that
    are `sharded_state`, see `Cohort`.
    """

    train: Packed
    work: LocalWork
    participation: Participation
    seeds: Sequence[int]
    execution: Execution
    max_rounds: int = 1
    sharded_state: bool = False

    _local = False

    def examples(self) -> dict[str, jax.Array] | None:
        """The population's examples on every device, ``[n, ...]``; None on the host."""
        if self._local:
            return None
        return ship(dict(self.train.examples), self.execution.mesh)

    def usual(self) -> Capacity:
        """Capacity of the compiled round."""
        size = max(self.participation.max_cohort_size(self.train.num_clients), 1)
        return usual_capacity(self.train.sizes, self.work, self.execution, size)

    def with_chunks_for(self, num_parameters: int) -> "Feed":
        """The feed with chunks of about a second of work, at least one round each.

        A function of the run alone, not of how fast the machine is, so that a resumed
        run sees the same chunks.
        """
        size = self.participation.expected_cohort_size(self.train.num_clients)
        operations = round_operations(self.train, self.work, num_parameters, size)
        plan = 4 * self.usual().rows * self.execution.num_devices * self.work.batch_size
        cpu = jax.default_backend() == "cpu"
        allowed = _CHUNK_OPERATIONS_CPU if cpu else _CHUNK_OPERATIONS
        rounds = min(allowed / max(operations, 1), _CHUNK_BYTES / plan)
        rounds = min(rounds / len(self.seeds), _CHUNK_ROUNDS)
        return dataclasses.replace(self, max_rounds=max(1, int(rounds)))

    def _draft(self, seed: int, round: int) -> Draft:
        drawn, of_round = self.participation, (seed, round, self.train.num_clients)
        starts = drawn.start_rounds(*of_round) if isinstance(drawn, Timed) else None
        return Draft(
            drawn.draw(*of_round),
            self.train.offsets,
            self.work,
            seed=seed,
            round=round,
            execution=self.execution,
            start_rounds=starts,
        )

    def chunk(self, first: int, rounds: int, usual: Capacity) -> Chunk:
        """Draws, plans and ships rounds ``first .. first + rounds - 1``."""
        drafts = [
            [self._draft(seed, first + k) for seed in self.seeds] for k in range(rounds)
        ]
        capacity = fit([d for row in drafts for d in row], usual)
        plans = [_stack([self._build(d, capacity) for d in row]) for row in drafts]
        plans += [plans[-1]] * (self.max_rounds - rounds)
        cohorts = _stack(plans)
        return Chunk(
            first,
            [[d.client_ids for d in row] for row in drafts],
            ship_cohort(cohorts, self.execution.mesh, lead=2),
        )

    def _build(self, draft: Draft, capacity: Capacity) -> Cohort:
        cohort = draft.build(
            capacity,
            num_clients=self.train.num_clients,
            sharded_state=self.sharded_state,
            local=self._local,
        )
        if not self._local:
            return cohort
        return with_local_examples(cohort, draft, self.train, capacity)


def _stack(trees: Sequence[Cohort]) -> Cohort:
    """Stacks the arrays of all trees on a new first axis."""
    # A single round ships all of a cohort's examples; no need to copy them before.
    if len(trees) == 1:
        return jax.tree.map(lambda x: np.asarray(x)[None], trees[0])
    return jax.tree.map(lambda *x: np.stack(x), *trees)


class ResidentFeed(Feed):
    """The population lives on the devices; a chunk ships int32 indices."""


class HostFeed(Feed):
    """The population stays on the host, memory-mapped if need be.

    A chunk ships the examples that its clients hold.
    """

    _local = True


def with_local_examples(
    cohort: Cohort, draft: Draft, packed: Packed, capacity: Capacity
) -> Cohort:
    """The cohort with the examples of its clients, each device's in its own part."""
    rows = draft.local_examples()
    examples = {}
    for name, array in packed.examples.items():
        out = np.zeros((len(rows), capacity.examples, *array.shape[1:]), array.dtype)
        for d, index in enumerate(rows):
            gather(array, index, out[d, : len(index)])
        examples[name] = out
    return dataclasses.replace(cohort, examples=examples, sharded_examples=True)


class Prefetch:
    """Runs a feed one chunk ahead on a thread."""

    def __init__(self, feed: Feed, spans: Iterable[tuple[int, int]]):
        self._feed, self._usual = feed, feed.usual()
        self._spans = list(spans)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")

    def __iter__(self) -> Iterator[Chunk]:
        asked = (
            self._pool.submit(self._feed.chunk, *span, self._usual)
            for span in self._spans
        )
        try:
            for now, _ahead in itertools.pairwise(itertools.chain(asked, [None])):
                assert now is not None
                yield now.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
