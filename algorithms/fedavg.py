r"""FedAvg: local SGD on every client, then a weighted mean of the deltas.

Client :math:`i` starts from the server's parameters :math:`w_t`, takes its local steps
of SGD to reach :math:`w_t^i`, and the server moves by

.. math::

  \Delta_t = \frac{\sum_i n_i (w_t^i - w_t)}{\sum_i n_i}, \qquad
  w_{t+1} = w_t + \eta_s \Delta_t .

With another server optimiser, :math:`-\Delta_t` takes the place of the gradient
(FedOpt).

References:
  McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
  Data", AISTATS 2017, Algorithm 1.
  Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 1.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check, server
from fedjax_core.local import local_sgd
from fedjax_core.map import map_clients
from fedjax_core.reduce import Reduction, mean
from fedjax_core.transform import Transform, dense_bits, identity, with_transform
from fedjax_core.types import Algorithm, LocalWork, LossFn, Params, trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Hyper-parameters of FedAvg.

    Attributes:
      client_lr: step size of the clients' SGD.
      server_lr: step size along the mean delta; 1 is plain FedAvg.
      batch_size: examples per local step.
      local_epochs: passes over a client's examples per round.
      local_steps: local steps per round instead of epochs, the same for every client.
      weights: "examples" weighs clients by how many examples they hold, "uniform"
        counts each once; another `reduce` given to `make` brings its own weights.
      drop_remainder: leave out an epoch's short batch.
    """

    client_lr: float = 0.1
    server_lr: float = 1.0
    batch_size: int = 20
    local_epochs: int = 1
    local_steps: int | None = None
    weights: Literal["examples", "uniform"] = "examples"
    drop_remainder: bool = False

    def __post_init__(self):
        check.positive(client_lr=self.client_lr, server_lr=self.server_lr)
        check.one_of(("examples", "uniform"), weights=self.weights)
        check.positive_int(batch_size=self.batch_size, local_epochs=self.local_epochs)
        if self.local_steps is not None:
            check.positive_int(local_steps=self.local_steps)

    @property
    def work(self) -> LocalWork:
        """Local work per client and round."""
        return LocalWork(
            batch_size=self.batch_size,
            epochs=self.local_epochs,
            steps=self.local_steps,
            drop_remainder=self.drop_remainder,
        )


class State(NamedTuple):
    """What survives a round."""

    params: Params
    opt_state: Any  # of the server optimiser
    clients: Any  # [N, ...] state of the transform: residuals, say


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    transform: Transform | None = None,
    reduce: Reduction | None = None,
) -> Algorithm:
    """Builds FedAvg for the given loss.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      client_optimizer: instead of SGD with ``config.client_lr``.
      server_optimizer: instead of SGD with ``config.server_lr``.
      transform: applied to every delta before it is sent: clipping, compression.
      reduce: instead of the weighted mean: a robust or a noisy aggregation.
    """
    client_opt = client_optimizer or optax.sgd(config.client_lr)
    server_opt = server_optimizer or optax.sgd(config.server_lr)
    transform = transform or identity()
    reduce = reduce or mean(config.weights)
    client = with_transform(local_sgd(loss_fn, client_opt), transform)

    def init(params, num_clients):
        one = ((), transform.init(trained(params)))
        clients = jax.tree.map(lambda x: jnp.repeat(x[None], num_clients, 0), one)
        return State(params, server.init(server_opt, params), clients)

    def round(state, cohort, key):
        results = map_clients(
            client, state.params, cohort, key, reduce=reduce, client_state=state.clients
        )
        params, opt_state = server.step(
            server_opt, state.params, state.opt_state, results.update
        )
        down = dense_bits(params) / 8 * cohort.client_mask.sum()
        metrics = results.metrics | {"downlink_bytes": down}
        return State(params, opt_state, results.client_state), metrics

    return Algorithm(
        name="fedavg",
        config=config,
        work=config.work,
        init=init,
        round=round,
        parts={
            "client_optimizer": "custom" if client_optimizer else "sgd",
            "server_optimizer": "custom" if server_optimizer else "sgd",
            "transform": transform.name,
            "reduce": reduce.name,
        },
    )
