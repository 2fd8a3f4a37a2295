"""Regularisation by other means: augmented data.

The third way, a bound on the parameters, is `projections.ball`. X is ``[m, d]``, y
``[m]`` and alpha >= 0; others, and X or y that are not finite, raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 2.5 and Exercises 2.4 and
  2.5.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.networks.theory.erm import regression_data
from fedjax_core.types import Key


def noisy_copies(
    key: Key, X: ArrayLike, y: ArrayLike, alpha: ArrayLike, copies: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Data points with N(0, alpha I) added to the features, each `copies` times.

    In expectation their average squared error is the ridge objective at alpha, exactly.

    Args:
      key: of the noise.
      X: ``[m, d]``.
      y: ``[m]``.
      alpha: variance of the noise, >= 0.
      copies: noisy copies of every data point; the originals are not among them.

    Returns:
      X ``[copies * m, d]`` and y ``[copies * m]``.
    """
    X, y, _ = regression_data(X, y)
    check.positive_int(copies=copies)
    check.non_negative(alpha=alpha)
    X, y = jnp.tile(X, (copies, 1)), jnp.tile(y, copies)
    return X + jnp.sqrt(alpha) * jax.random.normal(key, X.shape, X.dtype), y


def ridge_rows(
    X: ArrayLike, y: ArrayLike, alpha: ArrayLike, w_ref: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Appends d rows that turn plain linear regression into ridge regression.

    The rows are sqrt(m alpha) e_j with labels sqrt(m alpha) w_ref_j. The average
    squared error of all m + d rows, times (m + d) / m, is the ridge objective.

    Args:
      X: ``[m, d]``.
      y: ``[m]``.
      alpha: >= 0.
      w_ref: ``[d]``, what the penalty pulls to; by default the origin.

    Returns:
      X ``[m + d, d]`` and y ``[m + d]``.
    """
    X, y, ref = regression_data(X, y, w_ref)
    check.non_negative(alpha=alpha)
    m, d = X.shape
    scale = jnp.sqrt(m * jnp.asarray(alpha, X.dtype))
    rows = scale * jnp.eye(d, dtype=X.dtype)
    return jnp.concatenate([X, rows]), jnp.concatenate([y, scale * ref])


def interpolate(
    X: ArrayLike, y: ArrayLike, steps: int = 100
) -> tuple[jax.Array, jax.Array]:
    """For each ordered pair of data points, the points on the way to the other.

    From z to z' these are z + (z' - z) r / steps for r = 0..steps-1, features and label
    alike; the end, z', belongs to the pair in the other direction.

    Returns X ``[steps * m * (m - 1), d]`` and y, pair by pair.
    """
    X, y, _ = regression_data(X, y)
    check.positive_int(steps=steps)
    m, d = X.shape
    start, end = np.nonzero(~np.eye(m, dtype=bool))
    Z = jnp.concatenate([X, y[:, None]], 1)
    r = jnp.arange(steps, dtype=X.dtype)[None, :, None] / steps
    points = (Z[start][:, None] + (Z[end] - Z[start])[:, None] * r).reshape(-1, d + 1)
    return points[:, :d], points[:, d]
