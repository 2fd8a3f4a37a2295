r"""The Laplacian of a network: its spectrum, components and consensus subspace.

The eigenvalues :math:`0 = \lambda_1 \le \lambda_2 \le \dots \le \lambda_n` of
:math:`L_G` say how well a network pools: with the mean row :math:`\bar w`,

.. math::

  \lambda_2 \|W - 1 \bar w^\top\|_F^2 \le \sum_{\{i,j\}} A_{ij} \|w_i - w_j\|^2
  \le \lambda_n \|W - 1 \bar w^\top\|_F^2 .

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 3.2, 5.10 and 7.1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from scipy import sparse
from scipy.linalg import solve_triangular
from scipy.sparse import csgraph
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh, splu

from fedjax_core import check
from fedjax_core.arrays import as_mask
from fedjax_core.networks.graph import Graph, degree

# Up to here a dense eigendecomposition takes well under a second.
_DENSE = 512


class Extremes(NamedTuple):
    """Two eigenvalues of a Laplacian.

    Attributes:
      second: lambda_2, the algebraic connectivity, exactly 0 if the network is not
        connected.
      largest: lambda_n.
    """

    second: float
    largest: float


def laplacian_matrix(graph: Graph) -> jax.Array:
    """L_G = diag(deg) - A, ``[n, n]``; for small networks."""
    A = graph.dense()
    return jnp.diag(A.sum(1)) - A


def eigenvalues(graph: Graph) -> jax.Array:
    """All eigenvalues of L_G, ascending, ``[n]``; for small networks (Jung, (39))."""
    return jnp.linalg.eigvalsh(laplacian_matrix(graph))


def extremes(graph: Graph, tol: float = 0.0) -> Extremes:
    """lambda_2 and lambda_n, in float64 on the host (Jung, (40), (41), (136)).

    Up to 512 nodes by dense decompositions, with a relative error of about n eps
    whatever the range of the weights. Above by Lanczos with products along edges, whose
    error is some eps lambda_n; for long chains, where they are slow, with a sparse
    factorisation, which is cheap there.

    `tol` is the relative accuracy of Lanczos; 0 is as accurate as it gets. A single
    node, which has no second eigenvalue, raises ValueError.
    """
    n = graph.num_nodes
    _check_pair(n)
    A = adjacency(graph)
    deg = np.asarray(A.sum(1)).ravel()
    connected = components(graph).max() == 0  # which rounding would blur
    bound = 2 * float(deg.max())
    if not bound:
        return Extremes(0.0, 0.0)
    if n <= _DENSE:
        values = np.linalg.eigvalsh(np.diag(deg) - A.toarray())
        second = float(values[1]) if connected else 0.0
        if connected and values[1] < 1e-4 * values[-1]:  # it drowned
            second = _weak_second(A.toarray())
        return Extremes(second, float(values[-1]))
    L: Any = sparse.diags_array(deg, format="csc") - A.tocsc()

    def centred(f):
        def product(v):
            v = f(v - v.mean())
            return v - v.mean()

        return product

    def below():
        return centred(lambda v: bound * v - L @ v)

    def grounded():
        # Without node 0 a Laplacian is regular, and gives differences to node 0.
        solve = splu(L[1:, 1:]).solve
        return centred(lambda v: np.append(0.0, solve(v[1:])))

    beyond = bound * (1 + 1e-8)

    def shifted():
        return splu(sparse.eye_array(n, format="csc") * beyond - L).solve

    def largest(product, inverse):
        tries = [(product, 50), (inverse, 100 * n)]
        if graph.num_edges <= 1.1 * n:  # a tree or close to one
            tries.reverse()
        for make, most in tries:
            operator = LinearOperator((n, n), matvec=make(), dtype=float)  # pyright: ignore[reportCallIssue]
            options: Any = {"v0": start, "tol": tol, "maxiter": most, "ncv": 40}
            options |= {"which": "LA", "return_eigenvectors": False}
            try:
                found = eigsh(operator, 1, **options)
            except ArpackNoConvergence:
                continue
            return float(found[0]), make is inverse
        raise RuntimeError("Lanczos did not converge.")

    start = np.random.default_rng(0).standard_normal(n)
    second, inverted = largest(below, grounded) if connected else (bound, False)
    second = 1 / second if inverted else max(0.0, bound - second)
    most, inverted = largest(lambda: lambda v: L @ v, shifted)
    return Extremes(second, beyond - 1 / most if inverted else most)


def largest_bound(graph: Graph) -> jax.Array:
    """2 d_max, an upper bound on lambda_n; tight for even cycles (Jung, (136))."""
    return 2 * degree(graph).max()


def connectivity_bound(graph: Graph) -> jax.Array:
    """An upper bound on lambda_2, n / (n - 1) min_i deg_i; tight if complete.

    Jung, Prop. 7.1. Raises ValueError for a single node.
    """
    n = graph.num_nodes
    _check_pair(n)
    return n / (n - 1) * degree(graph).min()


def expected_laplacian(num_nodes: int, p: float) -> jax.Array:
    """E L_G of `builders.erdos_renyi`, n p I - p 11', ``[n, n]`` (Jung, Section 7.1).

    Its eigenvalues are 0 and, n - 1 times, n p. That lambda_2 of a drawn network comes
    close to n p, and n p to its largest degree, holds for n to infinity only.
    """
    check.positive_int(num_nodes=num_nodes)
    check.in_range(0, 1, p=p)
    eye = np.eye(num_nodes, dtype=jnp.result_type(float))
    return jnp.asarray(num_nodes * p * eye - p, eye.dtype)


def components(graph: Graph) -> np.ndarray:
    """The connected component of every node, ``[n]`` int32 from 0 on.

    Only edges of positive weight connect. Runs on the host, so weights may not be
    traced.
    """
    return csgraph.connected_components(adjacency(graph), directed=False)[1]


def check_connected(graph: Graph) -> None:
    """Raises ValueError unless the network is connected."""
    count = int(components(graph).max()) + 1
    if count > 1:
        raise ValueError(
            f"graph must be connected by edges of positive weight, got {count} "
            "components."
        )


def hops(graph: Graph, start: ArrayLike) -> jax.Array:
    """How many edges lead to the nearest node of a set, ``[n]`` int32.

    n for a node that none leads to. Only edges of positive weight count; weights and
    the set ``[n]`` bool may be traced. In time linear in edges times the diameter.
    """
    n = graph.num_nodes
    live = (graph.weight > 0)[graph.edge]

    def spread(carry):
        far, _ = carry
        through = jnp.where(live, far[graph.source] + 1, n)
        heard = jax.ops.segment_min(through, graph.target, n, indices_are_sorted=True)
        new = jnp.minimum(far, heard)
        return new, (new != far).any()

    far = jnp.where(as_mask("start", start, (n,)), 0, n).astype(jnp.int32)
    return lax.while_loop(lambda carry: carry[1], spread, (far, jnp.bool_(True)))[0]


def null_space(graph: Graph) -> jax.Array:
    """An orthonormal basis of the null space of L_G, ``[n, components]``.

    The normalised indicators of the components; one of many bases where there are
    several (Jung, Exercise 3.4).
    """
    label = components(graph)
    indicator = label[:, None] == np.arange(label.max() + 1)
    return jnp.asarray(indicator / np.sqrt(indicator.sum(0)), graph.weight.dtype)


def walk_counts(graph: Graph, steps: int) -> np.ndarray:
    """How many walks of so many steps lead from i to j, ``[n, n]`` int64.

    Every edge of positive weight counts as one. The book says "paths", but a walk may
    come back to a node. Jung, Exercise 3.14.

    Raises:
      ValueError: steps < 0.
      OverflowError: a count beyond int64.
    """
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps}.")
    A = adjacency(graph).toarray() > 0
    about = np.linalg.matrix_power(A.astype(np.float64), steps)
    if about.max() >= 2**62:
        raise OverflowError(f"walks of {steps} steps are too many for int64.")
    return np.linalg.matrix_power(A.astype(np.int64), steps)


def _weak_second(A: np.ndarray) -> float:
    """lambda_2 of a connected network from weights ``[n, n]`` of any range.

    Nodes are eliminated without a subtraction, so that every entry of the inverse of
    the Laplacian without the last node has a relative error of n eps or so.
    """
    n, A = len(A), A.copy()
    own, U = np.zeros(n - 1), np.eye(n - 1)
    for k in range(n - 1):
        row = A[k, k + 1 :]
        own[k] = row.sum()
        U[k, k + 1 :] = -row[:-1] / own[k]
        A[k + 1 :, k + 1 :] += np.outer(row, row) / own[k]
        np.fill_diagonal(A[k + 1 :, k + 1 :], 0)
    half = np.zeros((n, n - 1))
    half[:-1] = solve_triangular(U, np.diag(own**-0.5))
    half -= half.mean(0)
    return float(np.linalg.svd(half, compute_uv=False)[0] ** -2)


def _check_pair(n: int) -> None:
    if n < 2:
        raise ValueError(f"graph must have at least 2 nodes, got {n}.")


def adjacency(graph: Graph) -> sparse.csr_array:
    """Edges of positive weight in float64, by SciPy."""
    weight = np.asarray(graph.weight, np.float64)
    i, j = (np.asarray(x)[weight > 0] for x in (graph.head, graph.tail))
    weight = weight[weight > 0]
    return sparse.csr_array(
        (np.r_[weight, weight], (np.r_[i, j], np.r_[j, i])), (graph.num_nodes,) * 2
    )
