"""Servers on a graph and clusters of clients: figures 5.1 to 5.6 of Gauthier's thesis.

Ten servers with fifteen clients each, whose clusters learn linear models that are alike
(5.1 to 5.4), or to tell pairs and triplets of digits apart (5.5) and organs (5.6): PGFL
with and without learning between clusters, one model for all (GFL), and servers that do
not cooperate (ClusterFL), with few clients a round and noise on every message. Says
which printed orderings hold. Figures of images need files on disk and are left out
without, see --mnist and --organs.
"""

import dataclasses
import itertools
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich.console import Console

from fedjax_core import Dataset, Result, check
from fedjax_core.algorithms.networks import pgfl
from fedjax_core.datasets import medmnist, mnist
from fedjax_core.datasets.servers import class_pairs, related_lines
from fedjax_core.experiments import report
from fedjax_core.networks import builders, served
from fedjax_core.networks.plots import COLORS
from fedjax_core.networks.run import run
from fedjax_core.privacy import DynamicBudget
from fedjax_core.study_report import Table
from fedjax_core.types import Checked, Fraction, Positive, PositiveInt, Share

GFL, CLUSTER_FL, FALLING = "GFL", "ClusterFL", "tau = 0.4 x 0.98^n"


def fixed(tau: float) -> str:
    """The name of PGFL with a tau that stays."""
    return f"tau = {tau:g}"


# What an independent calculation found in the setting of the default preset, three
# runs, in dB by figure, method and round; the figures themselves print no numbers.
REFERENCE = {
    "5.1a": {GFL: {300: -17.0}, fixed(0): {300: -14.3}, fixed(0.4): {300: -17.3}},
    "5.1a, less noise": {GFL: {300: -20.0}, fixed(0): {300: -38.0}},
    "5.1b": {fixed(0.2): {300: -14.6}},
    "5.1c": {fixed(0.2): {300: -14.4}, CLUSTER_FL: {300: -7.4}},
    "5.2": {
        fixed(tau): {200: level}
        for tau, level in (
            *((0, -12.6), (0.1, -14.2), (0.2, -14.4), (0.4, -14.2)),
            *((0.6, -13.7), (0.8, -12.5)),
        )
    },
    "5.3": {
        fixed(0): {20: -7.0, 300: -16.3},
        fixed(0.4): {20: -7.4, 300: -9.1},
        FALLING: {20: -7.7, 300: -16.4},
    },
    "5.3, no privacy": {
        fixed(0): {20: -8.0, 300: -16.9},
        fixed(0.4): {20: -8.2, 300: -9.2},
        FALLING: {20: -8.5, 300: -16.9},
    },
}

PAIRS = (((1,), (8,)), ((1,), (9,)), ((7,), (8,)))
TRIPLETS = (((1, 2, 3), (6, 7, 8)), ((1, 2, 3), (7, 8, 9)), ((1, 2, 3), (6, 8, 9)))
BLADDER, LEFT_KIDNEY, RIGHT_KIDNEY, LIVER = 0, 4, 5, 6
LEFT_LUNG, RIGHT_LUNG, SPLEEN = 7, 8, 10
ALIKE = tuple(((x,), (LEFT_LUNG,)) for x in (RIGHT_LUNG, LIVER, RIGHT_KIDNEY))
UNLIKE = (
    *(((SPLEEN,), (LEFT_LUNG,)), ((LEFT_KIDNEY,), (BLADDER,))),
    ((RIGHT_KIDNEY,), (RIGHT_LUNG,)),
)

