"""A study: methods x settings x seeds, each cell a run directory, resumable as a whole.

::

  tuning/SETTING/METHOD/POINT/   a point of a grid, evaluated on validation data alone
  runs/SETTING/METHOD/           the cell, evaluated on test data
  study.json                     grids and their winners, numbers, errors, versions
  command.json                   what made it

Cells that differ only in numbers run as one program, see `fedjax_core.sweep`.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_core import check, command, processes
from fedjax_core.data.packed import FederatedData
from fedjax_core.driver import checked_seeds
from fedjax_core.history import read_result
from fedjax_core.models.model import Model
from fedjax_core.progress import CellsBar
from fedjax_core.record import to_json
from fedjax_core.result import Result
from fedjax_core.run_dir import (
    RunDirError,
    fingerprint,
    read_json,
    versions,
    write_json,
)
from fedjax_core.sweep import same_but_numbers, sweep
from fedjax_core.types import Algorithm, LossFn

_OURS = {"seeds", "rounds", "run_dir", "resume", "eval_splits", "progress", "callbacks"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table.

    Attributes:
      make: ``(config, loss_fn) -> Algorithm``, as the modules of
        `fedjax_core.algorithms` have it; `functools.partial` brings plugs.
      config: hyper-parameters.
      grid: fields of the config -> values to try. Every combination runs on the
        study's `tuning_seeds`, and the one that is best on validation data is taken.
      metric: what is reported instead of the study's, "personal_accuracy" say.
    """

    make: Callable[[Any, LossFn], Algorithm]
    config: Any
    grid: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    metric: str | None = None

    def __post_init__(self):
        names = {field.name for field in dataclasses.fields(self.config)}
        for name, values in self.grid.items():
            check.one_of(sorted(names), grid=name)
            if not len(values):
                raise ValueError(f"grid must try some {name}, got none.")
        self.points()  # each is a valid config

    @classmethod
    def of(
        cls,
        module: Any,
        *,
        grid: Mapping[str, Sequence[Any]] | None = None,
        metric: str | None = None,
        **config: Any,
    ) -> "Method":
        """That of a module of `fedjax_core.algorithms`, by the fields of its config."""
        make, grid = module.make, grid or {}
        return cls(make=make, config=module.Config(**config), grid=grid, metric=metric)

    def points(self) -> dict[str, Any]:
        """Name -> config of every point of the grid."""
        values = itertools.product(*self.grid.values())
        changes = [dict(zip(self.grid, point, strict=True)) for point in values]
        return {
            ",".join(f"{k}={v}" for k, v in change.items()).replace("/", "_"): (
                dataclasses.replace(self.config, **change)
            )
            for change in changes
            if change
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A column of the table: a problem that methods are compared on.

    Attributes:
      data: the population; its split "test" is reported, "validation" tuned on.
      model: initial parameters and what to measure.
      rounds: rounds of every run.
      options: other arguments of `simulate`, as ``{"cohort_size": 10}``.
    """

    data: FederatedData
    model: Model
    rounds: int
    options: Mapping[str, Any]

    def __post_init__(self):
        check.instance(FederatedData, data=self.data)
        check.instance(Model, model=self.model)
        check.positive_int(rounds=self.rounds)
        for name in sorted(_OURS & set(self.options)):
            raise ValueError(f"options must leave {name} to the study, got it.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Design:
    """What is asked of the numbers of a study.

    Attributes:
      seeds: of every cell; they pair the methods, since a seed has the same cohorts and
        draws in all of them.
      tuning_seeds: of the grids, apart from `seeds`.
      metric: what is reported: "test_<metric>" at the end of a run.
      higher_is_better: whether it is to be large.
      printed: (method, setting) -> the number that a paper prints, or that and its
        deviation over seeds.
      claims: (better, worse, setting), orderings of two methods to be tested.
      level: chance of calling one held, and of calling it not held, where both methods
        are alike.
      show_best: whether to show each run's best evaluation beside its last one, and to
        compare that with printed numbers, see `Result.best`. Claims are of the last.
    """

    seeds: Sequence[int] = range(5)
    tuning_seeds: Sequence[int] = (1000,)
    metric: str = "accuracy"
    higher_is_better: bool = True
    printed: Mapping[tuple[str, str], float | Sequence[float]] = dataclasses.field(
        default_factory=dict
    )
    claims: Sequence[tuple[str, str, str]] = ()
    level: float = 0.05
    show_best: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(Design):
    """Methods that are compared in settings, over seeds.

    Attributes:
      methods: by name.
      settings: by name.
      eval_splits: what cells are evaluated on, "test" among them.
    """

    methods: Mapping[str, Method]
    settings: Mapping[str, Setting]
    eval_splits: Sequence[str] = ("test",)

    def __post_init__(self):
        check.open_interval(0, 1, level=self.level)
        if "test" not in self.eval_splits:
            raise ValueError(f"eval_splits must name test, got {self.eval_splits}.")
        for name in ("seeds", "tuning_seeds"):
            object.__setattr__(self, name, checked_seeds(getattr(self, name)))
        both = {*self.seeds} & {*self.tuning_seeds}
        if both:
            raise ValueError(
                f"tuning_seeds must not be among seeds, got {sorted(both)} in both."
            )
        for what, names in (("methods", self.methods), ("settings", self.settings)):
            if not names:
                raise ValueError(f"{what} must name one or more, got {names!r}.")
            for name in names:
                if not name or name.startswith(".") or set(name) & set('/\\:*?"<>|'):
                    raise ValueError(f"{what} must be names of folders, got {name!r}.")
        for method, setting in self.printed:
            check.one_of(list(self.methods), printed=method)
            check.one_of(list(self.settings), printed=setting)
        for better, worse, setting in self.claims:
            check.one_of(list(self.methods), claims=better)
            check.one_of(list(self.methods), claims=worse)
            check.one_of(list(self.settings), claims=setting)
        tuned = [m for m, method in self.methods.items() if method.grid]
        for name, setting in self.settings.items():
            if tuned and "validation" not in setting.data.splits:
                raise ValueError(
                    f"the data of setting {name!r} must have a validation split to "
                    f"tune {tuned[0]!r} on; `split_examples` makes one."
                )

    def only(self, methods: Collection[str]) -> "Study":
        """That of some of its methods, with what is printed and claimed of them."""
        return dataclasses.replace(
            self,
            methods={k: v for k, v in self.methods.items() if k in methods},
            printed={k: v for k, v in self.printed.items() if k[0] in methods},
            claims=[c for c in self.claims if {*c[:2]} <= {*methods}],
        )


class Trial(NamedTuple):
    """A point of a grid."""

    point: str
    score: float  # mean over seeds on validation data, NaN where it failed
    error: str


class Row(NamedTuple):
    """A cell of the study and how it ended."""

    method: str
    setting: str
    config: Any  # hyper-parameters that ran
    metric: str  # its name in `result`, as "test_accuracy"
    result: Result | None  # its state is in its run directory; None where it failed
    error: str  # why it failed or how far it is, or nothing
    trials: tuple[Trial, ...] = ()  # the grid
    taken: str = ""  # the point of the grid that `config` is
    finished: bool = True  # whether it has come to its end or failed

    @property
    def values(self) -> np.ndarray:
        """The metric at the end, ``[S]``; none where the cell did not get there."""
        return self.last(self.metric)

    def last(self, metric: str) -> np.ndarray:
        """As `values`, of any metric that the result has."""
        if self.result is None or self.error:
            return np.zeros(0)
        return self.result.series(metric)[1][:, -1]

    def best(self, higher_is_better: bool = True) -> np.ndarray:
        """The best evaluation of each run, ``[S]``, or none, as `values`."""
        if not len(self.values):
            return self.values
        assert self.result is not None
        return self.result.best(self.metric, lowest=not higher_is_better)[:, -1]


class Outcome(NamedTuple):
    """What a study has measured; `fedjax_core.study_report` shows it."""

    study: Design
    out: Path  # its folder
    rows: list[Row]
    made: Mapping[str, Any]  # data, settings and versions behind them, as JSON

    def row(self, method: str, setting: str) -> Row:
        """The cell of that name."""
        cells = {(row.method, row.setting): row for row in self.rows}
        return cells[method, setting]


class _Job(NamedTuple):
    """A run directory to fill: a cell, or a point of a cell's grid."""

    path: Path
    method: str
    setting: str
    config: Any


def run(study: Study, out: str | os.PathLike, *, progress: bool = True) -> Outcome:
    """Runs what is not there yet of a study, and reads what is.

    A cell that fails is a row with its error, and is tried again by the next call.

    Args:
      study: what to run.
      out: its folder, new or of the same study.
      progress: whether to show a bar.

    Raises:
      KeyboardInterrupt: with a message that says how to go on. Runs are kept up to
        their last checkpoints.
    """
    out = Path(out)
    if not command.exists(out):
        command.write(out, command.of_program())
    rows = [_row(study, m, s) for s in study.settings for m in study.methods]
    settings = {
        name: {
            "data": fingerprint(setting.data),
            "rounds": setting.rounds,
            "options": to_json(dict(setting.options)),
        }
        for name, setting in study.settings.items()
    }
    made = {"versions": versions(), "settings": settings}
    outcome = _noted(Outcome(study, out, rows, made), rows)
    points = [
        _Job(out / "tuning" / s / m / point, m, s, config)
        for m, s, *_ in rows
        for point, config in study.methods[m].points().items()
    ]
    with CellsBar(len(points) + len(rows), progress) as bar:
        try:
            tried = _run(study, points, ("validation",), study.tuning_seeds, bar)
            grids = [(job, tried[job.path]) for job in points]
            rows = [_tuned(study, row, grids) for row in rows]
            _noted(outcome, rows)
            jobs = [
                _Job(out / "runs" / row.setting / row.method, *row[:3])
                for row in rows
                if row.config is not None
            ]
            ends = _run(study, jobs, study.eval_splits, study.seeds, bar)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped with {bar.finished} of {bar.cells} runs done; the same call "
                f"goes on from there."
            ) from None
    found = {job[1:3]: ends[job.path] for job in jobs}
    rows = [_ended(row, found[row[:2]]) if row[:2] in found else row for row in rows]
    return _noted(outcome, rows)


