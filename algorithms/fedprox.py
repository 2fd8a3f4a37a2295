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

import optax

from fedjax_core.algorithms import fedavg
from fedjax_core.fair.decider import Decider
from fedjax_core.local import local_sgd
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction
from fedjax_core.transform import Transform
from fedjax_core.types import Algorithm, LossFn, NonNegative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    r"""Hyper-parameters of FedProx, with those of FedAvg.

    Attributes:
      mu: :math:`\mu \ge 0`, weight of the proximal term.
    """

    mu: NonNegative = 0.01


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    transform: Transform | None = None,
    reduce: Reduction | None = None,
    downlink: Transform | None = None,
    mixing: Decider | None = None,
) -> Algorithm:
    """Builds FedProx for the given loss; arguments as in `fedavg.make`."""
    check_parts(Config, config, loss_fn)
    algorithm = fedavg.make(
        config,
        loss_fn,
        client_optimizer=client_optimizer,
        server_optimizer=server_optimizer,
        program=functools.partial(local_sgd, proximal=config.mu),
        transform=transform,
        reduce=reduce,
        downlink=downlink,
        mixing=mixing,
    )
    return dataclasses.replace(algorithm, name="fedprox")
