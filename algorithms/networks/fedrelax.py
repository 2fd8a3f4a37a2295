r"""FedRelax: every node minimises GTVMin over its own parameters, all in parallel.

.. math::

  w_i \leftarrow \arg\min_v f_i(v) + \alpha \sum_j A_{ij} \lVert v - w_j \rVert^2
    = \mathrm{prox}_{f_i, 2 \alpha \deg_i}
      \Bigl( \frac{1}{\deg_i} \sum_j A_{ij} w_j \Bigr)

It is the nonlinear Jacobi method; its fixed points are the solutions of GTVMin. (The
book says that with linearised losses it is FedGD: it is, at the smaller rates
:math:`\eta / (1 + 2 \alpha \eta \deg_i)`.)

References:
  Jung, "Federated Learning: From Theory to Practice", Alg. 11.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, by_row, is_known
from fedjax_core.linalg import least_norm_solve, pulled_inverse
from fedjax_core.networks.coupling import coupled_inverse
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.operators import Operator
from fedjax_core.networks.oracles import Losses, check_quadratic, quadratic_shapes


def make(graph: Graph, losses: Losses, *, alpha: ArrayLike) -> Operator:
    """Builds FedRelax for any losses with a proximal operator.

    Args:
      graph: the network, without isolated nodes.
      losses: the local losses.
      alpha: strength of GTVMin, > 0.

    Raises:
      ValueError: alpha is out of range, or a node has no neighbour: it has no mean to
        stay close to, see `make_quadratic`.
    """
    check.positive(alpha=alpha)
    by_node = degree(graph)
    if is_known(by_node) and not np.asarray(by_node > 0).all():
        raise ValueError(
            f"graph must not have isolated nodes, has node {int(by_node.argmin())}."
        )

    def update(W, S, t, key):
        del W, t, key
        centre = jax.tree.map(lambda s: s / by_row(by_node, s), S)
        return losses.prox(centre, 2 * alpha * by_node)

    return Operator(graph, update)


def make_quadratic(
    graph: Graph, Q: ArrayLike, q: ArrayLike, *, alpha: ArrayLike
) -> Operator:
    r"""Builds FedRelax for the losses w'Q_i w + q_i'w, on W ``[n, d]``.

    The update is :math:`(Q_i + \alpha \deg_i I)^{-1} (-q_i/2 + \alpha \sum_j A_{ij}
    w_j)`, factored once. A node without neighbours, or every node when alpha is 0, goes
    to its local minimiser, the one of least norm where Q_i is singular. (Dividing by
    its degree, as the book does, leaves it undefined.)

    Args:
      graph: the network.
      Q: ``[n, d, d]``, symmetric and positive semi-definite.
      q: ``[n, d]``.
      alpha: >= 0.

    Raises:
      ValueError: alpha is out of range, shapes do not fit, a Q_i that is not of that
        kind, or alpha deg_i below the rounding of a singular Q_i (traced arguments are
        not looked at and give NaN there).
    """
    check.non_negative(alpha=alpha)
    Q, q = quadratic_shapes(Q, q, graph.num_nodes)
    check_quadratic(Q)
    pull = jnp.asarray(alpha, q.dtype) * degree(graph).astype(q.dtype)
    free = pull == 0
    # One product per round is several times faster than two triangular solves.
    inverse = pulled_inverse(
        jnp.where(free[:, None, None], 0, Q), jnp.where(free, 1, pull)
    )
    alone = None
    if not is_known(free) or free.any():
        alone = least_norm_solve(Q, -q / 2)

    def update(W, S, t, key):
        del W, t, key
        right = -q / 2 + by_row(alpha, S) * S
        new = jnp.einsum("nde,ne->nd", inverse, right)
        return new if alone is None else jnp.where(free[:, None], alone, new)

    return Operator(graph, update)


def check_converges(graph: Graph, Q: ArrayLike, alpha: float) -> None:
    """Refuses quadratic losses on which FedRelax does not converge from every start.

    It does if and only if Q and 2D - Q are positive definite, where Q is the matrix of
    the whole GTVMin and D its diagonal blocks Q_i + alpha deg_i I. Two nodes without
    losses swap their vectors for ever. Dense: for n d up to a few thousand.
    """
    check.non_negative(alpha=alpha)
    check_quadratic(Q)
    for name, sign in (("Q", -1), ("2D - Q", 1)):
        if coupled_inverse(as_float(Q), graph, alpha, sign).singular:
            raise ValueError(
                f"{name} must be positive definite for FedRelax to converge, is "
                "singular."
            )
