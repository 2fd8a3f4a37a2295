"""Compiles rounds: a loop over rounds inside, runs as an axis around it.

A run has a seed and, in a sweep, numbers of the method's config as arguments of the
program: a config with other numbers needs no other program. Runs lie config by config,
seeds inside, so run r of S seeds draws as seed r modulo S.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core import random
from fedjax_core.arrays import numpy_of
from fedjax_core.devices import Spec
from fedjax_core.feed import Chunk
from fedjax_core.loop import loop
from fedjax_core.map import all_finite
from fedjax_core.reduce import select
from fedjax_core.types import Algorithm, Execution, Key, Params, PyTree


def seed_keys(seeds: Sequence[int]) -> Key:
    """Root keys of the runs, ``[S]``."""
    return jnp.stack([random.seed_key(seed) for seed in seeds])


def over_seeds(f: Callable, num_seeds: int) -> Callable:
    """`f` over the leading axis of its arguments, side by side."""
    if num_seeds == 1:

        def single(*args):
            out = f(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: x[None], out)

        return single
    return jax.vmap(f)


Build = Callable[[dict[str, jax.Array]], Algorithm]
"""Makes the algorithm from traced numbers of its config, ``{}`` for all as they are."""


def seeds_at_once(axis: str, num_seeds: int) -> int:
    """How many seeds one call of a compiled program runs.

    In turn, a program of one seed is called for each: within one program their states
    would be copied into one array and out of it again.
    """
    if axis == "auto":
        axis = "map" if jax.default_backend() == "cpu" else "vmap"
    return 1 if axis == "map" else num_seeds


def split_seeds(tree: PyTree, at_once: int) -> list[PyTree]:
    """Leaves ``[S, ...]``, cut into parts of `at_once` seeds."""
    num_seeds = len(jax.tree.leaves(tree)[0])
    if num_seeds == at_once:
        return [tree]
    return [
        jax.tree.map(lambda x, i=i: x[i : i + at_once], tree)
        for i in range(0, num_seeds, at_once)
    ]


def joined_seeds(parts: list[PyTree]) -> PyTree:
    """What `split_seeds` cut, arrays of NumPy's as such."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *xs: numpy_of(xs[0]).concatenate(xs), *parts)


def gathered(
    parts: Sequence[Mapping[str, Any]], axis: int = 0
) -> dict[str, np.ndarray]:
    """Named values of parts of the seeds, with these along `axis`, on the host."""
    return {
        name: np.concatenate([part[name] for part in parts], axis) for name in parts[0]
    }


def compile_init(
    build: Build,
    init_params: Callable[[Key], Params],
    num_clients: int,
    mesh: jax.sharding.Mesh | None,
    rows: int | None = None,
) -> Callable[[Key, dict[str, jax.Array]], PyTree]:
    """``(keys, numbers) -> states`` before the first round, leaves ``[R, ...]``.

    With `rows`, only the first so many rows of its field `clients` are kept, and XLA
    does not make the others.
    """

    def one(run):
        key, numbers = run
        params = init_params(random.stream(key, "params"))
        state = build(numbers).init(params, num_clients)
        if rows is None or not hasattr(state, "clients"):
            return state
        return state._replace(clients=jax.tree.map(lambda x: x[:rows], state.clients))

    return jax.jit(
        lambda keys, numbers: lax.map(one, (keys, numbers)),
        out_shardings=replicated(mesh),
    )


def replicated(mesh: jax.sharding.Mesh | None) -> Any:
    """The sharding that copies an array to every device."""
    return None if mesh is None else jax.sharding.NamedSharding(mesh, Spec())


def compiler_options() -> dict[str, str]:
    """XLA options for rounds.

    On CPU parallelism comes from the clients: splitting each small operation of a local
    step over a thread pool as well costs more than it gains (a third of the time on
    logistic regression), and takes the cores that other devices' clients run on.
    """
    if jax.default_backend() != "cpu":
        return {}
    return {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}


