"""Rows of one table at different nodes."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import horizontal
from fedjax_core.networks import builders
from fedjax_core.networks.gtvmin import closed_form
from fedjax_core.networks.oracles import least_squares_statistics, quadratic

pytestmark = pytest.mark.usefixtures("x64")


def dense_solution(graph, Q, q, alpha):
    """The solution by NumPy; for many small networks."""
    Q, q, A = np.asarray(Q), np.asarray(q), np.asarray(graph.dense())
    n, d = q.shape
    whole = alpha * np.kron(np.diag(A.sum(1)) - A, np.eye(d))
    for i in range(n):
        whole[i * d : (i + 1) * d, i * d : (i + 1) * d] += Q[i]
    return np.linalg.solve(whole, -q.ravel() / 2).reshape(n, d)


def test_horizontal_learning_tends_to_the_pooled_table():
    # T-C4 and Exercise 6.1
    rng = np.random.default_rng(11)
    size = np.array([3, 8, 5, 2])
    mask = np.arange(8) < size[:, None]
    X, y = rng.normal(size=(4, 8, 2)), rng.normal(size=(4, 8))
    X, y = np.where(mask[..., None], X, np.nan), np.where(mask, y, np.nan)
    table = np.linalg.lstsq(X[mask], y[mask])[0]
    graph = builders.chain(4)
    sums = horizontal.sum_of_squares(X, y, mask)
    means = least_squares_statistics(X, y, mask)
    residuals = X[1, : size[1]] @ table - y[1, : size[1]]
    np.testing.assert_allclose(
        quadratic(*sums).value(jnp.tile(jnp.asarray(table)[None], (4, 1)))[1],
        np.sum(residuals**2),
    )
    errors = []
    for alpha in (1e3, 1e4, 1e5):
        W = dense_solution(graph, sums.Q, sums.q, alpha)
        errors.append(np.abs(W - table).max() * alpha)
    # The error is of order 1 / alpha.
    np.testing.assert_allclose(errors, errors[-1], rtol=0.05)
    # The trap: average errors lead elsewhere, unless all sizes agree.
    trap = closed_form(graph, means.Q, means.q, 1e6)
    assert np.abs(np.asarray(trap) - table).max() > 0.01
    X, y = rng.normal(size=(4, 5, 2)), rng.normal(size=(4, 5))
    means = least_squares_statistics(X, y)
    same = dense_solution(graph, means.Q, means.q, 1e7)
    table = np.linalg.lstsq(X.reshape(-1, 2), y.ravel())[0]
    np.testing.assert_allclose(same, np.tile(table, (4, 1)), atol=1e-5)
