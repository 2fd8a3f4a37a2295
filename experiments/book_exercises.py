"""Exercises of the book "Federated Learning: From Theory to Practice", solved.

Every exercise that asks for a number is computed with the library and printed beside
what the number should be: by hand, by theory or, where it depends on data that are
drawn here, not at all. "agree" means up to rounding; where chance decides or what is
expected is rounded, the room is printed instead: "within 0.02". A number that should
agree and does not ends the run with status 1. `--only 5.1 10.4` solves some of them.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import hypergeom

from fedjax_core import attacks, check, privacy, robust
from fedjax_core.algorithms.networks import consensus, fedgd, fedrelax, vertical
from fedjax_core.attacks.data import (
    Trigger,
    attack_success,
    clean_error,
    plant_backdoor,
    poison_data,
)
from fedjax_core.datasets import fmi_like
from fedjax_core.networks import (
    builders,
    gtvmin,
    operators,
    oracles,
    schedules,
    spectrum,
)
from fedjax_core.networks.attacks import arrival
from fedjax_core.networks.descent import gradient_step
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.robust_loss import least_absolute_deviations
from fedjax_core.networks.theory import contraction, erm
from fedjax_core.networks.theory.oversight import validation_error
from fedjax_core.types import Checked, PositiveInt, Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      only: the exercises to solve; none means all.
      trials: networks that Exercise 7.1 draws.
      num_stations: weather stations of Exercise 10.2.
      rounds: of the methods in Exercises 10.2 and 10.3.
      seed: of everything drawn.
    """

    only: tuple[str, ...] = ()
    trials: PositiveInt = 200
    num_stations: PositiveInt = 30
    rounds: PositiveInt = 1000
    seed: Seed = 0

    def __post_init__(self):
        super().__post_init__()
        for name in self.only:
            check.one_of(EXERCISES, only=name)
        check.in_range(5, 1000, num_stations=self.num_stations)


class Row(NamedTuple):
    """One quantity.

    Attributes:
      quantity: what it is.
      expected: the right numbers; None where only data can say.
      ours: numbers of the same shape.
      tol: how far apart they may be, in proportion to numbers above 1.
    """

    quantity: str
    expected: ArrayLike | None
    ours: Any
    tol: float = 1e-9

    @property
    def room(self) -> np.ndarray:
        """How far from what is expected the numbers may be."""
        return self.tol * np.maximum(1, np.abs(np.asarray(self.expected)))

    @property
    def agrees(self) -> bool | None:
        """Whether it does; None where there is nothing to agree with."""
        if self.expected is None:
            return None
        expected, ours = np.asarray(self.expected), np.asarray(self.ours)
        return ours.shape == expected.shape and bool(
            (np.abs(ours - expected) <= self.room).all()
        )

    @property
    def verdict(self) -> str:
        """In words, with the room where six digits show it."""
        if self.agrees and self.tol > 1e-5:
            return f"within {self.room.max():.2g}"
        return {True: "agree", False: "[red]DIFFER[/red]", None: ""}[self.agrees]


def solve(experiment: Experiment) -> dict[str, list[Row]]:
    """Solves the exercises, in float64."""
    with jax.enable_x64(True):
        return {
            name: exercise(experiment)
            for name, exercise in EXERCISES.items()
            if not experiment.only or name in experiment.only
        }


