"""Consensus ADMM: closed forms, the invariants of its duals, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import admm, builders, oracles
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.iterate import iterate

GRAPH = builders.erdos_renyi(7, 0.5, seed=3)
A = np.asarray(GRAPH.dense(), np.float64)
L = np.diag(A.sum(1)) - A


@pytest.fixture(autouse=True)
def wide(x64):
    """All of it in double precision."""


@pytest.fixture(scope="module")
def nodes():
    """Quadratic losses w'Qw + q'w of seven nodes in three dimensions."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(7, 6, 3))
    return np.einsum("nmd,nme->nde", X, X) / 6, rng.normal(size=(7, 3))


def drive(step, state, rounds, key=None, every=1):
    """The last state and all states after every so many rounds."""
    return jax.jit(
        lambda state, key: iterate(
            step, state, rounds, key=key, record=lambda s: s, every=every
        )
    )(state, key)


def test_the_golden_run_of_two_nodes_halves_the_error_with_every_round():
    graph = builders.chain(2)
    c = jnp.array([[0.0], [2.0]])
    losses = oracles.squared_distance(c)
    start = admm.init(graph, jnp.zeros((2, 1)))
    step = admm.step(graph, 1.0, admm.linearised(losses.grad, 0.5))
    _, states = drive(step, start, 6)
    n = np.arange(1, 7)
    first = 1 - 2.0 ** (1 - n)
    np.testing.assert_allclose(states.params[:, 0, 0], first, atol=1e-15)
    np.testing.assert_allclose(states.params[:, 1, 0], 1, atol=1e-15)
    dual = 2 - 2.0 ** (1 - n)
    np.testing.assert_allclose(states.dual[:, :, 0], np.c_[-dual, dual], atol=1e-15)
    # F1: the exact step is the same run with the penalty in place of the tangent.
    exact = admm.quadratic(admm.spectral(jnp.ones((2, 1, 1)), -2 * c))
    _, same = drive(admm.step(graph, 1.0, exact), start, 6)
    np.testing.assert_allclose(same.params[:, 0, 0], first, atol=1e-15)
    np.testing.assert_allclose(same.params[:, 1, 0], 1, atol=1e-15)


def test_every_primal_is_the_minimum_of_its_augmented_lagrangian(nodes):
    Q, q = map(jnp.asarray, nodes)
    rng = np.random.default_rng(1)
    W, noise, dual, mean = rng.normal(size=(4, 7, 3))
    rho, eta, tau = 0.7, 0.3, rng.uniform(size=7)
    sent = W + noise
    state = admm.State(W, sent, L @ sent, dual)
    losses = oracles.quadratic(Q, q)

    def lagrangian(own, w, toward):
        apart = w[:, None] - (sent[:, None] + sent[None]) / 2
        close = rho * (A * (apart**2).sum(-1)).sum()
        pull = (tau * ((w - mean) ** 2).sum(1)).sum() if toward else 0.0
        return own(w).sum() + (w * dual).sum() + close + pull

    def tangent(w):
        move = w - sent
        return (losses.grad(sent) * move).sum(1) + (move**2).sum(1) / (2 * eta)

    smooth = oracles.smooth(lambda w, of: w @ of[0] @ w + of[1] @ w, (Q, q), steps=3)
    for primal, own in (
        (admm.linearised(losses.grad, eta), tangent),
        (admm.quadratic(admm.spectral(Q, q)), losses.value),
        (admm.proximal(losses), losses.value),
        (admm.proximal(smooth), losses.value),
    ):
        for toward in (None, admm.Toward(tau, mean)):
            new = admm.minimise(GRAPH, rho, primal, state, 0, toward)
            slope = jax.grad(lambda w, own=own, on=toward: lagrangian(own, w, on))(new)
            np.testing.assert_allclose(slope, 0, atol=1e-11)


def test_half_precision_is_solved_in_single_and_stays_what_it_was(nodes):
    Q, q = (jnp.asarray(x, jnp.bfloat16) for x in nodes)
    sent = jnp.zeros_like(q)
    found = admm.quadratic(admm.spectral(Q, q))(sent, sent, jnp.ones_like(q[:, 0]), 0)
    assert found.dtype == jnp.bfloat16
    Q, q = np.asarray(Q, float), np.asarray(q, float)
    exact = np.linalg.solve(2 * Q + np.eye(3), -q[..., None])[..., 0]
    np.testing.assert_allclose(np.asarray(found, float), exact, rtol=2**-8)


def test_duals_sum_to_zero_and_are_the_laplacian_of_all_messages(nodes):
    losses = oracles.quadratic(*nodes)

    def perturb(W, t, key):
        return W + 0.1 * jax.random.normal(key, W.shape, W.dtype)

    step = admm.step(GRAPH, 0.4, admm.linearised(losses.grad, 0.2), perturb)
    start = admm.init(GRAPH, jnp.zeros((7, 3)))
    _, states = drive(step, start, 12, jax.random.key(0))
    np.testing.assert_allclose(states.dual.sum(1), 0, atol=1e-12)
    total = np.cumsum(states.sent, 0)
    np.testing.assert_allclose(states.dual, 0.4 * L @ total, atol=1e-12)


def test_all_primals_reach_the_common_minimum_with_its_gradients_as_duals(nodes):
    Q, q = nodes
    losses = oracles.quadratic(Q, q)
    best = np.linalg.solve(2 * Q.sum(0), -q.sum(0))
    for primal in (
        admm.linearised(losses.grad, 1 / np.linalg.eigvalsh(Q).max()),
        admm.quadratic(admm.spectral(Q, q)),
    ):
        step = admm.step(GRAPH, 1.0, primal)
        last, _ = drive(step, admm.init(GRAPH, jnp.zeros((7, 3))), 2000, every=2000)
        np.testing.assert_allclose(last.params, np.tile(best, (7, 1)), atol=1e-10)
        np.testing.assert_allclose(last.dual, -(2 * Q @ best + q), atol=1e-9)


def test_messages_do_not_pass_masked_edges(nodes):
    label = np.arange(7) % 2
    graph = GRAPH.with_weight(
        (label[np.asarray(GRAPH.head)] == label[np.asarray(GRAPH.tail)]).astype(float)
    )
    losses = oracles.quadratic(*nodes)
    step = admm.step(graph, 1.0, admm.quadratic(admm.spectral(*nodes)))
    last, _ = drive(step, admm.init(graph, jnp.zeros((7, 3))), 3, every=3)
    far = jnp.asarray(np.where(label[:, None] == 1, 5.0, 0.0)) * jnp.ones((7, 3))
    moved, _ = drive(step, admm.init(graph, far), 3, every=3)
    np.testing.assert_array_equal(last.params[label == 0], moved.params[label == 0])
    assert losses.value(moved.params).shape == (7,)


def test_isolated_nodes_go_to_their_own_minimum(nodes):
    Q, q = nodes
    graph = Graph.from_edges(np.array([[0, 1]]), num_nodes=7)
    assert degree(graph)[6] == 0
    step = admm.step(graph, 1.0, admm.quadratic(admm.spectral(Q, q)))
    last, _ = drive(step, admm.init(graph, jnp.zeros((7, 3))), 1)
    np.testing.assert_allclose(
        last.params[6], np.linalg.solve(2 * Q[6], -q[6]), atol=1e-12
    )
