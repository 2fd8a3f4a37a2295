"""Symmetric semi-definite systems, solved so that no scale of the unknowns matters.

A pseudo-inverse that cuts small eigenvalues off drops whatever is small only because of
its units, or next to a large alpha. Here rows and columns are first scaled to a unit
diagonal, and the rank is read off there. What is known is inverted in float64 on the
host, as ranks and large alphas need digits; traced arrays keep their precision.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_core.arrays import is_known, numpy_of

_CUT = 20  # times the rounding error: smaller eigenvalues are rounding


class Inverse(NamedTuple):
    """A pseudo-inverse and how it came about.

    Attributes:
      matrix: ``[..., d, d]``.
      singular: ``[...]`` bool, whether directions were left out.
    """

    matrix: Any
    singular: Any


def pseudo_inverse(Q: jax.Array | np.ndarray, eps: float | None = None) -> Inverse:
    """The Moore-Penrose inverse of semi-definite matrices, in their own precision.

    Q is ``[..., d, d]`` floats, NumPy's are inverted by NumPy; `eps` is the relative
    rounding of its entries, by default of their dtype.
    """
    xp = numpy_of(Q)
    eps = float(jnp.finfo(Q.dtype).eps) if eps is None else eps
    with jax.default_matmul_precision("highest"):
        own = xp.diagonal(Q, axis1=-2, axis2=-1)
        s = 1 / xp.sqrt(xp.where(own > 0, own, 1))
        e, U = xp.linalg.eigh(Q * s[..., :, None] * s[..., None, :])
        largest = xp.where(e[..., -1:] > 0, e[..., -1:], 1)
        used = e > _CUT * eps * largest
        inverse = U * xp.where(used, 1 / xp.where(used, e, 1), 0)[..., None, :]
        inverse = s[..., :, None] * (inverse @ U.mT) * s[..., None, :]
        kept = _without(s[..., :, None] * _clean(U, eps), ~used)
        return Inverse(kept @ inverse @ kept, ~used.all(-1))


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
    xp = numpy_of(Q)
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
    return span @ inverse @ span.mT


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
    xp = numpy_of(M)
    if m < d:  # the null space has d vectors too
        M = xp.concatenate([M, xp.zeros((*M.shape[:-2], d - m, d), M.dtype)], -2)
    with jax.default_matmul_precision("highest"):
        norm = xp.sqrt((M**2).sum(-2))
        s = 1 / xp.where(norm > 0, norm, 1)
        U, e, Vt = xp.linalg.svd(M * s[..., None, :], full_matrices=False)
        used = e > _CUT * eps * e[..., :1]
        V = Vt.mT
        inverse = V * xp.where(used, 1 / xp.where(used, e, 1), 0)[..., None, :]
        inverse = s[..., :, None] * (inverse @ U.mT[..., :m])
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
        turn = dA.mT @ P.mT
        first = dA.mT - turn @ A.mT
        second = turn @ P
        # 0 at full rank, but its rounding is not, in columns of other units.
        rank = jnp.einsum("...dm,...md->...", P, A)[..., None, None]
        turned = jnp.where(rank > A.shape[-1] - 0.5, 0, second - P @ (A @ second))
        return P, P @ (P.mT @ first - dA @ P) + turned


def _clean(U: Any, eps: float) -> Any:
    # Rounding of unit vectors, before the units of the unknowns blow it up.
    xp = numpy_of(U)
    return xp.where(xp.abs(U) < 30 * eps, 0, U)


def _without(vectors: Any, left_out: Any) -> Any:
    """The projector onto what is orthogonal to the first vectors, those left out.

    Without it the norm is least only after scaling.
    """
    xp = numpy_of(vectors)
    null = xp.linalg.qr(vectors)[0] * left_out[..., None, :]
    eye = xp.eye(vectors.shape[-1], dtype=vectors.dtype)
    return xp.broadcast_to(eye, vectors.shape) - null @ null.mT
