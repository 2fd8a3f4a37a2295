r"""Learning on one device: empirical risk, linear and ridge regression.

The base case that networks of devices extend. Linear regression with features
:math:`X` and labels :math:`y` minimises

.. math::

  f(w) = \frac1m \|y - Xw\|^2 + \alpha \|w - w_{\mathrm{ref}}\|^2
       = w^\top Q w + q^\top w + c .

X is ``[m, d]``, y ``[m]``, alpha >= 0 and w_ref ``[d]``, by default the origin. Data
without rows, of other shapes or not finite, and arguments out of the ranges given raise
ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Chapter 2.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, check_finite, is_known
from fedjax_core.linalg import pinv
from fedjax_core.networks.graph import check_shapes
from fedjax_core.networks.oracles import Quadratic
from fedjax_core.types import Key


def linear_risk(
    X: ArrayLike, y: ArrayLike, alpha: ArrayLike = 0.0, w_ref: ArrayLike | None = None
) -> Quadratic:
    """The ridge objective of one device as a quadratic: Q, q and c.

    Q = X'X / m + alpha I and q = -2 X'y / m - 2 alpha w_ref (Jung, (6), (24) and
    Exercise 2.5).

    Args:
      X: ``[m, d]`` features.
      y: ``[m]`` labels.
      alpha: strength of the penalty, >= 0.
      w_ref: ``[d]``, what it pulls to; by default the origin.

    Returns:
      ``[d, d]``, ``[d]`` and ``[]``.
    """
    X, y, ref = regression_data(X, y, w_ref)
    check.non_negative(alpha=alpha)
    m, d = X.shape
    Q = X.T @ X / m + alpha * jnp.eye(d, dtype=X.dtype)
    q = -2 * X.T @ y / m - 2 * alpha * ref
    return Quadratic(Q, q, y @ y / m + alpha * ref @ ref)


def empirical_risk(w: ArrayLike, risk: Quadratic) -> jax.Array:
    """The quadratic w'Qw + q'w + c at w ``[d]``."""
    w = jnp.asarray(w)
    return w @ risk.Q @ w + risk.q @ w + risk.c


def least_squares_step(
    w: ArrayLike, X: ArrayLike, y: ArrayLike, eta: ArrayLike
) -> jax.Array:
    """A gradient step of linear regression, about m d operations.

    w + eta (2 / m) X'(y - Xw), which is w - eta (2Qw + q); Jung, (8).
    """
    X, y, w = regression_data(X, y, w)
    return w + eta * 2 / X.shape[0] * (X.T @ (y - X @ w))


def ridge(
    X: ArrayLike, y: ArrayLike, alpha: ArrayLike = 0.0, w_ref: ArrayLike | None = None
) -> jax.Array:
    """The minimiser of `linear_risk`, ``[d]``, whatever the units of the features.

    With alpha = 0 it is linear regression. Where X lacks full column rank that has many
    minimisers, and the result is the one nearest to w_ref, pinv(X) y without one. At
    alpha = 0 it has first derivatives in alpha only. Jung, Sections 2.2 and 2.5.

    Args:
      X: ``[m, d]``.
      y: ``[m]``.
      alpha: >= 0; may be traced, to sweep over it.
      w_ref: ``[d]``.
    """
    X, y, ref = regression_data(X, y, w_ref)
    check.non_negative(alpha=alpha)
    return ref + _ridge(X, y - X @ ref, jnp.asarray(alpha, X.dtype))


@jax.custom_jvp
def _ridge(X: jax.Array, y: jax.Array, alpha: jax.Array) -> jax.Array:
    return jnp.matmul(_inverse(X, alpha)[:, : len(y)], y, precision="highest")


@_ridge.defjvp
def _ridge_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """From (X'X + m alpha I) w = X'y; how w turns where that is singular comes last."""
    (X, y, alpha), (dX, dy, dalpha) = primals, tangents
    m = len(y)
    P = _inverse(X, alpha)
    with jax.default_matmul_precision("highest"):
        w = P[:, :m] @ y
        right = dX.T @ (y - X @ w) + X.T @ (dy - dX @ w) - m * dalpha * w
        turn = dX.T @ (P[:, :m].T @ w)
        rank = jnp.trace(P[:, :m] @ X) + jnp.sqrt(m * alpha) * jnp.trace(P[:, m:])
        full = rank > X.shape[1] - 0.5
        free = jnp.where(full, 0, turn - P[:, :m] @ (X @ turn))
        return w, P @ (P.T @ right) + free


def _inverse(X: jax.Array, alpha: jax.Array) -> jax.Array:
    """Of X with the penalty as d more rows (Jung, Exercise 2.3); ``[d, m + d]``."""
    m, d = X.shape
    rows = jnp.sqrt(m * alpha) * jnp.eye(d, dtype=X.dtype)
    return pinv(jnp.concatenate([X, rows]))


def sample_mean(y: ArrayLike) -> jax.Array:
    """The best constant prediction of y ``[m]``, its mean (Jung, (9))."""
    y = as_float(y)
    if y.ndim != 1 or not len(y):
        raise ValueError(f"y must have shape (m,) with m >= 1, got {y.shape}.")
    check_finite(y=y)
    return y.mean()


def linear_data(
    key: Key, m: int, w_true: ArrayLike, noise_std: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Draws y = Xw + noise with features N(0, I) and noise N(0, noise_std^2).

    Jung, (11).

    Args:
      key: of the draw.
      m: rows.
      w_true: ``[d]``.
      noise_std: >= 0.

    Returns:
      X ``[m, d]`` and y ``[m]``.
    """
    check.positive_int(m=m)
    check.non_negative(noise_std=noise_std)
    w = as_float(w_true)
    feature_key, noise_key = jax.random.split(key)
    X = jax.random.normal(feature_key, (m, len(w)), w.dtype)
    return X, X @ w + noise_std * jax.random.normal(noise_key, (m,), w.dtype)


def expected_risk(w: jax.Array, w_true: jax.Array, noise_std: ArrayLike) -> jax.Array:
    """The risk of w on `linear_data`: ||w_true - w||^2 + noise_std^2.

    At w_true it is the Bayes risk, the baseline that nobody beats (Jung, (12)).
    """
    return ((w_true - w) ** 2).sum() + noise_std**2


def estimation_error_bound(
    X: ArrayLike, noise: ArrayLike, *, tight: bool = True
) -> jax.Array:
    """A bound on ||w - w_true||^2 of linear regression on y = X w_true + noise.

    ||e||^2 / l1(Q)^2 with e = -(2 / m) X' noise stands in the book. It is loose by 4:
    since w - w_true = -Q^-1 e / 2, a quarter of it holds as well, the default here.
    Jung, Prop. 2.1.

    `tight` takes the quarter.

    Raises:
      ValueError: also where Q = X'X / m is singular.
    """
    X, noise, _ = regression_data(X, noise)
    m, d = X.shape
    inverse = pinv(X)
    rank = jnp.einsum("dm,md->", inverse, X, precision="highest")
    if is_known(rank) and rank < d - 0.5:
        raise ValueError(
            f"X must have full column rank, got a singular X'X for shape {X.shape}."
        )
    # The largest singular value of the inverse is one over the smallest of X.
    least = 1 / (m * jnp.linalg.norm(inverse, 2) ** 2)
    singular = rank < d - 0.5
    e = -2 / m * (X.T @ noise)
    bound = (0.25 if tight else 1.0) * (e @ e) / jnp.where(singular, 1, least) ** 2
    return jnp.where(singular, jnp.inf, bound)


def regression_data(
    X: ArrayLike, y: ArrayLike, w_ref: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checked X ``[m, d]``, y ``[m]`` and w_ref ``[d]``, 0 if it is None.

    Raises:
      ValueError: no rows, other shapes, or values that are not finite.
    """
    X, y = as_float(X), as_float(y)
    if X.ndim != 2 or not X.shape[0] or y.shape != X.shape[:1]:
        raise ValueError(
            "X and y must have shapes (m, d) and (m,) with m >= 1, got "
            f"{X.shape} and {y.shape}."
        )
    d = X.shape[1]
    ref = jnp.zeros(d, X.dtype) if w_ref is None else as_float(w_ref)
    check_shapes(f"({d},)", w_ref=ref)
    check_finite(X=X, y=y, w_ref=ref)
    return X, y, ref
