"""Privacy attacks: copying a node's parameters, and its data out of its gradients.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 10.2 and Exercise 10.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check


class Inverted(NamedTuple):
    """What gradients give away of f(w) = w'Qw + q'w + c.

    Attributes:
      Q: ``[d, d]``, X'X/m: the features up to an orthogonal matrix from the left.
      q: ``[d]``, -2 X'y/m.
    """

    Q: np.ndarray
    q: np.ndarray


def invert_gradients(gradients: ArrayLike, step_size: float) -> Inverted:
    r"""Reads a least-squares problem out of the gradients of gradient descent from 0.

    The first gradient is q, and :math:`g_t - g_{t+1} = 2 \eta Q g_t`, so that d + 1 of
    them are enough. The gradients soon point the same way: use float64.

    Args:
      gradients: ``[T, d]`` with T >= d + 1, at w_0 = 0 and the steps that follow.
      step_size: eta, known to the attacker.

    Raises:
      ValueError: too few gradients, or such that do not span all d dimensions.

    References:
      Jung, "Federated Learning: From Theory to Practice", Exercise 10.1.
    """
    check.positive(step_size=step_size)
    g = np.asarray(gradients)
    if g.ndim != 2 or g.shape[0] <= g.shape[1]:
        raise ValueError(
            f"gradients must have shape (T, d) with T >= d + 1, got {g.shape}."
        )
    rank = np.linalg.matrix_rank(g[:-1])
    if rank < g.shape[1]:
        raise ValueError(
            f"gradients must span all {g.shape[1]} dimensions, got rank {rank}."
        )
    change = (g[:-1] - g[1:]) / (2 * step_size)
    Q = np.linalg.lstsq(g[:-1], change, rcond=None)[0]
    return Inverted((Q + Q.T) / 2, g[0])


def invert_example(
    g0: jax.Array, g1: jax.Array, step_size: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    r"""Reads the only example of a node out of its first two gradients.

    .. math::

      \lVert x \rVert^2 = \frac{1 - g_1^\top g_0 / \lVert g_0 \rVert^2}{2 \eta},
      \qquad x = \lVert x \rVert \frac{g_0}{\lVert g_0 \rVert},
      \qquad y = -\frac{\lVert g_0 \rVert}{2 \lVert x \rVert},

    or both with the other sign.

    Args:
      g0: ``[d]``, the gradient at 0; not zero.
      g1: ``[d]``, after one step.
      step_size: eta.

    Returns:
      x ``[d]`` and y ``[]``.

    References:
      Jung, "Federated Learning: From Theory to Practice", Exercise 10.1.
    """
    check.positive(step_size=step_size)
    norm = jnp.linalg.norm(g0)
    length = jnp.sqrt((1 - g1 @ g0 / norm**2) / (2 * step_size))
    return length * g0 / norm, -norm / (2 * length)