NOTES = """\
The thesis prints the sizes, the number of clients a round, tau and the first budgets,
and orderings, no numbers. The penalty, lambda, the laws of features and noise and the
bound on gradients are those with which an independent calculation was run, whose
numbers stand beside ours where there are any. NMSD is that of clients' own models,
(5.35), in dB, averaged over runs in dB; accuracy is that of a server's model on images
of a client's task, averaged over clients. "tau = 0" and the like are PGFL. ClusterFL
learns between clusters with tau = 0.4, as the text compares them. All methods have the
same clients, data and schedules. The gains in accuracy are printed where tasks are of
organs: about 5 % in figure 5.6a, about 2 % in 5.6b.

The bound on gradients is a promise: nothing bounds those of squared errors, and a
client's images have gradients of norm up to 1, so that with the same noise a guarantee
costs (1 / bound)^2 times the budget. The text says that phi = 0.001 and zeta = 0.99 add
up to 0.095 after 300 rounds; that is the sum of budgets that shrink, 0.0951. Noise that
shrinks has budgets that grow, and 300 messages cost 1.92. Clients that are not drawn
send nothing and pay nothing, so that most pay less.

Images are averaged over 2 x 2 pixels and scaled to norm 1, without a bias.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      num_servers: S.
      mean_degree: of the random connected network of servers.
      clients: of every server.
      per_server: clients of a server that take part in a round, where not all do.
      num_features: d, of linear models.
      sizes: least and most rows of a client.
      noise_std: of their labels.
      spread: of their models, gamma uniform within it.
      rho: the penalty of ADMM with squared errors.
      image_rho: the same with logistic errors.
      strength: lambda.
      gradient_bound: of one example.
      first: phi of the first message.
      decay: zeta, by which the variance of noise falls from round to round.
      taus: of figure 5.2; 0 and 0.4 among them.
      firsts: of figure 5.4, first budgets, growing.
      decays: of figure 5.4, growing.
      rounds: of curves of linear models.
      sweep_rounds: after which figures 5.2 and 5.4 read the NMSD.
      image_rounds: of images.
      every: rounds between two evaluations; the first one is the start of a curve.
      num_images: of every class to draw from, and to test on.
      figures: names of `FIGURES`.
      num_seeds: runs; fewer than five decide nothing.
      seed: of the network.
      mnist: folder of MNIST's files.
      organs: folder of organamnist.npz.
      out: directory of runs, figures, CSV and page; it goes on with what is there.
    """

    num_servers: int = 10
    mean_degree: float = 3.0
    clients: int = 15
    per_server: int = 3
    num_features: int = 60
    sizes: tuple[int, int] = (2, 9)
    noise_std: float = 2.0
    spread: float = 0.15
    rho: float = 4.0
    image_rho: float = 2.0
    strength: float = 0.1
    gradient_bound: float = 0.05
    first: float = 0.001
    decay: float = 0.99
    taus: tuple[Fraction, ...] = (0, 0.1, 0.2, 0.4, 0.6, 0.8)
    firsts: tuple[Positive, ...] = (1e-5, 1e-4, 1e-3, 1e-2)
    decays: tuple[Annotated[Share, check.positive], ...] = (0.97, 0.98, 0.99, 1.0)
    rounds: int = 300
    sweep_rounds: int = 200
    image_rounds: int = 100
    every: PositiveInt = 20
    num_images: PositiveInt = 300
    figures: tuple[str, ...] = (
        *("5.1a", "5.1a, less noise", "5.1a, unlike tasks", "5.1b", "5.1c", "5.2"),
        *("5.3", "5.3, no privacy", "5.4a", "5.4b", "5.5a", "5.5a, more noise", "5.5b"),
        *("5.5c", "5.6a", "5.6b"),
    )
    num_seeds: PositiveInt = 10
    seed: int = 1
    mnist: Path = Path("data/mnist_by_writer")
    organs: Path = Path("data/organamnist")
    out: Path = Path("runs/pgfl")

    def __post_init__(self):
        super().__post_init__()
        for name in ("rounds", "sweep_rounds", "image_rounds"):
            check.in_range(self.every, 10**6, **{name: getattr(self, name)})
        check.each(check.among(FIGURES), None, figures=self.figures)
        if not {0, 0.4} <= set(self.taus):
            raise ValueError(f"taus must have 0 and 0.4, got {self.taus}.")


