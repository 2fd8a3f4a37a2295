"""Asynchronous online learning with shared parts of models: Gauthier's chapter 4.

Figures 4.2 to 4.6: variants of PAO-Fed and what they are compared with, on streams of a
nonlinear function and of CalCOFI's sea water, whose clients come rarely and late. All
methods see the same events. Baselines get the step size of a grid with which they start
as fast as a variant of PAO-Fed, on seeds of their own. Figure 4.4 needs files, see
--path.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core import Result, check, random
from fedjax_core.algorithms.networks import pao_fed
from fedjax_core.datasets import calcofi, streams
from fedjax_core.experiments import report
from fedjax_core.experiments.report import decibels
from fedjax_core.networks.run import run
from fedjax_core.networks.streaming import World, featurise, held_out_error
from fedjax_core.networks.theory.partial_sharing import largest_step_sizes
from fedjax_core.study_report import Table, sign_flip, verdict_of
from fedjax_core.types import Checked, Key, PositiveInt

FIGURES = ("4.2", "4.3", "4.4", "4.5", "4.6")
_TUNING_SEEDS = (1000, 1001)
STEP_SIZES = np.geomspace(1e-3, 1.0, 25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      path: folder with calcofi_bottle/calcofi_bottle.npz, of figure 4.4.
      num_clients: K.
      iterations: of every run; the first tenth is its start, the last its end.
      num_features: d.
      num_runs: Monte Carlo runs; fewer than five decide nothing.
      figures: what is run, of "4.2" to "4.6".
      out: directory of runs, table, figure and page; it goes on with what is there.
    """

    path: Path = Path("data")
    num_clients: PositiveInt = 256
    iterations: int = 2000
    num_features: int = 200
    num_runs: PositiveInt = 10
    figures: tuple[Annotated[str, check.among(FIGURES)], ...] = FIGURES
    out: Path = Path("runs/pao_fed")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(100, 10**6, iterations=self.iterations)
        check.in_range(50, 10**6, num_features=self.num_features)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        num_clients=32, iterations=200, num_features=50, num_runs=2, figures=("4.2",)
    ),
    "paper": Experiment(num_runs=100),
}


class Curve(NamedTuple):
    """A method in a setting.

    Attributes:
      setting: name of the streams.
      name: of the method.
      config: its flags; its step size, if the next is empty.
      as_fast_as: name of the method in the same setting that it is to start like.
    """

    setting: str
    name: str
    config: pao_fed.Config
    as_fast_as: str = ""


class Claim(NamedTuple):
    """An ordering of the text: the first is better, at the start or at the end."""

    figure: str
    better: tuple[str, str]
    worse: tuple[str, str]
    when: str = "end"


def settings(experiment: Experiment) -> dict[str, streams.Config]:
    """The streams by name."""
    e = experiment
    base = streams.Config(
        num_clients=e.num_clients, iterations=e.iterations, num_features=e.num_features
    )
    change = dataclasses.replace
    return {
        "base": base,
        "no stragglers": change(base, availability=(1.0,), delay_decay=0.0),
        "long delays": change(base, delay_decay=0.8),
        "rare and late": change(
            base,
            availability=(0.025, 0.01, 0.0025, 0.0005),
            delay_decay=0.4,
            delay_unit=10,
        ),
        # 80,000 of 256 clients in 2,000 iterations.
        "CalCOFI": change(base, shares=(0.0625, 0.125, 0.1875, 0.25)),
    }


def world_of(experiment: Experiment, setting: str) -> Callable[[Key], World]:
    """The streams of a setting, from a key."""
    config = settings(experiment)[setting]
    if setting == "CalCOFI":
        data = calcofi.load(experiment.path / "calcofi_bottle")
        return streams.from_population(config, data)
    return streams.nonlinear(config)


