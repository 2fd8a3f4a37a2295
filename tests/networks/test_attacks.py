"""Poisoned links, spies, and how far an attack reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import fedgd, fedrelax
from fedjax_core.attacks.data import (
    poison_data,
)
from fedjax_core.attacks.messages import (
    nudge,
    scale,
)
from fedjax_core.networks.attacks import (
    arrival,
    attach_spy,
    copying_rate,
    poison_channel,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.operators import step
from fedjax_core.networks.oracles import least_squares_statistics, quadratic

CHAIN = [[0, 1], [1, 2]]


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


def test_poisoned_links_reach_only_their_receiver():
    graph = Graph.from_edges(CHAIN)
    zeros = jnp.zeros((3, 1))
    losses = quadratic(jnp.ones((3, 1, 1)), zeros)
    link = np.asarray((graph.source == 1) & (graph.target == 2))
    channel = poison_channel(graph, nudge(np.full(1, 8.0)), links=link)
    W = jax.jit(step(fedrelax.make(graph, losses, alpha=1.0), channel))(zeros, 0, None)
    # w^2 + (w - 8)^2 is least at 4.
    np.testing.assert_allclose(W[:, 0], [0, 0, 4], rtol=1e-6)
    both = poison_channel(
        graph, nudge(np.full(1, 8.0)), links=link, nodes=np.arange(3) == 2
    )
    W = jax.jit(step(fedrelax.make(graph, losses, alpha=1.0), both))(zeros, 0, None)
    # Node 1 hears 0 and 8: least at 8/3.
    np.testing.assert_allclose(W[:, 0], [0, 8 / 3, 4], rtol=1e-6)
    for bad in ({}, {"nodes": np.zeros(3)}, {"links": np.zeros(3, bool)}):
        with pytest.raises(ValueError, match=r"nodes|links"):
            poison_channel(graph, scale(2.0), **bad)


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
