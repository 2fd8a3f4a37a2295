r"""FedAvg with fine-tuning: a client uses the model it received, trained on its data.

Clients of the cohort S take their local steps from the server's model, as in FedAvg,
and keep where they end:

.. math::

  v_i = \mathrm{SGD}(f_i; w_t), \qquad
  w_{t+1} = w_t + \frac{\sum_{i \in S} n_i (v_i - w_t)}{\sum_{i \in S} n_i} .

So personal models are as old as a client's last round; one that never took part uses
the server's. To fine-tune a model of any method for everybody, with work of its own,
run a single round of everybody from it and look at the personal models::

  tuned = simulate(
      fine_tuning.make(config, model.loss), data, model, rounds=1,
      participation=Full(), params=jax.tree.map(lambda x: x[0], result.params),
  )

References:
  Wang et al., "Federated Evaluation of On-device Personalization", arXiv 1910.10252,
  2019.
"""

import dataclasses
from typing import Unpack

import optax

from fedjax_core.local import LocalConfig, init_bytes, local_sgd
from fedjax_core.parts import check_parts
from fedjax_core.personal import Parts, averaging
from fedjax_core.types import Algorithm, LossFn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of FedAvg with fine-tuning: those of `LocalConfig`."""


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds FedAvg with fine-tuning; state and `parts` are `fedjax_core.personal`'s.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      **parts: see there; `reduce` is instead of the mean by examples.
    """
    check_parts(Config, config, loss_fn, **parts)
    optimizer = parts.get("client_optimizer") or optax.sgd(config.client_lr)
    local = local_sgd(loss_fn, optimizer)

    def finish(received, carry, own, turn):
        update, _, metrics = local.finish(received, carry, (), turn)
        return update, carry.params, metrics

    return averaging(
        "fine_tuning",
        config,
        local._replace(finish=finish),
        keep=lambda params: params,
        # The personal model before and after.
        client_bytes=init_bytes(models=2),
        weights="examples",
        **parts,
    )
