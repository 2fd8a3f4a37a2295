r"""FedDyn: clients whose losses are changed so that their optima agree.

Client :math:`i` of the cohort S keeps an estimate :math:`h_i` of its gradient at the
solution, 0 at first. From :math:`w_t` it takes its local steps of SGD on

.. math::

  F_i(w) - \langle h_i, w \rangle + \frac{\alpha}{2} \lVert w - w_t \rVert^2

to reach :math:`w_t^i`, and sets :math:`h_i \leftarrow h_i - \alpha (w_t^i - w_t)`. The
server follows the mean of the :math:`h_i` over all N clients,

.. math::

  h \leftarrow h - \frac{\alpha}{N} \sum_{i \in S} (w_t^i - w_t), \qquad
  w_{t+1} = \frac{1}{|S|} \sum_{i \in S} w_t^i - \frac1\alpha h .

References:
  Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021,
  Algorithm 1. It solves each client's problem exactly; steps of SGD do so by and by.
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
    r"""Hyper-parameters of FedDyn, with those of `LocalConfig`.

    Attributes:
      alpha: :math:`\alpha > 0`, weight of the proximal term.
    """

    alpha: Positive = 0.1


class State(NamedTuple):
    """What survives a round."""

    params: Params
    gradient: Params  # h, the mean of the h_i
    clients: Any  # [N, ...], the h_i and the state of the transform


def client_program(config: Config, loss_fn: LossFn) -> ClientProgram:
    """One client of Algorithm 1; its state is ``h_i``."""
    local = local_sgd(loss_fn, optax.sgd(config.client_lr), proximal=config.alpha)

    def init(params, gradient_i, turn):
        carry = local.init(params, (), turn)
        return carry._replace(correction=jax.tree.map(jnp.negative, gradient_i))

    def finish(params, carry, gradient_i, turn):
        delta = jax.tree.map(jnp.subtract, trained(carry.params), trained(params))
        new = jax.tree.map(
            lambda h, d: (h - config.alpha * d).astype(h.dtype), gradient_i, delta
        )
        metrics = {"train_loss": carry.train_loss}
        return with_stats(delta, carry.params), new, metrics

    return ClientProgram(init, local.step, finish)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    transform: Transform | None = None,
    reduce: Reduction | None = None,
) -> Algorithm:
    """Builds FedDyn for the given loss; arguments as in `fedavg.make`.

    `reduce` is by default the uniform mean.
    """
    check_parts(Config, config, loss_fn, transform=transform, reduce=reduce)
    transform, reduce = transform or identity(), reduce or mean("uniform")
    client = with_transform(client_program(config, loss_fn), transform)

    def init(params, num_clients):
        zeros = jax.tree.map(jnp.zeros_like, trained(params))
        clients = repeat_rows((zeros, transform.init(zeros)), num_clients)
        return State(params, zeros, clients)

    def round(state, cohort, key):
        results = map_clients(
            client, state.params, cohort, key, reduce=reduce, client_state=state.clients
        )
        delta = trained(results.update)
        share = server.share(reduce, results, cohort)  # |S| / N
        gradient = optax.apply_updates(
            state.gradient, jax.tree.map(lambda d: -config.alpha * share * d, delta)
        )
        step = jax.tree.map(lambda d, h: d - h / config.alpha, delta, gradient)
        params = server.move(state.params, step, results.update)
        return State(params, gradient, results.client_state), results.metrics

    return Algorithm(
        name="feddyn",
        config=config,
        work=config.work,
        init=init,
        round=round,
        # What it corrects gradients by and its estimate, before and after.
        client_bytes=init_bytes(models=3),
        parts={"transform": transform.name, "reduce": reduce.name},
    )
