"""Runs a federated algorithm: rounds, evaluation, recording, resuming.

Rounds between two evaluations are one compiled loop; seeds are an axis over whole runs.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core import check
from fedjax_core.client_store import HostStore
from fedjax_core.data.packed import FederatedData
from fedjax_core.devices import ship
from fedjax_core.evaluate import compile_evaluation
from fedjax_core.execution import choose_execution, num_parameters
from fedjax_core.feed import (
    EmptyCohortError,
    HostFeed,
    Prefetch,
    ResidentFeed,
    check_shippable,
)
from fedjax_core.history import History
from fedjax_core.models.model import Model
from fedjax_core.participation import Participation, Uniform
from fedjax_core.plan import check_work
from fedjax_core.progress import RoundsBar
from fedjax_core.result import Exclusion, Result
from fedjax_core.rounds import CompiledRounds, initial_state
from fedjax_core.run_dir import RunDir, fingerprint
from fedjax_core.types import Algorithm, Execution, Params, PyTree

_LOG = logging.getLogger("fedjax_core")


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
      state: the algorithm's state, leaves ``[S, ...]``. The next round reuses its
        memory: copy what is to outlive the callback.
    """

    round: int
    seeds: tuple[int, ...]
    train: dict[str, np.ndarray]
    evaluation: dict[str, np.ndarray]
    state: Any


