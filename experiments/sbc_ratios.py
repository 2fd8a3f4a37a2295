"""Sparse binary compression: compression ratios, and delay against sparsity.

The first table has the ratios of table 3.1 of Sattler 2021: printed, by the formula
that the thesis's tables follow, by the exact one, and measured in rounds of four
workers. The second is the plane of figure 3.2: test error after equally many local
iterations for each delay and each share of coordinates sent. Along diagonals, where
both together save the same, the thesis finds the error about constant, which is tested
over seeds. One page has both.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_core import LocalWork, Model, Result, models
from fedjax_core.algorithms import stc
from fedjax_core.compress import sbc, theory, top_k
from fedjax_core.datasets import digits, partition
from fedjax_core.experiments import report
from fedjax_core.result import spread
from fedjax_core.study_report import Table, verdict_of
from fedjax_core.transform import Transform, identity
from fedjax_core.types import Checked, Fraction, Positive, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
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
      num_seeds: independent runs of the plane; fewer than five decide nothing.
      out: directory of records and figures; it goes on with what is there.
    """

    num_workers: PositiveInt = 4
    iterations: PositiveInt = 1000
    measured_iterations: PositiveInt = 500
    delays: tuple[PositiveInt, ...] = (1, 10, 100)
    rates: tuple[Positive, ...] = (1.0, 0.1, 0.01, 0.001)
    client_lr: Positive = 0.02
    momentum: Fraction = 0.9
    batch_size: PositiveInt = 20
    hidden: PositiveInt = 300
    num_seeds: PositiveInt = 5
    out: Path = Path("runs/sbc_ratios")


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
    algorithm = stc.make(config, model.loss, transform=transform, downlink=identity())
    everyone = experiment.num_workers
    return report.recorded(
        experiment, name, algorithm, data, model, cohort_size=everyone, **how
    )


def ratios(experiment: Experiment) -> Table:
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
        theirs = theory.compression_ratio(method, rate, delay, "seed_table")
        exact = theory.compression_ratio(method, rate, delay)
        rows.append(
            (
                f"{name}: {rate:g}, delay {delay}",
                f"{printed} ({lenet})",
                *(f"{ratio:.1f}" for ratio in (theirs, exact, dense / bits)),
                f"{budget.overhead / budget.total:.1%}",
                "held" if abs(theirs - printed) < 1 else "not held",
            )
        )
    header = ("method", "printed", "its formula", "exact", "measured", "over entropy")
    title = "Table 3.1: times less than distributed SGD; printed of LSTM (LeNet5)"
    return Table(title, (*header, "formula"), rows)


def plane(experiment: Experiment) -> dict[tuple[str, str], Result]:
    """A run for each share of coordinates sent, by name, and each delay."""
    results = {}
    for delay, rate in itertools.product(experiment.delays, experiment.rates):
        rounds = max(experiment.iterations // delay, 1)
        # Beyond 1/2 sparse binary compression is not defined.
        transform = sbc(rate) if rate <= 0.5 else identity()
        name = f"delay {delay}, rate {rate:g}"
        result = run(experiment, name, delay, transform, {"rounds": rounds})
        results[f"rate {rate:g}", f"delay {delay}"] = result
    return results


def errors_of(
    experiment: Experiment, results: dict[tuple[str, str], Result]
) -> np.ndarray:
    """Test errors at the end, ``[delays, rates, S]``."""
    last = [1 - r.evaluations["test_accuracy"][:, -1] for r in results.values()]
    return np.reshape(last, (len(experiment.delays), len(experiment.rates), -1))


def claims(experiment: Experiment, errors: np.ndarray) -> Table:
    """What figure 3.2 claims: where only the product counts, diagonals are even."""
    saved = np.divide.outer(experiment.delays, experiment.rates).round(6)
    diagonals = [errors[saved == times] for times in np.unique(saved)]
    squares = sum(np.square(d - d.mean(0)).sum(0) for d in diagonals)
    free = saved.size - len(diagonals)  # a diagonal of one cell agrees with nothing
    over_all = errors.reshape(saved.size, -1).std(0, ddof=min(1, saved.size - 1))
    along = np.sqrt(squares / free) if free else np.full(over_all.shape, np.nan)
    row = (
        "errors of the same rate / delay differ less than all",
        spread(along, ".4f") if free else "no two cells",
        spread(over_all, ".4f"),
        verdict_of(over_all - along) if free else "undecided",
    )
    header = ("claim", "deviation along diagonals", "of all", "verdict")
    return Table("Figure 3.2", header, [row])


def draw(experiment: Experiment, errors: np.ndarray) -> Any:
    """Figure 3.2."""
    figure, axes = report.panels(5, 4, columns=1)
    picture = axes.imshow(errors.mean(-1), cmap="viridis_r")
    axes.set_xticks(range(len(experiment.rates)), [f"{r:g}" for r in experiment.rates])
    axes.set_yticks(range(len(experiment.delays)), map(str, experiment.delays))
    axes.set(xlabel="share of coordinates sent", ylabel="local iterations per round")
    figure.colorbar(picture, label="test error")
    return figure


LIMITS = (
    "The thesis counts two bits more per value than its code has; measured rounds also "
    "send a mean of 32 bits, which tells where few values are sent.",
    "Accuracies of table 3.1 are of deep networks, and those of figure 3.4 of ImageNet "
    "with a step size that drops; its axes, error against bits, are those of the "
    "figures of each delay.",
)


def main(experiment: Experiment) -> None:
    """Prints both tables and writes them, with the plane, on one page."""
    table, results = ratios(experiment), plane(experiment)
    errors = errors_of(experiment, results)
    page = report.Page("Sparse binary compression", LIMITS, experiment.out)
    more = [table, claims(experiment, errors)]
    page.show("The plane", report.outcome_of(experiment, results), more)
    page.draw("plane", draw(experiment, errors))
    page.write("summary")
