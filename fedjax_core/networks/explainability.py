"""Predictions that users can guess, and that do not hang on irrelevant attributes.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 8.4 and 8.5.
"""

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.networks.oracles import Quadratic, least_squares_statistics


def explainability(W: jax.Array, T: jax.Array, guesses: jax.Array) -> jax.Array:
    """How far predictions are from what the users expect, mean squared; ``[n]``.

    Args:
      W: ``[n, d]``.
      T: ``[n, k, d]``, features of the unlabelled test points of every node.
      guesses: ``[n, k]``, the user's guess for each.

    References:
      Jung, "Federated Learning: From Theory to Practice", eq. (177).
    """
    return ((guesses - jnp.einsum("nkd,nd->nk", T, W)) ** 2).mean(1)


def explain(
    local: Quadratic, T: jax.Array, guesses: jax.Array, rho: ArrayLike
) -> Quadratic:
    """Adds rho times `explainability` to the local losses.

    Args:
      local: the losses without.
      T: ``[n, k, d]``.
      guesses: ``[n, k]``.
      rho: >= 0; at 0 the plain fit, at infinity the fit to the guesses.

    Raises:
      ValueError: rho is negative, or there is no test point.

    References:
      Jung, "Federated Learning: From Theory to Practice", eq. (178).
    """
    check.non_negative(rho=rho)
    if not T.shape[1]:
        raise ValueError(f"T must hold test points, got shape {T.shape}.")
    penalty = least_squares_statistics(T, guesses)
    return jax.tree.map(lambda a, b: a + rho * b, local, penalty)


def augment_by_guesses(
    X: jax.Array, y: jax.Array, T: jax.Array, guesses: jax.Array, rho: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same as `explain` as weighted data: guesses are labels of weight rho / k.

    Args:
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      T: ``[n, k, d]``.
      guesses: ``[n, k]``.
      rho: >= 0.

    Returns:
      Features ``[n, m + k, d]``, labels and weights ``[n, m + k]``; a node's loss is
      the weighted sum of squared errors.
    """
    check.non_negative(rho=rho)
    own = jnp.full(y.shape, 1 / y.shape[1], y.dtype)
    extra = jnp.full(guesses.shape, rho / guesses.shape[1], y.dtype)
    return (
        jnp.concatenate([X, T], 1),
        jnp.concatenate([y, guesses.astype(y.dtype)], 1),
        jnp.concatenate([own, extra], 1),
    )


def add_flipped(X: jax.Array, y: jax.Array, column: int) -> tuple[jax.Array, jax.Array]:
    """Fairness by copies of all points with a +-1 attribute flipped, labels kept.

    The coefficient that least squares gives the attribute is then exactly 0.

    Args:
      X: ``[n, m, d]``, or ``[m, d]`` of one node.
      y: the same without d.
      column: of the irrelevant attribute.

    Returns:
      ``[..., 2m, d]`` and ``[..., 2m]``.

    Raises:
      ValueError: the column does not exist or holds anything but -1 and 1.

    References:
      Jung, "Federated Learning: From Theory to Practice", Section 8.5 and Fig. 8.4.
    """
    _check_column(X, column)
    values = X[..., column]
    if not isinstance(X, Tracer) and not (jnp.abs(values) == 1).all():
        raise ValueError(f"column {column} must hold -1 and 1 only.")
    return _both(X, X.at[..., column].multiply(-1), y)


def replace_by_shifted(
    X: jax.Array, y: jax.Array, column: int, shift: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Replaces all points by two copies with the attribute moved by +-shift.

    Least squares then has the extra penalty shift^2 w_j^2 on the attribute's
    coefficient.

    Args:
      X: ``[n, m, d]``, or ``[m, d]`` of one node.
      y: the same without d.
      column: of the irrelevant attribute.
      shift: s.

    Returns:
      ``[..., 2m, d]`` and ``[..., 2m]``.

    Raises:
      ValueError: the column does not exist.
    """
    _check_column(X, column)
    return _both(X.at[..., column].add(shift), X.at[..., column].add(-shift), y)


def _check_column(X: jax.Array, column: int) -> None:
    if not 0 <= column < X.shape[-1]:
        raise ValueError(f"column must be in 0..{X.shape[-1] - 1}, got {column}.")


def _both(a: jax.Array, b: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.concatenate([a, b], -2), jnp.concatenate([y, y], -1)