def simulate(
    algorithm: Algorithm,
    data: FederatedData,
    model: Model,
    *,
    rounds: int,
    cohort_size: int | None = None,
    participation: Participation | None = None,
    seeds: int | Sequence[int] = 0,
    params: Params | None = None,
    eval_every: int | None = None,
    eval_splits: Sequence[str] = ("test",),
    strict: bool = False,
    callbacks: Sequence[Callable[[Report], bool | None]] = (),
    progress: bool = True,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    record: Any = None,
    execution: Execution | None = None,
    feed: str = "device",
    client_store: str = "device",
    seeds_axis: str = "auto",
) -> Result:
    """Simulates `rounds` rounds of `algorithm` for every seed.

    Args:
      algorithm: what a round does.
      data: the population. Clients train on ``data.train``.
      model: initial parameters and what to measure. The loss is the algorithm's.
      rounds: rounds to run.
      cohort_size: clients per round, drawn uniformly without replacement.
      participation: how cohorts are drawn, instead of `cohort_size`.
      seeds: one int or several. A seed decides the initial parameters, the cohorts, the
        order of examples and all noise. Several seeds share one compilation.
      params: initial parameters for every seed, instead of ``model.init``.
      eval_every: rounds between evaluations; by default about twenty in all. The last
        round is always evaluated.
      eval_splits: splits of `data` to evaluate on, those that it has.
      strict: raise where a client's update is not finite instead of leaving the client
        out of the round.
      callbacks: called with a `Report` after every evaluation, and in between where
        rounds are many or slow; one that returns True ends the run.
      progress: show a progress bar.
      run_dir: directory to record the run in.
      resume: continue what `run_dir` holds, on the same devices to the bits that the
        uninterrupted run has. A finished run returns at once. Refused where what the
        directory records differs: the algorithm's config and parts, `record`, the data
        and the other arguments. Functions can't be compared: a custom optimiser, loss
        or model of the same shapes is taken at its word.
      checkpoint_every: rounds between checkpoints, by default `eval_every`.
      record: whatever else decides the numbers, a dataclass say: written to the run
        directory and compared by value when resuming.
      execution: how cohorts run, by default decided from the devices.
      feed: "device" keeps the population's examples on the devices; "host" ships those
        of each cohort, and in an evaluation chunk by chunk, for populations that do
        not fit. Same results.
      client_store: where client state ``[N, ...]`` lives, "device" or "host".
      seeds_axis: "map" runs seeds one after the other inside the compiled round, "vmap"
        side by side; "auto" picks by device.

    Returns:
      A `Result`.

    Raises:
      ValueError, TypeError: an argument is out of range, or what `run_dir` has to
        record has no value (a lock, a generator); the message says which.
      EmptyCohortError: the clients drawn have nothing to train on; its `result` is the
        run up to the last recorded round before.
      RunDirError: `run_dir` holds another run, a longer or a damaged one, or can't be
        written.
      NonFiniteUpdateError: `strict` and an update was not finite, or every update of a
        round was not, or the model is not after the server's step.
    """
    check.positive_int(rounds=rounds)
    seeds = tuple(seeds) if isinstance(seeds, Iterable) else (seeds,)
    # Recorded as given: a longer run may go on with the default of a shorter one.
    recorded_eval_every = eval_every
    if eval_every is None:
        eval_every = max(1, rounds // 20)
    if checkpoint_every is None:
        checkpoint_every = eval_every
    check.positive_int(eval_every=eval_every, checkpoint_every=checkpoint_every)
    _check(seeds, cohort_size, participation, callbacks)
    for split in eval_splits:
        check.one_of(("train", "test", "validation"), eval_splits=split)
    check.one_of(("device", "host"), feed=feed, client_store=client_store)
    check.one_of(("auto", "map", "vmap"), seeds_axis=seeds_axis)
    check_work(algorithm.work)
    check_shippable(data.train)
    if resume and run_dir is None:
        raise ValueError("resume needs a run_dir to continue, got run_dir=None.")
    participation = participation or Uniform(cohort_size=cohort_size)  # type: ignore
    participation.max_cohort_size(data.num_clients)  # raises where it is impossible
    if execution is None:
        size = participation.expected_cohort_size(data.num_clients)
        execution = choose_execution(model, data.train, algorithm.work, size)
    mesh = execution.mesh

    state, store = _initial(algorithm, model, params, data, seeds, mesh, client_store)
    history = History(seeds, data.client_ids)
    with contextlib.ExitStack() as cleanup:
        recorder = None
        if run_dir is not None:
            config = {
                "algorithm": {
                    "name": algorithm.name,
                    "config": algorithm.config,
                    "parts": algorithm.parts,
                },
                "rounds": rounds,
                "participation": participation,
                "seeds": seeds,
                "eval_every": recorded_eval_every,
                "eval_splits": tuple(eval_splits),
                "data": fingerprint(data),
                "record": record,
            }
            recorder = RunDir(run_dir, config, resume)
            cleanup.callback(recorder.close)
            if resume:
                state = _restore(recorder, history, state, store)
        if recorder and history.rounds >= rounds:
            return history.result(_whole(state, store), run_dir=recorder.path)

        plan_feed = (HostFeed if feed == "host" else ResidentFeed)(
            train=data.train,
            work=algorithm.work,
            participation=participation,
            seeds=seeds,
            execution=execution,
            slot_state=store is not None,
        )
        examples = None
        if isinstance(plan_feed, ResidentFeed):
            examples = plan_feed.examples()
            if store is None:
                size = num_parameters(state.params) // len(seeds)
                plan_feed = plan_feed.with_chunks_for(size)
        run = CompiledRounds(algorithm, seeds, execution, _seeds_axis(seeds_axis))
        evaluate = compile_evaluation(
            model.metrics, data, eval_splits, mesh, on_host=feed == "host"
        )
        spans = _spans(
            history.rounds, rounds, (eval_every, checkpoint_every), plan_feed.max_rounds
        )
        seconds = 0.0

        def result() -> Result:
            return history.result(
                _whole(state, store),
                seconds=seconds,
                timed_rounds=history.rounds - started,
                compilations=run.compilations,
                compile_seconds=run.compile_seconds,
                run_dir=recorder and recorder.path,
            )

        started = history.rounds
        with _keeping(result), RoundsBar(started, rounds, progress) as bar:
            for chunk in Prefetch(plan_feed, spans):
                clock = time.perf_counter() - run.compile_seconds
                if store is not None:
                    state = state._replace(clients=ship(store.gather(chunk), mesh))
                state, metrics = run(state, chunk, examples)
                finite = metrics.pop("finite_model")
                if store is not None:
                    store.scatter(chunk, state.clients)
                seconds += time.perf_counter() - run.compile_seconds - clock

                excluded = history.add_rounds(metrics, chunk.client_ids)
                done = history.rounds
                for e in excluded:
                    _LOG.warning(
                        "round %d, seed %d: client %s excluded, its %s is not finite",
                        *e,
                    )
                if excluded:
                    _refuse(chunk.first, seeds, metrics, excluded, strict, result)
                if not finite.all():
                    k, s = np.argwhere(~finite)[0]
                    raise _with_result(
                        f"round {chunk.first + k + 1}, seed {seeds[s]}: the model is "
                        f"not finite after the server's step, although every update "
                        f"that went into it is.",
                        result,
                    )
                values = {}
                if done % eval_every == 0 or done == rounds:
                    values, per_client = evaluate(state.params)
                    history.add_evaluation(values, per_client)
                if recorder:
                    history.save(recorder)
                train = {k: v.swapaxes(0, 1) for k, v in metrics.items() if v.ndim == 2}
                report = Report(done, seeds, train, values, _whole(state, store))
                stop = [f(report) for f in callbacks]
                last = done == rounds or any(stop)
                if recorder and (done % checkpoint_every == 0 or last):
                    recorder.save(done, _snapshot(state, store))
                bar.update(
                    done,
                    (done - started) / seconds,
                    {k: v[:, -1] for k, v in train.items() if k == "train_loss"}
                    | {k: v for k, v in values.items() if not k.endswith(_PER_CLIENT)},
                )
                if any(stop):
                    break
        return result()


_PER_CLIENT = ("_client_mean", "_client_p10")


def _check(seeds, cohort_size, participation, callbacks):
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seeds must be ints, got {seed!r}.")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seeds must be in [0, 2**32), got {seed!r}.")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must be one or more distinct ints, got {seeds!r}.")
    if not isinstance(callbacks, Iterable) or not all(map(callable, callbacks)):
        raise TypeError(f"callbacks must be a list of functions, got {callbacks!r}.")
    if (cohort_size is None) == (participation is None):
        raise ValueError(
            "exactly one of cohort_size and participation must be given, got "
            f"cohort_size={cohort_size!r} and participation={participation!r}."
        )


