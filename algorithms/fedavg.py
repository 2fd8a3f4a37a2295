r"""FedAvg: local SGD on every client, then a weighted mean of the deltas.

Client :math:`i` starts from the server's parameters :math:`w_t`, takes its local steps
of SGD to reach :math:`w_t^i`, and the server moves by

.. math::

  \Delta_t = \frac{\sum_i n_i (w_t^i - w_t)}{\sum_i n_i}, \qquad
  w_{t+1} = w_t + \eta_s \Delta_t .

With another server optimiser, :math:`-\Delta_t` takes the place of the gradient
(FedOpt).

References:
  McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
  Data", AISTATS 2017, Algorithm 1.
  Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax

from fedjax_core import check, server
from fedjax_core.arrays import repeat_rows
from fedjax_core.fair.decider import Decider, hear
from fedjax_core.local import LocalConfig, check_whole_epochs, init_bytes, local_sgd
from fedjax_core.map import map_clients, two_passes
from fedjax_core.parts import check_parts
from fedjax_core.reduce import Reduction, mean
from fedjax_core.transform import Transform, identity, with_transform
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    LossFn,
    Params,
    Positive,
    PyTree,
    trained,
)

Program = Callable[[LossFn, optax.GradientTransformation], ClientProgram]
"""``(loss_fn, client_optimizer) -> program``, of the optimiser's local steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of FedAvg, with those of `LocalConfig`.

    Attributes:
      server_lr: step size along the mean delta; 1 is plain FedAvg.
      weights: "examples" weighs clients by how many examples they hold, "uniform"
        counts each once; another `reduce` given to `make` brings its own weights.
    """

    server_lr: Positive = 1.0
    weights: Literal["examples", "uniform"] = "examples"


class State(NamedTuple):
    """What survives a round."""

    params: Params
    opt_state: Any  # of the server optimiser
    downlink: Any  # of the downlink transform
    clients: Any  # [N, ...] state of the program and of the transform: residuals, say
    mixing: Any = ()  # of the decider


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    program: Program = local_sgd,
    keep: Callable[[Params], PyTree] = lambda params: (),
    transform: Transform | None = None,
    reduce: Reduction | None = None,
    downlink: Transform | None = None,
    mixing: Decider | None = None,
) -> Algorithm:
    """Builds FedAvg for the given loss.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      client_optimizer: instead of SGD with ``config.client_lr``.
      server_optimizer: instead of SGD with ``config.server_lr``.
      program: what a client does instead of plain local steps, its update a delta.
      keep: parameters -> the row of a client's state that `program` starts with.
      transform: applied to every delta before it is sent: clipping, compression.
      reduce: instead of the weighted mean: a robust or a noisy aggregation.
      downlink: applied to the server's step before clients receive it.
      mixing: instead of weights that are fixed: clients first tell their loss at the
        server's model, by which it decides. The work is whole epochs then.
    """
    check_parts(
        Config, config, loss_fn, client_optimizer=client_optimizer,
        server_optimizer=server_optimizer, transform=transform, reduce=reduce,
        downlink=downlink,
    )  # fmt: skip
    if mixing is not None:
        check.instance(Decider, mixing=mixing)
        check_whole_epochs(config.work)
        if reduce is not None:
            raise ValueError(
                f"reduce must be None where mixing decides the weights, got "
                f"{reduce.name} beside {mixing.name}."
            )
    client_opt = client_optimizer or optax.sgd(config.client_lr)
    server_opt = server_optimizer or optax.sgd(config.server_lr)
    transform, reduce = transform or identity(), reduce or mean(config.weights)
    client = with_transform(program(loss_fn, client_opt), transform)

    def init(params, num_clients):
        row = (keep(params), transform.init(trained(params)))
        clients = repeat_rows(row, num_clients)
        kept = downlink.init(trained(params)) if downlink else ()
        decided = mixing.init(num_clients) if mixing else ()
        return State(params, server.init(server_opt, params), kept, clients, decided)

    def round(state, cohort, key):
        told, decided, objective = None, state.mixing, {}
        by, trains = reduce, cohort
        if mixing is not None:
            told, said = hear(loss_fn, state.params, cohort, key)
            decided, weights = mixing.update(state.mixing, said)
            by, trains = mean(weights), cohort.only(told.valid)
            mixed = jnp.where(told.valid, weights * told.client_metrics["loss"], 0)
            total = weights.sum()
            objective = {"mixed_loss": mixed.sum() / jnp.where(total == 0, 1, total)}
        results = map_clients(
            client, state.params, trains, key, reduce=by, client_state=state.clients
        )
        step, opt_state = server.direction(
            server_opt, state.params, state.opt_state, results.update
        )
        step, kept, sent = server.send(
            downlink, state.params, step, state.downlink, cohort, key
        )
        params = server.move(state.params, step, results.update)
        metrics = two_passes(told, results) if told else results.metrics
        new = State(params, opt_state, kept, results.client_state, decided)
        return new, metrics | sent | objective

    return Algorithm(
        name="fedavg",
        config=config,
        work=config.work,
        init=init,
        round=round,
        client_bytes=init_bytes(client_opt, transform),
        parts={
            "client_optimizer": "custom" if client_optimizer else "sgd",
            "server_optimizer": "custom" if server_optimizer else "sgd",
            "transform": transform.name,
            "reduce": mixing.name if mixing else reduce.name,
            "downlink": downlink.name if downlink else "none",
        },
    )


def mixed(
    kind: type,
    config: Any,
    loss_fn: LossFn,
    decider: Callable[[Any], Decider],
    name: str,
    parts: dict[str, Any],
) -> Algorithm:
    """A method that is FedAvg with a decider of its own.

    Args:
      kind: its `Config`, of this module's kind.
      config: hyper-parameters.
      loss_fn: per-example losses.
      decider: config -> what decides.
      name: of the method.
      parts: other arguments of `make` but `mixing`.
    """
    check_parts(kind, config, loss_fn)
    algorithm = make(config, loss_fn, mixing=decider(config), **parts)
    return dataclasses.replace(algorithm, name=name)
