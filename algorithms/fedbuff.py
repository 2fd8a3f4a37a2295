r"""FedBuff: the server steps whenever K updates have arrived, however old.

Client :math:`i`, which started when the server was at :math:`w_{t - \tau_i}`, takes its
local steps from there to :math:`w^i`, and what it sends counts the less the staler:

.. math::

  \Delta_i = \frac{w^i - w_{t - \tau_i}}{(1 + \tau_i)^a}, \qquad
  w_{t+1} = w_t + \eta_s \frac{1}{|B|} \sum_{i \in B} \Delta_i .

When who starts and arrives is up to the participation, see
`fedjax_core.virtual_time.Asynchronous`; under one that waits for everybody
:math:`\tau_i = 0` and this is FedAvg. The server keeps its last models, for clients
that are still at work on them; those that started before are left out of the round.

References:
  Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS
  2022, Algorithm 1; the weights are those of its experiments, :math:`a = 1/2`, after
  Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", arXiv 1903.03934, 2019.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check, server
from fedjax_core.arrays import num_bytes, repeat_rows
from fedjax_core.local import LocalConfig, init_bytes, local_sgd
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bytes
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction, mean, select
from fedjax_core.transform import Transform, identity, with_transform
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    LossFn,
    NonNegative,
    Params,
    Positive,
    trained,
    with_trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of FedBuff, with those of `LocalConfig`.

    Attributes:
      work: local work per client and turn.
      server_lr: step size along the mean update.
      exponent: :math:`a`, how fast weights fall with staleness; 0 counts all alike.
      max_staleness: how many models before its newest the server keeps.
    """

    server_lr: Positive = 1.0
    exponent: NonNegative = 0.5
    max_staleness: Annotated[int, check.non_negative] = 10


class State(NamedTuple):
    """What survives a round."""

    params: Params
    past: Params  # [max_staleness + 1, ...], the newest models, that of t at t modulo
    opt_state: Any  # of the server optimiser
    clients: Any  # [N, ...] state of the transform


def client_program(
    config: Config, loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> ClientProgram:
    """One client; shared is the past models, and which one it starts from."""
    local = local_sgd(loss_fn, optimizer)

    def start(received):
        past, staleness = received
        return jax.tree.map(lambda x: x[staleness["model"]], past)

    def init(received, client_state, turn):
        return local.init(start(received), client_state, turn)

    def finish(received, carry, client_state, turn):
        update, kept, metrics = local.finish(start(received), carry, client_state, turn)
        weight = received[1]["weight"]
        scaled = jax.tree.map(lambda u: (weight * u).astype(u.dtype), trained(update))
        return with_trained(update, scaled), kept, metrics

    return ClientProgram(init, local.step, finish)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    transform: Transform | None = None,
    reduce: Reduction | None = None,
) -> Algorithm:
    """Builds FedBuff for the given loss.

    Metrics gain "staleness", the mean over the buffer, and "stale_clients", how many
    started too long ago to be counted.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      client_optimizer: instead of SGD with ``config.client_lr``.
      server_optimizer: instead of SGD with ``config.server_lr``.
      transform: applied to every update before it is sent.
      reduce: instead of the uniform mean.
    """
    check_parts(
        Config, config, loss_fn, client_optimizer=client_optimizer,
        server_optimizer=server_optimizer, transform=transform, reduce=reduce,
    )  # fmt: skip
    client_opt = client_optimizer or optax.sgd(config.client_lr)
    server_opt = server_optimizer or optax.sgd(config.server_lr)
    transform, reduce = transform or identity(), reduce or mean("uniform")
    client = with_transform(client_program(config, loss_fn, client_opt), transform)
    kept = config.max_staleness + 1

    def init(params, num_clients):
        clients = repeat_rows(((), transform.init(trained(params))), num_clients)
        opt_state = server.init(server_opt, params)
        return State(params, repeat_rows(params, kept), opt_state, clients)

    def round(state, cohort, key):
        staleness = cohort.round - cohort.start_round
        late = cohort.client_mask & (staleness >= kept)
        results = map_clients(
            client,
            state.past,
            cohort.only(~late),
            key,
            reduce=reduce,
            client_state=state.clients,
            each={
                "model": cohort.start_round % kept,
                "weight": (1.0 + staleness) ** -config.exponent,
            },
        )
        metrics = dict(results.metrics)
        step, opt_state = server.direction(
            server_opt, state.params, state.opt_state, results.update
        )
        moved = server.move(state.params, step, results.update), opt_state
        # A buffer of nobody makes a model all the same: the next round's, kept as such.
        idle = metrics.pop("idle")
        params, opt_state = select(idle, (state.params, state.opt_state), moved)
        past = jax.tree.map(
            lambda x, p: x.at[(cohort.round + 1) % kept].set(p), state.past, params
        )
        counted = results.valid.sum()
        total = jnp.where(results.valid, staleness, 0).sum()
        metrics |= {
            "staleness": total / jnp.maximum(counted, 1),
            "stale_clients": late.sum(),
            # One model each, not all that are kept.
            "downlink_bytes": Bytes.of(num_bytes(params)) * cohort.client_mask.sum(),
        }
        return State(params, past, opt_state, results.client_state), metrics

    return Algorithm(
        name="fedbuff",
        config=config,
        work=config.work,
        init=init,
        round=round,
        client_bytes=init_bytes(client_opt, transform, models=1),
        parts={
            "client_optimizer": "custom" if client_optimizer else "sgd",
            "server_optimizer": "custom" if server_optimizer else "sgd",
            "transform": transform.name,
            "reduce": reduce.name,
        },
    )
