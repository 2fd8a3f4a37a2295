"""Drives what runs rounds: evaluation, history, record, resume, reports, progress.

The same for cohorts of clients (`simulate`) and steps of a network (`networks.run`).
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedjax_core import check
from fedjax_core.history import History
from fedjax_core.progress import RoundsBar
from fedjax_core.result import Exclusion, Result
from fedjax_core.run_dir import RunDir
from fedjax_core.types import PyTree

_LOG = logging.getLogger("fedjax_core")
_NEVER = np.zeros((), bool)
_SHOWN = 2  # evaluated metrics beside the bar


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

    @property
    def state(self) -> Any:
        """The state after the last round, leaves ``[S, ...]``."""
        ...

    @property
    def execution(self) -> Any:
        """How rounds run."""
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


def drive(
    machine: Machine,
    *,
    seeds: tuple[int, ...],
    rounds: int,
    eval_every: int | None,
    checkpoint_every: int | None,
    callbacks: Sequence[Callable[[Report], bool | None]],
    progress: bool,
    run_dir: str | os.PathLike | None,
    resume: bool,
    config: dict[str, Any],
    client_ids: tuple[str, ...] = (),
    strict: bool = False,
    broken: str = "the state is not finite",
) -> Result:
    """Runs a machine to the end; arguments as in `simulate`.

    Args:
      machine: what runs.
      seeds: see `checked_seeds`.
      rounds: rounds in all.
      eval_every: rounds between evaluations, by default about twenty in all.
      checkpoint_every: rounds between checkpoints, by default `eval_every`.
      callbacks: called with a `Report`.
      progress: whether to show a bar.
      run_dir: where to record the run, or None.
      resume: whether to continue what is there.
      config: what else decides the numbers: recorded, and compared when resuming.
      client_ids: names of the clients, for those that are excluded.
      strict: raise where an update is not finite.
      broken: what to say of a round after which the state is not finite.
    """
    check.positive_int(rounds=rounds)
    _check_callbacks(callbacks)
    if resume and run_dir is None:
        raise ValueError("resume needs a run_dir to continue, got run_dir=None.")
    # Recorded as given: a longer run may go on with the default of a shorter one.
    config = config | {"rounds": rounds, "seeds": seeds, "eval_every": eval_every}
    if eval_every is None:
        eval_every = max(1, rounds // 20)
    if checkpoint_every is None:
        checkpoint_every = eval_every
    check.positive_int(eval_every=eval_every, checkpoint_every=checkpoint_every)

    history, seconds = History(seeds, client_ids), 0.0
    with contextlib.ExitStack() as cleanup:
        recorder = None
        if run_dir is not None:
            recorder = RunDir(run_dir, config, resume)
            cleanup.callback(recorder.close)
            if resume:
                history.load(recorder)
                if recorder.round:
                    kept = recorder.restore({"state": machine.state})
                    machine.restore(kept["state"])
        started = history.rounds

        def result() -> Result:
            return history.result(
                machine.state,
                seconds=seconds,
                timed_rounds=history.rounds - started,
                compilations=machine.compilations,
                compile_seconds=machine.compile_seconds,
                run_dir=recorder and recorder.path,
                execution=machine.execution if history.rounds > started else None,
            )

        if started >= rounds:
            return result()
        bar = cleanup.enter_context(RoundsBar(started, rounds, progress))
        marks = (eval_every, checkpoint_every)
        spans = _spans(started, rounds, marks, machine.longest())
        chunks = machine.advance(list(spans))
        cleanup.callback(chunks.close)
        clock = _Clock(machine)
        for metrics, cohorts in chunks:
            seconds += clock.lap()
            finite, idle = metrics.pop("finite_model"), metrics.pop("idle", _NEVER)
            excluded = history.add_rounds(metrics, cohorts)
            done = history.rounds
            for e in excluded:
                _LOG.warning(
                    "round %d, seed %d: client %s excluded, its %s is not finite", *e
                )
            message = _refusal(done, seeds, idle, metrics, excluded, strict)
            if not message and not finite.all():
                message = _lost(done, seeds, finite, metrics, excluded, broken)
            if message:
                error = NonFiniteUpdateError(message)
                error.result = result()
                raise error
            values = {}
            if done % eval_every == 0 or done == rounds:
                values, per_client = machine.evaluate()
                history.add_evaluation(values, per_client)
            if recorder:
                history.save(recorder)
            train = {k: v.swapaxes(0, 1) for k, v in metrics.items() if v.ndim == 2}
            stop = False
            if callbacks:  # the state of several seeds has to be put together
                report = Report(done, seeds, train, values, machine.state)
                stops = [f(report) for f in callbacks]  # each of them is called
                stop = any(stops)
            if recorder and (done % checkpoint_every == 0 or done == rounds or stop):
                recorder.save(done, {"state": machine.state})
            bar.update(
                done,
                (done - started) / seconds,
                {k: v[:, -1] for k, v in train.items() if k == "train_loss"}
                # The plainest names are those of pooled metrics.
                | {k: values[k] for k in sorted(values, key=len)[:_SHOWN]},
            )
            if stop:
                break
            clock.start()
        return result()


class _Clock:
    """Laps without the time that went into compiling."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self.start()

    def start(self) -> None:
        self._from = time.perf_counter() - self._machine.compile_seconds

    def lap(self) -> float:
        now = time.perf_counter() - self._machine.compile_seconds
        return now - self._from


