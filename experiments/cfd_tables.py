"""Compressed federated distillation: tables and figures of Sattler's chapter 5, small.

Table 5.1 (how clients start), table 5.2 (megabytes to a target accuracy) with figures
5.3 and 5.6, figures 5.1 and 5.2 (how many public inputs, chosen how, in how many bits)
and 5.4 (bits up and down). Clients hold digits of MNIST and the public set is USPS,
digits of another post office; or both are parts of CIFAR-10, or of scikit-learn's
digits, which need no files. One page shows printed numbers beside ours. Needs files,
see --path.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax

from fedjax_core import LocalWork, check, models, study
from fedjax_core.algorithms import cfd, fd, fedavg
from fedjax_core.compress.labels import break_even_agreement, fit_power_law
from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import cifar, digits, images, mnist, partition
from fedjax_core.experiments import report
from fedjax_core.study_report import Table
from fedjax_core.types import Checked, Positive, PositiveInt

PARTS = ("table 5.1", "table 5.2", "figure 5.1", "figure 5.2", "figure 5.4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      data: "mnist" with USPS as public set, "cifar10" or "digits", of which a part is
        public.
      path: folder with mnist_by_writer.npz, usps.npz and cifar10_subset.npz, each in a
        folder named as it is, without its ending.
      num_train: labelled examples that clients share.
      num_test: examples that models are tested on.
      num_public: n, unlabelled examples of the public set.
      fewer: smaller public sets that are tried.
      num_clients: clients that share the training examples.
      alphas: concentrations of the Dirichlet split; small means unlike clients.
      targets: accuracy to reach, for each concentration.
      cohort_size: clients per round, but for table 5.1, which has half as many.
      rounds: rounds of every run.
      local_epochs: epochs of a client in a round.
      distil_epochs: epochs of distillation in a round.
      lr: step size of Adam, on clients and in distillation; 0.001 in the paper.
      num_seeds: independent runs of each method; fewer than five decide nothing.
      parts: what is run, of "table 5.1", "table 5.2", "figure 5.1", "figure 5.2" and
        "figure 5.4", which adds rows to table 5.2.
      hidden: width of the hidden layer.
      out: directory of studies and page; it goes on with what is there.
    """

    data: Literal["mnist", "cifar10", "digits"] = "mnist"
    path: Path = Path("data")
    num_train: PositiveInt = 4000
    num_test: PositiveInt = 1000
    num_public: PositiveInt = 2000
    fewer: tuple[int, ...] = (50, 400)
    num_clients: PositiveInt = 20
    alphas: tuple[Positive, ...] = (100.0, 1.0, 0.1)
    targets: tuple[float, ...] = (0.76, 0.7, 0.38)
    cohort_size: PositiveInt = 8
    rounds: PositiveInt = 12
    local_epochs: PositiveInt = 1
    distil_epochs: PositiveInt = 4
    lr: float = 0.003
    num_seeds: PositiveInt = 5
    parts: tuple[Annotated[str, check.among(PARTS)], ...] = PARTS
    hidden: PositiveInt = 64
    out: Path = Path("runs/cfd_tables")

    def __post_init__(self):
        super().__post_init__()
        within = functools.partial(check.in_range, 1, self.num_public)
        check.each(within, None, fewer=self.fewer)
        if len(self.targets) != len(self.alphas):
            raise ValueError(
                f"targets must be one for each of {len(self.alphas)} alphas, got "
                f"{len(self.targets)}."
            )
        check.in_range(2, self.num_clients, cohort_size=self.cohort_size)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        data="digits",
        num_train=300,
        num_test=200,
        num_public=200,
        fewer=(50,),
        num_clients=10,
        alphas=(1.0,),
        targets=(0.3,),
        cohort_size=4,
        rounds=3,
        local_epochs=5,
        distil_epochs=20,
        lr=0.01,
        num_seeds=2,
        parts=("table 5.2",),
        hidden=16,
    ),
    "paper": Experiment(
        num_train=60_000,
        num_test=10_000,
        num_public=7291,
        fewer=(100, 400, 1600, 6400),
        targets=(0.95, 0.95, 0.85),
        rounds=50,
        local_epochs=1,
        distil_epochs=1,
        lr=0.001,
        num_seeds=5,
        hidden=200,
    ),
}

