"""Nodes without labels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import semi_supervised
from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.spectrum import components

pytestmark = pytest.mark.usefixtures("x64")


def two_clusters(seed, sizes=(5, 4), m=6, d=2, noise=0.3):
    """A clustered network and linear data of it, in NumPy."""
    rng = np.random.default_rng(seed)
    graph = weighted(builders.stochastic_block(sizes, 0.8, 0.2, seed), rng)
    label = builders.block_labels(sizes)
    models = rng.normal(size=(2, d)) * 3
    X = rng.normal(size=(len(label), m, d))
    errors = noise * rng.normal(size=X.shape[:2])
    y = np.einsum("nmd,nd->nm", X, models[label]) + errors
    Q = np.einsum("nmd,nme->nde", X, X) / m
    q = -2 * np.einsum("nmd,nm->nd", X, y) / m
    return graph, label, models, X, y, Q, q, (errors**2).mean(1)


def weighted(graph, rng):
    weight = jnp.asarray(rng.uniform(0.2, 2, graph.num_edges))
    return graph.with_weight(weight)


def dense_solution(graph, Q, q, alpha):
    """The solution by NumPy; for many small networks."""
    Q, q, A = np.asarray(Q), np.asarray(q), np.asarray(graph.dense())
    n, d = q.shape
    whole = alpha * np.kron(np.diag(A.sum(1)) - A, np.eye(d))
    for i in range(n):
        whole[i * d : (i + 1) * d, i * d : (i + 1) * d] += Q[i]
    return np.linalg.solve(whole, -q.ravel() / 2).reshape(n, d)


def test_unlabelled_nodes_are_harmonic():
    # T-C5
    graph, _, _, X, y, *_ = two_clusters(12)
    labelled = np.arange(len(y)) % 3 == 0
    semi_supervised.check_labels(graph, labelled)
    y = np.where(labelled[:, None], y, 7.0)
    stats = semi_supervised.statistics_without_labels(
        least_squares_statistics(X, y), labelled
    )
    W = jnp.asarray(dense_solution(graph, stats.Q, stats.q, 0.7))
    residual = semi_supervised.harmonic_residual(graph, W, labelled)
    np.testing.assert_allclose(residual, 0, atol=1e-9)
    A = np.asarray(graph.dense())
    mean = A @ np.asarray(W) / A.sum(1)[:, None]
    np.testing.assert_allclose(np.asarray(W)[~labelled], mean[~labelled], atol=1e-9)
    moved = semi_supervised.harmonic_residual(graph, W.at[1].add(1.0), labelled)
    assert float(moved[1]) == pytest.approx(np.sqrt(2))
    # The same through losses whose unlabelled rows are unknown.
    unknown = quadratic(
        jnp.where(labelled[:, None, None], stats.Q, jnp.nan), stats.q, stats.c
    )
    losses = semi_supervised.without_labels(unknown, labelled)
    known = quadratic(*stats)
    ours, theirs = jax.jit(
        lambda W: [(f.value(W), f.grad(W), f.prox(W, 0.5)) for f in (losses, known)]
    )(W)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    np.testing.assert_array_equal(np.asarray(ours[2])[~labelled], W[~labelled])


def test_refuses_components_without_labels():
    graph = Graph.from_edges(np.array([(0, 1), (2, 3)]))
    with pytest.raises(ValueError, match="that of node 2"):
        semi_supervised.check_labels(graph, np.arange(4) == 0)
    with pytest.raises(ValueError, match="shape"):
        semi_supervised.check_labels(graph, np.ones(2, bool))
    assert components(graph).max() == 1


def test_masks_are_no_lists_of_nodes():
    graph = builders.chain(3)
    losses = quadratic(np.ones((3, 1, 1), np.float32), np.ones((3, 1), np.float32))
    words = "labelled must be bool"
    lists: list[Any] = [[0, 1, 2], [0, 2]]
    for wrong in lists:
        with pytest.raises(ValueError, match=words):
            semi_supervised.without_labels(losses, wrong)
        with pytest.raises(ValueError, match=words):
            semi_supervised.check_labels(graph, wrong)
        with pytest.raises(ValueError, match=words):
            semi_supervised.harmonic_residual(graph, jnp.ones((3, 1)), wrong)
    short = semi_supervised.without_labels(losses, np.array([True]))
    for call in (short.value, short.grad, lambda W: short.prox(W, 1.0)):
        with pytest.raises(ValueError, match=words):
            call(jnp.ones((3, 1)))
