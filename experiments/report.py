"""What experiments have in common: runs towards a goal, studies, tables, figures."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from fedjax_core import (
    Algorithm,
    FederatedData,
    Model,
    Result,
    simulate,
    study,
    study_report,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.networks import asynchronous, plots
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import Channel, Operator
from fedjax_core.networks.run import from_operator, run
from fedjax_core.processes import is_first
from fedjax_core.record import to_json
from fedjax_core.result import spread
from fedjax_core.run_dir import versions

STRENGTHS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
"""Of GTVMin, that experiments try beside 0 and infinity."""


class Run(NamedTuple):
    """A method on its way to a goal.

    Attributes:
      error: ``[rounds + 1]``, distance to the goal over that of the start.
      bound: ``[rounds + 1]``, what theory allows; None where it says nothing.
    """

    error: np.ndarray
    bound: np.ndarray | None


def approach(
    experiment: Any,
    name: str,
    method: Operator,
    goal: jax.Array,
    *,
    factor: float | jax.Array | None = None,
    norm: Callable[[jax.Array], jax.Array] = jnp.linalg.norm,
    schedule: asynchronous.Schedule | None = None,
    channel: Channel | None = None,
    seed: int = 0,
) -> Run:
    """Runs a method from 0 for the experiment's rounds, or through a schedule.

    Args:
      experiment: recorded in its `run_dir`, if it names one, under `name`.
      name: of the run.
      method: what runs.
      goal: ``[n, ...]``.
      factor: by which a round contracts; None or from 1 on, nothing is proven.
      norm: of distances.
      schedule: see `from_operator`, as for `channel`.
      channel: see there.
      seed: of what the method draws.
    """
    system = from_operator(
        method,
        jnp.zeros_like(goal),
        name=name,
        world=goal,
        measure=lambda goal, W: {"distance": norm(W - goal) / norm(goal)},
        schedule=schedule,
        channel=channel,
    )
    where = experiment.run_dir and experiment.run_dir / name
    result = run(
        system,
        rounds=system.horizon or experiment.rounds,
        seeds=seed,
        progress=False,
        run_dir=where,
        resume=where is not None,
        record=_settings(experiment),
    )
    t, bound = np.arange(result.rounds + 1), None
    if factor is not None and factor < 1:
        bound = np.asarray(factor) ** t
        if schedule is not None:
            late = asynchronous.contraction_bound(factor, schedule.max_delay, t)
            bound = np.asarray(late)
    return Run(np.r_[1, result.train["distance"][0]], bound)


def _settings(experiment: Any) -> dict[str, Any]:
    """Those of an experiment, without folders, which may be moved."""
    return {k: v for k, v in vars(experiment).items() if not isinstance(v, Path)}


def draw_runs(axes: Any, runs: dict[str, Run], unproven: str = "") -> None:
    """Draws errors, and bounds as dashes; the legend says who has none."""
    label = {name: name + unproven * (run.bound is None) for name, run in runs.items()}
    plots.convergence(
        axes,
        {label[name]: run.error for name, run in runs.items()},
        {name: run.bound for name, run in runs.items() if run.bound is not None},
    )


def draw_schedule(
    figure: Any, axes: Any, graph: Graph, schedule: asynchronous.Schedule, events: int
) -> int:
    """Draws who acts first on what copies; returns how many nodes are shown."""
    shown = min(6, graph.num_nodes)
    ages = plots.timeline(axes, graph, schedule, range(shown), events)
    bar = figure.colorbar(ages, ax=axes, label="age of the copy that is read")
    bar.set_ticks(range(schedule.max_delay + 1))
    bar.minorticks_off()
    bar.outline.set_visible(False)
    return shown


def tabulate(
    columns: Sequence[str], rows: Iterable[Sequence[str]], **look: Any
) -> Table:
    """A table of numbers under a first column of names; `look` is rich's."""
    out = Table(**look)
    for k, name in enumerate(columns):
        out.add_column(name, justify="right" if k else "left", overflow="fold")
    for row in rows:
        out.add_row(*row)
    return out


def show(outcome: study.Outcome, more: Sequence[study_report.Table] = ()) -> None:
    """Prints tables, those of a study after `more`; writes its page and says where."""
    console = Console()
    _print([*more, *study_report.tables(outcome)], console)
    page = study_report.write(outcome, more)
    console.print(f"page: {page}", highlight=False)


def _print(tables: Iterable[study_report.Table], console: Console) -> None:
    for table in tables:
        console.print(tabulate(table.header, table.rows, title=table.title))


