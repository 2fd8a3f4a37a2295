"""Attacks on messages, alone and in rounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_core import (
    ClientProgram,
    LocalWork,
    Packed,
    map_clients,
    plan_round,
    stack,
    with_transform,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.algorithms.networks import fedgd
from fedjax_core.attacks.data import (
    poison_data,
)
from fedjax_core.attacks.messages import (
    add_noise,
    by_mark,
    choose,
    growing,
    high_loss,
    nudge,
    poison,
    poisoned,
    random_update,
    scale,
    smallest_attack,
)
from fedjax_core.networks.attacks import (
    arrival,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.gtvmin import default_rate
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.oracles import (
    least_squares_statistics,
    quadratic,
)
from fedjax_core.networks.theory.oversight import validation_error
from fedjax_core.robust.rules import (
    trimmed_mean,
)
from fedjax_core.transform import Message

KEY = jax.random.key(0)


CHAIN = [[0, 1], [1, 2]]


# Messages.


def test_noise_of_an_attack_keeps_halves():
    noisy = add_noise(10.0)(jnp.ones(40, jnp.bfloat16), KEY)
    assert noisy.dtype == jnp.bfloat16
    assert (noisy != 1).all()


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

    config = fedavg.Config(client_lr=0.1, work=LocalWork(batch_size=6))
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


def test_messages_of_ints_are_not_moved():
    message = jnp.arange(3)
    for attack in (scale(0.5), nudge(2.7)):
        with pytest.raises(TypeError, match="message must be floats"):
            attack(message, None)


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


def test_clients_with_marked_examples_attack():
    x = np.random.default_rng(15).normal(size=(12, 2)).astype(np.float32)
    bad = np.isin(np.arange(6), [1, 4])
    train = Packed({"x": x, "attacker": np.repeat(bad, 2)}, np.arange(0, 13, 2))
    cohort = plan_round(range(6), train, LocalWork(batch_size=2), seed=0, round=0)
    program = by_mark(send_first_rows(), random_update(2.0))

    def sent(program):
        return map_clients(program, (), cohort, KEY, reduce=stack()).update

    honest, got = jax.jit(lambda: (sent(send_first_rows()), sent(program)))()
    for name in honest:
        same = (honest[name] == got[name]).reshape(6, -1).all(1)
        np.testing.assert_array_equal(same, ~bad)
    message = {"a": jnp.full(40_000, 7.0), "b": jnp.ones(3)}
    noise = random_update(2.0)(message, KEY)
    # Of 40,000 draws both are off by more with probability below 1e-5.
    assert abs(noise["a"].mean()) < 0.05
    assert abs(noise["a"].std() - 2) < 0.04
