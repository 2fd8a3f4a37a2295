r"""Linear features that hide a private attribute and keep what else there is to see.

Arrays of other shapes and arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 9.3 and Exercises 9.2
  and 9.5.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core.arrays import as_float, check_finite, is_known
from fedjax_core.linalg import least_norm_solve, pseudo_inverse


class Projection(NamedTuple):
    """A linear feature map.

    Attributes:
      matrix: F ``[d, d]``, symmetric and idempotent.
      changed: bool scalar, False if the features say nothing linear about the
        attribute anyway, and F is the identity.
    """

    matrix: jax.Array
    changed: jax.Array


def cross_covariance(X: ArrayLike, s: ArrayLike) -> jax.Array:
    r"""The empirical :math:`\hat c = \hat X^\top \hat s / m` of centred data, ``[d]``.

    Exercise 9.5 calls the hour of the day the private attribute but takes the centred
    temperature for s; with s the hour the method does what the text says. Features are
    ``[m, d]``, attributes ``[m]``, centred or not.
    """
    X, s = as_float(X), as_float(s)
    if X.ndim != 2 or s.shape != X.shape[:1]:
        raise ValueError(
            f"X and s must have shapes (m, d) and (m,), got {X.shape} and {s.shape}."
        )
    return (X - X.mean(0, keepdims=True)).T @ (s - s.mean()) / len(X)


def private_projection(c: ArrayLike) -> Projection:
    r"""The features :math:`F x` from which no linear map can recover s.

    .. math::

      F = I - c c^\top / \lVert c \rVert_2^2, \qquad c = \mathbb{E}\{x s\}

    for centred x and s. With the `cross_covariance` c ``[d]`` of a dataset, linear
    regression of s on the dataset's new features has R^2 = 0 exactly. Nonlinear
    predictors may still succeed, unless x and s are jointly normal. Jung, (184).

    Returns:
      F of rank d - 1 and True; or the identity and False where c is zero.
    """
    c = as_float(c)
    if c.ndim != 1:
        raise ValueError(f"c must have shape (d,), got {c.shape}.")
    check_finite(c=c)
    # Scaled first: the square of a small c would underflow.
    largest = jnp.max(jnp.abs(c))
    changed = largest > 0
    # 1 / largest, by which XLA may multiply, must not underflow either.
    down = jnp.where(largest > 1, 2.0**-8, 1).astype(c.dtype)
    direction = c * down / jnp.where(changed, largest * down, 1)
    square = direction**2
    total = jnp.where(changed, square.sum(), 1)
    own = jnp.eye(len(c), dtype=bool)
    # 1 - c_i^2 / ||c||^2 as the share of the others: it must not cancel.
    others = jnp.where(own, 0, square[None]).sum(1) / total
    hidden = direction[:, None] * direction[None] / total
    F = jnp.where(own, jnp.where(changed, others, 1)[:, None], -hidden)
    return Projection(F, changed)


def reconstruction_error(
    F: ArrayLike, covariance: ArrayLike, c: ArrayLike, variance: ArrayLike
) -> jax.Array:
    r"""How well the best linear map recovers s from F x: the more, the more private.

    .. math::

      \varepsilon(F) = \min_r \mathbb{E} (s - r^\top F x)^2
      = \mathbb{E} s^2 - c^\top F^\top (F C F^\top)^+ F c

    Args:
      F: ``[k, d]`` feature map.
      covariance: C ``[d, d]`` of the features.
      c: ``[d]`` cross-covariance of the features with s.
      variance: E s^2 of the centred s.

    Returns:
      A scalar in [0, variance], `variance` itself iff F c = 0.

    References:
      Jung, Section 9.3, "Optimal Private Linear Transformation".
    """
    F, C, c = as_float(F), as_float(covariance), as_float(c)
    with jax.default_matmul_precision("highest"):
        Fc, FCF = F @ c, F @ C @ F.T
        if is_known(F, C, c):  # F cancels what it hides, which takes digits
            wide, eps = np.asarray(F, np.float64), float(jnp.finfo(F.dtype).eps)
            FCF = wide @ np.asarray(C, np.float64) @ wide.T
            Fc = wide @ np.asarray(c, np.float64)
            explained = Fc @ pseudo_inverse(FCF, eps).matrix @ Fc
        else:
            explained = Fc @ least_norm_solve(FCF, Fc)
    return jnp.clip(variance - explained, 0, variance)


def gaussian_leakage(error: ArrayLike, variance: ArrayLike) -> jax.Array:
    """I(s; F x) of jointly normal s and x in nats, log(variance / error) / 2.

    Args:
      error: `reconstruction_error`.
      variance: E s^2 of the centred s.
    """
    return (jnp.log(variance) - jnp.log(error)) / 2


def private_lda(
    mean_difference: ArrayLike, covariance: ArrayLike, F: ArrayLike
) -> jax.Array:
    r"""The best direction to tell two classes apart that says nothing linear about F x.

    For equally likely normal classes with the same covariance C and means that differ
    by :math:`\Delta`, the features have covariance :math:`S = C + \Delta \Delta^\top /
    4`, and with :math:`G = S F^\top`

    .. math::

      a \propto C^{-1} \bigl(\Delta - G (G^\top C^{-1} G)^{-1} G^\top C^{-1} \Delta
      \bigr)

    maximises :math:`(a^\top \Delta)^2 / (a^\top C a)` under :math:`a^\top G = 0`, that
    is where :math:`a^\top x` and the private :math:`F x` do not correlate. Jung,
    Exercise 9.2.

    Args:
      mean_difference: ``[d]``, mean of class 1 minus mean of class -1.
      covariance: C ``[d, d]``, positive definite.
      F: ``[k, d]``, the map to the private attributes; rows may repeat.

    Returns:
      a ``[d]`` with a' C a = 1 and a' mean_difference >= 0.

    Raises:
      ValueError: arrays whose shapes do not fit, a C that is not positive definite, or
        classes that differ only in what is private (seen only outside jit).
    """
    d, C, F = as_float(mean_difference), as_float(covariance), as_float(F)
    if d.ndim != 1 or C.shape != 2 * d.shape or F.ndim != 2 or F.shape[1:] != d.shape:
        raise ValueError(
            "mean_difference, covariance and F must have shapes (d,), (d, d) and "
            f"(k, d), got {d.shape}, {C.shape} and {F.shape}."
        )
    root = jnp.linalg.cholesky(C)
    G = C @ F.T + d[:, None] * (F @ d)[None] / 4
    # In these coordinates C is the identity and the formula is a projection.
    whiten = functools.partial(jax.scipy.linalg.solve_triangular, root, lower=True)
    wanted = whiten(d)
    rest = wanted - _onto(whiten(G), wanted)
    length = jnp.linalg.norm(rest)
    if is_known(length):
        if not np.isfinite(length):
            raise ValueError("covariance must be positive definite and finite.")
        if length <= 1e3 * jnp.finfo(d.dtype).eps * jnp.linalg.norm(wanted):
            raise ValueError(
                "mean_difference must not lie in the span of what F reveals: the "
                "classes differ only in the private attribute."
            )
    return jax.scipy.linalg.solve_triangular(root.T, rest / length, lower=False)


def _onto(A: jax.Array, x: jax.Array) -> jax.Array:
    """The projection of x ``[d]`` to the span of A's columns, repeated ones too."""
    # What is left out as rounding must not depend on the columns' lengths.
    length = jnp.max(jnp.abs(A), axis=0, keepdims=True)
    A = A / jnp.where(length > 0, length, 1)
    left, size, _ = jnp.linalg.svd(A, full_matrices=False)
    small = max(A.shape) * jnp.finfo(A.dtype).eps * size[0]
    return left @ jnp.where(size > small, left.T @ x, 0)
