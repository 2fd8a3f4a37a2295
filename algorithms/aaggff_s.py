r"""AAggFF-S: adaptive mixing between silos by the online Newton step.

Clients tell their losses, which become responses :math:`r` in [C1, C2] by a
distribution function of :math:`F_i / \bar F`. The server pays
:math:`-\log(1 + \langle p, r \rangle)`, with gradient g at its p, and decides

.. math::

  p_{t+1} = \arg\min_{p \in \Delta} \sum_{\tau \le t} \langle g_\tau, p \rangle
    + \frac\alpha2 \lVert p \rVert^2
    + \frac\beta2 \sum_{\tau \le t} \langle g_\tau, p - p_\tau \rangle^2 ,

then mixes the round's updates by :math:`p_{t+1}`. :math:`\alpha = 4 K L`,
:math:`\beta = 1 / 4 L`, :math:`L = C_2 / (1 + C_1)`. Cost and state are :math:`K^2`,
and the quadratic program; it needs all clients in every round.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, Algorithms 3.1 and 3.3.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.algorithms import fedavg
from fedjax_core.algorithms.aaggff_d import Cdf
from fedjax_core.fair.decider import Decider
from fedjax_core.fair.responses import decision_gradient, respond
from fedjax_core.fair.simplex import minimise
from fedjax_core.fair.theory import lipschitz
from fedjax_core.types import Algorithm, LossFn, NonNegative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    r"""Hyper-parameters of AAggFF-S, with those of FedAvg.

    Attributes:
      cdf: response, a name in `fedjax_core.fair.CDFS`.
      least: C1 >= 0.
      most: C2 > C1; None is :math:`1 / K`, as the thesis recommends.
      curvature: :math:`\beta`: "printed" is :math:`1 / 4 L`, "proven" at most 1/2:
        above that (:math:`K > 2` for `most` None) the bound on regret may fail.
    """

    cdf: Cdf = "normal"
    least: NonNegative = 0.0
    most: float | None = None
    curvature: Literal["printed", "proven"] = "printed"

    def __post_init__(self):
        super().__post_init__()
        if self.most is not None:
            check.open_interval(self.least, float("inf"), most=self.most)


class Newton(NamedTuple):
    r"""What the server knows of past responses.

    Attributes:
      hessian: :math:`B = \alpha I + \beta \sum g g^\top`, ``[K, K]``.
      slope: :math:`b = \sum (-g + \beta g \langle g, p \rangle)`, ``[K]``.
      p: the coefficients, ``[K]``.
    """

    hessian: jax.Array
    slope: jax.Array
    p: jax.Array


def decider(config: Config = Config()) -> Decider:
    """The online Newton step; its state is a `Newton`."""

    def constants(K):
        high = 1 / K if config.most is None else config.most
        slope = lipschitz(config.least, high)
        beta = 1 / (4 * slope)
        if config.curvature == "proven":
            beta = jnp.minimum(0.5, beta)
        return high, 4 * K * slope, beta

    def init(K):
        _, alpha, _ = constants(K)
        p = jnp.full(K, 1 / K, float)
        return Newton(alpha * jnp.eye(K, dtype=float), jnp.zeros(K, float), p)

    def update(state, told):
        B, b, p = state
        K = len(p)
        told.require_everyone(K, "aaggff_s")
        high, _, beta = constants(K)
        r = respond(
            told.loss, told.valid, cdf=config.cdf, low=config.least, high=high
        ).astype(p.dtype)
        g = decision_gradient(p, told.everyone(r, told.mean(r), K))
        B = (B + beta * jnp.outer(g, g)).astype(B.dtype)
        b = (b - g + beta * g * (g @ p)).astype(b.dtype)
        p = minimise(B, b)
        return Newton(B, b, p), told.of_cohort(p)

    return Decider(init, update, f"aaggff_s({config.cdf})")


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds AAggFF-S for the given loss; other arguments as in `fedavg.make`."""
    return fedavg.mixed(Config, config, loss_fn, decider, "aaggff_s", parts)
