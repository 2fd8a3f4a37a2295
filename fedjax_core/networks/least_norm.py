"""Symmetric semi-definite systems, solved so that no scale of the unknowns matters.

A pseudo-inverse that cuts small eigenvalues off drops whatever is small only because of
its units, or next to a large alpha. Here rows and columns are first scaled to a unit
diagonal, and the rank is read off there. What is known is inverted in float64 on the
host, as ranks and large alphas need digits; traced arrays keep their precision.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike
from scipy import sparse
from scipy.sparse import csgraph

from fedjax_core.networks.graph import Graph

_CUT = 20  # times the rounding error: smaller eigenvalues are rounding


class Inverse(NamedTuple):
    """A pseudo-inverse and how it came about.

    Attributes:
      matrix: ``[..., d, d]``.
      singular: ``[...]`` bool, whether directions were left out.
      score: ``[...]``, how many were not, and as a fraction the smallest of their
        scaled eigenvalues: the larger, the better conditioned.
    """

    matrix: Any
    singular: Any
    score: Any


def is_known(*arrays: Any) -> bool:
    """Whether no array is traced."""
    return not any(isinstance(x, Tracer) for x in arrays)


@contextlib.contextmanager
def wide_if_known(*arrays: Any) -> Iterator[Any]:
    """A context to compute in, and the dtype: float64 unless an array is traced."""
    if not is_known(*arrays):
        yield jnp.result_type(*arrays)
        return
    # Inside jit too, where what is known would become traced.
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        yield jnp.dtype(jnp.float64)


def pseudo_inverse(Q: jax.Array | np.ndarray, eps: float | None = None) -> Inverse:
    """The Moore-Penrose inverse of semi-definite matrices, in their own precision.

    Args:
      Q: ``[..., d, d]`` floats; NumPy's are inverted by NumPy.
      eps: relative rounding of the entries, by default of their dtype.
    """
    xp = _numpy_of(Q)
    eps = float(jnp.finfo(Q.dtype).eps) if eps is None else eps
    with jax.default_matmul_precision("highest"):
        own = xp.diagonal(Q, axis1=-2, axis2=-1)
        s = 1 / xp.sqrt(xp.where(own > 0, own, 1))
        e, U = xp.linalg.eigh(Q * s[..., :, None] * s[..., None, :])
        largest = xp.where(e[..., -1:] > 0, e[..., -1:], 1)
        used = e > _CUT * eps * largest
        inverse = U * xp.where(used, 1 / xp.where(used, e, 1), 0)[..., None, :]
        inverse = s[..., :, None] * (inverse @ _transpose(U)) * s[..., None, :]
        kept = _without(s[..., :, None] * _clean(U, eps), ~used)
        smallest = xp.where(used, e / largest, 1).min(-1)
        return Inverse(
            kept @ inverse @ kept, ~used.all(-1), used.sum(-1) + smallest / 2
        )


def least_norm_solve(Q: ArrayLike, b: ArrayLike) -> jax.Array:
    """Solves Q x = b for x ``[..., d]``; of several the one of least norm.

    Derivatives are those of the system, not of its eigenvectors.
    """
    Q, b = jnp.asarray(Q), jnp.asarray(b)
    dtype = jnp.promote_types(jnp.result_type(Q, b), jnp.float32)
    Q, b = Q.astype(dtype), b.astype(dtype)
    if is_known(Q, b):
        P = pseudo_inverse(np.asarray(Q, np.float64), float(jnp.finfo(Q.dtype).eps))
        x = np.einsum("...de,...e->...d", P.matrix, np.asarray(b, np.float64))
        return jnp.asarray(x.astype(b.dtype))
    P = pseudo_inverse(lax.stop_gradient(Q)).matrix

    def times(M, x):
        return jnp.einsum("...de,...e->...d", M, x, precision="highest")

    return lax.custom_linear_solve(
        lambda x: times(Q, x), b, lambda _, r: times(P, r), symmetric=True
    )


def solve_in_range(Q: Any, M: Any, b: Any) -> jax.Array:
    """Solves M x = b for the x in the range of Q, ``[d, d]``, in the dtype of Q.

    M has the null space of Q, but for rounding that it may have blown up. Derivatives
    take the range as fixed.
    """
    dtype, eps = Q.dtype, float(jnp.finfo(Q.dtype).eps)
    if is_known(Q, M, b):
        Q, M, b = (np.asarray(x, np.float64) for x in (Q, M, b))
    else:
        Q = lax.stop_gradient(Q)
    xp = _numpy_of(Q)
    with jax.default_matmul_precision("highest"):
        inverse, eye = pseudo_inverse(Q, eps), xp.eye(len(b), dtype=b.dtype)
        span = xp.where(inverse.singular, inverse.matrix @ Q, eye)
        size = xp.trace(M)
        off = xp.where(size > 0, size, 1) * (eye - span)
        x = span @ xp.linalg.solve(M + off, span @ b)
    return jnp.asarray(x.astype(dtype))


def pulled_inverse(Q: jax.Array, pull: jax.Array) -> jax.Array:
    """(Q_i + p_i I)^-1, ``[n, d, d]``, for semi-definite Q and p ``[n]`` > 0.

    Raises:
      ValueError: where known, p_i is less than the rounding of a singular Q_i, or
        Q_i + p_i I is not definite.
    """
    d = Q.shape[-1]
    if not is_known(Q, pull):
        eye = jnp.eye(d, dtype=Q.dtype)
        factor = jnp.linalg.cholesky(Q + pull[:, None, None] * eye[None])
        return jax.scipy.linalg.cho_solve(
            (factor, True), jnp.broadcast_to(eye, Q.shape)
        )
    eps = float(jnp.finfo(Q.dtype).eps)
    p, M = np.asarray(pull, np.float64), np.array(Q, np.float64)
    weak = np.flatnonzero(p < 1000 * _CUT * eps * np.trace(M, axis1=1, axis2=2))
    M += p[:, None, None] * np.eye(d)
    drowned = weak[np.asarray(pseudo_inverse(M[weak], eps).singular)]
    if drowned.size:
        i = drowned[0]
        raise ValueError(
            f"alpha must pull every node harder than its losses are rounded, got a "
            f"pull of {p[i]:.3g} at node {i}, whose losses leave a direction free."
        )
    try:
        np.linalg.cholesky(M)
    except np.linalg.LinAlgError:
        i = int(np.linalg.eigvalsh(M)[:, 0].argmin())
        raise ValueError(
            f"Q must be positive semi-definite, is not for node {i}."
        ) from None
    return jnp.asarray(np.linalg.inv(M).astype(Q.dtype))


def inverse_of_sum(Q: jax.Array, G: jax.Array, alpha: ArrayLike) -> Any:
    """The Moore-Penrose inverse of Q_i + alpha G_i, ``[n, d, d]``, both semi-definite.

    However large alpha is, where all is known: then what both leave free is read off
    next to each other, not next to alpha, and the result is NumPy's, in float64.
    """
    if not is_known(Q, G, alpha):
        return pseudo_inverse(Q + alpha * G).matrix
    eps = float(jnp.finfo(Q.dtype).eps)
    first, second = np.asarray(Q, np.float64), np.asarray(G, np.float64)

    def unit(x):
        size = np.trace(x, axis1=1, axis2=2)[:, None, None]
        return x / np.where(size > 0, size, 1)

    a = np.asarray(alpha, np.float64)
    both = unit(first) + np.where(a > 0, unit(second), 0)
    span = pseudo_inverse(both, eps).matrix @ both
    inverse = pseudo_inverse(first + a * second).matrix
    return span @ inverse @ _transpose(span)


@jax.custom_jvp
def pinv(A: ArrayLike) -> jax.Array:
    """The Moore-Penrose inverse ``[..., d, m]`` of ``[..., m, d]``.

    The units of its columns do not matter. It may be differentiated where the rank does
    not change (Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973, (4.12)).
    """
    A = jnp.asarray(A)
    eps = float(jnp.finfo(A.dtype).eps)
    m, d = A.shape[-2:]
    M = np.asarray(A, np.float64) if is_known(A) else A
    xp = _numpy_of(M)
    if m < d:  # the null space has d vectors too
        M = xp.concatenate([M, xp.zeros((*M.shape[:-2], d - m, d), M.dtype)], -2)
    with jax.default_matmul_precision("highest"):
        norm = xp.sqrt((M**2).sum(-2))
        s = 1 / xp.where(norm > 0, norm, 1)
        U, e, Vt = xp.linalg.svd(M * s[..., None, :], full_matrices=False)
        used = e > _CUT * eps * e[..., :1]
        V = _transpose(Vt)
        inverse = V * xp.where(used, 1 / xp.where(used, e, 1), 0)[..., None, :]
        inverse = s[..., :, None] * (inverse @ _transpose(U)[..., :m])
        # Largest first: `_without` wants what is left out first.
        null = (s[..., :, None] * _clean(V, eps))[..., ::-1]
        found = _without(null, ~used[..., ::-1]) @ inverse
    return jnp.asarray(found.astype(A.dtype))


@pinv.defjvp
def _pinv_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (A,), (dA,) = primals, tangents
    P = pinv(A)
    with jax.default_matmul_precision("highest"):
        turn = _transpose(dA) @ _transpose(P)
        first = _transpose(dA) - turn @ _transpose(A)
        second = turn @ P
        # 0 at full rank, but its rounding is not, in columns of other units.
        rank = jnp.einsum("...dm,...md->...", P, A)[..., None, None]
        turned = jnp.where(rank > A.shape[-1] - 0.5, 0, second - P @ (A @ second))
        return P, P @ (_transpose(P) @ first - dA @ P) + turned


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
    n, d = Q.shape[:2]
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
    held = _held(Q, alpha * jnp.diagonal(L))
    choices = jnp.stack([~held, jnp.ones(d, bool), jnp.zeros(d, bool)])
    with jax.default_matmul_precision("highest"):
        bases, whole = jax.vmap(
            lambda choice: _in_basis(Q, alpha * L, alpha * K, V, choice)
        )(choices)
        found = pseudo_inverse(whole)
        best = jnp.argmax(found.score)
        matrix, singular, score = jax.tree.map(lambda x: x[best], found)
        return Inverse(_out_of_basis(bases[best], matrix), singular, score)


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
    every, singular, score = np.arange(d), False, np.inf
    order = np.argsort(label, kind="stable")
    for nodes in np.split(order, np.flatnonzero(np.diff(label[order])) + 1):
        part = _component(losses[nodes], A[nodes][:, nodes].toarray(), sign, eps)
        block = part.matrix.reshape(len(nodes), d, len(nodes), d)
        matrix[np.ix_(nodes, every, nodes, every)] = block
        singular |= bool(part.singular)
        score = min(score, float(part.score))
    return Inverse(matrix.reshape(n * d, n * d), np.bool_(singular), score)


def _component(Q: np.ndarray, A: np.ndarray, sign: int, eps: float) -> Inverse:
    """`coupled_inverse` of one component, whose weights have alpha in them."""
    n, d = Q.shape[:2]
    if n == 1:
        return pseudo_inverse(Q[0], eps)
    if sign == -1 and not pseudo_inverse(Q.sum(0), eps).singular:
        eps = np.finfo(float).eps  # nothing is free, however weak the coupling
    L = np.diag(A.sum(1)) + sign * A
    values, V = np.linalg.eigh(L)
    null = n * np.finfo(float).eps * values[-1]
    K = np.diag(np.where(values > null, values, 0))
    best = None
    for choice in (~_held(Q, np.diagonal(L)), np.ones(d, bool), np.zeros(d, bool)):
        basis, whole = _in_basis(Q, L, K, V, choice)
        found = pseudo_inverse(whole, eps)
        found = found._replace(matrix=_out_of_basis(basis, found.matrix))
        if not found.singular:
            return found
        if best is None or found.score > best.score:
            best = found
    assert best is not None
    return best


def _held(Q: Any, coupling: Any) -> Any:
    """Features ``[d]`` for which the losses are stiffer than the coupling."""
    xp = _numpy_of(Q)
    return xp.diagonal(Q, axis1=1, axis2=2).mean(0) > coupling.mean()


def _in_basis(Q: Any, L: Any, K: Any, V: Any, spectral: Any) -> tuple[Any, Any]:
    """The system in eigenvectors V for the `spectral` features, in nodes for others.

    K is L in V. Returns the basis ``[n, d, n]`` and the matrix ``[d n, d n]``.
    """
    xp = _numpy_of(Q)
    n, d = Q.shape[:2]
    eye = xp.eye(n, dtype=Q.dtype)
    basis = xp.where(spectral[None, :, None], V[:, None, :], eye[:, None, :])
    coupling = xp.where(spectral[:, None, None], K[None], L[None])
    half = xp.einsum("ifa,ifg->iafg", basis, Q)
    whole = xp.einsum("iafg,igb->fagb", half, basis, optimize=True)
    whole = whole + xp.einsum("fab,fg->fagb", coupling, xp.eye(d, dtype=Q.dtype))
    return basis, whole.reshape(d * n, d * n)


def _out_of_basis(basis: Any, inverse: Any) -> Any:
    """Back to nodes, ``[n d, n d]`` with all features of a node together."""
    xp = _numpy_of(basis)
    n, d = basis.shape[:2]
    half = xp.einsum(
        "ifa,fagb->ifgb", basis, inverse.reshape(d, n, d, n), optimize=True
    )
    whole = xp.einsum("ifgb,jgb->ifjg", half, basis, optimize=True)
    return whole.reshape(n * d, n * d)


def _clean(U: Any, eps: float) -> Any:
    # Rounding of unit vectors, before the units of the unknowns blow it up.
    xp = _numpy_of(U)
    return xp.where(xp.abs(U) < 30 * eps, 0, U)


def _without(vectors: Any, left_out: Any) -> Any:
    """The projector onto what is orthogonal to the first vectors, those left out.

    Without it the norm is least only after scaling.
    """
    xp = _numpy_of(vectors)
    null = xp.linalg.qr(vectors)[0] * left_out[..., None, :]
    eye = xp.eye(vectors.shape[-1], dtype=vectors.dtype)
    return xp.broadcast_to(eye, vectors.shape) - null @ _transpose(null)


def _numpy_of(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _transpose(x: Any) -> Any:
    return x.swapaxes(-1, -2)
