"""Fair mixing of clients: tables and figures of Hahn's chapter III, on small real data.

Tables 3.6 to 3.9 compare AAggFF with FedAvg, AFL, q-FedAvg, TERM, FedMGDA+ and PropFair
by mean, worst and best clients, Gini coefficient and parity gap; table 3.10 plugs its
coefficients into other methods, figure 3.1 compares response maps, and regret is drawn
beside its bound. Clients are hospitals, minefields, writers or people with a phone; or
parts of scikit-learn's digits, which need no files. Each method's number is chosen on
another seed and validation data. Needs files, see --path.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core import (
    FederatedData,
    LocalWork,
    Model,
    check,
    fair,
    metrics,
    models,
    plan_round,
    split_examples,
    study,
)
from fedjax_core.algorithms import (
    aaggff_d,
    aaggff_s,
    afl,
    fedavg,
    fedmgda,
    fedopt,
    fedprox,
    portfolio,
    propfair,
    qfedavg,
    term,
)
from fedjax_core.datasets import (
    digits,
    heart_disease,
    landmine,
    mnist,
    partition,
    wisdm,
)
from fedjax_core.evaluate import Evaluator
from fedjax_core.experiments import report
from fedjax_core.result import spread
from fedjax_core.study_report import Table

DATA = ("heart", "landmine", "writers", "activity", "digits")
SILOS = ("heart", "landmine", "digits")  # all clients in every round
PARTS = ("tables", "plug-in", "responses", "regret")
SUMMARIES = {
    "average": metrics.weighted_mean,
    "worst": metrics.lowest_decile,
    "best": metrics.highest_decile,
    "gini": metrics.gini,
    "gap": metrics.parity_gap,
}
LOWER = ("gini", "gap")  # is better


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides the numbers.

    Attributes:
      data: of "heart" (4 hospitals, AUROC), "landmine" (29 fields, AUROC), "writers"
        (539 of MNIST), "activity" (36 people) and "digits" (10 parts).
      path: folder with heart_disease, landmine, mnist_by_writer and wisdm_activity.
      cohort_size: clients per round where not all take part.
      rounds: rounds of every run.
      num_seeds: independent runs of each method; fewer than five decide nothing.
      client_lr: step size of clients.
      server_lr: step size of the adaptive servers of table 3.10.
      mu: of FedProx.
      mixing_lrs: of AFL that are tried.
      qs: of q-FedAvg.
      tilts: of TERM.
      epsilons: of FedMGDA+.
      lengths: server steps of FedMGDA+, whose directions have none of their own.
      ceilings: of PropFair.
      cdfs: responses of AAggFF that are tried.
      hidden: width of the hidden layer; hospitals and fields have a linear model.
      parts: what is run, of "tables" (3.6 to 3.9), "plug-in" (3.10), "responses"
        (figure 3.1) and "regret".
      out: directory of studies and page; it goes on with what is there.
    """

    data: tuple[str, ...] = ("heart", "landmine", "writers", "activity")
    path: Path = Path("data")
    cohort_size: int = 5
    rounds: int = 100
    num_seeds: int = 5
    client_lr: float = 0.1
    server_lr: float = 0.01
    mu: float = 0.001
    mixing_lrs: tuple[float, ...] = (0.01, 0.1, 1.0)
    qs: tuple[float, ...] = (0.1, 1.0, 5.0)
    tilts: tuple[float, ...] = (0.1, 1.0, 10.0)
    epsilons: tuple[float, ...] = (0.1, 0.5, 1.0)
    lengths: tuple[float, ...] = (0.1, 1.0)
    ceilings: tuple[float, ...] = (2.0, 3.0, 5.0)
    cdfs: tuple[str, ...] = ("weibull", "frechet", "normal")
    hidden: int = 50
    parts: tuple[str, ...] = PARTS
    out: Path = Path("runs/aaggff_tables")

    def __post_init__(self):
        report.check_known(DATA, data=self.data)
        report.check_known(PARTS, parts=self.parts)
        report.check_known(fair.CDFS, cdfs=self.cdfs)
        report.check_each(
            check.positive, mixing_lrs=self.mixing_lrs, ceilings=self.ceilings
        )
        report.check_each(check.non_negative, qs=self.qs, tilts=self.tilts)
        check.positive(client_lr=self.client_lr, server_lr=self.server_lr)
        report.check_counts(self)
        check.in_range(2, 36, cohort_size=self.cohort_size)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        data=("digits",),
        rounds=4,
        num_seeds=2,
        mixing_lrs=(0.1,),
        qs=(1.0,),
        tilts=(1.0,),
        epsilons=(0.5,),
        lengths=(0.1,),
        ceilings=(3.0,),
        cdfs=("normal",),
        hidden=8,
        parts=("tables", "regret"),
    ),
    "paper": Experiment(rounds=500, num_seeds=5, cdfs=tuple(fair.CDFS), hidden=200),
}


