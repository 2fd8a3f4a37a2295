"""Streams: what the text says of their laws. Checks fail for 1 key in 10,000 each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_core import FederatedData, random
from fedjax_core.datasets import streams
from fedjax_core.networks import streaming

RARE = 1e-4
KEY = random.seed_key(0)
SMALL = streams.Config(num_clients=32, iterations=80, num_features=20, tests=3)


def assert_mean(values, expected, std):
    """The mean of independent values is the expected one, at a false alarm of RARE."""
    z = stats.norm.isf(RARE / 2)
    assert abs(np.mean(values) - expected) < z * std / np.sqrt(np.size(values))


@pytest.fixture(scope="module")
def world():
    return jax.tree.map(np.asarray, jax.jit(streams.nonlinear(SMALL))(KEY))


def test_inputs_are_an_autoregressive_process_in_its_stationary_law():
    n, theta, mean, std = 20_000, 0.8, 0.2, 0.7
    law = (jnp.full(n, v, jnp.float32) for v in (theta, mean, std))
    normal = jax.random.normal(KEY, (6, n))
    s = np.asarray(streams.autoregressive(normal, *law), np.float64)
    centre = mean * np.sqrt((1 + theta) / (1 - theta))
    for lag in range(6):  # from the first to the last one
        assert_mean(s[lag], centre, std)
        product = (s[0] - centre) * (s[lag] - centre)
        spread = std**2 * np.sqrt(1 + theta ** (2 * lag))
        assert_mean(product, theta**lag * std**2, spread)


def test_outputs_are_the_function_of_the_inputs_and_noise(world):
    x = world.x.astype(np.float64)
    # x = [s_n, s_n-1, s_n-4, s_n-3]
    np.testing.assert_array_equal(world.x[1:, :, 1], world.x[:-1, :, 0])
    np.testing.assert_array_equal(world.x[4:, :, 2], world.x[:-4, :, 0])
    np.testing.assert_array_equal(world.x[3:, :, 3], world.x[:-3, :, 0])
    x1, x2, x3, x4 = np.moveaxis(x, -1, 0)
    f = np.sqrt(x1**2 + np.sin(np.pi * x4) ** 2) + 0.8 - 0.5 * np.exp(-(x2**2)) * x3
    variance = (world.y - f).var(0)  # of each client, in U(0.005, 0.03)
    # 80 numbers a client: a relative deviation of 0.16, and 0.41 between clients.
    assert_mean(variance / 0.0175, 1, np.sqrt(2 / 80 * 1.17 + 0.41**2))


def test_samples_and_availability_go_by_group(world):
    arrived, available, _delay = world.events
    np.testing.assert_array_equal(arrived.sum(0), np.resize((20, 40, 60, 80), 32))
    assert (arrived | ~available).all()
    config = streams.Config(iterations=2000)
    assert np.mean(config.availability) * 256 * 0.625 == pytest.approx(15.2, abs=0.01)
    full = jax.jit(streams.nonlinear(dataclasses.replace(config, num_features=1)))(KEY)
    takes_part = np.asarray(full.events.available, np.float64)
    samples = np.asarray(full.events.arrived).sum(0)
    p = np.repeat((0.25, 0.1, 0.025, 0.005), 4)[np.arange(256) % 16]
    for group in np.unique(p):
        cell = p == group
        total, tries = takes_part[:, cell].sum(), samples[cell].sum()
        assert stats.binomtest(int(total), int(tries), group).pvalue > RARE
    assert_mean(takes_part.sum(1), 15.2, takes_part.sum(1).std())
    # Crossed: 16 clients of each pair.
    pairs = np.stack([samples, (1e3 * p).astype(int)], 1)
    assert (np.unique(pairs, axis=0, return_counts=True)[1] == 16).all()


def test_delays_are_geometric_in_units():
    arrived = jnp.ones((200, 100), bool)
    events = streaming.draw_events(KEY, arrived, np.ones(100), 0.4, delay_unit=10)
    delay = np.asarray(events.delay)
    assert (delay % 10 == 0).all()
    assert np.asarray(events.available).all()
    for i in range(4):
        late = int((delay >= 10 * i).sum())
        assert stats.binomtest(late, delay.size, 0.4**i).pvalue > RARE
    assert not np.asarray(streaming.draw_events(KEY, arrived, np.ones(100)).delay).any()


def test_features_make_the_gaussian_kernel():
    d, width = 40_000, 1.5
    features = streaming.draw_features(KEY, 3, d, width)
    x = jax.random.normal(random.stream(KEY, "x"), (6, 3)) * 2
    z = np.asarray(streaming.featurise(features, x), np.float64)
    distance = np.square(np.asarray(x)[:, None] - np.asarray(x)[None]).sum(2)
    # A product of two features has a variance of at most 3/2 over d of them.
    bound = stats.norm.isf(RARE / 72) * np.sqrt(1.5 / d)
    assert np.abs(z @ z.T - np.exp(-distance / (2 * width**2))).max() < bound
    assert ((z**2).sum(1) <= 2).all()
    # An LMS step with mu |z|^2 <= 2 makes no error longer.
    step = np.eye(50) - np.outer(z[0, :50], z[0, :50]) * d / 50
    assert np.linalg.norm(step, 2) <= 1 + 1e-9


def test_features_are_cosines_in_both_precisions():
    features = streaming.draw_features(KEY, 4, 50, 2.0)
    x = 3 * jax.random.normal(random.stream(KEY, "x"), (30, 4))
    omega, b = np.asarray(features[0], np.float64), np.asarray(features[1], np.float64)
    expected = np.sqrt(2 / 50) * np.cos(np.asarray(x, np.float64) @ omega + b)
    single = streaming.featurise(features, x)
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-6)
    with jax.enable_x64(True):
        double = streaming.Features(jnp.asarray(omega), jnp.asarray(b))
        found = streaming.featurise(double, jnp.asarray(np.asarray(x, np.float64)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def test_the_floor_of_the_error_is_the_mean_variance_of_the_noise():
    assert 10 * np.log10(np.mean((0.005, 0.03))) == pytest.approx(-17.57, abs=0.005)


def test_a_world_is_a_function_of_its_key_and_differs_by_it(world):
    again = jax.jit(streams.nonlinear(SMALL))(KEY)
    other = jax.jit(streams.nonlinear(SMALL))(random.seed_key(1))
    for a, b, c in zip(*map(jax.tree.leaves, (world, again, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


def test_rows_of_a_population_arrive_once_each():
    rng, clients = np.random.default_rng(0), 5
    rows = [
        {"x": rng.random((400, 2), np.float32), "y": rng.random(400, np.float32)}
        for _ in range(2 * clients)
    ]
    data = FederatedData.from_lists(rows[:clients], rows[clients:])
    world = jax.jit(streams.from_population(SMALL, data))(KEY)
    arrived = np.asarray(world.events.arrived)
    pool = {tuple(x) for part in rows[:clients] for x in part["x"]}
    seen = [tuple(x) for x in np.asarray(world.x)[arrived]]
    assert len(set(seen)) == len(seen) == 32 * 50
    assert set(seen) <= pool
    y = np.concatenate([part["y"] for part in rows[:clients]])
    by_x = dict(zip([tuple(x) for p in rows[:clients] for x in p["x"]], y, strict=True))
    expected = (np.array([by_x[x] for x in seen]) - y.mean()) / y.std()
    np.testing.assert_allclose(np.asarray(world.y)[arrived], expected, atol=1e-5)
    assert world.test_z.shape == (32 * 3, 20)
    few = FederatedData.from_lists(rows[:1], rows[1:2])
    with pytest.raises(ValueError, match="data must have 1600 train rows"):
        streams.from_population(SMALL, few)


def test_settings_out_of_range_are_refused():
    arrived = jnp.ones((3, 2), bool)
    wrong, right, many = np.array([0, 2]), np.array([0, 1]), np.array([4])
    for act, match in (
        (lambda: streaming.draw_events(KEY, arrived, wrong), "probability"),
        (
            lambda: streaming.draw_events(KEY, arrived, right, 1.0),
            "delay_decay",
        ),
        (
            lambda: streaming.draw_arrivals(KEY, many, 3),
            r"samples must be in \[0, 3\]",
        ),
        (lambda: streams.Config(shares=(1.5,)), "shares must be in"),
        (lambda: streams.Config(availability=(-1,)), "availability must be in"),
        (lambda: streams.Config(shares=()), "shares must not be empty"),
        (lambda: streams.Config(availability=()), "availability must not be empty"),
        (lambda: streaming.draw_features(KEY, 2, 3, 0.0), "width must be > 0"),
    ):
        with pytest.raises(ValueError, match=match):
            act()
