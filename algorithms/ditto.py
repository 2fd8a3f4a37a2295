r"""Ditto: FedAvg, and beside it a personal model that is pulled to the global one.

Clients of the cohort S train the global model as FedAvg does, and on the same batches
their own:

.. math::

  w_i \leftarrow w_i - \eta \nabla f_i(w_i), \qquad
  v_i \leftarrow v_i - \eta_v (\nabla f_i(v_i) + \lambda (v_i - w_t)), \qquad
  w_{t+1} = w_t + \frac{1}{|S|} \sum_{i \in S} (w_i - w_t) .

The pull is to the model as it was received, not to the one in training. With
:math:`\lambda = 0` personal models are trained on local data alone.

References:
  Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
  2021, Algorithm 2.
"""

import dataclasses
from typing import Unpack

import optax

from fedjax_core.local import (
    LocalConfig,
    init_bytes,
    local_sgd,
    proximal_gradient,
    sgd_step,
)
from fedjax_core.parts import check_parts
from fedjax_core.personal import Parts, averaging, with_own_model
from fedjax_core.types import Algorithm, ClientProgram, LossFn, NonNegative, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of Ditto, with those of `LocalConfig`.

    Attributes:
      client_lr: :math:`\eta`, step size on the global model.
      work: local work per client and round, of each of the two.
      personal_lr: :math:`\eta_v`, step size on personal models.
      prox: :math:`\lambda`, how strongly these are pulled to the global model.
    """

    personal_lr: Positive = 0.1
    prox: NonNegative = 1.0


def client_program(
    config: Config,
    loss_fn: LossFn,
    client_optimizer: optax.GradientTransformation | None = None,
) -> ClientProgram:
    """One client: shared is :math:`w_t`, its row :math:`v_i`."""
    optimizer = client_optimizer or optax.sgd(config.personal_lr)

    def own_step(received, model, own, batch, turn):
        pull = proximal_gradient(config.prox, own.params, received)
        return sgd_step(
            loss_fn, optimizer, own, batch, turn.key, pull, round=turn.round
        )

    federated = local_sgd(loss_fn, client_optimizer or optax.sgd(config.client_lr))
    return with_own_model(federated, optimizer, own_step)


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds Ditto; its state and `parts` are `fedjax_core.personal`'s.

    Metrics gain "personal_train_loss", without the pull.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      **parts: see there; `client_optimizer` is of both models.
    """
    check_parts(Config, config, loss_fn, **parts)
    optimizer = parts.get("client_optimizer")
    return averaging(
        "ditto",
        config,
        client_program(config, loss_fn, optimizer),
        keep=lambda params: params,
        # The personal model before and after, and its gradient.
        client_bytes=init_bytes(optimizer or optax.identity(), models=3),
        **parts,
    )
