"""Linear and ridge regression against NumPy and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import builders, projections, variation
from fedjax_core.networks.graph import neighbour_sum
from fedjax_core.networks.theory import augment, erm

pytestmark = pytest.mark.usefixtures("x64")


RNG = np.random.default_rng(0)


KEY = jax.random.key(0)


def close(actual, wanted, tol=1e-9):
    np.testing.assert_allclose(actual, wanted, rtol=tol, atol=tol)


def test_exercises_of_chapter_1():
    """T-E1, T-E2 and T-E3: Exercises 1.3, 1.4 and 1.2."""
    X, y = np.array([[1, 2], [3, 4], [5, 6]]), np.array([7, 8, 9])
    close(erm.ridge(X, y), [-6, 6.5])
    Q = erm.linear_risk(X[:2], y[:2]).Q * 2
    root = np.sqrt(221)
    close(np.linalg.eigvalsh(Q), [15 - root, 15 + root])
    close(np.linalg.eigvalsh(Q), [0.133931, 29.866069], 1e-6)
    # As the variation of an edge, and as what a node receives over two.
    W = np.array([[0.0, 0, 0], [1, -2, 3]])
    close(variation.gtv(builders.chain(2), W, variation.l2()), np.sqrt(14))
    W = np.array([[0.0, 0, 0], [1, 2, 3], [1, 0, -1]])
    star = builders.star(3).with_weight(jnp.array([3.0, 2.0]))
    close(neighbour_sum(star, W)[0], [5, 6, 7])


def test_quadratic_form_gradient_and_step():
    """T-E4."""
    X, y, w = RNG.normal(size=(9, 4)), RNG.normal(size=9), RNG.normal(size=4)
    ref = RNG.normal(size=4)
    risk = erm.linear_risk(X, y, 0.3, ref)
    wanted = ((y - X @ w) ** 2).mean() + 0.3 * ((w - ref) ** 2).sum()
    close(erm.empirical_risk(w, risk), wanted)
    plain = erm.linear_risk(X, y)
    gradient = jax.grad(erm.empirical_risk)(jnp.asarray(w), plain)
    close(gradient, 2 * plain.Q @ w + plain.q)
    close(gradient, -2 / 9 * X.T @ (y - X @ w))
    close(erm.least_squares_step(w, X, y, 0.1), w - 0.1 * gradient)


def test_minimum_norm_solution_for_any_features():
    for m, d, rank in ((8, 3, 3), (3, 8, 3), (8, 6, 2)):
        X = RNG.normal(size=(m, rank)) @ RNG.normal(size=(rank, d))
        y = RNG.normal(size=m)
        close(erm.ridge(X, y), np.linalg.pinv(X) @ y)


def test_sample_mean_is_regression_on_a_constant_feature():
    y = RNG.normal(size=11)
    close(erm.sample_mean(y), y.mean())
    close(erm.ridge(np.ones((11, 1)), y)[0], y.mean())


def test_estimation_error_bound():
    """T-E5: Prop. 2.1 and its quarter, which holds with equality for d = 1."""
    X, noise = RNG.normal(size=(200, 8, 3)), RNG.normal(size=(200, 8))
    w_true = RNG.normal(size=(200, 3))
    y = np.einsum("kmd,kd->km", X, w_true) + noise
    error = ((jax.jit(jax.vmap(erm.ridge))(X, y) - w_true) ** 2).sum(1)
    bound = jax.jit(jax.vmap(erm.estimation_error_bound))(X, noise)
    assert (error <= bound + 1e-9).all()
    loose = jax.jit(
        jax.vmap(lambda x, e: erm.estimation_error_bound(x, e, tight=False))
    )
    close(loose(X, noise), 4 * bound)
    one = erm.ridge(X[0, :, :1], noise[0])[0] ** 2
    close(erm.estimation_error_bound(X[0, :, :1], noise[0]), one)
    with pytest.raises(ValueError, match="full column rank"):
        erm.estimation_error_bound(np.ones((4, 2)), np.ones(4))


def test_no_bound_without_full_rank_under_jit():
    bound = jax.jit(erm.estimation_error_bound)(np.ones((6, 2)), np.ones(6))
    assert bound == np.inf


def test_risk_on_the_data_model():
    """T-E6: within 5 standard errors, a false alarm in two million keys."""
    w_true, w = jnp.array([1.0, -2.0, 0.5]), jnp.array([0.5, -1.0, 0.0])
    X, y = erm.linear_data(KEY, 200_000, w_true, 0.7)
    for guess in (w, w_true):
        loss = (y - X @ guess) ** 2
        error = loss.std() / np.sqrt(len(y))
        assert abs(loss.mean() - erm.expected_risk(guess, w_true, 0.7)) < 5 * error
    close(erm.expected_risk(w_true, w_true, 0.7), 0.49)


def test_ridge_limits_and_normal_equations():
    """T-R2."""
    X, y, ref = RNG.normal(size=(3, 5)), RNG.normal(size=3), RNG.normal(size=5)
    alphas = jnp.array([1e-10, 0.1, 10.0])
    solutions = jax.jit(jax.vmap(lambda a: erm.ridge(X, y, a)))(alphas)
    close(solutions[0], np.linalg.pinv(X) @ y, 1e-8)
    for alpha, w in zip(alphas[1:], solutions[1:], strict=True):
        close(w, np.linalg.solve(X.T @ X / 3 + alpha * np.eye(5), X.T @ y / 3))
    close(erm.ridge(np.zeros((3, 5)), y, 0.1, ref), ref)
    risk = erm.linear_risk(X, y, 0.1, ref)
    w = erm.ridge(X, y, 0.1, ref)
    close(2 * risk.Q @ w + risk.q, np.zeros(5))


def test_projection_on_the_ball():
    """T-R4: idempotent and non-expansive; the book's radius of 10."""
    w, v = 10 * RNG.normal(size=(2, 100, 3))
    project = jax.jit(jax.vmap(lambda x: projections.ball(x, 10.0)))
    a, b = project(w), project(v)
    scale = np.minimum(1, 10 / np.linalg.norm(w, axis=1, keepdims=True))
    close(a, w * scale)
    close(project(a), a)
    moved, before = np.linalg.norm(a - b, axis=1), np.linalg.norm(w - v, axis=1)
    assert (moved <= before + 1e-9).all()


def test_bad_data_is_refused():
    X, y = np.ones((3, 2)), np.ones(3)
    for call in (erm.ridge, erm.linear_risk, augment.interpolate):
        with pytest.raises(ValueError, match="m >= 1"):
            call(X[:0], y[:0])
        with pytest.raises(ValueError, match="shapes"):
            call(X, y[:2])
        with pytest.raises(ValueError, match="X must be finite"):
            call(X * np.inf, y)
        with pytest.raises(ValueError, match="y must be finite"):
            call(X, y * np.nan)
    with pytest.raises(ValueError, match="alpha"):
        erm.ridge(X, y, -1.0)
    with pytest.raises(ValueError, match="w_ref"):
        erm.ridge(X, y, 1.0, np.ones(3))
    with pytest.raises(ValueError, match="m >= 1"):
        erm.sample_mean(np.ones(0))
    with pytest.raises(ValueError, match="noise_std"):
        erm.linear_data(KEY, 3, np.ones(2), -1.0)