def curves(experiment: Experiment) -> dict[str, list[Curve]]:
    """What is drawn, by panel: the figure's number and a letter."""
    ideal, late, rare = "no stragglers", "long delays", "rare and late"

    def of(setting, name, as_fast_as="", label="", **changes):
        own = {late: {"max_delay": 5}, rare: {"max_delay": 60, "delay_unit": 10}}
        changes = own.get(setting, {}) | changes
        config = dataclasses.replace(pao_fed.METHODS[name], **changes)
        short = label or name.removeprefix("PAO-Fed-")
        return Curve(setting, short, config, as_fast_as)

    def pao(*names, setting="base"):
        return [of(setting, f"PAO-Fed-{name}") for name in names]

    def sized(which, m):
        label = f"{which}, m = {m}"
        return of("base", f"PAO-Fed-{which}", label=label, num_shared=m)

    def fed_sgd(setting="base", like="U1"):
        return of(setting, "Online-FedSGD", like)

    def online_fed(rate):
        label = f"Online-Fed, {rate:.0%}"
        return of("base", "Online-Fed", "U1", label, sample_rate=rate)

    m = round(0.2 * experiment.num_features)  # and a tenth of clients: 2 %
    pso = of("base", "PSO-Fed", "U1", num_shared=m)
    fast = of(late, "PAO-Fed-C2", step_size=0.95)
    full = [
        of("base", f"PAO-Fed-{v}", label=f"{v}, full downlink", full_downlink=True)
        for v in ("U1", "C2")
    ]
    ones, sizes = ("C1", "U1"), [sized("U1", 1), *pao("U1"), sized("U1", 32)]
    found = {
        "4.2a": pao("C0", "U0", "C1", "U1"),
        "4.2b": sizes,
        "4.2c": pao("C1", "U1", "C2", "U2"),
        "4.3a": [*pao("U1", "U2"), pso, online_fed(0.02), fed_sgd()],
        "4.3b": [
            *(*sizes, sized("C2", 1), *pao("C2"), sized("C2", 32)),
            *(online_fed(0.02), online_fed(0.5), fed_sgd()),
        ],
        "4.3c": [*pao("C1", "U1", "C2"), *pao(*ones, setting=ideal), fed_sgd(ideal)],
        "4.4": [*pao("U1", "C2", setting="CalCOFI"), fed_sgd("CalCOFI")],
        "4.5": [*pao("U1", "C2"), pso, online_fed(0.5), of("base", "SignSGD", "U1")],
        "4.6a": [*pao("U1", "C2"), *full],
        "4.6b": [*pao("U1", setting=late), fast, fed_sgd(late, "C2")],
        "4.6c": [*pao("U1", "C2", setting=rare), fed_sgd(rare)],
    }
    return {k: v for k, v in found.items() if k[:3] in experiment.figures}


def claims(experiment: Experiment) -> list[Claim]:
    """The orderings that the text prints, of the figures that are run."""

    def chain(figure, setting, *names, when="end"):
        pairs = itertools.pairwise([(setting, name) for name in names])
        return [Claim(figure, *pair, when) for pair in pairs]

    slow = ("base", "PSO-Fed"), ("base", "Online-Fed, 2%")
    found = [
        *chain("4.2a", "base", "U1", "U0"),
        *chain("4.2a", "base", "C1", "C0"),
        *chain("4.2a", "base", "U1", "C1"),
        *chain("4.2b", "base", "U1, m = 32", "U1", "U1, m = 1", when="start"),
        *chain("4.2b", "base", "U1, m = 1", "U1", "U1, m = 32"),
        *chain("4.2c", "base", "C2", "C1"),
        *chain("4.2c", "base", "U2", "U1"),
        *chain("4.3a", "base", "U2", "U1", "Online-FedSGD"),
        *(Claim("4.3a", ("base", "U1"), worse) for worse in slow),
        *chain("4.3b", "base", "Online-FedSGD", "Online-Fed, 50%", "Online-Fed, 2%"),
        *chain("4.3c", "no stragglers", "C1", "U1"),
        *chain("4.4", "CalCOFI", "C2", "U1"),
        *chain("4.4", "CalCOFI", "C2", "Online-FedSGD"),
        *chain("4.5", "base", "C2", "SignSGD", "Online-Fed, 50%"),
        *chain("4.5", "base", "C2", "PSO-Fed"),
        *chain("4.6a", "base", "U1", "U1, full downlink"),
        *chain("4.6a", "base", "C2", "C2, full downlink"),
        *chain("4.6b", "long delays", "C2", "Online-FedSGD", "U1"),
        *chain("4.6c", "rare and late", "C2", "Online-FedSGD"),
        *chain("4.6c", "rare and late", "C2", "U1"),
    ]
    return [claim for claim in found if claim.figure[:3] in experiment.figures]


