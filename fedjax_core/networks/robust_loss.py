"""Robust local losses: least absolute deviations."""

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from scipy.optimize import linprog


class Deviations(NamedTuple):
    """A fit by least absolute deviations.

    Attributes:
      w: ``[d]`` float64.
      objective: the sum of absolute errors.
      gap: the objective minus that of the dual solution; 0 up to rounding.
    """

    w: np.ndarray
    objective: float
    gap: float


def least_absolute_deviations(X: ArrayLike, y: ArrayLike) -> Deviations:
    r"""Minimises :math:`\sum_r |y_r - x_r^\top w|` by linear programming, in float64.

    The fit passes through d of the points (where X has rank d), and moving another
    point's label changes nothing as long as it stays on its side. A squared loss has
    every label move the fit.

    Args:
      X: ``[m, d]``.
      y: ``[m]``.

    Raises:
      ValueError: other shapes, no rows, or values that are not finite.

    References:
      Jung, "Federated Learning: From Theory to Practice", Exercise 10.4.
    """
    X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
    if X.ndim != 2 or y.shape != X.shape[:1] or not len(y):
        raise ValueError(
            f"X and y must have shapes (m, d) and (m,), m >= 1, got {X.shape} and "
            f"{y.shape}."
        )
    if not (np.isfinite(X).all() and np.isfinite(y).all()):
        raise ValueError("X and y must be finite.")
    m, d = X.shape
    # Errors as the difference of their positive and negative parts.
    found = linprog(
        np.r_[np.zeros(d), np.ones(2 * m)],
        A_eq=np.c_[X, np.eye(m), -np.eye(m)],
        b_eq=y,
        bounds=[(None, None)] * d + [(0, None)] * (2 * m),
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"the linear program failed: {found.message}")
    w = found.x[:d]
    objective = float(np.abs(y - X @ w).sum())
    dual = np.clip(found.eqlin.marginals, -1, 1)
    return Deviations(w, objective, objective - float(dual @ y))
