"""Local training: the client programs that most methods are made of."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import num_bytes, wide
from fedjax_core.map import all_finite, sum_of_values
from fedjax_core.metrics import Bytes, Mean
from fedjax_core.types import (
    Batch,
    Checked,
    ClientProgram,
    Key,
    LocalWork,
    LossFn,
    Params,
    Positive,
    PyTree,
    Stateful,
    trained,
    with_trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConfig(Checked):
    """Hyper-parameters of methods whose clients train.

    Attributes:
      client_lr: step size of the clients' SGD.
      work: local work per client and round.
    """

    client_lr: Positive = 0.1
    work: LocalWork = LocalWork()


class Carry(NamedTuple):
    """A client in the middle of its local steps."""

    params: Params
    opt_state: Any
    train_loss: Mean  # over local steps, each the mean loss of its batch
    correction: Params | None = None  # what `local_sgd` adds to every gradient


def with_stats(update: PyTree, params: Params) -> PyTree:
    """An update of trained parameters, with the statistics of the client's `params`."""
    if not isinstance(params, Stateful):
        return update
    stats = jax.tree.map(wide, params.stats)
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


def loss_and_gradient(
    loss_fn: LossFn, params: Params, batch: Batch, key: Key
) -> tuple[jax.Array, PyTree, Params]:
    """The loss of a batch, its gradient, and `params` with the new statistics."""

    def objective(weights):
        return batch_loss(loss_fn, with_trained(params, weights), batch, key)

    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    (loss, stats), gradient = value_and_grad(trained(params))
    if isinstance(params, Stateful):
        params = params._replace(stats=stats)
    return loss, gradient, params


def sgd_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    carry: Carry,
    batch: Batch,
    key: Key,
    correction: Params | None = None,
    scale: PyTree = None,
    **told: Any,
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
      **told: what an optimiser may ask for besides, as `by_round` does for ``round``.
    """
    start = trained(carry.params)
    loss, grads, moved = loss_and_gradient(loss_fn, carry.params, batch, key)
    if correction is not None:
        grads = jax.tree.map(lambda g, c: g + c.astype(g.dtype), grads, correction)

    # Line searches hand on whatever they do not know.
    def value_fn(params, round=None, phase=None):
        return batch_loss(loss_fn, with_trained(carry.params, params), batch, key)[0]

    # Line searches and plateau rules ask for the loss; others never see these.
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        grads,
        carry.opt_state,
        start,
        value=loss,
        grad=grads,
        value_fn=value_fn,
        **told,
    )
    if scale is not None:
        factors = jax.tree.broadcast(scale, updates)
        updates = jax.tree.map(lambda f, u: (f * u).astype(u.dtype), factors, updates)
    params = with_trained(moved, optax.apply_updates(start, updates))
    seen = carry.train_loss
    this = Mean(loss.astype(seen.total.dtype), jnp.ones_like(seen.count))
    return carry._replace(params=params, opt_state=opt_state, train_loss=seen + this)


def by_round(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Steps that follow the rounds, as the last part of a clients' optimiser.

    ``optax.chain(optax.sgd(0.1, 0.9), by_round(lambda t: 0.99**t))`` is SGD whose rate
    falls by 1 % a round: `schedule` makes a factor of every local step of the round,
    from 0. Only local training tells an optimiser its round.
    """

    def update(updates, state, params=None, *, round, **told):
        factor = jnp.asarray(schedule(round))
        return jax.tree.map(lambda u: (factor * u).astype(u.dtype), updates), state

    init = optax.identity().init
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def proximal_gradient(mu: ArrayLike, params: Params, center: Params) -> PyTree:
    r"""The gradient :math:`\mu (w - c)` of a proximal term, of trained parameters."""
    return jax.tree.map(lambda w, c: mu * (w - c), trained(params), trained(center))


