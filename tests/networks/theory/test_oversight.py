"""Errors, uncertainty and the log of a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.networks.theory.problems import (
    EDGES,
    GRAPH,
    KEY,
    D,
    M,
    N,
    by_node,
    guesses_setting,
    ragged_setting,
)

from fedjax_core.algorithms.networks import fedrelax
from fedjax_core.networks.operators import run as run_network
from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.theory.explainability import (
    add_flipped,
    augment_by_guesses,
    explainability,
    replace_by_shifted,
)
from fedjax_core.networks.theory.oversight import (
    log_lines,
    residual_variance,
    validation_error,
)
from fedjax_core.networks.theory.trust import (
    average_error,
    label_change,
    sensitivity_bounds,
)

pytestmark = pytest.mark.usefixtures("x64")


# T-T6: subjective explainability.


# T-T8: oversight.


def test_the_log_is_the_same_for_the_same_key():
    rng = np.random.default_rng(8)
    X, y = jnp.asarray(rng.normal(size=(N, M, D))), jnp.asarray(rng.normal(size=(N, M)))
    local = least_squares_statistics(X, y)
    operator = fedrelax.make(GRAPH, quadratic(*local), alpha=1.0)

    @jax.jit
    def history(key):
        start = jax.random.normal(key, (N, D))
        return run_network(operator, start, 3, record=lambda W: W)[1]

    def log(key, **more):
        W = history(key)
        errors = jax.vmap(lambda w: validation_error(w, X, y))(W)
        return log_lines(W, {"alpha": 1.0}, graph=GRAPH, errors=errors, **more)

    first = log(KEY)
    assert first == log(KEY)
    assert first != log(jax.random.key(1))
    last = json.loads(first[-1])
    assert last["round"] == 3
    assert last["messages"] == 3 * 2 * len(EDGES)
    assert last["gradients"] == 3 * N
    assert last["config"] == {"alpha": 1.0}
    np.testing.assert_allclose(
        last["validation_error"], validation_error(history(KEY)[-1], X, y), rtol=1e-12
    )
    assert len({json.loads(line)["parameters"] for line in first}) == 3
    stamped = log(KEY, time=lambda: "2023-04-01T00:00:00Z")
    assert json.loads(stamped[0])["time"] == "2023-04-01T00:00:00Z"
    with pytest.raises(ValueError, match="errors must have shape"):
        log_lines(history(KEY), {}, graph=GRAPH, errors=np.zeros((2, N)))


def test_uncertainty_of_predictions():
    # The sample variance of 4000 residuals is off by 15 % with probability 2e-11.
    rng = np.random.default_rng(9)
    X = rng.normal(size=(2, 4000, 3))
    w, sigma = rng.normal(size=(2, 3)), np.array([0.5, 2.0])
    noise = sigma[:, None] * rng.normal(size=(2, 4000))
    y = np.einsum("nmd,nd->nm", X, w) + noise
    got = residual_variance(jnp.asarray(w), jnp.asarray(X), jnp.asarray(y + 3))
    np.testing.assert_allclose(got, sigma**2, rtol=0.15)
    errors = validation_error(jnp.asarray(w), jnp.asarray(X), jnp.asarray(y))
    np.testing.assert_allclose(errors, (noise**2).mean(1), rtol=1e-9)


# Nodes with different numbers of rows: what is not there holds NaN.


def test_oversight_on_ragged_nodes():
    X, y, rows, *_ = ragged_setting()
    W = np.random.default_rng(11).normal(size=(N, D))
    data = jnp.asarray(W), jnp.asarray(X), jnp.asarray(y)
    expected = by_node(lambda i, x, y: np.mean((y - x @ W[i]) ** 2), rows, X, y)
    np.testing.assert_allclose(validation_error(*data, rows), expected, rtol=1e-9)
    expected = by_node(lambda i, x, y: np.var(y - x @ W[i], ddof=1), rows, X, y)
    np.testing.assert_allclose(residual_variance(*data, rows), expected, rtol=1e-9)
    few = np.arange(M) < np.array([0, 1, 2, 2, 2, 2])[:, None]
    np.testing.assert_array_equal(np.isnan(validation_error(*data, few))[:3], [1, 0, 0])
    np.testing.assert_array_equal(
        np.isnan(residual_variance(*data, few))[:3], [1, 1, 0]
    )
    slope = jax.grad(lambda W: validation_error(W, *data[1:], rows).sum())(data[0])
    assert np.isfinite(slope).all()


def test_columns_of_labels_are_not_broadcast():
    X, y, T, u = guesses_setting()
    W, e, g = jnp.ones((N, D)), y[:, :1], u[:, :1]
    for words, call in (
        ("change must have the shape of X", lambda: label_change(GRAPH, 1.0, X, e)),
        ("noise must have the shape of X", lambda: average_error(X, e, W)),
        ("change must have shape", lambda: sensitivity_bounds(GRAPH, X, 1.0, y[1:])),
        ("y must have the shape of X", lambda: validation_error(W, X, e)),
        ("W, X and y must have shapes", lambda: residual_variance(W[:1], X, y)),
        ("guesses must have the shape of T", lambda: explainability(W, T, g)),
        ("y must have the shape of X", lambda: augment_by_guesses(X, e, T, u, 1.0)),
        ("y must have the shape of X", lambda: replace_by_shifted(X, e, 0, 1.0)),
        ("y must have the shape of X", lambda: add_flipped(X, e, 0)),
        (
            "mask must be bool of shape",
            lambda: label_change(GRAPH, 1.0, X, y, np.arange(N)),
        ),
        (
            "test_mask must be bool of shape",
            lambda: augment_by_guesses(X, y, T, u, 1.0, test_mask=np.arange(N)),
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_the_log_of_a_run_that_diverges_is_json():
    W = jnp.zeros((2, N, D))
    errors = np.ones((2, N))
    errors[1, :2] = np.nan, np.inf

    def refuse(name):
        raise AssertionError(name)

    _, line = log_lines(W, {}, graph=GRAPH, errors=errors)
    found = json.loads(line, parse_constant=refuse)["validation_error"]
    assert found == [None, None, 1.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="config must be fit for JSON"):
        log_lines(W, {"eta": np.nan}, graph=GRAPH)