class Page:
    """What an experiment says: printed as it comes, and put on one page of Markdown.

    Args:
      title: of the page.
      said: what the numbers rest on and can't show; heads the page and is printed last.
      out: the experiment's folder.

    Attributes:
      console: to print on.
      parts: of the page.
    """

    def __init__(self, title: str, said: str | Sequence[str], out: Path):
        lines = [said] if isinstance(said, str) else [f"* {line}" for line in said]
        self._said, self._out = "\n".join(lines), out
        self.console, self.parts = Console(), [f"# {title}\n\n{self._said}\n"]

    def add(self, *tables: study_report.Table) -> None:
        """Prints tables and puts them on the page."""
        _print(tables, self.console)
        self.parts += map(study_report.text_of, tables)

    def show(
        self,
        name: str,
        outcome: study.Outcome,
        more: Sequence[study_report.Table] = (),
    ) -> None:
        """As `show`, with everything on this page as well, under a heading."""
        self.console.rule(name)
        show(outcome, more)
        self.parts += [f"# {name}\n", *map(study_report.text_of, more)]
        self.parts.append(study_report.markdown(outcome))

    def draw(self, name: str, figure: Any) -> None:
        """Writes a figure as NAME.png and puts it on the page."""
        save(figure, self._out / f"{name}.png", self.console)
        self.parts.append(f"![{Path(name).name}](<{name}.png>)\n")

    def write(self, name: str) -> None:
        """Prints what is to be known of the numbers; writes NAME.md, and says where.

        The first of several processes writes.
        """
        self.console.print(self._said, highlight=False, soft_wrap=True)
        path = self._out / f"{name}.md"
        if is_first():
            path.write_text("\n".join(self.parts) + "\n", "utf-8")
        self.console.print(f"page: {path}", highlight=False)


def recorded(
    experiment: Any,
    name: str,
    algorithm: Algorithm,
    data: FederatedData,
    model: Model,
    **options: Any,
) -> Result:
    """Simulates for the experiment's seeds, in a folder of its `out`; resumes there.

    Args:
      experiment: with `num_seeds` and a folder `out`.
      name: of the run, or nothing where there is one.
      algorithm: as for `simulate`, as are `data`, `model` and others.
      data: see there.
      model: see there.
      **options: see there.
    """
    how: dict[str, Any] = {"seeds": range(experiment.num_seeds), "progress": False}
    where = experiment.out / name
    return simulate(algorithm, data, model, run_dir=where, resume=True, **how | options)


def trained(
    experiment: Any, name: str, data: FederatedData, model: Model, **options: Any
) -> Result:
    """As `recorded`, by FedAvg as the experiment has it, for its rounds."""
    # Folders may be moved.
    places = {k: None for k in vars(experiment) if k in ("path", "out")}
    how: dict[str, Any] = {"rounds": experiment.rounds, "progress": True} | options
    algorithm = fedavg.make(experiment.algorithm, model.loss)
    record = vars(experiment) | places
    return recorded(experiment, name, algorithm, data, model, record=record, **how)


def outcome_of(
    experiment: Any, results: Mapping[tuple[str, str], Result], **design: Any
) -> study.Outcome:
    """Runs that differ in more than methods of a study may, shown as one in `out`.

    Results are by method and setting, of the same seeds; `design` has fields of
    `study.Design`.
    """
    (seeds, *_) = (result.seeds for result in results.values())
    asked = study.Design(seeds=seeds, tuning_seeds=(), **design)
    rows = [
        study.Row(*cell, None, f"test_{asked.metric}", result, "")
        for cell, result in results.items()
    ]
    made = {"experiment": to_json(_settings(experiment)), "versions": versions()}
    return study.Outcome(asked, experiment.out, rows, made)


def speed_of(result: Result) -> list[tuple[str, str, str]]:
    """Rows that say how fast a run was; none where it was read."""
    if not result.timed_rounds:
        return []
    speed, seconds = result.rounds_per_second, result.compile_seconds
    return [
        ("speed, all seeds together", f"{speed:.2f} rounds/s", ""),
        ("compiling the round", f"{seconds:.1f} s", ""),
    ]


