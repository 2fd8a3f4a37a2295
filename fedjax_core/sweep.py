"""Configs of a method that differ only in numbers, by one compiled program.

Learning rates, clip norms and weights of penalties are arguments of the program, so it
is compiled once for all of them. On CPU it is called for one run after the other; on
accelerators the runs, configs x seeds, lie side by side under `vmap`.
"""

import copy
import dataclasses
import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fedjax_core.data.packed import FederatedData
from fedjax_core.driver import Cell, NonFiniteUpdateError, drive_cells
from fedjax_core.models.model import Model
from fedjax_core.progress import RoundsBar
from fedjax_core.result import Result
from fedjax_core.rounds import seeds_at_once
from fedjax_core.run_dir import SavedRun
from fedjax_core.simulate import Cohorts
from fedjax_core.types import Algorithm

_LOG = logging.getLogger("fedjax_core")
# What Python code raises that wants the value of a traced number.
_WANTS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def numbers(config: Any) -> dict[str, float]:
    """The fields of a config that may be arguments of a program: its floats."""

    def is_number(field: dataclasses.Field, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        # client_lr=1 is a float to its field.
        kind = getattr(field.type, "__origin__", field.type)  # of `types.Positive`, say
        return isinstance(value, float) or kind in (float, "float")

    values = [(f, getattr(config, f.name)) for f in dataclasses.fields(config)]
    return {f.name: float(value) for f, value in values if is_number(f, value)}


def with_numbers(config: Any, values: Mapping[str, Any]) -> Any:
    """The config with other values in some fields, which may be traced.

    Its ``__post_init__`` does not run: a config validates floats when it is built, and
    a traced number has no value to look at. So what a config derives from its numbers
    has to be a property and not a field.
    """
    new = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(new, name, value)  # frozen to everybody else
    return new


def same_but_numbers(a: Any, b: Any) -> bool:
    """Whether two configs can share a program."""
    if type(a) is not type(b) or numbers(a).keys() != numbers(b).keys():
        return False
    return a == with_numbers(b, {name: getattr(a, name) for name in numbers(a)})


def sweep(
    make: Callable[[Any], Algorithm],
    configs: Sequence[Any],
    data: FederatedData,
    model: Model,
    *,
    rounds: int,
    run_dirs: Sequence[str | os.PathLike] | None = None,
    resume: bool = False,
    eval_every: int | None = None,
    checkpoint_every: int | None = None,
    strict: bool = False,
    record: Any = None,
    bar: Callable[[Sequence[int]], bool | RoundsBar] = lambda which: False,
    seeds_axis: str = "auto",
    states: bool = True,
    **options: Any,
) -> list[Result | Exception]:
    """Simulates every config for every seed; arguments as in `simulate`.

    Cohorts and draws are those that `simulate` makes for the seeds. Where a number goes
    into every operation as it is, results are the same bits, too; what a method
    computes from its numbers alone is float32 here and Python's double precision there.

    A method whose Python code looks at one of the numbers (``if config.mu > 0``) is
    compiled for each config, and a warning says so.

    Args:
      make: config -> algorithm.
      configs: frozen dataclasses, equal but for fields that are floats.
      data: the population.
      model: initial parameters and what to measure.
      rounds: rounds of each run.
      run_dirs: one for each config, as `simulate` writes and resumes them.
      resume: continue what they hold.
      eval_every: rounds between evaluations.
      checkpoint_every: rounds between checkpoints.
      strict: give up a config where a client's update is not finite.
      record: whatever else decides the numbers, of all configs.
      bar: configs, by their places, that run at once -> what shows their progress.
      seeds_axis: of runs: "map" one after the other, "vmap" side by side.
      states: keep the last state of every config; without them memory holds those of
        the configs that run at once.
      **options: others of `simulate`, but callbacks.

    Returns:
      For each config the result, or the exception that ended it.

    Raises:
      ValueError, TypeError: what all have in common can't be run, or configs differ in
        more than numbers.
    """
    first = configs[0]
    for config in configs[1:]:
        if not same_but_numbers(first, config):
            raise ValueError(
                f"configs must differ in floats only, got {first!r} and {config!r}."
            )
    differ = [
        name for name, value in numbers(first).items()
        if any(getattr(config, name) != value for config in configs)
    ]  # fmt: skip
    algorithms = [make(config) for config in configs]
    machine = Cohorts(
        algorithms[0], data, model, seeds_axis=seeds_axis, configs=len(configs),
        build=(lambda values: make(with_numbers(first, values))) if differ else None,
        **options,
    )  # fmt: skip
    where = run_dirs or [None] * len(configs)

    def run(machine: Cohorts, which: Sequence[int], values: Sequence[dict]) -> list:
        machine.start(values)
        return drive_cells(
            machine,
            [
                Cell(functools.partial(machine.config, algorithms[i], record), where[i])
                for i in which
            ],
            seeds=machine.seeds,
            rounds=rounds,
            eval_every=eval_every,
            checkpoint_every=checkpoint_every,
            resume=resume,
            progress=bar(which),
            client_ids=data.client_ids,
            strict=strict,
            broken=machine.broken,
        )

    ends: list[Any] = [None] * len(configs)
    one_by_one = [[i] for i in range(len(configs))]
    side_by_side = seeds_at_once(seeds_axis, len(configs) * len(machine.seeds)) > 1
    todo = deque(_level(where) if side_by_side else one_by_one)
    shared = True
    while todo:
        which = todo.popleft()
        try:
            if shared:
                values = [{k: getattr(configs[i], k) for k in differ} for i in which]
                found = run(machine, which, values)
            else:
                alone = Cohorts(
                    algorithms[which[0]], data, model, seeds_axis=seeds_axis, **options
                )
                found = run(alone, which, [{}])
        except Exception as error:
            if shared and isinstance(error, _WANTS_VALUE):
                reason = str(error).splitlines()[0]
                _LOG.warning(
                    "%s looks at one of %s from Python, so every config is compiled: "
                    "%s", algorithms[0].name, ", ".join(differ), reason,
                )  # fmt: skip
                shared = False
            elif jax.process_count() > 1:
                raise  # the others may be without it, and wait
            elif len(which) == 1:
                ends[which[0]] = error
                continue
            # Whatever is wrong, no other config shall suffer from it.
            todo.extendleft([i] for i in reversed(which))
            if not shared:
                todo = deque([i] for batch in todo for i in batch)
            continue
        for i, end in zip(which, found, strict=True):
            ends[i] = end
            if not states and isinstance(end, NonFiniteUpdateError):
                end.result = dataclasses.replace(end.result, state=None)
            elif not states:
                ends[i] = dataclasses.replace(end, state=None)
    return ends


def _level(run_dirs: Sequence[str | os.PathLike | None]) -> list[list[int]]:
    """Runs that stand at the same round, since they run in the same chunks."""
    rounds: dict[int, list[int]] = {}
    for i, path in enumerate(run_dirs):
        at = 0 if path is None else SavedRun(path).round
        rounds.setdefault(at, []).append(i)
    return list(rounds.values())
