"""FedAvg on handwritten digits: 100 clients of skewed labels, error bars over seeds.

The scikit-learn digits (1,797 images of 8 x 8) are split by a Dirichlet distribution,
so that most clients see only a few of the ten digits. Prints a table, writes a plot.
"""

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedjax_core import LocalWork, Result, check, models
from fedjax_core.algorithms import fedavg
from fedjax_core.datasets import digits, partition
from fedjax_core.experiments import report
from fedjax_core.types import Checked, Positive, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      algorithm: hyper-parameters of FedAvg.
      num_clients: clients that share the training images.
      alpha: concentration of the Dirichlet split; small means skewed labels.
      cohort_size: clients per round.
      rounds: rounds of training.
      num_seeds: independent runs, for mean and spread.
      hidden: widths of the model's hidden layers.
      out: directory for the run's record and its plot. An interrupted run of the same
        settings goes on there, a finished one is shown again.
    """

    algorithm: fedavg.Config = dataclasses.field(
        default_factory=lambda: fedavg.Config(work=LocalWork(epochs=2, batch_size=10))
    )
    num_clients: PositiveInt = 100
    alpha: Positive = 0.3
    cohort_size: PositiveInt = 10
    rounds: PositiveInt = 200
    num_seeds: PositiveInt = 5
    hidden: tuple[int, ...] = (100,)
    out: Path = Path("runs/quickstart")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(1, self.num_clients, cohort_size=self.cohort_size)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(rounds=6, num_seeds=2, hidden=(16,)),
}


def run(experiment: Experiment) -> Result:
    """Trains and evaluates; the record is in ``experiment.out``."""
    data = partition.dirichlet(
        digits.load(), num_clients=experiment.num_clients, alpha=experiment.alpha
    )
    model = models.mlp(64, 10, hidden=experiment.hidden)
    cohort = experiment.cohort_size
    return report.trained(experiment, "", data, model, cohort_size=cohort)


def table(result: Result) -> Table:
    """The numbers at the end of the run."""
    accuracy, spread = result.final("test_accuracy")
    by_client, client_spread = result.final("test_accuracy_client_mean")
    rows = [
        ("test accuracy", f"{accuracy:.4f}", f"{spread:.4f}"),
        ("test accuracy, mean client", f"{by_client:.4f}", f"{client_spread:.4f}"),
    ]
    for name in ("uplink", "downlink"):
        megabytes = result.total(f"{name}_bytes") / 1e6
        rows.append((f"{name} of one run", f"{megabytes:.1f} MB", ""))
    title = f"after {result.rounds} rounds, {len(result.seeds)} seeds"
    return report.tabulate(
        ("", "mean", "std"), [*rows, *report.speed_of(result)], title=title
    )


def main(experiment: Experiment) -> None:
    """Runs the experiment, prints its table and says where the plot is."""
    console = Console()
    result = run(experiment)
    console.print(table(result))
    path = experiment.out / "test_accuracy.png"
    result.plot("test_accuracy", "test_accuracy_client_mean", path=path)
    console.print(f"plot: {path}\nrecord: {experiment.out}", highlight=False)
