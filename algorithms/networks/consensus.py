r"""Average consensus: the nodes compute their mean by talking to neighbours only.

.. math::

  u \leftarrow u - \eta L_G u, \qquad u_0 = y

The mean of u never changes. On what is orthogonal to the constants a step contracts by
:math:`\max(|1 - \eta\lambda_2|, |1 - \eta\lambda_n|)`, so that on a connected graph
every node reaches the mean, and on any other the mean of its component. On all vectors
it is no contraction, as L_G maps the constants to 0.

References:
  Jung, "Federated Learning: From Theory to Practice", Exercise 4.4, (101).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core.arrays import as_float
from fedjax_core.networks.descent import Rate, gradient_step
from fedjax_core.networks.graph import Graph, degree, laplacian
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.theory.contraction import check_rate as check_gradient_rate
from fedjax_core.types import PyTree


def average(
    graph: Graph,
    y: PyTree,
    rounds: int,
    eta: Rate | None = None,
    record: Callable[[PyTree], Any] | None = None,
) -> tuple[PyTree, Any]:
    r"""Runs consensus from y.

    Args:
      graph: the network; each component averages for itself.
      y: leaves ``[n, ...]``, what every node measured.
      rounds: steps, each sending every vector once along every edge, both ways.
      eta: below :math:`2 / \lambda_n`, see `check_rate`; :math:`2 / (\lambda_2 +
        \lambda_n)` has the smallest factor. By default 1 / (2 d_max), which is safe on
        every graph.
      record: as for `iterate.iterate`.

    Returns:
      The last state and what was recorded.
    """
    if eta is None:
        most = jnp.max(degree(graph))
        eta = 1 / (2 * jnp.where(most > 0, most, 1))
    step = gradient_step(lambda u: laplacian(graph, u), eta)
    return iterate(step, jax.tree.map(as_float, y), rounds, record=record)


def factor(eta: ArrayLike, lam2: ArrayLike, lamn: ArrayLike) -> jax.Array:
    """The contraction factor of a step towards the mean, on a connected graph."""
    return jnp.maximum(jnp.abs(1 - eta * lam2), jnp.abs(1 - eta * lamn))


def check_rate(eta: ArrayLike, lamn: float) -> None:
    r"""Raises ValueError unless :math:`0 < \eta < 2 / \lambda_n`, for all of several.

    `lamn` may be a bound of the largest eigenvalue of L_G, such as 2 d_max.
    """
    # L_G is the gradient of u' (L_G / 2) u.
    check_gradient_rate(eta, lamn / 2)
