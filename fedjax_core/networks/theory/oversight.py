"""Human oversight: validation errors per node, and uncertainty.

To watch them during a run and keep them, give `networks.run` an `evaluate` with them. W
is ``[n, d]``, X ``[n, m, d]``, y ``[n, m]`` and `mask` ``[n, m]`` bool, the rows that
exist, by default all; arrays of other shapes raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 8.1 and 8.4.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core.arrays import as_mask
from fedjax_core.networks.graph import check_shapes


def validation_error(
    W: jax.Array, X: jax.Array, y: jax.Array, mask: ArrayLike | None = None
) -> jax.Array:
    """The mean squared error of linear models.

    Args:
      W: ``[n, d]``.
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      mask: ``[n, m]`` bool, the rows that exist; by default all.

    Returns:
      ``[n]``; to watch in every round, and a measure of uncertainty to tell users. NaN
      for a node without rows.
    """
    errors, rows = _residuals(W, X, y, mask)
    return jnp.mean(errors**2, axis=1, where=rows)


def residual_variance(
    W: jax.Array, X: jax.Array, y: jax.Array, mask: ArrayLike | None = None
) -> jax.Array:
    """Estimates the variance of a label given its features.

    The variance of y - w'x on data the model was not fit to: the error of a
    model that is right but for a constant.

    Args:
      W: ``[n, d]``.
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      mask: ``[n, m]`` bool, the rows that exist; by default all.

    Returns:
      ``[n]``; NaN for a node with fewer than two rows.
    """
    errors, rows = _residuals(W, X, y, mask)
    return jnp.var(errors, axis=1, ddof=1, where=rows)


def _residuals(
    W: jax.Array, X: jax.Array, y: jax.Array, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """Labels minus predictions, and which rows exist; each ``[n, m]``."""
    rows = existing_rows(X, y, mask)
    check_shapes("(n, d), (n, m, d) and (n, m)", W=W, X=X, y=y)
    # Not only the result: the slope of what is NaN would be NaN.
    X = jnp.where(rows[..., None], X, 0)
    return jnp.where(rows, y, 0) - jnp.einsum("nmd,nd->nm", X, W), rows


def existing_rows(
    X: jax.Array,
    y: jax.Array,
    mask: ArrayLike | None,
    names: tuple[str, str, str] = ("X", "y", "mask"),
) -> jax.Array:
    """Which rows of X ``[..., d]`` exist, bool like y ``[...]``; by default all.

    Raises:
      ValueError: other shapes, of what the caller calls by `names`.
    """
    if y.shape != X.shape[:-1]:
        raise ValueError(
            f"{names[1]} must have the shape of {names[0]} without d, "
            f"{X.shape[:-1]}, got {y.shape}."
        )
    return as_mask(names[2], mask, y.shape)
