r"""Reading a node's data out of the gradients or parameters that it sends.

Alice trains with one neighbour, Bob, on the local loss
:math:`f(w) = w^\top Q_A w + q_A^\top w + c`. Bob picks what he sends, watches what
comes back, and after d + 1 rounds knows Q_A and q_A exactly: for linear regression the
second moments of her features and their products with her labels. Comparing these with
those of known datasets tells where Alice is.

Arrays of other shapes or not finite, too few independent points and arguments out of
the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 9 and 10.2, Exercises
  9.1 and 10.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import check_finite


class Recovered(NamedTuple):
    """What there is to know of a loss w'Qw + q'w + c without c.

    Attributes:
      Q: ``[d, d]`` float64, symmetric. Of least squares X'X/m: the features up to an
        orthogonal matrix from the left.
      q: ``[d]`` float64, -2 X'y/m.
    """

    Q: np.ndarray
    q: np.ndarray


def from_fedrelax(
    sent: ArrayLike, replies: ArrayLike, alpha: float, weight: float = 1.0
) -> Recovered:
    r"""Recovers Alice's loss from her answers as a node of FedRelax.

    With one neighbour her update is affine in what that sends (Jung, Alg. 11, (123)),

    .. math::

      w_A = (Q_A + \alpha A I)^{-1} (-q_A / 2 + \alpha A\, w_B) .

    Args:
      sent: ``[k, d]`` what Bob sent, k >= d + 1.
      replies: ``[k, d]`` what Alice answered to each.
      alpha: the strength of GTVMin, > 0.
      weight: A of their edge, > 0.

    Raises:
      ValueError: arrays of other shapes or not finite, or fewer than d + 1 affinely
        independent probes or replies.
    """
    check.positive(alpha=alpha, weight=weight)
    coupling = alpha * weight
    slope, offset = _affine(sent=sent, replies=replies)
    _check_independent("replies", np.asarray(replies, np.float64))
    inverse = np.linalg.inv(slope)
    Q = coupling * (inverse - np.eye(len(slope)))
    return Recovered((Q + Q.T) / 2, -2 * coupling * inverse @ offset)


def from_gradients(points: ArrayLike, gradients: ArrayLike) -> Recovered:
    """Recovers a quadratic loss from its gradients 2 Q w + q at known points.

    Both are ``[k, d]``, with d + 1 affinely independent points or more.
    """
    slope, q = _affine(points=points, gradients=gradients)
    return Recovered((slope + slope.T) / 4, q)


def fedgd_gradients(
    sent: ArrayLike, seen: ArrayLike, eta: float, alpha: float, weight: float = 1.0
) -> np.ndarray:
    r"""The gradients of Alice's loss that her steps of FedGD give away.

    .. math::

      w_A^{t+1} = w_A^t - \eta \bigl(\nabla f(w_A^t) + 2 \alpha A (w_A^t - w_B^t) \bigr)

    (Jung, Alg. 5 and (130), whose printed operator lacks alpha).

    Args:
      sent: ``[k, d]`` what Bob sent in each round.
      seen: ``[k + 1, d]`` Alice's parameters, from before the first round on.
      eta: the learning rate, > 0.
      alpha: the strength of GTVMin, > 0.
      weight: A of their edge, > 0.

    Returns:
      ``[k, d]`` float64, at the points ``seen[:-1]``; for `from_gradients`.
    """
    check.positive(eta=eta, alpha=alpha, weight=weight)
    sent, seen = np.asarray(sent, np.float64), np.asarray(seen, np.float64)
    if sent.ndim != 2 or seen.shape != (len(sent) + 1, sent.shape[1]):
        raise ValueError(
            "sent and seen must have shapes (k, d) and (k + 1, d), got "
            f"{sent.shape} and {seen.shape}."
        )
    before, after = seen[:-1], seen[1:]
    return (before - after) / eta - 2 * alpha * weight * (before - sent)


def invert_gradients(gradients: ArrayLike, step_size: float) -> Recovered:
    """Recovers a quadratic loss from the gradients of gradient descent from 0.

    They soon point the same way: use float64.

    Args:
      gradients: ``[T, d]`` with T >= d + 1, at w_0 = 0 and the steps that follow.
      step_size: known to the attacker, > 0.

    Raises:
      ValueError: as `from_gradients`.
    """
    check.positive(step_size=step_size)
    g = np.asarray(gradients, np.float64)
    return from_gradients(step_size * (g - np.cumsum(g, axis=0)), g)


def invert_example(
    g0: jax.Array, g1: jax.Array, step_size: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    r"""Reads the only example of a node out of its first two gradients.

    .. math::

      \lVert x \rVert^2 = \frac{1 - g_1^\top g_0 / \lVert g_0 \rVert^2}{2 \eta},
      \qquad x = \lVert x \rVert \frac{g_0}{\lVert g_0 \rVert},
      \qquad y = -\frac{\lVert g_0 \rVert}{2 \lVert x \rVert},

    or both with the other sign: x ``[d]`` and y ``[]``, of g0 ``[d]`` at 0, which is
    not zero, and g1 ``[d]`` after one step of size eta.
    """
    check.positive(step_size=step_size)
    norm = jnp.linalg.norm(g0)
    length = jnp.sqrt((1 - g1 @ g0 / norm**2) / (2 * step_size))
    return length * g0 / norm, -norm / (2 * length)


def nearest(loss: Recovered, Q: ArrayLike, q: ArrayLike) -> int:
    """Which of the known datasets has the loss that was recovered.

    Args:
      loss: what Bob recovered.
      Q: ``[n, d, d]`` of known datasets, second moments of their features, say.
      q: ``[n, d]`` of the same.

    Returns:
      The index of the smallest relative difference.
    """
    n = len(np.asarray(Q))
    known = np.concatenate([np.reshape(Q, (n, -1)), np.reshape(q, (n, -1))], 1)
    found = np.concatenate([loss.Q.ravel(), loss.q])
    if known.shape[1:] != found.shape:
        d = len(loss.q)
        raise ValueError(
            f"Q and q must have shapes (n, {d}, {d}) and (n, {d}), got {np.shape(Q)} "
            f"and {np.shape(q)}."
        )
    away = np.linalg.norm(known - found, axis=1)
    return int(np.argmin(away / np.maximum(np.linalg.norm(known, axis=1), 1e-300)))


def _affine(**arrays: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """M ``[d, d]`` and b ``[d]`` of y = M x + b, by least squares from x and y."""
    x, y = (np.asarray(a, np.float64) for a in arrays.values())
    if x.ndim != 2 or x.shape != y.shape:
        raise ValueError(
            f"{' and '.join(arrays)} must have shape (k, d), got {x.shape} and "
            f"{y.shape}."
        )
    check_finite(**arrays)
    _check_independent(next(iter(arrays)), x)
    slope = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0].T
    return slope, y.mean(0) - slope @ x.mean(0)


def _check_independent(name: str, x: np.ndarray) -> None:
    d, rank = x.shape[1], 0
    if x.size:
        # What centring leaves of equal points is rounding, and small next to x itself.
        small = max(x.shape) * np.finfo(np.float64).eps * np.linalg.norm(x, 2)
        rank = np.linalg.matrix_rank(x - x.mean(0), small)
    if rank < d:
        raise ValueError(
            f"{name} must hold {d + 1} affinely independent points for {d} parameters, "
            f"got {rank + 1}."
        )
