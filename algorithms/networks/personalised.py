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
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_core.arrays import flat_rows
from fedjax_core.networks.descent import Rate, gradient_step
from fedjax_core.networks.graph import Graph, edge_diff, laplacian, unless_cut
from fedjax_core.networks.iterate import Step
from fedjax_core.networks.oracles import Losses
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
    _check_strengths(alpha)

    def grad(W):
        pull = _scale(alpha, laplacian(graph, W))
        return jax.tree.map(lambda g, p: g + 2 * p, losses.grad(W), pull)

    return gradient_step(grad, eta)


def objective(graph: Graph, losses: Losses, alpha: PyTree, W: PyTree) -> jax.Array:
    """The value of the problem above, ``[]``; arguments as `personalised_gd`."""

    def variation(u):
        rows = flat_rows(unless_cut(graph.weight, u))
        by_edge = jnp.sum(jnp.square(rows), axis=1)
        return jnp.sum(graph.weight.astype(u.dtype) * by_edge)

    root = jax.tree.map(lambda a: jnp.sqrt(jnp.asarray(a, float)), alpha)
    parts = jax.tree.map(variation, _scale(root, edge_diff(graph, W)))
    return sum(jax.tree.leaves(parts), jnp.sum(losses.value(W)))


def _check_strengths(alpha: PyTree) -> None:
    """Raises ValueError unless all strengths are finite and >= 0."""
    for path, leaf in jax.tree.leaves_with_path(alpha):
        if isinstance(leaf, Tracer):
            continue
        known = np.asarray(leaf)
        wrong = ~(np.isfinite(known) & (known >= 0))
        if wrong.any():
            raise ValueError(
                f"alpha{jax.tree_util.keystr(path)} must be finite and >= 0, got "
                f"{known[wrong].flat[0]}."
            )


def _scale(alpha: PyTree, W: PyTree) -> PyTree:
    """Leaves of W times the strength that stands for them."""

    def below(a, part):
        def one(w):
            strength = jnp.asarray(a, w.dtype)
            return (
                strength.reshape((1,) * (w.ndim - strength.ndim) + strength.shape) * w
            )

        return jax.tree.map(one, part)

    return jax.tree.map(below, alpha, W)