# Accuracies of table 5.1 after 50 rounds: data -> method -> by concentration.
PRINTED = {
    "mnist": {
        "init previous": {100: 0.981, 1: 0.979, 0.1: 0.926},
        "init random": {100: 0.967, 1: 0.964, 0.1: 0.901},
        "dual distillation": {100: 0.978, 1: 0.975, 0.1: 0.927},
    },
    "cifar10": {
        "init previous": {100: 0.702, 1: 0.682, 0.1: 0.511},
        "init random": {100: 0.685, 1: 0.660, 0.1: 0.482},
        "dual distillation": {100: 0.749, 1: 0.724, 0.1: 0.561},
    },
}
# Megabytes up and down in table 5.2, ResNet-18 on CIFAR-10: method -> by concentration.
MEGABYTES = {
    "FedAvg": {100: (760.3, 760.3), 1: (1028.7, 1028.7), 0.1: (1520.7, 1520.7)},
    "FD": {100: (44.8, 44.8), 1: (48.0, 48.0), 0.1: (16.0, 16.0)},
    "CFD-1-32": {100: (0.56, 54.4), 1: (0.37, 41.6), 0.1: (0.09, 22.4)},
    "CFD-1-32 delta": {100: (0.40, 54.4), 1: (0.28, 41.6), 0.1: (0.08, 22.4)},
    "CFD-1-1": {100: (1.36, 1.36), 1: (0.64, 0.72), 0.1: (0.52, 0.99)},
    "CFD-1-1 delta": {100: (0.82, 0.39), 1: (0.43, 0.34), 0.1: (0.40, 0.92)},
}
LIMITS = """\
What a setting this small can't show: the factor between FedAvg and distillation, which
is the size of a model over that of its labels and grows with the model (ResNet-18 has
200 times the parameters of ours); maximum accuracies after 50 rounds of deep nets; text
(DistilBERT). Megabytes are those of one participant, summed over the rounds up to the
target; a first download of labels is charged, as in the paper, though nobody needs it.
Downloads with delta coding are coded against what the same client received last, so
clients that miss rounds can read them. Local training and distillation both use Adam.
"""


def load(experiment: Experiment) -> tuple[Dataset, np.ndarray]:
    """The labelled examples of clients, and public inputs, rows of pixels.

    Both are random parts that stay the same whatever the seed of a run.
    """
    rng, path = np.random.default_rng(0), experiment.path
    if experiment.data == "mnist":
        whole = mnist.load(path / "mnist_by_writer")
        file = path / "usps" / "usps.npz"
        usps = images.from_npz(file, 10, (16, 16), (None, None)).train["x"]
        # Twenty pixels in a frame of four, as MNIST's digits are.
        large = jax.image.resize(usps, (len(usps), 20, 20, 1), "linear")
        public = np.pad(np.asarray(large), ((0, 0), (4, 4), (4, 4), (0, 0)))
        public = public[rng.permutation(len(public))[: experiment.num_public]]
        rows = rng.permutation(len(whole.train["y"]))
    else:
        files, own = path / "cifar10_subset", experiment.data == "cifar10"
        whole = cifar.load_cifar10(files) if own else digits.load()
        rows = rng.permutation(len(whole.train["y"]))
        public = whole.train["x"][rows[: experiment.num_public]]
        rows = rows[experiment.num_public :]
    train = {k: x[rows[: experiment.num_train]] for k, x in whole.train.items()}
    rows = rng.permutation(len(whole.test["y"]))[: experiment.num_test]
    test = {k: x[rows] for k, x in whole.test.items()}
    return images.as_vectors(Dataset(train, test)), public.reshape(len(public), -1)


def settings(
    experiment: Experiment,
    loaded: tuple[Dataset, np.ndarray],
    alphas: Sequence[float],
    cohort_size: int,
) -> dict[str, study.Setting]:
    """A setting for each concentration."""
    (whole, public), found = loaded, {}
    for alpha in alphas:
        data = partition.dirichlet_by_client(whole, experiment.num_clients, alpha)
        data = dataclasses.replace(data, public={"x": public})
        found[_name(alpha)] = study.Setting(
            data=data,
            model=models.mlp(public.shape[1], 10, hidden=(experiment.hidden,)),
            rounds=experiment.rounds,
            options={"cohort_size": cohort_size, "eval_every": 1},
        )
    return found


def _name(alpha: float) -> str:
    return f"concentration {alpha:g}"


def methods(experiment: Experiment) -> dict[str, Any]:
    """By name, ``(**config) -> Method``: all share work and optimisers."""
    e, adam = experiment, optax.adam(experiment.lr)
    work = LocalWork(batch_size=20, epochs=e.local_epochs)
    public_work = LocalWork(batch_size=50, epochs=e.distil_epochs)
    common = {"num_public": e.num_public, "work": work, "public_work": public_work}
    common |= {"distil_lr": e.lr, "charge_first_download": True}

    def of(module: Any, **fixed: Any) -> Any:
        make = functools.partial(module.make, client_optimizer=adam)
        return lambda **config: study.Method(
            make=make, config=module.Config(**fixed | config)
        )

    return {
        "fedavg": of(fedavg, work=work, weights="uniform"),
        "fd": of(fd, **common),
        "cfd": of(cfd, **common),
    }


