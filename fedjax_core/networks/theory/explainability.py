"""Predictions that users can guess, and that do not hang on irrelevant attributes.

T ``[n, k, d]`` are the features of the unlabelled test points of every node, `guesses`
``[n, k]`` the user's for each; masks are bool, ``[n, k]`` for the test points that
exist and ``[n, m]`` for rows of X ``[n, m, d]`` and y ``[n, m]``, by default all.
Arrays of other shapes, nodes without any test point in `T` and test points that are not
finite raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 8.4 and 8.5.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, is_known
from fedjax_core.networks.oracles import Quadratic, least_squares_statistics
from fedjax_core.networks.theory.oversight import existing_rows, validation_error


def explainability(
    W: jax.Array, T: jax.Array, guesses: jax.Array, mask: ArrayLike | None = None
) -> jax.Array:
    """How far predictions are from what the users expect, mean squared; ``[n]``.

    Jung, eq. (177).

    Args:
      W: ``[n, d]``.
      T: ``[n, k, d]``, features of the unlabelled test points of every node.
      guesses: ``[n, k]``, the user's guess for each.
      mask: ``[n, k]`` bool, the test points that exist; by default all. A node without
        any gets NaN.
    """
    mask = _test_points(T, guesses, mask)
    return validation_error(W, T, guesses, mask)


def explain(
    local: Quadratic,
    T: jax.Array,
    guesses: jax.Array,
    rho: ArrayLike,
    mask: ArrayLike | None = None,
) -> Quadratic:
    """Adds rho times `explainability` to the local losses (Jung, eq. (178)).

    Args:
      local: the losses without.
      T: ``[n, k, d]``.
      guesses: ``[n, k]``.
      rho: >= 0; at 0 the plain fit, at infinity the fit to the guesses.
      mask: ``[n, k]`` bool, the test points that exist; by default all. A node without
        any keeps its loss.
    """
    check.non_negative(rho=rho)
    mask = _test_points(T, guesses, mask)
    penalty = least_squares_statistics(T, guesses, mask, allow_empty=True)
    return jax.tree.map(lambda a, b: a + rho * b, local, penalty)


def augment_by_guesses(
    X: jax.Array,
    y: jax.Array,
    T: jax.Array,
    guesses: jax.Array,
    rho: ArrayLike,
    mask: ArrayLike | None = None,
    test_mask: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same as `explain` as weighted data: guesses are labels of weight rho / k.

    Args:
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      T: ``[n, k, d]``.
      guesses: ``[n, k]``.
      rho: >= 0.
      mask: ``[n, m]`` bool, the rows of X that exist; by default all.
      test_mask: ``[n, k]`` bool, those of T.

    Returns:
      Features ``[n, m + k, d]``, labels and weights ``[n, m + k]``; a node's loss is
      the weighted sum of squared errors. Rows that don't exist are 0 and weigh 0.
    """
    check.non_negative(rho=rho)
    X, y = as_float(X), as_float(y)
    mask = existing_rows(X, y, mask)
    test_mask = _test_points(T, guesses, test_mask, "test_mask")
    rows = jnp.concatenate([mask, test_mask], 1)
    share = [part / jnp.maximum(part.sum(1), 1)[:, None] for part in (mask, test_mask)]
    labels = jnp.concatenate([y, guesses.astype(y.dtype)], 1)
    return (
        jnp.where(rows[..., None], jnp.concatenate([X, T], 1), 0),
        jnp.where(rows, labels, 0),
        jnp.concatenate([share[0], rho * share[1]], 1).astype(y.dtype),
    )


def add_flipped(
    X: ArrayLike, y: ArrayLike, column: int, mask: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Fairness by copies of all points with a +-1 attribute flipped, labels kept.

    The coefficient that least squares gives the attribute is then exactly 0. Jung,
    Section 8.5 and Fig. 8.4.

    Args:
      X: ``[n, m, d]``, or ``[m, d]`` of one node.
      y: the same without d.
      column: of the irrelevant attribute.
      mask: bool like y, the rows that exist and so are checked; by default all.

    Returns:
      ``[..., 2m, d]`` and ``[..., 2m]``, floats; row r has its copy in row m + r.

    Raises:
      ValueError: other shapes, or a column that does not exist or holds anything but -1
        and 1.
    """
    X, y, rows = _attribute(X, y, column, mask)
    known = (jnp.abs(X[..., column]) == 1) | ~rows
    if is_known(known) and not known.all():
        raise ValueError(f"column {column} must hold -1 and 1 only.")
    return _both(X, X.at[..., column].multiply(-1), y)


def replace_by_shifted(
    X: ArrayLike, y: ArrayLike, column: int, shift: jax.Array | float
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
      ``[..., 2m, d]`` and ``[..., 2m]``, floats; row r becomes rows r and m + r.
    """
    X, y, _ = _attribute(X, y, column, None)
    return _both(X.at[..., column].add(shift), X.at[..., column].add(-shift), y)


def _test_points(
    T: jax.Array, guesses: jax.Array, mask: ArrayLike | None, mask_name: str = "mask"
) -> jax.Array:
    if T.ndim != 3 or not T.shape[1]:
        raise ValueError(
            f"T must hold test points and have shape (n, k, d), got shape {T.shape}."
        )
    return existing_rows(T, guesses, mask, ("T", "guesses", mask_name))


def _attribute(
    X: ArrayLike, y: ArrayLike, column: int, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    X, y = as_float(X), jnp.asarray(y)
    rows = existing_rows(X, y, mask)
    if not 0 <= column < X.shape[-1]:
        raise ValueError(f"column must be in 0..{X.shape[-1] - 1}, got {column}.")
    return X, y, rows


def _both(a: jax.Array, b: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.concatenate([a, b], -2), jnp.concatenate([y, y], -1)
