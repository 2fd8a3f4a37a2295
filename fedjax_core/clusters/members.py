"""Clients that train the model of their cluster, and their means."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_core.arrays import flat_rows, wide
from fedjax_core.clusters.secret import SharedMap
from fedjax_core.types import ClientProgram, Cohort, PyTree, trained, with_trained


class Mine(NamedTuple):
    """What the server tells each client alone."""

    cluster: Any  # [C] int32, whose model it starts from
    client_id: Any  # [C] int32


def in_cluster(program: ClientProgram, secret: SharedMap) -> ClientProgram:
    """The program of a client that starts from the model of its cluster.

    It receives ``((models, key), Mine)``: models ``[K, ...]`` as `secret` maps them and
    what it needs to undo that. Its update is mapped likewise.
    """

    def start(received):
        (models, key), mine = received
        model = jax.tree.map(lambda x: x[mine.cluster], models)
        return with_trained(model, secret.invert(key, trained(model)))

    def init(received, client_state, turn):
        return program.init(start(received), client_state, turn)

    def step(received, carry, batch, turn):
        return program.step(start(received), carry, batch, turn)

    def finish(received, carry, client_state, turn):
        done = program.finish(start(received), carry, client_state, turn)
        sent = secret.apply(received[0][1], trained(done[0]))
        return with_trained(done[0], sent), *done[1:]

    return ClientProgram(init, step, finish)


def remembering(program: ClientProgram) -> ClientProgram:
    """The program of a client that keeps nothing but its number, -1 before its turn.

    So what the server's tables say of a client can be looked up for its row of the
    state, see `Algorithm.own_models`. It receives ``(shared, Mine)``.
    """

    def init(received, client_id, turn):
        return program.init(received, (), turn)

    def finish(received, carry, client_id, turn):
        update, _, metrics = program.finish(received, carry, (), turn)
        return update, received[1].client_id, metrics

    return ClientProgram(init, program.step, finish)


def lookup(table: jax.Array, client_id: jax.Array) -> jax.Array:
    """Entries ``[C]`` of a table ``[N]`` by client, -1 for padding and past its end."""
    at = jnp.where(client_id < 0, len(table), client_id)
    return table.at[at].get(mode="fill", fill_value=-1)


def by_cluster(
    values: jax.Array,
    cluster: jax.Array,
    num_clusters: int,
    reduce: Callable[..., jax.Array] = jax.ops.segment_sum,
) -> jax.Array:
    """Sums of `values` ``[C]`` by cluster ``[C]``, or another `reduce`; ``[K]``.

    Those of cluster -1 are left out. Bools are counted.
    """
    values = values.astype(jnp.int32) if values.dtype == bool else values
    place = jnp.where(cluster < 0, num_clusters, cluster)
    return reduce(values, place, num_clusters + 1)[:num_clusters]


def weights_of(cohort: Cohort, by: Literal["examples", "uniform"]) -> jax.Array:
    """What clients weigh in the means of their clusters, ``[C]``."""
    sizes = cohort.num_examples
    return sizes if by == "examples" else jnp.ones_like(sizes)


def cluster_means(
    updates: PyTree, cluster: jax.Array, weights: jax.Array, num_clusters: int
) -> PyTree:
    """The weighted mean of every cluster's updates, 0 without weight; ``[K, ...]``.

    Args:
      updates: leaves ``[C, ...]``.
      cluster: ``[C]`` ints; what is out of 0..K-1 belongs to none.
      weights: ``[C]``, >= 0.
      num_clusters: K.
    """
    member = jnp.arange(num_clusters)[:, None] == cluster[None, :]
    w = jnp.where(member, weights.astype(float)[None, :], 0)
    total = w.sum(1, keepdims=True)
    share = w / jnp.where(total > 0, total, 1)

    def one(x):
        flat = wide(flat_rows(x))
        means = jnp.matmul(share.astype(flat.dtype), flat, precision="highest")
        return means.reshape(num_clusters, *x.shape[1:])

    return jax.tree.map(one, updates)
