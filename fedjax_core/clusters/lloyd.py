"""k-means of clients' updates, from their inner products alone."""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_core import check
from fedjax_core.arrays import along_rows, divisor, flat_rows, wide
from fedjax_core.clusters.similarity import row_norms
from fedjax_core.types import Key, PyTree


def lloyd(
    updates: PyTree,
    client_id: jax.Array,
    num_clusters: int,
    key: Key,
    *,
    restarts: int = 10,
    iterations: int = 50,
) -> jax.Array:
    r"""Clusters ``[M]`` int32 that Lloyd's iteration finds, the best of several starts.

    Distances to the mean of a cluster come from the Gram matrix G of the centred
    updates, :math:`G_{ii} - 2 \bar G_{i c} + \bar G_{c c}` with means over c, so that
    an iteration costs :math:`M^2 K` whatever the size of the model. Starts are drawn as
    in k-means++; a cluster that loses all its members stays empty.

    Args:
      updates: leaves ``[M, ...]``.
      client_id: ``[M]`` ints; -1 for who is not clustered, and gets -1. Clusters are
        numbered by their first clients, whatever the order of rows.
      num_clusters: K >= 1.
      key: of the starts.
      restarts: starts.
      iterations: of each.

    References:
      Lloyd, "Least Squares Quantization in PCM", IEEE Trans. Information Theory, 1982.
      Arthur and Vassilvitskii, "k-means++", SODA 2007.
    """
    check.positive_int(
        num_clusters=num_clusters, restarts=restarts, iterations=iterations
    )
    present = client_id >= 0
    G, there = _gram(updates, present), present.astype(float)
    own = jnp.diagonal(G)

    def distances(share):  # [K, M], of each cluster's members, 0 of an empty one
        inner = jnp.matmul(share, G, precision="highest")
        square = own[None] - 2 * inner + (inner * share).sum(1, keepdims=True)
        return jnp.where(share.any(1, keepdims=True), square, jnp.inf)

    def assigned(share):
        square = distances(share)
        return square.argmin(0), (square.min(0) * there).sum()

    def step(_, share):
        member = jnp.arange(num_clusters)[:, None] == assigned(share)[0][None]
        member = member * there[None]
        return member / jnp.maximum(member.sum(1, keepdims=True), 1)

    def start(key):
        def add(k, carry):
            share, nearest = carry
            logits = jnp.where(present & (nearest > 0), jnp.log(nearest), -jnp.inf)
            fallback = jnp.where(present, 0.0, -jnp.inf)  # all are at a centre
            logits = jnp.where(jnp.isfinite(logits).any(), logits, fallback)
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), k))
            i = (logits + jax.vmap(jax.random.gumbel)(keys(client_id))).argmax()
            share = share.at[k].set(jax.nn.one_hot(i, len(own), dtype=share.dtype))
            away = own - 2 * G[i] + own[i]
            return share, jnp.minimum(nearest, jnp.maximum(away, 0))

        none = jnp.zeros((num_clusters, len(own)), G.dtype)
        share, _ = lax.fori_loop(0, num_clusters, add, (none, jnp.ones_like(own)))
        return assigned(lax.fori_loop(0, iterations, step, share))

    found, cost = lax.map(start, jax.random.split(key, restarts))
    found = found[cost.argmin()]
    ids = jnp.where(present, client_id, jnp.iinfo(client_id.dtype).max)
    number = jax.ops.segment_min(ids, found, num_clusters).argsort().argsort()
    return jnp.where(present, number[found], -1).astype(jnp.int32)


def _gram(updates: PyTree, present: jax.Array) -> jax.Array:
    """Inner products of the updates less their mean, to some scale, ``[M, M]``."""
    unit = divisor(jnp.where(present, row_norms(updates), 0).max())
    total = jnp.float32(0)
    for x in map(wide, map(flat_rows, jax.tree.leaves(updates))):
        here, x = along_rows(present, x), x / unit.astype(x.dtype)
        mean = jnp.where(here, x, 0).sum(0) / jnp.maximum(present.sum(), 1)
        x = jnp.where(here, x - mean[None], 0)
        total = total + jnp.matmul(x, x.T, precision="highest")
    return total
