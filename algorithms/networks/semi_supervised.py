r"""Semi-supervised learning: nodes without labels have the zero loss.

Their features serve only to build the graph. At the solution of GTVMin with squared
differences their parameters are the weighted mean of their neighbours',
:math:`w_i = \sum_j A_{ij} w_j / \deg_i`.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 6.3.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core.arrays import as_mask, by_row, keep_rows
from fedjax_core.networks.graph import Graph, degree, laplacian
from fedjax_core.networks.iterate import block_norms
from fedjax_core.networks.oracles import Losses, Quadratic
from fedjax_core.networks.spectrum import components
from fedjax_core.types import PyTree


def without_labels(losses: Losses, labelled: ArrayLike) -> Losses:
    """The losses of labelled nodes, and zero for all others.

    `labelled` is ``[n]`` bool; the losses of others may be anything, NaN included.

    Raises:
      ValueError: a list of indices, or, when called, another number of nodes.
    """
    keep = as_mask("labelled", labelled, np.shape(labelled)[:1])

    def rows(new, old):
        as_mask("labelled", keep, jax.tree.leaves(new)[0].shape[:1])
        return keep_rows(keep, new, old)

    def or_zero(x):
        return rows(x, jax.tree.map(jnp.zeros_like, x))

    return Losses(
        lambda W: or_zero(losses.value(W)),
        lambda W: or_zero(losses.grad(W)),
        lambda V, rho: rows(losses.prox(V, rho), V),
    )


def statistics_without_labels(stats: Quadratic, labelled: ArrayLike) -> Quadratic:
    """`without_labels` for quadratic losses, for the closed form of GTVMin."""
    keep = as_mask("labelled", labelled, stats.Q.shape[:1])
    return keep_rows(keep, stats, jax.tree.map(jnp.zeros_like, stats))


def harmonic_residual(graph: Graph, W: PyTree, labelled: ArrayLike) -> jax.Array:
    r"""How far unlabelled nodes are from their neighbours' mean; ``[n]``.

    :math:`\lVert w_i - \sum_j A_{ij} w_j / \deg_i \rVert`, and 0 at labelled and at
    isolated nodes.
    """
    by_node = degree(graph)
    scale = 1 / jnp.where(by_node > 0, by_node, 1)
    gap = jax.tree.map(lambda x: by_row(scale, x) * x, laplacian(graph, W))
    keep = as_mask("labelled", labelled, by_node.shape)
    return jnp.where(keep, 0, block_norms(gap))


def check_labels(graph: Graph, labelled: ArrayLike) -> None:
    """Refuses networks on which GTVMin has no unique solution for want of labels.

    Raises:
      ValueError: a connected component without a labelled node, or a mask of another
        shape or dtype.
    """
    known = np.asarray(as_mask("labelled", labelled, (graph.num_nodes,)))
    component = components(graph)
    labels = np.bincount(component, known)
    if (labels == 0).any():
        node = int(np.argmax(labels[component] == 0))
        raise ValueError(
            "labelled must have a node in every connected component, got none in that "
            f"of node {node}."
        )
