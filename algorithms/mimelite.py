r"""MimeLite: clients take the steps of a centralised optimiser with frozen statistics.

The server keeps a mean m of gradients, 0 at first, and a mean v of their squares, at
first :math:`\tau^2`. Clients step by both and leave them as they are: a round of the
cohort S from :math:`x` is

.. math::

  y_i \leftarrow y_i
    - \eta_l \frac{(1 - \beta_1) g_i(y_i) + \beta_1 m}{\sqrt{v} + \tau},
  \qquad g = \frac{1}{|S|} \sum_{i \in S} \nabla f_i(x),

.. math::

  x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x), \quad
  m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
  v \leftarrow \beta_2 v + (1 - \beta_2) g^2,

with :math:`\nabla f_i` of all of a client's examples: Adam without bias correction,
RMSprop with :math:`\beta_1 = 0`, SGD with momentum where there is no v.

References:
  Karimireddy et al., "Breaking the Centralized Barrier for Cross-Device Federated
  Learning", NeurIPS 2021, Algorithm 1 (MimeLite) and the table of base algorithms.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import random, server
from fedjax_core.local import (
    LocalConfig,
    check_whole_epochs,
    full_gradient,
    init_bytes,
    local_sgd,
)
from fedjax_core.map import map_clients, two_passes
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction, mean
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    Fraction,
    LocalWork,
    LossFn,
    Params,
    Positive,
    trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of MimeLite, with those of `LocalConfig`.

    Attributes:
      client_lr: :math:`\eta_l`.
      server_lr: :math:`\eta_g`; 1 in the paper.
      beta1: decay of m, in [0, 1).
      beta2: decay of v, in [0, 1); None for momentum alone.
      tau: added to the square root of v.
      work: whole epochs.
    """

    server_lr: Positive = 1.0
    beta1: Fraction = 0.9
    beta2: Fraction | None = None
    tau: Positive = 1e-3
    work: Annotated[LocalWork, check_whole_epochs] = LocalWork()


class State(NamedTuple):
    """What survives a round."""

    params: Params
    statistics: Any  # (m, v) in float32 or wider; v is () where there is none


def base_optimizer(config: Config) -> optax.GradientTransformation:
    """The pair (U, V) of the paper: the step, with old statistics, and the new ones."""

    def decay(beta, old, new):
        return jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, old, new)

    def init(params):
        at = optax.tree.full_like
        return at(params, 0), () if config.beta2 is None else at(params, config.tau**2)

    def update(updates, state, params=None):
        mean, square = state
        mean = decay(config.beta1, mean, updates)
        step = jax.tree.map(lambda m: -config.client_lr * m, mean)
        if config.beta2 is not None:
            step = jax.tree.map(
                lambda s, v: s / (jnp.sqrt(v) + config.tau), step, square
            )
            square = decay(config.beta2, square, jax.tree.map(jnp.square, updates))
        return step, (mean, square)

    return optax.GradientTransformation(init, update)


def client_program(config: Config, loss_fn: LossFn) -> ClientProgram:
    """One client's local steps; shared is ``(x, statistics)``."""
    base = base_optimizer(config)
    frozen = base._replace(update=lambda g, s, params=None: (base.update(g, s)[0], s))
    local = local_sgd(loss_fn, frozen)

    def init(shared, client_state, turn):
        params, statistics = shared
        carry = local.init(params, client_state, turn)
        return carry._replace(opt_state=statistics)

    def finish(shared, carry, client_state, turn):
        return local.finish(shared[0], carry, client_state, turn)

    return ClientProgram(init, local.step, finish)


def make(
    config: Config, loss_fn: LossFn, *, reduce: Reduction | None = None
) -> Algorithm:
    """Builds MimeLite for the given loss.

    `reduce` is by default the uniform mean, of the deltas and of the gradients.
    """
    check_parts(Config, config, loss_fn, reduce=reduce)
    reduce = reduce or mean("uniform")
    client, gradient = client_program(config, loss_fn), full_gradient(loss_fn)
    base = base_optimizer(config)

    def init(params, num_clients):
        return State(params, server.init(base, params))

    def round(state, cohort, key):
        # In this order, whoever diverges in its steps has no say in the statistics.
        local = map_clients(client, state, cohort, key, reduce=reduce)
        full = map_clients(
            gradient,
            state.params,
            cohort.only(local.valid).first_epochs(),
            random.stream(key, "gradient"),
            reduce=reduce,
        )
        step = jax.tree.map(lambda d: config.server_lr * d, trained(local.update))
        params = server.move(state.params, step, local.update)
        _, statistics = base.update(trained(full.update), state.statistics)
        metrics = two_passes(local, full)
        metrics["train_loss"] = local.metrics["train_loss"]
        return State(params, statistics), metrics

    return Algorithm(
        name="mimelite",
        config=config,
        work=config.work,
        init=init,
        round=round,
        client_bytes=init_bytes(base),
        parts={"reduce": reduce.name},
    )
