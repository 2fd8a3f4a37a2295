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

from fedjax_core.arrays import as_mask, by_row
from fedjax_core.networks.graph import Graph, degree, laplacian
from fedjax_core.networks.iterate import block_norms
from fedjax_core.networks.oracles import Losses, Quadratic
from fedjax_core.networks.spectrum import components
from fedjax_core.types import PyTree


def without_labels(losses: Losses, labelled: ArrayLike) -> Losses:
    """The losses of labelled nodes, and zero for all others.

    Args:
      losses: of all nodes; those of unlabelled ones may be anything, NaN included.
      labelled: ``[n]`` bool.

    Raises:
      ValueError: a list of indices, or, when called, another number of nodes.
    """
    keep = as_mask("labelled", labelled, np.shape(labelled)[:1])

    def rows(x, new, old):
        as_mask("labelled", keep, x.shape[:1])
        return jnp.where(keep.reshape(-1, *(1,) * (x.ndim - 1)), new, old)

    def value(W):
        values = losses.value(W)
        return jnp.where(as_mask("labelled", keep, values.shape), values, 0)

    def grad(W):
        return jax.tree.map(lambda g: rows(g, g, jnp.zeros_like(g)), losses.grad(W))

    def prox(V, rho):
        return jax.tree.map(lambda p, v: rows(p, p, v), losses.prox(V, rho), V)

    return Losses(value, grad, prox)


def statistics_without_labels(stats: Quadratic, labelled: ArrayLike) -> Quadratic:
    """`without_labels` for quadratic losses, for the closed form of GTVMin."""
    keep = as_mask("labelled", labelled, stats.Q.shape[:1])
    return Quadratic(
        jnp.where(keep[:, None, None], stats.Q, 0),
        jnp.where(keep[:, None], stats.q, 0),
        jnp.where(keep, stats.c, 0),
    )


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