def _check_callbacks(callbacks: Any) -> None:
    if not isinstance(callbacks, Iterable) or not all(map(callable, callbacks)):
        raise TypeError(f"callbacks must be a list of functions, got {callbacks!r}.")


def _spans(
    start: int, rounds: int, marks: tuple[int, ...], longest: int
) -> Iterator[tuple[int, int]]:
    """Cuts rounds into chunks (first, count) that end at multiples of `marks`."""
    while start < rounds:
        ends = [start - start % mark + mark for mark in marks]
        count = min(*ends, rounds, start + longest) - start
        yield start, count
        start += count


def _refusal(
    done: int,
    seeds: Sequence[int],
    idle: np.ndarray,
    metrics: Mapping[str, np.ndarray],
    excluded: list[Exclusion],
    strict: bool,
) -> str:
    """Why clients that these rounds excluded can't be passed over, or nothing."""
    if not excluded:
        return ""
    # Not where noise is added: that a run ends would tell that nobody took part.
    nobody = idle & (metrics["excluded_clients"] > 0)
    first = done - len(nobody) + 1
    lost = {(first + k, seeds[s]) for k, s in np.argwhere(nobody)}
    for e in excluded:
        where = f"round {e.round}, seed {e.seed}"
        broken = f"the {e.stage} of client {e.client_id}"
        if strict:
            return f"{where}: {broken} is not finite."
        if (e.round, e.seed) in lost:
            return (
                f"every update of a cohort was excluded because it was not finite; "
                f"first at {where}: {broken}."
            )
    return ""


def _lost(
    done: int,
    seeds: Sequence[int],
    finite: np.ndarray,
    metrics: Mapping[str, np.ndarray],
    excluded: list[Exclusion],
    broken: str,
) -> str:
    """Where the state stopped being finite, and whose updates were there."""
    k, s = np.argwhere(~finite)[0]
    round, seed = done - len(finite) + k + 1, seeds[s]
    message = f"round {round}, seed {seed}: {broken}"
    if "valid_clients" in metrics:
        message += f"; {int(metrics['valid_clients'][k, s])} clients counted"
    ids = [e.client_id for e in excluded if (e.round, e.seed) == (round, seed)]
    if ids:
        message += f"; not finite and excluded: {', '.join(ids)}"
    return f"{message}."


def checked_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """One or several seeds as a tuple.

    Raises:
      TypeError: a seed is no int.
      ValueError: a seed outside 0..2**32 - 1, twice, or none.
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
