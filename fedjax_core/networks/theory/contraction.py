r"""How fast a gradient step contracts, and what follows from it.

For a quadratic :math:`f(w) = w^\top Q w + q^\top w` with eigenvalues
:math:`\lambda_1 \le \dots \le \lambda_d` of Q, whose gradient is 2Qw + q, a gradient
step contracts the distance to the minimiser by
:math:`\kappa(\eta) = \max(|1 - 2\eta\lambda_1|, |1 - 2\eta\lambda_d|)`.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 4.3, 4.4 and 4.7.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.types import PyTree


def extreme_eigenvalues(Q: ArrayLike) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a psd matrix, in float64.

    A smallest one that is negative by rounding only counts as 0.

    Raises:
      ValueError: Q is not square, not symmetric, not finite, or has a negative
        eigenvalue.
    """
    q = np.asarray(Q, np.float64)
    if q.ndim != 2 or q.shape[0] != q.shape[1]:
        raise ValueError(f"Q must be square, got shape {q.shape}.")
    if not np.isfinite(q).all():
        raise ValueError("Q must be finite.")
    rounding = 8 * len(q) * float(np.finfo(_float_of(Q)).eps)
    if np.abs(q - q.T).max() > rounding * np.abs(q).max():
        raise ValueError("Q must be symmetric.")
    eigenvalues = np.linalg.eigvalsh((q + q.T) / 2)
    low, high = float(eigenvalues[0]), float(eigenvalues[-1])
    if low < -rounding * max(abs(high), abs(low)):
        raise ValueError(f"Q must be psd, got the eigenvalue {low}.")
    return max(low, 0.0), high


def contraction_factor(eta: ArrayLike, low: ArrayLike, high: ArrayLike) -> jax.Array:
    r""":math:`\kappa(\eta)` of a gradient step, from the eigenvalues of Q.

    With bounds ``low <= l1`` and ``high >= ld`` instead it is an upper bound.
    """
    return jnp.maximum(jnp.abs(1 - 2 * eta * low), jnp.abs(1 - 2 * eta * high))


def optimal_rate(low: ArrayLike, high: ArrayLike) -> jax.Array:
    r"""The rate with the smallest factor, :math:`1 / (\lambda_1 + \lambda_d)`."""
    return 1 / (jnp.asarray(low) + high)


def optimal_factor(low: ArrayLike, high: ArrayLike) -> jax.Array:
    r"""The smallest factor, :math:`(\lambda_d - \lambda_1)/(\lambda_d + \lambda_1)`."""
    low, high = jnp.asarray(low), jnp.asarray(high)
    return (high - low) / (high + low)


def condition_number(low: ArrayLike, high: ArrayLike) -> jax.Array:
    r""":math:`\lambda_d / \lambda_1`, infinite for a singular Q."""
    return jnp.asarray(high) / low


def check_rate(eta: ArrayLike, high: float) -> None:
    r"""Refuses rates for which a gradient step need not converge.

    Call it once before a loop.

    eta is one rate or several, `high` :math:`\lambda_d` of Q or an upper bound of it,
    such as Prop. 5.1 gives.

    Raises:
      ValueError: not 0 < eta < 1 / high.
    """
    check.non_negative(high=high)
    limit = 1 / high if high else math.inf
    worst = np.asarray(eta)
    wrong = ~((worst > 0) & (worst < limit))
    if wrong.any():
        raise ValueError(
            f"eta must be > 0 and below 1/high = {limit}, got {worst[wrong].flat[0]}."
        )


def guaranteed_rounds(distance: float, eps: float, kappa: float) -> int:
    r"""The rounds after which a contraction is certainly within eps of its fixed point.

    :math:`t(\epsilon) = \lceil \log(\lVert w_0 - \hat w \rVert / \epsilon) /
    \log(1/\kappa) \rceil`, 0 where the start is close enough.

    eps is > 0, kappa in [0, 1), `distance` that of the start or an upper bound; others
    raise ValueError.
    """
    check.non_negative(distance=distance, kappa=kappa)
    check.positive(eps=eps)
    if kappa >= 1:
        raise ValueError(f"kappa must be < 1 for a guaranteed count, got {kappa}.")
    if distance <= eps:
        return 0
    return math.ceil(math.log(distance / eps) / -math.log(kappa)) if kappa else 1


def distance_bound(gradient: PyTree, low: ArrayLike) -> jax.Array:
    r"""A bound on the distance to the minimiser, from what is known at w.

    :math:`\lVert w - \hat w \rVert \le \lVert \nabla f(w) \rVert / (2 \lambda_1)`
    for the gradient of f at w, all leaves together, and `low`, :math:`\lambda_1` or a
    lower bound of it; infinite at 0.
    """
    return _norm(gradient) / (2 * jnp.asarray(low))


def perturbed_bound(
    kappa: ArrayLike, distance: ArrayLike, errors: ArrayLike
) -> jax.Array:
    r"""The error of perturbed gradient descent after 1, 2, ... steps.

    .. math::

      \lVert w_t - \hat w \rVert \le \kappa^t \lVert w_0 - \hat w \rVert
      + \sum_{k=1}^t \kappa^{k-1} \lVert e_{t-k} \rVert

    Eq. (88) prints :math:`\kappa^k` for the perturbations; the last one is not damped
    at all, so the power is k - 1. With errors of at most e the limit is at most
    :math:`e / (1 - \kappa)`.

    `errors` ``[T]`` are the norms of e_0, ..., e_{T-1}, the bounds ``[T]`` those for
    w_1, ..., w_T.
    """
    errors = jnp.asarray(errors)

    def one(bound, error):
        bound = kappa * bound + error
        return bound, bound

    return lax.scan(one, jnp.asarray(distance, errors.dtype), errors)[1]


class OperatorProbe(NamedTuple):
    r"""What pairs of points say about an operator F.

    Attributes:
      expansion: ``[]``, the largest :math:`\lVert Fw - Fv \rVert / \lVert w - v
        \rVert`. Above 1, F is not non-expansive; below, the factor is at least this.
      firmness: ``[]``, the least :math:`[(Fw - Fv)^\top (w - v) - \lVert Fw - Fv
        \rVert^2] / \lVert w - v \rVert^2`. Below 0, F is not firmly non-expansive.
    """

    expansion: jax.Array
    firmness: jax.Array


def probe_operator(
    F: Callable[[Any], Any], first: PyTree, second: PyTree
) -> OperatorProbe:
    """Tries an operator on pairs of points: they can refute a class, never prove it.

    F maps one point to one point; points w and v have leaves ``[K, ...]``, and a pair
    must not coincide.
    """

    def one(w, v):
        before = jax.tree.map(jnp.subtract, w, v)
        after = jax.tree.map(jnp.subtract, F(w), F(v))
        length = _dot(before, before)
        return (
            jnp.sqrt(_dot(after, after) / length),
            (_dot(after, before) - _dot(after, after)) / length,
        )

    expansion, firmness = jax.vmap(one)(first, second)
    return OperatorProbe(jnp.max(expansion), jnp.min(firmness))


def _dot(x: PyTree, y: PyTree) -> jax.Array:
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), x, y)
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def _norm(x: PyTree) -> jax.Array:
    return jnp.sqrt(_dot(x, x))


def _float_of(x: ArrayLike) -> Any:
    dtype = np.asarray(x).dtype
    return dtype if dtype.kind == "f" else np.float64
