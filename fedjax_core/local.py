"""Local training: the client programs that most methods are made of."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core.map import all_finite, sum_of_values
from fedjax_core.metrics import Mean
from fedjax_core.types import (
    Batch,
    ClientProgram,
    Key,
    LossFn,
    Params,
    PyTree,
    Stateful,
    trained,
    with_trained,
)


class Carry(NamedTuple):
    """A client in the middle of its local steps."""

    params: Params
    opt_state: Any
    train_loss: Mean  # over local steps, each the mean loss of its batch


def with_stats(update: PyTree, params: Params) -> PyTree:
    """An update of trained parameters, with the statistics of the client's `params`."""
    if not isinstance(params, Stateful):
        return update
    stats = jax.tree.map(
        lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), params.stats
    )
    return Stateful(update, Mean(stats, jnp.float32(1)))


def batch_loss(
    loss_fn: LossFn, params: Params, batch: Batch, key: Key
) -> tuple[jax.Array, PyTree]:
    """The mean loss of a batch's real examples, ``[]``, and the new statistics."""
    losses, stats = loss_fn(params, batch, key), ()
    if isinstance(params, Stateful):
        losses, stats = losses
    mask = batch["example_mask"]
    if losses.shape != mask.shape:
        raise ValueError(
            f"loss_fn must return one loss per example, shape {mask.shape}, got shape "
            f"{losses.shape}."
        )
    return jnp.where(mask, losses, 0.0).sum() / jnp.maximum(mask.sum(), 1), stats


def sgd_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    carry: Carry,
    batch: Batch,
    key: Key,
    correction: Params | None = None,
    scale: PyTree = None,
) -> Carry:
    """One local step of `optimizer` on the batch's mean loss.

    Args:
      loss_fn: per-example losses.
      optimizer: any optax transformation.
      carry: where the client stands.
      batch: examples with ``example_mask``.
      key: for the loss (dropout and the like).
      correction: added to the gradient, as control variates are.
      scale: a factor of the step, or one for each parameter.
    """
    start = trained(carry.params)

    def objective(params):
        return batch_loss(loss_fn, with_trained(carry.params, params), batch, key)

    (loss, stats), grads = jax.value_and_grad(objective, has_aux=True)(start)
    if correction is not None:
        grads = jax.tree.map(jnp.add, grads, correction)
    # Line searches and plateau rules ask for the loss; others never see these.
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        grads,
        carry.opt_state,
        start,
        value=loss,
        grad=grads,
        value_fn=lambda params: objective(params)[0],
    )
    if scale is not None:
        factors = jax.tree.broadcast(scale, updates)
        updates = jax.tree.map(lambda f, u: (f * u).astype(u.dtype), factors, updates)
    params = with_trained(carry.params, optax.apply_updates(start, updates))
    if isinstance(params, Stateful):
        params = params._replace(stats=stats)
    seen = carry.train_loss
    this = Mean(loss.astype(seen.total.dtype), jnp.ones_like(seen.count))
    return Carry(params, opt_state, seen + this)


def local_sgd(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule | None = None,
    keep_optimizer: bool = False,
) -> ClientProgram:
    """Local steps of `optimizer` from the server's parameters; the update is the delta.

    ``shared`` is the server's parameters. Metrics: "train_loss", the mean over local
    steps.

    Args:
      loss_fn: per-example losses.
      optimizer: any optax transformation. It starts anew in every round, and with it a
        schedule inside it, which counts local steps: rates that follow the rounds are
        `schedule`.
      schedule: round (from 0) -> a factor of every local step, right where the rate is
        the last factor of the optimiser, as in SGD with momentum or Adam.
      keep_optimizer: the client's row of the state is the optimiser's state (start with
        ``optimizer.init(trained(params))``), which goes on where the client left it.
    """

    def init(params, client_state, turn):
        del turn
        opt_state = client_state if keep_optimizer else optimizer.init(trained(params))
        return Carry(params, opt_state, Mean.zero())

    def step(params, carry, batch, turn):
        del params
        scale = None if schedule is None else jnp.asarray(schedule(turn.round))
        return sgd_step(loss_fn, optimizer, carry, batch, turn.key, scale=scale)

    def finish(params, carry, client_state, turn):
        del turn
        local = carry.params

        def delta():
            return jax.tree.map(jnp.subtract, trained(local), trained(params))

        # Finite local parameters prove the delta finite, short of parameters at the end
        # of the number range on both sides. Looking at them instead, XLA adds the delta
        # up without writing it out first.
        finite = jax.lax.cond(
            jnp.isfinite(sum_of_values(local)),
            lambda: jnp.bool_(True),
            lambda: all_finite(with_trained(local, delta())),
        )
        failure = jnp.where(finite, 0, 1)
        metrics = {"train_loss": carry.train_loss, "failure": failure}
        kept = carry.opt_state if keep_optimizer else client_state
        return with_stats(delta(), local), kept, metrics

    return ClientProgram(init, step, finish)
