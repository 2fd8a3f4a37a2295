"""STC, FedAvg and signSGD: accuracy against bits, in the environments of Sattler 2021.

The first table is that of his table 4.2: megabytes of one participant up and down to a
test accuracy, and how many times less that is than with distributed SGD, printed and
ours. The second has accuracies after equally many local iterations where the
environment changes (figures 4.1, 4.3 and 4.4): classes per client, participation,
batch size, balancedness, momentum; what the figures claim is tested over seeds. Digits
by default; other data need files, see --path.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from fedjax_core import FederatedData, LocalWork, Model, Result, check, models, simulate
from fedjax_core.algorithms import fedavg, signsgd, stc
from fedjax_core.compress.theory import download_ratio
from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import cifar, digits, images, mnist, partition
from fedjax_core.experiments.report import of_participant, panels, save, tabulate
from fedjax_core.study_report import verdict_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides the numbers.

    Attributes:
      data: digits are built in; the others are read from `path`.
      path: folder of the data's files.
      num_clients: clients that share the training images.
      cohort_size: clients per round.
      batch_size: examples of a local step.
      iterations: local steps of a client that takes part in every round.
      delays: local steps in a round of FedAvg, to compare.
      sparsities: of STC, which sends one coordinate in so many, to compare.
      client_lr: step size of the clients.
      step_size: of signSGD.
      momentum: where the environment has it.
      goal: test accuracy of the first table.
      num_seeds: independent runs; fewer than five decide nothing.
      environments: whether to run the second table as well.
      out: directory of records, tables and figures; it goes on with what is there.
    """

    data: Literal["digits", "usps", "mnist", "cifar10"] = "digits"
    path: Path | None = None
    num_clients: int = 100
    cohort_size: int = 10
    batch_size: int = 10
    iterations: int = 800
    delays: tuple[int, ...] = (25, 100, 400)
    sparsities: tuple[int, ...] = (25, 100, 400)
    client_lr: float = 0.1
    step_size: float = 1e-3
    momentum: float = 0.9
    goal: float = 0.93
    num_seeds: int = 5
    environments: bool = True
    out: Path = Path("runs/stc_tables")

    def __post_init__(self):
        check.positive_int(
            iterations=self.iterations,
            num_seeds=self.num_seeds,
            batch_size=self.batch_size,
        )
        check.in_range(1, self.num_clients, cohort_size=self.cohort_size)
        check.open_interval(0, 1, goal=self.goal)
        if self.data != "digits" and self.path is None:
            raise ValueError(f"path must be given for {self.data}, got None.")


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        num_clients=20, cohort_size=4, iterations=40, delays=(10,), sparsities=(25,),
        goal=0.2, num_seeds=2, environments=False,
    ),
    "paper": Experiment(
        data="cifar10", path=Path("data/cifar10"), batch_size=20, iterations=20_000,
        client_lr=0.16, step_size=2e-4, goal=0.84,
    ),
}  # fmt: skip

# Megabytes up and down of table 4.2, for VGG11* on CIFAR-10 to 84 %; n.a. is NaN.
PRINTED = {
    "DSGD": (36696.2, 36696.2),
    "signSGD": (1579.5, 6937.6),
    "FedAvg 25": (3572.7, 3572.7),
    "FedAvg 100": (1606.3, 1606.3),
    "FedAvg 400": (math.nan, math.nan),
    "STC 1/25": (118.4, 1184.3),
    "STC 1/100": (202.2, 2022.1),
    "STC 1/400": (183.9, 1839.7),
}


def load(experiment: Experiment) -> tuple[Dataset, Model]:
    """Pooled examples and a model for them."""
    path = experiment.path
    if experiment.data == "digits":
        return digits.load(), models.mlp(64, 10, hidden=(100, 100))
    assert path is not None
    if experiment.data == "cifar10":
        return cifar.load_cifar10(path), models.vgg11_small()
    if experiment.data == "mnist":
        return images.as_vectors(mnist.load(path)), models.logistic_regression(784, 10)
    file = images.find_npz(path, ("usps.npz",)) or path / "usps.npz"
    data = images.from_npz(file, 10, (16, 16), (None, None))
    return images.as_vectors(data), models.mlp(256, 10, hidden=(100, 100))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """What changes from one column of the second table to the next."""

    classes: int = 10  # per client
    cohort_size: int
    batch_size: int
    balance: float = 1.0  # geometric factor of the sizes of clients
    momentum: float | None = None