def make_studies(experiment: Experiment) -> dict[str, study.Study]:
    """The studies, by the table or figures that they are of."""
    e, make = experiment, methods(experiment)
    of_data = functools.partial(settings, e, load(e))
    whole = functools.partial(make["cfd"], up_bits=32, down_bits=32)
    table_1 = {
        "init previous": whole(start="previous"),
        "init random": whole(start="initial"),
        "dual distillation": whole(start="dual"),
    }
    table_2 = {"FedAvg": make["fedavg"](), "FD": make["fd"]()} | {
        f"CFD-{up}-{down}{' delta' * delta}": make["cfd"](
            up_bits=up, down_bits=down, delta=delta
        )
        for up, down in ((1, 32), (1, 1), (32, 1), (32, 32))
        if up == 1 or "figure 5.4" in e.parts
        for delta in ((False, True) if up == 1 else (False,))
    }
    chosen = {
        f"{n} inputs, {by}": make["fd"](num_public=n, select=by)
        for n in e.fewer
        for by in ("random", "entropy", "certainty", "margin")
        if n == e.fewer[0] or by in ("random", "entropy")
    }
    quantised = {
        f"{n} inputs, {bits} bits": make["cfd"](
            num_public=n, up_bits=bits, down_bits=32, start="initial"
        )
        for n in (e.fewer[0], e.num_public)
        for bits in (1, 4, 32)
    }
    few, last = e.fewer[0], _name(e.alphas[0])
    many, one = (of_data(some, e.cohort_size) for some in (e.alphas, e.alphas[:1]))
    make_study = functools.partial(study.Study, seeds=range(e.num_seeds))
    studies = {
        "table 5.1": make_study(
            methods=table_1,
            settings=of_data(e.alphas, e.cohort_size // 2),
            printed={
                (method, _name(alpha)): values[alpha]
                for method, values in PRINTED.get(e.data, {}).items()
                for alpha in e.alphas
                if alpha in values
            },
            claims=[
                (better, "init random", _name(alpha))
                for better in ("dual distillation", "init previous")
                for alpha in e.alphas
            ],
        ),
        "table 5.2": make_study(methods=table_2, settings=many),
        "figure 5.1": make_study(
            methods=chosen,
            settings=one,
            claims=[
                (f"{e.fewer[-1]} inputs, random", f"{few} inputs, {by}", last)
                for by in ("random", "entropy", "certainty", "margin")
                if len(e.fewer) > 1
            ],
        ),
        "figure 5.2": make_study(
            methods=quantised,
            settings=one,
            claims=[(f"{e.num_public} inputs, 1 bits", f"{few} inputs, 32 bits", last)],
        ),
    }
    return {name: this for name, this in studies.items() if name in e.parts}


def to_target(experiment: Experiment, runs: Sequence[study.Row]) -> list[Table]:
    """Table 5.2, and the claims of it that a small setting can decide."""
    found, claims = [], (
        ("FD", "FedAvg", "uplink"),
        ("CFD-1-32", "FD", "uplink"),
        ("CFD-1-32 delta", "CFD-1-32", "uplink"),
        ("CFD-1-1", "FD", "downlink"),
        ("CFD-1-1 delta", "CFD-1-1", "downlink"),
    )  # fmt: skip
    for alpha, target in zip(experiment.alphas, experiment.targets, strict=True):
        name = _name(alpha)
        results = {row.method: row.result for row in runs if row.setting == name}
        printed = {m: mb[alpha] for m, mb in MEGABYTES.items() if alpha in mb}
        goal = (results, target, printed)
        found.append(report.to_target(f"Table 5.2: {name}", *goal, "ResNet-18"))
        found.append(report.cheaper(f"Claims of table 5.2: {name}", *goal, claims))
    return found


def entropies(experiment: Experiment, runs: Sequence[study.Row]) -> Table:
    """Figure 5.3: bits a label, of raw and of delta-coded uploads, and their decay."""
    rows, n = [], experiment.num_public
    found = {(row.method, row.setting): row.result for row in runs}
    for alpha in experiment.alphas:
        for method in ("CFD-1-32", "CFD-1-32 delta"):
            if (result := found[method, _name(alpha)]) is None:
                continue
            bits = (8e6 * report.of_participant(result, "uplink_bytes") / n).mean(0)
            c, d = fit_power_law(np.arange(1, len(bits) + 1), bits)
            cells = (f"{bits[0]:.3f}", f"{bits[-1]:.3f}", f"{c:.2f} t^{-d:+.3f}")
            rows.append((f"{method}, {_name(alpha)}", *cells))
    header = ("bits a label sent", "first round", "last round", "fit c t^-d")
    even = f"{math.log2(10):.3f} bits at most; delta coding pays off from an agreement"
    title = f"Figure 5.3: {even} of {break_even_agreement(10):.3f} on"
    return Table(title, header, rows)


def main(experiment: Experiment) -> None:
    """Runs the studies, prints their tables and writes one page of all."""
    page = report.Page("Compressed federated distillation", LIMITS, experiment.out)
    for name, this in make_studies(experiment).items():
        outcome, more = study.run(this, experiment.out / name), []
        if name == "table 5.2":
            more = to_target(experiment, outcome.rows)
            more.append(entropies(experiment, outcome.rows))
        page.show(name, outcome, more)
    page.write("cfd_tables")