# Decibels at the end in a reference implementation of the same settings, one run.
REFERENCE = {
    "base": {
        "C0": 2.8, "U0": 0.45, "C1": -8.73, "U1": -8.9, "C2": -9.11, "U2": -9.05,
        "U1, m = 1": -8.3, "U1, m = 32": -9.2, "PSO-Fed": -8.4, "Online-Fed, 2%": -7.6,
        "U1, full downlink": -5.6, "C2, full downlink": -3.9, "Online-FedSGD": -9.02,
    },
    "no stragglers": {"C1": -9.0, "U1": -8.1},
    "long delays": {"U1": -8.98, "C2": -9.38},
    "rare and late": {"U1": -7.32, "Online-FedSGD": -7.39, "C2": -7.73},
}  # fmt: skip


def tune(
    experiment: Experiment, world: Callable[[Key], World], curve: Curve, like: Curve
) -> float:
    """The step size of a grid with which a method starts most like another one.

    Alike is the mean of the test error in dB over the first tenth of the iterations, on
    two seeds that no figure uses.
    """
    count, parts = experiment.iterations // 10, 10

    def start(config, key):
        drawn = world(random.stream(key, "world"))

        def some(state, first):
            def one(i, state):
                t = first + i
                key_of_round = random.round_key(key, t)
                return pao_fed.step(config, drawn, state, t, key_of_round)[0]

            state = lax.fori_loop(0, count // parts, one, state)
            return state, held_out_error(drawn, state.params)["test_mse"]

        firsts = jnp.arange(parts) * (count // parts)
        return lax.scan(some, pao_fed.init(config, drawn), firsts)[1]

    @jax.jit
    def goal(keys):
        return lax.map(lambda key: start(like.config, key), keys)

    @jax.jit
    def tried(steps, keys):
        def one(step):
            config = dataclasses.replace(curve.config, step_size=step)
            return lax.map(lambda key: start(config, key), keys)

        return lax.map(one, steps)

    keys = jnp.stack([random.seed_key(seed) for seed in _TUNING_SEEDS])
    wanted = decibels(np.asarray(goal(keys))).mean()
    found = decibels(np.asarray(tried(STEP_SIZES, keys), np.float64)).mean((1, 2))
    return float(STEP_SIZES[np.nanargmin(np.abs(found - wanted))])


class Finding(NamedTuple):
    """What the runs of a curve gave: its config as it ran, and the result."""

    config: pao_fed.Config
    result: Result

    @property
    def error(self) -> np.ndarray:
        """The test error by run and evaluation, ``[S, E]``."""
        return self.result.series("test_mse")[1].astype(np.float64)

    def level(self, when: str = "end") -> np.ndarray:
        """Its mean over the last or the first tenth, in dB, ``[S]``."""
        count = max(1, self.error.shape[1] // 10)
        part = self.error[:, -count:] if when == "end" else self.error[:, :count]
        return decibels(part.mean(1))

    @property
    def total_bytes(self) -> np.ndarray:
        """Sent and received in all, ``[S]``."""
        names = ("uplink_bytes", "downlink_bytes")
        total = sum(self.result.train[name].sum(1, np.float64) for name in names)
        return np.asarray(total)

    @property
    def bits(self) -> float:
        """That a client sends and receives in an iteration it takes part in."""
        clients = self.result.train["participants"].sum(dtype=np.float64)
        return float(8 * self.total_bytes.sum() / max(clients, 1))


Findings = Mapping[tuple[str, str], Finding]


def find(experiment: Experiment) -> Findings:
    """Runs every curve once."""
    e, found = experiment, {}
    every = {curve[:2]: curve for panel in curves(e).values() for curve in panel}
    for setting, streams_of in settings(e).items():
        group = [curve for curve in every.values() if curve.setting == setting]
        if not group:
            continue
        world = world_of(e, setting)
        for curve in group:
            name, config = curve.name, curve.config
            if curve.as_fast_as:
                like = every[setting, curve.as_fast_as]
                step = tune(e, world, curve, like)
                config = dataclasses.replace(config, step_size=step)
            result = run(
                pao_fed.make(config, world, name),
                rounds=e.iterations,
                seeds=range(e.num_runs),
                eval_every=e.iterations // 100,
                progress=False,
                run_dir=e.out / "runs" / setting / name,
                resume=True,
                record=streams_of,
            )
            found[setting, name] = Finding(config, result)
    return found


def cells(found: Findings) -> list[dict[str, Any]]:
    """A line for every curve, as in table.csv."""

    def line(setting: str, name: str, finding: Finding) -> dict[str, Any]:
        end, whole = finding.level(), found.get((setting, "Online-FedSGD"))
        share = np.nan if whole is None else 1 - finding.total_bytes / whole.total_bytes
        return {
            "setting": setting,
            "method": name,
            "step_size": round(finding.config.step_size, 5),
            "end_db": float(end.mean()),
            "std_db": float(end.std(ddof=1)) if len(end) > 1 else np.nan,
            "reference_db": REFERENCE.get(setting, {}).get(name, np.nan),
            "bits_of_a_client": finding.bits,
            "saving": float(np.mean(share)),
            "values_db": " ".join(f"{v:.5g}" for v in end),
        }

    return [line(*cell, finding) for cell, finding in found.items()]


def verdicts(experiment: Experiment, found: Findings) -> list[tuple[str, ...]]:
    """Rows (figure, claim, setting, when, gain in dB, p, verdict)."""
    rows = []

    def add(figure, claim, setting, when, gain):
        p, verdict = sign_flip(gain), verdict_of(gain)
        numbers = f"{gain.mean():+.2f}", f"{p:.3g}"
        rows.append((figure, claim, setting, when, *numbers, verdict))

    for figure, better, worse, when in claims(experiment):
        gain = found[worse].level(when) - found[better].level(when)
        add(figure, f"{better[1]} > {worse[1]}", better[0], when, gain)
    gaps = [
        found[s, "U1"].level() - found[s, "C2"].level()
        for s in ("rare and late", "base")
        if {(s, "U1"), (s, "C2")} <= found.keys()
    ]
    if len(gaps) == 2:
        more = "C2 - U1 is more than in base", "rare and late", "end"
        add("4.6c", *more, gaps[0] - gaps[1])
    return rows


# Pairs that the text calls alike: figure, the two, in which settings.
_ALIKE = (
    ("4.2c", ("base", "C2"), ("base", "U2")),
    ("4.3b", ("base", "C2, m = 1"), ("base", "C2, m = 32")),
    ("4.3c", ("no stragglers", "C1"), ("no stragglers", "Online-FedSGD")),
    ("4.3c", ("base", "C2"), ("no stragglers", "Online-FedSGD")),
    ("4.4", ("CalCOFI", "U1"), ("CalCOFI", "Online-FedSGD")),
)


def alike(found: Findings) -> list[tuple[str, ...]]:
    """Rows (figure, pair, gain of the first in dB, its deviation over runs)."""
    rows = []
    for figure, one, other in _ALIKE:
        if one in found and other in found:
            gain = found[other].level() - found[one].level()
            spread = f"{gain.std(ddof=1):.2f}" if len(gain) > 1 else ""
            pair = f"{one[1]} ({one[0]}), {other[1]} ({other[0]})"
            rows.append((figure, pair, f"{gain.mean():+.2f}", spread))
    return rows


def largest_step_size(experiment: Experiment) -> float:
    """Below which mean squares are stable, to first order; of one run's features."""

    @jax.jit
    def correlations(key):
        world = world_of(experiment, "base")(random.stream(key, "world"))

        def client(x):
            z = featurise(world.features, x)
            return z.T @ z / len(z)

        return lax.map(client, world.x.swapaxes(0, 1))

    return largest_step_sizes(correlations(random.seed_key(0)))[1]


def limits(experiment: Experiment) -> list[str]:
    """What is not as in the text, and what can't be seen."""
    most = largest_step_size(experiment)
    said = [
        f"The kernel's width is not printed; with width 2 the largest eigenvalue of a "
        f"client's correlation is {1 / most:.2f} (1.02 in the text, which cosine "
        f"features only reach if they are almost constant), so mu is mean-square "
        f"stable below {most:.2f}.",
        "Nor are step sizes of baselines, tuning of PSO-Fed and SignSGD, when samples "
        "arrive and how baselines treat late messages: here all that arrive in an "
        "iteration are averaged. Base Online-FedSGD is compared with the reference's "
        "at a step size of 0.15.",
        "Figure 4.6b's Online-FedSGD starts as fast as C2 with its step size of 0.95; "
        "everywhere else baselines start as fast as U1.",
    ]
    if experiment.num_runs < 5:
        said.append(f"{experiment.num_runs} runs decide no ordering.")
    return said


def draw(experiment: Experiment, found: Findings) -> Any:
    """All panels: medians over runs, bands from the 10th to the 90th percentile."""
    shown = curves(experiment)
    rows = -(-len(shown) // 3)
    figure, axes = report.panels(13, 3.6 * rows, rows, 3, squeeze=False)
    for at in axes.ravel()[len(shown) :]:
        at.set_axis_off()
    for at, (panel, group) in zip(axes.ravel(), shown.items(), strict=False):
        several = len({curve.setting for curve in group}) > 1
        for k, curve in enumerate(group):
            finding = found[curve.setting, curve.name]
            label = f"{curve.name} ({curve.setting})" if several else curve.name
            look = {"color": f"C{k}", "label": label}
            if panel == "4.3b":
                end = finding.level()
                load = finding.total_bytes.mean() / 125 / experiment.iterations
                at.errorbar(load, end.mean(), end.std(), fmt="o", **look)
                continue
            x, y = finding.result.evaluated, decibels(finding.error)
            low, middle, high = np.percentile(y, (10, 50, 90), axis=0)
            report.band(at, x, middle, low, high, **look, line="-")
        at.set(title=panel, xlabel="iteration", ylabel="test error, dB")
        if panel == "4.3b":
            at.set(xlabel="kilobits of all clients in an iteration", xscale="log")
        at.legend(fontsize=6)
    return figure


def main(experiment: Experiment) -> None:
    """Runs the figures; prints tables and limits, and where page and figure are."""
    found = find(experiment)
    lines = cells(found)

    def text(value: Any) -> str:
        if isinstance(value, float):
            return "" if np.isnan(value) else f"{value:.4g}"
        return str(value)

    runs, shown = experiment.num_runs, [*lines[0]][:-1]  # but for single values
    tables = [
        Table(
            f"Test error over the last tenth, {runs} runs",
            [name.replace("_", " ") for name in shown],
            [[text(line[name]) for name in shown] for line in lines],
        ),
        Table(
            f"Claims (sign-flip test, paired over {runs} runs, one-sided, false alarms "
            f"at most 0.05 each way)",
            ("figure", "claim, > is better", "setting", "when", "dB", "p", "verdict"),
            verdicts(experiment, found),
        ),
        Table(
            "Pairs that are called alike",
            ("figure", "pair", "first better by, dB", "deviation"),
            alike(found),
        ),
    ]
    page = report.Page(
        "Asynchronous online learning", limits(experiment), experiment.out
    )
    page.add(*tables)
    page.draw("pao_fed", draw(experiment, found))
    page.write("summary")
    rows = [list(lines[0]), *(list(line.values()) for line in lines)]
    report.write_csv(experiment.out / "table.csv", rows)
