"""STC, FedAvg and signSGD: accuracy against bits, in the environments of Sattler 2021.

The first tables are those of his table 4.2: megabytes of one participant up and down to
a test accuracy, and how many times less that is than with other methods, printed and
ours. The others have accuracies after equally many local iterations where the
environment changes (figures 4.1 to 4.4): classes per client, participation, batch size,
balancedness, momentum, sparsity either way; what the figures claim is tested over
seeds. All of it is on one page, with figure 4.5. Digits by default; other data need
files, see --path.
"""

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import numpy as np

from fedjax_core import FederatedData, LocalWork, Model, Result, check, models
from fedjax_core.algorithms import fedavg, signsgd, stc
from fedjax_core.compress.theory import download_ratio
from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import (
    cifar,
    digits,
    fashion_mnist,
    images,
    mnist,
    partition,
    shakespeare,
)
from fedjax_core.experiments import report
from fedjax_core.models.layers import Dense
from fedjax_core.models.recurrent import LSTM
from fedjax_core.types import Checked, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      data: digits are built in; the others are read from `path`. "kws" is kws.npz of
        x_train, y_train, x_test and y_test, spectrograms of 10 keywords as uint8
        images of 32x32x1; "shakespeare" has roles for clients and one environment.
      path: folder of the data's files, or the file of roles.
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
      out: directory of records, pages and figures; it goes on with what is there.
    """

    data: Literal[
        "digits", "usps", "mnist", "cifar10", "kws", "fashion_mnist", "shakespeare"
    ] = "digits"
    path: Path | None = None
    num_clients: PositiveInt = 100
    cohort_size: PositiveInt = 10
    batch_size: PositiveInt = 10
    iterations: PositiveInt = 800
    delays: tuple[int, ...] = (25, 100, 400)
    sparsities: tuple[int, ...] = (25, 100, 400)
    client_lr: float = 0.1
    step_size: float = 1e-3
    momentum: float = 0.9
    goal: float = 0.93
    num_seeds: PositiveInt = 5
    environments: bool = True
    out: Path = Path("runs/stc_tables")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(1, self.num_clients, cohort_size=self.cohort_size)
        check.open_interval(0, 1, goal=self.goal)
        if self.data == "shakespeare" and self.environments:
            raise ValueError("environments must be False for shakespeare, got True.")
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

# Megabytes up and down of table 4.2, to 84 % with VGG11* on CIFAR-10, 90 % with a CNN
# on keywords and 89 % with an LSTM on Fashion-MNIST; not reached is NaN.
_NAMES = ("DSGD", "signSGD", "FedAvg 25", "FedAvg 100", "FedAvg 400")
_NAMES += ("STC 1/25", "STC 1/100", "STC 1/400")
_NEVER = (math.nan, math.nan)
_COLUMNS = {
    "cifar10": (
        (36696.2, 36696.2), (1579.5, 6937.6), (3572.7, 3572.7), (1606.3, 1606.3),
        _NEVER, (118.4, 1184.3), (202.2, 2022.1), (183.9, 1839.7),
    ),
    "kws": (
        (5191.3, 5191.3), (925.1, 4063.6), (301.6, 301.6), (617.3, 617.3),
        (350.7, 350.7), (43.5, 435.7), (31.0, 310.2), (14.8, 148.1),
    ),
    "fashion_mnist": (
        (2422.8, 2422.8), (123.3, 541.6), (174.7, 174.7), (83.9, 83.9),
        (86.5, 86.5), (8.8, 88.4), (12.1, 121.2), (7.9, 79.1),
    ),
}  # fmt: skip
PRINTED: dict[str, dict[str, tuple[float, float]]] = {
    data: dict(zip(_NAMES, column, strict=True)) for data, column in _COLUMNS.items()
}


class RowLSTM(nn.Module):
    """Two LSTM layers along the rows of images: 213,258 parameters of 28x28 pixels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, rows, columns, 1] to 10 logits."""
        x = x[..., 0].transpose(1, 0, 2)
        for _ in range(2):
            x = LSTM(128)(x)
        return Dense(10)(x[-1])


def load(experiment: Experiment) -> tuple[Dataset | FederatedData, Model]:
    """Pooled examples, or roles as they are, and a model for them."""
    path, data = experiment.path, experiment.data
    if data == "digits":
        return digits.load(), models.mlp(64, 10, hidden=(100, 100))
    assert path is not None
    if data == "shakespeare":
        roles = shakespeare.load(path, min_speeches=2)
        chosen = np.random.default_rng(0).permutation(roles.num_clients)
        return roles.subset(chosen[: experiment.num_clients]), models.char_lstm()
    if data == "cifar10":
        return cifar.load_cifar10(path), models.vgg11_small()
    if data == "fashion_mnist":
        model = models.classifier(RowLSTM(), (28, 28, 1))
        return fashion_mnist.load(path), model
    if data == "mnist":
        return images.as_vectors(mnist.load(path)), models.logistic_regression(784, 10)
    file = images.find_npz(path, (f"{data}.npz",)) or path / f"{data}.npz"
    if data == "kws":
        spectrograms = images.from_npz(file, 10, (32, 32, 1), (None, None))
        return spectrograms, models.kws_cnn()
    pooled = images.from_npz(file, 10, (16, 16), (None, None))
    return images.as_vectors(pooled), models.mlp(256, 10, hidden=(100, 100))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """What changes from one column of the second table to the next."""

    classes: int = 10  # per client
    cohort_size: int
    batch_size: int
    num_clients: int | None = None  # None for those of the experiment
    balance: float = 1.0  # geometric factor of the sizes of clients
    momentum: float | None = None
    shared: float = 0.0  # of the training examples, which all clients have


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
        "1 class, some shared": change(classes=1, shared=0.05),
        "five clients": change(num_clients=5, cohort_size=5),
    }


def split(
    environment: Environment, pooled: Dataset | FederatedData, num_clients: int
) -> FederatedData:
    """The clients of an environment."""
    if isinstance(pooled, FederatedData):
        return pooled
    if environment.balance < 1:
        return partition.balancedness(
            pooled, num_clients=num_clients, gamma=environment.balance
        )
    deal = functools.partial(
        partition.classes_per_client,
        num_clients=num_clients,
        num_classes=environment.classes,
    )
    if environment.shared:
        return partition.shared(pooled, deal, environment.shared)
    return deal(pooled)


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
    for up, down in itertools.product(experiment.sparsities, repeat=2):
        config = stc.Config(
            client_lr=lr, momentum=momentum, work=work, sparsity_up=up,
            sparsity_down=down,
        )  # fmt: skip
        if up == down:
            out[f"STC 1/{up}"] = (stc, config, rounds, {})
        elif environment.num_clients:  # figure 4.2
            out[f"STC 1/{up} up, 1/{down} down"] = (stc, config, rounds, {})
    return out


def run(
    experiment: Experiment,
    loaded: tuple[Dataset | FederatedData, Model],
    name: str,
    environment: Environment,
    which: Any = None,
) -> dict[str, Result]:
    """A result for every method (or those that `which` names), recorded."""
    pooled, model = loaded
    data = split(environment, pooled, environment.num_clients or experiment.num_clients)
    made = methods(experiment, environment)
    return {
        method: report.recorded(
            experiment,
            f"{name}/{method.replace('/', '_')}",
            module.make(config, model.loss, **parts),
            data,
            model,
            rounds=rounds,
            cohort_size=environment.cohort_size,
            eval_every=max(1, rounds // 40),
            record=dataclasses.asdict(environment),
        )
        for method, (module, config, rounds, parts) in made.items()
        if which is None or method in which
    }


def fewer(experiment: Experiment) -> list[tuple[str, str, str]]:
    """Cheaper, dearer, way: the orderings of table 4.2."""
    sparse = [f"STC 1/{sparsity}" for sparsity in experiment.sparsities]
    delayed = [f"FedAvg {delay}" for delay in experiment.delays]
    pairs = [(name, "DSGD") for name in (*sparse, *delayed)]
    pairs += [(sparse[-1], dear) for dear in (*delayed, "signSGD")]
    ways = ("uplink", "downlink")
    return [(*pair, way) for pair in pairs for way in ways]


def claims(experiment: Experiment) -> list[tuple[str, str, str]]:
    """Better, worse, environment, as the figures have it."""
    sparse = f"STC 1/{experiment.sparsities[-1]}"
    delayed = f"FedAvg {experiment.delays[-1]}"
    places = ("2 classes", "1 class", "1 class, all clients", "batch of 1")
    return [
        *((sparse, delayed, place) for place in (*places, "few clients")),
        *((sparse, "signSGD", place) for place in places[:2]),
    ]


def draw(results: dict[str, Result]) -> Any:
    """Figure 4.5: accuracy against what one participant sends and receives."""
    figure, axes = report.panels(10, 4, sharey=True)
    for way, ax in zip(("uplink", "downlink"), axes, strict=True):
        for name, result in results.items():
            sent = report.of_participant(result, f"{way}_bytes").cumsum(1).mean(0)
            accuracy = result.evaluations["test_accuracy"].mean(0)
            ax.plot(sent[result.evaluated - 1], accuracy, label=name)
        ax.set(xscale="log", xlabel=f"MB {way} of one participant")
    axes[0].set_ylabel("test accuracy")
    axes[0].legend(fontsize=7)
    return figure


def limits(experiment: Experiment) -> list[str]:
    """What the numbers rest on and can't show."""
    share = experiment.cohort_size / experiment.num_clients
    long_run = [f"{download_ratio(share, way):.4g}" for way in ("stc", "signsgd")]
    return [
        f"Downloads are {long_run[0]} times the uploads of STC in the long run, up to "
        f"{long_run[1]} times those of signSGD and as large as those of FedAvg.",
        "Megabytes go with the size of the model, factors between methods less so.",
        "Data as easy as digits hide how far FedAvg falls behind on unlike clients.",
        f"{experiment.num_seeds} seeds; fewer than five decide no ordering.",
    ]


