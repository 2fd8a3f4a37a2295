r"""Robust local losses: absolute errors and Huber's, on one device and at all nodes.

A label that lies r away pulls the squared loss with a force of 2 r, these losses with a
bounded one. `absolute` and `huber` are `oracles.Losses`, for FedRelax and FedProx, and
by their sub-gradients for FedGD (at rates that decay, where a loss has kinks). Their
proximal steps have no derivatives.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 10.1.2, Exercise 10.4.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from scipy.optimize import linprog

from fedjax_core import check
from fedjax_core.networks.graph import check_shapes
from fedjax_core.networks.oracles import Losses, node_rows, per_node


class Deviations(NamedTuple):
    """A fit by least absolute deviations.

    Attributes:
      w: ``[d]`` float64.
      objective: the sum of absolute errors.
      gap: the objective minus that of the dual solution; 0 up to rounding.
    """

    w: np.ndarray
    objective: float
    gap: float


def least_absolute_deviations(X: ArrayLike, y: ArrayLike) -> Deviations:
    r"""Minimises :math:`\sum_r |y_r - x_r^\top w|` by linear programming, in float64.

    The fit passes through d of the points (where X ``[m, d]`` has rank d), and moving
    another point's label changes nothing as long as it stays on its side. A squared
    loss has every label move the fit. Jung, Exercise 10.4.

    Raises:
      ValueError: other shapes, no rows, or values that are not finite.
    """
    X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
    if X.ndim != 2 or y.shape != X.shape[:1] or not len(y):
        raise ValueError(
            f"X and y must have shapes (m, d) and (m,), m >= 1, got {X.shape} and "
            f"{y.shape}."
        )
    if not (np.isfinite(X).all() and np.isfinite(y).all()):
        raise ValueError("X and y must be finite.")
    m, d = X.shape
    # Errors as the difference of their positive and negative parts.
    found = linprog(
        np.r_[np.zeros(d), np.ones(2 * m)],
        A_eq=np.c_[X, np.eye(m), -np.eye(m)],
        b_eq=y,
        bounds=[(None, None)] * d + [(0, None)] * (2 * m),
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"the linear program failed: {found.message}")
    w = found.x[:d]
    objective = float(np.abs(y - X @ w).sum())
    dual = np.clip(found.eqlin.marginals, -1, 1)
    return Deviations(w, objective, objective - float(dual @ y))


class Proximal(NamedTuple):
    """A proximal step with its certificate.

    Attributes:
      W: ``[n, d]``.
      gap: ``[n]``, the objective minus that of a dual solution, >= 0. W is at most
        sqrt(2 gap / rho) away from the exact step.
    """

    W: jax.Array
    gap: jax.Array


class _Problem(NamedTuple):
    """Losses whose slope in every error e is e / bend, clipped to +-bound.

    Attributes:
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      bound: ``[n]``.
      bend: ``[n]``, 0 for a jump at 0.
    """

    X: jax.Array
    y: jax.Array
    bound: jax.Array
    bend: jax.Array


def absolute(
    X: ArrayLike, y: ArrayLike, mask: ArrayLike | None = None, *, steps: int = 30
) -> Losses:
    """The average absolute errors of linear models, sum_r |y_ir - x_ir' w| / m_i.

    The gradient is a sub-gradient that counts exact fits as 0, so `prox_residual` does
    not apply; `absolute_prox` gives the same prox with a certificate.

    Args:
      X: ``[n, m, d]`` features.
      y: ``[n, m]`` labels.
      mask: ``[n, m]`` bool, the rows that exist; by default all. m_i counts them.
      steps: of `absolute_prox`.

    Raises:
      ValueError: other shapes, of W too, a row that is not finite, a node without rows,
        or steps < 1; when prox is called, rho <= 0.
    """
    X, y, share = _node_data(X, y, mask)
    return _losses(_Problem(X, y, share, jnp.zeros_like(share)), steps)


def absolute_prox(
    X: ArrayLike,
    y: ArrayLike,
    V: ArrayLike,
    rho: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    steps: int = 30,
) -> Proximal:
    r"""The proximal operator of `absolute`, by a primal-dual interior-point method.

    For any :math:`|u_r| \le 1 / m` the objective at w is above its minimum by at most

    .. math::

      \sum_r (|e_r| / m - u_r e_r) + \|\rho (w - v) - X^\top u\|^2 / (2 \rho), \qquad
      e = y - X w,

    a sum of terms >= 0. Newton steps on the conditions for all to vanish cut it by ten
    or so each, until rounding stops them.

    Args:
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      V: ``[n, d]``.
      rho: > 0, one number or ``[n]``.
      mask: ``[n, m]`` bool, the rows that exist; by default all.
      steps: Newton steps, each a d x d solve per node.

    Raises:
      ValueError: as `absolute`.
    """
    X, y, share = _node_data(X, y, mask)
    check.positive_int(steps=steps)
    return _prox(_Problem(X, y, share, jnp.zeros_like(share)), V, rho, steps)


def huber(
    X: ArrayLike,
    y: ArrayLike,
    delta: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    steps: int = 30,
) -> Losses:
    """Huber's loss of linear models: squares of errors up to delta, linear beyond.

    The average over rows of e^2 where |e| <= delta and 2 delta |e| - delta^2 elsewhere,
    so a large delta gives `least_squares_statistics`. Its gradient is continuous:
    `prox_residual` says how good a prox is.

    Args:
      X: ``[n, m, d]`` features.
      y: ``[n, m]`` labels.
      delta: > 0, one number or ``[n]``.
      mask: ``[n, m]`` bool, the rows that exist; by default all.
      steps: of prox, the method of `absolute_prox`: Newton steps on the loss itself
        would jump over the errors below delta.

    Raises:
      ValueError: as `absolute`, or delta <= 0.
    """
    X, y, share = _node_data(X, y, mask)
    delta = per_node("delta", delta, share)
    return _losses(_Problem(X, y, 2 * share * delta, 1 / (2 * share)), steps)


def _losses(problem: _Problem, steps: int) -> Losses:
    check.positive_int(steps=steps)
    X, y, bound, bend = problem
    bound, bend = bound[:, None], bend[:, None]

    def errors(W: jax.Array) -> jax.Array:
        _check_parameters("W", W, X)
        return y - jnp.einsum("nmd,nd->nm", X, W)

    def value(W: jax.Array) -> jax.Array:
        e = errors(W)
        force = _force(e, bound, bend)
        return (force * (e - bend * force / 2)).sum(1)

    def grad(W: jax.Array) -> jax.Array:
        return -jnp.einsum("nmd,nm->nd", X, _force(errors(W), bound, bend))

    return Losses(value, grad, lambda V, rho: _prox(problem, V, rho, steps).W)


def _force(e: jax.Array, bound: jax.Array, bend: jax.Array) -> jax.Array:
    """The slope of the loss in the errors; without a bend their sign, 0 for 0."""
    return jnp.clip(e / jnp.maximum(bend, jnp.finfo(e.dtype).tiny), -bound, bound)


def _prox(problem: _Problem, V: ArrayLike, rho: ArrayLike, steps: int) -> Proximal:
    _check_parameters("V", V, problem.X)
    rho = per_node("rho", rho, problem.X)
    interior_point = functools.partial(_interior_point, steps=steps)
    return jax.vmap(interior_point)(problem, jnp.asarray(V, problem.X.dtype), rho)


def _interior_point(
    node: _Problem, v: jax.Array, rho: jax.Array, steps: int
) -> Proximal:
    """The step of one node, from v ``[d]``."""
    X, y, bound, bend = node
    ridge = rho * jnp.eye(len(v), dtype=X.dtype)

    # u lacks a and b to its bounds; apart, as they end far below its rounding.
    def gap(w, u, a, b):
        e = y - X @ w
        best = _force(e, bound, bend)
        off = rho * (w - v) - X.T @ u
        # The loss less what u makes of it, factored so as not to cancel.
        short = jnp.where(best == bound, a, jnp.where(best == -bound, -b, best - u))
        left = short * (e - bend * (best + u) / 2)
        return jnp.maximum(left, 0).sum() + off @ off / (2 * rho)

    def step(_, state):
        w, u, a, b, p, q, best = state
        # Errors tend to bend u + p - q; a, b, p and q stay > 0.
        mu = (p * a + q * b).mean() / 40  # a twentieth of what it is
        p_goal, q_goal = mu / a - p, mu / b - q
        error = y - X @ w - bend * u - p + q - p_goal + q_goal
        stiff = 1 / (p / a + q / b + bend)
        slope = X.T @ (u + stiff * error) - rho * (w - v)
        factor = jnp.linalg.cholesky(ridge + (X.T * stiff[None]) @ X)
        dw = jax.scipy.linalg.cho_solve((factor, True), slope)
        du = stiff * (error - X @ dw)
        dp, dq = p_goal + p / a * du, q_goal - q / b * du
        fastest = jnp.stack([-dp / p, -dq / q, du / a, -du / b]).max()
        length = jnp.where(fastest > 0.99, 0.99 / fastest, 1)
        w, p, q = w + length * dw, p + length * dp, q + length * dq
        a, b = a - length * du, b + length * du
        u = jnp.where(a < b, bound - a, b - bound)
        # At the end rounding spoils the steps; a gap that is NaN is not less.
        found = Proximal(w, gap(w, u, a, b))
        better = found.gap < best.gap
        best = jax.tree.map(lambda x, y: jnp.where(better, x, y), found, best)
        return w, u, a, b, p, q, best

    e, u = y - X @ v, jnp.zeros_like(y)
    size = jnp.abs(e).mean()
    size = jnp.where(size > 0, size, 1)
    p, q = jnp.maximum(e, 0) + size, jnp.maximum(-e, 0) + size
    room = u + bound
    start = v, u, room, room, p, q, Proximal(v, gap(v, u, room, room))
    return lax.fori_loop(0, steps, step, start)[-1]


def _node_data(
    X: ArrayLike, y: ArrayLike, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """X and y, 0 where there is no row, and 1 / m_i, ``[n]``."""
    X, y, rows = node_rows(X, y, mask)
    return X, y.astype(X.dtype), (1 / rows.sum(1)).astype(X.dtype)


def _check_parameters(name: str, W: ArrayLike, X: jax.Array) -> None:
    # One node's vector would broadcast to all.
    check_shapes(f"({len(X)}, {X.shape[2]})", **{name: W})
