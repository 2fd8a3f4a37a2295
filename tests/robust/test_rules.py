"""Robust rules on stacked values, in a round and on networks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_core import (
    ClientProgram,
    Execution,
    LocalWork,
    Packed,
    client_mesh,
    map_clients,
    plan_round,
)
from fedjax_core.algorithms.networks import fedrelax
from fedjax_core.attacks.messages import nudge
from fedjax_core.networks.attacks import poison_channel
from fedjax_core.networks.defences import (
    check_suspects,
    fedrelax_by_norm,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import aggregate_by
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.oracles import (
    squared_distance,
)
from fedjax_core.robust.median import subgradient_residual, weiszfeld
from fedjax_core.robust.rules import (
    average,
    clip_extremes,
    clipped_mean,
    coordinate_median,
    geometric_median,
    krum,
    suspects_among,
    trim_extremes,
    trimmed_mean,
)

KEY = jax.random.key(0)


RULES = {"clip": clip_extremes, "trim": trim_extremes}


# Each compiles once per shape.
mean_of = jax.jit(average)


means_of = jax.jit(jax.vmap(average))


median_of = jax.jit(weiszfeld)


clip_one = jax.jit(functools.partial(clip_extremes, b=1))


trim_one = jax.jit(functools.partial(trim_extremes, b=1))


residual_of = jax.jit(subgradient_residual)


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


def test_suspects_follow_the_number_of_values():
    counts = [int(suspects_among(np.arange(10) < k, 0.2)) for k in range(11)]
    assert counts == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
    assert int(suspects_among(np.ones(100, bool), 0.29)) == 29
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 0.5\), got 0.5"):
        suspects_among(np.ones(3, bool), 0.5)


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
    rules += (coordinate_median(), krum(1), krum(3))
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
    np.testing.assert_array_equal(got[3], np.median(x[:5], axis=0))
    # Squared distances to two others: 25 + 20, 2 + 8, 2 + 2, 2 + 8, infinite.
    np.testing.assert_array_equal(got[4], x[2])
    assert np.isnan(got[5]).all(), "five are too few for three attackers"


def test_reductions_name_themselves_and_check_their_arguments():
    assert clipped_mean(0.2).name == "clipped_mean(clip_fraction=0.2)"
    assert geometric_median(50).name == "geometric_median(50)"
    with pytest.raises(ValueError, match=r"clip_fraction must be in \[0, 0.5\)"):
        clipped_mean(0.5)
    with pytest.raises(ValueError, match="iterations must be >= 1"):
        geometric_median(0)
    assert krum(3).name == "krum(3)"
    with pytest.raises(ValueError, match="num_attackers must be >= 0"):
        krum(-1)


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
