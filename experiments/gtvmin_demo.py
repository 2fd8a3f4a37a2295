"""Clustered linear regression on a network: alone, over the network, or by oracle?

Nodes of a stochastic block graph hold a few noisy examples of a linear model each, and
nodes of one cluster have the same true parameters. Nobody knows the clusters: GTVMin
only sees that neighbours are mostly alike, and its strength alpha says how much that
counts. Compares it with purely local fits, with one model for all, and with an oracle
that pools every true cluster. Draws the estimation error against alpha and against the
number of local examples, the parameters on the network, how FedGD and FedRelax converge
beside the rates that theory promises, and FedRelax run asynchronously.

The network's alpha is chosen with the true parameters, which nobody has: of the alphas
tried, it has the smallest mean error. In the table ± is the standard deviation over the
draws; in the figures lines are means and bands reach from the least to the most of all
draws. Maps and convergence are those of one draw.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from rich import box
from rich.console import Console
from rich.table import Table

from fedjax_core import check
from fedjax_core.algorithms.networks import fedgd, fedrelax
from fedjax_core.datasets.networks import network_linear
from fedjax_core.experiments import report
from fedjax_core.experiments.report import Run
from fedjax_core.networks import asynchronous, builders, gtvmin, plots, spectrum
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.iterate import block_max_norm
from fedjax_core.networks.operators import Operator
from fedjax_core.networks.oracles import Quadratic, least_squares_statistics, quadratic
from fedjax_core.networks.theory import contraction
from fedjax_core.types import Checked, Key, Positive, PositiveInt, Seed, Share

METHODS: tuple[str, ...] = ("alone", "network", "one model for all", "oracle")

_UNPROVEN = ", no contraction proven"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      sizes: nodes of every cluster.
      p_in: probability of an edge inside a cluster.
      p_out: probability of an edge between clusters.
      num_features: d.
      noise_std: of the labels; true parameters are drawn from N(0, I).
      num_examples: examples of a node, one sweep for each number.
      shown: the number of examples of the pictures, one of `num_examples`.
      alphas: strengths of GTVMin, beside 0 and infinity.
      rounds: of FedGD and FedRelax; asynchronous runs have twice as many events.
      bounds: of partially asynchronous runs: windows in which every node acts, and
        largest ages of copies.
      num_seeds: draws of parameters and examples; the network stays.
      graph_seed: of the network.
      out: directory for the figures.
      run_dir: directory to record the runs in; an interrupted run of the same settings
        goes on there, a finished one is shown again.
    """

    sizes: tuple[int, ...] = (30, 30, 30)
    p_in: Share = 0.3
    p_out: Share = 0.01
    num_features: PositiveInt = 5
    noise_std: Positive = 1.5
    num_examples: tuple[PositiveInt, ...] = (3, 6, 12, 25, 50, 100)
    shown: int = 12
    alphas: tuple[Positive, ...] = report.STRENGTHS
    rounds: PositiveInt = 150
    bounds: tuple[PositiveInt, ...] = (1, 4, 12)
    num_seeds: PositiveInt = 10
    graph_seed: Seed = 0
    out: Path = Path("runs/gtvmin_demo")
    run_dir: Path | None = None

    def __post_init__(self):
        super().__post_init__()
        builders.block_labels(self.sizes)
        check.one_of(self.num_examples, shown=self.shown)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        sizes=(10, 10),
        p_in=0.5,
        p_out=0.03,
        num_features=3,
        num_examples=(2, 8),
        shown=8,
        alphas=(0.01, 0.1, 1),
        rounds=40,
        bounds=(2,),
        num_seeds=2,
    ),
}


class Problem(NamedTuple):
    """One draw.

    Attributes:
      W_true: ``[n, d]``, equal rows in a cluster.
      statistics: the nodes' average squared errors.
    """

    W_true: jax.Array
    statistics: Quadratic


