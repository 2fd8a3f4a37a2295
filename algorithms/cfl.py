r"""Clustered federated learning: FedAvg in clusters that split when they disagree.

All clients start in one cluster. In every round each cluster c takes a step of FedAvg,
:math:`\theta_c \leftarrow \theta_c + \Delta_c` with the mean update
:math:`\Delta_c = \sum_{i \in c} a_i u_i`, and is cut in two where

.. math::

  \lVert \Delta_c \rVert < \varepsilon_1, \qquad
  \max_{i \in c} \lVert u_i \rVert \ge \varepsilon_2, \qquad
  \alpha_{cross}^{max} < 1 - 2 \gamma_{max}^2 :

it stands still, some of its members alone would not, and the most similar pair across
the best cut (`fedjax_core.clusters.bipartition`) is further apart than noise explains.
Each part goes on from :math:`\theta_c` by its own mean of the same round. Clusters
never meet again, so the whole is the recursion: learn until stationary, cut, do so in
each part (Algorithms 9 to 11). Only clusters whose members have all arrived in the
round, or hold no examples, are cut.

Clusters are leaves of a binary tree whose inner nodes keep the model that was cut:
models from general to specific. `params` is the root's. Clients evaluate the model of
their cluster as "cluster" and that of its parent as "parent", to fall back on where a
split hurts.

The robust mode removes the smaller part of a cut from training instead, for good. The
root is then the only cluster. Who sends what is not finite is removed as well.

References:
  Sattler, Müller and Samek, "Clustered Federated Learning: Model-Agnostic Distributed
  Multitask Optimization under Privacy Constraints", IEEE TNNLS 2021.
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, Algorithms 9 to 13, (6.50); its children go on by their own
  means, which Algorithm 12 leaves open.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check, server
from fedjax_core.algorithms.fedavg import Program
from fedjax_core.arrays import along_rows, num_bytes, repeat_rows
from fedjax_core.clusters.bipartition import separation
from fedjax_core.clusters.criteria import inspect, worth_splitting
from fedjax_core.clusters.members import (
    Mine,
    cluster_means,
    in_cluster,
    remembering,
    weights_of,
)
from fedjax_core.clusters.secret import SharedMap, no_map
from fedjax_core.clusters.tree import Tree, complete, divide, prune, seedling
from fedjax_core.local import LocalConfig, init_bytes, local_sgd
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bytes
from fedjax_core.parts import check_parts
from fedjax_core.reduce import stack
from fedjax_core.transform import Transform, identity, with_transform
from fedjax_core.types import (
    Algorithm,
    Fraction,
    LossFn,
    NonNegative,
    Params,
    Positive,
    PositiveInt,
    trained,
    with_trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters, with those of `LocalConfig`.

    Attributes:
      eps1: a cluster is stationary where the norm of its mean update is below; None
        does not ask. About a tenth of the largest mean update is a start.
      eps2: it is cut where the norm of a member's update is at least this, 1 to 10
        times `eps1`.
      gamma_max: relative noise of clients' updates to allow for, in [0, 1): cut where
        :math:`\alpha_{cross}^{max} < 1 - 2 \gamma_{max}^2`.
      max_clusters: clusters that there is room for. A split beyond is not made, and
        counted as "refused_splits".
      robust: drop the smaller part of a cut from training; with `eps1` None and `eps2`
        0, since attackers need not let the mean update vanish.
      weights: what clients weigh in means, "examples" or "uniform".
    """

    eps1: Positive | None = 0.4
    eps2: NonNegative = 1.6
    gamma_max: Fraction = 0.7
    max_clusters: PositiveInt = 8
    robust: bool = False
    weights: Literal["examples", "uniform"] = "examples"