def local_sgd(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    keep_optimizer: bool = False,
    proximal: ArrayLike | None = None,
) -> ClientProgram:
    r"""Local steps from the server's parameters; the update is the delta.

    ``shared`` is the server's parameters. Metrics: "train_loss", the mean over local
    steps. Methods that correct a client's gradients put what they add to them into the
    carry, in an `init` of their own.

    Args:
      loss_fn: per-example losses.
      optimizer: any optax transformation. It starts anew in every round, and with it a
        schedule inside it, which counts local steps: rates that follow the rounds are
        `by_round`.
      keep_optimizer: the client's row of the state is the optimiser's state (start with
        ``optimizer.init(trained(params))``), which goes on where the client left it.
      proximal: :math:`\mu` of the term :math:`\frac{\mu}{2} \lVert w - w_t \rVert^2`
        that is added to the loss, around the server's parameters :math:`w_t`.
    """

    def init(params, client_state, turn):
        opt_state = client_state if keep_optimizer else optimizer.init(trained(params))
        return Carry(params, opt_state, Mean.zero())

    def step(params, carry, batch, turn):
        correction = carry.correction
        if proximal is not None:
            pull = proximal_gradient(proximal, carry.params, params)
            correction = (
                pull if correction is None else jax.tree.map(jnp.add, correction, pull)
            )
        return sgd_step(
            loss_fn, optimizer, carry, batch, turn.key, correction, round=turn.round
        )

    def finish(params, carry, client_state, turn):
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


def init_bytes(*parts: Any, models: int = 0) -> Callable[[Params], int]:
    """Bytes of so many models and what optimisers and transforms make by `init`."""

    def count(params):
        shapes = jax.eval_shape(lambda: [part.init(trained(params)) for part in parts])
        return models * num_bytes(params) + num_bytes(shapes)

    return count


def check_whole_epochs(work: LocalWork) -> None:
    """Raises ValueError unless an epoch of `work` sees all of a client's examples."""
    check.instance(LocalWork, work=work)
    if work.steps is not None or work.drop_remainder:
        raise ValueError(
            f"work must count epochs and keep their short batches for a method that "
            f"looks at all of a client's examples, got {work}."
        )


def full_loss(loss_fn: LossFn) -> ClientProgram:
    """The mean loss of the client's examples at the server's parameters.

    ``shared`` is the parameters and the update empty; steps are those of one epoch, see
    `Cohort.first_epochs`. Metrics: "loss", over examples, and what sending it costs.
    """

    def step(params, carry, batch, turn):
        loss, _ = batch_loss(loss_fn, params, batch, turn.key)
        return _add_batch(carry, loss, batch)

    def finish(params, carry, client_state, turn):
        metrics = {"loss": carry, "uplink_bytes": Bytes.of(num_bytes(carry[0]))}
        return (), client_state, metrics

    return ClientProgram(lambda *_: Mean.zero(), step, finish)


def full_gradient(loss_fn: LossFn) -> ClientProgram:
    """The gradient of the client's mean loss at the server's parameters.

    ``shared`` is the parameters; steps are those of one epoch, see
    `Cohort.first_epochs`. Batches weigh by their examples, so that their size is of no
    account. Running statistics move as in local training. Metrics: "train_loss", the
    mean over examples.
    """

    def init(params, client_state, turn):
        total = jax.tree.map(lambda p: jnp.zeros_like(wide(p)), trained(params))
        return params, total, Mean.zero()

    def step(params, carry, batch, turn):
        local, total, seen = carry
        loss, grads, local = loss_and_gradient(loss_fn, local, batch, turn.key)
        count = batch["example_mask"].sum()
        total = jax.tree.map(lambda t, g: t + count * wide(g), total, grads)
        return local, total, _add_batch(seen, loss, batch)

    def finish(params, carry, client_state, turn):
        local, total, seen = carry
        gradient = jax.tree.map(
            lambda t, p: (t / jnp.maximum(seen.count, 1)).astype(p.dtype),
            total,
            trained(params),
        )
        return with_stats(gradient, local), client_state, {"train_loss": seen}

    return ClientProgram(init, step, finish)


def _add_batch(seen: Mean, loss: jax.Array, batch: Batch) -> Mean:
    """A mean over examples, with those of a batch of this mean loss."""
    count = batch["example_mask"].sum().astype(seen.count.dtype)
    return seen + Mean(count * loss.astype(seen.total.dtype), count)