class Sweep(NamedTuple):
    """Estimation errors, ||W - W_true||^2 over ||W_true||^2.

    Attributes:
      network: ``[seeds, num_examples, alphas]``.
      alone: ``[seeds, num_examples]``, at alpha 0.
      everyone: ``[seeds, num_examples]``, one model for all.
      oracle: ``[seeds, num_examples]``, one model for every true cluster.
    """

    network: np.ndarray
    alone: np.ndarray
    everyone: np.ndarray
    oracle: np.ndarray

    def best(self, k: int) -> int:
        """Which alpha has the smallest mean error with num_examples[k].

        An oracle's choice: errors need the true parameters.
        """
        return int(self.network[:, k].mean(0).argmin())


def build(experiment: Experiment) -> Graph:
    """Draws the network.

    Raises:
      ValueError: it is not connected.
    """
    e = experiment
    graph = builders.stochastic_block(e.sizes, e.p_in, e.p_out, e.graph_seed)
    spectrum.check_connected(graph)
    return graph


def draw(experiment: Experiment, graph: Graph, key: Key, m: ArrayLike) -> Problem:
    """Draws parameters and, for every node, its first m of the most examples."""
    e = experiment
    label, most = builders.block_labels(e.sizes), max(e.num_examples)
    cluster_key, example_key = jax.random.split(key)
    W = jax.random.normal(cluster_key, (len(e.sizes), e.num_features))[label]
    X, y, _, _ = network_linear(example_key, graph, most, W, noise_std=e.noise_std)
    mask = jnp.broadcast_to(jnp.arange(most) < m, y.shape)
    return Problem(W, least_squares_statistics(X, y, mask))


def solve(graph: Graph, problem: Problem, alpha: ArrayLike) -> jax.Array:
    """The solution of GTVMin, ``[n, d]``; the least norm if there are several."""
    Q, q, _ = problem.statistics
    return gtvmin.conjugate_gradients(graph, Q, q, alpha, tol=1e-6).W


def sweep(experiment: Experiment, graph: Graph) -> Sweep:
    """All seeds, numbers of examples and alphas in one compiled program."""
    e = experiment
    label = builders.block_labels(e.sizes)
    member = jnp.asarray(label == np.arange(len(e.sizes))[:, None], float)

    def one(key, m, alphas):
        problem = draw(e, graph, key, m)
        Q, q, _ = problem.statistics

        def error(W):
            return jnp.sum((W - problem.W_true) ** 2) / jnp.sum(problem.W_true**2)

        def pooled(weight):
            return gtvmin.locally_weighted(Q, q, weight)

        coupled = jax.vmap(lambda alpha: error(solve(graph, problem, alpha)))(alphas)
        everyone = pooled(jnp.ones(len(label)))
        oracle = jax.vmap(pooled)(member)[label]
        shared = error(jnp.broadcast_to(everyone, q.shape))
        return coupled[1:], coupled[0], shared, error(oracle)

    with jax.enable_x64(True):
        over = jax.vmap(jax.vmap(one, (None, 0, None)), (0, None, None))
        keys = jax.vmap(jax.random.key)(jnp.arange(e.num_seeds))
        m, alphas = jnp.array(e.num_examples), jnp.array([0, *e.alphas])
        return Sweep(*map(np.asarray, jax.jit(over)(keys, m, alphas)))


def converge(
    experiment: Experiment, graph: Graph, problem: Problem, alpha: float
) -> dict[str, Run]:
    """FedGD and FedRelax from 0, beside their rates.

    FedGD takes the rate 1 / (l1 + ld) of the eigenvalues of Q and is measured in the
    Euclidean norm, FedRelax in the block-maximum norm, where their theories hold. One
    node with fewer examples than features leaves FedRelax without a rate.
    """
    Q, q, _ = problem.statistics
    solution = gtvmin.closed_form(graph, Q, q, alpha)
    low, high = contraction.extreme_eigenvalues(gtvmin.system(graph, Q, q, alpha)[0])
    eta = contraction.optimal_rate(low, high)
    descend = fedgd.make(graph, quadratic(Q, q), alpha=alpha, eta=eta)
    factor = contraction.optimal_factor(low, high)
    relax, kappa = _relax(graph, problem, alpha)
    return {
        "FedGD": report.approach(experiment, "fedgd", descend, solution, factor=factor),
        "FedRelax": report.approach(
            experiment, "fedrelax", relax, solution, factor=kappa, norm=block_max_norm
        ),
    }


