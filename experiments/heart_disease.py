"""Heart disease in four hospitals: train together, apart, or on pooled patients?

Logistic regression on the patients of the four hospitals of UCI Heart Disease, prepared
as in FLamby. FedAvg is compared with every hospital training alone and with training on
all patients in one place, with equal numbers of passes over the data. Prints accuracy
per hospital, writes a plot. The files have to be there, see --path.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedjax_core import LocalWork, Result, models
from fedjax_core.algorithms import fedavg
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.datasets import heart_disease
from fedjax_core.experiments import report
from fedjax_core.result import spread
from fedjax_core.types import Checked, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      algorithm: hyper-parameters of FedAvg; training alone and on pooled patients uses
        the same with one client.
      path: folder with processed.cleveland.data and those of the other hospitals.
      rounds: rounds of training.
      num_seeds: independent runs, for mean and spread: of the initial model and the
        order of patients. All have FLamby's split into train and test.
      out: directory for the runs' records and the plot. An interrupted run of the same
        settings goes on there, a finished one is shown again.
    """

    algorithm: fedavg.Config = dataclasses.field(
        default_factory=lambda: fedavg.Config(
            client_lr=0.1, work=LocalWork(batch_size=8)
        )
    )
    path: Path = Path("data/heart_disease")
    rounds: PositiveInt = 30
    num_seeds: PositiveInt = 5
    out: Path = Path("runs/heart_disease")


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(rounds=3, num_seeds=2),
}


def run(experiment: Experiment, data: FederatedData) -> dict[str, Result]:
    """Trains "FedAvg", "all pooled" and every hospital alone; records are in `out`.

    Every result is evaluated on the test patients of all hospitals.
    """
    model = models.logistic_regression(data.train.examples["x"].shape[1], 2)

    def train(name: str, data: FederatedData) -> Result:
        cohort = data.num_clients
        return report.trained(experiment, name, data, model, cohort_size=cohort)

    return {
        "FedAvg": train("fedavg", data),
        "all pooled": train("pooled", _one_client(data, data.train.examples)),
    } | {
        hospital: train(hospital, _one_client(data, data.train.client(i)))
        for i, hospital in enumerate(data.client_ids)
    }


def _one_client(
    data: FederatedData, examples: Mapping[str, np.ndarray]
) -> FederatedData:
    """The same test split, but the first client trains on `examples`, the others not.

    One training client is plain SGD, and the test patients keep their hospitals.
    """
    offsets = np.r_[0, np.full(data.num_clients, len(examples["y"]))]
    return dataclasses.replace(data, train=Packed(examples, offsets))


def accuracy(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation over seeds of the test accuracy per hospital, [N] each."""
    by_seed = result.client_metrics["test_accuracy"]
    std = (
        by_seed.std(0, ddof=1) if len(by_seed) > 1 else np.full_like(by_seed[0], np.nan)
    )
    return by_seed.mean(0), std


def table(results: dict[str, Result], data: FederatedData) -> Table:
    """Who trained against whose test patients, mean and deviation over seeds."""
    first = results["FedAvg"]
    out = Table(
        title=f"test accuracy after {first.rounds} rounds, {len(first.seeds)} seeds"
    )
    out.add_column("trained by")
    splits = list(data.splits.values())
    for i, hospital in enumerate(data.client_ids):
        train, test = (split.sizes[i] for split in splits)
        out.add_column(f"{hospital}\n{train} + {test}", justify="right")
    for name, result in results.items():
        if name == data.client_ids[0]:  # from here on, hospitals alone
            out.add_section()
        by_hospital = result.client_metrics["test_accuracy"].T
        out.add_row(name, *(spread(values, ".3f") for values in by_hospital))
    ill = [splits[1].client(i)["y"].mean() for i in range(data.num_clients)]
    out.add_section()
    out.add_row("larger class", *(f"{max(p, 1 - p):.3f}        " for p in ill))
    return out


def plot(results: dict[str, Result], data: FederatedData, path: Path) -> None:
    """Bars of test accuracy per hospital: FedAvg, itself alone, all pooled."""
    figure, axes = report.panels(7, 3.6, columns=1)
    places = np.arange(data.num_clients)
    alone = np.array([accuracy(results[h]) for h in data.client_ids])
    bars = {
        "each hospital alone": np.diagonal(alone, axis1=0, axis2=2),
        "FedAvg": accuracy(results["FedAvg"]),
        "all pooled": accuracy(results["all pooled"]),
    }
    for k, (label, (mean, std)) in enumerate(bars.items()):
        axes.bar(places + 0.27 * (k - 1), mean, 0.25, yerr=std, capsize=3, label=label)
    sizes = data.train.sizes
    axes.set_xticks(
        places,
        [f"{h}\n{n} to train" for h, n in zip(data.client_ids, sizes, strict=True)],
    )
    axes.set(ylabel="test accuracy", ylim=(0, 1.12))
    axes.set_title(
        f"mean and one deviation, {len(results['FedAvg'].seeds)} seeds", size=9
    )
    axes.legend(ncols=3, loc="upper center", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    report.write(figure, path)


def main(experiment: Experiment) -> None:
    """Runs the experiment, prints its table and says where the plot is."""
    console = Console()
    data = heart_disease.load(experiment.path)
    results = run(experiment, data)
    console.print(table(results, data))
    path = experiment.out / "test_accuracy.png"
    plot(results, data, path)
    console.print(f"plot: {path}\nrecords: {experiment.out}", highlight=False)
