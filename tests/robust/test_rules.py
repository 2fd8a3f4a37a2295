"""Robust rules on stacked values, in a round with a server and on networks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from fedjax_core import (
    ClientProgram,
    Execution,
    LocalWork,
    Packed,
    client_mesh,
    map_clients,
    plan_round,
    privacy,
    with_transform,
)
from fedjax_core.algorithms.networks import fedgd, fedprox, fedrelax
from fedjax_core.attacks.messages import nudge, poisoned, scale
from fedjax_core.networks.attacks import poison_channel
from fedjax_core.networks.defences import (
    check_suspects,
    fedrelax_by_norm,
    noisy_messages,
    norm_residual,
    relax_by_norm,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import aggregate_by, copies
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.oracles import (
    least_squares_statistics,
    prox_residual,
    quadratic,
    squared_distance,
    zero,
)
from fedjax_core.networks.robust_loss import (
    absolute,
    absolute_prox,
    huber,
    least_absolute_deviations,
)
from fedjax_core.networks.schedules import power_decay
from fedjax_core.robust.median import subgradient_residual, weiszfeld
from fedjax_core.robust.rules import (
    average,
    clip_extremes,
    clipped_mean,
    geometric_median,
    suspects_among,
    trim_extremes,
    trimmed_mean,
)
from fedjax_core.transform import Message

KEY = jax.random.key(0)
RULES = {"clip": clip_extremes, "trim": trim_extremes}

# Each compiles once per shape.
mean_of = jax.jit(average)
means_of = jax.jit(jax.vmap(average))
median_of = jax.jit(weiszfeld)
clip_one = jax.jit(functools.partial(clip_extremes, b=1))
trim_one = jax.jit(functools.partial(trim_extremes, b=1))
medians_of = jax.jit(jax.vmap(weiszfeld))
residual_of = jax.jit(subgradient_residual)
residuals_of = jax.jit(jax.vmap(subgradient_residual))
relax = jax.jit(relax_by_norm, static_argnums=(3, 5))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def instances(seed, count, slots=9, d=3):
    """Values, weights with empty slots (at least 3 present), b < K/2 and corruption."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, slots, d))
    weights = rng.uniform(0.1, 3, (count, slots))
    present = rng.permuted(np.tile(np.arange(slots), (count, 1)), axis=1)
    sizes = rng.integers(3, slots + 1, count)
    weights *= present < sizes[:, None]
    b = rng.integers(0, (sizes - 1) // 2 + 1)
    bad = present < b[:, None]
    return values, weights, b, bad


def numpy_rule(name, values, weights, b):
    values, weights = values[weights > 0], weights[weights > 0]
    out = []
    for column in values.T:
        order = np.argsort(column, kind="stable")
        if name == "trim":
            keep = order[b : len(order) - b]
            out.append(np.average(column[keep], weights=weights[keep]))
        else:
            low, high = column[order[b]], column[order[len(order) - 1 - b]]
            out.append(np.average(np.clip(column, low, high), weights=weights))
    return np.array(out)


# T-S2: the range guarantee, and the rules against NumPy.


@pytest.mark.parametrize("name", RULES)
def test_rules_stay_in_the_clean_range(name, x64):
    values, weights, b, bad = instances(1, 2000)
    lies = np.random.default_rng(2).choice([-1e9, 1e9, np.nan, np.inf, 0.0], bad.shape)
    sent = np.where(bad[..., None], lies[..., None], values)
    # What lies in an empty slot must not matter.
    sent = np.where(weights[..., None] > 0, sent, np.nan)
    got = jax.jit(jax.vmap(RULES[name]))(sent, weights, b)
    clean = (~bad & (weights > 0))[..., None]
    low = np.where(clean, values, np.inf).min(1)
    high = np.where(clean, values, -np.inf).max(1)
    assert (got >= low - 1e-9).all()
    assert (got <= high + 1e-9).all()
    honest = jax.jit(jax.vmap(RULES[name]))(values, weights, b)
    for i in range(0, 2000, 40):
        expected = numpy_rule(name, values[i], weights[i], b[i])
        np.testing.assert_allclose(honest[i], expected, rtol=1e-9)


# T-S3: b = 0 is the average; equal values stay.


@pytest.mark.parametrize("name", RULES)
def test_no_suspects_is_the_average_and_equal_values_stay(name, x64):
    values, weights, _, _ = instances(3, 300)
    rule = functools.partial(RULES[name], b=0)
    got = jax.jit(jax.vmap(rule))(values, weights)
    np.testing.assert_allclose(got, means_of(values, weights), rtol=1e-9)
    expected = [
        np.average(v, axis=0, weights=w) for v, w in zip(values, weights, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    same = {"a": np.full((5, 2), 0.7), "b": np.full(5, -3.0)}
    w = np.array([1.0, 2.0, 0.5, 1.0, 3.0])
    for rule in (functools.partial(RULES[name], b=2), median_of):
        got = jax.jit(rule)(same, w)
        np.testing.assert_allclose(got["a"], [0.7, 0.7], rtol=1e-12)
        np.testing.assert_allclose(got["b"], -3, rtol=1e-12)


def test_bool_weights_count_equally_and_nothing_gives_zero():
    values = np.random.default_rng(4).normal(size=(6, 2)).astype(np.float32)
    mask = np.array([1, 1, 0, 1, 1, 1], bool)
    for rule in (
        mean_of,
        clip_one,
        trim_one,
        median_of,
    ):
        equal = rule(values, mask)
        np.testing.assert_allclose(equal, rule(values, mask * np.float32(2)), rtol=1e-5)
        np.testing.assert_array_equal(rule(values, np.zeros(6, bool)), 0)
        half = jax.ShapeDtypeStruct(values.shape, jnp.bfloat16)
        assert jax.eval_shape(rule, half, mask).dtype == jnp.float32


@pytest.mark.parametrize("rule", RULES.values())
def test_too_many_suspects_are_refused_or_give_nan(rule):
    values = np.zeros((4, 1), np.float32)
    for b in (-1, 2):
        with pytest.raises(ValueError, match=f"b must be >= 0 and 2b less .* got {b}"):
            rule(values, np.ones(4, np.float32), b)
    # Two values are there, which only the device knows.
    assert np.isnan(rule(values, np.array([1, 1, 0, 0], np.float32), 1)).all()


def test_networks_with_too_few_neighbours_are_refused():
    chain = Graph.from_edges([[0, 1], [1, 2]], num_nodes=4)
    with pytest.raises(ValueError, match="b = 1 for node 0 with 1"):
        check_suspects(chain, 1)
    with pytest.raises(ValueError, match="b = -1 for node 0"):
        check_suspects(chain, -1)
    # A node without neighbours has no order statistics at all.
    with pytest.raises(ValueError, match="b = 0 for node 3 with 0"):
        check_suspects(chain, 0)
    ring = Graph.from_edges([[i, (i + k) % 7] for i in range(7) for k in (1, 2)])
    check_suspects(ring, 1)
    check_suspects(ring, np.ones(7, int))
    with pytest.raises(ValueError, match="node 0"):
        check_suspects(ring.with_weight(ring.weight.at[:2].set(0)), 1)


def test_suspects_follow_the_number_of_values():
    counts = [int(suspects_among(np.arange(10) < k, 0.2)) for k in range(11)]
    assert counts == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
    assert int(suspects_among(np.ones(100, bool), 0.29)) == 29
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 0.5\), got 0.5"):
        suspects_among(np.ones(3, bool), 0.5)


# T-T4: the geometric median.


def test_geometric_median_is_optimal(x64):
    values, weights, _, _ = instances(5, 300)
    got = medians_of(values, weights)
    residual = residuals_of(values, weights, got)
    assert residual.max() < 1e-12
    # The residual is 1 far away and positive at the mean.
    far = residuals_of(values, weights, got + 1e6)
    np.testing.assert_allclose(far, 1, atol=1e-5)
    mean = means_of(values, weights)
    assert (residuals_of(values, weights, mean) > 1e-6).all()

    # No point nearby is better.
    def cost(p):
        distance = np.linalg.norm(values - np.asarray(p)[:, None], axis=-1)
        return (weights * distance).sum(1)

    step = np.random.default_rng(6).normal(size=got.shape) * 1e-3
    assert (cost(got) <= cost(got + step) + 1e-9).all()


def test_in_one_dimension_it_is_the_median(x64):
    rng = np.random.default_rng(7)
    values = rng.normal(size=(50, 9, 1))
    weights = np.ones((50, 9))
    weights[25:, 8] = 0  # an even number: the middle of the two in the middle
    values[0, :3, 0], weights[0, 3:] = [0, 1, 100], 0
    values[1, :3, 0], weights[1, :3], weights[1, 3:] = [0, 7, 9], [1, 3, 1], 0
    got = medians_of(values, weights)[:, 0]
    np.testing.assert_array_equal(got[:2], [1, 7])
    np.testing.assert_allclose(got[2:25], np.median(values[2:25, :, 0], 1), rtol=1e-12)
    np.testing.assert_allclose(got[25:], np.median(values[25:, :8, 0], 1), rtol=1e-9)


def test_it_ends_on_a_point_that_is_optimal(x64):
    # The corner of an obtuse triangle, and a point with half of the weight.
    far = [[8.0, 8], [9, 9]]
    triangle = np.array([[0.0, 0], [10, 1], [-10, 1], *far])
    got = median_of(triangle, np.array([1.0, 1, 1, 0, 0]))
    np.testing.assert_array_equal(got, [0, 0])
    heavy = np.array([[2.0, 3], [10, 1], [-10, 1], [0, 50], far[0]])
    got = median_of(heavy, np.array([3.0, 1, 1, 1, 0]))
    np.testing.assert_array_equal(got, [2, 3])
    # It starts on a data point, the median of both coordinates, and must leave it.
    cross = np.array([[0.0, 0], [1, 0.1], [1, -0.1], [-0.1, 5], [-0.1, -5]])
    weights = np.array([0.1, 1, 1, 1, 1])
    got = median_of(cross, weights)
    assert got[0] > 0
    assert residual_of(cross, weights, got) < 1e-9


def test_breakdown_bound(x64):
    rng = np.random.default_rng(8)
    h, count = 7, 400
    honest = rng.normal(size=(count, h, 3))
    honest /= np.linalg.norm(honest, axis=-1, keepdims=True)
    honest *= rng.uniform(0, 1, (count, h, 1)) ** 0.2  # within 1 of the origin
    b = rng.integers(0, h, count)
    away = rng.normal(size=(count, 1, 3)) * 10.0 ** rng.uniform(0, 6, (count, 1, 1))
    lies = np.broadcast_to(away, (count, h - 1, 3))
    values = np.concatenate([honest, lies], 1)
    weights = np.concatenate(
        [np.ones((count, h)), np.arange(h - 1) < b[:, None]], 1
    ).astype(float)
    got = medians_of(values, weights)
    bound = 1 / np.sqrt(1 - (b / h) ** 2)
    assert (np.linalg.norm(got, axis=1) <= bound + 1e-9).all()


def test_it_turns_and_moves_with_the_points(x64):
    values, weights, _, _ = instances(9, 300)
    turn = np.linalg.qr(np.random.default_rng(10).normal(size=(3, 3)))[0]
    straight = medians_of(values, weights)
    turned = medians_of(values @ turn.T + 4, weights)
    np.testing.assert_allclose(turned, straight @ turn.T + 4, atol=1e-9)
    # The norm is over all leaves.
    tree = {"a": values[..., :1], "b": values[..., 1:].reshape(300, 9, 2, 1)}
    got = medians_of(tree, weights)
    joined = np.concatenate([got["a"], got["b"][..., 0]], 1)
    np.testing.assert_allclose(joined, straight, rtol=1e-12)


# T-S4: one huge message.


@pytest.mark.parametrize("lie", [1e6, 1e30, -3e38, np.inf, np.nan])
def test_one_huge_message_breaks_only_the_mean(lie):
    values = np.random.default_rng(11).normal(size=(7, 3)).astype(np.float32)
    sent = values.copy()
    sent[4] = lie
    weights = np.array([1, 2, 1, 1, 1, 0.5, 1], np.float32)
    assert not np.abs(mean_of(sent, weights)).max() < 1e4
    honest = np.delete(values, 4, 0)
    for rule in (clip_one, trim_one):
        got = rule(sent, weights)
        assert (got >= honest.min(0)).all()
        assert (got <= honest.max(0)).all()
    equal = np.ones(7, np.float32)
    centre = honest.mean(0)
    r = np.linalg.norm(honest - centre, axis=1).max()
    away = np.linalg.norm(median_of(sent, equal) - centre)
    assert away <= r / math.sqrt(1 - 1 / 36) + 1e-5


@pytest.mark.parametrize("rule", ["mean", "clip", "trim", "median", "norm"])
def test_a_poisoned_node_on_a_network(rule, x64):
    # Ten nodes, four neighbours each, all want 1; node 3 says 1e6 to everybody.
    graph = Graph.from_edges(
        [[i, (i + k) % 10] for i in range(10) for k in (1, 2)], dtype=np.float64
    )
    check_suspects(graph, 1)
    losses = squared_distance(np.ones((10, 2)))
    if rule == "norm":
        operator = fedrelax_by_norm(graph, losses, alpha=0.3)
    else:
        one = {
            "mean": average,
            "clip": functools.partial(clip_extremes, b=1),
            "trim": functools.partial(trim_extremes, b=1),
            "median": weiszfeld,
        }[rule]
        operator = fedrelax.make(graph, losses, alpha=0.3)._replace(
            aggregate=aggregate_by(one)
        )
    nodes = np.arange(10) == 3
    channel = poison_channel(graph, nudge(np.full(2, 1e6)), nodes=nodes)
    # From where the nodes would be alone: by the norm, nodes in agreement stay there.
    start = jnp.ones((10, 2))
    W, _ = run_network(operator, start, 60, channel=channel)
    # A pull of at most alpha moves the minimiser of (w - 1)^2 by at most alpha / 2.
    near = np.abs(W[~nodes] - 1).max()
    if rule == "mean":
        assert near > 1e4
    elif rule in ("clip", "trim"):
        assert near < 1e-9
    else:
        assert near < 0.3
    clean, _ = run_network(operator, start, 60)
    np.testing.assert_allclose(clean, 1, atol=1e-9)


# Robust FedRelax at a general node.


def test_relaxation_by_norm_solves_its_problem(x64):
    rng = np.random.default_rng(12)
    graph = Graph.from_edges(
        [[i, j] for i in range(8) for j in range(i) if rng.random() < 0.6] + [[8, 0]],
        dtype=np.float64,
    )
    B = rng.normal(size=(9, 3, 3))
    losses = quadratic(
        B @ B.transpose(0, 2, 1) + 0.1 * np.eye(3), rng.normal(size=(9, 3))
    )
    W = jnp.asarray(rng.normal(size=(9, 3)) * 2)
    received = copies(graph, W)
    received = received.at[::5].set(1e3)
    residual = jax.jit(norm_residual, static_argnums=3)
    for alpha in (0.05, 1.0, 30.0):
        new = relax(graph, W, received, losses, alpha, 400)
        assert residual(graph, new, received, losses, alpha).max() < 1e-5 * alpha
    # Node 8 has one neighbour, which a strong penalty makes it join exactly.
    np.testing.assert_allclose(new[8], received[-1], atol=1e-9)


def test_with_a_zero_loss_it_is_the_geometric_median_hubs_included(x64):
    leaves = 60
    star = Graph.from_edges([[0, i] for i in range(1, leaves + 1)], dtype=np.float64)
    W = jnp.asarray(np.random.default_rng(13).normal(size=(leaves + 1, 2)))
    got = relax(star, W, copies(star, W), zero(), 1.0, 300)
    median = median_of(W[1:], np.ones(leaves))
    np.testing.assert_allclose(got[0], median, atol=1e-9)


def test_two_nodes_in_one_dimension(x64):
    # (w - a)^2 + alpha |w - b| moves from a by alpha / 2 towards b, and not past it.
    graph = Graph.from_edges([[0, 1]], dtype=np.float64)
    losses = squared_distance(np.array([[0.0], [10.0]]))
    received = jnp.array([[3.0], [3.0]])
    got = relax(graph, jnp.zeros((2, 1)), received, losses, 4.0, 100)
    np.testing.assert_allclose(got, [[2], [8]], atol=1e-9)
    got = relax(graph, jnp.zeros((2, 1)), received, losses, 40.0, 100)
    np.testing.assert_allclose(got, [[3], [3]], atol=1e-9)
    with pytest.raises(ValueError, match="alpha must be > 0"):
        fedrelax_by_norm(graph, losses, alpha=0.0)


# With a server.


def send_first_rows() -> ClientProgram:
    def step(shared, carry, batch, key):
        x = jnp.where(batch["example_mask"][:, None], batch["x"], 0)
        return carry + x.sum(0)

    return ClientProgram(
        lambda shared, state, key: jnp.zeros(2),
        step,
        lambda shared, carry, state, key: (
            {"a": carry[:1], "b": carry[1]},
            state,
            {},
        ),
    )


@jax.jit
def reduce_all(cohort):
    rules = (clipped_mean(0.2), trimmed_mean(0.2), geometric_median())
    return [
        map_clients(send_first_rows(), (), cohort, KEY, reduce=rule).update
        for rule in rules
    ]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("outlier", [1e30, -3e38])
def test_reductions_in_a_round(devices, outlier):
    x = np.array(
        [[0, 0], [1, 5], [2, 4], [3, 3], [outlier, outlier], [np.nan, 0]], np.float32
    )
    train = Packed({"x": x}, np.arange(7))
    how = Execution(mesh=client_mesh(jax.devices()[:devices]))
    cohort = plan_round(
        range(6),
        train,
        LocalWork(batch_size=1),
        seed=0,
        round=0,
        execution=how,
        cohort_size=9,
    )
    got = reduce_all(cohort)
    got = [np.r_[g["a"], g["b"]] for g in got]
    five = x[:5].astype(np.float64)
    limits = np.sort(five, axis=0)[[1, 3]]
    np.testing.assert_allclose(got[0], np.clip(five, *limits).mean(0), rtol=1e-6)
    np.testing.assert_allclose(got[1], stats.trim_mean(five, 0.2), rtol=1e-6)
    centre = five[:4].mean(0)
    r = np.linalg.norm(five[:4] - centre, axis=1).max()
    assert np.linalg.norm(got[2] - centre) <= r / math.sqrt(1 - 1 / 16) + 1e-5
    assert residual_of(x[:5], np.ones(5, np.float32), jnp.asarray(got[2])) < 1e-3


def test_reductions_name_themselves_and_check_their_arguments():
    assert clipped_mean(0.2).name == "clipped_mean(0.2)"
    assert geometric_median(50).name == "geometric_median(50)"
    with pytest.raises(ValueError, match=r"clip_fraction must be in \[0, 0.5\)"):
        clipped_mean(0.5)
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        geometric_median(0)


def test_attackers_among_the_clients_of_a_server():
    x = np.random.default_rng(14).normal(size=(10, 2)).astype(np.float32)
    train = Packed({"x": x}, np.arange(11))
    cohort = plan_round(range(10), train, LocalWork(batch_size=1), seed=0, round=0)
    program = with_transform(send_first_rows(), poisoned(scale(-1000.0), 0.3))
    # Chosen by hand: clients 2 and 5.
    roles = jnp.asarray(np.isin(np.arange(10), [2, 5]), jnp.int8)
    out = jax.jit(
        lambda c: map_clients(
            program, (), c, KEY, reduce=trimmed_mean(0.2), client_state=((), roles)
        )
    )(cohort)
    sent = x.astype(np.float64)
    sent[[2, 5]] *= -1000
    expected = stats.trim_mean(sent, 0.2)
    np.testing.assert_allclose(
        np.r_[out.update["a"], out.update["b"]], expected, rtol=1e-5
    )
    np.testing.assert_array_equal(out.client_state[1], roles)


# T-S7: least absolute deviations.


def test_absolute_errors_ignore_how_far_an_outlier_is():
    X = np.stack([np.ones(5), np.arange(5.0)], 1)
    slopes = []
    for last in (10.0, 10.5, 20.0):
        y = np.array([0.0, 1, 2, 3, last])
        fit = least_absolute_deviations(X, y)
        np.testing.assert_allclose(fit.w, [0, 1], atol=1e-9)
        np.testing.assert_allclose(fit.objective, last - 4, rtol=1e-9)
        assert abs(fit.gap) < 1e-9
        slopes.append(np.linalg.lstsq(X, y, rcond=None)[0][1])
    np.testing.assert_allclose(slopes, [2.2, 2.3, 4.2], rtol=1e-9)


def test_absolute_errors_on_random_data_have_no_gap():
    rng = np.random.default_rng(15)
    for _ in range(5):
        X, y = rng.normal(size=(30, 4)), rng.standard_t(2, 30)
        fit = least_absolute_deviations(X, y)
        assert abs(fit.gap) < 1e-8
        assert (np.abs(y - X @ fit.w) < 1e-9).sum() >= 4
    for X, y, message in (
        (np.zeros((3, 2)), np.zeros(2), "shapes"),
        (np.zeros((0, 2)), np.zeros(0), "m >= 1"),
        (np.full((3, 2), np.nan), np.zeros(3), "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            least_absolute_deviations(X, y)


def ragged_regression():
    rng = np.random.default_rng(16)
    X, y = rng.normal(size=(5, 12, 3)), rng.standard_t(2, (5, 12))
    mask = np.arange(12) < np.array([12, 12, 7, 3, 1])[:, None]
    X[~mask], y[~mask] = np.nan, np.nan
    return X, y, mask, rng.normal(size=(5, 3))


@pytest.mark.parametrize("rho", [1e-3, 0.1, 10.0])
def test_prox_of_absolute_errors_meets_the_conditions_of_optimality(rho):
    """At w, rho (w - v) is X'u / m for signs u of errors, [-1, 1] for 0."""
    with jax.enable_x64(True):
        X, y, mask, V = ragged_regression()
        losses = absolute(X, y, mask)
        W, gap = absolute_prox(X, y, V, rho, mask)
        np.testing.assert_array_equal(W, losses.prox(jnp.asarray(V), rho))
        assert (gap >= 0).all()
        assert (gap < 1e-14).all()
        for i, w in enumerate(np.asarray(W)):
            x, e = X[i][mask[i]], (y[i] - X[i] @ w)[mask[i]]
            zero = np.abs(e) < 1e-6
            missing = len(e) * rho * (w - V[i]) - x[~zero].T @ np.sign(e[~zero])
            if zero.any():
                fit = optimize.lsq_linear(x[zero].T, missing, (-1, 1), method="bvls")
                missing = x[zero].T @ fit.x - missing
            np.testing.assert_allclose(missing, 0, atol=1e-6)
        # Value and sub-gradient: f(u) >= f(w) + g'(u - w) for other points u.
        value = losses.value(jnp.asarray(V))
        errors = np.where(mask, np.abs(y - np.einsum("nmd,nd->nm", X, V)), 0)
        np.testing.assert_allclose(value, errors.sum(1) / mask.sum(1))
        slope = losses.grad(jnp.asarray(V))
        for U in np.random.default_rng(17).normal(size=(20, *V.shape)):
            below = value + (slope * (U - V)).sum(1)
            assert (losses.value(jnp.asarray(U)) >= below - 1e-12).all()


def test_prox_of_absolute_errors_for_small_rho_is_the_linear_program():
    with jax.enable_x64(True):
        X, y, mask, V = (a[:3] for a in ragged_regression())
        W, gap = absolute_prox(X, y, V, 1e-6, mask)
        for i, w in enumerate(np.asarray(W)):
            fit = least_absolute_deviations(X[i][mask[i]], y[i][mask[i]])
            np.testing.assert_allclose(w, fit.w, atol=1e-6)
        # Too few steps are far away, and the certificate says at most how far.
        early, gap = absolute_prox(X, y, V, 1e-6, mask, steps=3)
        far = np.linalg.norm(early - W, axis=1)
        assert far.max() > 1e-3
        assert (far <= np.sqrt(2 * gap / 1e-6)).all()


def test_prox_of_absolute_errors_in_float32_and_where_it_is_degenerate():
    X, y, mask, V = ragged_regression()
    with jax.enable_x64(True):
        expected, _ = absolute_prox(X, y, V, 1.0, mask)
    X, y, V = (jnp.asarray(a, jnp.float32) for a in (X, y, V))
    W, gap = jax.jit(lambda V: absolute_prox(X, y, V, 1.0, mask))(V)
    assert W.dtype == gap.dtype == jnp.float32
    np.testing.assert_allclose(W, expected, atol=2e-3)
    # Repeated rows, and a start that fits all of them.
    X = jnp.ones((2, 6, 2))
    y = jnp.stack([jnp.full(6, 3.0), jnp.zeros(6)])
    W, gap = absolute_prox(X, y, jnp.zeros((2, 2)), 0.01)
    np.testing.assert_allclose(W, [[1.5, 1.5], [0, 0]], atol=1e-4)
    assert (gap < 1e-6).all()


def test_huber_is_squares_up_to_delta_and_absolute_errors_beyond():
    with jax.enable_x64(True):
        X, y, mask, V = ragged_regression()
        W = jnp.asarray(V)
        squares = quadratic(*least_squares_statistics(X, y, mask))
        wide, narrow = huber(X, y, 1e3, mask), huber(X, y, 1e-7, mask)
        for of in ("value", "grad"):
            np.testing.assert_allclose(getattr(wide, of)(W), getattr(squares, of)(W))
            steep = getattr(narrow, of)(W) / 2e-7
            expected = getattr(absolute(X, y, mask), of)(W)
            np.testing.assert_allclose(steep, expected, atol=1e-6)
        np.testing.assert_allclose(wide.prox(W, 0.3), squares.prox(W, 0.3), rtol=1e-9)
        delta = np.array([0.1, 0.5, 1.0, 2.0, 0.3])
        losses = huber(X, y, delta, mask)
        for rho in (1e-3, 0.1, 10.0):
            left = prox_residual(losses, W, losses.prox(W, rho), rho)
            assert (left < 1e-9).all()


@pytest.mark.parametrize("last", [10.0, 10.5, 20.0])
def test_robust_losses_defend_networks(last):
    """T-S7 at every node: slope 1 for absolute errors, 2.2, 2.3, 4.2 for squares."""
    with jax.enable_x64(True):
        graph = Graph.from_edges([[0, 1], [1, 2]], dtype=np.float64)
        X = np.broadcast_to(np.stack([np.ones(5), np.arange(5.0)], 1), (3, 5, 2))
        y = np.tile([0.0, 1, 2, 3, last], (3, 1))
        start = jnp.zeros((3, 2))

        def relaxed(losses):
            operator = fedrelax.make(graph, losses, alpha=0.3)
            return np.asarray(run_network(operator, start, 60)[0])

        line = np.tile([0.0, 1.0], (3, 1))
        of_squares = quadratic(*least_squares_statistics(X, y))
        slope = {10.0: 2.2, 10.5: 2.3, 20.0: 4.2}[last]
        np.testing.assert_allclose(relaxed(of_squares)[:, 1], slope, rtol=1e-9)
        robust = absolute(X, y)
        np.testing.assert_allclose(relaxed(robust), line, atol=1e-9)
        # Huber's fit moves, but no further however far the label goes.
        bounded = huber(X, y, 1.0)
        np.testing.assert_allclose(relaxed(bounded), 1.5 * line - [0.5, 0], atol=1e-6)

        # With a single attacked node the squares of the others suffer as well.
        y[1:, 4] = 4
        np.testing.assert_allclose(relaxed(absolute(X, y)), line, atol=1e-9)
        assert relaxed(quadratic(*least_squares_statistics(X, y)))[1, 1] > 1.15
        operator = fedprox.make(robust, 3, eta=1.0)
        W, _ = run_network(operator, start, 60)
        np.testing.assert_allclose(W, line, atol=1e-9)
        # Sub-gradients at rates that decay.
        operator = fedgd.make(
            graph, robust, alpha=0.3, eta=power_decay(2.0, shift=20.0)
        )
        W, _ = run_network(operator, start, 4000)
        np.testing.assert_allclose(W, line, atol=2e-3)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x, y: absolute(x[0], y), r"shapes \(n, m, d\)"),
        (lambda x, y: huber(x, y[:, :2], 1.0), r"shapes \(n, m, d\)"),
        (lambda x, y: absolute(x * np.nan, y), "X must be finite"),
        (lambda x, y: absolute(x, y, np.ones((2, 3))), "mask must be bool"),
        (lambda x, y: absolute(x, y, np.eye(2, 3) > 2), "every node a row, got none"),
        (lambda x, y: absolute(x, y, steps=0), "steps must be >= 1"),
        (lambda x, y: huber(x, y, 0.0), "delta must be > 0"),
        (lambda x, y: huber(x, y, np.ones(3)), r"delta must be one number or have"),
        (lambda x, y: absolute(x, y).prox(np.ones((2, 2)), 0.0), "rho must be > 0"),
        (lambda x, y: absolute(x, y).prox(np.ones((1, 2)), 1.0), "V must have shape"),
        (lambda x, y: absolute(x, y).value(np.ones((1, 2))), "W must have shape"),
        (lambda x, y: absolute_prox(x, y, np.ones((2, 3)), 1.0), "V must have shape"),
    ],
)
def test_bad_arguments_of_robust_losses(call, match):
    with pytest.raises(ValueError, match=match):
        call(np.ones((2, 3, 2)), np.ones((2, 3)))


# T-S9: noisy messages. A sample variance over 2e5 draws is off by 2 % with probability
# 4e-10 (normal) and 2e-4 (Laplace, whose fourth moment is twice as large); a mean by
# 5 standard errors with 6e-7. The keys are fixed.


@pytest.mark.parametrize("law", ["normal", "laplace"])
def test_noise_has_the_mean_and_variance_it_should(law):
    W = {"a": jnp.full((100, 1000), 3.0), "b": jnp.full((100, 1000), -1.0)}
    emit = noisy_messages(0.5, law)
    first, again = emit(W, 0, KEY), emit(W, 1, KEY)
    noise = jnp.concatenate([first["a"] - 3, first["b"] + 1])
    assert abs(noise.mean()) < 5 * 0.5 / math.sqrt(2e5)
    np.testing.assert_allclose(noise.var(), 0.25, rtol=0.02)
    kurtosis = {"normal": 3, "laplace": 6}[law]
    np.testing.assert_allclose((noise**4).mean() / noise.var() ** 2, kurtosis, rtol=0.1)
    # Leaves and keys draw their own noise; the same key draws the same.
    assert abs(np.corrcoef(first["a"].ravel() - 3, first["b"].ravel() + 1)[0, 1]) < 0.02
    np.testing.assert_array_equal(first["a"], again["a"])
    other = emit(W, 0, jax.random.key(1))
    assert (other["a"] != first["a"]).mean() > 0.99
    # The same noise on the way to a server.
    message, _ = privacy.noisy(0.5, law).apply(Message(W, jnp.float32(0)), (), KEY)
    np.testing.assert_array_equal(message.update["a"], first["a"])
    np.testing.assert_array_equal(noisy_messages(0.0, law)(W, 0, KEY)["a"], W["a"])
    with pytest.raises(ValueError, match="sigma must be >= 0"):
        noisy_messages(-1.0, law)


def test_rounds_draw_fresh_noise_and_nodes_keep_their_own():
    graph = Graph.from_edges([[0, 1]])
    operator = fedrelax.make(graph, zero(), alpha=1.0)._replace(
        emit=noisy_messages(0.1)
    )
    W, history = run_network(
        operator, jnp.zeros((2, 3)), 4, key=KEY, record=lambda W: W
    )
    steps = np.diff(np.concatenate([np.zeros((1, 2, 3)), history]), axis=0)
    assert len(np.unique(np.abs(steps))) == steps.size
    again, _ = run_network(operator, jnp.zeros((2, 3)), 4, key=KEY)
    np.testing.assert_array_equal(W, again)


@pytest.mark.parametrize("rule", [clip_extremes, trim_extremes])
def test_suspects_are_whole_numbers(rule):
    values, weights = jnp.array([1.0, 2, 3, 4, 100]), jnp.ones(5)
    for b in (0.2, 1.0, True, jnp.float32(1)):
        with pytest.raises(TypeError, match="b must be an int"):
            rule(values, weights, b)
        with pytest.raises(TypeError, match="b must be an int"):
            check_suspects(Graph.from_dense(1 - np.eye(4)), b)
    traced = jax.jit(rule)
    with pytest.raises(TypeError, match="b must be an int"):
        traced(values, weights, 1.0)
    assert jnp.isnan(traced(values, weights, -1))
    assert not jnp.isnan(traced(values, weights, jnp.int8(1)))
    with pytest.raises(ValueError, match="b must be >= 0"):
        rule(values, weights, np.int8(64))


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf])
def test_a_relaxation_by_norm_ignores_what_is_not_finite(lie):
    graph = Graph.from_edges([(0, 1), (0, 2), (1, 2)])
    losses = squared_distance(jnp.arange(3.0)[:, None] * jnp.ones((1, 2)))
    W = jnp.ones((3, 2))
    received = copies(graph, W)
    bad = (graph.source == 2) & (graph.target == 0)
    lies = jnp.where(bad[:, None] & (jnp.arange(2) == 0)[None], lie, received)
    found = relax_by_norm(graph, W, lies, losses, 0.3)
    honest = relax_by_norm(graph, W, received, losses, 0.3)
    without = Graph.from_edges([(0, 1), (1, 2)])
    alone = relax_by_norm(without, W, copies(without, W), losses, 0.3)
    np.testing.assert_allclose(found[0], alone[0], atol=1e-5)
    np.testing.assert_allclose(found[1:], honest[1:], atol=1e-5)
    residual = norm_residual(graph, found, lies, losses, 0.3)
    np.testing.assert_allclose(residual, 0, atol=1e-3)


