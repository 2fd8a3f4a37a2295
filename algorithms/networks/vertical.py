r"""Vertical learning: the nodes hold different columns of one table.

All nodes know the same m data points, node i their features :math:`X_i`. The text asks
for a GTVMin instance that equals linear regression and prints no algorithm; here are
two.

Gradient form: each round, node i publishes its part of the predictions
:math:`p_i = X_i w_i`, m numbers, and takes

.. math::

  w_i \leftarrow w_i + \frac{2\eta}{m} X_i^\top r, \qquad r = y - \sum_j p_j ,

which are the iterates of gradient descent on the whole table.

GTVMin form: node i learns its copy :math:`Z_i \in R^{m \times n}` of everyone's parts
with the loss

.. math::

  \frac bm \lVert (I - P_i) Z_i[:, i] \rVert^2
  + [i \text{ has the labels}] \frac1m \lVert y - Z_i 1 \rVert^2 ,

:math:`P_i` the projection onto the range of :math:`X_i`. On every connected graph and
for every alpha, b > 0, :math:`w_i = X_i^+ Z_i[:, i]` is the block of least squares if
the whole table has full column rank.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 6.4 and Exercise 6.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float
from fedjax_core.linalg import pinv
from fedjax_core.networks.descent import Rate, gradient_step
from fedjax_core.networks.graph import check_ints, check_labels, check_shapes
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.oracles import Quadratic


class Columns(NamedTuple):
    """A table split by columns.

    Attributes:
      X: ``[n, m, K]``, the columns of every node, padded with zeros.
      column: ``[n, K]`` int32, where they stand in the table, -1 for padding.
    """

    X: jax.Array
    column: np.ndarray


def split_columns(X: ArrayLike, owner: ArrayLike, num_nodes: int) -> Columns:
    """Gives every node its columns of a table X ``[m, d]``; it may have none.

    Raises:
      ValueError: other shapes, or an owner, ``[d]``, that is not in 0..n-1.
      TypeError: owners that are not ints.
    """
    X = as_float(X)
    who = np.asarray(owner)
    check.positive_int(num_nodes=num_nodes)
    check_ints(owner=who)
    check_shapes("(m, d) and (d,)", X=X, owner=who)
    check_labels("column", num_nodes, owner=who)
    mine = [np.flatnonzero(who == i) for i in range(num_nodes)]
    width = max(1, *map(len, mine))
    column = np.full((num_nodes, width), -1, np.int32)
    for i, columns in enumerate(mine):
        column[i, : len(columns)] = columns
    parts = jnp.where(column[:, None] >= 0, jnp.moveaxis(X[:, column], 1, 0), 0)
    return Columns(parts, column)


def assemble(columns: Columns, W: ArrayLike) -> jax.Array:
    """The parameters of the whole table ``[d]`` from those of the nodes ``[n, K]``."""
    used = columns.column >= 0
    W = jnp.asarray(W)
    return jnp.zeros(used.sum(), W.dtype).at[columns.column[used]].set(W[used])


def vertical_gd(
    columns: Columns,
    y: ArrayLike,
    rounds: int,
    eta: Rate,
    record: Callable[[jax.Array], Any] | None = None,
) -> tuple[jax.Array, Any]:
    """The gradient form, from 0.

    Args:
      columns: from `split_columns`.
      y: ``[m]`` labels.
      rounds: steps; each publishes n m numbers.
      eta: below m over the largest eigenvalue of X'X; a schedule is allowed.
      record: as for `iterate.iterate`.

    Returns:
      Parameters ``[n, K]``, padding 0, and what was recorded.

    Raises:
      ValueError: another number of labels than data points.
    """
    X, y = columns.X, as_float(y)
    _check_labels(columns, y)

    def grad(W):
        residual = y - jnp.einsum("nmk,nk->m", X, W, precision="highest")
        back = jnp.einsum("nmk,m->nk", X, residual, precision="highest")
        return -2 / X.shape[1] * back

    start = jnp.zeros((X.shape[0], X.shape[2]), X.dtype)
    return iterate(gradient_step(grad, eta), start, rounds, record=record)


def lifted_statistics(
    columns: Columns, y: ArrayLike, label_node: int, b: float = 1.0
) -> Quadratic:
    """The losses of the GTVMin form, on Z_i row by row: ``[n, m n]``.

    Their matrices hold n (m n)^2 numbers: a construction for small tables.

    Args:
      columns: from `split_columns`.
      y: ``[m]`` labels.
      label_node: the node that has them.
      b: > 0.

    Raises:
      ValueError: b <= 0, no such node, or another number of labels than data points.
    """
    X, y = columns.X, as_float(y)
    n, m, _ = X.shape
    check.positive(b=b)
    check.in_range(0, n - 1, label_node=label_node)
    _check_labels(columns, y)
    range_of = jnp.einsum("nmk,nkl->nml", X, pinv(X), precision="highest")
    off = b / m * (np.eye(m, dtype=X.dtype)[None] - range_of)
    unit = np.eye(n, dtype=X.dtype)
    # (r, j), (s, k): data points r and s, nodes' parts j and k.
    Q = jnp.einsum("irs,ij,ik->irjsk", off, unit, unit).reshape(n, m * n, m * n)
    fit = np.kron(np.eye(m, dtype=X.dtype), np.ones((n, n), X.dtype)) / m
    Q = Q.at[label_node].add(fit)
    q = jnp.zeros((n, m * n), X.dtype).at[label_node].set(-2 / m * jnp.repeat(y, n))
    c = jnp.zeros(n, X.dtype).at[label_node].set(y @ y / m)
    return Quadratic(Q, q, c)


def read_out(columns: Columns, Z: ArrayLike) -> jax.Array:
    """The nodes' parameters ``[n, K]`` from their lifted variables ``[n, m n]``."""
    n, m, _ = columns.X.shape
    own = jnp.einsum("imi->im", jnp.asarray(Z).reshape(n, m, n))
    return jnp.einsum("nkm,nm->nk", pinv(columns.X), own, precision="highest")


def _check_labels(columns: Columns, y: jax.Array) -> None:
    check_shapes(f"({columns.X.shape[1]},)", y=y)
