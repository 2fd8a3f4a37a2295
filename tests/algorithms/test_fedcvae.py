"""The loss of a linear conditional VAE in NumPy, and its closed forms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.algorithms.generators import LATENT, SOFTMAX, K, linear_vae
from tests.algorithms.softmax_rounds import COHORTS, EXAMPLES, rounds

from fedjax_core import LocalWork
from fedjax_core.algorithms import fedcvae
from fedjax_core.generated import drawn

VAE, KEY = linear_vae(), jax.random.key(4)
PARAMS = VAE.init(KEY)
BATCH: Any = {k: v[:8] for k, v in EXAMPLES.items()}
CONFIG = fedcvae.Config(num_classes=K, per_class=2, work=LocalWork(batch_size=4))


def test_the_loss_is_squared_error_and_divergence():
    p = {k: np.asarray(v, np.float64) for k, v in PARAMS.items()}
    x, y = BATCH["x"].astype(np.float64), BATCH["y"]
    mean, log_var = x @ p["mean"] + p["of"][y], p["log_var"]
    z = mean + np.exp(log_var / 2) * np.asarray(jax.random.normal(KEY, mean.shape))
    error = ((x - z @ p["z"] - p["y"][y]) ** 2).sum(1)
    divergence = (mean**2 + np.exp(log_var) - 1 - log_var).sum(1) / 2
    for kl in (1.0, 0.25):
        got = fedcvae.vae_loss(VAE, kl)(PARAMS, BATCH, KEY)
        np.testing.assert_allclose(got, error + kl * divergence, rtol=1e-5)


def test_the_expected_loss_bounds_the_likelihood():
    # Of x = z A + B_y + e with e of variance 1/2 the loss is minus the evidence bound
    # and a constant, and with the posterior of z it is minus the likelihood itself.
    A, shift = np.asarray(PARAMS["z"], np.float64), np.asarray(PARAMS["y"], np.float64)
    x, y = BATCH["x"].astype(np.float64), BATCH["y"]
    precision = np.eye(2) + 2 * A @ A.T
    # Rotated so that the posterior's covariance is diagonal.
    values, Q = np.linalg.eigh(precision)
    turned = Q.T @ A
    mean = 2 * (x - shift[y]) @ turned.T / values
    fixed = VAE._replace(
        encode=lambda params, x, y: (
            jnp.asarray(mean, jnp.float32),
            jnp.broadcast_to(jnp.asarray(-np.log(values), jnp.float32), mean.shape),
        )
    )
    params = {**PARAMS, "z": jnp.asarray(turned, jnp.float32)}
    loss = jax.jit(jax.vmap(lambda k: fedcvae.vae_loss(fixed)(params, BATCH, k)))
    draws = np.asarray(loss(jax.random.split(KEY, 4000)), np.float64)
    cov = A.T @ A + np.eye(3) / 2
    gap = x - shift[y]
    mahalanobis = np.einsum("bi,ij,bj->b", gap, np.linalg.inv(cov), gap)
    exact = mahalanobis / 2 + np.linalg.slogdet(cov)[1] / 2 - 3 / 2 * np.log(1 / 2)
    # Eight means, off by 6 standard errors once in 60 million keys.
    error = 6 * draws.std(0) / len(draws) ** 0.5
    assert (np.abs(draws.mean(0) - exact) < error).all()


def test_both_networks_are_averaged_and_samples_are_drawn_by_class():
    algorithm = fedcvae.make(CONFIG, VAE, SOFTMAX)
    size = sum(x.size for x in jax.tree.leaves(PARAMS))
    ((state, metrics, _),) = rounds(algorithm, COHORTS[:1], params=PARAMS)
    assert metrics["uplink_bytes"] == 4 * size * len(COHORTS[0])
    draw = drawn(CONFIG, VAE.decode, LATENT)
    still = {**state.params, "z": jnp.zeros_like(state.params["z"])}
    np.testing.assert_allclose(draw(still), state.params["y"].repeat(2, 0))
    learnt = jax.jit(algorithm.model)(state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(learnt))


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match="kl must be >= 0 and finite, got -1"):
        fedcvae.Config(kl=-1)
