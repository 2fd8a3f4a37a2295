r"""SCAFFOLD: local SGD corrected by control variates.

Client :math:`i` of the cohort S starts at :math:`y = x` and takes :math:`K_i` local
steps

.. math::

  y \leftarrow y - \eta_l (g_i(y) - c_i + c), \qquad
  c_i^+ = c_i - c + \frac{x - y}{K_i \eta_l} \quad \text{(option II)},

and the server moves by uniform means over the cohort,

.. math::

  x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x), \qquad
  c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i) .

Option II is the mean of the client's :math:`g_i` where these are steps of plain SGD.
With another optimiser :math:`(x - y) / (K_i \eta_l)` would have its momentum, its decay
of weights and its schedule in it, so that mean itself is taken.

References:
  Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated
  Learning", ICML 2020, Algorithm 1.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import server
from fedjax_core.arrays import repeat_rows
from fedjax_core.local import LocalConfig, init_bytes, local_sgd, with_stats
from fedjax_core.map import map_clients
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction, mean
from fedjax_core.transform import Transform, identity, with_transform
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    LossFn,
    Params,
    Positive,
    trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of SCAFFOLD, with those of `LocalConfig`.

    Attributes:
      client_lr: :math:`\eta_l`, step size of the clients.
      server_lr: :math:`\eta_g`, step size of the server.
    """

    server_lr: Positive = 1.0


class State(NamedTuple):
    """What survives a round."""

    params: Params
    control: Params  # c, the server's control variate
    downlink: Any  # of the downlink transform
    clients: Any  # [N, ...], the c_i and the state of the transform


def _summed() -> optax.GradientTransformation:
    """Gradients pass, and are added up in the state."""

    def update(updates, state, params=None):
        del params
        return updates, jax.tree.map(jnp.add, state, updates)

    return optax.GradientTransformation(
        lambda params: optax.tree.zeros_like(params), update
    )


def _optimizer(
    config: Config, given: optax.GradientTransformation | None
) -> optax.GradientTransformation:
    if given is None:
        return optax.sgd(config.client_lr)
    return optax.chain(_summed(), given)


def client_program(
    config: Config,
    loss_fn: LossFn,
    client_optimizer: optax.GradientTransformation | None = None,
) -> ClientProgram:
    """One client of Algorithm 1; shared is ``(x, c)``, the client state is ``c_i``."""
    local = local_sgd(loss_fn, _optimizer(config, client_optimizer))

    def init(shared, control_i, turn):
        params, control = shared
        correction = jax.tree.map(jnp.subtract, control, control_i)
        carry = local.init(params, (), turn)
        return carry._replace(correction=correction)

    def finish(shared, carry, control_i, turn):
        params, _ = shared
        delta = jax.tree.map(jnp.subtract, trained(carry.params), trained(params))
        if client_optimizer is None:
            total = jax.tree.map(lambda d: -d / config.client_lr, delta)
        else:
            total = carry.opt_state[0]
        new = jax.tree.map(
            lambda c, correct, t: jnp.astype(t / turn.num_steps - correct, c.dtype),
            control_i,
            carry.correction,
            total,
        )
        update = {"delta": delta, "control": jax.tree.map(jnp.subtract, new, control_i)}
        metrics = {"train_loss": carry.train_loss}
        return with_stats(update, carry.params), new, metrics

    return ClientProgram(init, local.step, finish)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
    transform: Transform | None = None,
    reduce: Reduction | None = None,
    downlink: Transform | None = None,
) -> Algorithm:
    """Builds SCAFFOLD for the given loss.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      client_optimizer: instead of SGD with ``config.client_lr``, given the corrected
        gradients; control variates are then the mean of a client's gradients.
      transform: applied to every message, the pair of delta and control variate.
      reduce: instead of the uniform mean, of both.
      downlink: applied to the server's steps of model and control variate before
        clients receive them.
    """
    check_parts(
        Config,
        config,
        loss_fn,
        client_optimizer=client_optimizer,
        transform=transform,
        reduce=reduce,
        downlink=downlink,
    )
    transform, reduce = transform or identity(), reduce or mean("uniform")
    client = with_transform(
        client_program(config, loss_fn, client_optimizer), transform
    )

    def init(params, num_clients):
        zeros = jax.tree.map(jnp.zeros_like, trained(params))
        pair = {"delta": zeros, "control": zeros}
        clients = repeat_rows((zeros, transform.init(pair)), num_clients)
        return State(params, zeros, downlink.init(pair) if downlink else (), clients)

    def round(state, cohort, key):
        results = map_clients(
            client,
            (state.params, state.control),
            cohort,
            key,
            reduce=reduce,
            client_state=state.clients,
        )
        update = trained(results.update)
        share = server.share(reduce, results, cohort)  # |S| / N
        step = {
            "delta": jax.tree.map(lambda d: config.server_lr * d, update["delta"]),
            "control": jax.tree.map(lambda d: share * d, update["control"]),
        }
        step, kept, sent = server.send(
            downlink, state.params, step, state.downlink, cohort, key
        )
        params = server.move(state.params, step["delta"], results.update)
        control = optax.apply_updates(state.control, step["control"])
        new = State(params, control, kept, results.client_state)
        return new, results.metrics | sent

    return Algorithm(
        name="scaffold",
        config=config,
        work=config.work,
        init=init,
        round=round,
        # Its correction and its control variate, before and after.
        client_bytes=init_bytes(_optimizer(config, client_optimizer), models=3),
        parts={
            "client_optimizer": "custom" if client_optimizer else "sgd",
            "transform": transform.name,
            "reduce": reduce.name,
            "downlink": downlink.name if downlink else "none",
        },
    )
