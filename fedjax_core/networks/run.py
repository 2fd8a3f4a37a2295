r"""Runs methods on networks as `simulate` runs algorithms: seeds, records, resuming.

A `System` is a pure step over stacked arrays, :math:`s^{t+1} = F(\omega, s^t, t, key)`,
in a world :math:`\omega` that it reads and never changes: data, events, a graph. Rounds
between two evaluations are one compiled loop; seeds are an axis over whole runs.
`from_operator` makes a system of an `operators.Operator`.

`iterate.iterate` is the loop alone, for use inside `jax.jit`.
"""

import functools
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_core import check, random
from fedjax_core.driver import Report, checked_seeds, drive
from fedjax_core.loop import loop
from fedjax_core.map import all_finite
from fedjax_core.networks import asynchronous, operators
from fedjax_core.networks.operators import Channel, Operator
from fedjax_core.result import Result
from fedjax_core.rounds import (
    compiler_options,
    gathered,
    joined_seeds,
    over_seeds,
    seed_keys,
    seeds_at_once,
    split_seeds,
)
from fedjax_core.run_dir import checksum
from fedjax_core.types import Key, Metrics, PyTree

_LONGEST = 1000
"""Rounds in a chunk, between which callbacks are called and Ctrl-C is heard."""


def _nothing(world: PyTree, state: Any) -> Metrics:
    del world, state
    return {}


class System(NamedTuple):
    """A method on a network, over stacked arrays ``[n, ...]``.

    Attributes:
      name: recorded, and compared when resuming.
      config: hyper-parameters, a dataclass say; recorded and compared as well.
      world: ``key -> pytree``, what the method reads and never changes, drawn once for
        a seed; or such a pytree itself, the same for all seeds. It is an argument of
        the compiled program and never in a checkpoint.
      init: ``(world, key) -> state``.
      step: ``(world, state, t, key) -> (state, metrics)``, round t = 0, 1, ...; keeps
        shapes and dtypes. Metrics are scalars by name, at least one.
      evaluate: ``(world, state) -> metrics``, scalars by name; and values per node
        ``[n]``, of which `Result.client_metrics` has the last.
      horizon: the most rounds that the world has events for, or a privacy budget
        messages, or None.
    """

    name: str
    config: Any
    world: Callable[[Key], PyTree] | PyTree
    init: Callable[[PyTree, Key], Any]
    step: Callable[[PyTree, Any, jax.Array, Key], tuple[Any, Metrics]]
    evaluate: Callable[[PyTree, Any], Metrics] = _nothing
    horizon: int | None = None


def run(
    system: System,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 0,
    eval_every: int | None = None,
    callbacks: Sequence[Callable[[Report], bool | None]] = (),
    progress: bool = True,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    record: Any = None,
    seeds_axis: str = "auto",
) -> Result:
    """Runs `rounds` rounds of `system` for every seed.

    Args:
      system: what a round does.
      rounds: rounds to run.
      seeds: one int or several. A seed decides the world, the first state and all
        noise.
      eval_every: as in `simulate`, which all other arguments are as in, too.
      callbacks: see there.
      progress: see there.
      run_dir: see there.
      resume: see there; refused where the system's name or config, a world given as
        arrays, `record`, or the shapes and dtypes of the state differ. Functions can't
        be compared.
      checkpoint_every: see there.
      record: see there.
      seeds_axis: see there; "map" gives every seed the bits of a run of its own.

    Returns:
      A `Result`; leaves of its `state` are ``[S, ...]``.

    Raises:
      ValueError, TypeError: an argument is out of range, or a step reports something
        else than scalars.
      RunDirError: `run_dir` holds another run, or a longer one.
      NonFiniteUpdateError: the state is not finite at the end of a chunk of rounds;
        says after which of them it was not for the first time.
    """
    check.instance(System, system=system)
    check.one_of(("auto", "map", "vmap"), seeds_axis=seeds_axis)
    check.positive_int(rounds=rounds)
    seeds = checked_seeds(seeds)
    if system.horizon is not None and rounds > system.horizon:
        raise ValueError(
            f"rounds must be at most {system.horizon}, for which {system.name} has "
            f"events or a privacy budget, got {rounds}."
        )
    steps = _Steps(system, seeds, seeds_axis)
    return drive(
        steps,
        seeds=seeds,
        rounds=rounds,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        callbacks=callbacks,
        progress=progress,
        run_dir=run_dir,
        resume=resume,
        config=lambda: {
            "system": {"name": system.name, "config": system.config},
            "horizon": system.horizon,
            "world": None if callable(system.world) else checksum(system.world),
            "state": [f"{x.dtype}{x.shape[1:]}" for x in jax.tree.leaves(steps.state)],
            "record": record,
        },
    )