@pytest.mark.parametrize(
    "rule",
    [
        average,
        weiszfeld,
        functools.partial(clip_extremes, b=0),
        functools.partial(trim_extremes, b=0),
        lambda values, weights: subgradient_residual(values, weights, values[0]),
    ],
)
@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_negative_weights_are_refused(rule, bad):
    with pytest.raises(ValueError, match=f"weights must be .* got {bad} for value 1"):
        rule(jnp.ones((3, 2)), np.array([1.0, bad, 2.0]))


@pytest.mark.parametrize("far", [1e4, 1e6, 1e8])
def test_far_outliers_in_float32(far):
    """The prox is as exact as without an outlier, however far that lies."""
    rng = np.random.default_rng(8)
    X = rng.normal(size=(1, 20, 2)).astype(np.float32)
    y = (X @ np.ones(2) + 0.1 * rng.normal(size=(1, 20))).astype(np.float32)
    near, away = y.copy(), y.copy()
    near[0, 3], away[0, 3] = 1e3, far  # the force is the same
    V = np.zeros((1, 2), np.float32)
    for loss in (absolute, lambda X, y: huber(X, y, 0.5)):
        with jax.enable_x64(True):
            exact = loss(X.astype(float), near.astype(float)).prox(V.astype(float), 0.3)
        np.testing.assert_allclose(loss(X, away).prox(V, 0.3), exact, atol=2e-5)
