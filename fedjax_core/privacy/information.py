r"""Mutual information, and the feature map that tells little of what is private.

What are no probabilities, or are out of the ranges given, raises ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 9.3.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from fedjax_core import check
from fedjax_core.privacy.calibration import probabilities

# Bell number 115,975: what `privacy_funnel` can try one by one.
_MAX_VALUES = 10


def mutual_information(joint: ArrayLike) -> float:
    """The mutual information of two variables with finitely many values, in nats.

    Args:
      joint: ``[a, b]`` probabilities of the pairs.

    Returns:
      A float >= 0, 0 for independent variables.

    References:
      Jung, Section 9.3, "Privacy Funnel".
    """
    return float(_information(probabilities("joint", joint, 2)))


def gaussian_mutual_information(correlation: ArrayLike) -> np.ndarray:
    """The mutual information of jointly normal pairs, -log(1 - correlation^2) / 2.

    Of correlations in [-1, 1], of any shape; in nats, `inf` at -1 and 1.
    """
    correlation = np.asarray(correlation, np.float64)
    check.each_in_range(-1, 1, correlation=correlation)
    with np.errstate(divide="ignore"):
        return -np.log1p(-(correlation**2)) / 2


class Funnel(NamedTuple):
    """A solution of the privacy funnel.

    Attributes:
      groups: ``[K]`` int, the new value of every value of x.
      leakage: I(s; groups[x]) in nats.
      utility: I(y; groups[x]) in nats.
    """

    groups: np.ndarray
    leakage: float
    utility: float


def privacy_funnel(joint: ArrayLike, at_least: ArrayLike) -> list[Funnel]:
    r"""The least leaking of all deterministic feature maps that keep enough.

    .. math::

      \min_\Phi I(s; \Phi(x)) \quad\text{such that}\quad I(y; \Phi(x)) \ge R

    solved by trying every way to put the values of x in groups; the book prints no
    solver. Random maps can do better. Jung, (183).

    Args:
      joint: ``[S, Y, K]`` probabilities of private attribute, label and feature, with
        K <= 10.
      at_least: the values of R, one number or ``[R]``, in nats.

    Returns:
      One solution for each R; of equally good ones that of the highest utility.

    Raises:
      ValueError: not probabilities, K > 10, or an R above I(y; x).
    """
    joint = probabilities("joint", joint, 3)
    num_values = joint.shape[2]
    if num_values > _MAX_VALUES:
        raise ValueError(
            f"joint must have at most {_MAX_VALUES} values of x, got {num_values}."
        )
    groups = _partitions(num_values)
    parts = groups[:, :, None] == np.arange(num_values)
    leakage = _information(np.einsum("sx,pxz->psz", joint.sum(1), parts))
    utility = _information(np.einsum("yx,pxz->pyz", joint.sum(0), parts))
    solutions = []
    for bound in np.atleast_1d(np.asarray(at_least, np.float64)):
        # Sums in another order must not exclude the identity at R = I(y; x).
        allowed = np.flatnonzero(utility >= bound - 1e-12)
        if not len(allowed):
            raise ValueError(
                f"at_least must be <= I(y; x) = {utility.max():.6g}, got {bound}."
            )
        order = np.lexsort((-utility[allowed], np.round(leakage[allowed], 12)))
        i = allowed[order[0]]
        solutions.append(Funnel(groups[i], float(leakage[i]), float(utility[i])))
    return solutions


def _information(joint: np.ndarray) -> np.ndarray:
    """Mutual information of the last two axes, by the others."""
    rows, columns = joint.sum(-1, keepdims=True), joint.sum(-2, keepdims=True)
    divergence = special.rel_entr(joint, rows * columns).sum((-2, -1))
    return np.maximum(divergence, 0)


def _partitions(size: int) -> np.ndarray:
    """All ways to group `size` things: rows where each group is first seen in order."""
    rows = np.zeros((1, 1), np.int64)
    for _ in range(size - 1):
        choices = rows.max(1) + 2
        group = np.concatenate([np.arange(n) for n in choices])
        rows = np.column_stack([np.repeat(rows, choices, 0), group])
    return rows