class State(NamedTuple):
    """What survives a round; nodes are V = 2 max_clusters - 1."""

    params: Params  # of the root
    models: Params  # [V, ...]
    tree: Tree
    secret: Any  # what clients hide coordinates with
    clients: Any  # [N, ...], a client's number and the state of the transform


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    program: Program = local_sgd,
    secret: SharedMap | None = None,
    transform: Transform | None = None,
) -> Algorithm:
    """Builds clustered federated learning for the given loss.

    Metrics gain "clusters", "splits" and "refused_splits", "removed_clients",
    "alpha_cross" (the smallest of the clusters that may be cut, NaN if none),
    "mean_update_norm" (the largest of the clusters), "max_update_norm"; and "gap", the
    largest separation gap of the clusters, where the server's data say who has which
    distribution as "cluster", ``[N]`` ints.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      program: what a client does instead of plain local steps, its update a delta.
      secret: an orthonormal map that hides the model's coordinates from the server.
      transform: applied to every update before it is sent.
    """
    check_parts(Config, config, loss_fn, transform=transform)
    check.instance(SharedMap, secret=secret or no_map())
    secret, transform = secret or no_map(), transform or identity()
    optimizer, nodes = optax.sgd(config.client_lr), 2 * config.max_clusters - 1
    local = in_cluster(program(loss_fn, optimizer), secret)
    client = with_transform(remembering(local), transform)

    def needs(model, data):
        if "cluster" in data.public:
            check.rows(data.num_clients, cluster=data.public["cluster"])

    def init(params, num_clients):
        key = secret.init(trained(params))
        hidden = with_trained(params, secret.apply(key, trained(params)))
        row = (jnp.int32(-1), transform.init(trained(params)))
        models, tree = repeat_rows(hidden, nodes), seedling(nodes, num_clients)
        return State(hidden, models, tree, key, repeat_rows(row, num_clients))

    def round(state, cohort, key):
        check.in_range(2, math.inf, cohort_size=len(cohort.client_id))
        leaf = state.tree.leaf(cohort.client_id)
        results = map_clients(
            client,
            (state.models, state.secret),
            cohort.only(leaf >= 0),
            key,
            reduce=stack(),
            client_state=state.clients,
            each=Mine(jnp.maximum(leaf, 0), cohort.client_id),
        )
        update, arrived = results.update, results.valid
        weights = weights_of(cohort, config.weights)
        cluster = jnp.where(arrived, leaf, -1)
        seen = inspect(trained(update), cluster, weights, nodes)
        cut = seen.cut
        broken = cohort.client_mask & (leaf >= 0) & ~arrived & config.robust
        whole = complete(state.tree, arrived | broken, cohort)
        cross = jnp.where(whole, cut.cross, jnp.inf)
        seen = seen._replace(cut=cut._replace(cross=cross))
        ready = worth_splitting(seen, config.eps1, config.eps2, config.gamma_max)
        if config.robust:
            tree, split = prune(state.tree, ready, cut.part, broken, cohort)
        else:
            tree, split = divide(state.tree, ready, cut.part, cohort)

        # New clusters start from the model of the old one, and all take their step.
        born = tree.parent != state.tree.parent
        models = jax.tree.map(
            lambda m: jnp.where(along_rows(born, m), m[tree.parent], m), state.models
        )
        moved = jnp.where(arrived, tree.leaf(cohort.client_id), -1)
        step = cluster_means(update, moved, weights, nodes)
        models = jax.vmap(server.move)(models, trained(step), step)

        def finite(x):
            return jnp.where(jnp.isfinite(x), x, jnp.nan)

        metrics = results.metrics | {
            "clusters": (tree.parent >= 0).sum() // 2 + 1,
            "splits": split.sum(),
            "refused_splits": (ready & ~split).sum(),
            "removed_clients": (tree.removed != state.tree.removed).sum(),
            "alpha_cross": finite(cross.min()),
            "mean_update_norm": seen.mean_norm.max(),
            "max_update_norm": seen.max_norm.max(),
            # One model each, not those of all clusters.
            "downlink_bytes": Bytes.of(num_bytes(state.params))
            * (cohort.client_mask & (leaf >= 0)).sum(),
        }
        if "cluster" in cohort.public:
            truth = cohort.public["cluster"][cohort.client_id]
            gap = separation(seen.similarity, truth, cluster, nodes, cut=cut).gap
            metrics["gap"] = finite(gap.max())
        root = jax.tree.map(lambda m: m[0], models)
        new = State(root, models, tree, state.secret, results.client_state)
        return new, metrics

    def shown(state, node):
        model = jax.tree.map(lambda m: m[node], state.models)
        return with_trained(model, secret.invert(state.secret, trained(model)))

    def own_models(state, row):
        number, tree = row[0], state.tree
        leaf = jnp.where(number < 0, 0, tree.label[number])
        above = jnp.maximum(tree.parent[leaf], 0)
        return {"cluster": shown(state, leaf), "parent": shown(state, above)}

    return Algorithm(
        name="cfl",
        config=config,
        work=config.work,
        init=init,
        round=round,
        model=lambda state: shown(state, 0),
        own_models=own_models,
        client_bytes=init_bytes(optimizer, transform, models=1),
        parts={"secret": secret.name, "transform": transform.name},
        needs=needs,
    )
