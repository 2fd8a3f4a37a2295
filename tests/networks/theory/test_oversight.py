"""Errors, uncertainty and the log of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.networks.theory.problems import (
    GRAPH,
    D,
    M,
    N,
    by_node,
    guesses_setting,
    ragged_setting,
)

from fedjax_core.networks.theory.explainability import (
    add_flipped,
    augment_by_guesses,
    explainability,
    replace_by_shifted,
)
from fedjax_core.networks.theory.oversight import (
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
