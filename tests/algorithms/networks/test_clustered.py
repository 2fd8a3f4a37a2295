"""Clusters by vectors and by GTVMin, and Prop. 6.1."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import clustered
from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.oracles import Quadratic, least_squares_statistics, quadratic
from fedjax_core.networks.spectrum import check_connected, extremes

pytestmark = pytest.mark.usefixtures("x64")


def connectivity(A, members):
    """lambda_2 of the induced graph, by NumPy."""
    inner = A[np.ix_(members, members)]
    return np.linalg.eigvalsh(np.diag(inner.sum(1)) - inner)[1]


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


def spread(W):
    return np.sum((W - W.mean(0)) ** 2)


def dense_solution(graph, Q, q, alpha):
    """The solution by NumPy; for many small networks."""
    Q, q, A = np.asarray(Q), np.asarray(q), np.asarray(graph.dense())
    n, d = q.shape
    whole = alpha * np.kron(np.diag(A.sum(1)) - A, np.eye(d))
    for i in range(n):
        whole[i * d : (i + 1) * d, i * d : (i + 1) * d] += Q[i]
    return np.linalg.solve(whole, -q.ravel() / 2).reshape(n, d)


OTHER: Any = "other"


def test_prop_6_1_on_all_connected_sub_clusters():
    # T-C1
    checked = 0
    for seed, alpha in itertools.product(range(6), (0.1, 10.0)):
        graph, label, models, _, _, Q, q, noise = two_clusters(seed)
        W = dense_solution(graph, Q, q, alpha)
        A = np.asarray(graph.dense())
        sizes = np.sum(W**2, axis=1)
        nodes = [np.flatnonzero(label == c) for c in (0, 1)]
        subsets = [
            (c, np.isin(np.arange(len(label)), chosen))
            for c in (0, 1)
            for k in range(2, len(nodes[c]) + 1)
            for chosen in itertools.combinations(nodes[c], k)
        ]
        for c, members in subsets:
            lam2 = connectivity(A, members)
            if lam2 < 1e-9:
                continue
            border = A[members][:, ~members].sum()
            size = np.sum(models[c] ** 2) + sizes[~members].max()
            bound = noise[members].sum() + 2 * alpha * border * size
            assert spread(W[members]) <= bound / (alpha * lam2) + 1e-9
            checked += 1
    assert checked > 200


def test_prop_6_1_as_a_function():
    # T-C1: the bound and its ingredients against the formulas by hand.
    graph, label, models, X, _, Q, q, noise = two_clusters(0)
    members, W = label == 1, dense_solution(graph, Q, q, 3.0)
    A = np.asarray(graph.dense())
    sub = clustered.induced(graph, members)
    np.testing.assert_allclose(sub.dense(), A[np.ix_(members, members)])
    lam2 = connectivity(A, members)
    assert extremes(sub).second == pytest.approx(lam2, abs=1e-9)
    border = A[members][:, ~members].sum()
    size = np.sum(models[1] ** 2) + np.sum(W[~members] ** 2, axis=1).max()
    expected = (noise[members].sum() + 6 * border * size) / (3 * lam2)
    ours = clustered.cluster_deviation_bound(
        graph, members, 3.0, lam2, noise, models[1], W
    )
    assert float(ours) == pytest.approx(expected, rel=1e-9)
    # C = V: no boundary, and with one model everywhere it is Prop. 3.1.
    check_connected(graph)
    errors = np.random.default_rng(8).normal(size=X.shape[:2])
    q = -2 * np.einsum("nmd,nm->nd", X, X @ models[0] + errors) / X.shape[1]
    noise, lam2 = (errors**2).mean(1), extremes(graph).second
    for alpha in (0.1, 1.0, 100.0):
        W = dense_solution(graph, Q, q, alpha)
        bound = clustered.cluster_deviation_bound(
            graph, np.ones(len(X), bool), alpha, lam2, noise, models[0], W
        )
        assert float(bound) == pytest.approx(noise.sum() / (lam2 * alpha))
        assert spread(W) <= bound + 1e-9


def test_the_boundary_of_one_node_is_its_degree():
    # T-C2
    graph = two_clusters(1)[0]
    for i in range(graph.num_nodes):
        members = np.arange(graph.num_nodes) == i
        np.testing.assert_allclose(
            clustered.boundary_weight(graph, members), degree(graph)[i]
        )
    everyone = np.ones(graph.num_nodes, bool)
    assert clustered.boundary_weight(graph, everyone) == 0


@pytest.mark.parametrize(("method", "by"), [("k-means", "fit"), ("gmm", "gradient")])
def test_clustering_recovers_two_groups_and_pools_them(method, by):
    # T-C3
    label = builders.block_labels((6, 9))
    rng = np.random.default_rng(9)
    models = np.array([[3.0, -3.0], [-3.0, 3.0]])
    X = rng.normal(size=(15, 30, 2))
    y = np.einsum("nmd,nd->nm", X, models[label]) + 0.1 * rng.normal(size=(15, 30))
    mask = np.arange(30) < rng.integers(20, 31, 15)[:, None]
    stats = least_squares_statistics(X, y, mask)
    if by == "fit":
        Z = clustered.pool(stats, np.arange(15), 15)
    else:
        losses = quadratic(*stats)
        Z = losses.grad(jnp.tile(jnp.array([[0.5, 0.5]]), (15, 1)))
    found = clustered.cluster_nodes(Z, 2, method=method, seed=3)
    swap = found[0]
    np.testing.assert_array_equal(found ^ swap, label)
    pooled = clustered.pool(stats, found, 2)[jnp.array([swap, 1 - swap])]
    by_size = clustered.pool(stats, label, 2, mask.sum(1))
    for c in (0, 1):
        own = label == c
        Q, q = np.asarray(stats.Q)[own].sum(0), np.asarray(stats.q)[own].sum(0)
        np.testing.assert_allclose(pooled[c], np.linalg.solve(Q, -q / 2), rtol=1e-9)
        rows = mask & own[:, None]
        direct = np.linalg.lstsq(X[rows], y[rows])[0]
        np.testing.assert_allclose(by_size[c], direct, rtol=1e-9)
        np.testing.assert_allclose(by_size[c], models[c], atol=0.1)


def test_singular_and_empty_clusters_have_the_least_norm():
    stats = Quadratic(
        jnp.array([[[1.0, 0], [0, 0]]]), jnp.array([[-4.0, 0]]), jnp.zeros(1)
    )
    np.testing.assert_allclose(
        clustered.pool(stats, np.array([0]), 2), [[2, 0], [0, 0]], atol=1e-12
    )


def test_pooling_keeps_features_of_small_units():
    rng = np.random.default_rng(0)
    with jax.enable_x64(False):
        X = rng.normal(size=(4, 50, 2)).astype(np.float32) * np.array(
            [1000, 0.5], np.float32
        )
        stats = least_squares_statistics(X, 2 * X[..., 1])
        models = clustered.pool(stats, np.array([0, 0, 1, 1]), 2)
        np.testing.assert_allclose(models, [[0, 2]] * 2, atol=1e-3)


def test_clusters_merge_along_alpha():
    # The picture of Section 6.2: from n sets over the planted ones to one.
    rng = np.random.default_rng(10)
    inner = builders.stochastic_block((5, 5), 1.0, 0.0)
    edges = np.r_[np.stack([inner.head, inner.tail], 1), [[0, 5]]]
    weight = np.r_[np.full(20, 1.0), 1e-3]
    graph = Graph.from_edges(edges, weight, 10, np.float64)
    label = builders.block_labels((5, 5))
    q = -2 * (np.array([-5.0, 5])[label] + rng.uniform(-0.5, 0.5, 10))[:, None]
    Q = np.ones((10, 1, 1))
    counts = [
        clustered.n_clusters(graph, jnp.asarray(dense_solution(graph, Q, q, a)), 0.01)
        for a in (0.0, 1e3 * 0.03, 1e7)
    ]
    assert counts == [10, 2, 1]
    zero = graph.with_weight(graph.weight.at[-1].set(0.0))
    assert clustered.n_clusters(zero, jnp.zeros((10, 1)), 0.0) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: clustered.cluster_nodes(np.zeros((3, 1)), 4), "num_clusters"),
        (lambda: clustered.cluster_nodes(np.full((1, 1), np.nan), 1), "finite"),
        (lambda: clustered.cluster_nodes(np.zeros((3, 1)), 2, method=OTHER), "method"),
        (lambda: clustered.n_clusters(builders.chain(2), jnp.ones((2, 1)), -1), "tol"),
        (
            lambda: clustered.cluster_deviation_bound(
                builders.chain(2),
                np.arange(2) == 0,
                1.0,
                0.0,
                np.ones(2),
                1.0,
                np.eye(2),
            ),
            "lam2",
        ),
        (lambda: clustered.induced(builders.chain(2), np.zeros(2, bool)), "num_nodes"),
        (
            lambda: clustered.induced(builders.chain(5), np.arange(2)),
            "members must be bool",
        ),
        (
            lambda: clustered.boundary_weight(builders.chain(2), np.arange(2)),
            "members must be bool",
        ),
        (
            lambda: clustered.cluster_deviation_bound(
                builders.chain(2),
                np.array([True]),
                1.0,
                1.0,
                np.ones(2),
                1.0,
                np.eye(2),
            ),
            r"members must be bool of shape \(2,\)",
        ),
    ],
)
def test_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()
