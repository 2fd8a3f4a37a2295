"""Networks of clusters: what nodes hear, node by node, and how far off they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import builders, labelled, spectrum

GRAPH = builders.random_connected(9, 3, seed=2)
A = np.asarray(GRAPH.dense())
CLUSTER = np.array([0, 1, 2, 0, 1, 2, 0, 0, 3])  # nobody is in cluster 4


def test_only_edges_inside_clusters_are_left():
    left = jax.jit(lambda c: labelled.inside(GRAPH, c))(CLUSTER)
    np.testing.assert_array_equal(left.dense(), A * (CLUSTER[:, None] == CLUSTER))
    assert spectrum.components(left).max() + 1 > 4  # clusters fall apart
    whole = labelled.inside(GRAPH, 0 * CLUSTER)
    np.testing.assert_array_equal(whole.dense(), A)


def test_others_are_means_of_means_of_the_clusters_that_are_heard():
    W = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    mean, heard = labelled.others(GRAPH, CLUSTER, 5, jnp.asarray(W))
    for k in range(9):
        means = []
        for r in set(CLUSTER) - {CLUSTER[k]}:
            of = [W[j] for j in range(9) if A[k, j] and CLUSTER[j] == r]
            means += [np.mean(of, 0)] if of else []
        assert heard[k] == bool(means)
        wanted = np.mean(means, 0) if means else np.zeros(2)
        np.testing.assert_allclose(mean[k], wanted, atol=1e-6)
    mean, heard = labelled.others(GRAPH, 0 * CLUSTER, 1, jnp.asarray(W))
    assert not heard.any()
    np.testing.assert_array_equal(mean, 0)


def test_errors_are_those_of_the_rows_that_exist():
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4))
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    W, truth = rng.normal(size=(2, 2, 3))
    rows: Any = (X, y, mask)
    nodes = labelled.Nodes(jnp.arange(2), rows, rows, rows, jnp.asarray(truth))
    found = labelled.errors(nodes, jnp.asarray(W))
    apart, norm = ((W - truth) ** 2).sum(1), np.linalg.norm(truth, axis=1)
    np.testing.assert_allclose(found["deviation"], (apart / norm**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(
        found["printed_deviation"], (apart / norm).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(found["deviation_of_node"], apart / norm**2, rtol=1e-5)
    mse = [((X[0] @ W[0] - y[0]) ** 2).mean(), ((X[1] @ W[1] - y[1])[:2] ** 2).mean()]
    np.testing.assert_allclose(found["test_mse"], np.mean(mse), rtol=1e-5)


def test_a_strength_is_shared_by_those_of_a_label_and_by_nobody_else():
    shares = jax.jit(lambda label: labelled.shares(6.0, 3, label))
    np.testing.assert_allclose(shares(jnp.array([0, 2, 0, 0])), [2, 6, 2, 2])
    np.testing.assert_array_equal(
        jnp.isnan(shares(jnp.array([0, 2, 3, -1]))), [0, 0, 1, 1]
    )


def test_what_is_no_network_of_clusters_is_refused():
    X, y = np.ones((2, 4, 3)), np.ones((2, 4))
    rows: Any = (X, y, y > 0)
    none: Any = (X, y, np.array([[True] * 4, [False] * 4]))
    for cluster, valid, match in (
        ([0, 2], rows, r"cluster must be in 0..1, got 2 for node 1"),
        ([-1, 0], rows, "got -1 for node 0"),
        ([0, 1], none, "got none for node 1"),
    ):
        nodes = labelled.Nodes(jnp.array(cluster), rows, valid, rows, jnp.ones((2, 3)))
        with pytest.raises(ValueError, match=match):
            labelled.checked(2, nodes)
