r"""One-shot clustering: k-means of first local models, then FedAvg in every cluster.

All clients train from the same model. By Lloyd's iteration on the Euclidean distances
of what they reach, the server puts those of the first round into K clusters, and from
then on each cluster has a model of its own,

.. math::

  \theta_k \leftarrow \theta_k + \sum_{i \in c_k} a_i (\theta^i - \theta_k) .

Who comes later trains from the first model as well, joins the cluster of the nearest
centre and is averaged with it from its second turn on. K must be known, and clients are
clustered whether they need it or not: what `cfl` does without.

References:
  Ghosh, Hong, Yin and Ramchandran, "Robust Federated Learning in a Heterogeneous
  Environment", arXiv 1906.06629, 2019, Algorithm 1, with means in the clusters and
  FedAvg of them; latecomers are ours.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_core import random, server
from fedjax_core.arrays import num_bytes, repeat_rows, wide
from fedjax_core.clusters.lloyd import lloyd
from fedjax_core.clusters.members import (
    Mine,
    by_cluster,
    cluster_means,
    in_cluster,
    lookup,
    remembering,
    weights_of,
)
from fedjax_core.clusters.secret import no_map
from fedjax_core.clusters.similarity import row_norms
from fedjax_core.local import LocalConfig, init_bytes, local_sgd
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bytes
from fedjax_core.parts import check_parts
from fedjax_core.reduce import select, stack
from fedjax_core.transform import Transform, identity, with_transform
from fedjax_core.types import Algorithm, LossFn, Params, PositiveInt, PyTree, trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of one-shot clustering, with those of `LocalConfig`.

    Attributes:
      num_clusters: K.
      weights: what clients weigh in means, "examples" or "uniform".
    """

    num_clusters: PositiveInt
    weights: Literal["examples", "uniform"] = "examples"


class State(NamedTuple):
    """What survives a round."""

    params: Params  # the mean of all clients' models
    models: Params  # [K + 1, ...], the last is that of the start
    centres: PyTree  # [K, ...], of the first updates of each cluster
    label: jax.Array  # [N] int32, the cluster of each client, -1 before its turn
    clients: Any  # [N, ...], a client's number and the state of the transform


def make(
    config: Config, loss_fn: LossFn, *, transform: Transform | None = None
) -> Algorithm:
    """Builds one-shot clustering for the given loss.

    Clients evaluate their cluster's model as "cluster".

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      transform: applied to every update before it is sent.
    """
    check_parts(Config, config, loss_fn, transform=transform)
    K, optimizer = config.num_clusters, optax.sgd(config.client_lr)
    transform = transform or identity()
    local = in_cluster(local_sgd(loss_fn, optimizer), no_map())
    client = with_transform(remembering(local), transform)

    def init(params, num_clients):
        row = (jnp.int32(-1), transform.init(trained(params)))
        models, rows = repeat_rows(params, K + 1), repeat_rows(row, num_clients)
        zeros = jax.tree.map(lambda p: jnp.zeros_like(wide(p)), trained(params))
        label = jnp.full(num_clients, -1, jnp.int32)
        return State(params, models, repeat_rows(zeros, K), label, rows)

    def round(state, cohort, key):
        cluster = lookup(state.label, cohort.client_id)
        new = cluster < 0
        results = map_clients(
            client,
            (state.models, ()),
            cohort,
            key,
            reduce=stack(),
            client_state=state.clients,
            each=Mine(jnp.where(new, K, cluster), cohort.client_id),
        )
        update, valid = trained(results.update), results.valid

        def nearest():
            def away(centre):
                return row_norms(jax.tree.map(lambda u, c: u - c[None], update, centre))

            return lax.map(away, state.centres).argmin(0).astype(jnp.int32)

        def found():
            ids = jnp.where(valid, cohort.client_id, -1)
            return lloyd(update, ids, K, random.stream(key, "lloyd"))

        first = (state.label < 0).all()
        joined = jnp.where(valid & new, lax.cond(first, found, nearest), cluster)
        ids = jnp.where(valid & new, cohort.client_id, len(state.label))
        label = state.label.at[ids].set(joined, mode="drop")

        weights = weights_of(cohort, config.weights)
        counts = jnp.where(valid & (first | ~new), joined, -1)
        means = cluster_means(results.update, counts, weights, K + 1)
        models = jax.vmap(server.move)(state.models, trained(means), means)
        centres = jax.tree.map(lambda m: m[:K], trained(means))
        centres = select(first, centres, state.centres)
        sizes = by_cluster(jnp.ones_like(label), label, K + 1)
        mean = cluster_means(models, jnp.zeros_like(sizes), sizes, 1)
        params = jax.tree.map(lambda m, p: m[0].astype(p.dtype), mean, state.params)
        metrics = results.metrics | {
            # One model each, not those of all clusters.
            "downlink_bytes": Bytes.of(num_bytes(state.params))
            * cohort.client_mask.sum(),
        }
        return State(params, models, centres, label, results.client_state), metrics

    def own_models(state, row):
        cluster = jnp.where(row[0] < 0, -1, state.label[row[0]])
        own = jax.tree.map(lambda m: m[cluster], state.models)
        return {"cluster": select(cluster < 0, state.params, own)}

    return Algorithm(
        name="one_shot_clustering",
        config=config,
        work=config.work,
        init=init,
        round=round,
        own_models=own_models,
        client_bytes=init_bytes(optimizer, transform, models=1),
        parts={"transform": transform.name},
    )
