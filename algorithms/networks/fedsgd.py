r"""FedSGD: FedGD with estimates of the local gradients, from batches or any oracle.

A batch of b rows, drawn afresh by every node in every round and without replacement,
gives

.. math::

  g_i(w) = \frac{2}{b} \sum_{r} x_r (x_r^\top w - y_r) .

(The book prints its Eq. (111) with the other sign, and the slides leave out 2/b.)

References:
  Jung, "Federated Learning: From Theory to Practice", Algs. 6 and 7.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.algorithms.networks.fedgd import Oracle, from_oracle
from fedjax_core.networks.descent import Rate
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.network import Operator
from fedjax_core.networks.oracles import as_float


def make(graph: Graph, oracle: Oracle, *, alpha: ArrayLike, eta: Rate) -> Operator:
    """Builds FedSGD.

    Args:
      graph: the network.
      oracle: ``(W, t, key) -> G``, gradient estimates like W: `least_squares`, or
        another.
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
    X, y = as_float(X), as_float(y)
    if X.ndim != 3 or y.shape != X.shape[:2]:
        raise ValueError(
            f"X and y must have shapes (n, m, d) and (n, m), got {X.shape}, {y.shape}."
        )
    real = np.ones(y.shape, bool) if mask is None else np.asarray(mask, bool)
    if real.shape != y.shape:
        raise ValueError(f"mask must have shape {y.shape}, got {real.shape}.")
    least = int(real.sum(1).min())
    if least < 1:
        raise ValueError(f"mask must leave every node a row, not node {_least(real)}.")
    if batch_size is None:
        weight = jnp.asarray(real / real.sum(1, keepdims=True), X.dtype)

        def full(W, t, key):
            del t, key
            residual = jnp.einsum("nmd,nd->nm", X, W) - y
            return 2 * jnp.einsum("nmd,nm->nd", X, weight * residual)

        return full

    check.positive_int(batch_size=batch_size)
    if batch_size > least:
        raise ValueError(
            f"batch_size must be in [1, m_i], got {batch_size} where node "
            f"{_least(real)} has {least} rows."
        )

    def oracle(W, t, key):
        del t
        if key is None:
            raise ValueError("key must be given to a run that draws batches.")
        # The largest of independent uniform numbers are a uniform subset.
        drawn = jnp.where(real, jax.random.uniform(key, y.shape), -1)
        return batch_gradient(X, y, W, jax.lax.top_k(drawn, batch_size)[1])

    return oracle


def batch_gradient(
    X: jax.Array, y: jax.Array, W: jax.Array, rows: jax.Array
) -> jax.Array:
    """The gradient estimates ``[n, d]`` of the given rows ``[n, b]``, b per node."""

    def one(x, y, w, rows):
        return 2 / len(rows) * x[rows].T @ (x[rows] @ w - y[rows])

    return jax.vmap(one)(X, y, W, rows)


def _least(real: np.ndarray) -> int:
    return int(real.sum(1).argmin())
