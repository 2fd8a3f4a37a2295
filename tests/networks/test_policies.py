"""Policies that choose weights: steps in closed form, on values that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import policies

BEST = jnp.array([0.3, 0.0, 0.95, 0.5])
TAU = jnp.array([0.2, 0.4, 0.999, 0.5])
KEY = jax.random.key(7)


def value(a):
    """Parabolas; the last node has none."""
    return jnp.array([1.0, 2.0, 3.0, 0.0]) * (a - BEST) ** 2


def test_greedy_takes_the_best_of_the_grid_and_the_first_of_equals():
    tau = policies.Greedy(11)(KEY, TAU, value)
    np.testing.assert_allclose(tau, [0.3, 0.0, 0.9, 0.0], atol=1e-6)
    unknown = policies.Greedy(3)(KEY, TAU, lambda a: jnp.log(BEST - 0.5 * a))
    np.testing.assert_array_equal(jnp.isnan(unknown), BEST < 0.5)


def test_a_policy_gradient_steps_down_the_slope_within_0_and_1():
    tau = policies.PolicyGradient(0.1)(KEY, TAU, value)
    wanted = TAU - 0.1 * jnp.array([2.0, 4.0, 6.0, 0.0]) * (TAU - BEST)
    np.testing.assert_allclose(tau, wanted, rtol=1e-6)
    assert policies.PolicyGradient(9.0)(KEY, TAU, value).min() == 0
    assert policies.PolicyGradient(9.0)(KEY, TAU, value).max() == 1


def test_F7_an_actor_moves_towards_what_is_better_and_never_far():
    critic = policies.ActorCritic(0.05, 0.1)
    keys = jax.random.split(KEY, 200)
    moved = jax.vmap(lambda key: critic(key, TAU, value) - TAU)(keys)
    drawn = np.stack([jax.random.uniform(key, (4,)) for key in keys])
    actions = np.clip(np.asarray(TAU) + 0.05 * (drawn - 0.5), 0, 1)
    assert jnp.abs(moved).max() <= 0.1 * 0.05 / 2 + 1e-7
    far = actions - np.asarray(TAU)
    better = np.asarray(jax.vmap(value)(actions)) < np.asarray(value(TAU))
    there = (np.abs(far) > 1e-4) & (np.arange(4) < 3)
    towards = np.sign(moved) == np.sign(far)
    np.testing.assert_array_equal(towards[there], better[there])
    np.testing.assert_array_equal(moved[:, 3], 0)  # sign(0) is 0
    assert moved[:, 2].max() + TAU[2] <= 1


def test_a_batch_is_so_many_steps_with_keys_of_their_own():
    critic = policies.ActorCritic(0.5, 0.5)
    tau = TAU
    for epoch in range(3):
        tau = critic(jax.random.fold_in(KEY, epoch), tau, value)
    np.testing.assert_allclose(policies.Batch(critic, 3)(KEY, TAU, value), tau)


def test_steps_that_are_none_are_refused():
    for wrong, match in (
        (lambda: policies.Greedy(0), "num_actions must be >= 1"),
        (lambda: policies.PolicyGradient(-1.0), "step_size must be >= 0"),
        (lambda: policies.ActorCritic(width=-0.1), "width must be >= 0"),
        (lambda: policies.Batch(policies.Greedy(), 0), "epochs must be >= 1"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
