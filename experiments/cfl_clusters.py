"""Clustered federated learning: who disagrees, who does harm, and when not to split.

Four studies after Sattler's thesis, chapter 6, each with a page of its own:

- "clusters": clients that swap two labels, or permute all, by cluster;
- "adversaries": 30 % of the clients flip labels, have noise on their inputs or send
  random updates (table 6.2);
- "gap": how far clusters are apart, against examples a client and rounds (figure 6.6);
- "pairs": two clients that agree, or do not (figure 6.7).

Figures of splits, removals, gaps and norms come with a summary that says what held.
"""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from fedjax_core import Full, LocalWork, check, models, study, study_report
from fedjax_core.algorithms import cfl, fedavg, local_only, one_shot_clustering
from fedjax_core.attacks import by_mark, random_update
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.data.splits import split_examples
from fedjax_core.datasets import cifar, digits, fashion_mnist, images, mnist, partition
from fedjax_core.datasets.adversaries import KINDS, adversaries
from fedjax_core.experiments import report
from fedjax_core.local import local_sgd
from fedjax_core.result import spread
from fedjax_core.robust.rules import (
    coordinate_median,
    geometric_median,
    krum,
    trimmed_mean,
)
from fedjax_core.types import Checked, NonNegative, Positive, PositiveInt

