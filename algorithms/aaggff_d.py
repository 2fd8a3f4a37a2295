r"""AAggFF-D: adaptive mixing of many devices, of which a few are heard in each round.

The m clients of a cohort S of K tell their losses, which become responses :math:`r`
in [C1, C2] by a distribution function of :math:`F_i / \bar F`; those of all others are
estimated (doubly robust), and the gradient of the decision loss is linearised about
their mean :math:`\bar r`. Follow-the-regularised-leader with an entropy is then, in
closed form,

.. math::

  p_i \propto \exp\Big( \frac{\sqrt{\log K}}{L \sqrt{t + 1}} H_i \Big), \qquad
  H_i = \sum_{\tau \le t} 1[i \in S_\tau] \frac{r_i - \bar r}{c (1 + \bar r)} ,

with :math:`c = m / K` and :math:`L = (C_2 + 2 (C_2 - C_1) / c) / (1 + C_1)`: all that
the gradient says besides is the same for every client, which a softmax does not see.
The updates of S are mixed by p, renormalised on S. Cost and state are K.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, Algorithms 3.2 and 3.3.
"""

import dataclasses
import functools
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.algorithms import fedavg
from fedjax_core.fair.decider import Decider
from fedjax_core.fair.responses import CDFS, respond
from fedjax_core.fair.theory import lipschitz_of_estimates
from fedjax_core.types import Algorithm, LossFn, NonNegative

Cdf = Annotated[str, functools.partial(check.one_of, CDFS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """Hyper-parameters of AAggFF-D, with those of FedAvg.

    Attributes:
      cdf: response, a name in `fedjax_core.fair.CDFS`.
      least: C1 >= 0.
      most: C2 > C1; None is c, the cohort's share of the clients, as the thesis
        recommends.
    """

    cdf: Cdf = "normal"
    least: NonNegative = 0.0
    most: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.most is not None:
            check.open_interval(self.least, float("inf"), most=self.most)


class Leader(NamedTuple):
    """What the server knows of past responses.

    Attributes:
      excess: H, ``[K]``; its sum is 0.
      rounds: ``[]`` int32, rounds with a client that counted.
    """

    excess: jax.Array
    rounds: jax.Array


def decider(config: Config = Config()) -> Decider:
    """Entropic follow-the-regularised-leader; its state is a `Leader`."""

    def init(K):
        return Leader(jnp.zeros(K, float), jnp.int32(0))

    def update(state, told):
        H, t = state
        K = len(H)
        heard = told.valid.sum()
        share = jnp.maximum(heard, 1).astype(H.dtype) / K
        high = share if config.most is None else config.most
        r = respond(told.loss, told.valid, cdf=config.cdf, low=config.least, high=high)
        mean = told.mean(r)
        excess = told.everyone((r - mean) / (share * (1 + mean)), 0, K)
        H, t = H + excess.astype(H.dtype), t + (heard > 0).astype(t.dtype)
        slope = lipschitz_of_estimates(config.least, high, share)
        rate = math.sqrt(math.log(K)) / (slope * jnp.sqrt(t + 1.0))
        p = jax.nn.softmax(rate * H)
        return Leader(H, t), told.of_cohort(p)

    return Decider(init, update, f"aaggff_d({config.cdf})")


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds AAggFF-D for the given loss; other arguments as in `fedavg.make`."""
    return fedavg.mixed(Config, config, loss_fn, decider, "aaggff_d", parts)
