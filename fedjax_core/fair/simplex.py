"""Quadratic programs over the probability simplex, inside compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core.arrays import as_float, is_known

_HALVINGS = 60  # of an interval: to the last bit of a float64


def project(v: ArrayLike, low: ArrayLike = 0.0, high: ArrayLike = 1.0) -> jax.Array:
    r"""The point nearest to v ``[K]`` among those with sum 1 between bounds; ``[K]``.

    It is :math:`\mathrm{clip}(v - \tau)` for the :math:`\tau` that gives the sum, found
    by bisection. (``optax.projections`` has the simplex without upper bounds.) The
    bounds are numbers or ``[K]``; ValueError if known ones leave no room for the sum.
    """
    v = as_float(v)
    _check_bounds(low, high, len(v))

    def halve(_, ends):
        below, above = ends
        middle = (below + above) / 2
        enough = jnp.clip(v - middle, low, high).sum() >= 1
        return jnp.where(enough, middle, below), jnp.where(enough, above, middle)

    start = (v - high).min(), (v - low).max()
    below, above = jax.lax.fori_loop(0, _HALVINGS, halve, start)
    return jnp.clip(v - (below + above) / 2, low, high)


def _check_bounds(low: ArrayLike, high: ArrayLike, num: int) -> None:
    if not is_known(low, high):
        return
    least, most = (np.broadcast_to(np.asarray(x), num) for x in (low, high))
    slack = 1e-5 * num  # of bounds that are 1 / num in single precision
    if (least > most).any() or least.sum() > 1 + slack or most.sum() < 1 - slack:
        raise ValueError(
            f"low and high must leave room for {num} numbers with sum 1, got {low} and "
            f"{high}."
        )


def minimise(
    B: ArrayLike,
    b: ArrayLike,
    low: ArrayLike = 0.0,
    high: ArrayLike = 1.0,
    *,
    steps: int = 500,
) -> jax.Array:
    r"""Minimises :math:`\frac12 p^\top B p - b^\top p` over a simplex with bounds.

    Accelerated projected gradients that restart where they go uphill; then the linear
    system of the coordinates that are at no bound, taken where it is the better point.
    What B has in common for all coordinates does not move the minimum and is left out,
    as it would make steps small. NaN where B or b is not finite.

    Args:
      B: ``[K, K]``, symmetric and positive semi-definite.
      b: ``[K]``.
      low: as for `project`, like `high`.
      high: see there.
      steps: at most; it ends where the optimality gap is of rounding size.

    Raises:
      ValueError: as for `project`.

    References:
      O'Donoghue and Candès, "Adaptive Restart for Accelerated Gradient Schemes",
      Foundations of Computational Mathematics 15, 2015.
    """
    whole, given = as_float(B), as_float(b)
    _check_bounds(low, high, len(given))
    known = jnp.isfinite(whole).all() & jnp.isfinite(given).all()
    rows = whole - whole.mean(0, keepdims=True)
    B = rows - rows.mean(1, keepdims=True)
    b = given - whole.mean(1)
    b = b - b.mean()
    low, high = jnp.broadcast_to(low, b.shape), jnp.broadcast_to(high, b.shape)
    eps = jnp.finfo(b.dtype).eps
    rate = 1 / jnp.maximum(jnp.abs(B).sum(1).max(), jnp.finfo(b.dtype).tiny)
    enough = 8 * eps * (jnp.abs(B).max() + jnp.abs(b).max())

    def gap(p):
        # <grad, p - q> for the best q: fill up from `low` where the gradient is least.
        grad = B @ p - b
        order = jnp.argsort(grad)
        room = (high - low)[order]
        left = 1 - low.sum() - (jnp.cumsum(room) - room)
        best = low.at[order].add(jnp.clip(left, 0, room))
        return grad @ (p - best)

    def better(p):
        slack = 64 * eps
        free = (p > low + slack) & (p < high - slack)
        held = jnp.where(free, 0, jnp.clip(p, low, high))
        M = jnp.where(free[:, None] & free[None], whole, jnp.eye(len(b), dtype=b.dtype))
        mine = jnp.where(free, given - whole @ held, 0)
        rhs = jnp.stack([mine, free.astype(b.dtype)], 1)
        x, ones = jnp.linalg.solve(M, rhs).T
        nu = (x.sum() - (1 - held.sum())) / ones.sum()
        q = jnp.clip(jnp.where(free, x - nu * ones, held), low, high)
        good = (jnp.abs(q.sum() - 1) < slack) & (gap(q) <= gap(p))
        return jnp.where(good, q, p)

    def step(carry):
        i, p, y, t = carry
        new = project(y - rate * (B @ y - b), low, high)
        uphill = (y - new) @ (new - p) > 0
        t = jnp.where(uphill, 1, t)
        t_new = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
        return i + 1, new, new + (t - 1) / t_new * (new - p), t_new

    def unfinished(carry):
        return (carry[0] < steps) & (gap(carry[1]) > enough)

    # Or a gap of rounding size would be that of an accelerator's short factors.
    with jax.default_matmul_precision("highest"):
        start = better(project(jnp.full_like(b, 1 / len(b)), low, high))
        carry = jnp.int32(0), start, start, jnp.ones((), b.dtype)
        found = better(jax.lax.while_loop(unfinished, step, carry)[1])
    return jnp.where(known, found, jnp.nan)