def main(experiment: Experiment) -> None:
    """Runs both tables, prints them and writes them with accuracy against bits."""
    loaded = load(experiment)
    places, claimed = environments(experiment), claims(experiment)
    if not experiment.environments:
        places, claimed = {"iid": places["iid"]}, []
    whole = ("iid", "five clients")  # where all methods run
    which = {"signSGD", *(name for claim in claimed for name in claim[:2])}
    found = {
        name: run(experiment, loaded, name, place, None if name in whole else which)
        for name, place in places.items()
    }
    source = experiment.data if experiment.data in PRINTED else "cifar10"
    goal, printed, pairs = experiment.goal, PRINTED[source], fewer(experiment)
    title = "Claims of table 4.2"
    more = [report.cheaper(title, found["iid"], goal, printed, pairs)]
    for name, results in found.items():
        paper, title = (printed, "Table 4.2") if name == "iid" else ({}, "Figure 4.6")
        more.append(report.to_target(f"{title}: {name}", results, goal, paper, source))
    cells = {(m, name): r for name, part in found.items() for m, r in part.items()}
    outcome = report.outcome_of(experiment, cells, claims=claimed, show_best=True)
    page = report.Page("Sparse ternary compression", limits(experiment), experiment.out)
    page.show("All environments", outcome, more)
    page.draw("bits", draw(found["iid"]))
    page.write("summary")
