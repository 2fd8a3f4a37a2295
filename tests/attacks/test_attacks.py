"""Attacks on messages and data, how far they get and what they give away."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import Packed, plan_round
from fedjax_core.algorithms import fedavg
from fedjax_core.algorithms.networks import fedgd, fedrelax
from fedjax_core.attacks.data import (
    Trigger,
    attack_success,
    clean_error,
    flip_labels,
    plant_backdoor,
    poison_data,
)
from fedjax_core.attacks.inversion import invert_example, invert_gradients
from fedjax_core.attacks.messages import (
    add_noise,
    choose,
    growing,
    high_loss,
    nudge,
    poison,
    poisoned,
    scale,
    smallest_attack,
)
from fedjax_core.networks.attacks import (
    arrival,
    attach_spy,
    copying_rate,
    poison_channel,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.gtvmin import default_rate
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.operators import step
from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.theory.oversight import validation_error
from fedjax_core.transform import Message

KEY = jax.random.key(0)
CHAIN = [[0, 1], [1, 2]]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def rows(W):
    return W


# T-S1: propagation.


@pytest.mark.parametrize("method", ["fedgd", "fedrelax"])
def test_an_attack_spreads_one_hop_per_round(method):
    rng = np.random.default_rng(0)
    # A tree-like part, a cycle, and two nodes that it can't reach.
    edges = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [2, 6], [6, 7], [0, 5], [8, 9]]
    graph = Graph.from_edges(edges, rng.uniform(0.5, 1.5, len(edges)))
    X, y = rng.normal(size=(2, 10, 5, 2))[0], rng.normal(size=(10, 5))
    X, y = jnp.float32(X), jnp.float32(y)
    attacked = jnp.arange(10) == 3

    @jax.jit
    def run(X, y):
        local = least_squares_statistics(X, y)
        losses = quadratic(*local)
        if method == "fedgd":
            operator = fedgd.make(graph, losses, alpha=0.5, eta=0.05)
        else:
            operator = fedrelax.make(graph, losses, alpha=0.5)
        start = jnp.asarray(np.random.default_rng(1).normal(size=(10, 2)), X.dtype)
        return run_network(operator, start, 6, record=rows)[1]

    clean = np.asarray(run(X, y))
    bad = np.asarray(run(*poison_data(X, y, attacked, labels=3.0)))
    hops = np.asarray(arrival(graph, attacked))
    np.testing.assert_array_equal(hops, [3, 2, 1, 0, 1, 2, 2, 3, 10, 10])
    for t in range(6):  # history holds the states after updates 0..5
        untouched = (clean[t] == bad[t]).all(1)
        np.testing.assert_array_equal(untouched, hops > t)


def test_arrival_on_the_chain_of_the_book():
    graph = Graph.from_edges(CHAIN, num_nodes=3)
    first = jnp.arange(3) == 0
    np.testing.assert_array_equal(arrival(graph, first), [0, 1, 2])
    np.testing.assert_array_equal(arrival(graph, jnp.zeros(3, bool)), [3, 3, 3])
    cut = graph.with_weight(jnp.array([1, 0], np.float32))
    np.testing.assert_array_equal(arrival(cut, first), [0, 1, 3])


# Messages.


def test_only_attacked_messages_change():
    m = {"a": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(3)}
    mask = jnp.array([False, True, False])
    got = poison(m, mask, scale(-2.0))
    np.testing.assert_array_equal(got["a"], [[0, 1], [-4, -6], [4, 5]])
    np.testing.assert_array_equal(got["b"], [1, -2, 1])
    got = poison(m, mask, nudge({"a": np.array([1.0, 7.0]), "b": 5.0}))
    np.testing.assert_array_equal(got["a"], [[0, 1], [1, 7], [4, 5]])
    got = poison(m, mask, nudge({"a": np.array([1.0, 7.0]), "b": 5.0}, 0.5))
    np.testing.assert_array_equal(got["a"][1], [1.5, 5])
    got = poison(m, mask, add_noise(2.0), KEY)
    assert (got["a"][1] != m["a"][1]).all()
    np.testing.assert_array_equal(got["a"][::2], m["a"][::2])
    with pytest.raises(ValueError, match="sigma must be > 0"):
        add_noise(-1.0)


def test_poisoned_links_reach_only_their_receiver():
    graph = Graph.from_edges(CHAIN)
    zeros = jnp.zeros((3, 1))
    losses = quadratic(jnp.ones((3, 1, 1)), zeros)
    link = np.asarray((graph.source == 1) & (graph.target == 2))
    channel = poison_channel(graph, nudge(np.full(1, 8.0)), links=link)
    W = step(fedrelax.make(graph, losses, alpha=1.0), channel)(zeros, 0, None)
    # w^2 + (w - 8)^2 is least at 4.
    np.testing.assert_allclose(W[:, 0], [0, 0, 4], rtol=1e-6)
    both = poison_channel(
        graph, nudge(np.full(1, 8.0)), links=link, nodes=np.arange(3) == 2
    )
    W = step(fedrelax.make(graph, losses, alpha=1.0), both)(zeros, 0, None)
    # Node 1 hears 0 and 8: least at 8/3.
    np.testing.assert_allclose(W[:, 0], [0, 8 / 3, 4], rtol=1e-6)
    for bad in ({}, {"nodes": np.zeros(3)}, {"links": np.zeros(3, bool)}):
        with pytest.raises(ValueError, match=r"nodes|links"):
            poison_channel(graph, scale(2.0), **bad)


def test_high_loss_is_the_worst_direction(x64):
    B = np.random.default_rng(2).normal(size=(4, 4))
    Q, w = B @ B.T, jnp.ones(4)
    bad = high_loss(jnp.asarray(Q), w, 3.0)
    np.testing.assert_allclose(np.linalg.norm(bad - w), 3, rtol=1e-9)
    rise = (bad - w) @ Q @ (bad - w)
    np.testing.assert_allclose(rise, 9 * np.linalg.eigvalsh(Q)[-1], rtol=1e-9)


def test_chosen_and_growing_sets():
    assert int(choose(KEY, 10, 0.3).sum()) == 3
    assert int(choose(KEY, 100, 0.29).sum()) == 29
    assert int(choose(KEY, 10, 0.0).sum()) == 0
    for fraction in (1.0, -0.1, 1.5):
        for reject in (lambda f: choose(KEY, 10, f), lambda f: poisoned(scale(0.0), f)):
            with pytest.raises(ValueError, match=r"fraction must be in \[0, 1"):
                reject(fraction)
    sets = growing([2, 0], 3)
    np.testing.assert_array_equal(sets, [[0, 0, 0], [0, 0, 1], [1, 0, 1]])
    for order in ([0, 0], [3], [-1]):
        with pytest.raises(ValueError, match="order must hold different nodes"):
            growing(order, 3)


def test_a_client_keeps_its_role():
    transform = poisoned(scale(-1.0), 0.4)
    update = jnp.array([1, 2], np.float32)
    keys = jax.random.split(KEY, 2000)
    once = jax.jit(jax.vmap(transform.apply, (None, None, 0)))
    sent, role = once(Message(update, jnp.float32(0)), transform.init(update), keys)
    # Of 2000 draws the share is off by 0.05 with probability 5e-6.
    assert abs(role.mean() - 0.4) < 0.05
    expected = np.where(np.asarray(role)[:, None] == 1, -update, update)
    np.testing.assert_array_equal(sent.update, expected)
    again = jax.jit(jax.vmap(transform.apply, (None, 0, 0)))
    other = jax.random.split(jax.random.key(1), 2000)
    np.testing.assert_array_equal(
        again(Message(update, jnp.float32(0)), role, other)[1], role
    )
    assert transform.norm_bound(1.0) == float("inf")


def test_attackers_in_fedavg():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    train = Packed(
        {"x": x, "y": x @ np.array([1, -1], np.float32)}, np.arange(0, 61, 6)
    )

    def loss(params, batch, key):
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    config = fedavg.Config(client_lr=0.1, batch_size=6)
    errors = {}
    for share in (0.0, 0.9):
        algorithm = fedavg.make(config, loss, transform=poisoned(scale(-1.0), share))
        one_round = jax.jit(algorithm.round)
        state = algorithm.init({"w": jnp.zeros(2)}, 10)
        for t in range(15):
            cohort = plan_round(range(10), train, config.work, seed=0, round=t)
            state, _ = one_round(state, cohort, jax.random.key(t))
        attackers = np.asarray(state.clients[1])
        assert ((attackers == 0) | (attackers == 1)).all()
        assert attackers.any() == (share > 0)
        errors[share] = np.abs(state.params["w"] - np.array([1, -1])).max()
    assert errors[0.0] < 0.1 < 1 < errors[0.9]


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
        with pytest.raises(ValueError, match="num_classes must be >= 2|shift must be no multiple"):
            flip_labels(y, jnp.array([True, False]), classes, shift)


# T-S6: copies and inversion.


def test_a_spy_copies_its_target(x64):
    rng = np.random.default_rng(5)
    graph = Graph.from_edges(CHAIN, [0.7, 1.3], dtype=np.float64)
    spied = attach_spy(graph, 1, 0.4)
    assert spied.num_nodes == 4
    np.testing.assert_array_equal(spied.dense()[3], [0, 0.4, 0, 0])
    np.testing.assert_array_equal(spied.dense()[:3, :3], graph.dense())
    B = rng.normal(size=(4, 2, 2))
    Q, q = B @ B.transpose(0, 2, 1), rng.normal(size=(4, 2))
    Q[3], q[3] = 0, 0
    losses = quadratic(Q, q)
    start = jnp.asarray(rng.normal(size=(4, 2)))
    alpha = 0.8
    copying = copying_rate(alpha, 0.4)
    np.testing.assert_allclose(copying, 1 / (2 * 0.8 * 0.4), rtol=1e-12)
    for operator, copies in (
        (fedrelax.make(spied, losses, alpha=alpha), True),
        (fedgd.make(spied, losses, alpha=alpha, eta=copying), True),
        (fedgd.make(spied, losses, alpha=alpha, eta=copying / 2), False),
    ):
        _, W = run_network(operator, start, 5, record=rows)
        late = np.abs(W[1:, 3] - W[:-1, 1]) / np.abs(W[:-1, 1])
        assert (late.max() < 1e-9) == copies
    for target, weight in ((3, 1.0), (-1, 1.0), (0, 0.0)):
        with pytest.raises(ValueError, match=r"target|weight"):
            attach_spy(graph, target, weight)


def test_gradients_give_the_second_moments_away(x64):
    rng = np.random.default_rng(6)
    X, y, eta = rng.normal(size=(7, 3)), rng.normal(size=7), 0.11
    w, gradients = np.zeros(3), []
    for _ in range(4):
        gradients.append(2 / 7 * X.T @ (X @ w - y))
        w = w - eta * gradients[-1]
    got = invert_gradients(np.array(gradients), eta)
    np.testing.assert_allclose(got.Q, X.T @ X / 7, rtol=1e-8)
    np.testing.assert_allclose(got.q, -2 * X.T @ y / 7, rtol=1e-12)
    with pytest.raises(
        ValueError, match=r"points must hold 4 affinely independent.*got 3"
    ):
        invert_gradients(np.array(gradients[:3]), eta)
    with pytest.raises(
        ValueError, match=r"points must hold 4 affinely independent.*got 2"
    ):
        invert_gradients(np.ones((4, 3)), eta)
    with pytest.raises(ValueError, match="step_size must be > 0"):
        invert_gradients(np.array(gradients), 0.0)


@pytest.mark.parametrize("label", [1.7, -0.4])
def test_one_example_is_read_out_up_to_its_sign(label, x64):
    x, eta = np.array([0.5, -2.0, 1.0]), 0.03
    g0 = -2 * label * x
    w = -eta * g0
    g1 = 2 * (x @ w - label) * x
    got_x, got_y = invert_example(jnp.asarray(g0), jnp.asarray(g1), eta)
    sign = np.sign(got_x @ x)
    np.testing.assert_allclose(sign * got_x, x, rtol=1e-9)
    np.testing.assert_allclose(sign * got_y, label, rtol=1e-9)


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
    for name, (a, b) in {"clean": (X, y), "attacked": (bad_X, bad_y)}.items():
        local = least_squares_statistics(a, b)
        operator = fedrelax.make_quadratic(graph, local.Q, local.q, alpha=1.0)
        W, _ = run_network(operator, jnp.zeros((5, 24)), 300)

        def predict(x, w=W[0]):
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


# T-S10: denial of service, Exercise 10.2.


def test_how_many_nodes_deny_service(x64):
    rng = np.random.default_rng(8)
    n = 9
    graph = Graph.from_edges(
        [[i, (i + k) % n] for i in range(n) for k in (1, 2)], dtype=np.float64
    )
    X = jnp.asarray(rng.normal(size=(n, 12, 2)))
    y = X @ np.array([1.0, -2.0]) + 0.3 * rng.normal(size=(n, 12))
    train, held = slice(0, 6), slice(6, 12)

    def error(attacked):
        bad_X, bad_y = poison_data(X[:, train], y[:, train], attacked, labels=2.0)
        local = least_squares_statistics(bad_X, bad_y)
        eta = default_rate(graph, local.Q, 1.0)
        operator = fedgd.make(graph, quadratic(*local), alpha=1.0, eta=eta)
        W, _ = run_network(operator, jnp.zeros((n, 2)), 300)
        return validation_error(W, X[:, held], y[:, held])[0]

    sets = growing(range(1, n), n)
    errors = np.asarray(jax.jit(jax.vmap(error))(sets))
    clean = jax.jit(error)(jnp.zeros(n, bool))
    np.testing.assert_allclose(errors[0], clean, rtol=1e-9)
    needed = smallest_attack(errors)
    raised = [k for k, e in enumerate(errors) if e >= 1.2 * errors[0]]
    assert needed == (raised[0] if raised else None)


def test_the_smallest_attack():
    assert smallest_attack([1.0, 1.1, 1.2, 9.0]) == 2
    assert smallest_attack([1.0, 1.1, np.nan]) == 2
    assert smallest_attack([1.0, 1.1]) is None
    assert smallest_attack([0.0, 0.0, 1.0]) == 2
    for honest in (np.nan, np.inf):
        with pytest.raises(ValueError, match="errors must start with a finite one"):
            smallest_attack([honest, 1.0])
    with pytest.raises(ValueError, match="rise must be > 0"):
        smallest_attack([1.0], 0.0)


def test_narrow_labels_are_flipped_within_the_classes():
    y, everyone = jnp.arange(10, dtype=jnp.uint8), jnp.ones(10, bool)
    flipped = flip_labels(y, everyone, 10, -1)
    assert flipped.dtype == jnp.uint8
    np.testing.assert_array_equal(flipped, (np.arange(10) - 1) % 10)
    y = jnp.array([120, 100, 0], jnp.int8)
    flipped = flip_labels(y, jnp.ones(3, bool), 128, 100)
    np.testing.assert_array_equal(flipped, [92, 72, 100])
    with pytest.raises(ValueError, match="num_classes must be .* fit labels of int8"):
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


def test_attacked_nodes_are_no_list():
    graph = Graph.from_edges(CHAIN)
    for wrong in (jnp.array([0, 0, 2]), jnp.array([0, 2]), jnp.ones(2, bool)):
        with pytest.raises(ValueError, match="attacked must be bool"):
            arrival(graph, wrong)
        with pytest.raises(ValueError, match="attacked must be bool"):
            poison(jnp.ones((3, 2)), wrong, scale(2.0))
    orders: list[Any] = [[0.5], [True, False]]
    for order in orders:
        with pytest.raises(TypeError, match="order must be ints"):
            growing(order, 3)
    np.testing.assert_array_equal(growing([], 3), np.zeros((1, 3)))
    for errors in (np.zeros(0), np.ones((1, 2))):
        with pytest.raises(ValueError, match=r"errors must have shape \(k \+ 1,\)"):
            smallest_attack(errors)


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


def test_messages_of_ints_are_not_moved():
    message = jnp.arange(3)
    for attack in (scale(0.5), nudge(2.7)):
        with pytest.raises(TypeError, match="message must be floats"):
            attack(message, None)