class _Steps:
    """A system as a `Machine` that `drive` drives.

    One program runs a block of seeds: each of them by itself, so that it has the bits
    of a run of its own, and as many at a time as there are cores; or all, side by side.
    """

    execution = None

    def __init__(self, system: System, seeds: tuple[int, ...], axis: str):
        self._system, self._width = system, seeds_at_once(axis, len(seeds))
        self._keys = split_seeds(seed_keys(seeds), self._width)
        self.compilations, self.compile_seconds = 0, 0.0

        def init(world, key):
            return system.init(world, random.stream(key, "init"))

        self._worlds = self._drawn()
        start = self._compiled(self._by_seed(init), self._worlds[0], self._keys[0])
        self._states = _of_blocks(start, self._worlds, self._keys)
        self._evaluate = jax.jit(self._by_seed(system.evaluate))

    def _drawn(self) -> list[PyTree]:
        """Every block's world: leaves ``[seeds, ...]``, or those given."""
        world = self._system.world
        if not callable(world):
            return [jax.tree.map(jnp.asarray, world)] * len(self._keys)

        def draw(key):
            return jax.tree.map(_array, world(random.stream(key, "world")))

        draw_block = self._compiled(over_seeds(draw, self._width), self._keys[0])
        return _of_blocks(draw_block, self._keys)

    def _compiled(self, f: Callable, *args: PyTree) -> Callable:
        """`f` for arguments like these, of one block."""
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return f
        start = time.perf_counter()
        # Where blocks take all cores, operations are not split as well.
        options = compiler_options() if len(self._keys) > 1 else {}
        compiled = jax.jit(f, compiler_options=options).lower(*args).compile()
        self.compile_seconds += time.perf_counter() - start
        return compiled

    def _by_seed(self, f: Callable) -> Callable:
        """``f(world, *args)`` for the seeds of a block, with args ``[seeds, ...]``."""

        def one(*args):
            return jax.tree.map(_array, f(*args))

        if callable(self._system.world):
            return over_seeds(one, self._width)
        return lambda world, *args: over_seeds(
            functools.partial(one, world), self._width
        )(*args)

    @property
    def state(self) -> Any:
        return joined_seeds(self._states)

    def restore(self, state: PyTree) -> None:
        self._states = split_seeds(state, self._width)

    def longest(self) -> int:
        return _LONGEST

    def advance(
        self, spans: Sequence[tuple[int, int]]
    ) -> Generator[tuple[dict[str, np.ndarray], None], None, None]:
        def chunk(world, keys, states, first, count, watched):
            def one(world, key, state):  # of one seed
                def step(k, state):
                    t = first + k
                    key_of_round = random.round_key(key, t)
                    state, metrics = self._system.step(world, state, t, key_of_round)
                    _check_metrics(self._system.name, metrics)
                    # To look at all of the state can take longer than the round.
                    finite = lax.cond(
                        watched | (k + 1 == count),
                        lambda: all_finite(state),
                        lambda: jnp.bool_(True),
                    )
                    return state, metrics | {"finite_model": finite}

                # Room for the longest: a resumed run is the same program, to the bit.
                return loop(step, state, count, _LONGEST)

            return self._by_seed(one)(world, keys, states)

        numbers = np.int32(0), np.int32(0), np.bool_(False)
        args = self._worlds[0], self._keys[0], self._states[0], *numbers
        compiled = self._compiled(chunk, *args)
        self.compilations += not jax.config.jax_disable_jit  # type: ignore[attr-defined]

        def run(span, world, keys, states):
            args = world, keys, states, *np.asarray(span, np.int32)
            state, metrics = compiled(*args, np.bool_(False))
            if np.asarray(metrics["finite_model"])[:, span[1] - 1].all():
                return state, metrics
            return compiled(*args, np.bool_(True))  # says after which round

        for first, count in spans:
            this = functools.partial(run, (first, count))
            done = _of_blocks(this, self._worlds, self._keys, self._states)
            self._states = [states for states, _ in done]
            yield (
                {k: x.T[:count] for k, x in gathered([m for _, m in done]).items()},
                None,
            )

    def evaluate(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        values = gathered(list(map(self._evaluate, self._worlds, self._states)))
        return (
            {name: x for name, x in values.items() if x.ndim == 1},
            {name: x for name, x in values.items() if x.ndim > 1},
        )


def _of_blocks(f: Callable, *parts: Sequence[PyTree]) -> list[PyTree]:
    """`f`, compiled, of every block of seeds; several at a time, each on a core."""
    if len(parts[0]) == 1:
        return [f(*(part[0] for part in parts))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(f, *parts))


def _array(x: ArrayLike) -> jax.Array:
    """A number becomes an array of its type, as a checkpoint would give it back."""
    return jnp.asarray(x, jnp.result_type(x))


class State(NamedTuple):
    """Of an operator's run.

    Attributes:
      params: W, leaves ``[n, ...]``.
      sent: past messages, leaves ``[max_delay + 1, n, ...]``, under a schedule.
    """

    params: PyTree
    sent: PyTree


def from_operator(
    operator: Operator | Callable[[PyTree], Operator],
    W: PyTree | Callable[[PyTree, Key], PyTree],
    *,
    name: str,
    config: Any = None,
    world: Callable[[Key], PyTree] | PyTree = (),
    measure: Callable[[PyTree, PyTree], Metrics] = _nothing,
    evaluate: Callable[[PyTree, PyTree], Metrics] = _nothing,
    channel: Channel | None = None,
    schedule: asynchronous.Schedule | None = None,
) -> System:
    """Makes a system of a method on a network.

    Every round reports "messages": two per edge of positive weight, as every node
    sends; without a graph, one to and one from the server per node that takes part.

    Args:
      operator: the method; or ``world -> Operator``, called in every round, so what
        costs much belongs in the world.
      W: where to start, leaves ``[n, ...]``; or ``(world, key) -> W``.
      name: see `System`, as for config and world.
      config: see there.
      world: see there.
      measure: ``(world, W) -> metrics``, scalars of every round.
      evaluate: ``(world, W) -> metrics``, see `System`.
      channel: what happens to messages on their way, see `operators.step`.
      schedule: runs the method asynchronously, an event a round, see
        `asynchronous.run`.
    """

    def method(world):
        return operator if isinstance(operator, Operator) else operator(world)

    def init(both, key):
        world, schedule = both
        start = W(world, key) if callable(W) else jax.tree.map(jnp.asarray, W)
        if schedule is None:
            return State(start, ())
        return State(*asynchronous.start(method(world), schedule, start, key))

    def step(both, state, t, key):
        world, schedule = both
        now = method(world)
        if schedule is None:
            new = State(operators.step(now, channel)(state.params, t, key), ())
        else:
            new = State(*asynchronous.step(now, schedule, channel)(state, t, key))
        sent = {"messages": operators.num_messages(now, state.params, t, key)}
        return new, sent | measure(world, new.params)

    if schedule is not None and callable(world):  # or it is recorded with the world
        config = {"config": config, "schedule": checksum(schedule)}
    return System(
        name=name,
        config=config,
        world=(
            (lambda key: (world(key), schedule))
            if callable(world)
            else (world, schedule)
        ),
        init=init,
        step=step,
        evaluate=lambda both, state: evaluate(both[0], state.params),
        horizon=None if schedule is None else schedule.num_events,
    )


def _check_metrics(name: str, metrics: Metrics) -> None:
    shapes = {key: jnp.shape(value) for key, value in metrics.items()}
    if not shapes or any(shapes.values()):
        raise ValueError(
            f"{name} must report scalars in every round, at least one, got arrays of "
            f"shapes {shapes}."
        )
