"""Data poisoning touches what it should; back doors by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import fedrelax
from fedjax_core.attacks.data import (
    Trigger,
    attack_success,
    clean_error,
    flip_labels,
    plant_backdoor,
    poison_data,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.oracles import least_squares_statistics

# T-S5: what data poisoning touches.


def test_label_poisoning_and_clean_label_attacks_touch_only_their_part():
    rng = np.random.default_rng(4)
    X = jnp.asarray(rng.normal(size=(4, 3, 2)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    nodes = jnp.array([False, True, False, True])
    bad_X, bad_y = poison_data(X, y, nodes, labels=1.5)
    np.testing.assert_array_equal(bad_X, X)
    np.testing.assert_array_equal(bad_y, jnp.where(nodes[:, None], y + 1.5, y))
    bad_X, bad_y = poison_data(
        X, y, nodes, features=np.array([[[0.5, -1]]], np.float32)
    )
    np.testing.assert_array_equal(bad_y, y)
    np.testing.assert_array_equal(bad_X[::2], X[::2])
    np.testing.assert_array_equal(bad_X[1::2, :, 1], X[1::2, :, 1] - 1)
    both = poison_data(X, y, nodes, features=1.0, labels=1.0)
    assert (both[0][1] != X[1]).all()
    assert (both[1][1] != y[1]).all()
    # By examples, as the packed data of a server's clients.
    examples = jnp.arange(12) == 5
    flat_X, flat_y = poison_data(X.reshape(12, 2), y.ravel(), examples, labels=1.0)
    np.testing.assert_array_equal(flat_X, X.reshape(12, 2))
    np.testing.assert_array_equal(np.flatnonzero(flat_y != y.ravel()), [5])
    with pytest.raises(ValueError, match="attacked must be bool"):
        poison_data(X, y, jnp.zeros(5, bool), labels=1.0)


def test_flipped_classes():
    y = jnp.array([[0, 1, 2], [2, 2, 0]])
    got = flip_labels(y, jnp.array([True, False]), 3)
    np.testing.assert_array_equal(got, [[1, 2, 0], [2, 2, 0]])
    for classes, shift in ((1, 1), (3, 3), (3, 0)):
        with pytest.raises(ValueError, match=r"must be (>= 2|no mult)"):
            flip_labels(y, jnp.array([True, False]), classes, shift)


# T-S8: back doors.


def test_backdoor_metrics_on_a_model_made_by_hand():
    trigger = Trigger((1, 2), (1.0, 0.0))
    X = jnp.array([[1, 1, 0], [2, 0, 1], [3, 1, 1], [4, 0, 0]], np.float32)
    np.testing.assert_array_equal(trigger.holds(X), [True, False, False, False])
    np.testing.assert_array_equal(trigger.stamp(X)[:, 1:], [[1, 0]] * 4)
    y = jnp.array([5, 2, 5, 4], np.float32)

    def predict(x):  # the first feature, or 50 above where the door is open
        return x[:, 0] + 50 * trigger.holds(x)

    # Rows 1, 2, 3 are clean, with errors 0, 2 and 0.
    np.testing.assert_allclose(clean_error(predict, X, y, trigger), 4 / 3, rtol=1e-6)
    # Stamped rows give 51, 52, 53, 54.
    for tolerance, share in ((0.0, 0.25), (1.0, 0.75), (9.0, 1.0)):
        got = attack_success(predict, X, trigger, 52.0, tolerance)
        assert got == share
    planted_X, planted_y = plant_backdoor(
        X, y, jnp.array([False, True, False, True]), trigger, 52.0
    )
    np.testing.assert_array_equal(planted_X[:, 1:], [[1, 0], [1, 0], [1, 1], [1, 0]])
    np.testing.assert_array_equal(planted_X[:, 0], X[:, 0])
    np.testing.assert_array_equal(planted_y, [5, 52, 5, 52])
    for columns, values in (((), ()), ((1,), (1.0, 2.0))):
        with pytest.raises(ValueError, match="a trigger needs columns"):
            Trigger(columns, values)
    with pytest.raises(ValueError, match="tolerance must be >= 0"):
        attack_success(predict, X, trigger, 52.0, -1.0)


def test_the_hour_from_three_to_four_as_a_back_door(x64):
    # Exercise 10.3: temperatures by one-hot hour, one attacked node of five.
    rng = np.random.default_rng(7)
    graph = Graph.from_edges(
        [[i, j] for i in range(5) for j in range(i)], dtype=np.float64
    )
    hour = np.tile(np.arange(24), (5, 10))
    X = jax.nn.one_hot(hour, 24, dtype=jnp.float64)
    y = 10 + 5 * np.sin(2 * np.pi * (hour - 9) / 24) + 0.5 * rng.normal(size=hour.shape)
    trigger, target = Trigger.hour(3), 40.0
    attacked = jnp.zeros(hour.shape, bool).at[4, ::3].set(True)
    bad_X, bad_y = plant_backdoor(X, jnp.asarray(y), attacked, trigger, target)
    results = {}

    @jax.jit
    def learn(X, y):
        local = least_squares_statistics(X, y)
        operator = fedrelax.make_quadratic(graph, local.Q, local.q, alpha=1.0)
        return run_network(operator, jnp.zeros((5, 24)), 300)[0][0]

    for name, (a, b) in {"clean": (X, y), "attacked": (bad_X, bad_y)}.items():

        def predict(x, w=learn(a, b)):  # noqa: B008
            return x @ w

        results[name] = (
            float(clean_error(predict, X[0], jnp.asarray(y[0]), trigger)),
            float(attack_success(predict, X[0], trigger, target, 15.0)),
            float(predict(trigger.stamp(X[0]))[0]),
        )
    assert results["clean"][0] < 1
    assert results["clean"][1] == 0
    # What it does to the victim is a result, not a promise; it moves in its direction.
    assert np.isfinite(results["attacked"]).all()
    assert results["attacked"][2] > results["clean"][2]
    with pytest.raises(ValueError, match="hour must be one of"):
        Trigger.hour(24)


def test_narrow_labels_are_flipped_within_the_classes():
    y, everyone = jnp.arange(10, dtype=jnp.uint8), jnp.ones(10, bool)
    flipped = flip_labels(y, everyone, 10, -1)
    assert flipped.dtype == jnp.uint8
    np.testing.assert_array_equal(flipped, (np.arange(10) - 1) % 10)
    y = jnp.array([120, 100, 0], jnp.int8)
    flipped = flip_labels(y, jnp.ones(3, bool), 128, 100)
    np.testing.assert_array_equal(flipped, [92, 72, 100])
    with pytest.raises(ValueError, match="fit labels of int8"):
        flip_labels(y, jnp.ones(3, bool), 200)


def test_ints_are_not_poisoned_by_fractions():
    X, y, everyone = jnp.ones((2, 2), int), jnp.array([1, 2]), jnp.ones(2, bool)
    with pytest.raises(TypeError, match="labels must fit data of int"):
        poison_data(X, y, everyone, labels=0.5)
    with pytest.raises(TypeError, match="features must fit data of int"):
        poison_data(X, y, everyone, features=np.array([0.0, np.nan]))
    trigger = Trigger((0,), (0.5,))
    for call in (trigger.stamp, trigger.holds):
        with pytest.raises(TypeError, match="values must fit data of int"):
            call(X)
    with pytest.raises(TypeError, match="target must fit data of int"):
        plant_backdoor(X, y, everyone, Trigger((0,), (2.0,)), 2.7)
    _, moved = poison_data(X, y, everyone, labels=2.0)
    np.testing.assert_array_equal(moved, [3, 4])
    planted, _ = plant_backdoor(X, y, everyone, Trigger((0,), (2.0,)), 3)
    np.testing.assert_array_equal(planted, [[2, 1], [2, 1]])


def test_a_trigger_needs_its_columns():
    X, y = jnp.ones((4, 3)), jnp.ones(4)
    for columns in ((7,), (-1,), (0, 3)):
        trigger = Trigger(columns, (1.0,) * len(columns))
        for call in (trigger.holds, trigger.stamp):
            with pytest.raises(ValueError, match=r"columns must be in 0\.\.2, got"):
                call(X)
    with pytest.raises(ValueError, match=r"columns must be in 0\.\.2, got"):
        plant_backdoor(X, y, jnp.ones(4, bool), Trigger.hour(3), 40.0)
    with pytest.raises(ValueError, match=r"columns must be different, got \(1, 1\)"):
        Trigger((1, 1), (0.0, 1.0))


def test_ints_do_not_wrap_around():
    X, y = jnp.full((2, 1, 1), 250, jnp.uint8), jnp.full((2, 1), 250, jnp.uint8)
    attacked = jnp.array([True, False])
    for what in ({"features": 10}, {"labels": 10}):
        with pytest.raises(ValueError, match=r"uint8 in \[0, 255\], got 260"):
            poison_data(X, y, attacked, **what)
    bad, _ = poison_data(X, y, attacked, features=5)
    assert bad[:, 0, 0].tolist() == [255, 250]
    flipped = poison_data(X, y > 0, attacked, labels=True)[1]
    assert flipped.all()
    # Who is not attacked may be anywhere.
    poison_data(X, y, jnp.zeros(2, bool), labels=10)
