r"""AFL: agnostic federated learning, for the worst mixture of the clients.

The server looks for the saddle point of :math:`\max_{p \in \Delta} \sum_i p_i F_i(w)`
over the simplex. Clients tell their loss at the server's model, then train as in
FedAvg; with a step size :math:`\gamma`,

.. math::

  p \leftarrow \mathrm{proj}_\Delta (p + \gamma F), \qquad
  w \leftarrow w + \sum_i p_i (w_i - w) .

It needs all clients in every round.

References:
  Mohri et al., "Agnostic Federated Learning", ICML 2019, with local training in place
  of one gradient, as Hahn (UNIST 2024), section 3.4, runs it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from optax.projections import projection_simplex

from fedjax_core.algorithms import fedavg
from fedjax_core.fair.decider import Decider
from fedjax_core.types import Algorithm, LossFn, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    r"""Hyper-parameters of AFL, with those of FedAvg.

    Attributes:
      mixing_lr: :math:`\gamma`, step size of the mixing coefficients.
    """

    mixing_lr: Positive = 0.1


def decider(config: Config) -> Decider:
    """Projected ascent; its state is the coefficients, ``[K]``."""

    def init(num_clients: int) -> jax.Array:
        return jnp.full(num_clients, 1 / num_clients, float)

    def update(p, told):
        told.require_everyone(len(p), "afl")
        # The projection sees differences alone, which large losses would round away.
        loss = told.loss - told.loss.max()
        # A client without a say moves like the average one.
        loss = told.everyone(loss, told.mean(loss), len(p))
        p = projection_simplex(p + config.mixing_lr * loss).astype(p.dtype)
        return p, told.of_cohort(p)

    return Decider(init, update, "afl")


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds AFL for the given loss; other arguments as in `fedavg.make`."""
    return fedavg.mixed(Config, config, loss_fn, decider, "afl", parts)