def environments(experiment: Experiment) -> dict[str, Environment]:
    """By name, the first one that of the first table."""
    base = Environment(
        cohort_size=experiment.cohort_size, batch_size=experiment.batch_size
    )
    change = functools.partial(dataclasses.replace, base)
    momentum = experiment.momentum
    return {
        "iid": base,
        "2 classes": change(classes=2),
        "1 class": change(classes=1),
        "1 class, all clients": change(classes=1, cohort_size=experiment.num_clients),
        "2 classes, momentum": change(classes=2, momentum=momentum),
        "iid, momentum": change(momentum=momentum),
        "batch of 1": change(batch_size=1),
        "few clients": change(cohort_size=max(1, experiment.cohort_size // 5)),
        "unbalanced": change(balance=0.95),
    }


def split(environment: Environment, pooled: Dataset, num_clients: int) -> FederatedData:
    """The clients of an environment."""
    if environment.balance < 1:
        return partition.balancedness(
            pooled, num_clients=num_clients, gamma=environment.balance
        )
    return partition.classes_per_client(
        pooled, num_clients=num_clients, num_classes=environment.classes
    )


def methods(
    experiment: Experiment, environment: Environment
) -> dict[str, tuple[Any, Any, int, dict]]:
    """Name -> module, config, rounds and other parts."""
    work = LocalWork(batch_size=environment.batch_size, steps=1)
    lr, momentum = experiment.client_lr, environment.momentum
    rounds = experiment.iterations
    vote = signsgd.Config(step_size=experiment.step_size, momentum=momentum, work=work)
    out: dict[str, tuple[Any, Any, int, dict]] = {}
    for delay in (1, *experiment.delays):
        config = fedavg.Config(
            client_lr=lr, work=dataclasses.replace(work, steps=delay), weights="uniform"
        )
        # With one step in a round there is momentum only if it outlives the round.
        parts = stc.client_parts(lr, momentum, persist=delay == 1)
        name = f"FedAvg {delay}" if delay > 1 else "DSGD"
        out[name] = (fedavg, config, max(1, rounds // delay), parts)
    out["signSGD"] = (signsgd, vote, rounds, {})
    for sparsity in experiment.sparsities:
        config = stc.Config(
            client_lr=lr,
            momentum=momentum,
            work=work,
            sparsity_up=sparsity,
            sparsity_down=sparsity,
        )
        out[f"STC 1/{sparsity}"] = (stc, config, rounds, {})
    return out


def run(
    experiment: Experiment,
    loaded: tuple[Dataset, Model],
    name: str,
    environment: Environment,
    which: Any = None,
) -> dict[str, Result]:
    """A result for every method (or those that `which` names), recorded."""
    pooled, model = loaded
    data = split(environment, pooled, experiment.num_clients)
    results = {}
    for method, (module, config, rounds, parts) in methods(
        experiment, environment
    ).items():
        if which is not None and method not in which:
            continue
        results[method] = simulate(
            module.make(config, model.loss, **parts),
            data,
            model,
            rounds=rounds,
            cohort_size=environment.cohort_size,
            seeds=range(experiment.num_seeds),
            eval_every=max(1, rounds // 40),
            run_dir=experiment.out / name / method.replace("/", "_"),
            resume=True,
            progress=False,
            record=dataclasses.asdict(environment),
        )
    return results


def megabytes(result: Result, way: str, goal: float) -> tuple[float, int]:
    """Of one participant until the goal, mean over the seeds that reach it."""
    spent = of_participant(result, f"{way}_bytes").cumsum(1)[:, result.evaluated - 1]
    there = result.evaluations["test_accuracy"] >= goal
    reached = [spent[s, there[s].argmax()] for s in np.flatnonzero(there.any(1))]
    return (float(np.mean(reached)) if reached else math.nan), len(reached)


def claims(experiment: Experiment) -> list[tuple[str, str, str]]:
    """Better, worse, environment, as the figures have it."""
    sparse = f"STC 1/{experiment.sparsities[-1]}"
    delayed = f"FedAvg {experiment.delays[-1]}"
    return [
        (sparse, delayed, "2 classes"),
        (sparse, "signSGD", "2 classes"),
        (sparse, delayed, "1 class"),
        (sparse, "signSGD", "1 class"),
        (sparse, delayed, "1 class, all clients"),
        (sparse, delayed, "batch of 1"),
        (sparse, delayed, "few clients"),
    ]


def show_bits(experiment: Experiment, results: dict[str, Result], console: Any) -> None:
    """The first table, and the figure of accuracy against bits."""
    rows, ours = [], {}
    for name, result in results.items():
        ours[name] = tuple(
            megabytes(result, way, experiment.goal)[0] for way in ("uplink", "downlink")
        )
    for name, (up, down) in ours.items():
        printed = PRINTED.get(name, (math.nan, math.nan))
        less = _times(ours["DSGD"], (up, down))
        said = _times(PRINTED["DSGD"], printed)
        reached = megabytes(results[name], "uplink", experiment.goal)[1]
        bits = [results[name].total_bits(f"{way}link_bytes") for way in ("up", "down")]
        rows.append(
            (
                name,
                *(_number(mine) for mine in (up, down)),
                *(
                    f"{_number(x)} ({_number(y)})"
                    for x, y in zip(less, said, strict=True)
                ),
                _number(sum(bits[1]) / sum(bits[0])),
                f"{reached}",
                f"{results[name].final('test_accuracy')[0]:.3f}",
            )
        )
    columns = (
        "",
        "MB up",
        "down",
        "x less up",
        "x less down",
        "down/up",
        "seeds",
        "end",
    )
    title = (
        f"one participant to {experiment.goal:.0%}, how many seeds get there, accuracy "
        f"at the end; in brackets printed, of CIFAR-10 to 84 %"
    )
    console.print(tabulate(columns, rows, title=title))
    share = experiment.cohort_size / experiment.num_clients
    expected = [f"{download_ratio(share, way):.4g}" for way in ("stc", "signsgd")]
    console.print(
        f"down / up in the long run: {expected[0]} for STC, up to {expected[1]} for "
        f"signSGD, 1 for FedAvg.",
        highlight=False,
    )
    figure, axes = panels(10, 4, sharey=True)
    for way, ax in zip(("uplink", "downlink"), axes, strict=True):
        for name, result in results.items():
            spent = of_participant(result, f"{way}_bytes").cumsum(1).mean(0)
            accuracy = result.evaluations["test_accuracy"].mean(0)
            ax.plot(spent[result.evaluated - 1], accuracy, label=name)
        ax.set(xscale="log", xlabel=f"MB {way} of one participant")
    axes[0].set_ylabel("test accuracy")
    axes[0].legend(fontsize=7)
    save(figure, experiment.out / "bits.png", console)


def show_environments(
    experiment: Experiment, results: dict[str, dict[str, Result]], console: Any
) -> None:
    """The second table, and which of the claims held."""
    first = next(iter(results.values()))
    rows = [
        (name, *(f"{found[method].final('test_accuracy')[0]:.3f}" for method in first))
        for name, found in results.items()
    ]
    title = f"test accuracy after {experiment.iterations} iterations"
    console.print(tabulate(("", *first), rows, title=title))
    lines = []
    for better, worse, where in claims(experiment):
        last = [
            results[where][name].evaluations["test_accuracy"][:, -1]
            for name in (better, worse)
        ]
        gaps = last[0] - last[1]
        said = (f"{gaps.mean():+.3f}", verdict_of(gaps))
        lines.append((f"{better} > {worse}", where, *said))
    columns = ("claim of figures 4.1 to 4.4", "environment", "difference", "")
    console.print(tabulate(columns, lines))


def _times(base: tuple[float, float], mine: tuple[float, float]) -> list[float]:
    """How many times less each way; NaN where nothing was sent."""
    return [b / m if m else math.nan for b, m in zip(base, mine, strict=True)]


def _number(value: float) -> str:
    return "n.a." if math.isnan(value) else f"{value:.4g}"


def main(experiment: Experiment) -> None:
    """Runs both tables, prints them and draws accuracy against bits."""
    console, places = Console(), environments(experiment)
    loaded = load(experiment)
    first = run(experiment, loaded, "iid", places["iid"])
    show_bits(experiment, first, console)
    if not experiment.environments:
        return
    which = {"signSGD", *(name for claim in claims(experiment) for name in claim[:2])}
    found = {
        name: run(experiment, loaded, name, place, which)
        for name, place in places.items()
    }
    show_environments(experiment, found, console)
