"""Private features hide what they should, whatever the units."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from fedjax_core import privacy

pytestmark = pytest.mark.usefixtures("x64")


def r_squared(z, s):
    return LinearRegression().fit(z, s).score(z, s)


def hours(rng, num=720):
    """Features of which the last, the hour, shows in some of the others."""
    hour = np.arange(num) % 24 + 1.0
    temperature = 3 * np.sin((hour - 9) * math.pi / 12) + np.cumsum(
        rng.standard_normal(num) / 5
    )
    noise = rng.standard_normal((num, 3))
    columns = [temperature, temperature + 0.3 * noise[:, 0], noise[:, 1] * 9 + 1000]
    return np.column_stack([*columns, noise[:, 2] - 0.1 * hour, hour])


# T-P8: features.


def test_private_features_hide_the_hour_and_keep_the_temperature():
    X = hours(np.random.default_rng(0))
    hour = X[:, -1]
    assert r_squared(X[:, :-1], hour) > 0.2
    c = privacy.cross_covariance(X, hour)
    centred = X - X.mean(0)
    np.testing.assert_allclose(
        c, centred.T @ (hour - hour.mean()) / len(X), rtol=1e-9, atol=1e-12
    )
    F, changed = privacy.private_projection(c)
    assert changed
    np.testing.assert_allclose(F, F.T, atol=1e-15)
    np.testing.assert_allclose(F @ F, F, atol=1e-12)
    assert np.linalg.matrix_rank(F) == X.shape[1] - 1
    np.testing.assert_allclose(F @ c, 0, atol=1e-10)
    # One direction of five is lost, so that F is singular and Z has rank four.
    Z = centred @ np.asarray(F)
    assert abs(r_squared(Z, hour)) < 1e-9
    assert r_squared(Z, X[:, 0]) > 0.85


def test_private_features_of_random_data():
    rng = np.random.default_rng(1)
    for _ in range(50):
        X = rng.standard_normal((30, 4)) @ rng.standard_normal((4, 4)) + 3
        s = X @ rng.standard_normal(4) + rng.standard_normal(30)
        c = privacy.cross_covariance(X, s)
        F = privacy.private_projection(c).matrix
        assert abs(r_squared(X @ np.asarray(F), s)) < 1e-9

        # The error is that of regression, and all of the variance iff F c = 0.
        cov, var = np.cov(X.T, bias=True), s.var()
        assert privacy.reconstruction_error(F, cov, c, var) == pytest.approx(
            var, rel=1e-9
        )
        G = jnp.asarray(rng.standard_normal((2, 4)))
        error = privacy.reconstruction_error(G, cov, c, var)
        expected = var * (1 - r_squared(X @ np.asarray(G).T, s))
        assert error == pytest.approx(expected, rel=1e-9)
        assert error < var


def test_gaussian_leakage_is_the_information_of_the_best_prediction():
    for correlation in (0.0, 0.3, 0.9):
        cov, c = np.eye(1), np.array([correlation])
        error = privacy.reconstruction_error(jnp.eye(1), cov, c, 1.0)
        expected = privacy.gaussian_mutual_information(correlation)
        assert privacy.gaussian_leakage(error, 1.0) == pytest.approx(
            expected, abs=1e-12
        )


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_projection_of_tiny_and_huge_covariances(size):
    F, changed = privacy.private_projection(jnp.array([3.0, 4.0]) * size)
    assert changed
    np.testing.assert_allclose(F, [[0.64, -0.48], [-0.48, 0.36]], rtol=1e-12)


def test_nothing_to_hide_gives_the_identity_and_says_so():
    for make in (
        privacy.private_projection,
        jax.jit(privacy.private_projection),
    ):
        F, changed = make(jnp.zeros(3))
        assert not changed
        np.testing.assert_array_equal(F, np.eye(3))


def test_small_features_are_not_taken_for_private():
    with jax.enable_x64(False):
        error = privacy.reconstruction_error(
            np.eye(2, dtype=np.float32),
            np.diag(np.array([1e6, 1], np.float32)),
            np.array([0, 1], np.float32),
            1.0,
        )
        assert error == pytest.approx(0, abs=1e-6)


# T-P11: linear discriminant analysis.


def test_private_lda_is_optimal_and_leaks_nothing_linear():
    rng = np.random.default_rng(2)
    for _ in range(30):
        d, k = 5, 2
        root = rng.standard_normal((d, d))
        C = root @ root.T + 0.1 * np.eye(d)
        delta, F = rng.standard_normal(d), rng.standard_normal((k, d))
        a = np.asarray(privacy.private_lda(delta, C, F))
        G = (C + np.outer(delta, delta) / 4) @ F.T
        Ci = np.linalg.inv(C)
        printed = Ci @ (delta - G @ np.linalg.solve(G.T @ Ci @ G, G.T @ Ci @ delta))
        np.testing.assert_allclose(
            a, printed / math.sqrt(printed @ C @ printed), rtol=1e-6, atol=1e-9
        )
        np.testing.assert_allclose(a @ G, 0, atol=1e-9)
        assert a @ C @ a == pytest.approx(1, rel=1e-9)
        # No other direction that keeps the constraint separates the classes better.
        null = np.linalg.svd(G.T)[2][k:].T
        others = null @ rng.standard_normal((d - k, 200))
        quotient = (others.T @ delta) ** 2 / np.sum(others * (C @ others), 0)
        assert quotient.max() <= (a @ delta) ** 2 + 1e-9
        assert a @ delta >= 0


def test_private_lda_of_samples_does_not_correlate_with_the_attribute():
    rng = np.random.default_rng(3)
    C = np.array([[2.0, 0.5, 0.3], [0.5, 1.0, 0.0], [0.3, 0.0, 1.5]])
    delta, F = np.array([1.0, 2.0, 0.5]), np.array([[1.0, 0.0, 0.0]])
    a = np.asarray(privacy.private_lda(delta, C, F))
    y = rng.choice([-0.5, 0.5], 200_000)
    x = rng.multivariate_normal(np.zeros(3), C, len(y)) + y[:, None] * delta
    # Five standard errors of a correlation.
    assert abs(np.corrcoef(x @ a, x @ F[0])[0, 1]) < 5 / math.sqrt(len(y))


def test_private_lda_with_repeated_and_with_all_attributes():
    C, delta = np.eye(3), np.array([1.0, 1.0, 1.0])
    once = privacy.private_lda(delta, C, np.eye(3)[:1])
    twice = privacy.private_lda(delta, C, np.eye(3)[[0, 0]])
    np.testing.assert_allclose(once, twice, rtol=1e-9)
    with pytest.raises(ValueError, match="mean_difference must not lie in the span"):
        privacy.private_lda(delta, C, np.eye(3))


def test_private_lda_hides_attributes_of_every_size():
    with jax.enable_x64(False):
        delta = np.ones(3, np.float32)
        F = np.array([[1e8, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32)
        a = privacy.private_lda(delta, np.eye(3, dtype=np.float32), F)
        S = np.eye(3) + np.outer(delta, delta) / 4
        np.testing.assert_allclose(S[:2] @ np.asarray(a), 0, atol=1e-5)


def test_projection_of_the_largest_floats():
    with jax.enable_x64(False):
        c = np.array([3e38, 1.5e38], np.float32)
        for make in (
            privacy.private_projection,
            jax.jit(privacy.private_projection),
        ):
            F = make(c).matrix
            np.testing.assert_allclose(F, [[0.2, -0.4], [-0.4, 0.8]], rtol=1e-5)


@pytest.mark.parametrize("mixed", [False, True])
def test_nothing_leaks_from_features_of_unlike_units_in_float32(mixed):
    rng = np.random.default_rng(0)
    for _ in range(20):
        s = rng.normal(size=500)
        if mixed:
            X = rng.normal(size=(500, 8)) + np.outer(s, rng.normal(size=8))
            X = X * 10.0 ** rng.uniform(-2, 2, 8)
        else:
            z, noise = rng.normal(size=(2, 500))
            X = np.stack([1e4 * (0.3 * s + z), 0.1 * (s + 0.01 * noise)], 1)
        X = (X - X.mean(0)).astype(np.float32)
        s = (s - s.mean()).astype(np.float32)
        c = privacy.cross_covariance(X, s)
        F = privacy.private_projection(c).matrix
        assert F.dtype == jnp.float32
        Z = X.astype(float) @ np.asarray(F, float).T
        Z /= np.linalg.norm(Z, axis=0)
        fit = Z @ np.linalg.lstsq(Z, s, rcond=1e-6)[0]
        assert (fit**2).sum() < 1e-5 * (s**2).sum()
        error = privacy.reconstruction_error(F, X.T @ X / 500, c, s.var())
        assert float(error) == pytest.approx(s.var(), rel=1e-5)
