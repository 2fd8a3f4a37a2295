r"""How far the solution of GTVMin moves with one label.

How well a test can tell neighbouring datasets apart is in `privacy.auditing`. X is
``[n, m, d]``, `mask` ``[n, m]`` bool, the data points that are there, by default all.
Arrays of other shapes and arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 9.1 and 9.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, as_mask
from fedjax_core.linalg import Inverse
from fedjax_core.networks.coupling import coupled_inverse
from fedjax_core.networks.graph import Graph, check_shapes
from fedjax_core.networks.oracles import least_squares_statistics


def label_sensitivity(
    graph: Graph, X: ArrayLike, alpha: ArrayLike, mask: ArrayLike | None = None
) -> jax.Array:
    r"""How far the solution of linear GTVMin moves per unit change of one label.

    .. math::

      \frac{\lVert \mathcal{A}(D) - \mathcal{A}(D') \rVert_2}{\varepsilon}
      = \frac1{m_i} \lVert Q^{-1} (e_i \otimes x_{ir}) \rVert_2, \qquad
      Q = \mathrm{diag}(Q_1, \dots, Q_n) + \alpha L_G \otimes I

    for local losses :math:`\lVert y_i - X_i w \rVert^2 / m_i`, hence
    :math:`Q_i = X_i^\top X_i / m_i`. It depends neither on the labels nor on
    :math:`\varepsilon`. If labels may change by at most h, the L2 sensitivity that
    `calibration.gaussian_sigma` asks for is h times the largest entry.

    Inverts the dense matrix of nd rows. Jung, (179).

    Args:
      graph: the network of n nodes.
      X: ``[n, m, d]`` features.
      alpha: the strength of GTVMin, >= 0.
      mask: ``[n, m]`` bool, which data points are there; all by default.

    Returns:
      ``[n, m]``, zero for data points that are not there; NaN for all others where Q
      is singular (see `check_regular`).
    """
    X, mask, count, inverse = _problem(graph, X, alpha, mask)
    n, _, d = X.shape
    columns = jnp.where(inverse.singular, jnp.nan, inverse.matrix)
    columns = columns.reshape(n * d, n, d).astype(X.dtype)
    gram = jnp.einsum("kia,kib->iab", columns, columns)  # of the columns of each node
    square = jnp.einsum("ira,iab,irb->ir", X, gram, X)
    moved = jnp.sqrt(jnp.maximum(square, 0)) / count[:, None]
    return jnp.where(mask, moved, 0)


def label_sensitivity_bound(
    X: ArrayLike, smallest: ArrayLike, mask: ArrayLike | None = None
) -> jax.Array:
    r"""An upper bound on `label_sensitivity` from the smallest eigenvalue of Q.

    :math:`\lVert x_{ir} \rVert_2 / (m_i \lambda_1(Q))`, ``[n, m]``, zero for data
    points that are not there; `smallest` > 0 may be a lower bound on the eigenvalue,
    such as that of Jung, Prop. 5.2.
    """
    check.positive(smallest=smallest)
    X, mask, count = _local_data(X, mask)
    return jnp.where(mask, jnp.linalg.norm(X, axis=2) / (count[:, None] * smallest), 0)


def check_regular(
    graph: Graph, X: ArrayLike, alpha: float, mask: ArrayLike | None = None
) -> float:
    """The smallest eigenvalue of Q, for `label_sensitivity_bound`.

    Raises ValueError unless linear GTVMin has one solution.
    """
    *_, inverse = _problem(graph, X, alpha, mask)
    if inverse.singular:
        raise ValueError(
            "GTVMin must have one solution, got a singular Q: some directions are "
            f"fixed neither by the data nor, with alpha = {alpha!r}, through the "
            "network."
        )
    return 1 / float(np.linalg.eigvalsh(inverse.matrix)[-1])


def _problem(
    graph: Graph, X: ArrayLike, alpha: ArrayLike, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array, Inverse]:
    """Features with zeros where nothing is, the mask, m_i ``[n]``, and Q^-1."""
    check.non_negative(alpha=alpha)
    X, mask, count = _local_data(X, mask, graph.num_nodes)
    Q = least_squares_statistics(X, X[..., 0], mask, allow_empty=True).Q
    return X, mask, count, coupled_inverse(Q, graph, alpha)


def _local_data(
    X: ArrayLike, mask: ArrayLike | None, n: int | str = "n"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    X = as_float(X)
    check_shapes(f"({n}, m, d)", X=X)
    mask = as_mask("mask", mask, X.shape[:2])
    X = jnp.where(mask[:, :, None], X, 0)
    return X, mask, jnp.maximum(mask.sum(1), 1).astype(X.dtype)
