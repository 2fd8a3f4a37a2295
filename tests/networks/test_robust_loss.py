"""Absolute errors and Huber losses against linear programs and SciPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from fedjax_core.algorithms.networks import fedgd, fedprox, fedrelax
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.oracles import (
    least_squares_statistics,
    prox_residual,
    quadratic,
)
from fedjax_core.networks.robust_loss import (
    absolute,
    absolute_prox,
    huber,
    least_absolute_deviations,
)
from fedjax_core.networks.schedules import power_decay

# T-S7: least absolute deviations.


def test_absolute_errors_ignore_how_far_an_outlier_is():
    X = np.stack([np.ones(5), np.arange(5.0)], 1)
    slopes = []
    for last in (10.0, 10.5, 20.0):
        y = np.array([0.0, 1, 2, 3, last])
        fit = least_absolute_deviations(X, y)
        np.testing.assert_allclose(fit.w, [0, 1], atol=1e-9)
        np.testing.assert_allclose(fit.objective, last - 4, rtol=1e-9)
        assert abs(fit.gap) < 1e-9
        slopes.append(np.linalg.lstsq(X, y, rcond=None)[0][1])
    np.testing.assert_allclose(slopes, [2.2, 2.3, 4.2], rtol=1e-9)


def test_absolute_errors_on_random_data_have_no_gap():
    rng = np.random.default_rng(15)
    for _ in range(5):
        X, y = rng.normal(size=(30, 4)), rng.standard_t(2, 30)
        fit = least_absolute_deviations(X, y)
        assert abs(fit.gap) < 1e-8
        assert (np.abs(y - X @ fit.w) < 1e-9).sum() >= 4
    for X, y, message in (
        (np.zeros((3, 2)), np.zeros(2), "shapes"),
        (np.zeros((0, 2)), np.zeros(0), "m >= 1"),
        (np.full((3, 2), np.nan), np.zeros(3), "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            least_absolute_deviations(X, y)


def ragged_regression():
    rng = np.random.default_rng(16)
    X, y = rng.normal(size=(5, 12, 3)), rng.standard_t(2, (5, 12))
    mask = np.arange(12) < np.array([12, 12, 7, 3, 1])[:, None]
    X[~mask], y[~mask] = np.nan, np.nan
    return X, y, mask, rng.normal(size=(5, 3))


@pytest.mark.parametrize("rho", [1e-3, 0.1, 10.0])
def test_prox_of_absolute_errors_meets_the_conditions_of_optimality(rho):
    """At w, rho (w - v) is X'u / m for signs u of errors, [-1, 1] for 0."""
    with jax.enable_x64(True):
        X, y, mask, V = ragged_regression()
        losses = absolute(X, y, mask)
        W, gap = absolute_prox(X, y, V, rho, mask)
        np.testing.assert_array_equal(W, losses.prox(jnp.asarray(V), rho))
        assert (gap >= 0).all()
        assert (gap < 1e-14).all()
        for i, w in enumerate(np.asarray(W)):
            x, e = X[i][mask[i]], (y[i] - X[i] @ w)[mask[i]]
            zero = np.abs(e) < 1e-6
            missing = len(e) * rho * (w - V[i]) - x[~zero].T @ np.sign(e[~zero])
            if zero.any():
                fit = optimize.lsq_linear(x[zero].T, missing, (-1, 1), method="bvls")
                missing = x[zero].T @ fit.x - missing
            np.testing.assert_allclose(missing, 0, atol=1e-6)
        # Value and sub-gradient: f(u) >= f(w) + g'(u - w) for other points u.
        value = losses.value(jnp.asarray(V))
        errors = np.where(mask, np.abs(y - np.einsum("nmd,nd->nm", X, V)), 0)
        np.testing.assert_allclose(value, errors.sum(1) / mask.sum(1))
        slope = losses.grad(jnp.asarray(V))
        for U in np.random.default_rng(17).normal(size=(20, *V.shape)):
            below = value + (slope * (U - V)).sum(1)
            assert (losses.value(jnp.asarray(U)) >= below - 1e-12).all()


def test_prox_of_absolute_errors_for_small_rho_is_the_linear_program():
    with jax.enable_x64(True):
        X, y, mask, V = (a[:3] for a in ragged_regression())
        W, gap = absolute_prox(X, y, V, 1e-6, mask)
        for i, w in enumerate(np.asarray(W)):
            fit = least_absolute_deviations(X[i][mask[i]], y[i][mask[i]])
            np.testing.assert_allclose(w, fit.w, atol=1e-6)
        # Too few steps are far away, and the certificate says at most how far.
        early, gap = absolute_prox(X, y, V, 1e-6, mask, steps=3)
        far = np.linalg.norm(early - W, axis=1)
        assert far.max() > 1e-3
        assert (far <= np.sqrt(2 * gap / 1e-6)).all()


def test_prox_of_absolute_errors_in_float32_and_where_it_is_degenerate():
    X, y, mask, V = ragged_regression()
    with jax.enable_x64(True):
        expected, _ = absolute_prox(X, y, V, 1.0, mask)
    X, y, V = (jnp.asarray(a, jnp.float32) for a in (X, y, V))
    W, gap = jax.jit(lambda V: absolute_prox(X, y, V, 1.0, mask))(V)
    assert W.dtype == gap.dtype == jnp.float32
    np.testing.assert_allclose(W, expected, atol=2e-3)
    # Repeated rows, and a start that fits all of them.
    X = jnp.ones((2, 6, 2))
    y = jnp.stack([jnp.full(6, 3.0), jnp.zeros(6)])
    W, gap = absolute_prox(X, y, jnp.zeros((2, 2)), 0.01)
    np.testing.assert_allclose(W, [[1.5, 1.5], [0, 0]], atol=1e-4)
    assert (gap < 1e-6).all()