def converge_asynchronously(
    experiment: Experiment, graph: Graph, problem: Problem, alpha: float
) -> dict[int, tuple[asynchronous.Schedule, Run]]:
    """FedRelax on a random partially asynchronous schedule for every bound."""
    Q, q, _ = problem.statistics
    solution = gtvmin.closed_form(graph, Q, q, alpha)
    method, kappa = _relax(graph, problem, alpha)
    runs = {}
    for bound in experiment.bounds:
        schedule = asynchronous.partially_asynchronous(
            graph, 2 * experiment.rounds, bound, jax.random.key(bound), activity=0.3
        )
        asynchronous.check_partially_asynchronous(schedule, bound)
        name = f"asynchronous_{bound}"
        how: dict[str, Any] = {"norm": block_max_norm, "schedule": schedule}
        run = report.approach(experiment, name, method, solution, factor=kappa, **how)
        runs[bound] = schedule, run
    return runs


def _relax(graph: Graph, problem: Problem, alpha: float) -> tuple[Operator, jax.Array]:
    """FedRelax and its factor in the block-maximum norm, 1 where none is proven."""
    Q, q, _ = problem.statistics
    convexity = asynchronous.quadratic_convexity(Q)
    kappa = asynchronous.fedrelax_contraction(graph, convexity, alpha)
    return fedrelax.make_quadratic(graph, Q, q, alpha=alpha), kappa


def errors(sweep: Sweep, k: int) -> dict[str, np.ndarray]:
    """Errors ``[seeds]`` of all methods with num_examples[k], at the best alpha."""
    network = sweep.network[:, k, sweep.best(k)]
    others = (errors[:, k] for errors in (sweep.everyone, sweep.oracle))
    by_method = (sweep.alone[:, k], network, *others)
    return dict(zip(METHODS, by_method, strict=True))


