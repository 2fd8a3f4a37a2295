"""Guesses as penalty and as data; copies without an attribute."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.networks.theory.problems import (
    D,
    M,
    N,
    by_node,
    guesses_setting,
    ragged_setting,
)

from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.theory.explainability import (
    add_flipped,
    augment_by_guesses,
    explain,
    explainability,
    replace_by_shifted,
)
from fedjax_core.networks.theory.oversight import (
    validation_error,
)

pytestmark = pytest.mark.usefixtures("x64")


# T-T6: subjective explainability.


def test_explainability_trades_against_training_error():
    X, y, T, u = guesses_setting()
    local = least_squares_statistics(X, y)
    metric, training = [], []
    for rho in (0.0, 0.01, 0.1, 1.0, 10.0, 1e3, 1e9):
        Q, q, c = explain(local, T, u, rho)
        W = jnp.linalg.solve(Q, -q[..., None] / 2)[..., 0]
        metric.append(explainability(W, T, u))
        training.append(validation_error(W, X, y))
        value = quadratic(Q, q, c).value(W)
        np.testing.assert_allclose(value, training[-1] + rho * metric[-1], rtol=1e-6)
        # Weighted least squares on augmented data.
        a, b, weight = augment_by_guesses(X, y, T, u, rho)
        root = np.sqrt(weight)
        for i in (0, N - 1):
            fit = np.linalg.lstsq(a[i] * root[i][:, None], b[i] * root[i], rcond=None)[
                0
            ]
            np.testing.assert_allclose(W[i], fit, rtol=1e-6)
        if rho == 0:
            plain = [np.linalg.lstsq(X[i], y[i], rcond=None)[0] for i in range(N)]
            np.testing.assert_allclose(W, plain, rtol=1e-9)
    assert (np.diff(metric, axis=0) <= 1e-9).all()
    assert (np.diff(training, axis=0) >= -1e-9).all()
    told = [np.linalg.lstsq(T[i], u[i], rcond=None)[0] for i in range(N)]
    np.testing.assert_allclose(W, told, rtol=1e-6)
    with pytest.raises(ValueError, match="rho must be >= 0"):
        explain(local, T, u, -1.0)
    with pytest.raises(ValueError, match="T must hold test points"):
        explain(local, T[:, :0], u[:, :0], 1.0)


# T-T7: fairness.


@pytest.mark.parametrize("intercept", [False, True])
def test_a_flipped_attribute_gets_the_coefficient_zero(intercept):
    rng = np.random.default_rng(6)
    X = rng.normal(size=(N, 8, 3))
    X[..., 1] = rng.choice([-1.0, 1.0], (N, 8))
    y = X @ np.array([1.0, 3.0, -1.0]) + 0.5
    if intercept:
        X = np.concatenate([X, np.ones((N, 8, 1))], -1)
    a, b = add_flipped(jnp.asarray(X), jnp.asarray(y), 1)
    assert a.shape == (N, 16, X.shape[-1])
    for i in range(N):
        unfair = np.linalg.lstsq(X[i], y[i], rcond=None)[0]
        fair = np.linalg.lstsq(a[i], b[i], rcond=None)[0]
        assert abs(unfair[1]) > 0.5
        assert abs(fair[1]) < 1e-12
    with pytest.raises(ValueError, match="column 0 must hold -1 and 1"):
        add_flipped(jnp.asarray(X), jnp.asarray(y), 0)
    with pytest.raises(ValueError, match=r"column must be in 0\.\."):
        add_flipped(jnp.asarray(X), jnp.asarray(y), 9)


def test_shifted_copies_are_a_penalty():
    rng = np.random.default_rng(7)
    X, y, s = rng.normal(size=(8, 3)), rng.normal(size=8), 0.7
    a, b = replace_by_shifted(jnp.asarray(X), jnp.asarray(y), 2, s)
    for _ in range(5):
        w = rng.normal(size=3)
        copied = ((b - a @ w) ** 2).mean()
        expected = ((y - X @ w) ** 2).mean() + s**2 * w[2] ** 2
        np.testing.assert_allclose(copied, expected, rtol=1e-9)


# Nodes with different numbers of rows: what is not there holds NaN.


def test_explainability_on_ragged_nodes():
    X, y, rows, T, u, tests = ragged_setting()
    W, rho = np.random.default_rng(12).normal(size=(N, D)), 0.3
    T, u = jnp.asarray(T), jnp.asarray(u)
    far = by_node(lambda i, t, u: np.mean((u - t @ W[i]) ** 2), tests, T, u)
    got = explainability(jnp.asarray(W), T, u, tests)
    np.testing.assert_allclose(got, far, rtol=1e-9)
    loss = by_node(lambda i, x, y: np.mean((y - x @ W[i]) ** 2), rows, X, y) + rho * far
    local = least_squares_statistics(X, y, rows)
    value = quadratic(*explain(local, T, u, rho, tests)).value(jnp.asarray(W))
    np.testing.assert_allclose(value, loss, rtol=1e-9)
    a, b, weight = augment_by_guesses(
        jnp.asarray(X), jnp.asarray(y), T, u, rho, rows, tests
    )
    errors = (b - np.einsum("nmd,nd->nm", a, W)) ** 2
    np.testing.assert_allclose((weight * errors).sum(1), loss, rtol=1e-9)
    # A node without test points keeps its loss.
    none = tests & (np.arange(N) > 0)[:, None]
    Q, _, _ = explain(local, T, u, rho, none)
    np.testing.assert_array_equal(Q[0], local.Q[0])
    assert np.isnan(explainability(jnp.asarray(W), T, u, none)[0])


def test_only_rows_that_exist_must_hold_an_attribute():
    X, y = np.ones((2, 3, 2)), np.ones((2, 3))
    rows = np.array([[True, True, True], [True, True, False]])
    X[~rows] = 0
    a, _ = add_flipped(X, y, 1, rows)
    np.testing.assert_array_equal(a[:, 3:, 1], -X[..., 1])
    with pytest.raises(ValueError, match="column 1 must hold -1 and 1"):
        add_flipped(X, y, 1)


def test_copies_of_numpy_ints_are_floats():
    X, y = np.array([[1, 2], [-1, 3]]), np.array([1, 2])
    a, _ = replace_by_shifted(X, y, 0, 0.5)
    np.testing.assert_array_equal(a[:, 0], [1.5, -0.5, 0.5, -1.5])
    a, b = add_flipped(X, y, 0)
    np.testing.assert_array_equal(a, [[1, 2], [-1, 3], [-1, 2], [1, 3]])
    np.testing.assert_array_equal(b, [1, 2, 1, 2])


def test_guesses_next_to_labels_that_are_ints_weigh_something():
    X, _, T, u = guesses_setting()
    *_, weight = augment_by_guesses(X, jnp.ones((N, M), int), T, u, 2.0)
    np.testing.assert_allclose(weight[0], [1 / M] * M + [2 / 7] * 7)