class Cell(NamedTuple):
    """What the thesis prints, in per cent."""

    average: float
    worst: float
    best: float
    gini: float
    gap: float


# By our data, whose place the thesis gives to other data: Berka, MQP, CelebA and
# SpeechCommands.
PRINTED: dict[str, tuple[str, dict[str, Cell]]] = {
    "heart": ("Berka", {
        "FedAvg": Cell(80.09, 48.06, 99.03, 10.87, 50.84),
        "AFL": Cell(79.70, 49.02, 98.55, 10.58, 50.98),
        "q-FedAvg": Cell(79.98, 49.44, 98.07, 10.62, 50.43),
        "TERM": Cell(80.11, 48.96, 99.03, 10.86, 49.60),
        "FedMGDA": Cell(79.24, 46.38, 99.03, 11.64, 44.46),
        "PropFair": Cell(79.61, 49.44, 98.07, 10.47, 49.05),
        "AAggFF": Cell(80.93, 52.08, 99.03, 10.16, 44.03),
    }),
    "landmine": ("MQP", {
        "FedAvg": Cell(56.06, 41.03, 76.31, 8.63, 35.30),
        "AFL": Cell(56.01, 41.28, 75.54, 8.56, 34.26),
        "q-FedAvg": Cell(56.89, 40.22, 79.38, 8.68, 39.16),
        "TERM": Cell(56.47, 40.73, 76.80, 8.67, 36.07),
        "FedMGDA": Cell(53.02, 34.91, 69.65, 10.33, 34.74),
        "PropFair": Cell(56.60, 41.71, 79.09, 8.74, 37.38),
        "AAggFF": Cell(56.63, 41.79, 75.56, 8.38, 33.77),
    }),
    "writers": ("CelebA", {
        "FedAvg": Cell(90.79, 55.76, 100, 7.86, 44.25),
        "q-FedAvg": Cell(90.88, 55.73, 100, 7.82, 44.27),
        "TERM": Cell(90.71, 55.66, 100, 7.90, 44.34),
        "FedMGDA": Cell(88.33, 48.60, 100, 9.75, 51.40),
        "PropFair": Cell(87.25, 48.11, 100, 10.39, 51.90),
        "AAggFF": Cell(91.27, 56.71, 100, 7.54, 43.29),
    }),
    "activity": ("SpeechCommands, top 5", {
        "FedAvg": Cell(75.51, 7.93, 100, 24.58, 92.07),
        "q-FedAvg": Cell(73.34, 11.19, 100, 23.16, 88.81),
        "TERM": Cell(70.90, 5.98, 100, 26.37, 94.02),
        "FedMGDA": Cell(72.45, 9.65, 100, 23.68, 90.35),
        "PropFair": Cell(73.64, 7.30, 100, 24.97, 92.70),
        "AAggFF": Cell(76.68, 14.54, 100, 21.42, 85.46),
    }),
}  # fmt: skip
# Table 3.10, Heart (the same hospitals): average and worst, without and with.
PLUGGED: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "FedAvg": ((84.42, 65.22), (85.04, 66.56)),
    "FedProx": ((84.48, 65.44), (85.04, 66.67)),
    "FedAdam": ((84.34, 65.44), (84.84, 67.00)),
    "FedYogi": ((84.29, 65.67), (84.86, 67.00)),
    "FedAdagrad": ((84.61, 65.67), (85.09, 66.67)),
}
# Table 3.3, of losses 0.01, 0.10 and 0.02.
TABLE_33 = {
    "weibull": (0.05, 1.00, 0.19),
    "frechet": (0.01, 0.65, 0.11),
    "gumbel": (0.12, 0.76, 0.18),
    "exponential": (0.21, 0.90, 0.37),
    "logistic": (0.32, 0.79, 0.37),
    "normal": (0.22, 0.90, 0.29),
}
LIMITS = """\
Printed numbers are of other data (named in the tables; table 3.10's hospitals are the
same) and of larger models and more rounds: orderings are compared, not levels. Rates do
not decay. Groups of the best and the worst 10 % are single clients where there are
fewer than 20. Areas under ROC curves are by bins of the score. PropFair transforms the
clients' losses and TERM weighs by examples; FedMGDA+ has the length of its step tuned
as well, for its directions have none. The bound on regret is proven for responses in
[0, 1], not in the recommended [0, 1 / K] with more than two clients.
"""