def panels(
    width: float, height: float, rows: int = 1, columns: int = 2, **grid: Any
) -> tuple[Any, Any]:
    """A matplotlib figure, in inches, and its axes; `grid` is of ``subplots``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **grid)


def band(
    axes: Any,
    x: Any,
    middle: Any,
    low: Any,
    high: Any,
    color: str,
    label: str,
    line: str = "o-",
) -> None:
    """A line, by default with dots, and a band around it."""
    axes.plot(x, middle, line, color=color, label=label, markersize=4)
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def decibels(values: Any) -> np.ndarray:
    """10 log10, in double precision."""
    return 10 * np.log10(np.asarray(values, np.float64))


def save(figure: Any, path: Path, console: Console) -> None:
    """Writes a figure and says where."""
    write(figure, path)
    console.print(f"figure: {path}", highlight=False)


def write(figure: Any, path: Path, dpi: int = 150) -> None:
    """Writes a figure, in the first of several processes."""
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> None:
    """Writes a table with its header, in the first of several processes."""
    if is_first():
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)


def alike(experiment: Any, other: Any, free: Iterable[str]) -> bool:
    """Whether two experiments are the same, but for the fields that are `free`."""
    return all(
        value == getattr(other, name)
        for name, value in vars(experiment).items()
        if name not in free
    )


def of_participant(result: Result, name: str) -> np.ndarray:
    """Megabytes of one participant in a round, ``[S, rounds]``.

    The name is "uplink_bytes" or "downlink_bytes".
    """
    clients = np.maximum(result.train["valid_clients"], 1)
    return result.train[name].astype(np.float64) / clients / 1e6


def spent(result: Result | None, way: str, metric: str, target: float) -> np.ndarray:
    """Megabytes of one participant until a metric reaches a target, ``[S]``.

    NaN where it does not; one NaN without a result.

    Args:
      result: of a run.
      way: "uplink" or "downlink".
      metric: its name in the result.
      target: to be reached from below.
    """
    if result is None:
        return np.full(1, np.nan)
    until = result.time_to(metric, at_least=target)
    total = of_participant(result, f"{way}_bytes").cumsum(1)
    last = np.nan_to_num(until, nan=1).astype(int) - 1
    return np.where(np.isnan(until), np.nan, total[np.arange(len(total)), last])


def to_target(
    title: str,
    results: Mapping[str, Result | None],
    target: float,
    printed: Mapping[str, tuple[float, float]],
    of: str,
    metric: str = "test_accuracy",
) -> study_report.Table:
    """What methods cost until a target: megabytes, rounds, printed ones, best round.

    Args:
      title: of the table.
      results: by method.
      target: accuracy to reach.
      printed: megabytes up and down, by method; NaN is not reached.
      of: what printed numbers are of.
      metric: of the target.
    """
    rows = []
    for method, result in results.items():
        if result is None:
            continue
        up, down = (spent(result, w, metric, target) for w in ("uplink", "downlink"))
        when = result.time_to(metric, at_least=target)
        there = ~np.isnan(when)
        shown = [spread(x[there], ".4g") or "n.a." for x in (up, down, when)]
        paper = ["n.a." if np.isnan(p) else str(p) for p in printed.get(method, ())]
        count, best = f"{there.sum()} of {len(there)}", result.best(metric)[:, -1]
        rows.append((method, *shown, count, " / ".join(paper), spread(best, ".4f")))
    header = ("method", "MB up", "MB down", "rounds", "seeds that did")
    header += (f"printed up / down ({of})", "best round")
    return study_report.Table(f"{title}, to {target:g}", header, rows)


def cheaper(
    title: str,
    results: Mapping[str, Result | None],
    target: float,
    printed: Mapping[str, tuple[float, float]],
    claims: Sequence[tuple[str, str, str]],
    metric: str = "test_accuracy",
) -> study_report.Table:
    """Whether methods reach a target with fewer bits than others, seed by seed.

    Args:
      title: of the table.
      results: as for `to_target`, as are `target`, `printed` and `metric`.
      target: see there.
      printed: see there.
      claims: (cheap, dear, "uplink" or "downlink").
      metric: see there.
    """
    rows = []
    for cheap, dear, way in claims:
        pair = [spent(results.get(x), way, metric, target) for x in (dear, cheap)]
        gap = np.log(pair[0] / pair[1])
        gap = gap[~np.isnan(gap)]
        verdict = study_report.verdict_of(gap) if len(gap) else "undecided"
        ours = f"x {np.exp(gap.mean()):.3g}" if len(gap) else "n.a."
        paper = ""
        if cheap in printed and dear in printed:
            at = way == "downlink"
            times = printed[dear][at] / printed[cheap][at]
            paper = "n.a." if np.isnan(times) else f"x {times:.3g}"
        rows.append((f"{cheap} < {dear}, {way}", ours, paper, verdict))
    header = ("claim, < is cheaper", "saves", "printed", "verdict")
    return study_report.Table(f"{title}, of seeds that reach {target:g}", header, rows)


def claims_table(
    title: str, claims: Iterable[tuple[str, str, Any]], form: str = "+.4f"
) -> study_report.Table:
    """Claims beyond those of a study.

    Each says what, where, and ``[S]``, by seeds: how much of it there is, above 0 where
    it is true. `form` is how the mean over seeds is written.
    """
    rows = []
    for what, where, differences in claims:
        d = np.asarray(differences)
        known = len(d) and np.isfinite(d).all()
        verdict = study_report.verdict_of(d) if known else "undecided"
        rows.append((what, where, format(d.mean(), form) if known else "", verdict))
    return study_report.Table(title, ("claim", "where", "by", "verdict"), rows)
