"""Drives what runs rounds: evaluation, history, record, resume, reports, progress.

The same for cohorts of clients (`simulate`) and steps of a network (`networks.run`).
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_core import check, processes
from fedjax_core.history import History
from fedjax_core.interrupt import HeldInterrupt
from fedjax_core.progress import RoundsBar
from fedjax_core.record import to_json
from fedjax_core.result import Result
from fedjax_core.rounds import joined_seeds
from fedjax_core.run_dir import RunDir, versions
from fedjax_core.types import PyTree

_LOG = logging.getLogger("fedjax_core")
_CHECKS = ("finite_model", "idle")  # reported by rounds, and not recorded
_SHOWN = 2  # evaluated metrics beside the bar
_AT_RISK = 30.0  # seconds of work that a crash may cost, where nobody says in rounds


class NonFiniteUpdateError(RuntimeError):
    """A round had an update with a NaN or an infinity that could not be passed over.

    Attributes:
      result: the run up to the last recorded round before the error.
    """

    result: Result


class Report(NamedTuple):
    """What a callback sees after some rounds.

    Attributes:
      round: rounds completed.
      seeds: ``[S]``.
      train: name -> ``[S, k]``, metrics of the last k rounds.
      evaluation: name -> ``[S]``; empty when nothing was evaluated.
      state: the state, leaves ``[S, ...]``. The next round reuses its memory: copy what
        is to outlive the callback.
    """

    round: int
    seeds: tuple[int, ...]
    train: dict[str, np.ndarray]
    evaluation: dict[str, np.ndarray]
    state: Any


class Machine(Protocol):
    """What runs rounds: cohorts of clients, or steps of a network."""

    execution: Any  # how rounds run

    @property
    def state(self) -> Any:
        """The state after the last round, leaves ``[S, ...]``."""
        ...

    @property
    def compilations(self) -> int:
        """How often rounds were compiled."""
        ...

    @property
    def compile_seconds(self) -> float:
        """How long that took."""
        ...

    def restore(self, state: PyTree) -> None:
        """Goes on from a state that another run of the same had."""
        ...

    def longest(self) -> int:
        """Rounds in a chunk at most."""
        ...

    def advance(
        self, spans: Sequence[tuple[int, int]]
    ) -> Generator[tuple[dict[str, np.ndarray], Any], None, None]:
        """Runs chunks (first, count) of rounds.

        Yields:
          Metrics, name -> ``[count, S, ...]``, among them "finite_model" and, with
          cohorts, "idle", bool, which are not recorded; and cohorts, see
          `History.add_rounds`.
        """
        ...

    def evaluate(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Scalars, name -> ``[S]``, and values per client, name -> ``[S, N]``."""
        ...


class Cell(NamedTuple):
    """What a machine runs for every seed, beside others that differ in numbers.

    `config` makes what decides the numbers: recorded, and compared when resuming. To
    make it can be to read all data, so it is asked for only where it is of use.
    """

    config: Callable[[], dict[str, Any]]
    run_dir: str | os.PathLike | None = None  # where to record the runs


def drive(
    machine: Machine,
    *,
    config: Callable[[], dict[str, Any]],
    run_dir: str | os.PathLike | None,
    **options: Any,
) -> Result:
    """Runs a machine that runs one cell to the end; see `drive_cells`.

    Raises:
      NonFiniteUpdateError: the run can't go on.
    """
    (end,) = drive_cells(machine, [Cell(config, run_dir)], **options)
    if isinstance(end, NonFiniteUpdateError):
        raise end
    return end


