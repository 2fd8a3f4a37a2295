"""Average consensus, and how well two rounds can estimate a mean (Exercise 3.13)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import consensus, fedgd
from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph, laplacian
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.operators import step
from fedjax_core.networks.oracles import squared_distance
from fedjax_core.networks.spectrum import extremes

pytestmark = pytest.mark.usefixtures("x64")


def weighted(graph, seed):
    weight = np.random.default_rng(seed).uniform(0.5, 2, graph.num_edges)
    return graph.with_weight(jnp.asarray(weight))


NETWORKS = {
    "chain": builders.chain(5),
    "star": weighted(builders.star(40), 0),
    "cycle": builders.cycle(6),
    "complete": builders.complete(4),
    "random": weighted(builders.erdos_renyi(30, 0.3, seed=1), 2),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_contracts_to_the_mean_by_the_factor(name):
    # T-O10
    graph = NETWORKS[name]
    lam2, lamn = extremes(graph)
    y = np.random.default_rng(3).normal(size=(graph.num_nodes, 2))
    run = jax.jit(
        lambda eta: consensus.average(
            graph, jnp.asarray(y), 30, eta, record=lambda u: u
        )[1]
    )
    for share in (0.3, 0.9, None):
        eta = 2 / (lam2 + lamn) if share is None else share * 2 / lamn
        factor = float(consensus.factor(eta, lam2, lamn))
        path = np.r_[y[None], run(eta)]
        np.testing.assert_allclose(
            path.mean(1), np.tile(y.mean(0), (31, 1)), atol=1e-12
        )
        errors = np.linalg.norm(path - y.mean(0), axis=(1, 2))
        assert (errors[1:] <= factor * errors[:-1] + 1e-9).all()
    best = (lamn - lam2) / (lamn + lam2)
    assert factor == pytest.approx(best)
    # No other rate is better, and along an extreme eigenvector the factor is met.
    etas = np.linspace(0.01, 1.99, 60) / lamn
    assert (np.asarray(consensus.factor(etas, lam2, lamn)) >= best - 1e-9).all()
    A = np.asarray(graph.dense(), np.float64)
    L = np.diag(A.sum(1)) - A
    vector = np.linalg.eigh(L)[1][:, 1]
    new, _ = consensus.average(graph, jnp.asarray(vector), 1, etas[5])
    np.testing.assert_allclose(new, (1 - etas[5] * lam2) * vector, atol=1e-9)


def test_every_component_finds_its_own_mean():
    # T-O10
    graph = Graph.from_edges(np.array([(0, 1), (1, 2), (3, 4)]), 1.0, 6, np.float64)
    y = jnp.array([1.0, 2, 6, 10, 20, -7])
    u, _ = consensus.average(graph, y, 400)
    np.testing.assert_allclose(u, [3, 3, 3, 15, 15, -7], atol=1e-9)


def test_is_no_contraction_on_the_constants():
    u, _ = consensus.average(NETWORKS["chain"], jnp.full(5, 4.0), 3)
    np.testing.assert_array_equal(u, 4)


def test_float32_and_trees():
    graph = builders.chain(3)
    y = {"a": jnp.array([0.0, 0, 3], jnp.float32), "b": jnp.ones((3, 2), jnp.float32)}
    u, history = consensus.average(graph, y, 200)
    assert history is None
    assert u["a"].dtype == jnp.float32
    np.testing.assert_allclose(u["a"], 1, atol=1e-5)


def test_refuses_rates_that_diverge():
    lamn = extremes(NETWORKS["cycle"]).largest
    consensus.check_rate(0.49, lamn)
    for eta in (0.501, 0.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="eta must be > 0 and below"):
            consensus.check_rate(eta, lamn)
    with pytest.raises(ValueError, match="eta must be > 0"):
        consensus.average(NETWORKS["cycle"], jnp.ones(6), 1, eta=-1.0)


def two_hop_tree():
    """Node 0 with 3 neighbours of degree 3: 1 + 3 + 6 nodes within two hops.

    The outer nodes have degree 3 too, hence more leaves, which two rounds can't reach.
    """
    edges = [(0, i) for i in (1, 2, 3)]
    edges += [(i, 2 * i + 2 + k) for i in (1, 2, 3) for k in (0, 1)]
    edges += [(j, 2 * j + 2 + k) for j in range(4, 10) for k in (0, 1)]
    return Graph.from_edges(np.array(edges), 1.0, None, np.float64)


def test_exercise_3_13_from_zero():
    # Alg. 4 from 0 hears of 4 values only, so that the best variance is 1/4.
    graph = two_hop_tree()
    n = graph.num_nodes
    assert n == 22

    def weights(eta, alpha):
        """How much every y counts in node 0's estimate after two rounds."""

        def estimate(y):
            method = fedgd.make(graph, squared_distance(y), alpha=alpha, eta=eta)
            return iterate(step(method), jnp.zeros((n, 1)), 2)[0][0, 0]

        return np.asarray(jax.jacobian(estimate)(jnp.zeros((n, 1))))[:, 0]

    best = weights(0.5, 0.25)
    np.testing.assert_allclose(best[:4], 1 / 4, atol=1e-12)
    assert np.sum(best**2) == pytest.approx(1 / 4, rel=1e-9)
    for other in (best, weights(0.2, 0.7)):
        np.testing.assert_allclose(other[4:], 0, atol=1e-12)


def test_exercise_3_13_by_consensus():
    # From w_i = y_i without losses: (I - c L)^2 y has variance 0.128336 at best.
    graph = two_hop_tree()
    unit = np.eye(graph.num_nodes)
    L = np.asarray(laplacian(graph, jnp.asarray(unit)))
    c = np.linspace(0.2, 0.35, 150_001)
    once, twice = L[0], (L @ L)[0]
    # The row of (I - c L)^2, whose squares are a polynomial in c.
    terms = np.polynomial.polynomial.polyval(
        c,
        [
            1,
            -4 * once[0],
            2 * twice[0] + 4 * once @ once,
            -4 * once @ twice,
            twice @ twice,
        ],
    )
    assert c[np.argmin(terms)] == pytest.approx(0.272293, abs=2e-6)
    assert terms.min() == pytest.approx(0.128336, abs=5e-7)
    u, _ = consensus.average(graph, jnp.asarray(unit), 2, 0.272293)
    variance = float(jnp.sum(u[0] ** 2))
    assert variance == pytest.approx(0.128336, abs=5e-7)
    # No method can do better than the mean of the ten values in reach.
    assert np.count_nonzero(u[0]) == 10
    assert variance > 1 / 10
