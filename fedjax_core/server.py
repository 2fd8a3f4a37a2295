"""The server's step: what the reduced update of a round does to the model."""

import jax
import jax.numpy as jnp
import optax

from fedjax_core.types import Params, PyTree, Stateful, trained, with_trained


def init(optimizer: optax.GradientTransformation, params: Params) -> PyTree:
    """The optimiser's state for the trained parameters.

    Its moments are float32 or wider, as the mean delta is that arrives.
    """

    def widen(p: jax.Array) -> jax.Array:
        return p.astype(jnp.promote_types(p.dtype, jnp.float32))

    return optimizer.init(jax.tree.map(widen, trained(params)))


def step(
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: PyTree,
    update: PyTree,
) -> tuple[Params, PyTree]:
    """Takes one step of `optimizer`, whose gradient is minus the mean delta.

    Running statistics become the mean of the clients', whatever the optimiser; integers
    among them are rounded. Where no client has weight they stay as they were.

    Args:
      optimizer: any optax transformation.
      params: the model; a `Stateful` where it keeps running statistics.
      opt_state: see `init`.
      update: the reduced update, the mean delta or a `Stateful`.

    Returns:
      The new model, in the dtypes of the old one, and the optimiser's state.
    """
    delta = trained(update)
    gradient = jax.tree.map(jnp.negative, delta)
    updates, opt_state = optimizer.update(gradient, opt_state, trained(params))
    new = with_trained(params, optax.apply_updates(trained(params), updates))
    if not isinstance(new, Stateful):
        return new, opt_state
    total, weight = update.stats

    def average(old: jax.Array, total: jax.Array) -> jax.Array:
        # Sums over weights, not changes added up: no variance is rounded below 0.
        mean = total / jnp.where(weight > 0, weight, 1).astype(total.dtype)
        if jnp.issubdtype(old.dtype, jnp.integer):
            mean = jnp.round(mean)
        return jnp.where(weight > 0, mean.astype(old.dtype), old)

    return new._replace(stats=jax.tree.map(average, new.stats, total)), opt_state
