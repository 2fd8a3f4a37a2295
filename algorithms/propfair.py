r"""PropFair: proportional fairness of utilities :math:`M - F_i`.

For :math:`-\sum_i q_i \log(M - F_i(w))`. "server" weighs clients by what its gradient
does at the server's model, for which M must be above every loss,

.. math::

  p_i \propto \frac{q_i}{M - F_i(w)} ;

"client" has clients minimise :math:`-\log(1 - F / M)` of every batch's mean loss F, and
:math:`F / M` where :math:`M - F` is below 0.2. :math:`M \to \infty` is FedAvg.

References:
  Zhang et al., "Proportional Fairness in Federated Learning", TMLR 2022, Algorithm 1
  ("client").
  Hahn, UNIST 2024, table 3.2 ("server"); his experiments run "client".
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from fedjax_core.algorithms import fedavg
from fedjax_core.fair.decider import Decider, tilted
from fedjax_core.local import batch_loss
from fedjax_core.parts import check_parts
from fedjax_core.types import Algorithm, LossFn, Positive, Stateful

_LEAST_UTILITY = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """Hyper-parameters of PropFair, with those of FedAvg.

    Attributes:
      ceiling: M > 0. For `where` "server", a loss from there on makes the model NaN.
      where: "client" or "server".
    """

    ceiling: Positive = 3.0
    where: Literal["client", "server"] = "client"


def decider(config: Config) -> Decider:
    """The rule of "server"; it keeps no state."""

    def response(loss):
        utility = config.ceiling - loss
        return -jnp.log(jnp.where(utility > 0, utility, jnp.nan))

    return tilted(response, config.weights, name="propfair")


def proportional(loss_fn: LossFn, ceiling: float) -> LossFn:
    """The loss of "client": every example has that of its batch."""

    def loss(params, batch, key):
        mean, stats = batch_loss(loss_fn, params, batch, key)
        enough = ceiling - mean >= _LEAST_UTILITY
        log = -jnp.log1p(-jnp.where(enough, mean, 0) / ceiling)
        fair = jnp.where(enough, log, mean / ceiling)
        fair = jnp.broadcast_to(fair, batch["example_mask"].shape)
        return (fair, stats) if isinstance(params, Stateful) else fair

    return loss


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds PropFair for the given loss; other arguments as in `fedavg.make`."""
    if isinstance(config, Config) and config.where == "server":
        return fedavg.mixed(Config, config, loss_fn, decider, "propfair", parts)
    check_parts(Config, config, loss_fn)
    algorithm = fedavg.make(config, proportional(loss_fn, config.ceiling), **parts)
    return dataclasses.replace(algorithm, name="propfair")
