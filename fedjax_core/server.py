"""The server's step: what the reduced update of a round does to the model.

In three parts, so that a method can put its own between them: `direction` is what the
optimiser makes of the mean delta, `send` what clients receive of it, and `move` the new
model. A server that has data of its own trains on them by `fit`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from fedjax_core import random
from fedjax_core.arrays import num_bytes, wide
from fedjax_core.local import Carry, sgd_step
from fedjax_core.map import ClientResults
from fedjax_core.metrics import Bytes, Mean
from fedjax_core.reduce import Reduction
from fedjax_core.transform import Message, Transform, dense_bits
from fedjax_core.types import (
    Cohort,
    Key,
    LocalWork,
    LossFn,
    Metrics,
    Params,
    PyTree,
    Stateful,
    trained,
    with_trained,
)


def init(optimizer: optax.GradientTransformation, params: Params) -> PyTree:
    """The optimiser's state for the trained parameters.

    Its moments are float32 or wider, as the mean delta is that arrives.

    Raises:
      TypeError: the optimiser asks for more than the mean delta.
    """
    weights = jax.tree.map(wide, trained(params))
    state = optimizer.init(weights)
    try:
        jax.eval_shape(optimizer.update, weights, state, weights)
    except TypeError as error:
        if "keyword" not in str(error):
            raise
        raise TypeError(
            f"server_optimizer must work from the mean delta alone, got one that asks "
            f"for more ({error}): the server has no loss to give."
        ) from None
    return state


def direction(
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: PyTree,
    update: PyTree,
) -> tuple[PyTree, PyTree]:
    """What `optimizer` adds to the trained parameters, and its new state.

    Its gradient is minus the mean delta (Reddi et al., ICLR 2021, Algorithm 1).
    """
    gradient = jax.tree.map(jnp.negative, trained(update))
    return optimizer.update(gradient, opt_state, trained(params))


def share(reduce: Reduction, results: ClientResults, cohort: Cohort) -> jax.Array:
    """What turns the mean over a cohort S into the sum over S divided by N; ``[]``.

    :math:`|S| / N` over valid clients. Where the reduction adds noise |S| is private,
    and the factor is the constant by which that divides, over N.

    Raises:
      ValueError: when a round is traced, a noisy reduction without such a constant.
    """
    size = results.metrics["valid_clients"]
    if reduce.noisy:
        size = reduce.expected_cohort_size
        if size is None:
            raise ValueError(
                f"reduce must have an expected_cohort_size where it is noisy, for how "
                f"many clients took part is private, got {reduce.name}."
            )
    return jnp.asarray(size / cohort.num_clients)


def send(
    downlink: Transform | None,
    params: Params,
    step: PyTree,
    kept: PyTree,
    cohort: Cohort,
    key: Key,
) -> tuple[PyTree, PyTree, Metrics]:
    """The server's step as clients receive it.

    Args:
      downlink: a transform with the server's own state: compression, say. None sends
        the model itself, which `map_clients` has counted.
      params: the model, whose running statistics are sent beside the step as they are.
      step: what the server adds to what clients have.
      kept: ``downlink.init(step)`` before the first round, then what this returned.
      cohort: receives one message a client, as if each followed every round.
      key: the round's key.

    Returns:
      The step that everybody takes, the transform's state, and "downlink_bytes" for the
      metrics of the round.
    """
    if downlink is None:
        return step, kept, {}
    message = Message(step, dense_bits(step))
    message, kept = downlink.apply(message, kept, random.stream(key, "downlink"))
    statistics = num_bytes(params) - num_bytes(trained(params))
    sent = message.bits.as_bytes() + Bytes.of(statistics)
    return message.update, kept, {"downlink_bytes": sent * cohort.client_mask.sum()}


def move(params: Params, step: PyTree, update: PyTree) -> Params:
    """The new model, in the dtypes of the old one.

    Running statistics become the mean of the clients', whatever the optimiser; integers
    among them are rounded. Where no client has weight they stay as they were.

    Args:
      params: the model; a `Stateful` where it keeps running statistics.
      step: what is added to the trained parameters.
      update: the reduced update, where the statistics are.
    """
    new = with_trained(params, optax.apply_updates(trained(params), step))
    if not isinstance(new, Stateful):
        return new
    total, weight = update.stats

    def average(old: jax.Array, total: jax.Array) -> Any:
        # Sums over weights, not changes added up: no variance is rounded below 0.
        mean = total / jnp.where(weight > 0, weight, 1).astype(total.dtype)
        if jnp.issubdtype(old.dtype, jnp.integer):
            mean = jnp.round(mean)
        return jnp.where(weight > 0, mean.astype(old.dtype), old)

    return new._replace(stats=jax.tree.map(average, new.stats, total))


def fit(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: Params,
    examples: Mapping[str, ArrayLike],
    key: Key,
    work: LocalWork,
    *,
    average: int = 1,
) -> tuple[Params, jax.Array]:
    """Trains a model on data of the server, in one compiled loop.

    All that is random comes from `key`: the same call ends, to the bit, with the same.

    Args:
      loss_fn: per-example losses.
      optimizer: any optax transformation; it starts anew.
      params: the model to start from.
      examples: leaves ``[n, ...]``.
      key: of the order of examples and of the loss.
      work: epochs, each in an order of its own, or steps, and their batch size.
      average: the result is the mean over its last so many steps (stochastic weight
        averaging, Izmailov et al., UAI 2018); 1 is where it ends.

    Returns:
      The model, and the mean loss over steps.

    Raises:
      ValueError: no step, for `work` drops short batches and n is below one.
    """
    data = jax.tree.map(jnp.asarray, dict(examples))
    n = jax.tree.leaves(data)[0].shape[0]
    per_epoch, size = work.steps_per_epoch(n), work.batch_size
    if per_epoch < 1:
        raise ValueError(
            f"work must have a step on {n} public examples, got batch_size={size} with "
            f"short batches dropped."
        )
    steps = work.epochs * per_epoch if work.steps is None else work.steps
    epochs = jax.random.split(random.stream(key, "order"), -(-steps // per_epoch))
    order = jax.vmap(lambda k: jax.random.permutation(k, n))(epochs)
    order = jnp.pad(order, ((0, 0), (0, max(0, per_epoch * size - n))), "constant")
    real = jnp.arange(order.shape[1]) < n

    def batches(x: jax.Array) -> jax.Array:
        return x[:, : per_epoch * size].reshape(-1, size)[:steps]

    rows, mask = batches(order), batches(jnp.broadcast_to(real, order.shape))
    keys = jax.random.split(random.stream(key, "step"), steps)

    def step(state: Any, now: Any) -> tuple[Any, None]:
        carry, total = state
        row, real, key, counts = now
        batch = {name: x[row] for name, x in data.items()} | {"example_mask": real}
        carry = sgd_step(loss_fn, optimizer, carry, batch, key)
        if average > 1:
            at = trained(carry.params)
            total = jax.tree.map(lambda t, p: t + counts * wide(p), total, at)
        return (carry, total), None

    weights = trained(params)
    start = Carry(params, optimizer.init(weights), Mean.zero())
    total = jax.tree.map(lambda p: jnp.zeros_like(wide(p)), weights)
    counts = (jnp.arange(steps) >= steps - average).astype(jnp.float32)
    (end, total), _ = jax.lax.scan(
        step, (start, total if average > 1 else ()), (rows, mask, keys, counts)
    )
    if average <= 1:
        return end.params, end.train_loss.value
    count = min(average, steps)
    mean = jax.tree.map(lambda t, p: (t / count).astype(p.dtype), total, weights)
    return with_trained(end.params, mean), end.train_loss.value
