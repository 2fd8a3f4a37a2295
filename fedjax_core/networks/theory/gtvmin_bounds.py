r"""What can be said of GTVMin before it is solved: eigenvalues and deviations.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 3.3.2 and 5.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, as_mask
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.oracles import check_quadratic
from fedjax_core.networks.spectrum import (
    check_connected,
    eigenvalues,
    extremes,
    hops,
)


class EigenvalueBounds(NamedTuple):
    """Bounds on the eigenvalues of GTVMin's matrix Q; see `eigenvalue_bounds`.

    Attributes:
      lower: ``[]``, 0 where the network is not connected or the Q_i don't add up to a
        definite matrix.
      upper: ``[]``, lam_max + alpha lamn.
      upper_by_degree: ``[]``, lam_max + 2 alpha d_max, which needs no spectrum.
    """

    lower: jax.Array
    upper: jax.Array
    upper_by_degree: jax.Array


def eigenvalue_bounds(graph: Graph, Q: ArrayLike, alpha: ArrayLike) -> EigenvalueBounds:
    r"""Bounds on all eigenvalues of Q = blockdiag(Q_i) + alpha L_G (x) I.

    With lam_max the largest eigenvalue of all Q_i, lam_bar the smallest of their mean
    and r = lam_bar / (4 lam_max),

    .. math::

      \frac{\min(\lambda_2 \alpha r^2, \bar\lambda / 2)}{1 + r^2} \le
      \lambda(Q) \le \lambda_{\max} + \alpha \lambda_n \le
      \lambda_{\max} + 2 \alpha d_{\max} .

    The book's proof of the upper bound takes the larger of its two parts; it is their
    sum that bounds, as the proposition says. Gradient steps are safe below
    1 / upper, and at 1 / (lower + upper) they contract by
    (upper - lower) / (upper + lower).

    Q is ``[n, d, d]``, symmetric and semi-definite, n >= 2, alpha >= 0, else a
    ValueError.

    References:
      Jung, Prop. 5.1 and 5.2.
    """
    check.non_negative(alpha=alpha)
    Q = as_float(Q)
    lam2, lamn = _spectrum(graph)
    check_quadratic(Q)
    lam_max = jnp.linalg.eigvalsh(Q)[:, -1].max()
    lam_bar = jnp.linalg.eigvalsh(Q.mean(0))[0]
    rounding = 8 * Q.shape[1] * jnp.finfo(Q.dtype).eps * lam_max
    lam_bar = jnp.where(lam_bar > rounding, lam_bar, 0)
    r = lam_bar / (4 * jnp.where(lam_max > 0, lam_max, 1))
    lower = jnp.minimum(lam2 * alpha * r**2, lam_bar / 2) / (1 + r**2)
    return EigenvalueBounds(
        lower, lam_max + alpha * lamn, lam_max + 2 * alpha * degree(graph).max()
    )


def deviation_bound(
    graph: Graph,
    noise: ArrayLike,
    alpha: ArrayLike,
    mask: ArrayLike | None = None,
) -> jax.Array:
    r"""A bound on how far the solution's rows lie from their mean.

    .. math::

      \sum_i \| w_i - \mathrm{mean} \|^2 \le
      \frac{1}{\lambda_2 \alpha} \sum_i \frac{\|\varepsilon_i\|^2}{m_i}

    for local data y_i = X_i w_true + eps_i with one w_true for all nodes. On a network
    that isn't connected it holds in every component.

    Args:
      graph: a connected network. Where traced weights leave it in parts, or in float32
        as good as in parts, the bound is infinite.
      noise: ``[n, m]``, eps_i.
      alpha: > 0.
      mask: ``[n, m]`` bool, the rows that exist; by default all.

    Raises:
      ValueError: alpha <= 0, shapes that don't fit, or a network in several parts.

    References:
      Jung, Prop. 3.1, (63).
    """
    check.positive(alpha=alpha)
    noise = as_float(noise)
    if noise.ndim != 2 or len(noise) != graph.num_nodes:
        raise ValueError(
            f"noise and mask must have shape ({graph.num_nodes}, m), got {noise.shape}."
        )
    rows = as_mask("mask", mask, noise.shape)
    if not isinstance(graph.weight, Tracer):
        check_connected(graph)
    lam2, _ = _spectrum(graph)
    energy = jnp.where(rows, noise**2, 0).sum(1) / jnp.maximum(rows.sum(1), 1)
    strength = jnp.asarray(lam2 * alpha, energy.dtype)
    return jnp.where(strength > 0, energy.sum() / strength, jnp.inf)


def _spectrum(graph: Graph) -> tuple[jax.Array, jax.Array]:
    """At most lambda_2 and at least lambda_n; densely where the weights are traced."""
    if not isinstance(graph.weight, Tracer):
        second, largest = extremes(graph)
        rounding = 1e-12 * largest if graph.num_nodes > 512 else 0.0
        return jnp.asarray(max(second - rounding, 0.0)), jnp.asarray(largest)
    n = graph.num_nodes
    values = eigenvalues(graph)
    rounding = n * jnp.finfo(values.dtype).eps * values[-1]
    connected = (hops(graph, jnp.arange(n) == 0) < n).all()
    second = jnp.maximum(values[1] - rounding, 0)
    return jnp.where(connected, second, 0), values[-1] + rounding
