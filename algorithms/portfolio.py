r"""Mixing coefficients as a portfolio of clients: classical rules side by side.

Losses become responses :math:`r` in [0, 1 / K], of which the decision loss
:math:`-\log(1 + \langle p, r \rangle)` has the gradient g; its L is 1 / K.

* "ogd": :math:`p \leftarrow \mathrm{proj}_\Delta (p - \gamma g)`,
* "eg": :math:`p_i \propto p_i \exp(-\gamma g_i)`,
* "ftrl": :math:`p_i \propto \exp(-\sqrt{\log K} \sum_\tau g_{\tau, i} / L \sqrt{t+1})`,
* "universal": the mean of the simplex, weighed by what each point has earned; over
  fixed random points.

All need all clients in every round.

References:
  Zinkevich, "Online Convex Programming and Generalized Infinitesimal Gradient Ascent",
  ICML 2003 (OGD).
  Helmbold et al., "On-Line Portfolio Selection Using Multiplicative Updates",
  Mathematical Finance 8, 1998 (EG).
  Cover, "Universal Portfolios", Mathematical Finance 1, 1991.
  Hahn, UNIST 2024, equations 3.1 to 3.6 (EG as mirror descent, FTRL), section 3.3.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from optax.projections import projection_simplex

from fedjax_core.algorithms import fedavg
from fedjax_core.algorithms.aaggff_d import Cdf
from fedjax_core.fair.decider import Decider
from fedjax_core.fair.responses import decision_gradient, respond
from fedjax_core.types import Algorithm, LossFn, Positive, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    r"""Hyper-parameters, with those of FedAvg.

    Attributes:
      rule: "ogd", "eg", "ftrl" or "universal".
      mixing_lr: :math:`\gamma` of "ogd" and "eg".
      cdf: response, a name in `fedjax_core.fair.CDFS`.
      points: of the simplex, for "universal".
    """

    rule: Literal["ogd", "eg", "ftrl", "universal"] = "ftrl"
    mixing_lr: Positive = 1.0
    cdf: Cdf = "normal"
    points: PositiveInt = 1000


class Book(NamedTuple):
    """What the server knows of past responses.

    Attributes:
      p: the coefficients, ``[K]``.
      gradients: their sum, ``[K]``.
      wealth: logarithm of what each point of the simplex has earned, ``[points]``.
      rounds: ``[]`` int32.
    """

    p: jax.Array
    gradients: jax.Array
    wealth: jax.Array
    rounds: jax.Array


def decider(config: Config) -> Decider:
    """The rule that the config names; its state is a `Book`."""
    points = config.points if config.rule == "universal" else 0

    def init(K):
        zeros = jnp.zeros(K, float)
        return Book(zeros + 1 / K, zeros, jnp.zeros(points, float), jnp.int32(0))

    def update(state, told):
        p, total, wealth, t = state
        K = len(p)
        told.require_everyone(K, config.rule)
        r = respond(told.loss, told.valid, cdf=config.cdf, high=1 / K).astype(p.dtype)
        r = told.everyone(r, told.mean(r), K)
        g = decision_gradient(p, r)
        total, t = total + g, t + 1
        if config.rule == "ogd":
            p = projection_simplex(p - config.mixing_lr * g)
        elif config.rule == "eg":
            p = jax.nn.softmax(jnp.log(p) - config.mixing_lr * g)
        elif config.rule == "ftrl":
            rate = K * math.sqrt(math.log(K)) / jnp.sqrt(t + 1.0)
            p = jax.nn.softmax(-rate * total)
        else:
            constant = jnp.ones(K, p.dtype)
            at = jax.random.dirichlet(jax.random.key(0), constant, (points,))
            wealth = wealth + jnp.log1p(at @ r)
            p = jax.nn.softmax(wealth) @ at
        return Book(p.astype(r.dtype), total, wealth, t), told.of_cohort(p)

    return Decider(init, update, f"{config.rule}({config.cdf})")


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds the rule for the given loss; other arguments as in `fedavg.make`."""
    return fedavg.mixed(Config, config, loss_fn, decider, "portfolio", parts)
