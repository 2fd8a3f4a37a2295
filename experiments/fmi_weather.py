"""Tomorrow's weather at 200 stations: alone, over a network, or one model for all?

Every station predicts the next day's highest temperature by a linear model of the five
past days' highest and lowest, from a handful of windows of its own. GTVMin over a graph
of nearest neighbours couples the models with strength alpha: 0 leaves every station
alone, infinity is one model for all. The last fifth of every station's train windows
chooses alpha; test windows are looked at once, to report. Prints errors, draws the
network, the error against alpha, and how FedRelax gets to the solution by talking to
neighbours only.

Stations are drawn at random unless --path names a folder with real ones.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table

from fedjax_core import check
from fedjax_core.algorithms.networks import fedrelax
from fedjax_core.data.packed import Packed
from fedjax_core.data.padded import pad
from fedjax_core.datasets import fmi, fmi_like
from fedjax_core.experiments import report
from fedjax_core.networks import builders, gtvmin, plots
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import Quadratic, least_squares_statistics, quadratic
from fedjax_core.types import Checked, Positive, PositiveInt

FILE = "fmi_windows_2025.csv.gz"

_YESTERDAY = 4  # the feature of the map: the last highest temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      path: folder with fmi_windows_2025.csv.gz, real stations; None draws them.
      num_stations: stations to draw.
      num_windows: windows of six days per station to draw; the last fifth is test.
      num_neighbours: nearest stations that each station is joined to.
      alphas: strengths of GTVMin to try, beside 0 and infinity.
      rounds: of FedRelax, at the alpha chosen.
      num_seeds: populations to draw, for mean and spread; real stations are one.
      out: directory for the figure.
      run_dir: directory to record FedRelax in; an interrupted run of the same settings
        goes on there, a finished one is shown again.
    """

    path: Path | None = None
    num_stations: PositiveInt = 200
    num_windows: PositiveInt = 30
    num_neighbours: PositiveInt = 5
    alphas: tuple[Positive, ...] = report.STRENGTHS
    rounds: PositiveInt = 2000
    num_seeds: PositiveInt = 5
    out: Path = Path("runs/fmi_weather")
    run_dir: Path | None = None

    def __post_init__(self):
        super().__post_init__()
        check.in_range(3, np.inf, num_windows=self.num_windows)
        check.in_range(1, self.num_stations - 1, num_neighbours=self.num_neighbours)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        num_stations=30, num_windows=10, alphas=(0.01, 0.1, 1), rounds=50, num_seeds=2
    ),
}


class Problem(NamedTuple):
    """One population of stations.

    Attributes:
      place: ``[n, 2]`` latitudes and longitudes.
      graph: its nearest neighbours.
      early: the stations' average squared errors on the first four fifths of their
        train windows.
      validation: the same on the rest of them.
      train: on all train windows.
      test: on the windows kept back.
    """

    place: np.ndarray
    graph: Graph
    early: Quadratic
    validation: Quadratic
    train: Quadratic
    test: Quadratic


class Outcome(NamedTuple):
    """What was learnt on one population; errors are roots of mean squares in degrees.

    Attributes:
      problem: the population.
      W: ``[A + 2, n, d]`` parameters, for alpha 0, the alphas, and infinity.
      validation: ``[A + 2]`` error on validation windows of what was learnt without.
      train: ``[A + 2]`` error on train windows.
      test: ``[A + 2]`` error on test windows.
    """

    problem: Problem
    W: np.ndarray
    validation: np.ndarray
    train: np.ndarray
    test: np.ndarray


