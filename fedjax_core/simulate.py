"""Runs a federated algorithm: rounds, evaluation, recording, resuming.

Rounds between two evaluations are one compiled loop; seeds are an axis over whole runs.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
from fedjax_core.feed import (
    Chunk,
    HostFeed,
    Prefetch,
    ResidentFeed,
    check_trainable,
)
from fedjax_core.ids import check_ids
from fedjax_core.models.model import Model
from fedjax_core.own_models import compile_own_evaluation
from fedjax_core.participation import Participation, Uniform
from fedjax_core.result import Result
from fedjax_core.rounds import (
    Build,
    CompiledRounds,
    compile_init,
    gathered,
    joined_seeds,
    seed_keys,
    seeds_at_once,
    split_seeds,
)
from fedjax_core.run_dir import checksum, fingerprint
from fedjax_core.types import Algorithm, Execution, Key, Params, PyTree, trained
from fedjax_core.virtual_time import Timed


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
        rounds are many or slow; one that returns True ends the run. Of several
        processes each calls them, and what the first one's return counts.
      progress: show a progress bar.
      run_dir: directory to record the run in.
      resume: continue what `run_dir` holds, on the same devices to the bits that the
        uninterrupted run has. A finished run returns at once. Refused where what the
        directory records differs: the algorithm's config and parts, `record`, the data,
        `params` and the other arguments. Functions can't be compared: a custom
        optimiser, loss or model of the same shapes is taken at its word.
      checkpoint_every: rounds between checkpoints; by default there is one after an
        evaluation if the last is 30 seconds old, and one at the end.
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
    cohorts = Cohorts(
        algorithm, data, model, cohort_size=cohort_size, participation=participation,
        seeds=seeds, params=params, eval_splits=eval_splits,
        client_summaries=client_summaries, execution=execution, feed=feed,
        client_store=client_store, seeds_axis=seeds_axis,
    )  # fmt: skip
    cohorts.start()
    return drive(
        cohorts,
        seeds=cohorts.seeds,
        rounds=rounds,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        callbacks=callbacks,
        progress=progress,
        run_dir=run_dir,
        resume=resume,
        config=functools.partial(cohorts.config, algorithm, record),
        client_ids=data.client_ids,
        strict=strict,
        broken=cohorts.broken,
    )


def _check_trainable(params: Params) -> None:
    """Raises ValueError or TypeError for a model that no optimiser can train."""
    if not num_parameters(params):
        raise ValueError(f"model must have parameters to train, got {params!r}.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained(params)):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"params must be floats to train, got {leaf.dtype} at "
                f"{jax.tree_util.keystr(path) or 'the only leaf'}; cast it, or keep "
                f"counters among the statistics of a Stateful."
            )


class Cohorts:
    """Cohorts as a `Machine` that `drive` drives; arguments as in `simulate`.

    `build` makes the algorithm in the program, of which `algorithm` is one: they differ
    in numbers alone. So many `configs` may run side by side, each with all S `seeds`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        model: Model,
        *,
        cohort_size: int | None = None,
        participation: Participation | None = None,
        seeds: int | Sequence[int] = 0,
        params: Params | None = None,
        eval_splits: Sequence[str] = ("test",),
        client_summaries: ClientSummaries | None = None,
        execution: Execution | None = None,
        feed: str = "device",
        client_store: str = "auto",
        seeds_axis: str = "auto",
        build: Build | None = None,
        configs: int = 1,
    ):
        # What was asked for.
        check.one_of(("device", "host"), feed=feed)
        check.one_of(("auto", "device", "host"), client_store=client_store)
        check.one_of(("auto", "map", "vmap"), seeds_axis=seeds_axis)
        self.seeds = seeds = checked_seeds(seeds)
        client_summaries = {} if client_summaries is None else client_summaries
        check.functions(client_summaries=client_summaries)
        check.instance(Algorithm, algorithm=algorithm)
        check.instance(FederatedData, data=data)
        check.instance(Model, model=model)
        one = isinstance(eval_splits, str)
        eval_splits = (eval_splits,) if one else tuple(eval_splits)
        for split in eval_splits:
            check.one_of(("train", "test", "validation"), eval_splits=split)
        check_trainable(data.train, algorithm.work)
        check_ids(model.ids, data)
        algorithm.needs(model, data)
        check.one_given(cohort_size=cohort_size, participation=participation)
        participation = participation or Uniform(cohort_size=cohort_size)  # type: ignore
        check.instance(Participation, participation=participation)
        participation.max_cohort_size(data.num_clients)  # raises if it is impossible
        self._algorithm, self._data, self._model = algorithm, data, model
        self._participation, self._eval_splits = participation, eval_splits
        self._client_summaries, self._given = client_summaries, params
        self._build = build or (lambda numbers: algorithm)

        # How cohorts run.
        if execution is None:
            size = participation.expected_cohort_size(data.num_clients)
            execution = choose_execution(
                model, data.train, algorithm.work, size, algorithm.client_bytes,
                runs=seeds_at_once(seeds_axis, configs * len(seeds)),
            )  # fmt: skip
        check.instance(Execution, execution=execution)
        self.execution, self._on_host = execution, feed == "host"
        self._axis, self._where = seeds_axis, client_store
        self._run = CompiledRounds(self._build, seeds, execution)

        def init_params(key):
            new = model.init(key) if params is None else params
            return jax.tree.map(jnp.asarray, new)

        how = self._build, init_params, data.num_clients, execution.mesh
        self._init, self._init_two_rows = compile_init(*how), compile_init(*how, rows=2)
        self._feed = (HostFeed if self._on_host else ResidentFeed)(
            train=data.train,
            work=algorithm.work,
            participation=participation,
            seeds=seeds,
            execution=execution,
        )

    def config(self, algorithm: Algorithm, record: Any) -> dict[str, Any]:
        """What decides the numbers of one of the configs' runs."""
        given = {}
        if self._given is not None:
            given["params"] = checksum(jax.tree.map(jnp.asarray, self._given))
        named = ("name", "config", "parts")
        return given | {
            "algorithm": {name: getattr(algorithm, name) for name in named},
            "participation": self._participation,
            "eval_splits": self._eval_splits,
            "client_summaries": tuple(self._client_summaries),
            "data": self._fingerprint,
            "record": record,
        }

    @property
    def broken(self) -> str:
        """What to say of a round after which the state is not finite."""
        reduce = self._algorithm.parts.get("reduce", "it")
        return (
            "the model is not finite after the server's step, although every update "
            f"that went into {reduce} is"
        )

    @functools.cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return fingerprint(self._data)

    def start(self, numbers: Sequence[Mapping[str, float]] = ({},)) -> None:
        """Begins runs of every seed with each config's numbers, R in all."""
        # Weakly typed, as they would be in Python: they don't widen what they scale.
        self._numbers = {
            name: jnp.stack(
                [jnp.asarray(float(of[name])) for of in numbers for _ in self.seeds]
            )
            for name in numbers[0]
        }
        runs = len(numbers) * len(self.seeds)
        self._at_once = seeds_at_once(self._axis, runs)
        keys = jnp.concatenate([seed_keys(self.seeds)] * len(numbers))
        state = self._initial(keys)
        _check_trainable(state.params)
        self._states = split_seeds(state, self._at_once)  # without rows of the store
        self._feed = dataclasses.replace(
            self._feed, sharded_state=self._store is not None, max_rounds=1
        )
        if not self._on_host and self._store is None:
            size = num_parameters(state.params) // runs
            self._feed = self._feed.with_chunks_for(size)
        # Before the first rounds, not after them.
        served = jax.eval_shape(
            lambda state: self._algorithm.model(jax.tree.map(lambda x: x[0], state)),
            state,
        )
        for split in filled_splits(self._data, self._eval_splits).values():
            check_evaluation(self._model.metrics, served, split, self._client_summaries)

    def _initial(self, keys: Key) -> Any:
        """The first state; sets the store of client states, None on the devices."""
        self._store, where = None, self._where
        if where == "auto":
            shapes = jax.eval_shape(self._init, keys, self._numbers)
            where = choose_client_store(shapes, self.execution.mesh)
        if where == "device":
            return self._init(keys, self._numbers)
        state = self._init_two_rows(keys, self._numbers)
        rows = jax.tree.map(np.asarray, getattr(state, "clients", ()))
        if not jax.tree.leaves(rows):
            return state
        one = jax.tree.map(lambda x: x[:, 0], rows)
        if not all(np.array_equal(x[:, 0], x[:, -1]) for x in jax.tree.leaves(rows)):
            if self._where == "auto":
                return self._init(keys, self._numbers)
            raise ValueError(
                f"client_store='host' needs client states that start out equal; "
                f"{self._algorithm.name}.init gives clients different ones."
            )
        self._store = HostStore(one, self._data.num_clients, self.execution.mesh)
        return state._replace(clients=())

    def _part(self, i: int) -> tuple[range, dict[str, jax.Array]]:
        """The runs of part i, and their numbers."""
        runs = range(i * self._at_once, (i + 1) * self._at_once)
        return runs, {k: x[runs.start : runs.stop] for k, x in self._numbers.items()}

    @property
    def compilations(self) -> int:
        """How often rounds were compiled, since the first `start`."""
        return self._run.compilations

    @property
    def compile_seconds(self) -> float:
        """How long that took."""
        return self._run.compile_seconds

    @property
    def state(self) -> Any:
        """The state with all clients' rows, wherever they live."""
        state = joined_seeds(self._states)
        if self._store is None:
            return state
        return state._replace(clients=self._store.rows)

    def restore(self, state: PyTree) -> None:
        """Goes on from a state of these runs."""
        if self._store is not None:
            # A checkpoint of device arrays comes back as such.
            self._store.rows = jax.tree.map(
                lambda x: np.require(x, requirements="W"), state.clients
            )
            state = state._replace(clients=())
        self._states = split_seeds(state, self._at_once)

    def longest(self) -> int:
        """Rounds in a chunk at most."""
        return self._feed.max_rounds

    def advance(
        self, spans: Sequence[tuple[int, int]]
    ) -> Generator[tuple[dict[str, np.ndarray], list[list[np.ndarray]]], None, None]:
        """Runs chunks (first, count) of rounds; cohorts are ``[count][S]``."""
        store, examples = self._store, self._feed.examples()
        public = ship(dict(self._data.public), self.execution.mesh)
        for chunk in Prefetch(self._feed, spans):
            metrics = []
            for i in range(len(self._states)):
                state, (runs, numbers) = self._states[i], self._part(i)
                first = runs.start % len(self.seeds)
                if store is not None:
                    state = state._replace(clients=store.gather(chunk, runs))
                state, part = self._run(state, chunk, examples, public, numbers, first)
                if store is not None:
                    store.scatter(chunk, state.clients, runs)
                    state = state._replace(clients=())
                self._states[i] = state
                metrics.append(part)
            yield gathered(metrics, axis=1) | self._times(chunk), chunk.client_ids

    def _times(self, chunk: Chunk) -> dict[str, np.ndarray]:
        """How long the rounds of a chunk took, ``[rounds, R]``, where that is known."""
        timed, num_clients = self._feed.participation, self._data.num_clients
        if not isinstance(timed, Timed):
            return {}
        seconds = [
            [timed.round_seconds(seed, round, num_clients) for seed in self.seeds]
            for round, _ in enumerate(chunk.client_ids, chunk.first)
        ]
        configs = len(self._states) * self._at_once // len(self.seeds)
        return {"virtual_seconds": np.tile(seconds, configs)}

    def evaluate(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Scalars, name -> ``[R]``, and values per client, name -> ``[R, N]``."""
        parts = [self._evaluate_part(i) for i in range(len(self._states))]
        scalars, per_client = zip(*parts, strict=True)
        return gathered(scalars), gathered(per_client)

    def _evaluate_part(self, i: int) -> tuple[dict[str, Any], dict[str, Any]]:
        # Without the rows of clients, which would be cut into those of seeds.
        state, rows, (runs, numbers) = self._states[i], (), self._part(i)
        if hasattr(state, "clients"):
            rows, state = state.clients, state._replace(clients=())
        if self._store is not None:
            rows = jax.tree.map(lambda x: x[runs.start : runs.stop], self._store.rows)
        scalars, per_client = self._evaluate(self._served(numbers, state))
        if self._algorithm.own_models is not None:
            own = self._evaluate_own((numbers, state), rows)
            scalars, per_client = scalars | own[0], per_client | own[1]
        return scalars, per_client

    @functools.cached_property
    def _served(self) -> Callable[[dict[str, jax.Array], Any], Params]:
        def one(run):
            return self._build(run[0]).model(run[1])

        return jax.jit(lambda numbers, state: lax.map(one, (numbers, state)))

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
        def own_models(run, row):
            of_client = self._build(run[0]).own_models
            assert of_client is not None
            return of_client(run[1], row)

        return compile_own_evaluation(
            own_models,
            self._model.metrics,
            self._data,
            self._eval_splits,
            self.execution,
            self._on_host,
            self._store is not None,
            self._client_summaries,
        )
