r"""Gossip averaging: without a server, nodes train and average with their neighbours.

Every client is a node with a model of its own. Those of the cohort take local steps
from where they stand, :math:`\delta_i`; then all nodes average,

.. math::

  x_i \leftarrow x_i + \delta_i, \qquad x_i \leftarrow \sum_j W_{ij} x_j .

W is ``FederatedData.public["mixing"]``, which `networks.builders.mixing` makes of a
graph. On a complete one with equal weights all nodes are the clients of FedAvg. Models
of all nodes are on the device. In evaluations "node" are the nodes' models, and the
method's is their mean.

References:
  Sattler, TU Berlin 2021, section 2.2.
  Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS
  2017, Algorithm 1, which averages while it computes a gradient.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check, server
from fedjax_core.arrays import num_bytes, repeat_rows
from fedjax_core.clusters.members import Mine, in_cluster, remembering
from fedjax_core.clusters.secret import no_map
from fedjax_core.local import LocalConfig, init_bytes, local_sgd
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bytes
from fedjax_core.parts import check_parts
from fedjax_core.reduce import stack
from fedjax_core.types import Algorithm, LocalWork, LossFn, Params, trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of gossip averaging: those of `LocalConfig`, of nodes."""

    work: LocalWork = LocalWork(steps=1)


class State(NamedTuple):
    """What survives a round."""

    params: Params  # the mean of the nodes'
    models: Params  # [N, ...]
    clients: jax.Array  # [N] int32, a node's number, -1 before its turn


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """Builds gossip averaging for the given loss; arguments as in `fedavg.make`.

    "uplink_bytes" and "downlink_bytes" are a model for each neighbour of each node.
    """
    check_parts(Config, config, loss_fn, client_optimizer=client_optimizer)
    client_opt = client_optimizer or optax.sgd(config.client_lr)
    client = remembering(in_cluster(local_sgd(loss_fn, client_opt), no_map()))

    def needs(model, data):
        check.rows(data.num_clients, mixing=data.public.get("mixing", ()))

    def init(params, num_clients):
        numbers = jnp.full(num_clients, -1, jnp.int32)
        return State(params, repeat_rows(params, num_clients), numbers)

    def round(state, cohort, key):
        here = jnp.maximum(cohort.client_id, 0)
        results = map_clients(
            client,
            (state.models, ()),
            cohort,
            key,
            reduce=stack(),
            client_state=state.clients,
            each=Mine(here, cohort.client_id),
        )
        weights = cohort.public["mixing"]
        nobody = len(weights)  # where rows that did not arrive are dropped
        at = jnp.where(results.valid, cohort.client_id, nobody)
        start = jax.tree.map(lambda m: m[here], state.models)
        update = results.update
        moved = jax.vmap(server.move)(start, trained(update), update)

        def mix(models, moved):
            models = models.at[at].set(moved, mode="drop")
            return jnp.tensordot(weights, models, 1).astype(models.dtype)

        models = jax.tree.map(mix, state.models, moved)
        params = jax.tree.map(lambda m: m.mean(0).astype(m.dtype), models)
        links = (weights != 0).sum() - (jnp.diagonal(weights) != 0).sum()
        sent = Bytes.of(num_bytes(params)) * links
        metrics = results.metrics | {"uplink_bytes": sent, "downlink_bytes": sent}
        return State(params, models, results.client_state), metrics

    def own_models(state, row) -> dict[str, Any]:
        return {"node": jax.tree.map(lambda m: m[jnp.maximum(row, 0)], state.models)}

    return Algorithm(
        name="gossip",
        config=config,
        work=config.work,
        init=init,
        round=round,
        own_models=own_models,
        client_bytes=init_bytes(client_opt, models=1),
        parts={"client_optimizer": "custom" if client_optimizer else "sgd"},
        needs=needs,
    )