class Figure(NamedTuple):
    """What a figure compares.

    Attributes:
      title: of the panel.
      methods: by name, what they change of the method; of an axis that of `configs`.
      changes: of the experiment's data.
      axis: of a figure of last values: "tau", "phi" or "zeta".
      private: whether messages have noise.
      some: whether few clients take part in a round, not all.
      tasks: of images, two groups of classes for every cluster; None is linear models.
      sizes: of images, least and most examples of a client.
      noise: of images, by how much more than the experiment's.
      organs: whether images are organs, not digits.
    """

    title: str
    methods: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({})
    changes: Mapping[str, Any] = types.MappingProxyType({})
    axis: str | None = None
    private: bool = True
    some: bool = True
    tasks: Any = None
    sizes: tuple[int, int] = (2, 4)
    noise: float = 1.0
    organs: bool = False

    @property
    def metric(self) -> str:
        """What is measured."""
        return "nmsd" if self.tasks is None else "accuracy"

    @property
    def rounds(self) -> str:
        """What the experiment calls the rounds of its runs."""
        if self.tasks is not None:
            return "image_rounds"
        return "rounds" if self.axis is None else "sweep_rounds"


def numbers(experiment: Experiment, axis: str) -> tuple[float, ...]:
    """Those along an axis."""
    e = experiment
    return {"tau": e.taus, "phi": e.firsts, "zeta": e.decays}[axis]


def configs(experiment: Experiment, name: str) -> dict[str, pgfl.Config]:
    """The methods of a figure."""
    e, figure = experiment, FIGURES[name]
    some = e.per_server if figure.some else None
    base = pgfl.Config(3, e.rho, e.strength, per_server=some)
    rows = 1
    if figure.tasks is not None:
        base = dataclasses.replace(
            base, rho=e.image_rho, error="logistic", solver_steps=10
        )
        # An example is all its rows, which a neighbour may change together.
        rows = np.asarray(figure.tasks[0]).size
    if figure.private:
        base = dataclasses.replace(
            base,
            budget=DynamicBudget(e.first, e.decay),
            gradient_bound=rows * figure.noise * e.gradient_bound,
        )
    methods = dict(figure.methods)
    for x in numbers(e, figure.axis) if figure.axis else ():
        at = {"tau": 0.4, "phi": e.first, "zeta": e.decay} | {figure.axis: x}
        budget = DynamicBudget(at["phi"], at["zeta"])
        methods[f"{figure.axis} = {x:g}"] = {"tau": at["tau"], "budget": budget}
    return {
        method: dataclasses.replace(base, **changes)
        for method, changes in methods.items()
    }


PLAIN = {fixed(0): {}, fixed(0.4): {"tau": 0.4}}
SEQUENCES = PLAIN | {FALLING: {"tau": 0.4, "tau_decay": 0.98}}
ALL = {fixed(tau): {"tau": tau} for tau in (0.0, 0.2, 0.4)} | {
    GFL: {"num_clusters": 1},
    CLUSTER_FL: {"tau": 0.4, "mixing": "none"},
}
LARGE, MEDIUM = "tau = 0.6", "tau = 0.4 x 0.97^n"
QUIET, APART = {"noise_std": 0.1}, {"spread": 0.5, "noise_std": 1.0}
_OPEN: dict[str, Any] = {"private": False, "some": False}
_ORGANS: dict[str, Any] = {"some": False, "sizes": (2, 2), "organs": True}
_ORGANS["changes"] = {"clients": 3}

