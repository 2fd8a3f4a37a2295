r"""FedSGD: one gradient of all its data per client and round.

Every client of the cohort S sends the gradient of its mean loss at the server's
parameters, whatever the size of its batches, and the server takes one step along

.. math::

  g_t = \frac{\sum_{i \in S} n_i \nabla F_i(w_t)}{\sum_{i \in S} n_i}, \qquad
  w_{t+1} = w_t - \eta_s g_t .

With everyone in the cohort it is gradient descent on all data. Distributed SGD with a
minibatch per client and round is `fedavg` with ``LocalWork(steps=1)``.

References:
  McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
  Data", AISTATS 2017, section 2 (FederatedSGD).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_core.algorithms import fedavg
from fedjax_core.local import full_gradient
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction
from fedjax_core.transform import Transform
from fedjax_core.types import (
    Algorithm,
    Checked,
    ClientProgram,
    LocalWork,
    LossFn,
    Positive,
    PositiveInt,
    trained,
    with_trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    r"""Hyper-parameters of FedSGD.

    Attributes:
      server_lr: :math:`\eta_s`.
      batch_size: examples that a client looks at together; it decides memory and
        speed, not the result.
      weights: "examples" weighs clients by how many examples they hold, "uniform"
        counts each once.
    """

    server_lr: Positive = 0.1
    batch_size: PositiveInt = 20
    weights: Literal["examples", "uniform"] = "examples"


def client_program(loss_fn: LossFn) -> ClientProgram:
    """One client; its update is minus its gradient, as a delta points downhill."""
    program = full_gradient(loss_fn)

    def finish(*args):
        update, client_state, metrics = program.finish(*args)
        downhill = jax.tree.map(jnp.negative, trained(update))
        return with_trained(update, downhill), client_state, metrics

    return program._replace(finish=finish)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    transform: Transform | None = None,
    reduce: Reduction | None = None,
    downlink: Transform | None = None,
) -> Algorithm:
    """Builds FedSGD for the given loss; arguments as in `fedavg.make`."""
    check_parts(Config, config, loss_fn)
    algorithm = fedavg.make(
        fedavg.Config(
            server_lr=config.server_lr,
            work=LocalWork(batch_size=config.batch_size),
            weights=config.weights,
        ),
        loss_fn,
        server_optimizer=server_optimizer,
        program=lambda loss_fn, _: client_program(loss_fn),
        transform=transform,
        reduce=reduce,
        downlink=downlink,
    )
    parts = {k: v for k, v in algorithm.parts.items() if k != "client_optimizer"}
    return dataclasses.replace(algorithm, name="fedsgd", config=config, parts=parts)
