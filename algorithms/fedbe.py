r"""FedBE: FedDF with an ensemble drawn from a Gaussian around the clients' models.

Of the models of the cohort S the server keeps mean and variance of every parameter, of
which it draws M models; their mean probabilities teach the mean model:

.. math::

  \mu = \sum_{i \in S} w_i \theta^i, \quad
  \sigma^2 = \sum_{i \in S} w_i (\theta^i - \mu)^2, \quad
  \theta^{(m)} \sim \mathcal N(\mu, \mathrm{diag}\,\sigma^2), \quad
  Y = \frac1M \sum_m \mathrm{softmax} f_{\theta^{(m)}}(X_{pub}) .

Distillation starts at :math:`\mu` and ends at the mean over its last steps. Mean and
variance are sums that stream; no two models of clients are ever held at once. Public
inputs are ``FederatedData.public["x"]``.

References:
  Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated
  Learning", ICLR 2021, Algorithm 1 with the Gaussian of equation 4.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_core.algorithms import feddf
from fedjax_core.distillation import LogitsFn, predict
from fedjax_core.parts import check_parts
from fedjax_core.reduce import mean
from fedjax_core.types import (
    Algorithm,
    LossFn,
    Params,
    PositiveInt,
    trained,
    with_trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(feddf.Config):
    """Hyper-parameters of FedBE, with those of FedDF; `weights` are of variances too.

    Attributes:
      num_models: M, models that are drawn.
      average: the last steps of distillation over which parameters are averaged.
    """

    num_models: PositiveInt = 10
    average: PositiveInt = 10


def drawn_models(config: Config, logits: LogitsFn) -> feddf.Teacher:
    """The mean probabilities of models drawn around the clients'."""

    def squares(params: Params, received: Any) -> Params:
        # Of moves, not of parameters: less of their variance is lost to rounding.
        delta = jax.tree.map(jnp.subtract, trained(params), trained(received[0]))
        return jax.tree.map(jnp.square, delta)

    def labels(squares, update, center, public, key):
        means = trained(center)
        deviations = jax.tree.map(
            lambda square, move: jnp.sqrt(jnp.maximum(square - move**2, 0)),
            squares,
            trained(update),
        )

        def draw(m, s, key):
            return (m + s * jax.random.normal(key, m.shape, s.dtype)).astype(m.dtype)

        def add(total, key):
            keys = optax.tree_utils.tree_split_key_like(key, means)
            drawn = jax.tree.map(draw, means, deviations, keys)
            params = with_trained(center, drawn)
            said = jax.nn.softmax(predict(logits, params, public))
            return total + said.astype(total.dtype), None

        nothing = jnp.zeros((len(public["x"]), config.num_classes), float)
        summed, _ = lax.scan(add, nothing, jax.random.split(key, config.num_models))
        return summed / config.num_models

    return feddf.Teacher(squares, mean(config.weights), labels)


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds FedBE; arguments as in `feddf.make`."""
    check_parts(Config, config, loss_fn)
    teacher = functools.partial(drawn_models, config)
    how = {"teacher": teacher, "average": config.average}
    algorithm = feddf.make(config, loss_fn, **how, **parts)
    return dataclasses.replace(algorithm, name="fedbe")
