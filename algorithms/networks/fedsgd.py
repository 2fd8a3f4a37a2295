r"""FedSGD: FedGD with estimates of the local gradients, from batches or any oracle.

A batch of b rows, drawn afresh by every node in every round and without replacement,
gives

.. math::

  g_i(w) = \frac{2}{b} \sum_{r} x_r (x_r^\top w - y_r) .

(The book prints its Eq. (111) with the other sign, and the slides leave out 2/b.)

References:
  Jung, "Federated Learning: From Theory to Practice", Algs. 6 and 7.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.algorithms.networks.fedgd import Oracle, from_oracle
from fedjax_core.arrays import as_mask
from fedjax_core.networks.descent import Rate
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import Operator
from fedjax_core.networks.oracles import check_no_empty, node_rows
from fedjax_core.types import Key, PyTree


def make(graph: Graph, oracle: Oracle, *, alpha: ArrayLike, eta: Rate) -> Operator:
    """Builds FedSGD.

    Args:
      graph: the network.
      oracle: ``(W, t, key) -> G``, gradient estimates like W: `least_squares`,
        `batches`, or another.
      alpha: strength of GTVMin, >= 0.
      eta: learning rate > 0, as in `fedgd.make`; one that decays
        (`schedules.power_decay`) for convergence to a point.

    Raises:
      ValueError: alpha or eta is out of range.
    """
    return from_oracle(graph, oracle, alpha=alpha, eta=eta)


def least_squares(
    X: ArrayLike,
    y: ArrayLike,
    batch_size: int | None = 32,
    mask: ArrayLike | None = None,
) -> Oracle:
    """Batch gradients of the mean squared errors of linear models, W ``[n, d]``.

    Args:
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      batch_size: b, in [1, m_i] for every node; None takes all m_i rows of each.
      mask: ``[n, m]`` bool, the rows that exist; by default all.

    Raises:
      ValueError: other shapes, a node without rows, or a batch larger than some m_i.
      TypeError: a batch size that is no int.
    """
    X, y, real = node_rows(X, y, mask)
    real = np.asarray(real)
    if batch_size is None:
        weight = jnp.asarray(real / real.sum(1, keepdims=True), X.dtype)

        def full(W, t, key):
            del t, key
            residual = jnp.einsum("nmd,nd->nm", X, W) - y
            return 2 * jnp.einsum("nmd,nm->nd", X, weight * residual)

        return full

    draw = _sampler(real, batch_size)
    return lambda W, t, key: batch_gradient(X, y, W, draw(key))


def batches(
    loss_fn: Callable[[PyTree, Any], jax.Array],
    data: PyTree,
    batch_size: int = 32,
    mask: ArrayLike | None = None,
) -> Oracle:
    """Batch gradients of any model; draws the same rows as `least_squares`.

    Every batch is as likely as any other, so where loss_fn is a mean over rows the
    estimates have the gradient of the mean over all m_i rows as their mean.

    Args:
      loss_fn: ``(w_i, batch_i) -> scalar``, the mean loss of one node on some rows.
      data: leaves ``[n, m, ...]``; ``batch_i`` has leaves ``[b, ...]`` of these.
      batch_size: b, in [1, m_i] for every node.
      mask: ``[n, m]`` bool, the rows that exist; by default all.

    Raises:
      ValueError: leaves without n x m rows in common, a node without rows, or a batch
        larger than some m_i.
      TypeError: a batch size that is no int.
    """
    shapes = {np.shape(leaf)[:2] for leaf in jax.tree.leaves(data)}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2:
        raise ValueError(
            "data must have leaves of one shape (n, m, ...), got "
            f"{[np.shape(leaf) for leaf in jax.tree.leaves(data)]}."
        )
    real = as_mask("mask", mask, shape)
    check_no_empty(real)
    draw = _sampler(np.asarray(real), batch_size)
    data = jax.tree.map(jnp.asarray, data)

    def one(w, rows, example):
        return jax.grad(loss_fn)(w, jax.tree.map(lambda x: x[rows], example))

    return lambda W, t, key: jax.vmap(one)(W, draw(key), data)


def batch_gradient(
    X: jax.Array, y: jax.Array, W: jax.Array, rows: jax.Array
) -> jax.Array:
    """The gradient estimates ``[n, d]`` of the given rows ``[n, b]``, b per node."""

    def one(x, y, w, rows):
        return 2 / len(rows) * x[rows].T @ (x[rows] @ w - y[rows])

    return jax.vmap(one)(X, y, W, rows)


def _sampler(real: np.ndarray, batch_size: int) -> Callable[[Key | None], jax.Array]:
    """Draws a batch per node: from a key, rows ``[n, b]``."""
    check.positive_int(batch_size=batch_size)
    count = real.sum(1)
    if batch_size > count.min():
        raise ValueError(
            f"batch_size must be in [1, m_i], got {batch_size} where node "
            f"{count.argmin()} has {count.min()} rows."
        )

    def draw(key):
        if key is None:
            raise ValueError("key must be given to a run that draws batches.")
        # The largest of independent uniform numbers are a uniform subset.
        drawn = jnp.where(real, jax.random.uniform(key, real.shape), -1)
        return jax.lax.top_k(drawn, batch_size)[1]

    return draw
