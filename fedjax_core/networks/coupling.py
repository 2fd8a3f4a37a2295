"""Inverses of losses that a network couples, blockdiag(Q_i) + alpha (D -+ A) (x) I."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy import sparse
from scipy.sparse import csgraph

from fedjax_core.arrays import is_known, numpy_of
from fedjax_core.linalg import Inverse, pseudo_inverse
from fedjax_core.networks.graph import Graph


def coupled_inverse(
    Q: jax.Array, graph: Graph, alpha: ArrayLike, sign: int = -1
) -> Inverse:
    """The pseudo-inverse of blockdiag(Q_i) + alpha (D + sign A) (x) I.

    Set up in the nodes for features that the losses hold, and in the eigenvectors of
    the coupling for those next to which the losses would drown where all nodes agree.

    Args:
      Q: ``[n, d, d]``, semi-definite, floats.
      graph: A are its weights, D their row sums.
      alpha: >= 0.
      sign: -1 for the Laplacian, 1 for the signless one.

    Returns:
      A matrix ``[n d, n d]``: in float64, by NumPy and for every component apart, if
      all is known.
    """
    if is_known(Q, graph.weight, alpha):
        return _known_coupled_inverse(Q, graph, alpha, sign)
    n = graph.num_nodes
    A = graph.dense().astype(Q.dtype)
    alpha = jnp.asarray(alpha, Q.dtype)
    L = jnp.diag(A.sum(1)) + sign * A
    V = jnp.linalg.eigh(L)[1]
    # By differences along edges: the smallest eigenvalues keep all their digits.
    along = V[graph.tail] + sign * V[graph.head]
    with jax.default_matmul_precision("highest"):
        K = (along * graph.weight.astype(Q.dtype)[:, None]).T @ along
        own = jnp.diagonal(K)
        live = own > (n * jnp.finfo(Q.dtype).eps) ** 2 * own.max()
        K = jnp.where(live[:, None] & live[None], K, 0)
        return _inverse(Q, alpha * L, alpha * K, V)


def _known_coupled_inverse(
    Q: jax.Array, graph: Graph, alpha: ArrayLike, sign: int
) -> Inverse:
    eps, n, d = float(jnp.finfo(Q.dtype).eps), *Q.shape[:2]
    losses = np.asarray(Q, np.float64)
    weight = np.asarray(graph.weight, np.float64) * float(np.asarray(alpha))
    ends = np.asarray(graph.head), np.asarray(graph.tail)
    A = sparse.csr_array((weight, ends), (n, n))
    A.eliminate_zeros()
    A = A + A.T
    label = csgraph.connected_components(A, directed=False)[1]
    matrix = np.zeros((n, d, n, d))
    every, singular = np.arange(d), False
    order = np.argsort(label, kind="stable")
    for nodes in np.split(order, np.flatnonzero(np.diff(label[order])) + 1):
        part = _component(losses[nodes], A[nodes][:, nodes].toarray(), sign, eps)
        block = part.matrix.reshape(len(nodes), d, len(nodes), d)
        matrix[np.ix_(nodes, every, nodes, every)] = block
        singular |= bool(part.singular)
    return Inverse(matrix.reshape(n * d, n * d), np.bool_(singular))


def _component(Q: np.ndarray, A: np.ndarray, sign: int, eps: float) -> Inverse:
    """`coupled_inverse` of one component, whose weights have alpha in them."""
    n = len(Q)
    if n == 1:
        return pseudo_inverse(Q[0], eps)
    if sign == -1 and not pseudo_inverse(Q.sum(0), eps).singular:
        eps = np.finfo(float).eps  # nothing is free, however weak the coupling
    L = np.diag(A.sum(1)) + sign * A
    values, V = np.linalg.eigh(L)
    null = n * np.finfo(float).eps * values[-1]
    return _inverse(Q, L, np.diag(np.where(values > null, values, 0)), V, eps)


def _inverse(Q: Any, L: Any, K: Any, V: Any, eps: float | None = None) -> Inverse:
    """Of blockdiag(Q_i) + L (x) I, where K is L in its eigenvectors V.

    Features for which the losses are stiffer than the coupling stay in the nodes.
    """
    xp = numpy_of(Q)
    n, d = Q.shape[:2]
    held = xp.diagonal(Q, axis1=1, axis2=2).mean(0) > xp.diagonal(L).mean()
    eye = xp.eye(n, dtype=Q.dtype)
    basis = xp.where(held[None, :, None], eye[:, None, :], V[:, None, :])  # [n, d, n]
    coupling = xp.where(held[:, None, None], L[None], K[None])
    half = xp.einsum("ifa,ifg->iafg", basis, Q)
    whole = xp.einsum("iafg,igb->fagb", half, basis, optimize=True)
    whole = whole + xp.einsum("fab,fg->fagb", coupling, xp.eye(d, dtype=Q.dtype))
    found = pseudo_inverse(whole.reshape(d * n, d * n), eps)
    # Back to nodes, all features of a node together.
    half = xp.einsum(
        "ifa,fagb->ifgb", basis, found.matrix.reshape(d, n, d, n), optimize=True
    )
    whole = xp.einsum("ifgb,jgb->ifjg", half, basis, optimize=True)
    return Inverse(whole.reshape(n * d, n * d), found.singular)
