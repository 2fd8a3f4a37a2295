r"""How a node chooses, round by round, how much to learn from other clusters.

A policy is ``policy(key, tau, value) -> tau`` for all nodes at once: tau ``[n]`` in
[0, 1] are the weights of now and of the next round, and ``value(a)`` has for every node
the validation error, ``[n]``, that it would have had in this round with the weights a,
lower being better. Values of a node depend on its own weight alone.

The text writes maximum and ascent; values are errors here, which fall.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, (6.8), (6.13) and (6.14).
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from fedjax_core.types import Checked, Key, NonNegative, PositiveInt

Value = Callable[[jax.Array], jax.Array]


class Policy(Protocol):
    """See the module."""

    def __call__(self, key: Key, tau: jax.Array, value: Value) -> jax.Array:
        """The next weights."""
        ...


@dataclasses.dataclass(frozen=True)
class Greedy(Checked):
    """Takes the best of equally spaced weights from 0 to 1, (6.8).

    Attributes:
      num_actions: how many, >= 1; the smallest of those alike is taken, and none, NaN,
        where a value is NaN.
    """

    num_actions: PositiveInt = 21

    def __call__(self, key: Key, tau: jax.Array, value: Value) -> jax.Array:
        """The best action of every node."""
        del key
        actions = jnp.linspace(0, 1, self.num_actions, dtype=tau.dtype)
        values = jax.vmap(lambda a: value(jnp.full_like(tau, a)))(actions)
        return jnp.where(jnp.isnan(values).any(0), jnp.nan, actions[values.argmin(0)])


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Checked):
    """Deterministic policy gradient: a step down the slope of the value, (6.13).

    Attributes:
      step_size: >= 0.
    """

    step_size: NonNegative = 0.001

    def __call__(self, key: Key, tau: jax.Array, value: Value) -> jax.Array:
        """A step."""
        del key
        _, slope = jax.jvp(value, (tau,), (jnp.ones_like(tau),))
        return jnp.clip(tau - self.step_size * slope, 0, 1)


@dataclasses.dataclass(frozen=True)
class ActorCritic(Checked):
    """Stochastic actor-critic: towards a random action if it is better, else away.

    (6.14), with actions in [0, 1], so that every model they are judged by exists.

    Attributes:
      width: nu >= 0; actions are uniform on tau - nu / 2 to tau + nu / 2.
      step_size: >= 0, the part of the way.
    """

    width: NonNegative = 0.05
    step_size: NonNegative = 0.1

    def __call__(self, key: Key, tau: jax.Array, value: Value) -> jax.Array:
        """Draws an action and takes a step."""
        far = self.width * (jax.random.uniform(key, tau.shape, tau.dtype) - 0.5)
        action = jnp.clip(tau + far, 0, 1)
        worse = jnp.sign(value(action) - value(tau))
        return jnp.clip(tau - self.step_size * worse * (action - tau), 0, 1)


@dataclasses.dataclass(frozen=True)
class Batch(Checked):
    """Batch reinforcement learning: several steps of a policy in every round.

    Attributes:
      policy: of each.
      epochs: steps, >= 1.
    """

    policy: Policy
    epochs: PositiveInt = 3

    def __call__(self, key: Key, tau: jax.Array, value: Value) -> jax.Array:
        """Several steps, with keys of their own."""

        def one(epoch, tau):
            return self.policy(jax.random.fold_in(key, epoch), tau, value)

        return jax.lax.fori_loop(0, self.epochs, one, tau)
