r"""Losses on the way between models: planes through three of them, lines, barriers.

For models :math:`w_1, w_2, w_3` as vectors, with :math:`u = w_2 - w_1` and :math:`v`
what of :math:`w_3 - w_1` is at right angles to it,

.. math::

  v = w_3 - w_1 - \frac{\langle w_3 - w_1, u \rangle}{\|u\|^2} u ,

the plane through them is :math:`w_1 + x \hat u + y \hat v`, with unit vectors.

References:
  Garipov et al., "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs",
  NeurIPS 2018, appendix on visualisation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from numpy.typing import ArrayLike

from fedjax_core.types import Params, PyTree


class Plane(NamedTuple):
    """A plane in the space of models, see `plane`.

    Attributes:
      origin: the first model.
      across: direction of x, of norm 1.
      up: direction of y, of norm 1, at right angles to it.
      corners: ``[3, 2]``, where the models stand.
    """

    origin: PyTree
    across: PyTree
    up: PyTree
    corners: np.ndarray

    def at(self, x: Any, y: Any) -> PyTree:
        """The model at a point."""
        return jax.tree.map(
            lambda o, a, u: (o + x * a + y * u).astype(o.dtype),
            self.origin,
            self.across,
            self.up,
        )


def plane(first: PyTree, second: PyTree, third: PyTree) -> Plane:
    """The plane through three models, computed in float64.

    Args:
      first: trained parameters.
      second: of the same structure, as is `third`.
      third: see there.

    Raises:
      ValueError: the three lie on a line.
    """
    flat, tree = ravel_pytree(first)
    one, two, three = (
        np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(w)])
        for w in (first, second, third)
    )
    u, w = two - one, three - one
    width = np.linalg.norm(u)
    u = u / (width or 1)
    along = w @ u
    v = w - along * u
    height = np.linalg.norm(v)
    if not width or height <= 1e-6 * np.linalg.norm(w):
        raise ValueError("first, second and third must not lie on a line.")

    across, up = (tree(jnp.asarray(x, flat.dtype)) for x in (u, v / height))
    corners = np.array([[0, 0], [width, 0], [along, height]])
    return Plane(first, across, up, corners)


def landscape(
    over: Plane, loss: Callable[[Params], jax.Array], x: ArrayLike, y: ArrayLike
) -> np.ndarray:
    """The loss on a grid, ``[Y, X]``; models are made one at a time, in one program.

    Args:
      over: the plane.
      loss: of a model, ``[]``; planes that share one share a program.
      x: ``[X]``.
      y: ``[Y]``.
    """
    points = jnp.stack(jnp.meshgrid(jnp.asarray(x), jnp.asarray(y)), -1).reshape(-1, 2)
    found = _values(loss, over, points)
    return np.asarray(found).reshape(np.size(y), np.size(x))


@functools.partial(jax.jit, static_argnums=0)
def _values(
    loss: Callable[[Params], jax.Array], over: Plane, points: jax.Array
) -> jax.Array:
    return lax.map(lambda p: loss(over.at(p[0], p[1])), points)


def width(values: ArrayLike, cell: float, within: float) -> float:
    """How wide a minimum is: the area where the loss is at most so far above the least.

    Args:
      values: ``[Y, X]``, of `landscape`.
      cell: area that a point of the grid stands for.
      within: > 0, in units of the loss.
    """
    values = np.asarray(values)
    return float(cell * np.sum(values <= np.nanmin(values) + within))


def barrier(lambdas: ArrayLike, losses: ArrayLike) -> np.ndarray:
    r"""How far the loss rises above the straight line between the ends of a way.

    .. math::

      \max_\lambda L(\lambda) - (1 - \lambda) L(0) - \lambda L(1)

    It is 0 at least, since ends count, and 0 where the loss is convex.

    Args:
      lambdas: ``[K]``, from 0 to 1.
      losses: ``[..., K]``.

    Returns:
      ``[...]``.

    Raises:
      ValueError: lambdas that do not begin with 0 and end with 1.
    """
    lam, losses = np.asarray(lambdas), np.asarray(losses)
    if lam[0] != 0 or lam[-1] != 1:
        raise ValueError(f"lambdas must go from 0 to 1, got {lam[0]:g} to {lam[-1]:g}.")
    line = (1 - lam) * losses[..., :1] + lam * losses[..., -1:]
    return (losses - line).max(-1)


def dip(accuracies: ArrayLike) -> np.ndarray:
    """The least accuracy on a way less that of its better end.

    At 0 the ends are connected: all in between is at least as good. ``[..., K]`` are
    the accuracies from one end to the other, ``[...]`` is returned.
    """
    values = np.asarray(accuracies)
    return values.min(-1) - np.maximum(values[..., 0], values[..., -1])
