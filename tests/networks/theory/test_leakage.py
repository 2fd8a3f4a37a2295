"""How far the solution moves with a label, by finite differences."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.spectrum import laplacian_matrix
from fedjax_core.networks.theory import leakage


def solve(adjacency, X, y, mask, alpha):
    """GTVMin of the chain of means of squared errors, in NumPy."""
    n, _, d = X.shape
    m = mask.sum(1)
    Q = alpha * np.kron(np.diag(adjacency.sum(1)) - adjacency, np.eye(d))
    b = np.zeros((n, d))
    for i in range(n):
        Xi, yi = X[i][mask[i]], y[i][mask[i]]
        Q[i * d : (i + 1) * d, i * d : (i + 1) * d] += Xi.T @ Xi / m[i]
        b[i] = Xi.T @ yi / m[i]
    return np.linalg.solve(Q, b.ravel()).reshape(n, d), np.linalg.eigvalsh(Q)[0]


# T-P1: sensitivity.


def test_sensitivity_of_the_chain_of_three(x64):
    graph = Graph.from_edges(np.array([[0, 1], [1, 2]]), dtype=np.float64)
    exact = leakage.label_sensitivity(graph, jnp.ones((3, 1, 1)), 1.0)
    expected = np.sqrt([[30], [24], [30]]) / 8
    np.testing.assert_allclose(exact, expected, rtol=1e-12)
    smallest = leakage.check_regular(graph, jnp.ones((3, 1, 1)), 1.0)
    assert smallest == pytest.approx(1, rel=1e-12)


def test_sensitivity_is_the_finite_difference(x64):
    rng = np.random.default_rng(0)
    for _ in range(20):
        n, m, d = 4, 3, 2
        upper = np.triu(rng.random((n, n)) + 0.1, 1)
        adjacency = upper + upper.T
        X, y = rng.standard_normal((n, m, d)), rng.standard_normal((n, m))
        mask = np.ones((n, m), bool)
        mask[0, 2] = mask[2, 1:] = False
        alpha = rng.uniform(0.1, 3)
        graph = Graph.from_dense(adjacency)
        exact = leakage.label_sensitivity(graph, jnp.asarray(X), alpha, mask)
        W, smallest = solve(adjacency, X, y, mask, alpha)
        bound = leakage.label_sensitivity_bound(jnp.asarray(X), smallest, mask)
        assert leakage.check_regular(graph, X, alpha, mask) == pytest.approx(smallest)
        assert np.all(np.asarray(exact) <= np.asarray(bound) + 1e-9)
        for i, r in np.ndindex(n, m):
            step = rng.uniform(0.5, 2)
            moved = y.copy()
            moved[i, r] += step
            other, _ = solve(adjacency, X, moved, mask, alpha)
            expected = np.linalg.norm(other - W) / step
            np.testing.assert_allclose(exact[i, r], expected, rtol=1e-9, atol=1e-12)


def test_sensitivity_is_traced_in_alpha_and_float32():
    graph = Graph.from_edges(np.array([[0, 1], [1, 2]]))
    sweep = jax.jit(
        jax.vmap(lambda a: leakage.label_sensitivity(graph, jnp.ones((3, 1, 1)), a))
    )
    out = sweep(jnp.array([1.0, 1e4]))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out[0, :, 0], np.sqrt([30, 24, 30]) / 8, rtol=1e-5)
    np.testing.assert_allclose(out[1], 1 / math.sqrt(3), rtol=1e-2)  # consensus


def test_a_singular_problem_is_refused():
    graph = Graph.from_edges(np.array([[0, 1]]), num_nodes=3)
    X = jnp.zeros((3, 1, 1)).at[0].set(1)
    with pytest.raises(ValueError, match=r"singular Q.*alpha = 1\.0"):
        leakage.check_regular(graph, X, 1.0)


@pytest.mark.parametrize("alpha", [1e4, 1e6, 1e9])
def test_large_alpha_is_consensus_in_float32(alpha):
    graph = builders.chain(10)
    X = np.ones((10, 1, 1), np.float32)
    assert leakage.check_regular(graph, X, alpha) == pytest.approx(1, rel=1e-5)
    got = leakage.label_sensitivity(graph, X, alpha)
    values, V = np.linalg.eigh(np.asarray(laplacian_matrix(graph), np.float64))
    inverse = V / (1 + alpha * np.maximum(values, 0)) @ V.T
    np.testing.assert_allclose(got[:, 0], np.linalg.norm(inverse, axis=0), rtol=1e-5)


def test_sensitivity_of_a_singular_problem_is_not_a_number():
    rng = np.random.default_rng(0)
    graph = Graph.from_edges(np.zeros((0, 2), int), num_nodes=3)
    mask = np.array([[True, True], [True, True], [True, False]])
    out = leakage.label_sensitivity(graph, rng.normal(size=(3, 2, 3)), 1.0, mask)
    np.testing.assert_array_equal(out, np.where(mask, np.nan, 0))