def test_huber_is_squares_up_to_delta_and_absolute_errors_beyond():
    with jax.enable_x64(True):
        X, y, mask, V = ragged_regression()
        W = jnp.asarray(V)
        squares = quadratic(*least_squares_statistics(X, y, mask))
        wide, narrow = huber(X, y, 1e3, mask), huber(X, y, 1e-7, mask)
        for of in ("value", "grad"):
            np.testing.assert_allclose(getattr(wide, of)(W), getattr(squares, of)(W))
            steep = getattr(narrow, of)(W) / 2e-7
            expected = getattr(absolute(X, y, mask), of)(W)
            np.testing.assert_allclose(steep, expected, atol=1e-6)
        np.testing.assert_allclose(wide.prox(W, 0.3), squares.prox(W, 0.3), rtol=1e-9)
        delta = np.array([0.1, 0.5, 1.0, 2.0, 0.3])
        losses = huber(X, y, delta, mask)
        for rho in (1e-3, 0.1, 10.0):
            left = prox_residual(losses, W, losses.prox(W, rho), rho)
            assert (left < 1e-9).all()


@functools.cache
def learned(method):
    """What three nodes learn of labels y ``[3, 5]``; compiled once."""
    graph = Graph.from_edges([[0, 1], [1, 2]], dtype=np.float64)
    X = np.broadcast_to(np.stack([np.ones(5), np.arange(5.0)], 1), (3, 5, 2))

    @jax.jit
    def run(y):
        if method == "squares":
            losses = quadratic(*least_squares_statistics(X, y))
        else:
            losses = huber(X, y, 1.0) if method == "huber" else absolute(X, y)
        operator, rounds = fedrelax.make(graph, losses, alpha=0.3), 60
        if method == "fedprox":
            operator = fedprox.make(losses, 3, eta=1.0)
        if method == "fedgd":
            eta, rounds = power_decay(2.0, shift=20.0), 4000
            operator = fedgd.make(graph, losses, alpha=0.3, eta=eta)
        return run_network(operator, jnp.zeros((3, 2)), rounds)[0]

    return run


@pytest.mark.parametrize("last", [10.0, 10.5, 20.0])
def test_robust_losses_defend_networks(last):
    """T-S7 at every node: slope 1 for absolute errors, 2.2, 2.3, 4.2 for squares."""
    with jax.enable_x64(True):
        y = np.tile([0.0, 1, 2, 3, last], (3, 1))
        line = np.tile([0.0, 1.0], (3, 1))
        slope = {10.0: 2.2, 10.5: 2.3, 20.0: 4.2}[last]
        np.testing.assert_allclose(learned("squares")(y)[:, 1], slope, rtol=1e-9)
        np.testing.assert_allclose(learned("absolute")(y), line, atol=1e-9)
        # Huber's fit moves, but no further however far the label goes.
        bounded = learned("huber")(y)
        np.testing.assert_allclose(bounded, 1.5 * line - [0.5, 0], atol=1e-6)
        np.testing.assert_allclose(learned("fedprox")(y), line, atol=1e-9)
        # Sub-gradients at rates that decay.
        np.testing.assert_allclose(learned("fedgd")(y), line, atol=2e-3)

        # With a single attacked node the squares of the others suffer as well.
        y[1:, 4] = 4
        np.testing.assert_allclose(learned("absolute")(y), line, atol=1e-9)
        assert learned("squares")(y)[1, 1] > 1.15


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x, y: absolute(x[0], y), r"shapes \(n, m, d\)"),
        (lambda x, y: huber(x, y[:, :2], 1.0), r"shapes \(n, m, d\)"),
        (lambda x, y: absolute(x * np.nan, y), "X must be finite"),
        (lambda x, y: absolute(x, y, np.ones((2, 3))), "mask must be bool"),
        (lambda x, y: absolute(x, y, np.eye(2, 3) > 2), "every node a row, got none"),
        (lambda x, y: absolute(x, y, steps=0), "steps must be >= 1"),
        (lambda x, y: huber(x, y, 0.0), "delta must be > 0"),
        (lambda x, y: huber(x, y, np.ones(3)), r"delta must be one number or have"),
        (lambda x, y: absolute(x, y).prox(np.ones((2, 2)), 0.0), "rho must be > 0"),
        (lambda x, y: absolute(x, y).prox(np.ones((1, 2)), 1.0), "V must have shape"),
        (lambda x, y: absolute(x, y).value(np.ones((1, 2))), "W must have shape"),
        (lambda x, y: absolute_prox(x, y, np.ones((2, 3)), 1.0), "V must have shape"),
    ],
)
def test_bad_arguments_of_robust_losses(call, match):
    with pytest.raises(ValueError, match=match):
        call(np.ones((2, 3, 2)), np.ones((2, 3)))


@pytest.mark.parametrize("far", [1e4, 1e6, 1e8])
def test_far_outliers_in_float32(far):
    """The prox is as exact as without an outlier, however far that lies."""
    rng = np.random.default_rng(8)
    X = rng.normal(size=(1, 20, 2)).astype(np.float32)
    y = (X @ np.ones(2) + 0.1 * rng.normal(size=(1, 20))).astype(np.float32)
    near, away = y.copy(), y.copy()
    near[0, 3], away[0, 3] = 1e3, far  # the force is the same
    V = np.zeros((1, 2), np.float32)
    for loss in (absolute, lambda X, y: huber(X, y, 0.5)):
        with jax.enable_x64(True):
            exact = loss(X.astype(float), near.astype(float)).prox(V.astype(float), 0.3)
        np.testing.assert_allclose(loss(X, away).prox(V, 0.3), exact, atol=2e-5)
