"""Relaxation by the norm, noisy messages, suspects."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import (
    privacy,
)
from fedjax_core.algorithms.networks import fedrelax
from fedjax_core.networks.defences import (
    check_suspects,
    fedrelax_by_norm,
    noisy_messages,
    norm_residual,
    relax_by_norm,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import copies
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.oracles import (
    quadratic,
    squared_distance,
    zero,
)
from fedjax_core.robust.median import weiszfeld
from fedjax_core.transform import Message

KEY = jax.random.key(0)


median_of = jax.jit(weiszfeld)


relax = jax.jit(relax_by_norm, static_argnums=(3, 5))


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


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf])
def test_a_relaxation_by_norm_ignores_what_is_not_finite(lie):
    graph = Graph.from_edges([(0, 1), (0, 2), (1, 2)])
    losses = squared_distance(jnp.arange(3.0)[:, None] * jnp.ones((1, 2)))
    W = jnp.ones((3, 2))
    received = copies(graph, W)
    bad = (graph.source == 2) & (graph.target == 0)
    lies = jnp.where(bad[:, None] & (jnp.arange(2) == 0)[None], lie, received)
    found = relax(graph, W, lies, losses, 0.3)
    honest = relax(graph, W, received, losses, 0.3)
    without = Graph.from_edges([(0, 1), (1, 2)])
    alone = relax(without, W, copies(without, W), losses, 0.3)
    np.testing.assert_allclose(found[0], alone[0], atol=1e-5)
    np.testing.assert_allclose(found[1:], honest[1:], atol=1e-5)
    residual = jax.jit(norm_residual, static_argnums=3)(graph, found, lies, losses, 0.3)
    np.testing.assert_allclose(residual, 0, atol=1e-3)