def table(experiment: Experiment, sweep: Sweep) -> Table:
    """Mean errors, one row per number of examples."""
    e = experiment
    rows = []
    for k, m in enumerate(e.num_examples):
        numbers = (f"{x.mean():.3f} ± {x.std():.3f}" for x in errors(sweep, k).values())
        rows.append((str(m), *numbers, f"{e.alphas[sweep.best(k)]:g}"))
    names = (name.replace(" for", "\nfor") for name in METHODS)
    return report.tabulate(
        ("examples\nper node", *names, "best\nalpha"),
        rows,
        title=f"estimation error, {sum(e.sizes)} nodes",
        caption=f"mean ± standard deviation over {e.num_seeds} draws\n"
        "best alpha: the one with the smallest error, by the true parameters",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def figures(experiment: Experiment, graph: Graph, sweep: Sweep) -> dict[str, Any]:
    """Draws errors and runs, at the best alpha for the number of examples shown."""
    e, k = experiment, experiment.num_examples.index(experiment.shown)
    alpha = e.alphas[sweep.best(k)]
    whole, (maps, (*of_errors, rounds)) = report.panels(13.5, 8.6, 2, 3)
    late, (timeline, events) = report.panels(13.5, 4.6, width_ratios=(8, 5))
    with jax.enable_x64(True):
        problem = draw(e, graph, jax.random.key(0), e.shown)
        _maps(whole, maps, graph, problem, alpha)
        runs = converge(e, graph, problem, alpha)
        by_bound = converge_asynchronously(e, graph, problem, alpha)
    report.draw_runs(rounds, runs, _UNPROVEN)
    rounds.set(
        title=f"rounds to the solution, alpha = {alpha:g}", ylabel="relative distance"
    )
    _errors(e, sweep, k, *of_errors)

    middle = e.bounds[len(e.bounds) // 2]
    # More nodes of the same cluster could not be told apart.
    shown = report.draw_schedule(late, timeline, graph, by_bound[middle][0], events=24)
    timeline.set_title(
        f"who acts, on what copies: {shown} of {graph.num_nodes} nodes, B = {middle}"
    )
    late_runs = {f"B = {b}": run for b, (_, run) in by_bound.items()}
    report.draw_runs(events, late_runs, _UNPROVEN)
    title = f"asynchronous FedRelax, alpha = {alpha:g}"
    events.set(title=title, xlabel="event", ylabel="relative distance")
    return {"gtvmin_demo": whole, "asynchronous": late}


def main(experiment: Experiment) -> None:
    """Runs the experiment, prints its table and says where the figures are.

    Raises:
      SystemExit: the network is not connected.
    """
    console = Console()
    try:
        graph = build(experiment)
    except ValueError as error:
        raise SystemExit(
            f"fedjax-core: {error} Raise --p-out or --p-in, or change --graph-seed."
        ) from None
    found = sweep(experiment, graph)
    console.print(table(experiment, found))
    for name, drawn in figures(experiment, graph, found).items():
        report.save(drawn, experiment.out / f"{name}.png", console)


def _errors(e: Experiment, sweep: Sweep, k: int, by_alpha: Any, by_size: Any) -> None:
    """Errors with num_examples[k] against alpha, and all against local data."""
    colors: dict[str, str] = dict(zip(METHODS, plots.COLORS, strict=False))
    for name, x in errors(sweep, k).items():
        if name != "network":
            by_alpha.axhline(x.mean(), color=colors[name], linestyle="--", label=name)
    _range(by_alpha, e.alphas, sweep.network[:, k], colors["network"], "network")
    by_alpha.set(title=f"error against alpha, {e.shown} examples each", xlabel="alpha")
    for name in METHODS:
        x = np.stack([errors(sweep, i)[name] for i in range(len(e.num_examples))], 1)
        label = "network, alpha by the truth" if name == "network" else name
        _range(by_size, e.num_examples, x, colors[name], label)
    by_size.set(title="error against local data", xlabel="examples per node")
    for axes in (by_alpha, by_size):
        axes.set(xscale="log", yscale="log")
        axes.set_ylabel(f"estimation error, mean and range of {e.num_seeds} draws")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize="small")
    by_size.set_xticks(e.num_examples, [str(m) for m in e.num_examples])
    by_size.minorticks_off()


def _maps(figure: Any, axes: Any, graph: Graph, problem: Problem, alpha: float) -> None:
    """The network three times: true, local and GTVMin's parameters."""
    W_true = np.asarray(problem.W_true)
    # What tells the clusters apart best, in one number.
    centre = W_true.mean(0)
    direction = np.linalg.svd(W_true - centre)[2][0]
    pictures = {
        "the truth": W_true,
        "every node alone": solve(graph, problem, 0.0),
        f"GTVMin, alpha = {alpha:g}": solve(graph, problem, alpha),
    }
    most = 1.15 * np.abs((W_true - centre) @ direction).max()
    place = plots.layout(graph)
    look = {"cmap": "RdYlBu_r", "vmin": -most, "vmax": most}
    nodes = None
    for panel, (name, W) in zip(axes, pictures.items(), strict=True):
        value = (np.asarray(W) - centre) @ direction
        nodes = plots.network(panel, graph, value, place, **look)
        panel.set_title(name)
    bar = figure.colorbar(nodes, ax=axes, shrink=0.8, pad=0.01, extend="both")
    bar.set_label("parameters, along the main\ndifference of the clusters")
    bar.outline.set_visible(False)


def _range(axes: Any, x: Any, y: np.ndarray, color: str, label: str) -> None:
    """The mean over seeds, and from the least to the most as a band."""
    report.band(axes, x, y.mean(0), y.min(0), y.max(0), color, label)
