r"""Clustered learning: nodes of one cluster learn one model.

Two ways. Cluster a vector per node, such as its fitted parameters or its gradient at a
common point, and pool the losses of each cluster; or let GTVMin do it, whose solution
is nearly constant on well connected node sets C:

.. math::

  \sum_{i \in C} \lVert \hat w_i - \mathrm{mean}_C \rVert^2 \le
  \frac{1}{\alpha \lambda_2(L_C)} \Bigl[ \sum_{i \in C} \tfrac{1}{m_i}
  \lVert \varepsilon_i \rVert^2 + 2 \alpha\, \partial C
  \bigl(\lVert \bar w_C \rVert^2 + R^2\bigr) \Bigr]

Arguments of other shapes and out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 6.2, Prop. 6.1 (148).
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_mask
from fedjax_core.linalg import least_norm_solve
from fedjax_core.networks.graph import Graph, check_shapes, edge_diff
from fedjax_core.networks.iterate import block_norms
from fedjax_core.networks.oracles import Quadratic
from fedjax_core.networks.projections import check_clusters
from fedjax_core.networks.spectrum import components
from fedjax_core.types import PyTree


def cluster_nodes(
    Z: ArrayLike,
    num_clusters: int,
    *,
    method: Literal["k-means", "gmm"] = "k-means",
    restarts: int = 10,
    seed: int = 0,
) -> np.ndarray:
    """The cluster of every node, ``[n]`` int32, by vectors that represent their data.

    Args:
      Z: ``[n, p]``: fitted parameters, ``pool(stats, arange(n), n)``, or gradients at a
        common v, ``losses.grad(W)`` with all rows of W equal to v.
      num_clusters: k, in 1..n.
      method: k-means, or a Gaussian mixture, whose most probable component counts.
      restarts: runs from other starts; the best one counts.
      seed: of the starts.

    Returns:
      ``[n]`` int32, the cluster of every node.

    Raises:
      ValueError: k is not in 1..n, or Z is not finite or no matrix.
    """
    z = np.asarray(Z)
    if z.ndim != 2 or not np.isfinite(z).all():
        raise ValueError(f"Z must be a finite matrix (n, p), got shape {z.shape}.")
    check.positive_int(num_clusters=num_clusters, restarts=restarts)
    check.in_range(1, len(z), num_clusters=num_clusters)
    check.one_of(("k-means", "gmm"), method=method)
    # Slow to import, needed only here.
    if method == "k-means":
        from sklearn.cluster import KMeans

        model = KMeans(num_clusters, n_init=restarts, random_state=seed)  # pyright: ignore[reportArgumentType]
    else:
        from sklearn.mixture import GaussianMixture

        model = GaussianMixture(num_clusters, n_init=restarts, random_state=seed)
    return np.asarray(model.fit_predict(z), np.int32)


def pool(
    stats: Quadratic,
    cluster: ArrayLike,
    num_clusters: int,
    weight: ArrayLike | None = None,
) -> jax.Array:
    r"""The least-squares model of every cluster, ``[C, d]``, from its nodes' losses.

    :math:`w_C = (\sum_C Q_i)^{-1} (-\tfrac12 \sum_C q_i)`, or the solution of least
    norm where that matrix is singular; 0 for an empty cluster. For one cluster it is
    `gtvmin.locally_weighted`.

    Args:
      stats: losses of the nodes; those of average errors let every node count the same.
      cluster: ``[n]`` ints in 0..num_clusters-1.
      num_clusters: C.
      weight: ``[n]``, what every node's loss counts; the sizes m_i with average errors
        pool the data points.

    Returns:
      ``[C, d]``.

    Raises:
      ValueError: a cluster out of range, or an array of another length.
    """
    n = stats.q.shape[0]
    check_clusters(cluster, n, num_clusters)
    by_node = jnp.ones(n) if weight is None else jnp.asarray(weight)
    check_shapes(f"({n},)", weight=by_node)
    by_node = by_node.astype(stats.q.dtype)
    cluster = jnp.asarray(cluster)
    Q = jax.ops.segment_sum(by_node[:, None, None] * stats.Q, cluster, num_clusters)
    q = jax.ops.segment_sum(by_node[:, None] * stats.q, cluster, num_clusters)
    return least_norm_solve(Q, -q / 2)


def boundary_weight(graph: Graph, members: ArrayLike) -> jax.Array:
    """The weight of all edges between a node set and the rest, the boundary of C.

    C are the `members`, ``[n]`` bool. The boundary of one node is its degree.
    """
    inside = as_mask("members", members, (graph.num_nodes,))
    return jnp.sum(jnp.where(inside[graph.head] != inside[graph.tail], graph.weight, 0))


def induced(graph: Graph, members: ArrayLike) -> Graph:
    """The graph of some nodes and the edges among them, nodes renumbered in order.

    Raises ValueError where no node is left.
    """
    inside = np.asarray(as_mask("members", members, (graph.num_nodes,)))
    number = np.cumsum(inside) - 1
    head, tail = np.asarray(graph.head), np.asarray(graph.tail)
    kept = inside[head] & inside[tail]
    edges = np.stack([number[head[kept]], number[tail[kept]]], axis=1)
    weight = np.asarray(graph.weight)[kept]
    return Graph.from_edges(edges, weight, int(inside.sum()), weight.dtype)


def cluster_deviation_bound(
    graph: Graph,
    members: ArrayLike,
    alpha: float,
    lam2: ArrayLike,
    mean_square: ArrayLike,
    model: ArrayLike,
    W: ArrayLike,
) -> jax.Array:
    r"""Prop. 6.1: how far the learned parameters of a cluster lie from their mean.

    For data :math:`y_i = X_i \bar w_C + \varepsilon_i` at its nodes and squared
    errors. With all nodes as one cluster it is Prop. 3.1. What the boundary adds does
    not fall with alpha.

    Args:
      graph: the network.
      members: ``[n]`` bool, the cluster, whose induced graph is connected.
      alpha: > 0, the strength of GTVMin.
      lam2: second smallest Laplacian eigenvalue of ``induced(graph, members)``, > 0.
      mean_square: ``[n]``, of the noise at every node, ||e_i||^2 / m_i.
      model: ``[d]``, the true parameters of the cluster.
      W: ``[n, d]``, the solution, of which the rows outside the cluster count.

    Raises:
      ValueError: alpha or lam2 is not > 0, or members is not bool or has another
        shape.
    """
    check.positive(alpha=alpha, lam2=lam2)
    inside = as_mask("members", members, (graph.num_nodes,))
    inner = jnp.sum(jnp.where(inside, jnp.asarray(mean_square), 0))
    outer = jnp.max(jnp.where(inside, 0, jnp.sum(jnp.square(jnp.asarray(W)), axis=1)))
    size = jnp.sum(jnp.square(jnp.asarray(model)))
    border = 2 * alpha * boundary_weight(graph, members) * (size + outer)
    return (inner + border) / (alpha * lam2)


def n_clusters(graph: Graph, W: PyTree, tol: float) -> int:
    r"""How many node sets share their parameters, along the edges of the network.

    Counts the components that edges of positive weight with
    :math:`\lVert w_i - w_j \rVert \le tol` leave, for known W ``[n, ...]`` and tol >=
    0. Along growing alpha it falls from n to the number of components of the graph.
    """
    check.non_negative(tol=tol)
    near = block_norms(edge_diff(graph, W)) <= tol
    merged = graph.with_weight(jnp.where(near, graph.weight, 0))
    return int(components(merged).max()) + 1
