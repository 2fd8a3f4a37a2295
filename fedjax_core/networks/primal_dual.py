r"""GTVMin with a norm as penalty: exact agreement on parts of the network.

.. math::

  \min_W \sum_i f_i(w_i) + \alpha \sum_e A_e \|w_i - w_j\|_p

Unlike the squared norm, a norm makes neighbours agree exactly from a finite alpha on,
and solutions are piecewise constant. With losses :math:`\|w - a_i\|^2` this is convex
clustering. Its dual is a minimum-cost flow: edge variables with
:math:`\|u_e\|_q \le \alpha A_e` in the dual norm.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 3.2 and 3.5, (67) and
  (71). The book names no solver; this one is Chambolle and Pock, "A First-Order
  Primal-Dual Algorithm for Convex Problems with Applications to Imaging", JMIV 2011,
  Alg. 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order

from fedjax_core import arrays, check
from fedjax_core.networks import gtvmin, oracles
from fedjax_core.networks.duality import (
    Conjugate,
    node_duals,
    squared_distance_conjugate,
)
from fedjax_core.networks.graph import Graph, edge_diff, edge_scatter, num_neighbours
from fedjax_core.networks.iterate import iterate_until
from fedjax_core.networks.norm_ball import project
from fedjax_core.networks.oracles import Losses
from fedjax_core.networks.variation import dual_exponent, lp


class Result(NamedTuple):
    """What `solve` found.

    Attributes:
      W: ``[n, ...]``.
      U: ``[E, ...]``, edge variables, feasible for the dual.
      primal: ``[]``, the objective at W.
      dual: ``[]``, a lower bound on the minimum; -inf without a conjugate.
      gap: ``[]``, primal - dual: the objective is at most this far from the minimum.
      residual: ``[]``, how far the optimality conditions are from holding.
      rounds: ``[]`` int32, iterations taken.
      converged: ``[]`` bool, whether the tolerance was met within them.
    """

    W: jax.Array
    U: jax.Array
    primal: jax.Array
    dual: jax.Array
    gap: jax.Array
    residual: jax.Array
    rounds: jax.Array
    converged: jax.Array


class _State(NamedTuple):
    W: jax.Array
    ahead: jax.Array
    U: jax.Array
    primal: jax.Array
    dual: jax.Array
    residual: jax.Array


def solve(
    losses: Losses,
    graph: Graph,
    W: jax.Array,
    alpha: ArrayLike,
    p: float = 2.0,
    *,
    conjugate: Conjugate | None = None,
    tol: float = 1e-6,
    max_rounds: int = 20_000,
    tau: ArrayLike | None = None,
    check_every: int = 10,
) -> Result:
    r"""Primal-dual iterations until the duality gap is small.

    .. math::

      U &\leftarrow \mathrm{Proj}_{\|u_e\|_q \le \alpha A_e}(U + s D \bar W) \\
      W^+ &\leftarrow \mathrm{prox}_{f_i, 1/\tau}(W - \tau D^\top U), \qquad
      \bar W = 2 W^+ - W

    with s tau 2 K < 1 for K the largest number of neighbours.

    Args:
      losses: their prox is used; they must be convex.
      graph: the network.
      W: where to start, ``[n, ...]``.
      alpha: >= 0; may be traced, to sweep over it.
      p: of the norm, >= 1.
      conjugate: of the losses, from `duality`. Without one there is no dual
        value, and the residual takes the gap's place in the stopping rule.
      tol: stop at a gap of tol max(1, abs(primal)).
      max_rounds: the most iterations, rounded up to a multiple of `check_every`.
      tau: step size of W, > 0; by default s = tau. The larger the losses' curvature,
        the smaller it should be.
      check_every: iterations between two looks at the gap.

    Numbers out of these ranges raise ValueError.
    """
    check.non_negative(alpha=alpha)
    check.positive(tol=tol)
    check.positive_int(max_rounds=max_rounds, check_every=check_every)
    q = dual_exponent(p)
    W = arrays.as_float(W)
    # Edges of weight 0 never carry anything, so they don't count here.
    most = jnp.maximum(num_neighbours(graph).max(), 1).astype(W.dtype)
    if tau is None:
        tau = 0.99 / jnp.sqrt(2 * most)
    else:
        check.positive(tau=tau)
    tau = jnp.asarray(tau, W.dtype)
    s = 0.98 / (2 * most * tau)
    radius = (alpha * graph.weight).astype(W.dtype)
    prox = losses.prox_at(1 / tau)

    def one(carry):
        W, ahead, U = carry
        U = project(U + s * edge_diff(graph, ahead), radius, q)
        new = prox(W - tau * edge_scatter(graph, U))
        return new, 2 * new - W, U

    def several(state, t, key):
        del t, key
        carry = (state.W, state.ahead, state.U)
        old = jax.lax.fori_loop(0, check_every - 1, lambda _, x: one(x), carry)
        W, ahead, U = one(old)
        # What the optimality conditions of the two steps leave over.
        by_node = (old[0] - W) / tau
        by_edge = (old[2] - U) / s + edge_diff(graph, old[1] - W)
        residual = jnp.sqrt((by_node**2).sum() + (by_edge**2).sum())
        return _State(W, ahead, U, *values(W, U), residual)

    def values(W, U):
        primal = gtvmin.objective(losses, graph, W, alpha, lp(p))
        if conjugate is None:
            return primal, -jnp.inf * jnp.ones_like(primal)
        return primal, -conjugate(node_duals(graph, U)).sum()

    def stop(old, new):
        del old
        gap = new.residual if conjugate is None else new.primal - new.dual
        return gap <= tol * jnp.maximum(1, jnp.abs(new.primal))

    U = jnp.zeros((graph.num_edges, *W.shape[1:]), W.dtype)
    primal, dual = values(W, U)
    start = _State(W, W, U, primal, dual, jnp.full_like(primal, jnp.inf))
    blocks = -(-max_rounds // check_every)
    state, looks, converged = iterate_until(several, start, stop, blocks)
    W, _, U, primal, dual, residual = state
    rounds = looks * check_every
    return Result(W, U, primal, dual, primal - dual, residual, rounds, converged)


def convex_clustering(
    graph: Graph, a: ArrayLike, alpha: ArrayLike, p: float = 2.0, **options
) -> Result:
    """Convex clustering of the points a ``[n, ...]``: losses ||w - a_i||^2.

    Points joined by edges whose rows of W are equal, up to what `tol` leaves, form a
    cluster, see `clustered.n_clusters`. Two points on a line with weight A
    merge exactly at alpha = |a_2 - a_1| / A. Jung, (67).

    Args:
      graph: which pairs attract each other, and how much.
      a: the points.
      alpha: >= 0.
      p: of the norm, >= 1.
      **options: of `solve`.
    """
    a = arrays.as_float(a)
    options.setdefault("conjugate", squared_distance_conjugate(a))
    return solve(oracles.squared_distance(a), graph, a, alpha, p, **options)


def critical_alpha(graph: Graph, gradients: ArrayLike, p: float = 2.0) -> float:
    """The least alpha with exact consensus, on a tree; outside jit.

    max_e ||sum of the gradients on one side of e||_q / A_e, with the dual q of p >= 1
    and the gradients ``[n, ...]`` of the local losses at argmin_w sum_i f_i(w), whose
    sum is 0. For a tree this is sufficient and necessary, as the flow that certifies
    consensus is the only one. Edges of weight 0 don't count.

    Raises:
      ValueError: the graph is not a tree, a wrong number of rows, gradients that are
        not finite or don't add up to 0, or p < 1.
    """
    q = dual_exponent(p)
    flow = np.array(arrays.as_float(gradients))
    n = graph.num_nodes
    if flow.shape[:1] != (n,):
        raise ValueError(f"gradients must have {n} rows, got shape {flow.shape}.")
    flow = flow.reshape(n, -1)
    total, size = np.abs(flow.sum(0)).max(), np.abs(flow).sum()
    if not total <= np.sqrt(np.finfo(flow.dtype).eps) * size:
        raise ValueError(
            f"gradients must add up to 0, got a sum of {total:.3g}: take them at the "
            "minimiser of all losses together."
        )
    weight = np.asarray(graph.weight)
    used = weight > 0
    ends = (np.asarray(graph.head)[used], np.asarray(graph.tail)[used])
    tree = coo_matrix((weight[used], ends), (n, n)).tocsr()
    order, parent = breadth_first_order(tree, 0, directed=False)
    if used.sum() != n - 1 or len(order) != n:
        raise ValueError(
            f"graph must be a tree, got {used.sum()} edges and {len(order)} of {n} "
            "nodes in the component of node 0."
        )
    if n == 1:
        return 0.0
    for i in order[:0:-1]:
        flow[parent[i]] += flow[i]
    children = order[1:]
    both = tree + tree.T
    A = np.asarray(both[children, parent[children]]).ravel()
    norms = np.linalg.norm(flow[children], ord=q, axis=1)
    return float((norms / A).max())
