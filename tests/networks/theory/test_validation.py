"""Validation splits and what errors say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks.theory import erm
from fedjax_core.networks.theory.validation import diagnose, train_and_validate

pytestmark = pytest.mark.usefixtures("x64")


RNG = np.random.default_rng(0)


KEY = jax.random.key(0)


def close(actual, wanted, tol=1e-9):
    np.testing.assert_allclose(actual, wanted, rtol=tol, atol=tol)


def test_train_and_validate():
    seen = []

    def fit(part):
        seen.append(np.asarray(part["id"]))
        return erm.ridge(part["x"], part["y"])

    def loss(w, part):
        return (part["y"] - part["x"] @ w) ** 2

    data = {"x": RNG.normal(size=(10, 2)), "y": RNG.normal(size=10)}
    data = jax.tree.map(jnp.asarray, {**data, "id": np.arange(10)})
    result = train_and_validate(KEY, data, fit, loss, 0.3)
    (train,) = seen
    rest = np.setdiff1d(np.arange(10), train)
    assert len(rest) == 3
    x, y = np.asarray(data["x"]), np.asarray(data["y"])
    w = np.linalg.lstsq(x[train], y[train])[0]
    close(result.hypothesis, w)
    close(result.train_error, ((y - x @ w)[train] ** 2).mean())
    close(result.validation_error, ((y - x @ w)[rest] ** 2).mean())
    for fraction in (0.0, 1.0, 0.01):
        with pytest.raises(ValueError, match="validation_fraction"):
            train_and_validate(KEY, data, fit, loss, fraction)
    with pytest.raises(ValueError, match="one length"):
        train_and_validate(KEY, {**data, "y": data["y"][:3]}, fit, loss)


@pytest.mark.parametrize(
    ("train", "validation", "baseline", "verdict"),
    [
        (1.0, 1.1, 1.0, "fine"),
        (0.5, 0.6, 1.0, "fine"),
        (1.0, 1.6, 1.0, "overfitting"),
        (0.0, 1.0, 1.0, "overfitting"),
        (3.0, 3.1, 1.0, "underfitting"),
        (1.6, 1.0, 1.0, "unlucky split"),
        (0.0, 0.0, 0.0, "fine"),
    ],
)
def test_diagnosis(train, validation, baseline, verdict):
    """T-E7."""
    assert diagnose(train, validation, baseline).verdict == verdict
    assert diagnose(train, validation, baseline).advice


def test_diagnosis_refuses_bad_arguments():
    for tol in (1.0, 0.5, np.inf, np.nan):
        with pytest.raises(ValueError, match="tol must be > 1"):
            diagnose(1.0, 1.0, 1.0, tol)
    with pytest.raises(ValueError, match="validation_error"):
        diagnose(1.0, np.nan, 1.0)
