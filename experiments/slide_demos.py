"""The three demos that Jung's slides only mark, each a few lines over the library.

Twelve nodes on a ring hold linear regression data whose true parameters turn slowly
along it. FedGD runs through a server that keeps the nodes in step; FedAvg
learns one model for all from batches, with half of the nodes in a round; FedGD runs
once more, without a clock, where nodes act when they like on copies of some age. Draws
how each approaches what it should, beside the bound where theory has one.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from fedjax_core import check
from fedjax_core.algorithms.networks import fedavg, fedgd, fedsgd
from fedjax_core.datasets.networks import network_linear
from fedjax_core.experiments import report
from fedjax_core.experiments.report import Run
from fedjax_core.networks import (
    asynchronous,
    builders,
    gtvmin,
    operators,
    schedules,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.iterate import block_max_norm
from fedjax_core.networks.oracles import Quadratic, least_squares_statistics, quadratic
from fedjax_core.networks.theory import contraction
from fedjax_core.types import Checked, Positive, PositiveInt, Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      num_nodes: n.
      num_examples: of a node.
      num_features: d.
      alpha: strength of GTVMin, of FedGD.
      rounds: of FedGD and FedAvg; twice as many events without a clock.
      batch_size: of FedAvg, whose rate falls as the rounds go on.
      local_steps: of FedAvg.
      bound: window in which every node acts, and largest age of a copy.
      seed: of everything drawn.
      out: directory for the figure.
      run_dir: directory to record the runs in; an interrupted run of the same settings
        goes on there, a finished one is shown again.
    """

    num_nodes: PositiveInt = 12
    num_examples: PositiveInt = 30
    num_features: PositiveInt = 3
    alpha: Positive = 0.5
    rounds: PositiveInt = 60
    batch_size: PositiveInt = 10
    local_steps: PositiveInt = 5
    bound: PositiveInt = 4
    seed: Seed = 0
    out: Path = Path("runs/slide_demos")
    run_dir: Path | None = None

    def __post_init__(self):
        super().__post_init__()
        check.in_range(5, 10_000, num_nodes=self.num_nodes)
        check.in_range(1, self.num_examples, batch_size=self.batch_size)
        check.in_range(1, self.num_examples, num_features=self.num_features)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(num_nodes=6, num_examples=8, batch_size=4, rounds=20),
}


class Problem(NamedTuple):
    """The network and its data.

    Attributes:
      graph: the network.
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      local: the average squared errors.
    """

    graph: Graph
    X: jax.Array
    y: jax.Array
    local: Quadratic


def draw(experiment: Experiment) -> Problem:
    """Draws features and noise; the network and the true parameters are fixed."""
    e = experiment
    angle = 2 * np.pi * np.arange(e.num_nodes) / e.num_nodes
    phase = np.arange(e.num_features)
    W_true = 1 + 0.3 * np.sin(angle[:, None] + phase)
    graph, key = builders.cycle(e.num_nodes), jax.random.key(e.seed)
    X, y, _, _ = network_linear(key, graph, e.num_examples, W_true, noise_std=0.1)
    return Problem(graph, X, y, least_squares_statistics(X, y))


def fedgd_with_a_server(experiment: Experiment, problem: Problem) -> Run:
    """Synchronous FedGD: a server passes on what nodes send, and keeps them in step."""
    graph, (Q, q, _), alpha = problem.graph, problem.local, experiment.alpha
    low, high = contraction.extreme_eigenvalues(gtvmin.system(graph, Q, q, alpha)[0])
    eta = contraction.optimal_rate(low, high)
    method = fedgd.make(graph, quadratic(Q, q), alpha=alpha, eta=eta)
    goal = gtvmin.closed_form(graph, Q, q, alpha)
    factor, server = contraction.optimal_factor(low, high), operators.relay
    return report.approach(
        experiment, "server", method, goal, factor=factor, channel=server
    )


def fedavg_with_batches(experiment: Experiment, problem: Problem) -> Run:
    """FedAvg: random batches, several local steps, half of the nodes in a round."""
    e, (Q, q, _) = experiment, problem.local
    pooled = gtvmin.locally_weighted(Q, q, jnp.ones(e.num_nodes))
    slowest = float(jnp.linalg.eigvalsh(Q)[:, -1].max())
    method = fedavg.make(
        fedsgd.least_squares(problem.X, problem.y, e.batch_size),
        e.num_nodes,
        eta=schedules.power_decay(0.5 / slowest, 0.7),
        local_steps=e.local_steps,
        clients=e.num_nodes // 2,
    )
    goal = jnp.broadcast_to(pooled, q.shape)
    return report.approach(e, "fedavg", method, goal, seed=e.seed)


def fedgd_without_a_clock(
    experiment: Experiment, problem: Problem
) -> tuple[asynchronous.Schedule, Run]:
    """Asynchronous FedGD: nodes act at random, on what they last heard."""
    e, graph, (Q, q, _) = experiment, problem.graph, problem.local
    eta = asynchronous.fedgd_rate_bound(graph, Q, e.alpha)
    method = fedgd.make(graph, quadratic(Q, q), alpha=e.alpha, eta=eta)
    when = 2 * e.rounds, e.bound, jax.random.key(e.seed)
    schedule = asynchronous.partially_asynchronous(graph, *when)
    goal = gtvmin.closed_form(graph, Q, q, e.alpha)
    how: dict[str, Any] = {"norm": block_max_norm, "schedule": schedule}
    factor = asynchronous.fedgd_contraction(Q, eta)
    run = report.approach(e, "no_clock", method, goal, factor=factor, **how)
    return schedule, run


def main(experiment: Experiment) -> None:
    """Runs all three in float64, prints a table and says where the figure is."""
    with jax.enable_x64(True):
        problem = draw(experiment)
        schedule, without = fedgd_without_a_clock(experiment, problem)
        runs = {
            "FedGD through a server": fedgd_with_a_server(experiment, problem),
            "FedAvg, half of the nodes": fedavg_with_batches(experiment, problem),
            "FedGD without a clock": without,
        }
    console = Console()
    console.print(table(runs))
    drawn = figure(problem.graph, schedule, runs)
    report.save(drawn, experiment.out / "slide_demos.png", console)


def table(runs: dict[str, Run]) -> Table:
    """Distances at some rounds, and the bounds at the last one."""
    rows = []
    for name, (error, bound) in runs.items():
        last = "" if bound is None else f"{bound[-1]:.2g}"
        rows.append((name, f"{error[len(error) // 4]:.2g}", f"{error[-1]:.2g}", last))
    return report.tabulate(
        ("", "after a quarter", "at the end", "at most"),
        rows,
        title="distance to the solution, relative to that from 0",
    )


def figure(graph: Graph, schedule: asynchronous.Schedule, runs: dict[str, Run]) -> Any:
    """Draws all distances, with bounds dashed, and the first events without a clock."""
    result, (left, right) = report.panels(11, 4.4)
    report.draw_runs(left, runs)
    left.set(ylabel="relative distance to the solution", xlabel="round or event")
    report.draw_schedule(result, right, graph, schedule, events=20)
    right.set_title("the first events without a clock")
    return result