def drive_cells(
    machine: Machine,
    cells: Sequence[Cell],
    *,
    seeds: tuple[int, ...],
    rounds: int,
    eval_every: int | None,
    checkpoint_every: int | None,
    resume: bool,
    callbacks: Sequence[Callable[[Report], bool | None]] = (),
    progress: bool | RoundsBar = False,
    client_ids: tuple[str, ...] = (),
    strict: bool = False,
    broken: str = "the state is not finite",
) -> list[Result | NonFiniteUpdateError]:
    """Runs a machine to the end; arguments as in `simulate`.

    Args:
      machine: what runs, cell by cell, in each all S seeds: "S" of `Machine` is R here.
      cells: what these are; those to resume stand at the same round.
      seeds: see `checked_seeds`.
      rounds: rounds in all.
      eval_every: rounds between evaluations, by default about twenty in all.
      checkpoint_every: rounds between checkpoints, by default see `simulate`.
      resume: whether to continue what is there.
      callbacks: called with a `Report`, of all cells' runs.
      progress: whether to show a bar, or one that is shown already.
      client_ids: names of the clients, for those that are excluded.
      strict: raise where an update is not finite.
      broken: what to say of a round after which the state is not finite.

    Returns:
      How each cell ended. One that can't go on leaves the others alone.
    """
    check.positive_int(rounds=rounds)
    if not isinstance(callbacks, Iterable) or not all(map(callable, callbacks)):
        raise TypeError(f"callbacks must be a list of functions, got {callbacks!r}.")
    if resume and any(cell.run_dir is None for cell in cells):
        raise ValueError("resume needs a run_dir to continue, got run_dir=None.")
    # Recorded as given: a longer run may go on with the default of a shorter one.
    given = {"rounds": rounds, "seeds": seeds, "eval_every": eval_every}
    if eval_every is None:
        eval_every = max(1, rounds // 20)
    save_every = eval_every if checkpoint_every is None else checkpoint_every
    check.positive_int(eval_every=eval_every, checkpoint_every=save_every)

    how = {"checkpoint_every": checkpoint_every, "resume": resume, "strict": strict}
    _check_same(cells, given | how)
    seconds = 0.0
    with contextlib.ExitStack() as cleanup:
        logs = []
        for k, cell in enumerate(cells):
            mine = slice(k * len(seeds), (k + 1) * len(seeds))
            log = _Log(seeds, client_ids, mine if len(cells) > 1 else slice(None))
            if cell.run_dir is not None:
                log.record = RunDir(cell.run_dir, cell.config() | given, resume)
                cleanup.callback(log.record.close)
            logs.append(log)
        if resume:
            state = machine.state  # of all cells: putting it together copies
            restored = [log.load(state) for log in logs]
            if all(state is not None for state in restored):
                machine.restore(joined_seeds(restored))
        started = logs[0].history.rounds
        assert all(log.history.rounds == started for log in logs)

        def result(log: _Log) -> Result:
            return log.history.result(
                log.part(machine.state),
                seconds=seconds / len(logs),
                timed_rounds=log.history.rounds - started,
                compilations=machine.compilations,
                compile_seconds=machine.compile_seconds,
                run_dir=log.record and log.record.path,
                execution=machine.execution if log.history.rounds > started else None,
            )

        if started >= rounds:
            return [result(log) for log in logs]
        bar = progress
        if isinstance(bar, bool):
            bar = cleanup.enter_context(RoundsBar(started, rounds, bar))
        marks = (eval_every, save_every)
        spans = _spans(started, rounds, marks, machine.longest())
        chunks = machine.advance(list(spans))
        cleanup.callback(chunks.close)
        interrupt = HeldInterrupt(any(log.record for log in logs))
        cleanup.enter_context(interrupt)

        def clock() -> float:
            return time.perf_counter() - machine.compile_seconds

        running, saved, begun = logs, time.monotonic(), clock()
        for metrics, cohorts in chunks:
            seconds += clock() - begun
            for log in running:
                if message := log.add(metrics, cohorts, strict, broken):
                    log.error = NonFiniteUpdateError(message)
                    log.error.result = result(log)
            running = [log for log in running if log.error is None]
            if not running:
                break
            done = running[0].history.rounds
            values = {}
            if done % eval_every == 0 or done == rounds:
                values, per_client = machine.evaluate()
                for log in running:
                    log.history.add_evaluation(log.part(values), log.part(per_client))
            records = [(log, log.record) for log in running if log.record]
            for log, record in records:
                log.history.save(record)
            train = {
                k: v.swapaxes(0, 1)
                for k, v in metrics.items()
                if v.ndim == 2 and k not in _CHECKS
            }
            stop = False
            if callbacks:  # the state of several seeds has to be put together
                of_all = seeds * len(cells)
                report = Report(done, of_all, train, values, machine.state)
                stops = [f(report) for f in callbacks]  # each of them is called
                stop = processes.first_says(any(stops))
            stop |= interrupt.came
            due = done % save_every == 0
            if records and due and checkpoint_every is None:
                due = processes.first_says(time.monotonic() - saved > _AT_RISK)
            if records and (due or done == rounds or stop):
                state, saved = machine.state, time.monotonic()
                for log, record in records:
                    record.save(done, {"state": log.part(state)})
            bar.update(
                done,
                (done - started) / seconds,
                {k: v[:, -1] for k, v in train.items() if k == "train_loss"}
                # The plainest names are those of pooled metrics.
                | {k: values[k] for k in sorted(values, key=len)[:_SHOWN]},
            )
            if stop:
                break
            begun = clock()
        return [log.error or result(log) for log in logs]


def _check_same(cells: Sequence[Cell], how: dict[str, Any]) -> None:
    """Raises ProcessesError unless all processes run the same."""
    for cell in cells if jax.process_count() > 1 else ():
        same = {"recorded": cell.run_dir is not None, "versions": versions()} | how
        with contextlib.suppress(TypeError):  # what has no value can't be compared
            same |= cell.config()
            same = to_json(same)
        processes.check_same(same)


class _Log:
    """What one cell has measured, where that is recorded, and why it had to stop."""

    def __init__(
        self, seeds: tuple[int, ...], client_ids: tuple[str, ...], mine: slice
    ):
        self.history, self._mine = History(seeds, client_ids), mine
        self.record: RunDir | None = None
        self.error: NonFiniteUpdateError | None = None

    def part(self, tree: PyTree) -> PyTree:
        """This cell's part of leaves ``[R, ...]``."""
        if self._mine == slice(None):  # no copy
            return tree
        return jax.tree.map(lambda x: x[self._mine], tree)

    def load(self, state: PyTree) -> PyTree:
        """Goes on from the record's last checkpoint: its state, or None without one."""
        assert self.record is not None
        self.history.load(self.record)
        if not self.record.round:
            return None
        return self.record.restore({"state": self.part(state)})["state"]

    def add(
        self, metrics: Mapping[str, np.ndarray], cohorts: Any, strict: bool, broken: str
    ) -> str:
        """Takes in the rounds of a chunk; why the cell can't go on, or nothing."""
        metrics = {k: v[:, self._mine] for k, v in metrics.items()}
        finite = metrics.pop("finite_model")
        idle = metrics.pop("idle", np.zeros_like(finite))
        excluded = self.history.add_rounds(metrics, cohorts)
        for e in excluded:
            _LOG.warning(
                "round %d, seed %d: client %s excluded, its %s is not finite", *e
            )
        first, seeds = self.history.rounds - len(finite) + 1, self.history.seeds
        # Not where noise is added: that a run ends would tell that nobody took part.
        nobody = idle & (metrics.get("excluded_clients", 0) > 0)
        lost = {(first + k, seeds[s]) for k, s in np.argwhere(nobody)}
        for e in excluded:
            where = f"round {e.round}, seed {e.seed}"
            what = f"the {e.stage} of client {e.client_id}"
            if strict:
                return f"{where}: {what} is not finite."
            if (e.round, e.seed) in lost:
                return (
                    f"every update of a cohort was excluded because it was not finite; "
                    f"first at {where}: {what}."
                )
        if finite.all():
            return ""
        k, s = np.argwhere(~finite)[0]
        message = f"round {first + k}, seed {seeds[s]}: {broken}"
        if "valid_clients" in metrics:
            message += f"; {int(metrics['valid_clients'][k, s])} clients counted"
        ids = [e.client_id for e in excluded if e[:2] == (first + k, seeds[s])]
        if ids:
            message += f"; not finite and excluded: {', '.join(ids)}"
        return f"{message}."


def _spans(
    start: int, rounds: int, marks: tuple[int, ...], longest: int
) -> Iterator[tuple[int, int]]:
    """Cuts rounds into chunks (first, count) that end at multiples of `marks`."""
    while start < rounds:
        ends = [start - start % mark + mark for mark in marks]
        count = min(*ends, rounds, start + longest) - start
        yield start, count
        start += count


def checked_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """One or several seeds as a tuple.

    Raises:
      TypeError, ValueError: a seed is no int, outside 0..2**32 - 1, twice, or none.
    """
    if isinstance(seeds, np.ndarray):
        seeds = seeds.tolist()
    seeds = tuple(seeds) if isinstance(seeds, Iterable) else (seeds,)
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seeds must be ints, got {seed!r}.")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seeds must be in [0, 2**32), got {seed!r}.")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must be one or more distinct ints, got {seeds!r}.")
    return seeds