class CompiledRounds:
    """Runs chunks of rounds, compiling once per shape of a chunk and number of runs.

    `build` makes what a round does, `seeds` are all S, `how` says blocks and devices.
    It compiled `compilations` times, for `compile_seconds`.
    """

    def __init__(self, build: Build, seeds: Sequence[int], how: Execution):
        self._keys = seed_keys(seeds)
        self.compilations, self.compile_seconds = 0, 0.0
        self._compiled: dict[Any, Any] = {}

        def one(algorithm, state, key, cohort, examples, public):
            if cohort.examples is None:
                cohort = dataclasses.replace(cohort, examples=examples)
            cohort = dataclasses.replace(cohort, public=public)
            new, metrics = algorithm.round(
                state, cohort, random.round_key(key, cohort.round)
            )
            # A round of nobody leaves everything as it was. The rows of clients are so
            # already, and selecting them would cost a pass over all N.
            idle = metrics.pop("idle", jnp.bool_(False))
            if hasattr(new, "clients"):
                kept = select(
                    idle, state._replace(clients=()), new._replace(clients=())
                )
                new = kept._replace(clients=new.clients)
            else:
                new = select(idle, state, new)
            checks = {"idle": idle, "finite_model": all_finite(new.params)}
            return new, metrics | checks

        def chunk(state, numbers, keys, cohorts, examples, public, first_seed, count):
            def run(state, numbers, key, cohorts):
                algorithm = build(numbers)

                def step(k, state):
                    cohort = jax.tree.map(lambda x: x[k], cohorts)
                    return one(algorithm, state, key, cohort, examples, public)

                return loop(step, state, count, cohorts.client_id.shape[0])

            runs = len(jax.tree.leaves(state)[0])
            configs, at_once = -(-runs // len(seeds)), min(runs, len(seeds))

            def of_runs(x):
                x = lax.dynamic_slice_in_dim(x, first_seed, at_once)
                return x if configs == 1 else jnp.concatenate([x] * configs)

            by_seed = jax.tree.map(lambda x: x.swapaxes(0, 1), cohorts)
            keys, by_seed = jax.tree.map(of_runs, (keys, by_seed))
            state, kept = over_seeds(run, runs)(state, numbers, keys, by_seed)
            return state, jax.tree.map(lambda x: x.swapaxes(0, 1), kept)

        def jitted(state, cohorts):
            shardings = replicated(how.mesh)
            if cohorts.sharded_state and how.mesh is not None:
                rows = jax.sharding.NamedSharding(how.mesh, Spec(None, "clients"))
                kept = type(state)(*[shardings] * len(state))._replace(clients=rows)
                shardings = (kept, shardings)
            return jax.jit(
                chunk,
                donate_argnums=0,
                out_shardings=shardings,
                compiler_options=compiler_options(),
            )

        self._chunk, self._jit = chunk, jitted

    def __call__(
        self,
        state: PyTree,
        chunk: Chunk,
        examples: PyTree,
        public: PyTree,
        numbers: dict[str, jax.Array],
        first_seed: int = 0,
    ) -> tuple[PyTree, dict[str, np.ndarray]]:
        """Runs a chunk for R' runs; their `state`, leaves ``[R', ...]``, is donated.

        These are one run, one config's seeds, or several configs with all seeds each.
        The first has seed `first_seed` of all; `numbers` of the configs are ``[R']``.
        Returns the new state and the metrics of the rounds, ``[rounds, R', ...]``.
        """
        rounds, cohorts = len(chunk.client_ids), chunk.cohorts
        args = state, numbers, self._keys, cohorts, examples, public
        args = *args, jnp.int32(first_seed), jnp.int32(rounds)
        shapes = tuple(x.shape for x in jax.tree.leaves((state, cohorts)))
        run = self._compiled.get(shapes)
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # for debugging
            run = self._chunk
        elif run is None:
            start = time.perf_counter()
            run = self._jit(state, cohorts).lower(*args).compile()
            self._compiled[shapes] = run
            self.compile_seconds += time.perf_counter() - start
            self.compilations += 1
        state, metrics = run(*args)
        return state, {k: np.asarray(v)[:rounds] for k, v in metrics.items()}
