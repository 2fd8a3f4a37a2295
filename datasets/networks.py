r"""Local data for networks of devices, drawn from known linear models.

Node i of a graph holds rows of its own linear model:

- `network_linear`: linear regression on a given graph, one model or one per node.
- `clustered_linear`: the same with the graph, dense inside clusters that share a model.
- `unit_linear`: linear regression of one random model on rows of norm 1.
- `related_tasks`: clusters whose models are multiples of one, with three splits.

Arrays are padded to the largest node, with a mask, as
`oracles.least_squares_statistics` takes them. All that is random comes from the key.

Client key: the node's number.

Licence: none needed, the data is generated.

References:
  Jung, "Federated Learning: From Theory to Practice", arXiv:2505.19183, (59) and (164),
  and Section 6.2. Gauthier, "On Enabling Scalable, Personalized, and
  Private Federated Learning", NTNU 2024:92, Sections 3.6, 5.4 and 6.3.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, check_finite, norms
from fedjax_core.datasets.partition import _common as common
from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.theory.erm import linear_data
from fedjax_core.types import Key


class LinearNodes(NamedTuple):
    """Linear regression at all nodes, n of them with up to m rows.

    Features ``X [n, m, d]`` and labels ``y [n, m]`` of the rows that exist, ``mask [n,
    m]`` bool, and 0 elsewhere; ``w_true [n, d]``, the parameters they were drawn with.
    """

    X: jax.Array
    y: jax.Array
    mask: jax.Array
    w_true: jax.Array


class LinearClusters(NamedTuple):
    """A network, the cluster ``[n]`` int64 of every node, and their data."""

    graph: Graph
    cluster: np.ndarray
    data: LinearNodes


class RelatedTasks(NamedTuple):
    """Linear models that are alike: what `related_tasks` draws.

    ``cluster [n]`` int32 of every node; its rows in three splits of one size, whose
    ``w_true`` is the same.
    """

    cluster: jax.Array
    train: LinearNodes
    valid: LinearNodes
    test: LinearNodes


def network_linear(
    key: Key,
    graph: Graph,
    m: ArrayLike | Sequence[int],
    w_true: ArrayLike,
    noise_std: float | jax.Array = 0.0,
    noise: ArrayLike | None = None,
) -> LinearNodes:
    r"""Draws a linear model at every node of a network.

    .. math::

      x \sim \mathcal{N}(0, I_d), \qquad y = \bar w_i^\top x + e, \qquad
      e \sim \mathcal{N}(0, \mathrm{noise\_std}^2) .

    Args:
      key: of the draw.
      graph: the network.
      m: rows of a node, ints >= 1: one or ``[n]``.
      w_true: finite ``[d]`` for all nodes, or ``[n, d]``. The result has its dtype.
      noise_std: >= 0.
      noise: finite ``[n, m]`` for the largest m, added to the labels: with noise_std 0
        all of the noise.

    References:
      Jung, (59) and (164).
    """
    n = graph.num_nodes
    mask = _rows(m, n)
    W = as_float(w_true)
    if not (W.ndim and W.size) or W.shape[:-1] not in ((), (n,)):
        raise ValueError(f"w_true must have shape (d,) or ({n}, d), got {W.shape}.")
    check_finite(w_true=W)
    W = jnp.broadcast_to(W[None] if W.ndim == 1 else W, (n, W.shape[-1]))
    most = mask.shape[1]
    X, y = jax.vmap(lambda key, w: linear_data(key, most, w, noise_std))(
        jax.random.split(key, n), W
    )
    if noise is not None:
        noise = jnp.asarray(noise, W.dtype)
        if noise.shape != y.shape:
            raise ValueError(f"noise must have shape {y.shape}, got {noise.shape}.")
        noise = jnp.where(mask, noise, 0)
        check_finite(noise=noise)
        y = y + noise
    X, y = jnp.where(mask[..., None], X, 0), jnp.where(mask, y, 0)
    return LinearNodes(X, y, mask, W)


def clustered_linear(
    key: Key,
    sizes: Sequence[int],
    p_in: float,
    p_out: float,
    m: ArrayLike | Sequence[int],
    w_true: ArrayLike,
    noise_std: float | jax.Array = 0.0,
) -> LinearClusters:
    """Draws clusters, dense inside and loosely tied, whose nodes share a linear model.

    The graph is drawn on the host, so not under `jax.jit` or `jax.vmap`; for many draws
    on one graph call `network_linear` with ``w_true[cluster]``. Clusters of `sizes` >=
    1 follow one another, as those of `builders.stochastic_block`, whose `p_in` and
    `p_out` are; `w_true` ``[C, d]`` has the parameters of every cluster, the rest is as
    in `network_linear`.

    References:
      Jung, (146), for the structure; the probabilities are ours.
    """
    cluster = builders.block_labels(sizes)
    W = as_float(w_true)
    if W.ndim != 2 or len(W) != len(sizes):
        raise ValueError(f"w_true must have shape ({len(sizes)}, d), got {W.shape}.")
    graph_key, data_key = jax.random.split(key)
    seed = int(jax.random.bits(graph_key, dtype=jnp.uint32))
    graph = builders.stochastic_block(sizes, p_in, p_out, seed)
    data = network_linear(data_key, graph, m, W[cluster], noise_std)
    return LinearClusters(graph, cluster, data)


def unit_linear(
    key: Key,
    num_nodes: int,
    m: ArrayLike | Sequence[int],
    num_features: int,
    noise_std: float | jax.Array = 0.1,
) -> LinearNodes:
    r"""Draws one linear model, :math:`w \sim \mathcal{N}(0, I_d)`, and rows of norm 1.

    Directions are uniform. So the gradient of an absolute or logistic error is at most
    1 in norm, as private methods want it. `m` is how many rows a node has, ints >= 1:
    one or ``[num_nodes]``; labels have normal noise of deviation `noise_std` >= 0.

    References:
      Gauthier, Section 3.6, for the sizes; the law of rows and noise is ours.
    """
    check.positive_int(num_nodes=num_nodes, num_features=num_features)
    mask = _rows(m, num_nodes)
    rows, model, noise = jax.random.split(key, 3)
    X = jax.random.normal(rows, (*mask.shape, num_features))
    X = jnp.where(mask[..., None], X / norms(X)[..., None], 0)
    w = jax.random.normal(model, (num_features,))
    y = X @ w + noise_std * jax.random.normal(noise, mask.shape)
    W = jnp.broadcast_to(w[None], (num_nodes, num_features))
    return LinearNodes(X, jnp.where(mask, y, 0), mask, W)


def related_tasks(
    key: Key,
    num_nodes: int,
    num_clusters: int,
    num_features: int,
    sizes: tuple[int, int] = (5, 35),
    spread: float = 0.5,
    noise_variance: tuple[float, float] = (0.1, 1.0),
) -> RelatedTasks:
    r"""Draws clusters whose linear models are multiples of one, in nodes of all sizes.

    .. math::

      w_q = (1 + \delta_q) w_0, \qquad \delta_q \sim \mathcal{U}(-s, s), \qquad
      w_0 \sim \mathcal{N}(0, I_d), \qquad y = w_{q(k)}^\top x + e, \qquad
      e \sim \mathcal{N}(0, v_k) .

    Features are N(0, I). Clusters are random and as equal as they can be. May be called
    under `jax.jit` and `jax.vmap`.

    Args:
      key: of the draw.
      num_nodes: n >= num_clusters.
      num_clusters: Q >= 1.
      num_features: d.
      sizes: least and most rows of a node in each split, >= 1, drawn uniformly.
      spread: s >= 0.
      noise_variance: least and largest :math:`v_k \ge 0`, drawn uniformly.

    References:
      Gauthier, Sections 5.4 and 6.3; the laws of features, noise and :math:`w_0` are
      ours.
    """
    check.positive_int(num_nodes=num_nodes, num_clusters=num_clusters)
    check.positive_int(num_features=num_features)
    check.in_range(1, num_nodes, num_clusters=num_clusters)
    least, most = sizes
    check.in_range(1, most, least_size=least)
    check.non_negative(spread=spread, least_variance=noise_variance[0])
    check.in_range(*noise_variance, largest_variance=noise_variance[1])
    groups, base, apart, count, noise, *splits = jax.random.split(key, 8)
    cluster = jax.random.permutation(groups, jnp.arange(num_nodes) % num_clusters)
    factor = jax.random.uniform(apart, (num_clusters,), minval=-spread, maxval=spread)
    w = jax.random.normal(base, (num_features,))
    W = (1 + factor)[cluster][:, None] * w[None]
    rows = jax.random.randint(count, (num_nodes,), least, most + 1)
    mask = jnp.arange(most)[None] < rows[:, None]
    low, high = noise_variance
    variance = jax.random.uniform(noise, (num_nodes,), minval=low, maxval=high)

    def split(key):
        keys = jax.random.split(key, num_nodes)
        X, y = jax.vmap(linear_data, (0, None, 0, 0))(keys, most, W, variance**0.5)
        X, y = jnp.where(mask[..., None], X, 0), jnp.where(mask, y, 0)
        return LinearNodes(X, y, mask, W)

    return RelatedTasks(cluster.astype(jnp.int32), *map(split, splits))


def _rows(m: ArrayLike | Sequence[int], n: int) -> jax.Array:
    """Which of the rows of the largest node every node has, ``[n, max m]`` bool."""
    rows = common.ints_of("m", m, n, 1, "node")
    return jnp.asarray(np.arange(rows.max()) < rows[:, None])
