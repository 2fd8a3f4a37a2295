"""Energies against closed forms, finite grids and the chains they promise."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import Packed, plan_round
from fedjax_core.energies import (
    Chains,
    Says,
    energy,
    langevin,
    mixture,
    step_sizes,
)
from fedjax_core.map import map_clients
from fedjax_core.types import ClientProgram, LocalWork

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def test_energies_are_a_classifiers_logits():
    logits, y = jnp.asarray(RNG.normal(size=(6, 4))), jnp.array([0, 3, 1, 2, 2, 0])
    joint, marginal = (energy(logits, y, kind) for kind in ("joint", "marginal"))
    of_class = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    rows = np.arange(6)
    np.testing.assert_allclose(np.exp(marginal - joint), of_class[rows, y], rtol=1e-5)
    every = [energy(logits, jnp.full(6, k)) for k in range(4)]
    total = -np.log(np.exp(-np.stack(every)).sum(0))
    np.testing.assert_allclose(marginal, total, rtol=1e-5)


def test_the_likelihoods_gradient_is_that_of_two_energies():
    # On a finite grid the normaliser is a sum, and nothing is left to sampling.
    grid, at = np.linspace(-2, 2, 9), 3

    def energies(theta):
        return theta[0] * grid**2 + theta[1] * jnp.cos(3 * grid) + theta[2] * grid

    def log_z(theta):
        return jax.nn.logsumexp(-energies(theta))

    theta = jnp.array([0.4, -0.7, 0.3])
    slopes, p = jax.jacobian(energies)(theta), jax.nn.softmax(-energies(theta))
    np.testing.assert_allclose(jax.grad(log_z)(theta), -(p @ slopes), rtol=1e-5)
    of_log_p = jax.grad(lambda theta: -energies(theta)[at] - log_z(theta))(theta)
    np.testing.assert_allclose(of_log_p, p @ slopes - slopes[at], rtol=1e-4, atol=1e-5)


SIZES = [3, 1, 7, 5]
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
TRAIN = Packed({"client": np.repeat(np.arange(4, dtype=np.int32), SIZES)}, OFFSETS)
CENTERS, SCALES = RNG.normal(size=(4, 2)), np.array([0.5, 1.0, 2.0, 0.3])
X = RNG.normal(size=(5, 2))


def quadratics(x):
    """Energies ``[4, M]`` of four clients."""
    return SCALES[:, None] * np.square(x[None] - CENTERS[:, None]).sum(-1)


def gradients(x):
    return 2 * SCALES[:, None, None] * (x[None] - CENTERS[:, None])


@partial(jax.jit, static_argnums=2)
def reduced(table, cohort, reduction):
    """What `mixture` makes of rows of a table, one for every client."""

    def say(shared, batch):
        return jax.tree.map(lambda rows: rows[batch["client"][0]], shared)

    program = ClientProgram(
        lambda shared, state, turn: jax.tree.map(lambda rows: rows[0], shared),
        lambda shared, carry, batch, turn: say(shared, batch),
        lambda shared, carry, state, turn: (carry, state, {}),
    )
    return map_clients(program, table, cohort, KEY, reduce=reduction).update


MIXTURE = mixture()


def mixed(log_weights, ids=(0, 1, 2, 3), x=X):
    cohort = plan_round(ids, TRAIN, LocalWork(batch_size=8), seed=0, round=0)
    table = Says(jnp.asarray(log_weights, float), jnp.asarray(gradients(x), float))
    return np.asarray(reduced(table, cohort, MIXTURE))


def test_the_mixture_follows_minus_the_logarithm_of_its_density():
    w = np.array(SIZES) / sum(SIZES)

    def energy_of_mixture(x):
        return -np.log((w[:, None] * np.exp(-quadratics(x))).sum(0))

    h, expected = 1e-5, np.zeros_like(X)
    for k in range(2):
        e = h * np.eye(2)[k]
        expected[:, k] = (energy_of_mixture(X + e) - energy_of_mixture(X - e)) / (2 * h)
    got = mixed(-quadratics(X))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    # Whatever all energies have in common is of no account, however large.
    np.testing.assert_allclose(mixed(-quadratics(X) + 500), got, rtol=1e-3, atol=1e-4)


def test_equal_energies_weigh_by_examples_and_one_client_alone():
    w = np.array(SIZES) / sum(SIZES)
    mean = np.tensordot(w, gradients(X), 1)
    np.testing.assert_allclose(mixed(np.full((4, 5), -2.0)), mean, rtol=1e-5)
    alone = mixed(-quadratics(X), [2])
    np.testing.assert_allclose(alone, gradients(X)[2], rtol=1e-5)
    np.testing.assert_array_equal(mixed(-quadratics(X), []), np.zeros_like(X))


def test_signs_change_weights_by_no_more_than_e_squared():
    signs = RNG.integers(-1, 2, (4, 5))
    got, g = mixed(signs), gradients(X)
    weights = np.array(SIZES)[:, None] * np.exp(signs)
    expected = np.einsum("im,imd->md", weights / weights.sum(0), g)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    ratios = np.exp(signs)[:, None] / np.exp(signs)
    assert ratios.max() <= np.exp(2) + 1e-9
    assert np.abs(got).max() <= np.abs(g).max()


def test_a_chain_on_a_quadratic_has_the_variance_of_its_recursion():
    # 4000 chains: the variance is off by 5 standard errors once in 2 million.
    a, step, noise, n = 2.0, 0.1, 0.3, 4000
    x = langevin(
        lambda x: a * x, jnp.zeros(n), KEY, step_size=step, noise=noise, num_steps=60
    )
    variance = noise**2 / (1 - (1 - step * a) ** 2)
    assert variance == pytest.approx(0.25)
    assert abs(x.mean()) < 5 * (variance / n) ** 0.5
    assert abs(x.var() / variance - 1) < 5 * (2 / n) ** 0.5
    # With the noise of Langevin's equation the bias of a finite step is as known.
    exact = 2 * step / (1 - (1 - step * a) ** 2)
    assert exact == pytest.approx(1 / a / (1 - step * a / 2))


def test_a_chain_without_noise_is_gradient_descent_within_its_range():
    x = jnp.array([1.5, -2.0])
    how = {"key": KEY, "step_size": 0.1, "noise": 0.0, "num_steps": 3}
    got = langevin(lambda x: 2 * x, x, **how)
    np.testing.assert_allclose(got, 0.8**3 * x, rtol=1e-6)
    held = langevin(lambda x: 2 * x, x, within=(-0.9, 0.9), **how)
    np.testing.assert_allclose(held, 0.9 * 0.8**2 * np.sign(x), rtol=1e-6)


def test_step_sizes_have_the_ends_and_the_shape_of_both_readings():
    made: Any = [step_sizes(10.0, 0.01, 500, form) for form in ("ddpm", "half")]
    ddpm, half = made
    at = jnp.arange(500)
    for schedule in (ddpm, half):
        assert (np.diff(jax.vmap(schedule)(at)) <= 1e-5).all()
        assert schedule(600) == schedule(499)
    close = partial(pytest.approx, abs=6e-3)
    known = {0: 9.9991, 250: 9.94, 450: 9.61, 490: 8.10, 498: 2.51, 499: 0.0100}
    assert {t: float(ddpm(t)) for t in known} == {t: close(v) for t, v in known.items()}
    known = {0: 10.0, 250: 4.99, 450: 0.25, 499: 0.01}
    assert {t: float(half(t)) for t in known} == {t: close(v) for t, v in known.items()}
    assert float(ddpm(0)) == pytest.approx(9.9991, abs=1e-4)
    assert float(ddpm(499)) == pytest.approx(0.01, abs=1e-4)


def test_impossible_chains_are_refused():
    with pytest.raises(ValueError, match="last_step must be >= 0 and finite, got -1"):
        Chains(last_step=-1.0)
    with pytest.raises(ValueError, match=r"within must be \(low, high\), got \(1, 0"):
        Chains(within=(1, 0))
    with pytest.raises(ValueError, match="schedule must be one of 'ddpm', 'half', got"):
        Chains(schedule="cosine")  # type: ignore[arg-type]