def load(experiment: Experiment, name: str) -> FederatedData:
    """Clients with training, validation and test examples of their own."""
    path = experiment.path
    if name == "digits":
        data = partition.pathological(
            digits.load(), num_clients=10, shards_per_client=2
        )
    elif name == "heart":
        data = heart_disease.load(path / "heart_disease")
    elif name == "landmine":
        data = landmine.load(path / "landmine")
    elif name == "activity":
        data = wisdm.load(path / "wisdm_activity")
    else:
        data = mnist.load_by_writer(path / "mnist_by_writer")
        data = data.map(lambda e: {**e, "x": e["x"].reshape(len(e["y"]), -1)})
    return split_examples(data, test_fraction=0, validation_fraction=0.2)


def model_of(experiment: Experiment, name: str, data: FederatedData) -> Model:
    """A model that is measured by "score": the AUROC of two classes, else accuracy."""
    x, y = (data.train.examples[k] for k in ("x", "y"))
    classes = int(y.max()) + 1
    if classes > 2:
        model = models.mlp(x.shape[1], classes, hidden=(experiment.hidden,))
        return model._replace(
            metrics=lambda params, batch: {
                "score": model.metrics(params, batch)["accuracy"]
            }
        )
    model = models.logistic_regression(x.shape[1], 2)

    def score(params, batch):
        # The loss of a label is log(1 + exp(-margin)) of its own margin.
        ill = dict(batch) | {"y": jnp.ones_like(batch["y"])}
        loss = model.loss(params, ill, jax.random.key(0))
        margin = -jnp.log(jnp.expm1(jnp.clip(loss, 1e-6, 30)))
        by_bin = metrics.AUROC.per_example(margin, batch["y"], 512, -8.0, 8.0)
        return {"score": by_bin}

    return model._replace(metrics=score)


