r"""FedProx: FedAvg with a proximal term that keeps clients near the server's model.

Client :math:`i` starts from :math:`w_t` and takes its local steps of SGD on

.. math::

  F_i(w) + \frac{\mu}{2} \lVert w - w_t \rVert^2

instead of :math:`F_i`; the server averages as in FedAvg, which is :math:`\mu = 0`.
How far a client solves its problem is how much local work it has.

References:
  Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020,
  Algorithm 2.
"""

import dataclasses
import functools
from typing import Any

from fedjax_core.algorithms import fedavg
from fedjax_core.local import local_sgd
from fedjax_core.parts import check_parts
from fedjax_core.types import Algorithm, LossFn, NonNegative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    r"""Hyper-parameters of FedProx, with those of FedAvg.

    Attributes:
      mu: :math:`\mu \ge 0`, weight of the proximal term.
    """

    mu: NonNegative = 0.01


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds FedProx for the given loss; other arguments as in `fedavg.make`."""
    check_parts(Config, config, loss_fn)
    program = functools.partial(local_sgd, proximal=config.mu)
    algorithm = fedavg.make(config, loss_fn, program=program, **parts)
    return dataclasses.replace(algorithm, name="fedprox")
