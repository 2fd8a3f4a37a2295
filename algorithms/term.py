r"""TERM: tilted empirical risk, between the mean and the largest loss of the clients.

For :math:`\frac1\lambda \log \sum_i q_i \exp(\lambda F_i(w))`, whose gradient weighs
clients by

.. math::

  p_i \propto q_i \exp(\lambda F_i(w)) ,

at the server's model. :math:`\lambda \to 0` is FedAvg, and a large one minimises the
largest loss.

References:
  Li et al., "Tilted Empirical Risk Minimization", ICLR 2021, section 2.
  Hahn, UNIST 2024, table 3.2. His experiments leave :math:`q_i = n_i / n` out, which is
  "uniform".
"""

import dataclasses
from typing import Any

from fedjax_core.algorithms import fedavg
from fedjax_core.fair.decider import Decider, tilted
from fedjax_core.types import Algorithm, LossFn, NonNegative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    r"""Hyper-parameters of TERM, with those of FedAvg.

    Attributes:
      tilt: :math:`\lambda \ge 0`.
      weights: :math:`q`, by examples or uniform.
    """

    tilt: NonNegative = 1.0


def decider(config: Config) -> Decider:
    """The tilt of the weights; it keeps no state."""
    # Only differences count; of products of large losses they would be rounded.
    return tilted(lambda F: config.tilt * (F - F.max()), config.weights, name="term")


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds TERM for the given loss; other arguments as in `fedavg.make`."""
    return fedavg.mixed(Config, config, loss_fn, decider, "term", parts)
