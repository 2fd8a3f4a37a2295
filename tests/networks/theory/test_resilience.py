"""What is left of networks when links and nodes fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.networks.theory.problems import EDGES, GRAPH, KEY, D, N, on

from fedjax_core.algorithms.networks import fedgd
from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph, degree, laplacian
from fedjax_core.networks.operators import step
from fedjax_core.networks.oracles import quadratic, zero
from fedjax_core.networks.theory.resilience import (
    algebraic_connectivity,
    critical_nodes,
    failure_perturbation,
    failures,
    is_connected,
    prune,
    without_nodes,
)

pytestmark = pytest.mark.usefixtures("x64")


# T-T5: resilience.


def test_pruning_never_raises_connectivity():
    rng = np.random.default_rng(3)
    weight = jnp.asarray(rng.uniform(0.5, 2, (100, len(EDGES))))
    links = jnp.asarray(rng.random((100, len(EDGES))) < 0.7)
    lam2 = jax.jit(jax.vmap(lambda w: algebraic_connectivity(on(w))))
    whole = lam2(weight)
    left = lam2(jnp.where(links, weight, 0))
    assert (left <= whole + 1e-9).all()
    connected = jax.jit(jax.vmap(lambda w: is_connected(on(w))))
    np.testing.assert_array_equal(connected(jnp.where(links, weight, 0)), left > 1e-9)
    np.testing.assert_allclose(
        prune(on(weight[0]), links[0]).weight, weight[0] * links[0]
    )
    L = np.asarray(laplacian(on(weight[0]), jnp.eye(N)))
    np.testing.assert_allclose(whole[0], np.linalg.eigvalsh(L)[1], rtol=1e-9)


def test_a_star_has_a_single_point_of_failure():
    star = Graph.from_edges([[0, i] for i in range(1, 5)], dtype=np.float64)
    np.testing.assert_array_equal(critical_nodes(star), np.arange(5) == 0)
    np.testing.assert_allclose(algebraic_connectivity(star), 1, rtol=1e-9)
    without = jnp.arange(5) != 0
    left = without_nodes(star, without)
    assert (degree(left) == 0).all()
    assert not is_connected(star, without)
    np.testing.assert_allclose(algebraic_connectivity(star, without), 0, atol=1e-9)
    # Without a leaf the others are a smaller star, of eigenvalues 0, 1, 1, 4.
    others = jnp.arange(5) != 4
    np.testing.assert_allclose(algebraic_connectivity(star, others), 1, rtol=1e-9)
    np.testing.assert_array_equal(critical_nodes(GRAPH), np.zeros(N, bool))
    bridge = Graph.from_edges([[0, 1], [1, 2]])
    np.testing.assert_array_equal(critical_nodes(bridge), [False, True, False])
    alone = jnp.arange(5) == 2
    assert is_connected(star, alone)
    assert algebraic_connectivity(star, alone) == 0
    assert not is_connected(star, jnp.zeros(5, bool))


def test_random_failures():
    ring = Graph.from_edges([[i, (i + 1) % 6] for i in range(6)], dtype=np.float64)
    sample = jax.jit(
        lambda links, nodes: failures(
            KEY, ring, link_failure=links, node_failure=nodes, samples=400
        )
    )
    none = sample(0.0, 0.0)
    np.testing.assert_allclose(none.lam2, 1, rtol=1e-9)
    assert none.connected.all()
    assert not sample(1.0, 0.0).connected.any()
    some = sample(0.2, 0.0)
    np.testing.assert_array_equal(some.connected, some.lam2 > 1e-9)
    # A ring stays connected with at most one lost link: 0.8^6 + 6 0.2 0.8^5 = 0.655.
    # Of 400 samples the share is off by 0.12 with probability 5e-7.
    assert abs(some.connected.mean() - 0.655) < 0.12
    assert 0 < sample(0.0, 0.2).connected.mean() < 1
    with pytest.raises(ValueError, match=r"node_failure must be in \[0, 1\]"):
        failures(KEY, ring, node_failure=1.5)
    with pytest.raises(ValueError, match="samples must be >= 1"):
        failures(KEY, ring, samples=0)


def test_lost_links_are_a_perturbation_of_gradient_descent():
    rng = np.random.default_rng(4)
    losses = quadratic(np.eye(D)[None].repeat(N, 0), rng.normal(size=(N, D)))
    graph = on(jnp.asarray(rng.uniform(0.5, 2, len(EDGES))))
    links = jnp.arange(len(EDGES)) % 3 > 0
    W = jnp.asarray(rng.normal(size=(N, D)))
    alpha, eta = 0.6, 0.07
    whole = step(fedgd.make(graph, losses, alpha=alpha, eta=eta))(W, 0, None)
    left = step(fedgd.make(prune(graph, links), losses, alpha=alpha, eta=eta))(
        W, 0, None
    )
    error = failure_perturbation(graph, links, W, alpha, eta)
    np.testing.assert_allclose(whole + error, left, rtol=1e-9)


def test_a_server_is_a_single_point_of_failure():
    # A centre without data that fails leaves nodes that learn alone.
    star = Graph.from_edges([[0, i] for i in range(1, 4)], dtype=np.float64)
    left = without_nodes(star, jnp.arange(4) > 0)
    W = jnp.arange(4.0)[:, None]
    operator = fedgd.make(left, zero(), alpha=1.0, eta=0.1)
    np.testing.assert_array_equal(step(operator)(W, 0, None), W)


def test_masks_of_another_network_are_refused():
    star = Graph.from_edges([[0, i] for i in range(1, 4)])
    for links in (jnp.ones(1, bool), jnp.ones(5, bool), jnp.arange(3)):
        with pytest.raises(ValueError, match=r"links must be bool of shape \(3,\)"):
            prune(star, links)
        with pytest.raises(ValueError, match=r"links must be bool of shape \(3,\)"):
            failure_perturbation(star, links, jnp.ones((4, 1)), 1.0, 0.1)
    for call in (without_nodes, is_connected, algebraic_connectivity):
        with pytest.raises(ValueError, match=r"alive must be bool of shape \(4,\)"):
            call(star, jnp.ones(2, bool))


def test_a_network_that_fell_apart_has_connectivity_zero():
    # Rounding alone would give up to 1e-6 in float32, in every third sample.
    with jax.enable_x64(False):
        found = failures(KEY, builders.complete(8), link_failure=0.75, samples=200)
    apart = ~np.asarray(found.connected)
    assert 20 < apart.sum() < 180
    assert (np.asarray(found.lam2)[apart] == 0).all()
    assert (np.asarray(found.lam2)[~apart] > 1e-3).all()
