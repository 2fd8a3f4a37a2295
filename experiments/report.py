"""What experiments have in common: runs towards a goal, studies, tables, figures."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from fedjax_core import Result, study, study_report
from fedjax_core.networks import asynchronous, plots
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import Channel, Operator
from fedjax_core.networks.run import from_operator, run
from fedjax_core.processes import is_first


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
    settings = {k: v for k, v in vars(experiment).items() if not isinstance(v, Path)}
    result = run(
        system,
        rounds=system.horizon or experiment.rounds,
        seeds=seed,
        progress=False,
        run_dir=where,
        resume=where is not None,
        record=settings,  # without folders, which may be moved
    )
    t, bound = np.arange(result.rounds + 1), None
    if factor is not None and factor < 1:
        bound = np.asarray(factor) ** t
        if schedule is not None:
            late = asynchronous.contraction_bound(factor, schedule.max_delay, t)
            bound = np.asarray(late)
    return Run(np.r_[1, result.train["distance"][0]], bound)


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


def show_study(this: study.Study, out: Path) -> study.Outcome:
    """Runs a study, prints its tables and says where its page is."""
    outcome = study.run(this, out)
    show(outcome)
    return outcome


def show(outcome: study.Outcome) -> None:
    """Prints the tables of a study, writes its page and says where."""
    console = Console()
    for table in study_report.tables(outcome):
        console.print(tabulate(table.header, table.rows, title=table.title))
    console.print(f"page: {study_report.write(outcome)}", highlight=False)


def panels(
    width: float, height: float, rows: int = 1, columns: int = 2, **grid: Any
) -> tuple[Any, Any]:
    """A matplotlib figure, in inches, and its axes; `grid` is of ``subplots``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **grid)


def band(
    axes: Any, x: Any, middle: Any, low: Any, high: Any, color: str, label: str
) -> None:
    """A line with dots and a band around it."""
    axes.plot(x, middle, "o-", color=color, label=label, markersize=4)
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def save(figure: Any, path: Path, console: Console) -> None:
    """Writes a figure and says where."""
    write(figure, path)
    console.print(f"figure: {path}", highlight=False)


def write(figure: Any, path: Path, dpi: int = 150) -> None:
    """Writes a figure, in the first of several processes."""
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)


def write_page(parts: Sequence[str], path: Path, console: Console) -> None:
    """Writes a page of Markdown, in the first of several processes, and says where."""
    if is_first():
        path.write_text("\n".join(parts) + "\n", "utf-8")
    console.print(f"page: {path}", highlight=False)


def of_participant(result: Result, name: str) -> np.ndarray:
    """Megabytes that one participant sends or receives in a round, ``[S, rounds]``.

    Args:
      result: of a run.
      name: "uplink_bytes" or "downlink_bytes".
    """
    clients = np.maximum(result.train["valid_clients"], 1)
    return result.train[name].astype(np.float64) / clients / 1e6


def check_each(rule: Callable[..., None], **several: Sequence[Any]) -> None:
    """Raises ValueError for an empty argument; has `rule` check every value."""
    for name, values in several.items():
        if not values:
            raise ValueError(f"{name} must not be empty.")
        for value in values:
            rule(**{name: value})
