"""Personal models over a network, and how much of others: Gauthier's chapter 6.

Thirty nodes in three clusters, whose linear models are alike, have 5 to 35 rows each.
Figure 6.1: one model for all (NFL), and a model for every cluster (NPFL) with a fixed
weight tau of what other clusters have learned. Figure 6.2: every node chooses its own
weight by its validation data, by policy gradient (DPG), by an actor and a critic (SAC),
or with several steps a round (BRL). Figure 6.3: how the weights of nodes with few, some
and many rows change. Says which printed orderings hold, in the setting of the text and
in others where its guesses differ.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from fedjax_core import Result, check, random
from fedjax_core.algorithms.networks import npfl
from fedjax_core.datasets.networks import related_tasks
from fedjax_core.experiments import report
from fedjax_core.experiments.report import decibels
from fedjax_core.networks import builders, labelled, policies, spectrum
from fedjax_core.networks.graph import num_neighbours
from fedjax_core.networks.plots import COLORS
from fedjax_core.networks.run import run
from fedjax_core.study_report import Table, verdict_of
from fedjax_core.types import Checked, PositiveInt, Share

NFL, GREEDY = "NFL", "greedy"
DPG, BATCH_DPG, SAC, BATCH_SAC = "DPG", "BRL-DPG", "SAC", "BRL-SAC"
POLICIES: dict[str, policies.Policy] = {
    DPG: policies.PolicyGradient(0.001),
    BATCH_DPG: policies.Batch(policies.PolicyGradient(0.003), 3),
    SAC: policies.ActorCritic(0.05, 0.1),
    BATCH_SAC: policies.Batch(policies.ActorCritic(0.05, 0.04), 3),
    GREEDY: policies.Greedy(21),
}
"""With the numbers of the text, which has no figure of the greedy one."""


def fixed(tau: float) -> str:
    """The name of NPFL with a weight that stays."""
    return f"tau = {tau:g}"


BEST = fixed(0.05)

# Decibels after 250 rounds, three runs of an independent calculation in the setting of
# the default preset; the figures themselves print no numbers.
REFERENCE = {
    NFL: -7.6,
    fixed(0): -9.5,
    fixed(0.02): -15.1,
    BEST: -15.8,
    fixed(0.1): -15.0,
    fixed(0.2): -13.8,
    fixed(0.4): -12.3,
    DPG: -14.6,
    BATCH_DPG: -14.5,
    SAC: -18.4,
    BATCH_SAC: -17.8,
}

NOTES = """\
NFL is one model for all; "tau = ..." is NPFL with a fixed weight; DPG and SAC are
NPFL-RL, and BRL takes three steps of them a round; the text has no figure of a greedy
choice. "Few", "some" and "many" rows are thirds of the nodes.

