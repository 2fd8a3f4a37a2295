r"""FedNova: averages of what clients do per local step, however many they take.

A client that takes :math:`\tau_i` steps moves by
:math:`\Delta_i = -\eta \sum_k a_{i,k} g_{i,k}`, a sum over its gradients whose weights
:math:`a_i` the local solver decides: all 1 for SGD, larger for early gradients with
momentum, smaller with a proximal term. FedAvg favours clients with large
:math:`\lVert a_i \rVert_1`, of many steps say. FedNova divides by it,

.. math::

  w_{t+1} = w_t + \eta_s \Bigl( \sum_i p_i \lVert a_i \rVert_1 \Bigr)
    \sum_i p_i \frac{\Delta_i}{\lVert a_i \rVert_1},

with :math:`p_i = n_i / \sum_j n_j`, and is FedAvg where all take equally many steps.
With a proximal term the authors' code has :math:`\sum_i p_i \tau_i` for the first sum.

References:
  Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
  Optimization", NeurIPS 2020, section 4 (the a_i) and 5.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from fedjax_core.algorithms import fedavg, fedprox
from fedjax_core.arrays import along_rows
from fedjax_core.local import local_sgd
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction, mean
from fedjax_core.transform import Transform
from fedjax_core.types import (
    Algorithm,
    Fraction,
    LossFn,
    NonNegative,
    trained,
    with_trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fedprox.Config):
    r"""Hyper-parameters of FedNova, with those of FedAvg.

    Attributes:
      mu: :math:`\mu \ge 0`, weight of a proximal term in the clients' losses.
      momentum: in [0, 1), of the clients' SGD; None is plain SGD.
    """

    mu: NonNegative = 0.0
    momentum: Fraction | None = None


def gradient_weight(config: Config, steps: jax.Array) -> jax.Array:
    r"""How much a client's gradients weigh together, :math:`\lVert a_i \rVert_1`.

    Equal gradients of 1 would move a parameter that far in units of ``client_lr``: the
    solver itself tells, with momentum and proximal term together as well. For `steps`,
    ``[L]`` int32 >= 0, it is ``[L]``: of plain SGD the steps.
    """
    sgd = optax.sgd(1.0, momentum=config.momentum)
    start = jnp.zeros(steps.shape, float)

    def step(k, carry):
        moved, state = carry
        pull = config.client_lr * config.mu * moved
        update, state = sgd.update(-1 + pull, state)
        return jnp.where(k < steps, moved + update, moved), state

    carry = (start, sgd.init(start))
    return jax.lax.fori_loop(0, steps.max(), step, carry)[0]


def normalised_mean(config: Config) -> Reduction:
    """The aggregation of FedNova. Running statistics are averaged as in FedAvg."""
    plain = mean(config.weights)

    def identity(update):
        weight = jax.eval_shape(lambda: jnp.zeros((), float))
        return plain.identity((update, weight))

    def add(acc, updates, arrivals):
        weight = gradient_weight(config, jnp.maximum(arrivals.num_steps, 1))
        per_step = jax.tree.map(
            lambda u: u / along_rows(weight, u).astype(u.dtype), trained(updates)
        )
        return plain.add(acc, (with_trained(updates, per_step), weight), arrivals)

    def finish(acc, cast):
        update, weight = plain.finish(acc, cast)
        scaled = jax.tree.map(lambda u: weight.astype(u.dtype) * u, trained(update))
        return with_trained(update, scaled)

    return Reduction(identity, add, plain.merge, finish, name="normalised_mean")


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    transform: Transform | None = None,
    downlink: Transform | None = None,
) -> Algorithm:
    """Builds FedNova for the given loss; arguments as in `fedavg.make`."""
    check_parts(Config, config, loss_fn)
    algorithm = fedavg.make(
        config,
        loss_fn,
        client_optimizer=optax.sgd(config.client_lr, momentum=config.momentum),
        server_optimizer=server_optimizer,
        program=functools.partial(local_sgd, proximal=config.mu),
        transform=transform,
        reduce=normalised_mean(config),
        downlink=downlink,
    )
    parts = {**algorithm.parts, "client_optimizer": "sgd"}
    return dataclasses.replace(algorithm, name="fednova", parts=parts)
