"""Deciders: from the losses of a cohort to the mixing coefficients of its updates.

The server of a method with fair mixing hears every client's loss at the model it sent,
before local training, and only then decides how much each update counts. A decider is
that decision, a pure pair in the style of optax; `fedjax_core.algorithms.fedavg.make`
takes one as `mixing`, beside any server optimiser.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check, random
from fedjax_core.arrays import as_float, is_known
from fedjax_core.local import full_loss
from fedjax_core.map import ClientResults, map_clients
from fedjax_core.types import Cohort, Key, LossFn, Params, PyTree


class Told(NamedTuple):
    """What clients tell before they train, in the order of the cohort's slots.

    Attributes:
      loss: ``[C]``, mean training loss at the server's model, 0 where not `valid`. NaN
        for a negative one, which no rule of this room has a meaning for: it reaches the
        model, where it is reported.
      valid: ``[C]`` bool, clients that count.
      client_id: ``[C]`` int32.
      num_examples: ``[C]`` int32.
    """

    loss: jax.Array
    valid: jax.Array
    client_id: jax.Array
    num_examples: jax.Array

    def mean(self, values: jax.Array) -> jax.Array:
        """The mean of values ``[C]`` over clients that count; 0 of none."""
        return jnp.where(self.valid, values, 0).sum() / jnp.maximum(self.valid.sum(), 1)

    def everyone(self, values: jax.Array, absent: ArrayLike, n: int) -> jax.Array:
        """Values ``[C]`` in the rows of their clients, ``[n]``; `absent` elsewhere."""
        row = jnp.where(self.valid, self.client_id, n)
        return jnp.full(n, absent, values.dtype).at[row].set(values, mode="drop")

    def require_everyone(self, n: int, name: str) -> None:
        """Raises ValueError where there is no room in the cohort for all n clients."""
        if len(self.client_id) < n:
            raise ValueError(
                f"{name} must have all {n} clients in every round, got cohorts of "
                f"{len(self.client_id)}."
            )

    def of_cohort(self, rows: jax.Array) -> jax.Array:
        """The cohort's part of a row of all clients ``[n]``; 0 where not valid."""
        return jnp.where(self.valid, rows[jnp.maximum(self.client_id, 0)], 0)


def hear(
    loss_fn: LossFn, params: Params, cohort: Cohort, key: Key
) -> tuple[ClientResults, Told]:
    """The pass in which clients tell their loss at the server's model, in whole epochs.

    The round's other pass leaves out whom this one excludes, ``cohort.only(valid)``,
    and both are counted by `fedjax_core.map.two_passes`.
    """
    key, epochs = random.stream(key, "losses"), cohort.first_epochs()
    results = map_clients(full_loss(loss_fn), params, epochs, key, reduce=())
    loss = jnp.where(results.valid, results.client_metrics["loss"], 0)
    loss = jnp.where(loss < 0, jnp.nan, loss)
    told = Told(loss, results.valid, cohort.client_id, cohort.num_examples)
    return results, told


class Decider(NamedTuple):
    """How a server mixes.

    Attributes:
      init: ``num_clients -> state``, a pytree.
      update: ``(state, told) -> (state, weights)``, weights ``[C]`` >= 0 in any scale,
        0 where not valid.
      name: what it is, recorded with a run.
    """

    init: Callable[[int], PyTree]
    update: Callable[[PyTree, Told], tuple[PyTree, jax.Array]]
    name: str


Prior = Literal["examples", "uniform"]


def tilted(
    response: Callable[[jax.Array], jax.Array], prior: Prior = "examples", *, name: str
) -> Decider:
    r"""The rule :math:`p_i \propto q_i \exp(r(F_i))`, which keeps no state.

    It minimises :math:`-\langle p, r \rangle + \mathrm{KL}(p \,\|\, q)` over the
    simplex (Hahn 2024, equation 3.2, whose plain entropy would leave out :math:`q`).

    Args:
      response: losses ``[C]`` -> responses, over the step size of the regulariser.
      prior: :math:`q`: "examples" or "uniform".
      name: of the rule.
    """
    check.one_of(get_args(Prior), prior=prior)

    def update(state, told):
        q = told.num_examples if prior == "examples" else jnp.ones_like(told.client_id)
        q = jnp.where(told.valid, q, 0).astype(told.loss.dtype)
        q = q / jnp.maximum(q.sum(), 1)
        loss = jnp.where(q > 0, told.loss, told.loss.max())
        r = jnp.where(q > 0, response(loss), -jnp.inf)
        # Of no client the largest is -inf, which is no number to shift by.
        shift = jnp.where(told.valid.any(), r.max(), 0)
        weights = q * jnp.where(q > 0, jnp.exp(r - shift), 0)
        return state, weights / jnp.maximum(weights.sum(), jnp.finfo(r.dtype).tiny)

    return Decider(lambda num_clients: (), update, name)


def static(prior: Prior = "examples") -> Decider:
    """FedAvg's coefficients, whatever the losses: what others are compared with."""
    return tilted(jnp.zeros_like, prior, name=f"static({prior})")


def play(
    decider: Decider, losses: ArrayLike, num_examples: ArrayLike | None = None
) -> jax.Array:
    """Decisions on losses that are known in advance, all clients in every round.

    Losses are ``[T, K]``, >= 0 (else ValueError), examples ``[K]``, by default one
    each.

    Returns:
      ``[T, K]``: the coefficients that each round's updates are mixed by, decided after
      its losses. A decision before them, as regret counts it, is the round before's.
    """
    losses = as_float(losses)
    if losses.ndim != 2:
        raise ValueError(f"losses must be [T, K], got shape {losses.shape}.")
    if is_known(losses):
        check.each_in_range(0, float("inf"), losses=losses)
    K = losses.shape[1]
    sizes = jnp.ones(K, jnp.int32) if num_examples is None else num_examples

    def round(state, loss):
        told = Told(loss, jnp.ones(K, bool), jnp.arange(K), jnp.asarray(sizes))
        return decider.update(state, told)

    return jax.lax.scan(round, decider.init(K), losses)[1]