The text prints the sizes, the penalty, the steps of the policies and the orderings; the
laws of features and noise, lambda, the first tau and the number of rounds are guesses,
those of an independent calculation whose numbers stand beside ours. "Deviation" is
(6.15) with squared norms below: the mean of ||w_k - w*||^2 / ||w*||^2, which the text
calls test MSE; "as printed" divides by ||w*||. Both are averaged over runs before the
logarithm, as the text averages. The test error stands beside them. The network is one
for all runs; clusters, data and noise are drawn for each. The text says both that the
methods of figure 6.2 are tuned to start alike and that its own start better; nothing
is tuned here.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      num_nodes: K.
      mean_degree: of the random connected network.
      num_clusters: Q.
      num_features: d.
      sizes: least and most rows of a node in each split.
      spread: clusters learn (1 + delta_q) w_0 with delta_q uniform within it.
      noise_variance: least and largest of a node's labels.
      rho: the penalty of ADMM.
      strength: lambda.
      taus: fixed weights of figure 6.1, of them 0 and 0.05.
      tau: at which policies start.
      policies: that are run, of `POLICIES`, of them DPG and SAC.
      rounds: of every run; the first tenth is its start.
      settings: of "thesis" and those of `SETTINGS`.
      num_seeds: runs; fewer than five decide nothing.
      seed: of the network.
      out: directory of runs, figures, CSV and page; it goes on with what is there.
    """

    num_nodes: PositiveInt = 30
    mean_degree: float = 6.0
    num_clusters: int = 3
    num_features: int = 60
    sizes: tuple[int, int] = (5, 35)
    spread: float = 0.5
    noise_variance: tuple[float, float] = (0.1, 1.0)
    rho: float = 3.0
    strength: float = 0.1
    taus: tuple[Share, ...] = (0, 0.02, 0.05, 0.1, 0.2, 0.4)
    tau: float = 0.05
    policies: tuple[Annotated[str, check.among(POLICIES)], ...] = tuple(POLICIES)
    rounds: int = 250
    settings: tuple[str, ...] = ("thesis", "more rows", "less noise")
    num_seeds: PositiveInt = 10
    seed: int = 1
    out: Path = Path("runs/npfl_rl")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(10, 10**6, rounds=self.rounds)
        known = check.among(("thesis", *SETTINGS))
        check.each(known, None, settings=self.settings)
        if not {DPG, SAC} <= set(self.policies):
            raise ValueError(f"policies must have DPG and SAC, got {self.policies}.")
        if not {0, 0.05} <= set(self.taus):
            raise ValueError(f"taus must have 0 and 0.05, got {self.taus}.")


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "more rows": ("30 to 90 rows a node", {"sizes": (30, 90)}),
    "less noise": (
        "5 to 120 rows a node, noise of variance 0.01 to 0.1, policies start at 0.2",
        {"sizes": (5, 120), "noise_variance": (0.01, 0.1), "tau": 0.2},
    ),
}
"""What differs from the setting of the text, in words and in numbers."""

PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        num_nodes=12,
        mean_degree=4.0,
        num_features=10,
        taus=(0, 0.05),
        policies=(DPG, SAC),
        rounds=60,
        settings=("thesis",),
        num_seeds=5,
    ),
    "paper": Experiment(num_seeds=100),
}


def in_setting(experiment: Experiment, name: str) -> Experiment:
    """The experiment with what a setting changes."""
    changes = SETTINGS[name][1] if name in SETTINGS else {}
    return dataclasses.replace(experiment, **changes)


def configs(experiment: Experiment) -> dict[str, npfl.Config]:
    """The methods by name, in the order of the figures."""
    e = experiment

    def of(tau, policy=None):
        return npfl.Config(e.num_clusters, e.rho, e.strength, tau, policy)

    return (
        {NFL: npfl.Config(1, e.rho, e.strength)}
        | {fixed(tau): of(tau) for tau in e.taus}
        | {name: of(e.tau, POLICIES[name]) for name in e.policies}
    )


def drawn(experiment: Experiment, *, apart: bool = True) -> labelled.Draw:
    """The data of a seed; all nodes are of one cluster unless they are `apart`."""
    e = experiment
    laws = e.num_features, e.sizes, e.spread, e.noise_variance

    def draw(key):
        tasks = related_tasks(key, e.num_nodes, e.num_clusters, *laws)
        cluster = tasks.cluster if apart else 0 * tasks.cluster
        train, valid, test = (x[:3] for x in (tasks.train, tasks.valid, tasks.test))
        return labelled.Nodes(cluster, train, valid, test, tasks.train.w_true)

    return draw


def seeds(experiment: Experiment) -> range:
    """Those of the runs; settings and claims were found on 0 to 9, no part of them."""
    return range(100, 100 + experiment.num_seeds)


def measure(
    experiment: Experiment, setting: str, console: Console
) -> dict[str, Result]:
    """Runs all methods on the same data."""
    e, found = in_setting(experiment, setting), {}
    graph = builders.random_connected(e.num_nodes, e.mean_degree, e.seed)
    for name, config in configs(e).items():
        found[name] = run(
            npfl.make(config, graph, drawn(e, apart=name != NFL)),
            rounds=e.rounds,
            seeds=seeds(e),
            eval_every=max(1, e.rounds // 50),
            progress=False,
            run_dir=e.out / "runs" / setting / name,
            resume=True,
            record=[e.num_nodes, e.mean_degree, e.seed, e.num_features, e.sizes,
                    e.spread, e.noise_variance],
            seeds_axis="vmap",
        )  # fmt: skip
    console.print(f"{setting}: {len(found)} methods are done")
    return found


def clusters(experiment: Experiment) -> tuple[np.ndarray, np.ndarray]:
    """What is left of the network inside clusters, run by run.

    Returns:
      How many connected parts, each of which learns a model of its own, ``[S]``; and
      whether a node has a neighbour in its cluster, ``[S, n]``.
    """
    e = experiment
    graph = builders.random_connected(e.num_nodes, e.mean_degree, e.seed)
    draw = jax.jit(lambda key: drawn(e)(random.stream(key, "world")).cluster)
    left = [labelled.inside(graph, draw(random.seed_key(seed))) for seed in seeds(e)]
    parts = np.array([spectrum.components(x).max() + 1 for x in left])
    return parts, np.stack([num_neighbours(x) > 0 for x in left])


def level(result: Result, when: str = "end", metric: str = "deviation") -> np.ndarray:
    """The error of every run, ``[S]``, at the end or as its mean at the "start"."""
    at, values = result.series(metric)
    values = values.astype(np.float64)
    if when == "end":
        return values[:, -1]
    return values[:, at <= max(result.rounds // 10, at[0])].mean(1)


def roughness(values: np.ndarray) -> np.ndarray:
    """How much curves ``[S, T]`` bend: the deviation of second differences, ``[S]``."""
    return np.diff(np.asarray(values, np.float64), 2, axis=1).std(1)


def levels(experiment: Experiment, found: Mapping[str, Result]) -> Table:
    """What every method reaches, beside the reference where it is of the same."""
    free = {"taus", "num_seeds", "seed", "settings", "out"}
    comparable = report.alike(experiment, PRESETS["default"], free)
    rows = []
    for name, result in found.items():
        end = level(result)
        spread = decibels(end).std(ddof=1) if len(end) > 1 else 0.0
        seen = (level(result, "start"), end, level(result, metric=METRICS[1]))
        start, last, printed = (f"{decibels(values.mean()):.2f}" for values in seen)
        known = f"{REFERENCE[name]:.1f}" if comparable and name in REFERENCE else ""
        error = f"{level(result, metric='test_mse').mean():.3g}"
        tau = f"{result.train['tau'][:, -1].mean():.3f}"
        rows.append((name, start, f"{last} ± {spread:.1f}", known, printed, error, tau))
    header = ("method", "start, dB", "end, dB", "reference", "as printed, dB")
    title = f"Deviations of {experiment.num_seeds} runs, ± that of a run"
    return Table(title, (*header, "test error", "mean tau"), rows)


class Claim(NamedTuple):
    """An ordering of the text.

    Attributes:
      text: what it says.
      figure: where.
      gain: by how much it is so in every run, ``[S]``; in errors, roughness or tau.
      logarithmic: the same in dB, or None.
    """

    text: str
    figure: str
    gain: np.ndarray
    logarithmic: np.ndarray | None = None


def claims(
    experiment: Experiment, found: Mapping[str, Result], near: np.ndarray
) -> list[Claim]:
    """All of them; some of nodes that are `near` others of their cluster alone.

    And whether a greedy choice would be as good.
    """

    def better(figure, first, second, when="end"):
        a, b = (level(found[name], when) for name in (first, second))
        text = f"{first} < {second}, {when}"
        return Claim(text, figure, b - a, decibels(b) - decibels(a))

    def better_near(figure, first, second):
        nodes = (found[x].client_metrics["deviation_of_node"] for x in (first, second))
        a, b = ((near * x).sum(1, np.float64) / near.sum(1) for x in nodes)
        text = f"{first} < {second}, end, nodes with company"
        return Claim(text, figure, b - a, decibels(b) - decibels(a))

    names = [fixed(tau) for tau in experiment.taus if tau >= 0.05]
    learned = [name for name in experiment.policies if name != GREEDY]
    said = [better("6.1", fixed(0), NFL), better_near("6.1", fixed(0), NFL)]
    said.append(better("6.1", BEST, fixed(0)))
    said += [better("6.1", a, b) for a, b in itertools.pairwise(names)]
    for when in ("start", "end"):
        said += [better("6.2", name, BEST, when) for name in learned]
    said += [better_near("6.2", name, BEST) for name in learned]
    said.append(better("6.2", SAC, DPG))
    if {BATCH_DPG, BATCH_SAC} <= set(learned):
        said += [better("6.2", BATCH_SAC, BATCH_DPG), better("6.2", BATCH_DPG, DPG)]
        said += [better_near("6.2", BATCH_DPG, DPG), smoother(found)]
    said += weights(found)
    return [*said, better("none", GREEDY, SAC)] if GREEDY in found else said


def smoother(found: Mapping[str, Result]) -> Claim:
    """That several steps a round take randomness away."""
    late = {
        name: decibels(found[name].series("deviation")[1])[:, 10:]
        for name in (SAC, BATCH_SAC)
    }
    gain = roughness(late[SAC]) - roughness(late[BATCH_SAC])
    return Claim(f"{BATCH_SAC} is smoother than {SAC}", "6.2", gain)


def weights(found: Mapping[str, Result]) -> list[Claim]:
    """What the text says of the weights: of thirds of nodes by their rows."""
    few, _, many = WEIGHTS
    paths = {name: found[name].train for name in (DPG, SAC)}
    bends = {
        name: np.mean([roughness(p[f"tau_{k}"]) for k in ("fewest", "most")], 0)
        for name, p in paths.items()
    }
    early = max(1, paths[SAC]["tau"].shape[1] // 10 - 1)
    speed = {
        name: np.mean([abs(p[k][:, early] - p[k][:, 0]) for k in (few, many)], 0)
        for name, p in paths.items()
    }
    said = [
        Claim("DPG has smoother tau than SAC", "6.3", bends[SAC] - bends[DPG]),
        Claim("SAC has faster tau than DPG at first", "6.3", speed[SAC] - speed[DPG]),
    ]
    for name, path in paths.items():
        for rows in ("few", "some", "many"):
            tau = np.asarray(path[f"tau_{rows}"], np.float64)
            first, soon, last = tau[:, 0], tau[:, early], tau[:, -1]
            gains = {"rises at first": soon - first, "falls afterwards": soon - last}
            if rows == "many":
                gains = {"falls at first": first - soon}
            if rows != "few":
                gains["ends below half of its first"] = first / 2 - last
            text = f"{name}: tau of {rows} rows"
            said += [Claim(f"{text} {what}", "6.3", d) for what, d in gains.items()]
        apart = path[few][:, -1] - path[many][:, -1]
        said.append(Claim(f"{name}: tau of few rows > of many, end", "6.3", apart))
    return said


def orderings(experiment: Experiment, said: Sequence[Claim]) -> Table:
    """The claims with their tests."""
    title = (
        "Orderings, < is less error: sign-flip permutation test, paired over "
        f"{experiment.num_seeds} runs, one-sided, false alarms at most 0.05 each way"
    )
    tested = report.claims_table(title, [claim[:3] for claim in said], "+.3g")
    rows = []
    for row, (*_, dB) in zip(tested.rows, said, strict=True):
        same = "" if dB is None else f"{dB.mean():+.2f} dB, {verdict_of(dB)}"
        rows.append((*row, same))
    return Table(title, (*tested.header, "the same of decibels"), rows)


def overview(said: Mapping[str, Sequence[Claim]]) -> Table:
    """The verdict on every claim in every setting."""
    rows = []
    for same in zip(*said.values(), strict=True):
        verdicts = [verdict_of(claim.gain) for claim in same]
        held = itertools.compress(said, (verdict == "held" for verdict in verdicts))
        rows.append((*same[0][:2], *verdicts, ", ".join(held) or "none"))
    header = ("claim", "figure", *said, "held in")
    return Table("Verdicts on errors and weights, by setting", header, rows)


def draw(experiment: Experiment, found: Mapping[str, Result]) -> Any:
    """The three figures in four panels: means, and 10 to 90 % of the runs."""
    figure, axes = report.panels(12, 8, 2, 2)
    (left, right), below = axes
    learned = [NFL, *(fixed(tau) for tau in experiment.taus)]
    for panel, names, title in (
        (left, learned, "6.1: fixed weights"),
        (right, [BEST, *experiment.policies], "6.2: weights chosen by policies"),
    ):
        for name, color in zip(names, COLORS, strict=False):
            at, values = found[name].series("deviation")
            low, high = np.quantile(decibels(values), [0.1, 0.9], axis=0)
            middle = decibels(values.astype(np.float64).mean(0))
            report.band(panel, at, middle, low, high, color, name, "-")
        panel.set(xlabel="round", ylabel="deviation, dB", title=title)
    for panel, name in zip(below, (DPG, SAC), strict=True):
        train = found[name].train
        groups = (("few", "fewest"), ("some", "median"), ("many", "most"))
        for (rows, one), color in zip(groups, COLORS, strict=False):
            tau = train[f"tau_{rows}"]
            at = np.arange(1, tau.shape[1] + 1)
            low, high = np.quantile(tau, [0.1, 0.9], axis=0)
            third = f"a third with {rows} rows"
            report.band(panel, at, tau.mean(0), low, high, color, third, "-")
            own = train[f"tau_{one}"][0]
            panel.plot(at, own, ":", color=color, label=f"{one} rows, first run")
        panel.set(xlabel="round", ylabel="tau", title=f"6.3: {name}")
    for panel in axes.ravel():
        panel.legend(frameon=False, fontsize=8)
    return figure


METRICS = "deviation", "printed_deviation", "test_mse"
WEIGHTS = "tau_few", "tau_some", "tau_many"


def lines(found: Mapping[str, Mapping[str, Result]]) -> Iterator[tuple[Any, ...]]:
    """The CSV file: a line for every run."""
    yield "setting", "method", "seed", "start", *METRICS, *WEIGHTS
    for setting, methods in found.items():
        for name, result in methods.items():
            columns = [level(result, "start")]
            columns += [level(result, metric=metric) for metric in METRICS]
            columns += [result.train[tau][:, -1] for tau in WEIGHTS]
            for seed, *values in zip(result.seeds, *columns, strict=True):
                yield setting, name, seed, *map(float, values)


def main(experiment: Experiment) -> None:
    """Runs all methods in all settings, draws them and writes one page."""
    e, found, said, left = experiment, {}, {}, {}
    page = report.Page("How much to learn from other clusters", NOTES, e.out)
    for setting in e.settings:
        found[setting] = measure(e, setting, page.console)
        own = in_setting(e, setting)
        left[setting] = clusters(own)
        said[setting] = claims(own, found[setting], left[setting][1])
    page.add(overview(said))
    for setting, methods in found.items():
        own = in_setting(e, setting)
        differs = SETTINGS[setting][0] if setting in SETTINGS else "that of the text"
        parts_of_runs, near = left[setting]
        page.parts.append(
            f"# Setting {setting}: {differs}\n\nThe {e.num_clusters} clusters are "
            f"{parts_of_runs.mean():.1f} connected parts in the mean, and each learns "
            f"a model of its own. {(~near).mean():.0%} of the nodes have no "
            "neighbour in their cluster, the others have company.\n"
        )
        page.add(levels(own, methods), orderings(own, said[setting]))
        page.draw(f"npfl_rl_{setting.replace(' ', '_')}", draw(own, methods))
    report.write_csv(e.out / "npfl_rl.csv", lines(found))
    page.write("npfl_rl")
