r"""pFedMe: personal models are proximal points of the clients' local ones.

Clients of the cohort S start at :math:`w_i = \theta_i = w_t`. In each local step they
bring :math:`\theta_i` nearer to the proximal point of :math:`w_i` on the batch, by
:math:`K` gradient steps, and move towards it:

.. math::

  \theta_i \leftarrow \theta_i
    - \eta_\theta (\nabla f_i(\theta_i) + \lambda (\theta_i - w_i))
    \quad K \text{ times}, \qquad
  w_i \leftarrow w_i - \eta \lambda (w_i - \theta_i),

and the server mixes :math:`w_{t+1} = (1 - \beta) w_t + \beta \sum_{i \in S} w_i / |S|`.
Steps with :math:`\eta \lambda > 1` move past the proximal point. Where a solver starts
is open in the paper; here it goes on where the last batch left it. A client keeps
:math:`\theta_i` to be evaluated with; clients outside the cohort do not train.

References:
  Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
  Algorithm 1.
"""

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_core.local import (
    Carry,
    LocalConfig,
    init_bytes,
    proximal_gradient,
    sgd_step,
    with_stats,
)
from fedjax_core.metrics import Mean
from fedjax_core.parts import check_parts
from fedjax_core.personal import Parts, averaging
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    LossFn,
    Positive,
    PositiveInt,
    trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of pFedMe.

    Attributes:
      client_lr: :math:`\eta`, step size of the local models.
      personal_lr: :math:`\eta_\theta`, step size of the solver.
      personal_steps: :math:`K`, steps of the solver on each batch.
      prox: :math:`\lambda`, how strongly personal models are pulled to local ones.
      server_lr: :math:`\beta`, step size along the mean delta.
      work: local work per client and round: R batches.
    """

    client_lr: Positive = 0.01
    personal_lr: Positive = 0.05
    personal_steps: PositiveInt = 5
    prox: Positive = 15.0
    server_lr: Positive = 1.0


def client_program(
    config: Config, loss_fn: LossFn, solver: optax.GradientTransformation
) -> ClientProgram:
    r"""One client: shared is :math:`w_t`, its row the last :math:`\theta_i`."""

    def init(received, own, turn):
        theta = Carry(received, solver.init(trained(received)), Mean.zero())
        return trained(received), theta

    def step(received, carry, batch, turn):
        w, theta = carry

        def nearer(_, theta):
            pull = proximal_gradient(config.prox, theta.params, w)
            return sgd_step(
                loss_fn, solver, theta, batch, turn.key, pull, round=turn.round
            )

        theta = lax.fori_loop(0, config.personal_steps, nearer, theta)
        rate = config.client_lr * config.prox
        w = jax.tree.map(lambda w, t: w - rate * (w - t), w, trained(theta.params))
        return w, theta

    def finish(received, carry, own, turn):
        w, theta = carry
        delta = jax.tree.map(jnp.subtract, w, trained(received))
        # Running statistics are those of the model that saw the data.
        update = with_stats(delta, theta.params)
        return update, theta.params, {"train_loss": theta.train_loss}

    return ClientProgram(init, step, finish)


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds pFedMe; its state and `parts` are `fedjax_core.personal`'s.

    The metric "train_loss" is the personal model's, over all steps of the solver.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      **parts: see there; `client_optimizer` is the solver, instead of SGD with
        ``config.personal_lr``. It starts anew in every round.
    """
    check_parts(Config, config, loss_fn, **parts)
    solver = parts.get("client_optimizer") or optax.sgd(config.personal_lr)
    return averaging(
        "pfedme",
        config,
        client_program(config, loss_fn, solver),
        keep=lambda params: params,
        # The local model, and what personal model is kept before and after.
        client_bytes=init_bytes(solver, models=3),
        server_lr=config.server_lr,
        **parts,
    )
