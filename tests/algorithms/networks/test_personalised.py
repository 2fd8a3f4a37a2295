"""Blocks of parameters that are shared or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import personalised
from fedjax_core.networks import builders
from fedjax_core.networks.gtvmin import closed_form
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.oracles import least_squares_statistics, smooth

pytestmark = pytest.mark.usefixtures("x64")


def blocks(seed, n=5, m=10):
    """Linear losses on trees of a shared and an own block, and their statistics."""
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(n, m, 3)), rng.normal(size=(n, m))

    def loss(w, example):
        x, label = example
        return jnp.mean((label - x @ jnp.append(w["own"], w["shared"])) ** 2)

    losses = smooth(loss, (jnp.asarray(X), jnp.asarray(y)))
    start = {"own": jnp.zeros(n), "shared": jnp.zeros((n, 2))}
    return losses, least_squares_statistics(X, y), start, X, y


def flat(W):
    return np.c_[np.asarray(W["own"]), np.asarray(W["shared"])]


def test_a_block_of_strength_zero_is_fitted_locally():
    # T-C7
    losses, stats, start, X, y = blocks(18)
    graph = builders.cycle(5)
    alpha = {"own": 0.0, "shared": 2.0}
    step = personalised.personalised_gd(graph, losses, alpha, 0.05)
    W, values = iterate(
        step,
        start,
        3000,
        record=lambda W: personalised.objective(graph, losses, alpha, W),
    )
    assert np.diff(np.asarray(values, np.float64)).max() <= 1e-12
    for i in range(5):
        rest = y[i] - X[i, :, 1:] @ np.asarray(W["shared"][i])
        own = X[i, :, 0] @ rest / (X[i, :, 0] @ X[i, :, 0])
        assert float(W["own"][i]) == pytest.approx(own, abs=1e-8)
    # The solution by one dense system with a strength for every coordinate.
    A = np.asarray(graph.dense())
    whole = np.kron(np.diag(A.sum(1)) - A, np.diag([0.0, 2, 2]))
    for i in range(5):
        whole[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] += np.asarray(stats.Q[i])
    expected = np.linalg.solve(whole, -np.asarray(stats.q).ravel() / 2)
    np.testing.assert_allclose(flat(W).ravel(), expected, atol=1e-8)


def test_equal_strengths_are_plain_gtvmin():
    # T-C7
    losses, stats, start, *_ = blocks(19)
    graph = builders.chain(5)
    expected = closed_form(graph, stats.Q, stats.q, 0.5)
    by_coordinate = {"own": 0.5, "shared": jnp.full(2, 0.5)}
    for alpha in (0.5, by_coordinate):
        step = personalised.personalised_gd(graph, losses, alpha, 0.1)
        W, _ = iterate(step, start, 2000)
        np.testing.assert_allclose(flat(W), expected, atol=1e-8)


def test_a_large_strength_makes_a_block_common():
    losses, _, start, *_ = blocks(20)
    graph = builders.complete(5)
    alpha = {"own": 0.0, "shared": 50.0}
    step = personalised.personalised_gd(graph, losses, alpha, 1e-3)
    W, _ = iterate(step, start, 8000)
    shared, own = np.asarray(W["shared"]), np.asarray(W["own"])
    assert np.ptp(shared, axis=0).max() < 0.02
    assert np.ptp(own) > 0.1


def test_shares_the_hidden_layer_of_a_small_network():
    # Leaves of any rank and any loss: only the hidden layer is coupled.
    rng = np.random.default_rng(21)
    x = jnp.asarray(rng.normal(size=(3, 8, 2)))
    y = jnp.asarray(rng.normal(size=(3, 8)))

    def loss(w, example):
        x, y = example
        return jnp.mean((y - jnp.tanh(x @ w["hidden"]) @ w["output"]) ** 2)

    losses = smooth(loss, (x, y))
    start = {
        "hidden": jnp.asarray(rng.normal(size=(3, 2, 4))),
        "output": jnp.asarray(rng.normal(size=(3, 4))),
    }
    graph = builders.complete(3)
    alpha = {"hidden": 5.0, "output": 0.0}
    step = personalised.personalised_gd(graph, losses, alpha, 0.02)
    ours = jax.jit(step)(start, 0, None)
    slope = jax.jit(
        jax.grad(lambda W: personalised.objective(graph, losses, alpha, W))
    )(start)
    for name in start:
        np.testing.assert_allclose(
            ours[name], start[name] - 0.02 * slope[name], atol=1e-9
        )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: personalised.personalised_gd(
                builders.chain(2), blocks(0)[0], {"own": -1.0, "shared": 0.0}, 0.1
            ),
            r"alpha\['own'\]",
        ),
    ],
)
def test_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()
