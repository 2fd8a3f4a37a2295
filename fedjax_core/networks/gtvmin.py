r"""GTVMin: local losses coupled by how much the parameters vary over the network.

.. math::

  \min_W \sum_i f_i(w_i) + \alpha \sum_{\{i,j\} \in E} A_{ij} \phi(w_i - w_j)

With :math:`\phi = \|\cdot\|^2`, which everything here takes it to be unless it says
otherwise, and quadratic losses, the objective is :math:`w^\top Q w + q^\top w + c` for
the stacked parameters, with :math:`Q = \mathrm{blockdiag}(Q_i) + \alpha L_G \otimes I`,
and its minimisers solve :math:`Q w = -q/2`. At alpha = 0 the nodes learn alone; for
alpha to infinity every component of the network agrees on one model. Arguments of
other shapes and out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 3.3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, is_known
from fedjax_core.linalg import least_norm_solve, pseudo_inverse
from fedjax_core.networks.coupling import coupled_inverse
from fedjax_core.networks.graph import (
    Graph,
    check_rows,
    check_shapes,
    degree,
    edge_diff,
    laplacian,
)
from fedjax_core.networks.oracles import Losses, check_quadratic, quadratic_shapes
from fedjax_core.networks.spectrum import components, laplacian_matrix
from fedjax_core.networks.variation import Penalty, gtv, squared
from fedjax_core.types import PyTree


def objective(
    losses: Losses,
    graph: Graph,
    W: PyTree,
    alpha: ArrayLike,
    penalty: Penalty | None = None,
) -> jax.Array:
    """The objective of GTVMin at W; a scalar (Jung, (48) and (49)).

    Args:
      losses: of the nodes.
      graph: the network.
      W: leaves ``[n, ...]``.
      alpha: >= 0.
      penalty: phi, of `variation`; by default the squared norm.

    Raises:
      ValueError: alpha < 0 or NaN.
    """
    check.non_negative(alpha=alpha)
    return losses.value(W).sum() + alpha * gtv(graph, W, penalty)


def discrepancy_objective(
    local: jax.Array, graph: Graph, discrepancy: jax.Array, alpha: ArrayLike
) -> jax.Array:
    """Non-parametric GTVMin, for models that only share predictions; a scalar.

    Jung, (66).

    Args:
      local: ``[n]``, the local losses of the hypotheses.
      graph: with edges in the order of `discrepancy`.
      discrepancy: ``[E]``, how much the two hypotheses of every edge differ on the
        edge's test set, such as `variation.discrepancy`.
      alpha: >= 0.

    Raises:
      ValueError: alpha < 0 or NaN.
    """
    check.non_negative(alpha=alpha)
    return local.sum() + alpha * (graph.weight * discrepancy).sum()


def node_objectives(
    losses: Losses,
    graph: Graph,
    W: PyTree,
    alpha: ArrayLike,
    penalty: Penalty | None = None,
) -> jax.Array:
    """What every node minimises over its own row, the others given; ``[n]``.

    f_i(w_i) + alpha sum_j A_ij phi(w_i - w_j): regularised empirical risk, coupled to
    the neighbours. In its own row the gradient is that of `objective`. Jung, (25).
    """
    check.non_negative(alpha=alpha)
    terms = graph.weight * (penalty or squared())(edge_diff(graph, W))
    both = jax.ops.segment_sum(terms[graph.edge], graph.target, graph.num_nodes)
    return losses.value(W) + alpha * both


def gradient(losses: Losses, graph: Graph, W: PyTree, alpha: ArrayLike) -> PyTree:
    """The gradient of `objective`: grad f_i(w_i) + 2 alpha (L_G W)_i."""
    check.non_negative(alpha=alpha)
    return jax.tree.map(
        lambda g, v: g + 2 * alpha * v, losses.grad(W), laplacian(graph, W)
    )


def apply_system(
    graph: Graph, Q: jax.Array, W: jax.Array, alpha: ArrayLike
) -> jax.Array:
    """Q W without the matrix: Q_i w_i + alpha (L_G W)_i; ``[n, d]``."""
    return jnp.einsum("nde,ne->nd", Q, W) + alpha * laplacian(graph, W)


def system(
    graph: Graph, Q: ArrayLike, q: ArrayLike, alpha: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """The matrix Q ``[n d, n d]`` and the vector q ``[n d]``, for small networks.

    Jung, (53).

    Raises:
      ValueError: shapes other than ``[n, d, d]`` and ``[n, d]``, or alpha < 0.
    """
    Q, q = _checked(graph, Q, q, alpha)
    n, d = q.shape
    L = laplacian_matrix(graph).astype(Q.dtype)
    whole = alpha * jnp.kron(L, jnp.eye(d, dtype=Q.dtype))
    blocks = jnp.asarray(whole).reshape(n, d, n, d)
    node = jnp.arange(n)
    return blocks.at[node, :, node].add(Q).reshape(n * d, n * d), q.reshape(-1)


def closed_form(
    graph: Graph,
    Q: ArrayLike,
    q: ArrayLike,
    alpha: ArrayLike,
    *,
    require_unique: bool = False,
) -> jax.Array:
    """A minimiser W ``[n, d]`` by one dense solve; of several, the one of least norm.

    For n d up to some thousands; `conjugate_gradients` needs no matrix. Known arguments
    are solved in float64. Traced ones, as in a sweep over alpha, keep their precision:
    in float32, nodes without losses behind an edge a million times weaker than others
    may be taken for cut off. Jung, Section 3.3.1.

    Args:
      graph: the network.
      Q: ``[n, d, d]``.
      q: ``[n, d]``.
      alpha: >= 0.
      require_unique: raise if there are several minimisers.

    Raises:
      ValueError: wrong shapes, alpha < 0, or several minimisers where that is refused.
    """
    Q, q = _checked(graph, Q, q, alpha)
    if require_unique and not is_unique(graph, Q, alpha):
        raise ValueError(
            "Q must make the solution unique, got a component of the network whose "
            "local Q_i don't add up to a definite matrix."
        )
    system = Q, graph, alpha
    if not is_known(Q, graph.weight, alpha):
        system = jax.lax.stop_gradient(system)
    inverse = coupled_inverse(*system).matrix
    if is_known(Q, graph.weight, alpha, q):
        W = inverse @ (-np.asarray(q, np.float64).reshape(-1) / 2)
        return jnp.asarray(W.reshape(q.shape).astype(q.dtype))
    P = jnp.asarray(inverse, q.dtype)

    def solve(_, r):
        return jnp.matmul(P, r.reshape(-1), precision="highest").reshape(q.shape)

    return jax.lax.custom_linear_solve(
        lambda W: apply_system(graph, Q, W, alpha), -q / 2, solve, symmetric=True
    )


class Solved(NamedTuple):
    """What `conjugate_gradients` returns.

    Attributes:
      W: ``[n, d]``.
      residual: ``[]``, ||Q w + q / 2|| relative to ||q / 2||.
    """

    W: jax.Array
    residual: jax.Array


def conjugate_gradients(
    graph: Graph,
    Q: ArrayLike,
    q: ArrayLike,
    alpha: ArrayLike,
    *,
    tol: float | None = None,
    max_rounds: int | None = None,
) -> Solved:
    """A minimiser by conjugate gradients from 0; one product along edges per round.

    Of several minimisers it finds the one of least norm.

    Args:
      graph: the network.
      Q: ``[n, d, d]``.
      q: ``[n, d]``.
      alpha: >= 0.
      tol: stop at this relative residual; by default 100 times the rounding error.
      max_rounds: by default 10 n d.

    Raises:
      ValueError: wrong shapes or alpha < 0.
    """
    Q, q = _checked(graph, Q, q, alpha)
    tol = 100 * float(jnp.finfo(q.dtype).eps) if tol is None else tol
    check.positive(tol=tol)

    def product(W):
        return apply_system(graph, Q, W, alpha)

    b = -q / 2
    W, _ = cg(product, b, tol=tol, maxiter=max_rounds)
    size = jnp.linalg.norm(b)
    residual = jnp.linalg.norm(b - product(W)) / jnp.where(size > 0, size, 1)
    return Solved(W, residual)


def is_unique(graph: Graph, Q: ArrayLike, alpha: ArrayLike) -> bool:
    """Whether GTVMin has one minimiser only, up to rounding; outside jit.

    For alpha > 0 it has if and only if, in each connected component, the Q_i add up to
    a positive definite matrix (Jung, Exercises 3.9 and 3.10). At alpha = 0 every node
    is a component of its own. Raises ValueError for alpha < 0, or a Q ``[n, d, d]``
    that is not symmetric and semi-definite.
    """
    check.non_negative(alpha=alpha)
    check_quadratic(Q)
    Q = as_float(Q)
    label = components(graph) if np.asarray(alpha) > 0 else np.arange(len(Q))
    total = np.zeros((label.max() + 1, *Q.shape[1:]))
    np.add.at(total, label, np.asarray(Q))
    return not pseudo_inverse(total, float(jnp.finfo(Q.dtype).eps)).singular.any()


def consensus_limit(graph: Graph, Q: ArrayLike, q: ArrayLike) -> jax.Array:
    """What the solution tends to for alpha to infinity, ``[n, d]``.

    In every component C all rows are (sum_C Q_i)^-1 (-1/2 sum_C q_i), the minimiser of
    the pooled losses, by least norm if there are several. The distance to it falls as
    1 / alpha.
    """
    Q, q = _checked(graph, Q, q, 0.0)
    label = components(graph)
    n = graph.num_nodes
    pooled_Q = jax.ops.segment_sum(Q, label, n)
    pooled_q = jax.ops.segment_sum(q, label, n)
    return least_norm_solve(pooled_Q, -pooled_q / 2)[label]


def locally_weighted(Q: ArrayLike, q: ArrayLike, weight: ArrayLike) -> jax.Array:
    """One model for weighted losses, argmin sum_i r_i f_i(w); ``[d]`` (Jung, (73)).

    Weights 1 on a cluster and 0 elsewhere give the cluster's pooled model. Raises
    ValueError unless Q is ``[n, d, d]``, q ``[n, d]`` and `weight` r >= 0, ``[n]``.
    """
    Q, q, weight = as_float(Q), as_float(q), as_float(weight)
    check_shapes(f"({len(q)},)", weight=weight)
    check.each_non_negative("node", weight=weight)
    pooled_Q = jnp.einsum("n,nde->de", weight, Q)
    return least_norm_solve(pooled_Q, -jnp.einsum("n,nd->d", weight, q) / 2)


def default_rate(graph: Graph, Q: ArrayLike, alpha: ArrayLike) -> jax.Array:
    """A learning rate for gradient steps on GTVMin: 1 / (2 (lam_max + 2 alpha d_max)).

    Half of what Prop. 5.1 shows to be safe; needs no spectrum of the network.

    Raises:
      ValueError: alpha < 0 or NaN, or losses that are not convex, not of these nodes,
        or, on a network without edges, zero: any rate would do.
    """
    rate = 1 / (2 * smoothness(graph, Q, alpha))
    if is_known(rate) and not np.isfinite(rate):
        raise ValueError("Q and alpha must not both be zero: any rate would do.")
    return rate


def smoothness(graph: Graph, Q: ArrayLike, alpha: ArrayLike) -> jax.Array:
    """lam_max + 2 alpha d_max, an upper bound on the eigenvalues of GTVMin; ``[]``.

    Jung, Prop. 5.1. d_max is the largest weighted degree of the network, lam_max the
    largest eigenvalue of Q ``[n, d, d]``, of the losses w'Q_i w + q_i'w.
    """
    check.non_negative(alpha=alpha)
    Q = as_float(Q)
    check_rows(graph, Q)
    check_quadratic(Q)
    return jnp.linalg.eigvalsh(Q)[:, -1].max() + 2 * alpha * degree(graph).max()


def _checked(
    graph: Graph, Q: ArrayLike, q: ArrayLike, alpha: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    check.non_negative(alpha=alpha)
    Q, q = quadratic_shapes(Q, q, graph.num_nodes)
    check_quadratic(Q)
    return Q, q
