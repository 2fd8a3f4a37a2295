r"""How far GTVMin solutions and updates move when data and messages are disturbed.

For least-squares losses with :math:`Q_i = X_i^\top X_i / m_i` on a connected network.
With :math:`\lambda_{\max}` the largest eigenvalue of all Q_i and :math:`\bar\lambda`
the smallest of their mean (eq. (105)), bounds are infinite where
:math:`\bar\lambda = 0`.

Everywhere X is ``[n, m, d]``, Q ``[n, d, d]`` with X_i'X_i / m_i, `graph` a connected
network and `mask` ``[n, m]`` bool, the rows that exist, by default all; m_i counts
them. Arrays of other shapes, rows that are not finite and arguments out of the ranges
given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 8.2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, as_mask, flat_rows
from fedjax_core.linalg import least_norm_solve
from fedjax_core.networks.graph import Graph, check_shapes
from fedjax_core.networks.gtvmin import closed_form
from fedjax_core.networks.oracles import Quadratic, least_squares_statistics
from fedjax_core.networks.theory.gtvmin_bounds import deviation_bound, eigenvalue_bounds
from fedjax_core.networks.theory.oversight import existing_rows
from fedjax_core.types import PyTree


def label_change(
    graph: Graph,
    alpha: ArrayLike,
    X: ArrayLike,
    change: ArrayLike,
    mask: ArrayLike | None = None,
) -> jax.Array:
    r"""How the GTVMin solution moves with the labels: :math:`Q^{-1} [X_i'e_i/m_i]_i`.

    Exact and linear. The perturbation of the linear term in eq. (163) is printed as
    X_i'e_i; it is -(2/m_i) X_i'e_i. Solves a dense system of side n d. Jung, Section
    8.2.1.

    Args:
      graph: the network.
      alpha: >= 0.
      X: ``[n, m, d]``.
      change: ``[n, m]``, e_i.
      mask: ``[n, m]`` bool, the rows that exist; by default all. m_i counts them.

    Returns:
      ``[n, d]``, the new solution minus the old.
    """
    local = _statistics(X, "change", change, mask)
    return closed_form(graph, local.Q, local.q, alpha)


class SensitivityBounds(NamedTuple):
    r"""Bounds on :math:`\sum_i \lVert \tilde w_i - w_i \rVert^2`, from loose to sharp.

    Attributes:
      printed: Prop. 8.1, with the sum of ||e_i||^2.
      scaled: the same with ||e_i||^2 / m_i, which its proof allows.
      spectral: with the smallest eigenvalue of the whole quadratic instead of its lower
        bound; None if that was not given.
    """

    printed: jax.Array
    scaled: jax.Array
    spectral: jax.Array | None


def sensitivity_bounds(
    graph: Graph,
    Q: jax.Array,
    alpha: ArrayLike,
    change: ArrayLike,
    smallest_eigenvalue: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> SensitivityBounds:
    r"""How far the GTVMin solution can move when labels change by e_i.

    Jung, Prop. 8.1.

    Args:
      graph: a connected network.
      Q: ``[n, d, d]``, X_i'X_i / m_i.
      alpha: >= 0.
      change: ``[n, m]``, e_i.
      smallest_eigenvalue: of the whole quadratic ``[n d, n d]``, if known.
      mask: ``[n, m]`` bool, the rows that exist; by default all. m_i counts them.
    """
    change = as_float(change)
    check_shapes(f"({graph.num_nodes}, m)", change=change)
    squares, count = _energy(change, mask)
    energy, scaled = squares.sum(), (squares / count).sum()
    largest = jnp.linalg.eigvalsh(Q)[:, -1].max()
    low = eigenvalue_bounds(graph, Q, alpha).lower
    spectral = None
    if smallest_eigenvalue is not None:
        spectral = _over(largest * scaled, jnp.asarray(smallest_eigenvalue) ** 2)
    return SensitivityBounds(
        _over(largest * energy, low**2), _over(largest * scaled, low**2), spectral
    )


class EstimationBounds(NamedTuple):
    r"""Bounds on the error of GTVMin when all nodes have the same true parameters.

    Attributes:
      deviation: on :math:`\sum_i \lVert w_i - c \rVert^2`, c the mean of the w_i.
      average: on :math:`\lVert c - \bar w \rVert^2`.
    """

    deviation: jax.Array
    average: jax.Array


def estimation_bounds(
    graph: Graph,
    Q: jax.Array,
    alpha: ArrayLike,
    noise: ArrayLike,
    mask: ArrayLike | None = None,
) -> EstimationBounds:
    r"""Bounds on the two parts of the estimation error, for any noise of known size.

    A large :math:`\lambda_2` of the network and a small :math:`\lambda_{\max} /
    \bar\lambda` make them small. Jung, Prop. 3.1, eq. (165) and (169).

    Args:
      graph: a connected network.
      Q: ``[n, d, d]``, X_i'X_i / m_i.
      alpha: > 0.
      noise: ``[n, m]``, y_i - X_i wbar.
      mask: ``[n, m]`` bool, the rows that exist; by default all. m_i counts them.

    Raises:
      ValueError: alpha is not positive, other shapes, or a network that is not
        connected.
    """
    deviation = deviation_bound(graph, noise, alpha, mask)
    squares, count = _energy(as_float(noise), mask)
    energy = (squares / count).sum()
    largest = jnp.linalg.eigvalsh(Q)[:, -1].max()
    average = jnp.maximum(jnp.linalg.eigvalsh(Q.mean(0))[0], 0)
    spread = 2 * (largest * energy + largest**2 * deviation)
    return EstimationBounds(deviation, _over(spread, len(Q) * average**2))


def average_error(
    X: ArrayLike, noise: ArrayLike, W: jax.Array, mask: ArrayLike | None = None
) -> jax.Array:
    r"""The mean of a GTVMin solution minus the true parameters, exactly; ``[d]``.

    .. math::

      c - \bar w = \Bigl(\sum_i Q_i\Bigr)^{-1}
      \sum_i \frac{1}{m_i} X_i^\top (e_i - X_i (w_i - c))

    Eq. (167) is printed with e_i + X_i (w_i - c) and then does not hold. Where the sum
    of the Q_i is singular, data determine a part of the error only: it is the one of
    least norm, its part in their span.

    Args:
      X: ``[n, m, d]``.
      noise: ``[n, m]``, e_i = y_i - X_i wbar.
      W: ``[n, d]``, the solution for the squared penalty.
      mask: ``[n, m]`` bool, the rows that exist; by default all. m_i counts them.
    """
    local = _statistics(X, "noise", noise, mask)
    away = W - W.mean(0)[None]
    rest = -local.q / 2 - jnp.einsum("nde,ne->nd", local.Q, away)
    return least_norm_solve(local.Q.sum(0), rest.sum(0))


def robustness_quotient(
    new: PyTree, new_disturbed: PyTree, given: PyTree, given_disturbed: PyTree
) -> jax.Array:
    """How much of a disturbance of received messages is left in updates; ``[n]``.

    Jung, eq. (173).

    Args:
      new: leaves ``[n, ...]``, updates.
      new_disturbed: updates from disturbed messages.
      given: leaves ``[n, ...]``, the weighted means of the messages.
      given_disturbed: those of disturbed messages; different from `given`.
    """
    return _distance(new, new_disturbed) / _distance(given, given_disturbed)


def robustness_bound(
    strong_convexity: ArrayLike, alpha: ArrayLike, degree: ArrayLike
) -> jax.Array:
    r"""The largest `robustness_quotient` of FedRelax, at most 1; ``[n]``.

    .. math::

      \frac{1}{1 + \sigma_i / (2 \alpha d_i)}

    Jung, eq. (174).

    `strong_convexity` is sigma_i >= 0; for a quadratic twice the smallest eigenvalue of
    Q_i, whose eigenvector attains the bound. alpha is > 0, `degree` weighted, >= 0; a
    node without neighbours is not disturbed at all.
    """
    check.positive(alpha=alpha)
    rho = 2 * alpha * jnp.asarray(degree)
    return jnp.where(rho > 0, rho / jnp.where(rho > 0, rho + strong_convexity, 1), 0)


def _statistics(
    X: ArrayLike, name: str, labels: ArrayLike, mask: ArrayLike | None
) -> Quadratic:
    """`least_squares_statistics` of labels that the caller calls `name`."""
    X, labels = as_float(X), as_float(labels)
    rows = existing_rows(X, labels, mask, ("X", name, "mask"))
    return least_squares_statistics(X, labels, rows, allow_empty=True)


def _energy(e: jax.Array, mask: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
    """||e_i||^2 and, at least 1, m_i of the rows that exist; each ``[n]``."""
    rows = as_mask("mask", mask, e.shape)
    return jnp.where(rows, e**2, 0).sum(1), jnp.maximum(rows.sum(1), 1)


def _over(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a / b, infinite where b is 0: nothing is promised."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), jnp.inf)


def _distance(a: PyTree, b: PyTree) -> jax.Array:
    squares = jax.tree.map(lambda x, y: flat_rows((x - y) ** 2).sum(1), a, b)
    return jnp.sqrt(sum(jax.tree.leaves(squares)))