def tables(solved: dict[str, list[Row]]) -> list[Table]:
    """A table for every exercise, with its title and the same columns in all."""
    out = []
    for name, rows in solved.items():
        title = (EXERCISES[name].__doc__ or "").partition("\n")[0].rstrip(".")
        part = Table(
            title=f"{name}  {title}",
            title_justify="left",
            title_style="bold",
            header_style="dim",
            box=None,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        # Wide enough for all, so that columns stand below each other; 80 together.
        part.add_column("  quantity", min_width=33, no_wrap=True)
        for header in ("expected", "ours"):
            part.add_column(header, min_width=15, justify="right")
        part.add_column("", min_width=13, no_wrap=True)
        for row in rows:
            expected = row.expected
            part.add_row(
                f"  {row.quantity}",
                "[dim]report only[/dim]" if expected is None else _text(expected, 6),
                _text(row.ours, 3 if expected is None else 6),
                row.verdict,
            )
        out.append(part)
    return out


def main(experiment: Experiment) -> None:
    """Solves and prints.

    Raises:
      SystemExit: a number that should agree does not; names its exercise.
    """
    solved = solve(experiment)
    console = Console()
    for part in tables(solved):
        console.print(part)
        console.print()
    wrong = [
        f"{name} ({row.quantity})"
        for name, rows in solved.items()
        for row in rows
        if row.agrees is False
    ]
    if wrong:
        raise SystemExit(f"fedjax-core: numbers differ in {', '.join(wrong)}")


def exercise_1_3(experiment: Experiment) -> list[Row]:
    """Linear regression by hand, and on fewer days than features."""
    X, y = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.array([7.0, 8.0, 9.0])
    rows = [Row("weights of least squares", [-6, 6.5], erm.ridge(X, y))]
    X, y = _march(experiment.seed)
    w = erm.ridge(X, y)
    outside = w - np.linalg.pinv(X) @ (X @ w)
    return [
        *rows,
        Row("28 days: largest error, °C", 0, np.abs(X @ w - y).max(), 1e-6),
        Row("28 days: ||w|| off their span", 0, np.linalg.norm(outside), 1e-6),
    ]


def exercise_1_4(experiment: Experiment) -> list[Row]:
    """The eigenvalues of X'X, which has as many zeros as days are missing."""
    X = np.array([[1.0, 2.0], [3.0, 4.0]])
    low, high = contraction.extreme_eigenvalues(2 * erm.linear_risk(X, np.zeros(2)).Q)
    root = math.sqrt(221)
    values = np.linalg.eigvalsh(erm.linear_risk(*_march(experiment.seed)).Q)
    zeros = (values < 1e-9 * values[-1]).sum()
    return [
        Row("least eigenvalue of X'X", 15 - root, low),
        Row("largest eigenvalue of X'X", 15 + root, high),
        Row("28 days: eigenvalues 0", 144 - 28, zeros),
    ]


def exercise_3_1(experiment: Experiment) -> list[Row]:
    """lambda_n of the Laplacian is at most 2 d_max, and can come close."""

    def largest(graph):
        return spectrum.extremes(graph).largest

    chains = {n: largest(builders.chain(n)) for n in (10, 100)}
    rows = [
        Row(f"lambda_n, chain of {n}", 2 + 2 * math.cos(math.pi / n), ours)
        for n, ours in chains.items()
    ]
    rows.append(Row("lambda_n, cycle of 10", 4, largest(builders.cycle(10))))
    drawn = [builders.erdos_renyi(20, 0.2, experiment.seed + k) for k in range(10)]
    beyond = [largest(g) > spectrum.largest_bound(g) * (1 + 1e-6) for g in drawn]
    return [*rows, Row("of 10 networks, above 2 d_max", 0, sum(beyond))]


def exercise_3_11(experiment: Experiment) -> list[Row]:
    """The average by GTVMin: f_i(w) = (w - y_i)^2, and a large alpha."""
    graph = builders.k_random_neighbours(20, 3, experiment.seed)
    y = np.random.default_rng(experiment.seed).normal(size=(20, 1))
    alphas = np.array([0.01, 0.1, 1, 10, 100])
    W = _averages(graph, np.ones(20), y, alphas)
    far = np.linalg.norm(W - y.mean(), axis=1)
    lam2 = spectrum.extremes(graph).second
    limit = np.linalg.norm(y - y.mean()) / (1 + alphas * lam2)
    pair = _averages(builders.chain(2), np.ones(2), np.array([[0.0], [1]]), [1.0])
    return [
        Row("largest |mean w - mean y|", 0, np.abs(W.mean(1) - y.mean()).max()),
        Row("of 5 alphas, beyond the bound", 0, (far > limit * (1 + 1e-9)).sum()),
        Row("two nodes, y = 0, 1: first w", 1 / 3, pair[0, 0]),
        Row("two nodes, y = 0, 1: second w", 2 / 3, pair[0, 1]),
        Row("||w - mean y||, alpha = 100", None, far[-1]),
    ]


def exercise_3_12(experiment: Experiment) -> list[Row]:
    """The average over a star, whose centre has no loss: exact for every alpha."""
    y = np.random.default_rng([experiment.seed, 3]).normal(3, 1, (6, 1))
    alphas = np.array([0.01, 1, 100])
    W = _averages(builders.star(6), np.r_[0, np.ones(5)], y, alphas)
    expected = y[1:].mean()
    return [
        Row(f"w of the centre, alpha = {alpha:g}", expected, w[0])
        for alpha, w in zip(alphas, W, strict=True)
    ]


def exercise_3_13(experiment: Experiment) -> list[Row]:
    """What two rounds can know of a mean; every node has three neighbours."""
    pairs = [(0, i) for i in (1, 2, 3)]
    pairs += [(i, 2 * i + 2 + k) for i in range(1, 10) for k in (0, 1)]
    graph = Graph.from_edges(pairs)
    n = graph.num_nodes
    reached = (arrival(graph, jnp.arange(n) == 0) <= 2).sum()

    def share(eta, alpha):
        """How much every y counts in what Alg. 4 gives node 0, ``[n]``."""

        def estimate(y):
            method = fedgd.from_oracle(
                graph, lambda W, t, key: 2 * (W - y), alpha=alpha, eta=eta
            )
            return operators.run(method, jnp.zeros((n, 1)), 2)[0][0, 0]

        return jax.grad(estimate)(jnp.zeros((n, 1)))[:, 0]

    @jax.jit
    def variance(c):
        u, _ = consensus.average(graph, jnp.eye(n), 2, c)
        return (u[0] ** 2).sum()

    entered = jnp.abs(share(0.2, 0.7)) > 1e-12
    best: Any = minimize_scalar(variance, (0.2, 0.3), tol=1e-9)
    return [
        Row("variance, all within two hops", 1 / 10, 1 / reached),
        Row("values that enter Alg. 4", 4, entered.sum()),
        Row("least variance of Alg. 4", 1 / 4, (share(0.5, 0.25) ** 2).sum()),
        Row("best c of (I - c L)^2 y", 0.272293, best.x, 1e-6),
        Row("variance with this c", 0.128336, best.fun, 1e-6),
    ]


def exercise_4_1(experiment: Experiment) -> list[Row]:
    """The rates 1 / t, and a convex function on which they diverge."""
    rate = schedules.power_decay()
    schedules.check_decay(1.0)
    eta = jnp.asarray(rate(jnp.arange(10**6)))
    left = eta.sum() - math.log(eta.size)
    step = gradient_step(lambda w: 4 * w**3, rate)
    _, w = iterate(step, jnp.array(2.0), 3, record=lambda w: w)
    return [
        Row("sum of rates - log 10^6", np.euler_gamma, left, 1e-6),
        Row("sum of squared rates", math.pi**2 / 6, (eta**2).sum(), 2e-6),
        Row("w^4 from w = 2: steps 1 and 2", [-30, 53970], w[:2]),
        Row("w^4 from w = 2: step 3", 53970 - 4 / 3 * 53970**3, w[2]),
    ]


def exercise_5_1(experiment: Experiment) -> list[Row]:
    """How alpha changes the speed of FedGD, on two networks (a) and (b)."""
    expected = {  # alpha: contraction factors of (a) and (b)
        0: (0.999000, 0),
        1: (0.998001, 0.002),
        10: (0.989100, 0.02),
        100: (0.908912, 0.2),
        250: (0.808070, 0.5),
        400: (0.739422, 0.8),
        499: (0.706546, 0.998),
        501: (0.708961, 1.002),
        600: (0.881205, 1.2),
    }
    graph, eta = builders.chain(2), 0.0005
    networks = [
        (np.reshape(scale, (2, 1, 1)), -2 * np.reshape(scale, (2, 1)) * centre)
        for scale, centre in (
            ([1.0, 1000.0], np.array([[-5.0], [-5.0]])),
            ([1000.0, 1000.0], np.array([[-5.0], [5.0]])),
        )
    ]

    @jax.jit
    def factors(alpha):
        systems = [gtvmin.system(graph, Q, q, alpha)[0] for Q, q in networks]
        values = map(jnp.linalg.eigvalsh, systems)
        return jnp.stack(
            [contraction.contraction_factor(eta, v[0], v[-1]) for v in values]
        )

    rows = [
        Row(f"contraction factor, alpha = {alpha}", pair, factors(float(alpha)), 5e-7)
        for alpha, pair in expected.items()
    ]
    grid = np.arange(0, 601.0)
    fastest = grid[jax.vmap(factors)(jnp.asarray(grid))[:, 0].argmin()]
    limits: Any = [brentq(lambda a, k=k: factors(a)[k] - 1, 300, 900) for k in (0, 1)]
    a, b = (gtvmin.closed_form(graph, Q, q, 100.0)[:, 0] for Q, q in networks)
    return [
        *rows,
        Row("fastest alpha for (a)", 499, fastest),
        Row("(a), (b) diverge from alpha", [1999000 / 2999, 500], limits),
        Row("w_1, w_2 of (a), alpha = 100", [-5, -5], a),
        Row("w_1 of (b), alpha = 100", -5000 / 1200, b[0]),
        Row("w_2 of (b), alpha = 100", 5000 / 1200, b[1]),
    ]


def exercise_6_2(experiment: Experiment) -> list[Row]:
    """Linear regression on a table whose columns lie at three nodes."""
    rng = np.random.default_rng([experiment.seed, 6])
    X, y = rng.normal(size=(8, 5)), rng.normal(size=8)
    columns = vertical.split_columns(X, np.array([0, 1, 1, 2, 0]), 3)
    expected = np.asarray(erm.ridge(X, y))
    eta = 0.9 / contraction.extreme_eigenvalues(erm.linear_risk(X, y).Q)[1]
    step = gradient_step(lambda w: 2 / 8 * X.T @ (X @ w - y), eta)
    together, _ = iterate(step, jnp.zeros(5), 50)
    apart, _ = vertical.vertical_gd(columns, y, 50, eta)
    apart = vertical.assemble(columns, apart)
    rows = [Row("largest |vertical GD - GD|", 0, np.abs(apart - together).max())]
    for alpha, b in ((1.0, 1.0), (1e4, 1.0), (1.0, 1e4)):
        stats = vertical.lifted_statistics(columns, y, 0, b)
        matrix, vector = gtvmin.system(builders.chain(3), stats.Q, stats.q, alpha)
        Z = jnp.linalg.solve(matrix, -vector / 2).reshape(3, -1)
        w = vertical.assemble(columns, vertical.read_out(columns, Z))
        quantity = f"error of w, alpha {alpha:g}, b {b:g}"
        rows.append(Row(quantity, 0, np.abs(w - expected).max(), 1e-7))
    return rows


def exercise_7_1(experiment: Experiment) -> list[Row]:
    """How often nodes with m examples choose a neighbour of the other class."""
    e = experiment
    c = np.repeat([-1.0, 1.0], 50)

    def share(m):
        """Of nodes with a wrong neighbour, by network ``[trials]``."""
        wrong = []
        for k in range(e.trials):
            rng = np.random.default_rng([e.seed, k, 7])
            means = c + rng.standard_normal(100) / np.sqrt(m)
            choices = builders.ranked_choices(means, seed=e.trials * e.seed + k)
            wrong.append((c[choices] != c[:, None]).any(1).mean())
        return np.array(wrong)

    # With plenty of data only too few candidates of the own class are a reason.
    rows = [
        Row(f"P(a wrong one), {k} candidates", p, hypergeom.cdf(2, 99, 49, k), 5e-5)
        for k, p in ((10, 0.0491), (9, 0.0845))
    ]
    for m, expected in ((1, 0.52), (5, 0.12), (10, 0.061), (50, 0.050)):
        drawn = share(m)
        # Two-sided at 1e-4, beside the rounding of what is expected.
        error = 3.9 * drawn.std(ddof=1) / math.sqrt(e.trials)
        tol = error + (0.005 if m < 10 else 0.0005)
        rows.append(Row(f"share of such nodes, m = {m}", expected, drawn.mean(), tol))
    some = (share(1e9) > 0).mean()
    expected = 1 - (1 - rows[0].ours) ** 100
    error = 3.9 * math.sqrt(expected * (1 - expected) / e.trials) + 1 / e.trials
    return [*rows, Row("share of networks with one", expected, some, error)]


def exercise_9_5(experiment: Experiment) -> list[Row]:
    """Private features of an hour's weather: they do not tell the hour."""
    X = fmi_like.hourly(seed=experiment.seed)
    X = (X - X.mean(0)) / X.std(0)
    hour, temperature = X[:, -1], X[:, 0]

    def explained(features, y):
        """R^2 of linear regression on centred features."""
        w = erm.ridge(features, y)
        return 1 - ((y - features @ w) ** 2).sum() / (y**2).sum()

    def private(s):
        return privacy.private_projection(privacy.cross_covariance(X, s)).matrix

    F = private(hour)
    Z, literal = X @ F, X @ private(temperature)
    return [
        Row("private: R^2 of the hour", 0, explained(Z, hour)),
        Row("rank of F", 10, np.linalg.matrix_rank(F)),
        Row("largest entry of F F - F", 0, np.abs(F @ F - F).max()),
        Row("raw: R^2 of the hour", None, explained(X[:, :-1], hour)),
        Row("private: R^2 of x1, temperature", None, explained(Z, temperature)),
        Row("s as printed: R^2 of the hour", None, explained(literal, hour)),
    ]


def exercise_10_2(experiment: Experiment) -> list[Row]:
    """Poisoning near or distant stations until node 1's MSE is 20 % higher."""
    e = experiment
    data, place = fmi_like.daily(e.num_stations, 30, seed=e.seed)
    graph = builders.knn_points(place, 4, "geodesic")

    def stacked(split):
        clients = [data.splits[split].client(i) for i in range(e.num_stations)]
        X = np.stack([np.c_[c["x"], np.ones(len(c["y"]))] for c in clients])
        y = np.stack([c["y"] for c in clients])
        return jnp.asarray(X, float), jnp.asarray(y, float)

    (X, y), (held_X, held_y) = stacked("train"), stacked("test")
    alpha = 1.0

    def error(attacked):
        bad_X, bad_y = poison_data(X, y, attacked, labels=10.0)
        local = oracles.least_squares_statistics(bad_X, bad_y)
        eta = gtvmin.default_rate(graph, local.Q, alpha)
        method = fedgd.make(graph, oracles.quadratic(*local), alpha=alpha, eta=eta)
        W, _ = operators.run(method, jnp.zeros((e.num_stations, X.shape[2])), e.rounds)
        return validation_error(W, held_X, held_y)[0]

    hops = arrival(graph, jnp.arange(e.num_stations) == 0)
    nearest = np.argsort(np.asarray(hops), kind="stable")[1:].tolist()
    sweep = jax.jit(jax.vmap(error))
    rows = []
    for name, order in (("nearest", nearest), ("distant", nearest[::-1])):
        errors = np.asarray(sweep(attacks.growing(order, e.num_stations)))
        if not rows:
            clean = jax.jit(error)(jnp.zeros(e.num_stations, bool))
            rows = [
                Row("rise of MSE by 0 stations, °C²", 0, errors[0] - clean),
                Row("MSE of node 1, honest, °C²", None, clean),
            ]
        needed = attacks.smallest_attack(errors)
        ours = np.nan if needed is None else needed
        rows.append(Row(f"stations to +20 % MSE, {name}", None, ours))
    return rows


def exercise_10_3(experiment: Experiment) -> list[Row]:
    """A back door between 3 and 4 o'clock; success is 40 °C, give or take 15."""
    e = experiment
    graph = builders.complete(5)
    hours = np.stack([fmi_like.hourly(seed=5 * e.seed + i) for i in range(5)])
    X = jax.nn.one_hot(hours[..., -1].astype(int) - 1, 24, dtype=float)
    y = jnp.asarray(hours[..., 0])
    trigger = Trigger.hour(3)
    attacked = jnp.zeros(y.shape, bool).at[4, ::2].set(True)
    bad = plant_backdoor(X, y, attacked, trigger, 40.0)
    trim = operators.aggregate_by(lambda x, w: robust.trim_extremes(x, w, 1))
    runs = (("clean", X, y, None), ("attacked", *bad, None), ("trimmed", *bad, trim))
    rows = []
    for name, features, labels, rule in runs:
        local = oracles.least_squares_statistics(features, labels)
        method = fedrelax.make_quadratic(graph, local.Q, local.q, alpha=1.0)
        method = method._replace(aggregate=rule)
        W, _ = operators.run(method, jnp.zeros((5, 24)), e.rounds)

        def predict(x, w=W[0]):
            return x @ w

        expected = 0 if name == "clean" else None
        success = attack_success(predict, X[0], trigger, 40.0, 15.0)
        at_3 = predict(trigger.stamp(X[0]))[0]
        elsewhere = clean_error(predict, X[0], y[0], trigger)
        rows += [
            Row(f"{name}: attack success rate", expected, success),
            Row(f"{name}: prediction at 3, °C", None, at_3),
            Row(f"{name}: MSE elsewhere, °C²", None, elsewhere),
        ]
    return rows


def exercise_10_4(experiment: Experiment) -> list[Row]:
    """Absolute errors do not follow an outlier, squared ones do."""
    x = np.arange(5.0)
    X = np.c_[np.ones(5), x]
    rows = []
    for last, slope in ((10.0, 2.2), (10.5, 2.3), (20.0, 4.2)):
        y = np.r_[x[:4], last]
        fit = least_absolute_deviations(X, y)
        if not rows:
            rows.append(Row("sum of |errors|, y5 = 10", 6, fit.objective))
        rows.append(Row(f"least |errors|: line, y5 = {last:g}", [0, 1], fit.w))
        w = erm.ridge(X, y)
        rows.append(Row(f"least squares: slope, y5 = {last:g}", slope, w[1]))
    return rows


EXERCISES: dict[str, Callable[[Experiment], list[Row]]] = {
    exercise.__name__.removeprefix("exercise_").replace("_", "."): exercise
    for exercise in (
        *(exercise_1_3, exercise_1_4, exercise_3_1, exercise_3_11, exercise_3_12),
        *(exercise_3_13, exercise_4_1, exercise_5_1, exercise_6_2, exercise_7_1),
        *(exercise_9_5, exercise_10_2, exercise_10_3, exercise_10_4),
    )
}
"""By number, those of the book's that have one to compute."""

PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(trials=20, num_stations=8, rounds=50),
}


