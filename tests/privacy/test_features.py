"""Private features and the reconstruction that makes them wanted, in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from fedjax_core import attacks, privacy
from fedjax_core.attacks.inversion import Recovered


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


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


# T-P10: reconstruction.


def alice(rng, d, m=30):
    X, y = rng.standard_normal((m, d)), rng.standard_normal(m)
    return Recovered(X.T @ X / m, -2 * X.T @ y / m)


def reply(loss, alpha, w_bob):
    """Her update of FedRelax with one neighbour."""
    d = len(loss.q)
    return np.linalg.solve(loss.Q + alpha * np.eye(d), -loss.q / 2 + alpha * w_bob)


def close(found, loss):
    np.testing.assert_allclose(found.Q, loss.Q, atol=1e-8)
    np.testing.assert_allclose(found.q, loss.q, atol=1e-8)


@pytest.mark.parametrize("d", [1, 5])
def test_bob_reads_alices_loss_from_fedrelax(d):
    rng = np.random.default_rng(4)
    for alpha, weight in ((0.3, 1.0), (2.0, 1.5)):
        loss = alice(rng, d)
        probes = np.r_[np.zeros((1, d)), np.eye(d)]
        replies = np.stack([reply(loss, alpha * weight, w) for w in probes])
        close(attacks.from_fedrelax(probes, replies, alpha, weight), loss)


@pytest.mark.parametrize("extra", [0, 3])
def test_bob_reads_alices_loss_from_fedgd(extra):
    rng = np.random.default_rng(5)
    d, eta, alpha, weight = 4, 0.05, 0.8, 1.5
    loss = alice(rng, d)
    sent = 5 * rng.standard_normal((d + 1 + extra, d))
    seen = [rng.standard_normal(d)]
    for w_bob in sent:
        w = seen[-1]
        gradient = 2 * loss.Q @ w + loss.q + 2 * alpha * weight * (w - w_bob)
        seen.append(w - eta * gradient)
    gradients = attacks.fedgd_gradients(sent, seen, eta, alpha, weight)
    points = np.stack(seen[:-1])
    np.testing.assert_allclose(gradients, 2 * points @ loss.Q + loss.q, atol=1e-10)
    close(attacks.from_gradients(points, gradients), loss)


def test_bob_finds_alice_among_stations():
    """Exercise 9.1 on stations whose temperatures differ."""
    rng = np.random.default_rng(6)
    stations = []
    for mean in np.linspace(-8, 6, 15):
        past = mean + rng.standard_normal((10, 2))
        X = np.column_stack([past, np.ones(10)])
        y = past.mean(1) + rng.standard_normal(10)
        stations.append(Recovered(X.T @ X / 10, -2 * X.T @ y / 10))
    known = [np.stack(parts) for parts in zip(*stations, strict=True)]
    probes = np.r_[np.zeros((1, 3)), np.eye(3)]
    for place, loss in enumerate(stations):
        replies = np.stack([reply(loss, 1.0, w) for w in probes])
        found = attacks.from_fedrelax(probes, replies, 1.0)
        assert attacks.nearest(found, *known) == place


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: attacks.from_fedrelax(np.eye(2), np.eye(2), 1.0),
            "sent must hold 3 affinely independent points for 2 parameters, got 2",
        ),
        (
            lambda: attacks.from_gradients([[0, 0], [1, 1], [2, 2.0]], np.ones((3, 2))),
            "points must hold 3 affinely independent",
        ),
        (
            lambda: attacks.from_fedrelax(np.eye(2), np.ones(2), 1.0),
            r"sent and replies must have shape \(k, d\)",
        ),
        (
            lambda: attacks.from_fedrelax(np.eye(2), np.eye(2), 0),
            "alpha must be > 0",
        ),
        (
            lambda: attacks.fedgd_gradients(np.eye(2), np.eye(2), 0.1, 1.0),
            "sent and seen must have shapes",
        ),
        (
            lambda: attacks.fedgd_gradients(np.eye(2), np.eye(2), 0, 1.0),
            "eta must be > 0",
        ),
        (
            lambda: attacks.nearest(
                Recovered(np.eye(2), np.ones(2)), np.eye(2)[None], np.ones((2, 2))
            ),
            "Q and q must have shapes",
        ),
        (
            lambda: privacy.private_projection(jnp.eye(2)),
            r"c must have shape \(d,\)",
        ),
        (
            lambda: privacy.private_projection(np.array([np.nan, 1])),
            "c must be finite",
        ),
        (
            lambda: privacy.cross_covariance(jnp.eye(2), jnp.ones(3)),
            "X and s must have shapes",
        ),
        (
            lambda: privacy.private_lda(jnp.ones(2), jnp.eye(3), jnp.eye(2)),
            "mean_difference, covariance and F must have shapes",
        ),
        (
            lambda: privacy.private_lda(jnp.ones(2), -jnp.eye(2), jnp.eye(2)[:1]),
            "covariance must be positive definite",
        ),
    ],
)
def test_bad_arguments_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_projection_of_the_largest_floats():
    with jax.enable_x64(False):
        c = np.array([3e38, 1.5e38], np.float32)
        for make in (
            privacy.private_projection,
            jax.jit(privacy.private_projection),
        ):
            F = make(c).matrix
            np.testing.assert_allclose(F, [[0.2, -0.4], [-0.4, 0.8]], rtol=1e-5)


def test_replies_that_tell_nothing_are_refused():
    probes = np.r_[np.zeros((1, 2)), np.eye(2)]
    replies = np.full((3, 2), 0.1)
    for constant in (replies, 0 * replies, replies + probes[:, :1]):
        with pytest.raises(ValueError, match="replies must hold 3 affinely indep"):
            attacks.from_fedrelax(probes, constant, 1.0)
    with pytest.raises(ValueError, match="sent must hold 3 affinely independent"):
        attacks.from_fedrelax(replies, probes, 1.0)
    bad = probes.copy()
    bad[0, 0] = np.nan
    for sent, got, name in ((bad, probes, "sent"), (probes, bad, "replies")):
        with pytest.raises(ValueError, match=f"{name} must be finite"):
            attacks.from_fedrelax(sent, got, 1.0)
    with pytest.raises(ValueError, match="gradients must be finite"):
        attacks.from_gradients(probes, bad)


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
