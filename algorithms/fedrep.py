r"""FedRep: a shared representation, under heads that are trained first.

A client's model is :math:`(\phi, h_i)`. Clients of the cohort S take their first
:math:`\tau` steps on the head under the received representation, and the others on the
representation under the new head:

.. math::

  h_i \leftarrow h_i - \alpha \nabla_h f_i(h_i, \phi_t), \qquad
  \phi_i \leftarrow \phi_i - \alpha \nabla_\phi f_i(h_i, \phi_i), \qquad
  \phi_{t+1} = \frac{1}{|S|} \sum_{i \in S} \phi_i .

With running statistics in the representation these follow the data in both phases:
what is frozen is not stepped by the optimiser.

References:
  Collins et al., "Exploiting Shared Representations for Personalized Federated
  Learning", ICML 2021, Algorithm 1.
"""

import dataclasses
import functools
from typing import Unpack

from fedjax_core.local import LocalConfig
from fedjax_core.parts import check_parts
from fedjax_core.personal import Parts, partial_averaging, split
from fedjax_core.types import Algorithm, LocalWork, LossFn, Names, PositiveInt, Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of FedRep.

    Attributes:
      personal: names of the head, see `fedjax_core.personal.split`.
      client_lr: :math:`\alpha`, step size of the clients' SGD.
      head: :math:`\tau`, how much of the work is the head's: so many epochs or, where
        the work counts steps, steps. Less than all of it.
      work: local work per client and round, of both phases together.
    """

    personal: Names
    head: PositiveInt = 10
    work: Work = LocalWork(epochs=11)

    def __post_init__(self):
        super().__post_init__()
        if self.head >= (self.work.steps or self.work.epochs):
            raise ValueError(
                f"head must leave some of the work to the representation, got "
                f"{self.head} of {self.work}."
            )


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds FedRep; its state and `parts` are `fedjax_core.personal`'s.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      **parts: see there; `transform` is of what is shared, `reduce` instead of
        the uniform mean.
    """
    check_parts(Config, config, loss_fn, **parts)

    def phase(turn):
        head = config.head
        if config.work.steps is None:
            head *= turn.num_steps // config.work.epochs
        return turn.step >= head, turn.step < head

    return partial_averaging(
        "fedrep",
        config,
        loss_fn,
        functools.partial(split, names=config.personal),
        phase=phase,
        **parts,
    )
