r"""FedMGDA+: a direction along which no client's loss rises, near a fixed mixture.

With the clients' normalised moves :math:`d_i = \Delta_i / \lVert \Delta_i \rVert`, the
server moves by :math:`\eta_s \sum_i \lambda_i d_i` with

.. math::

  \lambda = \arg\min_\lambda \Big\lVert \sum_i \lambda_i d_i \Big\rVert^2, \quad
  \lambda \in \Delta, \quad |\lambda_i - \lambda^0_i| \le \epsilon .

:math:`\epsilon = 0` is FedAvg of normalised moves, 1 is MGDA. A client that does not
move has the direction 0.

References:
  Hu et al., "Federated Learning Meets Multi-Objective Optimization", IEEE Transactions
  on Network Science and Engineering 9, 2022, Algorithm 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_core.algorithms import fedavg
from fedjax_core.arrays import flat_rows, norms
from fedjax_core.fair.decider import Prior
from fedjax_core.fair.simplex import minimise
from fedjax_core.metrics import wide
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction, stack
from fedjax_core.types import Algorithm, LossFn, Share, Stateful


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    r"""Hyper-parameters of FedMGDA+, with those of FedAvg.

    Attributes:
      server_lr: length of the step where all clients agree.
      epsilon: :math:`\epsilon` in [0, 1], how far the mixture may be from the fixed
        one.
      weights: :math:`\lambda^0`, by examples or uniform.
    """

    epsilon: Share = 0.1


def common_direction(epsilon: float, weights: Prior) -> Reduction:
    """The shortest mixture of the cohort's normalised updates; keeps them all."""

    def finish(updates, cast):
        if isinstance(updates, Stateful):
            raise ValueError(
                "params must have no running statistics for fedmgda, which averages "
                "directions; use a model with group or layer normalisation."
            )
        d = jnp.concatenate([wide(flat_rows(x)) for x in jax.tree.leaves(updates)], 1)
        norm = norms(d)
        scale = 1 / jnp.where(norm > 0, norm, 1)
        sizes = cast.cohort.num_examples if weights == "examples" else 1
        prior = jnp.where(cast.valid, sizes, 0).astype(d.dtype)
        # Of nobody, the first one's move, which is 0.
        prior = jnp.where(cast.valid.any(), prior, jnp.arange(len(prior)) == 0)
        prior = prior / prior.sum()
        room = jnp.where(prior > 0, epsilon, 0)
        d = d * scale[:, None]
        # Apart from what they have in common, which rounding would else hide.
        common = prior @ d
        apart = d - common[None]
        gram = jnp.matmul(apart, apart.T, precision="highest")
        linear = -jnp.matmul(apart, common, precision="highest")
        low, high = jnp.maximum(prior - room, 0), jnp.minimum(prior + room, 1)
        mixture = minimise(gram, linear, low, high) * scale
        return jax.tree.map(
            lambda x: jnp.tensordot(mixture.astype(wide(x).dtype), wide(x), 1), updates
        )

    return stack(finish)._replace(name=f"common_direction({weights})")


def make(config: Config, loss_fn: LossFn, **parts: Any) -> Algorithm:
    """Builds FedMGDA+ for the given loss; other arguments as in `fedavg.make`."""
    check_parts(Config, config, loss_fn)
    reduce = common_direction(config.epsilon, config.weights)
    algorithm = fedavg.make(config, loss_fn, reduce=reduce, **parts)
    return dataclasses.replace(algorithm, name="fedmgda")
