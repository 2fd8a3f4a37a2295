r"""The dual of GTVMin: one variable per edge, and a certificate for every solution.

Edges run from their head, the smaller node, to their tail. Edge variables U ``[E, d]``
are flows on the network, :math:`z = -D^\top U` is what they leave at the nodes, and

.. math::

  -\sum_i f_i^*(z_i) - \alpha \sum_e A_e \phi^*(u_e / (\alpha A_e))
  \le \min_W \sum_i f_i(w_i) + \alpha \sum_e A_e \phi(w_i - w_j)

with equality at the best U. So any U certifies how far a W can be from optimal. (The
book writes w for z, which is not the primal variable.)

References:
  Jung, "Federated Learning: From Theory to Practice", Section 3.5, (68)-(71).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import along_rows, as_float
from fedjax_core.networks import gtvmin, oracles
from fedjax_core.networks.graph import Graph, edge_diff, edge_scatter
from fedjax_core.networks.oracles import check_quadratic

Conjugate = Callable[[jax.Array], jax.Array]
"""``Z -> [n]``: f_i*(z_i) = sup_w z_i'w - f_i(w), for all nodes."""


def quadratic_conjugate(Q: ArrayLike, q: ArrayLike, c: ArrayLike = 0.0) -> Conjugate:
    """Conjugates of w'Q_i w + q_i'w + c_i: (z - q_i)' Q_i^-1 (z - q_i) / 4 - c_i.

    Raises ValueError for a Q_i that isn't positive definite; its conjugate is infinite
    almost everywhere and certifies nothing.
    """
    check_quadratic(Q, definite=True)
    Q, q = as_float(Q), as_float(q)
    factor = jnp.linalg.cholesky(Q)

    def conjugate(Z: jax.Array) -> jax.Array:
        half = jax.lax.linalg.triangular_solve(
            factor, (Z - q)[..., None], left_side=True, lower=True
        )
        return (half**2).sum((1, 2)) / 4 - c

    return conjugate


def squared_distance_conjugate(a: ArrayLike) -> Conjugate:
    """Conjugates of ||w - a_i||^2: z'a_i + ||z||^2 / 4."""
    a = as_float(a)
    return lambda Z: (Z * a + Z**2 / 4).sum(range(1, a.ndim))


def edge_duals(graph: Graph, W: jax.Array, alpha: ArrayLike) -> jax.Array:
    """Edge variables that belong to W under the squared penalty; like `edge_diff`.

    u_e = 2 alpha A_e (w_tail - w_head). At the solution they are the dual's optimum.
    """
    check.non_negative(alpha=alpha)
    D = edge_diff(graph, W)
    return 2 * alpha * along_rows(graph.weight.astype(D.dtype), D) * D


def node_duals(graph: Graph, U: jax.Array) -> jax.Array:
    """What flows out of every node less what flows in, z = -D'U; ``[n, ...]``.

    At the optimum these are the gradients of the local losses.
    """
    return -edge_scatter(graph, U)


def dual_value(
    graph: Graph, U: jax.Array, alpha: ArrayLike, conjugate: Conjugate
) -> jax.Array:
    """The dual objective for the squared penalty at any U ``[E, ...]``; a scalar.

    Its edge terms are ||u_e||^2 / (4 alpha A_e). It is -inf where something flows along
    an edge with alpha A_e = 0.

    Raises:
      ValueError: alpha < 0 or NaN.
    """
    check.non_negative(alpha=alpha)
    square = (U**2).sum(range(1, U.ndim))
    capacity = 4 * alpha * graph.weight.astype(U.dtype)
    open_edge = capacity > 0
    closed = jnp.where(square > 0, jnp.inf, 0)
    cost = jnp.where(open_edge, square / jnp.where(open_edge, capacity, 1), closed)
    return -conjugate(node_duals(graph, U)).sum() - cost.sum()


class Certificate(NamedTuple):
    """How good a solution is.

    Attributes:
      primal: ``[]``, the objective of GTVMin.
      dual: ``[]``, a lower bound on its minimum.
      gap: ``[]``, primal - dual, >= 0 up to rounding: at most this far from optimal.
    """

    primal: jax.Array
    dual: jax.Array
    gap: jax.Array


def certificate(
    graph: Graph,
    W: jax.Array,
    Q: ArrayLike,
    q: ArrayLike,
    c: ArrayLike,
    alpha: ArrayLike,
) -> Certificate:
    """Certifies W ``[n, d]`` for quadratic losses and the squared penalty.

    Take it in float64: in float32 the gap drowns in the rounding of its two terms.

    Raises:
      ValueError: alpha < 0, or a Q_i that isn't positive definite.
    """
    primal = gtvmin.objective(oracles.quadratic(Q, q, c), graph, W, alpha)
    U = edge_duals(graph, W, alpha)
    dual = dual_value(graph, U, alpha, quadratic_conjugate(Q, q, c))
    return Certificate(primal, dual, primal - dual)
