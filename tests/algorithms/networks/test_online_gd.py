"""One step per data point."""

import numpy as np
import optax
import pytest

from fedjax_core.algorithms.networks import online_gd
from fedjax_core.networks.schedules import power_decay

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        (power_decay(shift=6), lambda t: 1 / (t + 5)),
        (power_decay(power=0.5, shift=6), lambda t: (t + 5) ** -0.5),
    ],
    ids=["1/(t+5)", "1/sqrt(t+5)"],
)
def test_online_descent_follows_exercise_4_3(schedule, rate):
    rng = np.random.default_rng(24)
    true = np.array([1.0, -2.0])
    X = rng.uniform(-1, 1, size=(2000, 2))
    y = X @ true + 0.1 * rng.normal(size=2000)
    path = np.asarray(online_gd.online_gd(X, y, schedule))
    w = np.zeros(2)
    for t in range(1, 41):
        w = w + 2 * rate(t) * X[t - 1] * (y[t - 1] - w @ X[t - 1])
        np.testing.assert_allclose(path[t - 1], w, rtol=1e-9)
    assert np.linalg.norm(path[-1] - true) < 0.1
    constant = online_gd.online_gd(X[:1], y[:1], optax.constant_schedule(0.1))
    np.testing.assert_allclose(constant, 0.2 * X[:1] * y[:1, None])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: online_gd.online_gd(np.ones((2, 1)), np.ones(3), 0.1), "shapes"),
        (lambda: online_gd.online_gd(np.ones((2, 1)), np.ones(2), 0.0), "eta"),
    ],
)
def test_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()
