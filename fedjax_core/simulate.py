"""Runs a federated algorithm: rounds, evaluation, recording, resuming.

Rounds between two evaluations are one compiled loop; seeds are an axis over whole runs.
"""

import functools
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from fedjax_core import check
from fedjax_core.client_store import HostStore
from fedjax_core.data.packed import FederatedData
from fedjax_core.devices import ship
from fedjax_core.driver import Report, checked_seeds, drive
from fedjax_core.evaluate import (
    ClientSummaries,
    check_evaluation,
    compile_evaluation,
    filled_splits,
)
from fedjax_core.execution import (
    choose_client_store,
    choose_execution,
    num_parameters,
)
from fedjax_core.feed import HostFeed, Prefetch, ResidentFeed, check_trainable
from fedjax_core.ids import check_ids
from fedjax_core.models.model import Model
from fedjax_core.own_models import compile_own_evaluation
from fedjax_core.participation import Participation, Uniform
from fedjax_core.result import Result
from fedjax_core.rounds import (
    CompiledRounds,
    gathered,
    initial_state,
    joined_seeds,
    seeds_at_once,
    split_seeds,
)
from fedjax_core.run_dir import checksum, fingerprint
from fedjax_core.types import Algorithm, Execution, Params, PyTree, trained

_BROKEN = (
    "the model is not finite after the server's step, although every update that went "
    "into {reduce} is"
)


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
    eval_splits: str | Sequence[str] = ("test",),
    client_summaries: ClientSummaries | None = None,
    strict: bool = False,
    callbacks: Sequence[Callable[[Report], bool | None]] = (),
    progress: bool = True,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    record: Any = None,
    execution: Execution | None = None,
    feed: str = "device",
    client_store: str = "auto",
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
      eval_splits: one or several splits of `data` to evaluate on, those that it has.
      client_summaries: what else to say of every metric over clients:
        ``{"gini": metrics.gini}`` gives "test_accuracy_gini".
      strict: raise where a client's update is not finite instead of leaving the client
        out of the round.
      callbacks: called with a `Report` after every evaluation, and in between where
        rounds are many or slow; one that returns True ends the run.
      progress: show a progress bar.
      run_dir: directory to record the run in.
      resume: continue what `run_dir` holds, on the same devices to the bits that the
        uninterrupted run has. A finished run returns at once. Refused where what the
        directory records differs: the algorithm's config and parts, `record`, the data,
        `params` and the other arguments. Functions can't be compared: a custom
        optimiser, loss or model of the same shapes is taken at its word.
      checkpoint_every: rounds between checkpoints, by default `eval_every`.
      record: whatever else decides the numbers, a dataclass say: written to the run
        directory and compared by value when resuming.
      execution: how cohorts run, by default decided from the devices.
      feed: "device" keeps the population's examples on the devices; "host" ships those
        of each cohort, and in an evaluation chunk by chunk, for populations that do
        not fit. Same results.
      client_store: where client state ``[N, ...]`` lives, "device" or "host"; "auto"
        is the host for what devices could not each hold, or CPUs only as copies. Same
        results.
      seeds_axis: "map" runs seeds one after the other inside the compiled round, "vmap"
        side by side; "auto" picks by device.

    Returns:
      A `Result`. A round in which nobody trains, since nobody was drawn or nobody drawn
      has an example, leaves the state as it was, unless the reduction adds noise: then
      only noise arrives. It is counted like any other, with "valid_clients" 0.

    Raises:
      ValueError, TypeError: an argument is out of range, a label or a token of `data`
        is for `model`, or what `run_dir` has to record has no value (a lock, a
        generator); the message says which.
      RunDirError: `run_dir` holds another run, a longer or a damaged one, or can't be
        written.
      NonFiniteUpdateError: `strict` and an update was not finite, or every update of a
        round was not, or the model is not after the server's step.
    """
    # What was asked for.
    check.one_of(("device", "host"), feed=feed)
    check.one_of(("auto", "device", "host"), client_store=client_store)
    check.one_of(("auto", "map", "vmap"), seeds_axis=seeds_axis)
    if isinstance(eval_splits, str):
        eval_splits = (eval_splits,)
    seeds, eval_splits = checked_seeds(seeds), tuple(eval_splits)
    client_summaries = {} if client_summaries is None else client_summaries
    check.functions(client_summaries=client_summaries)
    participation = _checked(
        algorithm, data, model, cohort_size, participation, eval_splits
    )

    # How cohorts run.
    if execution is None:
        size = participation.expected_cohort_size(data.num_clients)
        execution = choose_execution(
            model, data.train, algorithm.work, size, algorithm.client_bytes
        )
    check.instance(Execution, execution=execution)
    cohorts = _Cohorts(
        algorithm, data, model, participation, seeds, execution,
        params=params, feed=feed, client_store=client_store, seeds_axis=seeds_axis,
        eval_splits=eval_splits, client_summaries=client_summaries,
    )  # fmt: skip

    # Rounds, evaluations, records.
    return drive(
        cohorts,
        seeds=seeds,
        rounds=rounds,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        callbacks=callbacks,
        progress=progress,
        run_dir=run_dir,
        resume=resume,
        config=_config(
            algorithm,
            data,
            participation,
            eval_splits,
            client_summaries,
            record,
            params,
        ),
        client_ids=data.client_ids,
        strict=strict,
        broken=_BROKEN.format(reduce=algorithm.parts.get("reduce", "it")),
    )


def _checked(
    algorithm: Algorithm,
    data: FederatedData,
    model: Model,
    cohort_size: int | None,
    participation: Participation | None,
    eval_splits: tuple[str, ...],
) -> Participation:
    """How cohorts are drawn, once everything is what it should be."""
    check.instance(Algorithm, algorithm=algorithm)
    check.instance(FederatedData, data=data)
    check.instance(Model, model=model)
    for split in eval_splits:
        check.one_of(("train", "test", "validation"), eval_splits=split)
    check_trainable(data.train, algorithm.work)
    check_ids(model.ids, data)
    if (cohort_size is None) == (participation is None):
        raise ValueError(
            "exactly one of cohort_size and participation must be given, got "
            f"cohort_size={cohort_size!r} and participation={participation!r}."
        )
    participation = participation or Uniform(cohort_size=cohort_size)  # type: ignore
    check.instance(Participation, participation=participation)
    participation.max_cohort_size(data.num_clients)  # raises where it is impossible
    return participation


def _check_trainable(params: Params) -> None:
    """Raises ValueError or TypeError for a model that no optimiser can train."""
    if not num_parameters(params):
        raise ValueError(f"model must have parameters to train, got {params!r}.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained(params)):
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            raise TypeError(
                f"params must be floats to train, got {leaf.dtype} at "
                f"{jax.tree_util.keystr(path) or 'the only leaf'}; cast it, or keep "
                f"counters among the statistics of a Stateful."
            )


def _config(
    algorithm: Algorithm,
    data: FederatedData,
    participation: Participation,
    eval_splits: tuple[str, ...],
    client_summaries: ClientSummaries,
    record: Any,
    params: Params | None,
) -> dict[str, Any]:
    """What decides the numbers of a run."""
    given = {}
    if params is not None:
        given["params"] = checksum(jax.tree.map(jax.numpy.asarray, params))
    return given | {
        "algorithm": {
            "name": algorithm.name,
            "config": algorithm.config,
            "parts": algorithm.parts,
        },
        "participation": participation,
        "eval_splits": eval_splits,
        "client_summaries": tuple(client_summaries),
        "data": fingerprint(data),
        "record": record,
    }


class _Cohorts:
    """Cohorts as a `Machine` that `drive` drives; arguments as in `simulate`."""

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        model: Model,
        participation: Participation,
        seeds: tuple[int, ...],
        execution: Execution,
        *,
        params: Params | None,
        feed: str,
        client_store: str,
        seeds_axis: str,
        eval_splits: tuple[str, ...],
        client_summaries: ClientSummaries,
    ):
        self._execution = execution
        self._algorithm, self._data, self._model = algorithm, data, model
        self._on_host, self._eval_splits = feed == "host", eval_splits
        self._client_summaries = client_summaries
        self._at_once = seeds_at_once(seeds_axis, len(seeds))
        self._run = CompiledRounds(algorithm, seeds, execution, self._at_once)
        state, self._store = _initial(
            algorithm, model, params, data, seeds, execution.mesh, client_store
        )
        _check_trainable(state.params)
        self._states = split_seeds(state, self._at_once)  # without rows of the store
        self._feed = (HostFeed if self._on_host else ResidentFeed)(
            train=data.train,
            work=algorithm.work,
            participation=participation,
            seeds=seeds,
            execution=execution,
            sharded_state=self._store is not None,
        )
        if not self._on_host and self._store is None:
            size = num_parameters(state.params) // len(seeds)
            self._feed = self._feed.with_chunks_for(size)
        # Before the first rounds, not after them.
        served = jax.eval_shape(
            lambda state: algorithm.model(jax.tree.map(lambda x: x[0], state)),
            state,
        )
        for split in filled_splits(data, eval_splits).values():
            check_evaluation(model.metrics, served, split, client_summaries)

    @property
    def execution(self) -> Execution:
        return self._execution

    @property
    def compilations(self) -> int:
        return self._run.compilations

    @property
    def compile_seconds(self) -> float:
        return self._run.compile_seconds

    @property
    def state(self) -> Any:
        """The state with all clients' rows, wherever they live."""
        state = joined_seeds(self._states)
        return (
            state if self._store is None else state._replace(clients=self._store.rows)
        )

    def restore(self, state: PyTree) -> None:
        if self._store is not None:
            # A checkpoint of device arrays comes back as such.
            self._store.rows = jax.tree.map(
                lambda x: np.require(x, requirements="W"), state.clients
            )
            state = state._replace(clients=())
        self._states = split_seeds(state, self._at_once)

    def longest(self) -> int:
        return self._feed.max_rounds

    def advance(
        self, spans: Sequence[tuple[int, int]]
    ) -> Generator[tuple[dict[str, np.ndarray], list[list[np.ndarray]]], None, None]:
        mesh, store = self.execution.mesh, self._store
        examples = (
            None if self._on_host else ship(dict(self._data.train.examples), mesh)
        )
        public = ship(dict(self._data.public), mesh)
        for chunk in Prefetch(self._feed, spans):
            metrics = []
            for i in range(len(self._states)):
                state, first = self._states[i], i * self._at_once
                seeds = slice(first, first + self._at_once)
                if store is not None:
                    state = state._replace(clients=store.gather(chunk, seeds))
                state, part = self._run(state, chunk, examples, public, first)
                if store is not None:
                    store.scatter(chunk, state.clients, seeds)
                    state = state._replace(clients=())
                self._states[i] = state
                metrics.append(part)
            yield gathered(metrics, axis=1), chunk.client_ids

    def evaluate(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        parts = [self._evaluate_part(i) for i in range(len(self._states))]
        scalars, per_client = zip(*parts, strict=True)
        return gathered(scalars), gathered(per_client)

    def _evaluate_part(self, i: int) -> tuple[dict[str, Any], dict[str, Any]]:
        # Without the rows of clients, which would be cut into those of seeds.
        state, rows = self._states[i], ()
        if hasattr(state, "clients"):
            rows, state = state.clients, state._replace(clients=())
        if self._store is not None:
            first = i * self._at_once
            seeds = slice(first, first + self._at_once)
            rows = jax.tree.map(lambda x: x[seeds], self._store.rows)
        scalars, per_client = self._evaluate(self._served(state))
        if self._algorithm.own_models is not None:
            own = self._evaluate_own(state, rows)
            scalars, per_client = scalars | own[0], per_client | own[1]
        return scalars, per_client

    @functools.cached_property
    def _served(self) -> Callable[[Any], Params]:
        return jax.jit(lambda state: lax.map(self._algorithm.model, state))

    @functools.cached_property
    def _evaluate(self) -> Callable:
        return compile_evaluation(
            self._model.metrics,
            self._data,
            self._eval_splits,
            self.execution.mesh,
            self._on_host,
            self._client_summaries,
        )

    @functools.cached_property
    def _evaluate_own(self) -> Callable:
        assert self._algorithm.own_models is not None
        return compile_own_evaluation(
            self._algorithm.own_models,
            self._model.metrics,
            self._data,
            self._eval_splits,
            self.execution,
            self._on_host,
            self._store is not None,
            self._client_summaries,
        )


def _initial(
    algorithm, model, params, data, seeds, mesh, client_store
) -> tuple[Any, HostStore | None]:
    """The first state, and the store of client states when they live on the host."""

    def init_params(key):
        return jax.tree.map(
            jax.numpy.asarray, model.init(key) if params is None else params
        )

    first = functools.partial(
        initial_state, algorithm, init_params, seeds, data.num_clients, mesh
    )
    where = client_store
    if where == "auto":
        where = choose_client_store(jax.eval_shape(first), mesh)
    if where == "device":
        return first(), None
    state = first(rows=2)
    rows = jax.tree.map(np.asarray, getattr(state, "clients", ()))
    if not jax.tree.leaves(rows):
        return state, None
    one = jax.tree.map(lambda x: x[:, 0], rows)
    if not all(np.array_equal(x[:, 0], x[:, -1]) for x in jax.tree.leaves(rows)):
        if client_store == "auto":
            return first(), None
        raise ValueError(
            f"client_store='host' needs client states that start out equal; "
            f"{algorithm.name}.init gives clients different ones."
        )
    return state._replace(clients=()), HostStore(one, data.num_clients, mesh)