def read(out: str | os.PathLike) -> Outcome:
    """What is in the folder of a study, which may be going on; runs nothing.

    Raises:
      RunDirError: it is none, or its record is damaged.
    """
    out, rows = Path(out), []
    path, again = out / "study.json", "the call that made it writes it again"
    if not path.exists():
        raise RunDirError(f"{out} is no study, since it has no study.json.")
    record = read_json(path, dict, again)
    try:
        printed = {(m, s): v for m, s, v in record["design"].pop("printed")}
        design = Design(**record["design"], printed=printed)
        for line in record["rows"]:
            trials = tuple(Trial(**trial) for trial in line["trials"])
            del line["values"]  # may be out of date
            row = Row(**line | {"result": None, "trials": trials})
            rounds = record["settings"][row.setting]["rounds"]
            rows.append(_as_it_is(row, out / "runs" / row.setting / row.method, rounds))
        made = {name: record[name] for name in ("versions", "settings")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunDirError(f"{path} is damaged: {error!r}; {again}.") from None
    return Outcome(design, out, rows, made)


def _as_it_is(row: Row, path: Path, rounds: int) -> Row:
    """A cell by its run directory, which goes on after its line was written."""
    if row.error and row.finished:  # it failed
        return row
    if not (path / "config.json").exists():
        return row if row.error else _ended(row, f"{path} is gone")
    try:
        result = read_result(path)
    except RunDirError as error:
        return _ended(row, str(error))
    if result.rounds >= rounds:
        return _ended(row, result)
    if not result.rounds:
        return row
    error = f"is at round {result.rounds} of {rounds}"
    return row._replace(result=result, error=error, finished=False)


def _run(
    study: Study,
    jobs: Sequence[_Job],
    splits: Sequence[str],
    seeds: Sequence[int],
    bar: CellsBar,
) -> dict[Path, Result | Exception]:
    """The results of jobs, or why they failed, by their paths."""
    ends: dict[Path, Result | Exception] = {}
    for group in _groups(study, jobs):
        paths, first = [job.path for job in group], group[0]
        method, setting = study.methods[first.method], study.settings[first.setting]
        try:
            found = sweep(
                lambda config: method.make(config, setting.model.loss),  # noqa: B023
                [job.config for job in group],
                setting.data,
                setting.model,
                rounds=setting.rounds,
                seeds=seeds,
                eval_splits=tuple(splits),
                run_dirs=paths,
                resume=True,
                states=False,  # those of all cells may not fit into memory
                bar=lambda which: bar.part(len(which), setting.rounds),  # noqa: B023
                **setting.options,
            )
        except Exception as error:
            if jax.process_count() > 1:
                raise  # the others may be without it, and wait
            found = [error] * len(group)
        bar.add(len(group))
        ends |= zip(paths, found, strict=True)
    return ends


def _groups(study: Study, jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Jobs that one program can run."""
    groups: list[list[_Job]] = []
    for job in jobs:
        for group in groups:
            first = group[0]
            if (
                job.setting == first.setting
                and study.methods[job.method].make == study.methods[first.method].make
                and same_but_numbers(job.config, first.config)
            ):
                group.append(job)
                break
        else:
            groups.append([job])
    return groups


def _row(study: Study, method: str, setting: str) -> Row:
    """A cell that has not run."""
    this = study.methods[method]
    config, metric = None if this.grid else this.config, this.metric or study.metric
    return Row(
        method, setting, config, f"test_{metric}", None, "has not run", finished=False
    )


def _tuned(
    study: Study, row: Row, grids: Sequence[tuple[_Job, Result | Exception]]
) -> Row:
    """With the config that is best on validation data, and with its grid."""
    metric = row.metric.replace("test_", "validation_", 1)
    mine = [(job, end) for job, end in grids if job[1:3] == row[:2]]
    if not mine:
        return row
    trials = [Trial(job.path.name, *_score(end, metric)) for job, end in mine]
    sign = 1 if study.higher_is_better else -1
    order = [sign * t.score if math.isfinite(t.score) else -math.inf for t in trials]
    best = int(np.argmax(order))
    row = row._replace(trials=tuple(trials))
    for job, end in mine:
        if isinstance(end, RunDirError):  # that says nothing about the point
            return _ended(row, f"point {job.path.name} of its grid did not run: {end}")
    if order[best] == -math.inf:
        why = [t.error or f"its {metric} is {t.score}" for t in trials]
        return _ended(row, f"no point of its grid is of use: {why[0]}")
    return row._replace(config=mine[best][0].config, taken=trials[best].point)


def _score(end: Result | Exception | str, metric: str) -> tuple[float, str]:
    """The metric at the end, averaged over seeds, or NaN and why."""
    if not isinstance(end, Result):
        return math.nan, str(end) or type(end).__name__
    try:
        return end.final(metric)[0], ""
    except KeyError as error:
        return math.nan, str(error.args[0])


def _ended(row: Row, end: Result | Exception | str) -> Row:
    error = _score(end, row.metric)[1]
    result = end if isinstance(end, Result) and not error else None
    return row._replace(result=result, error=error, finished=True)


def _noted(outcome: Outcome, rows: list[Row]) -> Outcome:
    """With these rows, on disk as well."""
    outcome = outcome._replace(rows=rows)
    if processes.is_first():
        write_json(outcome.out / "study.json", summary(outcome))
    return outcome


def summary(outcome: Outcome) -> dict[str, Any]:
    """What study.json holds: what was asked, how it was made and what came out."""
    study = outcome.study
    design = {f.name: getattr(study, f.name) for f in dataclasses.fields(Design)}
    design["printed"] = [[*cell, value] for cell, value in study.printed.items()]
    design |= {name: list(design[name]) for name in ("seeds", "tuning_seeds")}
    rows = []
    for row in outcome.rows:
        trials = [trial._asdict() for trial in row.trials]
        rows.append(row._asdict() | {"trials": trials, "values": row.values})
        del rows[-1]["result"]  # in its run directory
    return to_json({"design": design, **outcome.made, "rows": rows})
