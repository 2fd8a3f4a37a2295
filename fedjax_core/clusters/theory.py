r"""What noise in clients' gradients leaves of their separation.

The relative noise of client i, whose distribution has the risk :math:`R`, is
:math:`\gamma_i = \lVert \nabla R - \nabla r_i \rVert / \lVert \nabla R \rVert < 1`.
Angles add up: with :math:`\gamma = \sin a` the noise turns a gradient by at most a.

All functions take numbers or arrays that broadcast, and compute in float64.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, Theorem 3, Corollary 2 and Lemmas 5 to 7.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_core import check


def noisy_cosine(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    r"""H(x, y), the smallest cosine that noise leaves of two equal gradients.

    .. math::

      H(x, y) = -xy + \sqrt{1 - x^2} \sqrt{1 - y^2} = \cos(\arcsin x + \arcsin y)

    Lemma 5: :math:`\cos(v + X, v + Y) \ge H(\lVert X \rVert / \lVert v \rVert, \lVert
    Y \rVert / \lVert v \rVert)`.
    """
    check.each_in_range(0, 1, x=x, y=y)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return -x * y + np.sqrt(1 - x**2) * np.sqrt(1 - y**2)


def raised_cosine(cosine: ArrayLike, h: ArrayLike) -> np.ndarray:
    r"""The largest cosine that noise makes of two gradients of cosine c.

    Lemma 6: :math:`\cos(v + X, w + Y) \le \cos(\arccos c - \arccos h)` for :math:`c =
    \cos(v, w) \le h = H(\lVert X \rVert / \lVert v \rVert, \lVert Y \rVert / \lVert w
    \rVert)`, see `noisy_cosine`, else 1. The thesis (B.12) prints the norm of v below
    that of Y, with which it does not hold.
    """
    # Computed cosines may be rounded past 1.
    check.each_in_range(-1 - 1e-9, 1 + 1e-9, cosine=cosine, h=h)
    c, h = (np.clip(np.asarray(v, np.float64), -1, 1) for v in (cosine, h))
    bound = c * h + np.sqrt(1 - c**2) * np.sqrt(1 - h**2)
    return np.where(c <= h, bound, 1.0)


def fan_cosine(num_distributions: ArrayLike) -> np.ndarray:
    r"""Lemma 7: :math:`\cos(\pi / (K - 1))`, for K vectors that balance.

    K vectors of which a positive combination is 0 can be cut in two with no cosine
    across above it: were all edges of their maximum spanning tree shorter, as angles,
    the walk along it and back would be a closed curve on the sphere of length below
    :math:`2 \pi`, which lies in an open hemisphere.
    """
    check.each_in_range(2, np.inf, num_distributions=num_distributions)
    return np.cos(np.pi / (np.asarray(num_distributions, np.float64) - 1))


def cross_bound(gamma: ArrayLike, num_distributions: int) -> float:
    """Theorem 3: at a stationary point the best cut has no larger similarity across.

    Of relative noise ``[M]`` of the clients, from K >= 2 distributions.
    """
    gamma = np.asarray(gamma, np.float64)
    h = noisy_cosine(gamma[:, None], gamma)
    return float(raised_cosine(fan_cosine(num_distributions), h).max())


def intra_bound(gamma: ArrayLike, truth: ArrayLike) -> float:
    """Theorem 3: clients of one distribution have no smaller similarity.

    Of relative noise ``[M]`` of the clients, and ``[M]``, the distribution of each.
    """
    gamma, truth = np.asarray(gamma, np.float64), np.asarray(truth)
    check.rows(len(gamma), truth=truth)
    same = truth[:, None] == truth
    np.fill_diagonal(same, False)
    return float(noisy_cosine(gamma[:, None], gamma).min(where=same, initial=1.0))


def tolerated_noise(num_distributions: ArrayLike) -> np.ndarray:
    r"""The noise below which separation is certain, if all clients have it.

    :math:`\gamma < \sin(\pi / (4 (K - 1)))`, which is where the bounds of Theorem 3
    leave a gap.
    """
    check.each_in_range(2, np.inf, num_distributions=num_distributions)
    return np.sin(np.pi / 4 / (np.asarray(num_distributions, np.float64) - 1))


def alpha_threshold(gamma_max: Any) -> Any:
    r"""The similarity that noise up to `gamma_max` leaves within a distribution.

    :math:`H(\gamma_i, \gamma_j) \ge 1 - 2 \gamma_{max}^2`: what is cut below it are two
    distributions. 0.7 gives 0.02. Numbers may be traced.
    """
    return 1 - 2 * gamma_max**2
