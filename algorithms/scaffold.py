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

References:
  Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated
  Learning", ICML 2020, Algorithm 1.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check, server
from fedjax_core.local import Carry, sgd_step, with_stats
from fedjax_core.map import map_clients
from fedjax_core.metrics import Mean, Sum
from fedjax_core.reduce import mean
from fedjax_core.transform import dense_bits
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    LocalWork,
    LossFn,
    Params,
    trained,
    with_trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    r"""Hyper-parameters of SCAFFOLD.

    Attributes:
      client_lr: :math:`\eta_l`, step size of the clients.
      server_lr: :math:`\eta_g`, step size of the server.
      batch_size: examples per local step.
      local_epochs: passes over a client's examples per round.
      local_steps: local steps per round instead of epochs, the same for every client.
    """

    client_lr: float = 0.1
    server_lr: float = 1.0
    batch_size: int = 20
    local_epochs: int = 1
    local_steps: int | None = None

    def __post_init__(self):
        check.positive(client_lr=self.client_lr, server_lr=self.server_lr)
        check.positive_int(batch_size=self.batch_size, local_epochs=self.local_epochs)
        if self.local_steps is not None:
            check.positive_int(local_steps=self.local_steps)


class State(NamedTuple):
    """What survives a round."""

    params: Params
    control: Params  # c, the server's control variate
    clients: Params  # [N, ...], the c_i


def client_program(config: Config, loss_fn: LossFn) -> ClientProgram:
    """One client of Algorithm 1; shared is ``(x, c)``, the client state is ``c_i``."""
    sgd = optax.sgd(config.client_lr)

    def init(shared, control_i, key):
        del key
        params, control = shared
        correction = jax.tree.map(jnp.subtract, control, control_i)
        return Carry(params, sgd.init(trained(params)), Mean.zero()), correction

    def step(shared, carry, batch, key):
        del shared
        carry, correction = carry
        return sgd_step(loss_fn, sgd, carry, batch, key, correction), correction

    def finish(shared, carry, control_i, key):
        del key
        (params, _), (carry, correction) = shared, carry
        # K_i; padding clients take no step, and their 0 / 0 would spoil gradients.
        steps = jnp.maximum(carry.train_loss.count, 1)
        delta = jax.tree.map(jnp.subtract, trained(carry.params), trained(params))
        new = jax.tree.map(
            lambda c, correct, d: jnp.astype(
                -correct - d / (steps * config.client_lr), c.dtype
            ),
            control_i,
            correction,
            delta,
        )
        update = {"delta": delta, "control": jax.tree.map(jnp.subtract, new, control_i)}
        sent = with_trained(carry.params, update)
        metrics = {
            "train_loss": carry.train_loss,
            "uplink_bytes": Sum(jnp.float32(dense_bits(sent) / 8)),
        }
        return with_stats(update, carry.params), new, metrics

    return ClientProgram(init, step, finish)


def make(config: Config, loss_fn: LossFn) -> Algorithm:
    """Builds SCAFFOLD for the given loss."""
    client, server_sgd = client_program(config, loss_fn), optax.sgd(config.server_lr)
    work = LocalWork(
        batch_size=config.batch_size,
        epochs=config.local_epochs,
        steps=config.local_steps,
    )

    def init(params, num_clients):
        zeros = jax.tree.map(jnp.zeros_like, trained(params))
        clients = jax.tree.map(
            lambda x: jnp.zeros((num_clients, *x.shape), x.dtype), zeros
        )
        return State(params, zeros, clients)

    def round(state, cohort, key):
        results = map_clients(
            client,
            (state.params, state.control),
            cohort,
            key,
            reduce=mean("uniform"),
            client_state=state.clients,
        )
        update = trained(results.update)
        params, _ = server.step(
            server_sgd,
            state.params,
            server.init(server_sgd, state.params),
            with_trained(results.update, update["delta"]),
        )
        share = results.metrics["valid_clients"] / cohort.num_clients  # |S| / N
        control = jax.tree.map(
            lambda c, d: c + (share * d).astype(c.dtype),
            state.control,
            update["control"],
        )
        down = 2 * dense_bits(params) / 8 * cohort.client_mask.sum()
        metrics = results.metrics | {"downlink_bytes": down}
        return State(params, control, results.client_state), metrics

    return Algorithm(name="scaffold", config=config, work=work, init=init, round=round)
