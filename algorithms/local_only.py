"""Local training: every client trains a model of its own, and nothing is sent.

The baseline that a personalised method has to beat. All clients start from the same
parameters; whoever is in a cohort takes its local steps from where it stands. In
evaluations "local" is the clients' own models. The server's is the one at the start.
"""

import dataclasses
from typing import Any, NamedTuple

import optax

from fedjax_core.arrays import repeat_rows
from fedjax_core.local import LocalConfig, init_bytes, local_sgd
from fedjax_core.map import map_clients
from fedjax_core.parts import check_parts
from fedjax_core.types import Algorithm, ClientProgram, LossFn, Params, trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of local training: those of `LocalConfig`."""


class State(NamedTuple):
    """What survives a round."""

    params: Params  # at the start
    clients: Any  # [N, ...], models and states of their optimisers


def client_program(
    loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> ClientProgram:
    """One client; its state is its model and that of the optimiser, which goes on."""
    local = local_sgd(loss_fn, optimizer, keep_optimizer=True)

    def init(shared, client_state, turn):
        params, opt_state = client_state
        return local.init(params, opt_state, turn)

    def finish(shared, carry, client_state, turn):
        return (), (carry.params, carry.opt_state), {"train_loss": carry.train_loss}

    return ClientProgram(init, local.step, finish)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """Builds local training for the given loss; arguments as in `fedavg.make`."""
    check_parts(Config, config, loss_fn, client_optimizer=client_optimizer)
    client_opt = client_optimizer or optax.sgd(config.client_lr)
    client = client_program(loss_fn, client_opt)

    def init(params, num_clients):
        row = (params, client_opt.init(trained(params)))
        return State(params, repeat_rows(row, num_clients))

    def round(state, cohort, key):
        results = map_clients(
            client, (), cohort, key, reduce=(), client_state=state.clients
        )
        return state._replace(clients=results.client_state), results.metrics

    return Algorithm(
        name="local_only",
        config=config,
        work=config.work,
        init=init,
        round=round,
        own_models=lambda state, row: {"local": row[0]},
        # Its row, before and after.
        client_bytes=init_bytes(client_opt, client_opt, models=1),
        parts={"client_optimizer": "custom" if client_optimizer else "sgd"},
    )