def setting_of(experiment: Experiment, name: str) -> study.Setting:
    """A population and how its clients take part."""
    data = load(experiment, name)
    cohort = data.num_clients if name in SILOS else experiment.cohort_size
    return study.Setting(
        data=data,
        model=model_of(experiment, name, data),
        rounds=experiment.rounds,
        options={
            "cohort_size": cohort,
            "eval_every": max(1, experiment.rounds // 5),
            "client_summaries": SUMMARIES,
        },
    )


def compared(experiment: Experiment, silo: bool) -> dict[str, study.Method]:
    """The methods of tables 3.6 and 3.7, with the grids of the thesis."""
    e, work = experiment, LocalWork(batch_size=20)
    common: dict[str, Any] = {"client_lr": e.client_lr, "work": work}

    def of(module: Any, grid: Mapping[str, Sequence[Any]], **fixed: Any):
        first = {name: values[0] for name, values in grid.items()}
        tried = {name: values for name, values in grid.items() if len(values) > 1}
        return study.Method.of(module, grid=tried, **common | fixed | first)

    ours = aaggff_s if silo else aaggff_d
    return {
        "FedAvg": of(fedavg, {}),
        **({"AFL": of(afl, {"mixing_lr": e.mixing_lrs})} if silo else {}),
        "q-FedAvg": of(qfedavg, {"q": e.qs}, weights="examples"),
        "TERM": of(term, {"tilt": e.tilts}),
        "FedMGDA": of(fedmgda, {"epsilon": e.epsilons, "server_lr": e.lengths}),
        "PropFair": of(propfair, {"ceiling": e.ceilings}),
        "AAggFF": of(ours, {"cdf": e.cdfs}),
    }


def plugged(experiment: Experiment, silo: bool) -> dict[str, study.Method]:
    """The methods of table 3.10, each as it is and with AAggFF's coefficients."""
    e = experiment
    common: dict[str, Any] = {
        "client_lr": e.client_lr,
        "work": LocalWork(batch_size=20),
    }
    server = {"server_lr": e.server_lr, "beta2": 0.999, "tau": 1e-4}
    bases: dict[str, tuple[Any, Any]] = {
        "FedAvg": (fedavg, fedavg.Config(**common)),
        "FedProx": (fedprox, fedprox.Config(mu=e.mu, **common)),
    }
    for name, rule in (("Adam", "adam"), ("Yogi", "yogi"), ("Adagrad", "adagrad")):
        decay = {"beta1": 0.0} if rule == "adagrad" else {}
        config = fedopt.Config(rule=rule, **common, **server, **decay)  # type: ignore[arg-type]
        bases[f"Fed{name}"] = (fedopt, config)
    ours: Any = aaggff_s if silo else aaggff_d
    mixing = ours.decider(ours.Config(cdf=e.cdfs[0]))
    methods = {}
    for name, (module, config) in bases.items():
        methods[name] = study.Method(make=module.make, config=config)
        mixed = functools.partial(module.make, mixing=mixing)
        methods[f"{name} + AAggFF"] = study.Method(make=mixed, config=config)
    return methods


def by_response(experiment: Experiment, silo: bool) -> dict[str, study.Method]:
    """AAggFF by each response map of figure 3.1."""
    ours: Any = aaggff_s if silo else aaggff_d
    common: dict[str, Any] = {"client_lr": experiment.client_lr}
    common["work"] = LocalWork(batch_size=20)
    return {cdf: study.Method.of(ours, cdf=cdf, **common) for cdf in fair.CDFS}


METHODS = {"tables": compared, "plug-in": plugged, "responses": by_response}


def make_studies(experiment: Experiment) -> dict[tuple[str, str], study.Study]:
    """The studies by part and data."""
    settings = {name: setting_of(experiment, name) for name in experiment.data}
    return {
        (part, name): study.Study(
            methods=METHODS[part](experiment, name in SILOS),
            settings={name: setting},
            seeds=range(experiment.num_seeds),
            metric="score_average",
        )
        for name, setting in settings.items()
        for part in experiment.parts
        if part != "regret"
    }


def _values(row: study.Row, summary: str) -> np.ndarray:
    """In per cent, of each seed at the end; none where the cell failed."""
    return 100 * row.last(f"test_score_{summary}")


def spreads(outcome: study.Outcome, part: str, name: str) -> Table:
    """Average, worst, best, Gini and gap of every method, printed ones beside them."""
    where, printed = PRINTED.get(name, ("", {}))
    rows = []
    for row in outcome.rows:
        base, _, mixed = row.method.partition(" + ")
        cells = [spread(_values(row, s), ".2f") or "failed" for s in SUMMARIES]
        cell, shown = (), ""
        if part == "tables":
            cell = printed.get(row.method, ())
        elif part == "plug-in" and name == "heart":
            cell = PLUGGED[base][bool(mixed)]
        elif part == "responses" and row.result is not None:
            shown = spread(row.result.train["mixed_loss"].sum(1), ".4g")
        shown = shown or " / ".join(f"{x:g}" for x in cell)
        rows.append((row.method, *cells, shown))
    last = {
        "tables": (f"printed, of {where}" if where else "printed",),
        "plug-in": ("printed, average / worst",),
        "responses": ("loss, summed over rounds",),
    }[part]
    title = {"tables": "Tables 3.6 to 3.9", "plug-in": "Table 3.10"}
    clients = "silos" if name in SILOS else "devices"
    return Table(
        f"{title.get(part, 'Figure 3.1')}: {name}, {clients}, per cent",
        ("method", *SUMMARIES, *last),
        rows,
    )


def orderings(outcome: study.Outcome, part: str, name: str) -> Table:
    """What the thesis claims of AAggFF, tested seed by seed."""
    by_name = {row.method: row for row in outcome.rows}
    pairs = [("AAggFF", m) for m in by_name if m != "AAggFF"]
    if part == "plug-in":
        pairs = [(f"{m} + AAggFF", m) for m in PLUGGED]
    claims = []
    for better, worse in pairs:
        for summary in ("average", "worst", "gini", "gap"):
            a, b = (_values(by_name[m], summary) for m in (better, worse))
            sign = -1 if summary in LOWER else 1
            gap = sign * (a - b) if len(a) and len(b) else np.zeros(0)
            claims.append((f"{better} better than {worse}", summary, gap))
    title = f"Orderings: {name}, {part}, paired over seeds"
    return report.claims_table(title, claims, "+.2f")


def table_33() -> Table:
    """The responses of three losses by each distribution, printed ones beside them."""
    rows = []
    for cdf, printed in TABLE_33.items():
        ours = np.asarray(fair.respond(np.array([0.01, 0.10, 0.02]), cdf=cdf))
        rows.append((cdf, *(f"{x:.4f}" for x in ours), " / ".join(map(str, printed))))
    header = ("distribution", "0.01", "0.10", "0.02", "printed")
    return Table("Table 3.3: responses of three losses", header, rows)


def losses_of(experiment: Experiment, setting: study.Setting) -> np.ndarray:
    """Every client's training loss before every round of AAggFF-S; ``[T, K]``."""
    model, train = setting.model, setting.data.train
    config = aaggff_s.Config(
        client_lr=experiment.client_lr, work=LocalWork(batch_size=20)
    )
    algorithm = aaggff_s.make(config, model.loss)
    key = jax.random.key(0)
    evaluator = Evaluator(
        lambda params, batch: {"loss": model.loss(params, batch, key)}, train
    )
    (pieces,) = evaluator.pieces()
    told = jax.jit(lambda params: evaluator.sums(params, pieces)["loss"].value)
    state, step = algorithm.init(model.init(key), train.num_clients), None
    step, losses = jax.jit(algorithm.round), []
    for t in range(experiment.rounds):
        losses.append(told(state.params))
        everyone = range(train.num_clients)
        cohort = plan_round(everyone, train, algorithm.work, seed=0, round=t)
        state, _ = step(state, cohort, jax.random.fold_in(key, t))
    return np.asarray(losses)


def regrets(losses: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """Regret of each decider along a path of losses, and what bounds it: ``[T]``."""
    T, K = losses.shape
    t = np.arange(1, T + 1)
    newton = aaggff_s.decider(aaggff_s.Config(most=1.0))
    played: dict[str, tuple[fair.Decider, float, Any]] = {
        "AAggFF-S, [0, 1]": (newton, 1.0, fair.ons_bound(t, K)),
        "AAggFF-S, [0, 1/K]": (aaggff_s.decider(), 1 / K, None),
    }
    for rule in ("ftrl", "eg", "ogd", "universal"):
        decider = portfolio.decider(portfolio.Config(rule=rule))  # type: ignore[arg-type]
        bound = fair.ftrl_bound(t, K, 1 / K) if rule == "ftrl" else None
        played[f"{rule}, [0, 1/K]"] = (decider, 1 / K, bound)
    found = {}
    for name, (decider, high, bound) in played.items():
        respond = jax.vmap(lambda F, high=high: fair.respond(F, high=high))
        after = np.asarray(fair.play(decider, losses))
        before = np.vstack([np.full(K, 1 / K), after[:-1]])
        regret = np.asarray(fair.regret(before, respond(losses)))
        found[name] = (regret, None if bound is None else np.asarray(bound))
    return found


def draw_regret(found: dict[str, tuple[np.ndarray, np.ndarray | None]]) -> Any:
    """Regret over rounds, bounds as dashes of the same colour."""
    figure, axes = report.panels(9, 3.6)
    for place, high in zip(axes, ("[0, 1]", "[0, 1/K]"), strict=True):
        for name, (regret, bound) in found.items():
            if not name.endswith(high):
                continue
            (line,) = place.plot(regret, label=name.partition(",")[0])
            if bound is not None:
                place.plot(bound, "--", color=line.get_color(), label="its bound")
        place.set(xlabel="round", ylabel="regret", title=f"responses in {high}")
        place.set_yscale("symlog", linthresh=1e-3)
        place.legend(fontsize=7)
        place.grid(alpha=0.3)
    return figure


def draw_gaps(outcome: study.Outcome, name: str) -> Any:
    """Average against worst clients, a point per method with deviations."""
    figure, axes = report.panels(5, 3.6, 1, 1)
    for row in outcome.rows:
        x, y = _values(row, "average"), _values(row, "worst")
        if len(x):
            deviations = {"xerr": x.std(), "yerr": y.std()}
            axes.errorbar(x.mean(), y.mean(), fmt="o", label=row.method, **deviations)
    axes.set(xlabel="average, per cent", ylabel="worst clients, per cent", title=name)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    return figure


def main(experiment: Experiment) -> None:
    """Runs the studies, prints their tables, draws figures and writes one page."""
    page, out = report.Page("Fair mixing", LIMITS, experiment.out), experiment.out
    found = [table_33()]
    page.add(*found)
    for (part, name), this in make_studies(experiment).items():
        title = f"{part} {name}"
        outcome = study.run(this, out / title)
        mine = [spreads(outcome, part, name)]
        if part != "responses":
            mine.append(orderings(outcome, part, name))
        found += mine
        page.show(title, outcome, mine)
        page.draw(title, draw_gaps(outcome, title))
    for name in experiment.data:
        if name not in SILOS:
            clients, size = load(experiment, name).num_clients, experiment.cohort_size
            kappa = fair.shrinkage(clients, size)
            page.parts.append(f"Estimated responses of {name} shrink by {kappa:.3f}.\n")
        elif "regret" in experiment.parts:
            regret = regrets(losses_of(experiment, setting_of(experiment, name)))
            rows = [
                (who, f"{r[-1]:.4g}", "" if b is None else f"{b[-1]:.4g}")
                for who, (r, b) in regret.items()
            ]
            found.append(Table(f"Regret: {name}", ("who", "regret", "bound"), rows))
            page.add(found[-1])
            page.draw(f"regret {name}", draw_regret(regret))
    lines: list[tuple[str, ...]] = []
    for table in found:
        lines.append(("table", *table.header))
        lines += [(table.title, *row) for row in table.rows]
    report.write_csv(out / "aaggff_tables.csv", lines)
    page.write("aaggff_tables")