FIGURES = {
    "5.1a": Figure("all clients, no privacy", ALL, **_OPEN),
    "5.1a, less noise": Figure(
        "all clients, no privacy, noise of 0.1", ALL, QUIET, **_OPEN
    ),
    "5.1a, unlike tasks": Figure(
        "all clients, no privacy, spread of 0.5, noise of 1", ALL, APART, **_OPEN
    ),
    "5.1b": Figure("some clients a round", ALL, private=False),
    "5.1c": Figure("some clients, privacy", ALL),
    "5.2": Figure("tau", axis="tau"),
    "5.3": Figure("unlike tasks", SEQUENCES, APART),
    "5.3, no privacy": Figure(
        "unlike tasks, no privacy", SEQUENCES, APART, private=False
    ),
    "5.4a": Figure("first budget", axis="phi"),
    "5.4b": Figure("decay of the noise", axis="zeta"),
    "5.5a": Figure("pairs of digits", PLAIN, tasks=PAIRS),
    "5.5a, more noise": Figure(
        "pairs of digits, noise four times as large", PLAIN, tasks=PAIRS, noise=4.0
    ),
    "5.5b": Figure("triplets of digits", PLAIN, tasks=TRIPLETS, sizes=(6, 12)),
    "5.5c": Figure("pairs of digits, tau", axis="tau", tasks=PAIRS),
    "5.6a": Figure(
        "organs, tasks that are alike",
        {fixed(0): {}, LARGE: {"tau": 0.6}},
        tasks=ALIKE,
        **_ORGANS,
    ),
    "5.6b": Figure(
        "organs, unlike tasks",
        {fixed(0): {}, MEDIUM: {"tau": 0.4, "tau_decay": 0.97}},
        tasks=UNLIKE,
        **_ORGANS,
    ),
}

PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        num_servers=5,
        mean_degree=2.0,
        clients=6,
        num_features=10,
        taus=(0, 0.4),
        rounds=40,
        sweep_rounds=40,
        image_rounds=20,
        every=10,
        num_images=40,
        figures=("5.3", "5.5a"),
        num_seeds=5,
    ),
    "paper": Experiment(
        taus=(0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), num_seeds=100
    ),
}


