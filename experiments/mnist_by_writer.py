"""FedAvg on MNIST by writer: 539 natural clients, tested on 297 new ones as well.

Every client is a person who wrote some of MNIST's training digits. The model is tested
on digits of theirs that were held out, and on the people who wrote the test digits, of
whom it has seen nothing. Prints a table, writes a plot. Needs files on disk, see
--path.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from fedjax_core import FederatedData, LocalWork, Result, check, models
from fedjax_core.algorithms import fedavg
from fedjax_core.datasets import mnist
from fedjax_core.evaluate import compile_evaluation
from fedjax_core.experiments import report
from fedjax_core.result import spread
from fedjax_core.types import Checked, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      algorithm: hyper-parameters of FedAvg.
      path: folder with MNIST's four idx files and QMNIST's two label files, or with
        mnist_by_writer.npz.
      model: "mlp" of two hidden layers of 200, or "cnn" of 1.2 million parameters.
      test_fraction: share of every training writer's digits that is held out.
      cohort_size: clients per round.
      rounds: rounds of training.
      num_seeds: independent runs, for mean and spread; all hold out the same digits.
      out: directory for the run's record and its plot. An interrupted run of the same
        settings goes on there, a finished one is shown again.
    """

    algorithm: fedavg.Config = dataclasses.field(
        default_factory=lambda: fedavg.Config(work=LocalWork(epochs=2, batch_size=10))
    )
    path: Path = Path("data/mnist_by_writer")
    model: Literal["mlp", "cnn"] = "mlp"
    test_fraction: float = 0.2
    cohort_size: PositiveInt = 20
    rounds: PositiveInt = 200
    num_seeds: PositiveInt = 5
    out: Path = Path("runs/mnist_by_writer")

    def __post_init__(self):
        super().__post_init__()
        # Both in every hand.
        check.in_range(0.05, 0.95, test_fraction=self.test_fraction)
        check.in_range(1, 539, cohort_size=self.cohort_size)  # all writers


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(rounds=20, num_seeds=2, cohort_size=10),
}


class Accuracies(NamedTuple):
    """How well S models do on each of N writers."""

    values: np.ndarray  # [S, N]
    sizes: np.ndarray  # [N], digits tested
    is_student: np.ndarray  # [N] bool

    def of(self, writers: np.ndarray) -> "Accuracies":
        """Those of some of the writers, a mask [N]."""
        return Accuracies(
            self.values[:, writers], self.sizes[writers], self.is_student[writers]
        )


def run(experiment: Experiment) -> tuple[Result, dict[str, Accuracies]]:
    """Trains and evaluates; the record is in ``experiment.out``.

    Returns:
      The result, and the accuracies on "training writers" and "new writers".

    Raises:
      FileNotFoundError: a data file is absent; says what to fetch.
      DataFileError: a data file is damaged.
    """
    data = _load(experiment, "train", experiment.test_fraction)
    new = _load(experiment, "test", 1.0)
    model = models.emnist_cnn(10) if experiment.model == "cnn" else models.mlp(784, 10)
    cohort = experiment.cohort_size
    result = report.trained(experiment, "", data, model, cohort_size=cohort)
    params = jax.tree.map(np.asarray, result.params)
    _, of_new = compile_evaluation(model.metrics, new, ("test",))(params)
    return result, {
        "training writers": _accuracies(data, result.client_metrics["test_accuracy"]),
        "new writers": _accuracies(new, of_new["test_accuracy"]),
    }


def _load(experiment: Experiment, part: str, test_fraction: float) -> FederatedData:
    data = mnist.load_by_writer(experiment.path, part, test_fraction)
    if experiment.model == "cnn":
        return data
    return data.map(lambda e: {**e, "x": e["x"].reshape(-1, 784)})


def _accuracies(data: FederatedData, values: np.ndarray) -> Accuracies:
    assert data.test is not None
    is_student = mnist.groups(data.client_ids) == 1
    return Accuracies(values, data.test.sizes, is_student)


def table(result: Result, accuracies: dict[str, Accuracies]) -> Table:
    """The accuracies at the end of the run in per cent."""
    rows = []
    for name, all_writers in accuracies.items():
        student = all_writers.is_student
        for label, writers in (
            (name, all_writers),
            ("  census staff", all_writers.of(~student)),
            ("  students", all_writers.of(student)),
        ):
            values, sizes = writers.values, writers.sizes
            pooled, low = (
                values @ sizes / sizes.sum(),
                np.percentile(values, 10, axis=1),
            )
            shown = (spread(100 * v, ".2f") for v in (pooled, values.mean(1), low))
            rows.append((label, f"{len(sizes)}", *shown))
    columns = ("tested on", "clients", "all digits", "mean client", "client p10")
    title = f"accuracy in % after {result.rounds} rounds"
    caption = f"mean ± standard deviation over {len(result.seeds)} seeds"
    return report.tabulate(columns, rows, title=title, caption=caption)


def plot(result: Result, accuracies: dict[str, Accuracies]) -> Any:
    """Accuracy over rounds, and how it spreads over the writers at the end."""
    figure, (curves, shares) = report.panels(11, 3.6)
    names = ("all digits", "mean client", "10th percentile of clients")
    for end, label in zip(("", "_client_mean", "_client_p10"), names, strict=True):
        result.draw(curves, f"test_accuracy{end}", label=label)
    curves.set_title("held-out digits of the training writers", size=9)
    curves.set(xlabel="round", ylabel="accuracy")
    for name, writers in accuracies.items():
        ordered = np.sort(writers.values.ravel())
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        shares.step(ordered, share, where="post", label=name)
    shares.set_title("accuracy per client, all seeds, last round", size=9)
    shares.set(xlabel="accuracy", ylabel="share of clients at or below")
    for axes in (curves, shares):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def main(experiment: Experiment) -> None:
    """Runs the experiment, prints its table and says where the plot is."""
    console = Console()
    result, accuracies = run(experiment)
    console.print(table(result, accuracies))
    if result.timed_rounds:
        console.print(
            f"{result.rounds_per_second:.1f} rounds/s, all seeds at once; compiling "
            f"took {result.compile_seconds:.1f} s",
            highlight=False,
        )
    path = experiment.out / "accuracy.png"
    report.write(plot(result, accuracies), path)
    console.print(f"plot: {path}\nrecord: {experiment.out}", highlight=False)