def _march(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Days ``[28, 144]`` of ten-minute temperatures, and the next days' highest.

    Drawn in place of the observations at Kustavi Isokari, 1 to 28 March 2023.
    """
    days, first = 29, 59
    hour = np.arange(24 * days + 1)
    hourly = fmi_like.hourly(len(hour), first, seed)[:, 0]
    minutes = np.interp(np.arange(144 * days) / 6, hour, hourly)
    read = np.round(minutes, 1).reshape(days, 144)  # as thermometers are read
    return read[:-1], read[1:].max(1)


def _averages(
    graph: Graph, weight: np.ndarray, y: np.ndarray, alphas: ArrayLike
) -> np.ndarray:
    """GTVMin of weight_i (w_i - y_i)^2 for every alpha, ``[alphas, n]``."""
    Q, q = weight[:, None, None], -2 * weight[:, None] * y
    solve = jax.vmap(lambda alpha: gtvmin.closed_form(graph, Q, q, alpha))
    return np.asarray(jax.jit(solve)(jnp.asarray(alphas)))[..., 0]


def _text(value: ArrayLike, digits: int) -> str:
    """Numbers as text; what is left of rounding with one digit."""
    numbers = np.atleast_1d(np.asarray(value, float)).tolist()
    return ", ".join(
        "none" if math.isnan(x) else f"{x + 0:.{digits if abs(x) > 1e-8 else 1}g}"
        for x in numbers
    )
