"""Columns of one table at different nodes."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import few_shot, online_gd, vertical
from fedjax_core.networks import builders
from fedjax_core.networks.oracles import quadratic

pytestmark = pytest.mark.usefixtures("x64")


def table_by_columns(seed, m=8, owner=(0, 1, 1, 2, 0), n=3):
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(m, len(owner))), rng.normal(size=m)
    return X, y, vertical.split_columns(X, owner, n)


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


def test_vertical_descent_is_descent_on_the_whole_table():
    # T-C6, first construction
    X, y, columns = table_by_columns(13)
    m = len(y)
    eta = 0.9 * m / np.linalg.eigvalsh(X.T @ X)[-1]
    W, path = vertical.vertical_gd(columns, y, 50, eta, record=lambda W: W)
    w = np.zeros(5)
    for t in range(50):
        w = w + 2 * eta / m * X.T @ (y - X @ w)
        np.testing.assert_allclose(vertical.assemble(columns, path[t]), w, rtol=1e-9)
    np.testing.assert_array_equal(W[columns.column < 0], 0)


@pytest.mark.parametrize(("alpha", "b"), [(1.0, 1.0), (1e4, 1.0), (1.0, 1e4)])
def test_vertical_learning_by_gtvmin_is_least_squares_for_every_alpha(alpha, b):
    # T-C6, second construction, Exercise 6.2
    for seed, graph, label_node in (
        (14, builders.chain(3), 0),
        (15, weighted(builders.star(3), np.random.default_rng(15)), 2),
    ):
        X, y, columns = table_by_columns(seed)
        stats = vertical.lifted_statistics(columns, y, label_node, b)
        Z = dense_solution(graph, stats.Q, stats.q, alpha)
        w = vertical.assemble(columns, vertical.read_out(columns, Z))
        expected = np.linalg.lstsq(X, y)[0]
        np.testing.assert_allclose(w, expected, atol=1e-7)


def test_the_lifted_loss_is_what_it_says():
    X, y, columns = table_by_columns(16, m=4)
    stats = vertical.lifted_statistics(columns, y, 1, 2.0)
    Z = np.random.default_rng(17).normal(size=(3, 4, 3))
    value = quadratic(*stats).value(jnp.asarray(Z.reshape(3, 12)))
    for i in range(3):
        own = X[:, np.array([0, 1, 1, 2, 0]) == i]
        off = Z[i, :, i] - own @ np.linalg.pinv(own) @ Z[i, :, i]
        expected = 2.0 / 4 * off @ off
        if i == 1:
            expected += np.sum((y - Z[i].sum(1)) ** 2) / 4
        assert float(value[i]) == pytest.approx(expected)


def test_tables_of_ints_are_floats():
    X, y = np.array([[1, 2], [3, 4]]), np.array([1, 2])
    columns = vertical.split_columns(X, np.array([0, 1]), 2)
    assert columns.X.dtype == jnp.float64
    whole = online_gd.online_gd(X, y, 0.01)
    np.testing.assert_allclose(whole, online_gd.online_gd(X * 1.0, y * 1.0, 0.01))
    stats = few_shot.one_vs_rest(X, np.array([0, 1]), 2)
    np.testing.assert_allclose(stats.c, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: vertical.split_columns(np.ones((2, 2)), np.array([0, 2]), 2), "owner"),
        (lambda: vertical.split_columns(np.ones((2, 2)), np.array([0]), 2), "owner"),
        (
            lambda: vertical.vertical_gd(table_by_columns(0)[2], np.ones(3), 1, 0.1),
            "y must have shape",
        ),
        (
            lambda: vertical.lifted_statistics(table_by_columns(0)[2], np.ones(8), 3),
            "label_node",
        ),
        (
            lambda: vertical.lifted_statistics(
                table_by_columns(0)[2], np.ones(8), 0, b=0.0
            ),
            "b must be",
        ),
    ],
)
def test_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_owners_of_columns_are_ints():
    with pytest.raises(TypeError, match="owner must be ints"):
        vertical.split_columns(np.ones((2, 3)), np.array([0, 0.5, 1]), 2)