def load(experiment: Experiment) -> list[Problem]:
    """The populations, real or drawn.

    Raises:
      FileNotFoundError: there is no such file under ``experiment.path``.
      DataFileError: the file is not as it should be.
    """
    if experiment.path is None:
        drawn = [
            fmi_like.daily(experiment.num_stations, experiment.num_windows, seed=seed)
            for seed in range(experiment.num_seeds)
        ]
    else:
        data = fmi.load(experiment.path / FILE)
        drawn = [(data, fmi.coordinates(experiment.path / FILE, data.client_ids))]
    problems = []
    for data, place in drawn:
        sizes, train = data.train.sizes, data.train
        early = np.maximum(1, sizes - np.maximum(1, sizes // 5))
        graph = builders.knn_points(place, experiment.num_neighbours, "geodesic")
        parts = _statistics(train, last=early), _statistics(train, first=early)
        whole = _statistics(train), _statistics(data.splits["test"])
        problems.append(Problem(place, graph, *parts, *whole))
    return problems


def solve(experiment: Experiment, problem: Problem) -> Outcome:
    """Learns all stations' models for every alpha, in one program."""

    @jax.jit
    def learn(Q, q):
        def one(alpha):
            # Models need not be exact to more digits than errors are shown with.
            return gtvmin.conjugate_gradients(problem.graph, Q, q, alpha, tol=1e-7).W

        coupled = jax.vmap(one)(jnp.array([0, *experiment.alphas]))
        pooled = gtvmin.locally_weighted(Q, q, jnp.ones(len(q)))
        return jnp.concatenate([coupled, jnp.broadcast_to(pooled, (1, *q.shape))])

    def error(W, windows):
        return np.sqrt(np.mean(jax.vmap(quadratic(*windows).value)(W), 1))

    with jax.enable_x64(True):
        W_early = learn(problem.early.Q, problem.early.q)
        W = learn(problem.train.Q, problem.train.q)
        validation = error(W_early, problem.validation)
        errors = (error(W, windows) for windows in (problem.train, problem.test))
        return Outcome(problem, np.asarray(W), validation, *errors)


def relax(experiment: Experiment, outcome: Outcome, chosen: int) -> report.Run:
    """FedRelax from 0 to what was learnt with the alpha at position `chosen`."""
    Q, q, _ = outcome.problem.train
    alpha = experiment.alphas[chosen - 1]
    with jax.enable_x64(True):
        method = fedrelax.make_quadratic(outcome.problem.graph, Q, q, alpha=alpha)
        goal = jnp.asarray(outcome.W[chosen])
        return report.approach(experiment, "fedrelax", method, goal)


def best(experiment: Experiment, outcomes: Sequence[Outcome]) -> int:
    """The position in ``W`` of the alpha that validates best, 0 and infinity aside."""
    mean = np.mean([outcome.validation for outcome in outcomes], 0)
    return 1 + int(np.argmin(mean[1 : len(experiment.alphas) + 1]))


def table(experiment: Experiment, outcomes: Sequence[Outcome]) -> Table:
    """Errors of the three ways to learn."""
    chosen = best(experiment, outcomes)
    ways = {
        "every station alone": 0,
        f"network, alpha = {experiment.alphas[chosen - 1]:g}": chosen,
        "one model for all": -1,
    }
    train, test = _errors(outcomes, "train"), _errors(outcomes, "test")
    columns, times = {"train": train.mean(0), "test": test.mean(0)}, ""
    if len(test) > 1:
        columns["std"], times = test.std(0), f", {len(test)} times"
    kind = "real" if experiment.path else "drawn"
    return report.tabulate(
        ("", *columns),
        [(way, *(f"{x[k]:.3f}" for x in columns.values())) for way, k in ways.items()],
        title=f"error in °C, {len(outcomes[0].W[0])} {kind} stations{times}",
    )


def figure(experiment: Experiment, outcomes: Sequence[Outcome]) -> Any:
    """Draws the network, the error against alpha, and FedRelax on its way."""
    first, chosen = outcomes[0], best(experiment, outcomes)
    alpha = experiment.alphas[chosen - 1]
    result, (left, middle, right) = report.panels(13, 4.6, 1, 3, width_ratios=(4, 5, 5))

    place, weight = first.problem.place[:, ::-1], first.W[chosen, :, _YESTERDAY]
    dots = plots.network(left, first.problem.graph, weight, place, cmap="viridis", s=18)
    result.colorbar(dots, ax=left, label="weight of yesterday's highest, °C per std")
    left.set_axis_on()
    # A degree of longitude is about half of one of latitude here.
    left.set(
        title=f"stations, alpha = {alpha:g}",
        xlabel="longitude",
        ylabel="latitude",
        aspect=1 / np.cos(np.radians(place[:, 1].mean())),
    )

    for split, color in (("train", "#999999"), ("test", "#1f77b4")):
        errors = _errors(outcomes, split)
        mean, spread = errors.mean(0), errors.std(0)
        curve = (x[1:-1] for x in (mean, mean - spread, mean + spread))
        report.band(middle, experiment.alphas, *curve, color=color, label=split)
        if split == "test":
            middle.axhline(mean[0], color=color, linestyle=":", label="alone")
            middle.axhline(mean[-1], color=color, linestyle="--", label="one for all")
    middle.axvline(alpha, color="#cccccc", zorder=0, label="chosen")
    title = "error against coupling"
    middle.set(title=title, xlabel="alpha", ylabel="°C", xscale="log")
    middle.legend()

    report.draw_runs(right, {"FedRelax": relax(experiment, first, chosen)})
    right.set(title=f"alpha = {alpha:g}", ylabel="relative distance to the solution")
    return result


def main(experiment: Experiment) -> None:
    """Runs the experiment, prints its table and says where the figure is."""
    console = Console()
    outcomes = [solve(experiment, problem) for problem in load(experiment)]
    console.print(table(experiment, outcomes))
    drawn = figure(experiment, outcomes)
    report.save(drawn, experiment.out / "fmi_weather.png", console)


def _errors(outcomes: Sequence[Outcome], split: str) -> np.ndarray:
    """``[populations, A + 2]``."""
    return np.array([getattr(outcome, split) for outcome in outcomes])


def _statistics(
    split: Packed, first: ArrayLike = 0, last: ArrayLike = np.inf
) -> Quadratic:
    """Squared errors of linear models with a constant, in float64.

    Of every station, its windows from `first` to before `last`.
    """
    arrays, exists = pad(split)
    window = np.arange(exists.shape[1])
    wanted = (window >= np.c_[first]) & (window < np.c_[last]) & exists
    X = np.concatenate([arrays["x"], np.ones((*exists.shape, 1))], 2)
    with jax.enable_x64(True):
        return least_squares_statistics(X, arrays["y"].astype(float), wanted)