_PRINTED = {  # table 6.2, percent: byzantine, noisy, label-flip, clean
    "mnist": {"FL": (9.8, 96.9, 91.3, 97.5), "CFL": (93.19, 97.4, 97.4, 97.4)},
    "fashion_mnist": {"FL": (9.6, 77.12, 60.6, 79.9), "CFL": (78.0, 79.7, 79.7, 80.2)},
    "cifar10": {"FL": (10.0, 70.4, 40.1, 76.0), "CFL": (61.7, 74.6, 74.7, 75.3)},
}
_RULES = {  # of 30 % attackers
    "trimmed mean": lambda n: trimmed_mean(0.3),
    "coordinate median": lambda n: coordinate_median(),
    "geometric median": lambda n: geometric_median(20),
    "Krum": lambda n: krum(round(0.3 * n)),
}
_FIRST_SEED = 1  # 0 is for the choice of eps1 and eps2
_VALIDATION = 0.2  # of a client's examples, beyond those that it trains on
_SPLITS = {
    "label swap": partition.label_swap,
    "label permutation": partition.label_permutation,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      data: "digits" of scikit-learn, or "mnist", "fashion_mnist" or "cifar10" from
        files.
      path: folder of the files.
      hidden: width of the model's hidden layer. Random updates can only be told from
        others where the model has more than 2 ln(M) / 0.02^2 parameters.
      splits: of "clusters", "label swap" and "label permutation" or one of them.
      num_clients: clients of "clusters" and "gap".
      num_clusters: their clusters.
      points: examples of a client there.
      eps1: a cluster is cut where its mean update is shorter,
      eps2: and a member's at least as long. Of several values those are taken, setting
        by setting, that are best on validation examples of a seed of their own.
      rounds: of "clusters".
      kinds: what adversaries do, of `datasets.adversaries.KINDS`.
      rules: robust means to compare with, of "trimmed mean", "coordinate median",
        "geometric median" and "Krum".
      all_clients: clients of "adversaries"; 30 % are some.
      few_points: examples of a client there.
      attack_rounds: rounds there.
      gap_points: examples of a client in the settings of "gap", ascending.
      gap_rounds: rounds there.
      pair_rounds: rounds of "pairs".
      client_lr: step size of all.
      num_seeds: runs of every cell. Fewer than five decide no ordering.
      out: directory of the studies; they go on with what is there.
    """

    data: Literal["digits", "mnist", "fashion_mnist", "cifar10"] = "mnist"
    path: Path = Path("data/mnist_by_writer")
    hidden: PositiveInt = 32
    splits: tuple[Annotated[str, check.among(_SPLITS)], ...] = tuple(_SPLITS)
    num_clients: PositiveInt = 20
    num_clusters: PositiveInt = 4
    points: PositiveInt = 100
    eps1: tuple[Positive, ...] = (0.03, 0.06, 0.12)
    eps2: tuple[NonNegative, ...] = (0.1, 0.2, 0.4)
    rounds: PositiveInt = 80
    kinds: tuple[Annotated[str, check.among(KINDS)], ...] = KINDS
    rules: tuple[str, ...] = ("coordinate median",)
    all_clients: PositiveInt = 100
    few_points: PositiveInt = 100
    attack_rounds: PositiveInt = 40
    gap_points: tuple[PositiveInt, ...] = (10, 20, 50, 100, 200)
    gap_rounds: PositiveInt = 50
    pair_rounds: PositiveInt = 200
    client_lr: float = 0.1
    num_seeds: PositiveInt = 5
    out: Path = Path("runs/cfl_clusters")

    def __post_init__(self):
        super().__post_init__()
        for name in self.rules:
            check.one_of(_RULES, rules=name)
        check.in_range(1, self.num_clients, num_clusters=self.num_clusters)
        check.in_range(10, np.inf, all_clients=self.all_clients)
        if list(self.gap_points) != sorted(set(self.gap_points)):
            raise ValueError(f"gap_points must ascend, got {self.gap_points}.")


_SMALL = Experiment(data="digits", points=60, gap_points=(10, 30, 60), few_points=14)
PRESETS = {
    "default": Experiment(),
    "smoke": dataclasses.replace(
        _SMALL, num_seeds=2, rounds=4, eps1=(1.0,), eps2=(0.0,), hidden=8,
        all_clients=20, few_points=60, attack_rounds=4, gap_points=(60,), gap_rounds=4,
        pair_rounds=6, splits=("label permutation",), kinds=("label-flip",), rules=(),
    ),
    "digits": dataclasses.replace(_SMALL, hidden=400),
    "cifar10": Experiment(
        data="cifar10", path=Path("data/cifar10_subset"), gap_points=(20, 50, 100, 200),
        few_points=40,
    ),
    "paper": Experiment(
        hidden=200, rounds=200, few_points=600, attack_rounds=200, pair_rounds=1000,
        rules=tuple(_RULES),
    ),
}  # fmt: skip


def load(experiment: Experiment) -> Dataset:
    """The pooled data, inputs as vectors."""
    if experiment.data == "digits":
        return digits.load()
    readers = {"mnist": mnist.load, "fashion_mnist": fashion_mnist.load}
    whole = readers.get(experiment.data, cifar.load_cifar10)(experiment.path)
    return images.as_vectors(whole)


def _seeds(experiment: Experiment) -> range:
    return range(_FIRST_SEED, _FIRST_SEED + experiment.num_seeds)


def some(dataset: Dataset, size: int) -> Dataset:
    """`size` random train examples and all test examples."""
    rng, n = np.random.default_rng(_FIRST_SEED), len(dataset.train["y"])
    rows = rng.permutation(n)[:size]
    return dataset._replace(train={k: v[rows] for k, v in dataset.train.items()})


def known(clustered: partition.Clustered) -> FederatedData:
    """Clients with a server that knows their clusters, to measure gaps."""
    public = {"cluster": clustered.cluster.astype(np.int32)}
    return dataclasses.replace(clustered.data, public=public)


def config_of(experiment: Experiment, **changes: Any) -> cfl.Config:
    """The method's config, as in the thesis: 3 epochs of batches of 100."""
    e, work = experiment, LocalWork(batch_size=100, epochs=3)
    own: dict[str, Any] = {"eps1": e.eps1[0], "eps2": e.eps2[0]} | changes
    return cfl.Config(client_lr=e.client_lr, work=work, **own)


def _setting(
    experiment: Experiment, data: FederatedData, rounds: int, eval_every: int
) -> study.Setting:
    features = data.train.examples["x"].shape[1]
    return study.Setting(
        data=data,
        model=models.mlp(features, 10, hidden=(experiment.hidden,)),
        rounds=rounds,
        options={"participation": Full(), "eval_every": min(eval_every, rounds)},
    )


def clusters_study(experiment: Experiment) -> study.Study:
    """Label swap and permutation: one model for all, per cluster, per client."""
    e, config = experiment, config_of(experiment)
    grid = {"eps1": e.eps1, "eps2": e.eps2} if len(e.eps1) + len(e.eps2) > 2 else {}
    common: dict[str, Any] = {"client_lr": e.client_lr, "work": config.work}
    by_cluster: Any = {"metric": "cluster_accuracy"}
    one_shot = common | by_cluster | {"num_clusters": e.num_clusters}
    methods = {
        "FedAvg": study.Method.of(fedavg, **common),
        "CFL": study.Method(make=cfl.make, config=config, grid=grid, **by_cluster),
        "one-shot k-means": study.Method.of(one_shot_clustering, **one_shot),
        "local only": study.Method.of(local_only, metric="local_accuracy", **common),
    }
    kept = 1 - _VALIDATION * bool(grid)
    pool = some(load(e), round(e.num_clients * e.points / kept))
    settings = {}
    for name in e.splits:
        clustered = _SPLITS[name](pool, e.num_clients, e.num_clusters)
        if grid:
            data = split_examples(clustered.data, 0, _VALIDATION)
            clustered = clustered._replace(data=data)
        data = known(clustered)
        settings[name] = _setting(e, data, e.rounds, max(1, e.rounds // 20))
    others = itertools.product(("FedAvg", "local only"), settings)
    return study.Study(
        methods=methods,
        settings=settings,
        seeds=_seeds(e),
        tuning_seeds=range(_FIRST_SEED),
        claims=[("CFL", *other) for other in others],
    )


def _attackers(loss_fn, optimizer):
    return by_mark(local_sgd(loss_fn, optimizer), random_update())


def adversaries_study(experiment: Experiment) -> study.Study:
    """Table 6.2: 30 % adversaries of three kinds, and none."""
    e = experiment
    config = config_of(e, eps1=None, eps2=0.0, robust=True, max_clusters=1)
    average = fedavg.Config(client_lr=e.client_lr, work=config.work)

    def of(module: Any, config: Any, **plugs: Any) -> study.Method:
        make = functools.partial(module.make, program=_attackers, **plugs)
        return study.Method(make=make, config=config)

    methods = {"FL": of(fedavg, average), "CFL": of(cfl, config)} | {
        name: of(fedavg, average, reduce=_RULES[name](e.all_clients))
        for name in e.rules
    }
    pool = some(load(e), e.all_clients * e.few_points)
    data = partition.iid(pool, e.all_clients)
    bad = np.arange(e.all_clients) < round(0.3 * e.all_clients)
    how = e.attack_rounds, max(1, e.attack_rounds // 10)
    settings = {k: _setting(e, adversaries(data, bad, k), *how) for k in e.kinds}
    names = ("byzantine", "noisy", "label-flip", "clean")
    printed = {
        (method, kind): value / 100
        for method, row in _PRINTED.get(e.data, {}).items()
        for kind, value in zip(names, row, strict=True)
        if kind in e.kinds
    }
    return study.Study(
        methods=methods,
        settings=settings,
        seeds=_seeds(e),
        printed=printed,
        claims=[("CFL", "FL", kind) for kind in names[:3] if kind in e.kinds],
    )


def gap_study(experiment: Experiment) -> study.Study:
    """Label swap among clients of few to many examples; nothing is cut."""
    e, dataset = experiment, load(experiment)
    settings = {}
    for points in e.gap_points:
        pool = some(dataset, e.num_clients * points)
        data = known(partition.label_swap(pool, e.num_clients, e.num_clusters))
        settings[f"{points} points"] = _setting(e, data, e.gap_rounds, e.gap_rounds)
    return _uncut(experiment, settings)


def pairs_study(experiment: Experiment) -> study.Study:
    """Two clients with other digits each, or other names for the same images."""
    e = experiment
    pool = some(load(e), e.num_clients * e.points)

    def two(clients):
        return FederatedData.from_lists(*(map(clients, pool[:2])))

    def halves(split):
        low = split["y"] < 5
        return [{k: v[rows] for k, v in split.items()} for rows in (low, ~low)]

    def renamed(split):
        return [split, split | {"y": (split["y"] + 1) % 10}]

    settings = {
        name: _setting(e, two(clients), e.pair_rounds, e.pair_rounds)
        for name, clients in (("congruent", halves), ("incongruent", renamed))
    }
    return _uncut(experiment, settings)


def _uncut(experiment: Experiment, settings: dict[str, study.Setting]) -> study.Study:
    config = config_of(experiment, eps2=1e6, max_clusters=1)
    methods = {"one cluster": study.Method(make=cfl.make, config=config)}
    return study.Study(methods=methods, settings=settings, seeds=_seeds(experiment))


STUDIES = {
    "clusters": clusters_study,
    "adversaries": adversaries_study,
    "gap": gap_study,
    "pairs": pairs_study,
}


def train(outcome: study.Outcome, method: str, setting: str, metric: str) -> np.ndarray:
    """What a cell's rounds have measured, ``[S, rounds]``."""
    result = outcome.row(method, setting).result
    assert result is not None, outcome.row(method, setting).error
    return result.train[metric].astype(float)


def findings(
    experiment: Experiment, outcomes: dict[str, study.Outcome]
) -> study_report.Table:
    """What there is beyond the tables of the studies."""
    rows: list[tuple[str, ...]] = []

    def add(what: str, printed: str, values: Any, verdict: str = "") -> None:
        rows.append((what, printed, spread(values), verdict))

    def seen(which):
        return f"in {which.sum()} of {len(which)} seeds"

    gaps = {
        n: train(outcomes["gap"], "one cluster", f"{n} points", "gap")
        for n in experiment.gap_points
    }
    for n, gap in gaps.items():
        since = [str(np.argmax(g > 0) + 1) if (g > 0).any() else "never" for g in gap]
        paper, opened = "> 0 from about 20 on (MNIST)", ", ".join(since)
        what = f"gap of {n} points a client"
        add(what, paper, gap[:, -1], f"> 0 since round {opened}")
    for (n, few), (m, many) in itertools.pairwise(gaps.items()):
        d = many[:, -1] - few[:, -1]
        add(f"gap, {m} > {n} points", "grows", d, study_report.verdict_of(d))
    last = {}
    for s, name in itertools.product(("congruent", "incongruent"), ("mean", "max")):
        norms = train(outcomes["pairs"], "one cluster", s, f"{name}_update_norm")
        last[s, name] = norms[:, -1]
        paper = "to 0" if name == "mean" or s == "congruent" else "stays"
        share = norms[:, -1] / norms[:, 0]
        add(f"{s} pair, {name} norm at end / start", paper, share)
    d = last["incongruent", "max"] - last["congruent", "max"]
    add("max norm, incongruent > congruent", "yes", d, study_report.verdict_of(d))
    outcome = outcomes["clusters"]
    for setting in dict.fromkeys(row.setting for row in outcome.rows):
        found, gap = (
            train(outcome, "CFL", setting, name)[:, -1] for name in ("clusters", "gap")
        )
        right = found == experiment.num_clusters
        add(f"{setting}: clusters", str(experiment.num_clusters), found, seen(right))
        add(f"{setting}: gap of final clusters", "< 0", gap, seen(gap < 0))
        for method in dict.fromkeys(row.method for row in outcome.rows):
            paper = {"FedAvg": "about 0.2", "CFL": "about 0.6"}.get(method, "")
            paper += " (CIFAR-10, permuted)" if paper else ""
            values = outcome.row(method, setting).values
            add(f"{setting}: accuracy of {method}", paper, values)
    for kind in experiment.kinds:
        removed = train(outcomes["adversaries"], "CFL", kind, "removed_clients")
        until = max(np.flatnonzero(r)[-1] + 1 if r.any() else 0 for r in removed)
        times = max(np.count_nonzero(r) for r in removed)
        paper = {"clean": "0", "byzantine": "30 by round 34, several cuts"}
        what = f"{kind}: clients removed, of {experiment.all_clients}"
        cuts = f"by round {until}, in up to {times} cuts"
        add(what, paper.get(kind, "30 at once"), removed.sum(1), cuts)
    return study_report.Table("Findings", ("what", "printed", "ours", ""), rows)


def limits(experiment: Experiment) -> list[str]:
    """What the setting can't show."""
    e = experiment
    said = [
        f"Data: {e.data}, {e.points} points a client and a perceptron with {e.hidden} "
        f"hidden units; the thesis has MNIST, Fashion-MNIST and CIFAR-10 whole, and "
        f"convolutional networks. Compare orderings, not levels.",
        "Every client is tested on its share of the test data, relabelled as its own.",
    ]
    if len(e.eps1) + len(e.eps2) > 2:
        said.append(
            "eps1 and eps2 were chosen by validation examples and a seed that these "
            "numbers leave out, each setting's its own; the thesis reads them off "
            "norms of updates."
        )
    said.append(
        "The pair that disagrees gives other names to the same images. It is the third "
        "form tried on MNIST: with labels permuted on unlike images, few or more, its "
        "largest norm fell as well, and in none did it stay as in figure 6.7."
    )
    if e.num_seeds < 5:
        said.append(f"{e.num_seeds} seeds decide no ordering.")
    features = {"digits": 64, "cifar10": 3072}.get(e.data, 784)
    parameters = (features + 1) * e.hidden + (e.hidden + 1) * 10
    needed = 2 * np.log(e.all_clients) / 0.02**2
    if parameters < needed:
        said.append(
            f"{parameters:,} parameters are fewer than the {needed:,.0f} from which "
            f"random updates of {e.all_clients} clients are told from others: "
            f"byzantine clients stay."
        )
    if e.attack_rounds < 200:
        said.append("Benign clients that split off after round 170 can't be seen.")
    return said


def draw(experiment: Experiment, outcomes: dict[str, study.Outcome]) -> Any:
    """Figures 6.6, 6.7, 6.8 and 6.10 as panels, means and deviations over seeds."""
    figure, axes = report.panels(11, 7.5, 2, 2)
    jump, removal, gap, norms = axes.ravel()

    def line(at, values, color, label, x=None):
        mean, std = values.mean(0), values.std(0)  # NaN where nothing was to be cut
        x = np.arange(1, values.shape[1] + 1) if x is None else x
        report.band(at, x, mean, mean - std, mean + std, color, label)

    outcome, setting = outcomes["clusters"], experiment.splits[-1]
    for k, row in enumerate(row for row in outcome.rows if row.setting == setting):
        assert row.result is not None
        rounds, values = row.result.series(row.metric)
        line(jump, values, f"C{k}", row.method, rounds)
    splits = train(outcome, "CFL", setting, "splits")
    for t in np.flatnonzero(splits[0]):
        jump.axvline(t + 1, color="grey", linewidth=0.8, linestyle=":")
    jump.set(title=f"{setting}; splits of the first seed dotted", ylabel="accuracy")
    for k, kind in enumerate(experiment.kinds):
        cross = train(outcomes["adversaries"], "CFL", kind, "alpha_cross")
        line(removal, cross, f"C{k}", kind)
    removal.axhline(0.02, color="grey", linestyle=":")
    removal.set(title="adversaries", ylabel="largest similarity across the cut")
    for k, n in enumerate(experiment.gap_points):
        values = train(outcomes["gap"], "one cluster", f"{n} points", "gap")
        line(gap, values, f"C{k}", f"{n} points")
    gap.axhline(0, color="grey", linestyle=":")
    gap.set(title="label swap", ylabel="separation gap")
    for s, dash in (("congruent", "--"), ("incongruent", "-")):
        for m, mark in (("mean", "C0"), ("max", "C1")):
            values = train(outcomes["pairs"], "one cluster", s, f"{m}_update_norm")
            norms.semilogy(values.mean(0), f"{mark}{dash}", label=f"{m}, {s}")
    norms.set(title="two clients", ylabel="norm of updates")
    for at in axes.ravel():
        at.set_xlabel("round")
        at.legend(fontsize=8)
    return figure


def main(experiment: Experiment) -> None:
    """Runs the studies; prints tables, findings and limits, and where pages are."""
    outcomes, out = {}, experiment.out
    page = report.Page("Clustered federated learning", limits(experiment), out)
    for name, make in STUDIES.items():
        outcomes[name] = study.run(make(experiment), out / name)
        page.show(name, outcomes[name])
    page.draw("figures", draw(experiment, outcomes))
    page.add(findings(experiment, outcomes))
    page.write("summary")
