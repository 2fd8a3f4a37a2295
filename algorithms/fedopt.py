r"""FedAvgM, FedAdagrad, FedAdam, FedYogi: FedAvg with a server that has moments.

With the mean delta :math:`\Delta_t` of FedAvg, all operations by coordinate,

.. math::

  m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t, \qquad
  w_{t+1} = w_t + \eta_s \frac{m_t}{\sqrt{v_t} + \tau},

.. math::

  v_t = \begin{cases}
    v_{t-1} + \Delta_t^2 & \text{FedAdagrad} \\
    \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2 & \text{FedAdam} \\
    v_{t-1} - (1 - \beta_2) \Delta_t^2 \operatorname{sign}(v_{t-1} - \Delta_t^2)
      & \text{FedYogi,}
  \end{cases}

from :math:`m_0 = 0` and :math:`v_0 = \tau^2`. FedAvgM is
:math:`m_t = \beta_1 m_{t-1} + \Delta_t` and :math:`w_{t+1} = w_t + \eta_s m_t`. Neither
corrects a bias, as optax's Adam and Yogi do.

References:
  Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
  Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated
  Visual Classification", 2019 (FedAvgM).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core.algorithms import fedavg
from fedjax_core.parts import check_parts
from fedjax_core.types import Algorithm, Fraction, LossFn, Params, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    r"""Hyper-parameters of the family, with those of FedAvg.

    Attributes:
      rule: "avgm", "adagrad", "adam" or "yogi".
      server_lr: :math:`\eta_s`.
      beta1: decay of the mean; the paper sets it to 0 for FedAdagrad.
      beta2: decay of the squares, of FedAdam and FedYogi.
      tau: degree of adaptivity, of all but FedAvgM; smaller is more adaptive.
    """

    rule: Literal["avgm", "adagrad", "adam", "yogi"] = "adam"
    server_lr: Positive = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    tau: Positive = 1e-3


class Moments(NamedTuple):
    """What the server keeps of past deltas."""

    mean: Params  # m
    square: Params  # v


def server_optimizer(config: Config) -> optax.GradientTransformation:
    """The server's optimiser; its gradient is minus the mean delta."""
    beta1, beta2, tau = config.beta1, config.beta2, config.tau
    if config.rule == "avgm":
        return optax.sgd(config.server_lr, momentum=beta1)

    def init(params):
        at = optax.tree.full_like
        return Moments(at(params, 0), at(params, tau**2))

    rule = {
        "adagrad": lambda v, g2: v + g2,
        "adam": lambda v, g2: beta2 * v + (1 - beta2) * g2,
        "yogi": lambda v, g2: v - (1 - beta2) * g2 * jnp.sign(v - g2),
    }[config.rule]

    def update(updates, state, params=None):
        mean = jax.tree.map(
            lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, updates
        )
        squares = jax.tree.map(jnp.square, updates)
        square = jax.tree.map(rule, state.square, squares)
        step = jax.tree.map(
            lambda m, v: -config.server_lr * m / (jnp.sqrt(v) + tau), mean, square
        )
        return step, Moments(mean, square)

    return optax.GradientTransformation(init, update)


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds the method that ``config.rule`` names.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      **parts: other arguments of `fedavg.make` but `server_optimizer`.
    """
    check_parts(Config, config, loss_fn)
    algorithm = fedavg.make(
        config, loss_fn, server_optimizer=server_optimizer(config), **parts
    )
    said = {**algorithm.parts, "server_optimizer": config.rule}
    return dataclasses.replace(algorithm, name=f"fed{config.rule}", parts=said)
