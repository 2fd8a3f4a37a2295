"""Losses and examples are read out of what nodes send."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import attacks, privacy
from fedjax_core.attacks.inversion import Recovered, invert_example, invert_gradients

pytestmark = pytest.mark.usefixtures("x64")


def test_gradients_give_the_second_moments_away(x64):
    rng = np.random.default_rng(6)
    X, y, eta = rng.normal(size=(7, 3)), rng.normal(size=7), 0.11
    w, gradients = np.zeros(3), []
    for _ in range(4):
        gradients.append(2 / 7 * X.T @ (X @ w - y))
        w = w - eta * gradients[-1]
    got = invert_gradients(np.array(gradients), eta)
    np.testing.assert_allclose(got.Q, X.T @ X / 7, rtol=1e-8)
    np.testing.assert_allclose(got.q, -2 * X.T @ y / 7, rtol=1e-12)
    with pytest.raises(
        ValueError, match=r"points must hold 4 affinely independent.*got 3"
    ):
        invert_gradients(np.array(gradients[:3]), eta)
    with pytest.raises(
        ValueError, match=r"points must hold 4 affinely independent.*got 2"
    ):
        invert_gradients(np.ones((4, 3)), eta)
    with pytest.raises(ValueError, match="step_size must be > 0"):
        invert_gradients(np.array(gradients), 0.0)


@pytest.mark.parametrize("label", [1.7, -0.4])
def test_one_example_is_read_out_up_to_its_sign(label, x64):
    x, eta = np.array([0.5, -2.0, 1.0]), 0.03
    g0 = -2 * label * x
    w = -eta * g0
    g1 = 2 * (x @ w - label) * x
    got_x, got_y = invert_example(jnp.asarray(g0), jnp.asarray(g1), eta)
    sign = np.sign(got_x @ x)
    np.testing.assert_allclose(sign * got_x, x, rtol=1e-9)
    np.testing.assert_allclose(sign * got_y, label, rtol=1e-9)


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
    gradients = attacks.fedgd_gradients(sent, np.stack(seen), eta, alpha, weight)
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
            lambda: attacks.from_gradients(np.c_[:3, :3], np.ones((3, 2))),
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