def _seeds_axis(choice: str) -> str:
    if choice == "auto":
        return "map" if jax.default_backend() == "cpu" else "vmap"
    return choice


def _initial(
    algorithm, model, params, data, seeds, mesh, client_store
) -> tuple[Any, HostStore | None]:
    """The first state, and the store of client states when they live on the host."""

    def init_params(key):
        return jax.tree.map(jnp.asarray, model.init(key) if params is None else params)

    num_clients, on_host = data.num_clients, client_store == "host"
    state = initial_state(
        algorithm, init_params, seeds, num_clients, mesh, rows=2 if on_host else None
    )
    if not on_host or not jax.tree.leaves(getattr(state, "clients", ())):
        return state, None
    first = jax.tree.map(lambda x: np.asarray(x[:, 0]), state.clients)
    second = jax.tree.map(lambda x: np.asarray(x[:, -1]), state.clients)
    same = jax.tree.map(np.array_equal, first, second)
    if not all(jax.tree.leaves(same)):
        raise ValueError(
            f"client_store='host' needs client states that start out equal; "
            f"{algorithm.name}.init gives clients different ones."
        )
    return state._replace(clients=()), HostStore(first, num_clients)


def _spans(
    start: int, rounds: int, marks: tuple[int, ...], longest: int
) -> Iterator[tuple[int, int]]:
    """Cuts rounds into chunks (first, count) that end at multiples of `marks`."""
    while start < rounds:
        ends = [start - start % mark + mark for mark in marks]
        count = min(*ends, rounds, start + longest) - start
        yield start, count
        start += count


@contextlib.contextmanager
def _keeping(result: Callable[[], Result]) -> Iterator[None]:
    """Hands the rounds so far to the error that a cohort without work raises."""
    try:
        yield
    except EmptyCohortError as error:
        error.result = result()
        raise


def _refuse(
    first: int,
    seeds: Sequence[int],
    metrics: dict[str, np.ndarray],
    excluded: list[Exclusion],
    strict: bool,
    result: Callable[[], Result],
) -> None:
    """Raises where excluded clients can't be passed over."""
    nobody = (metrics["valid_clients"] == 0) & (metrics["excluded_clients"] > 0)
    if not strict and not nobody.any():
        return
    lost = {(first + k + 1, seeds[s]) for k, s in np.argwhere(nobody)}
    e = next(e for e in excluded if strict or (e.round, e.seed) in lost)
    where = f"round {e.round}, seed {e.seed}"
    if strict:
        message = f"{where}: the {e.stage} of client {e.client_id} is not finite."
    else:
        message = (
            f"every update of a cohort was excluded because it was not finite; first "
            f"at {where}: the {e.stage} of client {e.client_id}."
        )
    raise _with_result(message, result)


def _with_result(message: str, result: Callable[[], Result]) -> NonFiniteUpdateError:
    error = NonFiniteUpdateError(message)
    error.result = result()
    return error


def _whole(state: Any, store: HostStore | None) -> Any:
    """The state with all clients' rows, wherever they live."""
    return state if store is None else state._replace(clients=store.rows)


def _snapshot(state: Any, store: HostStore | None) -> PyTree:
    """What a checkpoint holds; with a host store, all clients' rows."""
    if store is None:
        return {"state": state}
    return {"state": state._replace(clients=()), "rows": store.rows}


def _restore(recorder: RunDir, history: History, state: Any, store: Any) -> Any:
    history.load(recorder)
    if not recorder.round:
        return state
    tree = recorder.restore(_snapshot(state, store))
    if store is not None:
        store.rows = tree["rows"]
    return tree["state"]
