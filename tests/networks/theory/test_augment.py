"""Augmented data are a penalty."""

import jax
import numpy as np
import pytest

from fedjax_core.networks.theory import augment, erm

pytestmark = pytest.mark.usefixtures("x64")


RNG = np.random.default_rng(0)


KEY = jax.random.key(0)


def close(actual, wanted, tol=1e-9):
    np.testing.assert_allclose(actual, wanted, rtol=tol, atol=tol)


def test_deterministic_augmentation_is_ridge():
    """T-R1."""
    X, y, ref = RNG.normal(size=(6, 3)), RNG.normal(size=6), RNG.normal(size=3)
    rows = augment.ridge_rows(X, y, 0.4, ref)
    plain, penalised = erm.linear_risk(*rows), erm.linear_risk(X, y, 0.4, ref)
    for part, wanted in zip(plain, penalised, strict=True):
        close(9 / 6 * part, wanted)
    close(erm.ridge(*rows), erm.ridge(X, y, 0.4, ref))


def test_interpolation():
    """T-R3."""
    X, y = RNG.normal(size=(4, 2)), RNG.normal(size=4)
    more, labels = augment.interpolate(X, y)
    assert more.shape == (100 * 4 * 3, 2)
    assert labels.shape == (1200,)
    first, second = more[:100], more[100:200]  # from point 0 to 1, from 0 to 2
    close(first[0], X[0])
    close(second[0], X[0])
    close(first[99], X[0] + 0.99 * (X[1] - X[0]))
    close(labels[125], y[0] + 0.25 * (y[2] - y[0]))
    assert augment.interpolate(X[:1], y[:1])[0].shape == (0, 2)


def test_noisy_copies_are_ridge_in_expectation():
    """5 standard errors, a false alarm in two million keys."""
    X, y, w = RNG.normal(size=(5, 3)), RNG.normal(size=5), RNG.normal(size=3)
    noisy, labels = augment.noisy_copies(KEY, X, y, 0.5, copies=20_000)
    assert noisy.shape == (100_000, 3)
    loss = ((labels - noisy @ w) ** 2).reshape(-1, 5).mean(1)
    wanted = ((y - X @ w) ** 2).mean() + 0.5 * (w @ w)
    assert abs(loss.mean() - wanted) < 5 * loss.std() / np.sqrt(len(loss))
