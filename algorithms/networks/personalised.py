r"""Personalised learning: some parameters are shared, others stay local.

The penalty of an edge is a sum over blocks of parameters with a strength each,

.. math::

  \min_W \sum_i f_i(w_i) + \sum_b \alpha_b \sum_{\{i,j\}} A_{ij}
  \lVert w_i^{(b)} - w_j^{(b)} \rVert^2 .

With strength 0 a block is learned from local data alone; a large strength makes it
common. For a network with one hidden layer these are the output and the hidden layer.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 6.5, (149).
"""

import jax

from fedjax_core.networks.descent import Rate, gradient_step
from fedjax_core.networks.graph import Graph, laplacian
from fedjax_core.networks.iterate import Step
from fedjax_core.networks.oracles import Losses
from fedjax_core.networks.variation import check_strengths, gtv, scaled, squared
from fedjax_core.types import PyTree


def personalised_gd(graph: Graph, losses: Losses, alpha: PyTree, eta: Rate) -> Step:
    """A step of gradient descent on the problem above, for `iterate.iterate`.

    Args:
      graph: the network.
      losses: of the nodes.
      alpha: a tree like a prefix of W. A leaf is a strength >= 0 for all below it, or
        an array that broadcasts to one node's parameters, a strength for each.
      eta: the rate, as for `descent.gradient_step`.

    Raises:
      ValueError: a strength that is negative or not finite, or a rate <= 0.
    """
    check_strengths("alpha", alpha)

    def grad(W):
        pull = scaled(alpha, laplacian(graph, W))
        return jax.tree.map(lambda g, p: g + 2 * p, losses.grad(W), pull)

    return gradient_step(grad, eta)


def objective(graph: Graph, losses: Losses, alpha: PyTree, W: PyTree) -> jax.Array:
    """The value of the problem above, ``[]``; arguments as `personalised_gd`."""
    return losses.value(W).sum() + gtv(graph, W, squared(alpha))