def pool(data: Dataset, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` images of every class, halved in both directions.

    Returns:
      Of training and of test, ``[C, count, d]``; fewer where a class has fewer.
    """
    found = []
    for split in (data.train, data.test):
        x, y = split["x"], np.asarray(split["y"]).reshape(-1)
        x = x.reshape(len(x), 28, 28)
        x = x.reshape(len(x), 14, 2, 14, 2).mean((2, 4)).reshape(len(x), -1)
        rows = [np.flatnonzero(y == label) for label in range(int(y.max()) + 1)]
        least = min(count, *map(len, rows))
        found.append(np.stack([x[of[:least]] for of in rows]).astype(np.float32))
    return found[0], found[1]


def drawn(experiment: Experiment, figure: Figure) -> served.Draw:
    """The clients of a seed.

    Raises:
      FileNotFoundError: images that are not there; says what to fetch.
    """
    e = dataclasses.replace(experiment, **figure.changes)
    if figure.tasks is None:
        of_lines = e.num_features, e.sizes, e.spread, e.noise_std
        return lambda key: related_lines(key, e.num_servers, e.clients, 3, *of_lines)
    if figure.organs:
        data = medmnist.load(e.organs, "organamnist", complete=False)
    else:
        data = mnist.load(e.mnist, complete=False)
    what = *pool(data, e.num_images), figure.tasks, e.num_servers, e.clients
    return lambda key: class_pairs(key, *what, figure.sizes)


def measure(experiment: Experiment, name: str, console: Console) -> dict[str, Result]:
    """Runs all methods of a figure.

    Raises:
      FileNotFoundError: as for `drawn`.
    """
    e, figure, found = experiment, FIGURES[name], {}
    graph = builders.random_connected(e.num_servers, e.mean_degree, e.seed)
    draw = drawn(e, figure)
    data = {"mnist", "organs", "out", "figures", "num_seeds"}
    record = {k: v for k, v in vars(e).items() if k not in data} | dict(figure.changes)
    for method, config in configs(e, name).items():
        found[method] = run(
            pgfl.make(config, graph, draw),
            rounds=getattr(e, figure.rounds),
            # What is not printed was chosen on seeds below 100.
            seeds=range(100, 100 + e.num_seeds),
            eval_every=e.every,
            progress=False,
            run_dir=e.out / "runs" / name / method,
            resume=True,
            record=record,
            seeds_axis="vmap",
        )
    console.print(f"figure {name} is done")
    return found


def level(name: str, result: Result, when: str = "end") -> np.ndarray:
    """NMSD in dB or accuracy in %, after the first evaluation or the last, ``[S]``."""
    _, values = result.series(FIGURES[name].metric)
    return shown(name, values)[:, 0 if when == "start" else -1]


def shown(name: str, values: np.ndarray) -> np.ndarray:
    """In dB or %."""
    if FIGURES[name].metric == "nmsd":
        return report.decibels(values)
    return 100 * np.asarray(values, np.float64)


def levels(experiment: Experiment, name: str, found: Mapping[str, Result]) -> Table:
    """Means and deviations over runs beside the reference where it is of the same."""
    free = {"taus", "firsts", "decays", "figures", "num_seeds", "seed"}
    free |= {"mnist", "organs", "out", "num_images"}
    comparable = report.alike(experiment, PRESETS["default"], free)
    rows = []
    for method, result in found.items():
        known = REFERENCE.get(name, {}).get(method, {}) if comparable else {}
        cells = [method]
        at = result.series(FIGURES[name].metric)[0]
        for when, t in (("start", int(at[0])), ("end", int(at[-1]))):
            values = level(name, result, when)
            spread = f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.2f}{spread}")
            cells.append(f"{known[t]:.1f}" if t in known else "")
        spent = result.client_metrics["budget_of_node"]
        rows.append((*cells, f"{spent.mean():.3g}", f"{spent.max():.3g}"))
    unit = "dB" if FIGURES[name].metric == "nmsd" else "%"
    header = ("method", f"start, {unit}", "reference", f"end, {unit}", "reference")
    title = f"Figure {name}, {FIGURES[name].title}: {FIGURES[name].metric}"
    return Table(title, (*header, "budget, mean", "budget, most"), rows)


class Claim(NamedTuple):
    """An ordering of the text: `better` has less NMSD or more accuracy than `worse`.

    Attributes:
      better: figure and method.
      worse: the same.
      when: "start" or "end".
    """

    better: tuple[str, str]
    worse: tuple[str, str]
    when: str = "end"


def claims(experiment: Experiment) -> Iterator[Claim]:
    """All that the text prints; those of runs that are not there are left out."""
    zero, some = fixed(0), fixed(0.4)
    for name in ("5.1a", "5.1a, less noise", "5.1a, unlike tasks"):
        yield Claim((name, zero), (name, GFL))
        yield Claim((name, some), (name, GFL))
        yield Claim((name, some), (name, zero), "start")
        yield Claim((name, some), (name, zero))
        for method in (zero, some, GFL):
            yield Claim((name, method), (name, CLUSTER_FL))
    for when in ("start", "end"):
        yield Claim(("5.1a", zero), ("5.1b", zero), when)
        yield Claim(("5.1a", some), ("5.1b", some), when)
    yield Claim(("5.1b", GFL), ("5.1a", GFL))
    for method in (zero, some, GFL, CLUSTER_FL):
        yield Claim(("5.1b", method), ("5.1c", method), "start")
    for tau in experiment.taus:
        if 0.1 <= tau <= 0.5:
            yield Claim(("5.2", fixed(tau)), ("5.2", zero))
        if tau > 0.5:
            yield Claim(("5.2", fixed(0.2)), ("5.2", fixed(tau)))
    for name in ("5.3", "5.3, no privacy"):
        yield Claim((name, some), (name, zero), "start")
        yield Claim((name, zero), (name, some))
        yield Claim((name, FALLING), (name, zero), "start")
        yield Claim((name, FALLING), (name, some))
    for name, sign, numbers, down in (
        ("5.4a", "phi", experiment.firsts, True),
        ("5.4b", "zeta", experiment.decays, False),
    ):
        for low, high in itertools.pairwise(numbers):
            most, least = ((name, f"{sign} = {x:g}") for x in (high, low))
            yield Claim(most, least) if down else Claim(least, most)
    for name in ("5.5a", "5.5a, more noise"):
        yield Claim((name, some), (name, zero), "start")
        yield Claim((name, some), (name, zero))
    yield Claim(("5.5b", some), ("5.5b", zero))
    for tau in experiment.taus:
        if 0.4 <= tau <= 0.6:
            yield Claim(("5.5c", fixed(tau)), ("5.5c", zero))
    most = max(experiment.taus)
    if most > 0.4:
        yield Claim(("5.5c", some), ("5.5c", fixed(most)))
    yield Claim(("5.6a", LARGE), ("5.6a", zero))
    yield Claim(("5.6b", MEDIUM), ("5.6b", zero))


def gain(claim: Claim, found: Mapping[str, Mapping[str, Result]]) -> np.ndarray:
    """By how much it is so in every run, in dB or %."""
    better, worse = (
        level(name, found[name][method], claim.when)
        for name, method in (claim.better, claim.worse)
    )
    return (better - worse) * (-1 if FIGURES[claim.better[0]].metric == "nmsd" else 1)


def orderings(
    experiment: Experiment, found: Mapping[str, Mapping[str, Result]]
) -> Table:
    """The claims with their tests."""
    said = []
    for claim in claims(experiment):
        if any(m not in found.get(name, {}) for name, m in (claim.better, claim.worse)):
            continue
        same = claim.better[0] == claim.worse[0]
        texts = [m if same else f"{m} ({name})" for name, m in claim[:2]]
        text = f"{texts[0]} better than {texts[1]}, {claim.when}"
        where = claim.better[0] if same else f"{claim.better[0]}, {claim.worse[0]}"
        said.append((text, where, gain(claim, found)))
    title = (
        "Orderings: sign-flip permutation test of dB or %, paired over "
        f"{experiment.num_seeds} runs, one-sided, false alarms at most 0.05 each way"
    )
    return report.claims_table(title, said, "+.2f")


def draw(experiment: Experiment, name: str, found: Mapping[str, Result]) -> Any:
    """Curves, or last values along an axis: means, and 10 to 90 % of the runs."""
    spec = FIGURES[name]
    figure, axes = report.panels(6, 4, 1, 1)
    unit = "NMSD, dB" if spec.metric == "nmsd" else "accuracy, %"
    if spec.axis is not None:
        x = numbers(experiment, spec.axis)
        values = np.stack([level(name, result) for result in found.values()])
        low, high = np.quantile(values, [0.1, 0.9], axis=1)
        report.band(axes, x, values.mean(1), low, high, COLORS[0], "PGFL")
        axes.set(xlabel=spec.axis, xscale="log" if spec.axis == "phi" else "linear")
    else:
        for (method, result), color in zip(found.items(), COLORS, strict=False):
            at, values = result.series(spec.metric)
            values = shown(name, values)
            low, high = np.quantile(values, [0.1, 0.9], axis=0)
            report.band(axes, at, values.mean(0), low, high, color, method, "-")
        axes.set(xlabel="round")
        axes.legend(frameon=False, fontsize=8)
    axes.set(ylabel=unit, title=f"{name}: {spec.title}")
    return figure


def lines(found: Mapping[str, Mapping[str, Result]]) -> Iterator[tuple[Any, ...]]:
    """The CSV file: a line for every run."""
    yield "figure", "method", "seed", "metric", "start", "end", "budget"
    for name, methods in found.items():
        for method, result in methods.items():
            ends = (level(name, result, when) for when in ("start", "end"))
            most = result.client_metrics["budget_of_node"].max(1)
            for seed, *own in zip(result.seeds, *ends, most, strict=True):
                yield name, method, seed, FIGURES[name].metric, *map(float, own)


def main(experiment: Experiment) -> None:
    """Runs the figures, draws them and writes one page of all."""
    e, found = experiment, {}
    page = report.Page("Servers on a graph and clusters of clients", NOTES, e.out)
    for name in e.figures:
        try:
            found[name] = measure(e, name, page.console)
        except FileNotFoundError as missing:
            page.parts.append(f"Figure {name} is left out: {missing}\n")
            page.console.print(page.parts[-1], soft_wrap=True, highlight=False)
    page.add(orderings(e, found))
    for name, methods in found.items():
        page.add(levels(e, name, methods))
        picture = f"figure_{re.sub('[^0-9a-z]+', '_', name)}"
        page.draw(picture, draw(e, name, methods))
    e.out.mkdir(parents=True, exist_ok=True)
    report.write_csv(e.out / "pgfl.csv", lines(found))
    page.write("pgfl")
