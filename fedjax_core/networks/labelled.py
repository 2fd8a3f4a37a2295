"""Networks whose nodes belong to clusters: their data, and who hears what from whom.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, (6.2), (6.3) and (6.15).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core.networks.graph import Graph, check_labels, neighbour_sum
from fedjax_core.networks.oracles import node_rows
from fedjax_core.types import Key, Metrics

Rows = tuple[jax.Array, jax.Array, jax.Array]
"""X ``[n, m, d]``, y ``[n, m]`` and a mask ``[n, m]`` of the rows that exist."""


class Nodes(NamedTuple):
    """What nodes hold and should learn.

    Attributes:
      cluster: ``[n]`` ints from 0 on.
      train: every node's rows.
      valid: those that decide between models.
      test: those that judge them.
      truth: ``[n, d]``, each node's true model.
    """

    cluster: jax.Array
    train: Rows
    valid: Rows
    test: Rows
    truth: jax.Array


Draw = Callable[[Key], Nodes]
"""The clusters and data of a seed."""


def checked(num_clusters: int, nodes: Nodes) -> Nodes:
    """The same nodes.

    Raises:
      ValueError: other shapes, a node without rows in a split, rows that are not
        finite, or a known label that is not one of 0 to num_clusters - 1.
    """
    check_labels("node", num_clusters, cluster=nodes.cluster)
    n = len(nodes.cluster)
    return nodes._replace(
        train=node_rows(*nodes.train, n),
        valid=node_rows(*nodes.valid, n),
        test=node_rows(*nodes.test, n),
    )


def shares(strength: float, count: int, label: jax.Array) -> jax.Array:
    """A strength divided by how many have the same label: ``[n]``, of ``[n]`` labels.

    NaN for labels that are not in 0..count - 1, so that a run with such a one ends.
    """
    share = strength / jnp.bincount(label, length=count)[label]
    return jnp.where((label >= 0) & (label < count), share, jnp.nan)


def inside(graph: Graph, cluster: ArrayLike) -> Graph:
    """The network without the edges between clusters, which get weight 0.

    A cluster, ``[n]`` ints that may be traced, often falls apart by this:
    `spectrum.components` counts.
    """
    cluster = jnp.asarray(cluster)
    same = cluster[graph.head] == cluster[graph.tail]
    return graph.with_weight(jnp.where(same, graph.weight, 0))


def others(
    graph: Graph, cluster: ArrayLike, num_clusters: int, W: jax.Array
) -> tuple[jax.Array, jax.Array]:
    r"""What a node hears from clusters other than its own, all of them alike.

    .. math::

      \bar m_k = \frac{1}{|R_k|} \sum_{r \in R_k}
      \frac{1}{|N_k \cap C_r|} \sum_{l \in N_k \cap C_r} w_l

    where :math:`R_k` has the other clusters with a neighbour of k: the text divides by
    all of them, and its means of no models are not defined.

    Args:
      graph: the network; weights weigh the inner mean.
      cluster: ``[n]`` ints from 0 on; may be traced.
      num_clusters: there are.
      W: ``[n, d]``.

    Returns:
      The means ``[n, d]``, and ``[n]`` bool, whether there is such a neighbour; 0 where
      there is none.
    """
    member = jax.nn.one_hot(cluster, num_clusters, dtype=W.dtype)
    total = neighbour_sum(graph, member[:, :, None] * W[:, None, :])
    count = jnp.where(member > 0, 0, neighbour_sum(graph, member))
    mean = total / jnp.where(count > 0, count, 1)[:, :, None]
    heard = (count > 0).sum(1)
    mean = jnp.where((count > 0)[:, :, None], mean, 0).sum(1)
    return mean / jnp.maximum(heard, 1)[:, None].astype(W.dtype), heard > 0


def squared_error(rows: Rows, W: jax.Array) -> jax.Array:
    """The mean squared error of each node's model W ``[n, d]`` on its rows, ``[n]``."""
    X, y, mask = rows
    square = (jnp.einsum("nmd,nd->nm", X, W) - y) ** 2
    return jnp.where(mask, square, 0).sum(1) / mask.sum(1)


def errors(nodes: Nodes, W: jax.Array) -> Metrics:
    r"""How far models W ``[n, d]`` are from those that nodes should learn.

    Returns:
      "deviation", the mean of :math:`\lVert w_k - w_k^* \rVert^2 / \lVert w_k^*
      \rVert^2`, which the text calls test MSE; "printed_deviation", the same over
      :math:`\lVert w_k^* \rVert`, as it is printed; "test_mse", that on test data; and
      "deviation_of_node" ``[n]``.
    """
    apart, square = ((W - nodes.truth) ** 2).sum(1), (nodes.truth**2).sum(1)
    return {
        "deviation": (apart / square).mean(),
        "printed_deviation": (apart / jnp.sqrt(square)).mean(),
        "test_mse": squared_error(nodes.test, W).mean(),
        "deviation_of_node": apart / square,
    }
