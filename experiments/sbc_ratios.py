"""Sparse binary compression: compression ratios, and delay against sparsity.

The first table has the ratios of table 3.1 of Sattler 2021: printed, by the formula
that the thesis's tables follow, by the exact one, and measured in rounds of four
workers. The second is the plane of figure 3.2: test error after equally many local
iterations for each delay and each share of coordinates sent. Along diagonals, where
both together save the same, the thesis finds the error about constant.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fedjax_core import LocalWork, Model, Result, check, models, simulate
from fedjax_core.algorithms import stc
from fedjax_core.compress import sbc, theory, top_k
from fedjax_core.datasets import digits, partition
from fedjax_core.experiments.report import panels, save, tabulate
from fedjax_core.transform import Transform, identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides the numbers.

    Attributes:
      num_workers: each takes part in every round.
      iterations: local steps of a worker.
      measured_iterations: local steps of the runs whose bits are measured.
      delays: local steps in a round.
      rates: shares of coordinates that are sent; 1 sends all.
      client_lr: step size of the workers.
      momentum: of the workers; it outlives a round.
      batch_size: examples of a local step.
      hidden: width of the model's two hidden layers.
      num_seeds: independent runs of the plane.
      out: directory of records and figures; it goes on with what is there.
    """

    num_workers: int = 4
    iterations: int = 1000
    measured_iterations: int = 500
    delays: tuple[int, ...] = (1, 10, 100)
    rates: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)
    client_lr: float = 0.02
    momentum: float = 0.9
    batch_size: int = 20
    hidden: int = 300
    num_seeds: int = 3
    out: Path = Path("runs/sbc_ratios")

    def __post_init__(self):
        check.positive(client_lr=self.client_lr)
        check.fraction(momentum=self.momentum)
        check.positive_int(
            num_workers=self.num_workers,
            iterations=self.iterations,
            measured_iterations=self.measured_iterations,
            num_seeds=self.num_seeds,
        )
        for rate in self.rates:
            check.positive(rates=rate)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        iterations=20, measured_iterations=20, delays=(1,), rates=(0.1, 0.01),
        hidden=60, num_seeds=2,
    ),
    "paper": Experiment(iterations=60_000, delays=(1, 10, 100, 1000), num_seeds=5),
}  # fmt: skip

# Method, its rate and delay, and the ratios of WordLSTM and LeNet5 in table 3.1.
TABLE: dict[str, tuple[theory.Kind, float, int, int, int]] = {
    "gradient dropping": ("top_k", 0.001, 1, 719, 718),
    "SBC(1)": ("sbc", 0.001, 1, 2371, 2071),
    "SBC(2)": ("sbc", 0.01, 10, 3165, 3166),
    "SBC(3)": ("sbc", 0.01, 100, 31658, 24935),
}


def run(
    experiment: Experiment, name: str, delay: int, transform: Transform, how: Any
) -> Result:
    """Workers that send what a transform leaves of their updates, recorded."""
    model: Model = models.mlp(64, 10, hidden=(experiment.hidden,) * 2)
    work = LocalWork(batch_size=experiment.batch_size, steps=delay)
    config = stc.Config(
        client_lr=experiment.client_lr, momentum=experiment.momentum, work=work
    )
    data = partition.iid(digits.load(), num_clients=experiment.num_workers)
    return simulate(
        stc.make(config, model.loss, transform=transform, downlink=identity()),
        data,
        model,
        cohort_size=experiment.num_workers,
        run_dir=experiment.out / name,
        resume=True,
        progress=False,
        **how,
    )


def ratios(experiment: Experiment, console: Console) -> None:
    """The first table."""
    rows = []
    for name, (method, rate, delay, printed, lenet) in TABLE.items():
        make = top_k if method == "top_k" else sbc
        steps = max(experiment.measured_iterations // delay, 1)
        how = {"rounds": steps, "eval_splits": (), "seeds": 0}
        transform = make(rate, accounting="golomb")
        result = run(experiment, f"measured {name}", delay, transform, how)
        d = sum(x[0].size for x in jax.tree.leaves(result.params))
        (bits,) = result.total_bits("uplink_bytes")
        dense = 32 * d * delay * steps * experiment.num_workers
        budget = theory.information_budget(method, rate, delay, delay * steps, d)
        formula = (
            theory.compression_ratio(method, rate, delay, "seed_table"),
            theory.compression_ratio(method, rate, delay),
        )
        rows.append(
            (
                f"{name}: {rate:g}, delay {delay}",
                f"{printed} ({lenet})",
                *(f"{ratio:.1f}" for ratio in (*formula, dense / bits)),
                f"{budget.overhead / budget.total:.1%}",
            )
        )
    columns = ("", "printed", "its formula", "exact", "measured", "over entropy")
    console.print(
        tabulate(
            columns,
            rows,
            title="times less than distributed SGD; printed of LSTM (LeNet5)",
        )
    )
    console.print(
        "The thesis counts two bits more per value than its code has; measured rounds "
        "also send a mean of 32 bits, which tells where few values are sent."
    )


def plane(experiment: Experiment, console: Console) -> None:
    """The second table, and its figure."""
    errors = np.zeros((len(experiment.delays), len(experiment.rates)))
    for i, delay in enumerate(experiment.delays):
        for j, rate in enumerate(experiment.rates):
            rounds = max(experiment.iterations // delay, 1)
            how = {"rounds": rounds, "seeds": range(experiment.num_seeds)}
            # Beyond 1/2 sparse binary compression is not defined.
            transform = sbc(rate) if rate <= 0.5 else identity()
            name = f"delay {delay}, rate {rate:g}"
            result = run(experiment, name, delay, transform, how)
            errors[i, j] = 1 - result.final("test_accuracy")[0]
    rows = [
        (f"{delay}", *(f"{error:.4f}" for error in line))
        for delay, line in zip(experiment.delays, errors, strict=True)
    ]
    columns = ("delay \\ rate", *(f"{rate:g}" for rate in experiment.rates))
    title = f"test error after {experiment.iterations} iterations"
    console.print(tabulate(columns, rows, title=title))
    spread = _spread_on_diagonals(experiment, errors)
    console.print(
        f"standard deviation of the error where rate / delay is the same: "
        f"{spread:.4f}, over all: {errors.std():.4f}; their ratio is small where only "
        f"the product counts, as in figure 3.2."
    )
    figure, axes = panels(5, 4, columns=1)
    picture = axes.imshow(errors, cmap="viridis_r")
    axes.set_xticks(range(len(experiment.rates)), columns[1:])
    axes.set_yticks(range(len(experiment.delays)), map(str, experiment.delays))
    axes.set(xlabel="share of coordinates sent", ylabel="local iterations per round")
    figure.colorbar(picture, label="test error")
    save(figure, experiment.out / "plane.png", console)


def _spread_on_diagonals(experiment: Experiment, errors: np.ndarray) -> float:
    """The deviation from the mean of cells with the same product, over all cells."""
    groups: dict[float, list[float]] = {}
    for delay, line in zip(experiment.delays, errors, strict=True):
        for rate, error in zip(experiment.rates, line, strict=True):
            groups.setdefault(round(math.log10(rate / delay), 6), []).append(error)
    rest = [error - np.mean(group) for group in groups.values() for error in group]
    return float(np.sqrt(np.mean(np.square(rest))))


def main(experiment: Experiment) -> None:
    """Prints both tables and draws the plane."""
    console = Console()
    ratios(experiment, console)
    plane(experiment, console)
