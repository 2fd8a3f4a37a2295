"""Projections onto the balls of p-norms."""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core.arrays import flat_rows
from fedjax_core.networks.variation import lp


def project(U: ArrayLike, radius: ArrayLike, p: float) -> jax.Array:
    """For every row of U ``[E, ...]`` the nearest point with ||u_e||_p <= radius_e.

    Exact for p = 1, 2 and infinity. For other p >= 1 a search of a thousand operations
    per entry; the result lies in the ball. Radii are ``[E]``, >= 0.
    """
    norm = lp(p)
    U = jnp.asarray(U)
    flat = flat_rows(U)
    r = jnp.asarray(radius)[:, None]
    if math.isinf(p):
        inside = jnp.clip(flat, -r, r)
    elif p == 2:
        inside = flat * _shrink(norm(flat)[:, None], r)
    elif p == 1:
        inside = _project_l1(flat, r)
    else:
        size = jnp.abs(flat) / jnp.where(r > 0, r, 1)
        unit = _project_unit(size, p)
        unit = unit * _shrink(norm(unit)[:, None], jnp.ones_like(r))
        needed = norm(size)[:, None] > 1
        inside = jnp.where(needed, jnp.sign(flat) * r * unit, flat)
        inside = jnp.where(r > 0, inside, 0)
    return inside.reshape(U.shape)


def _shrink(norm: jax.Array, r: jax.Array) -> jax.Array:
    outside = norm > r
    return jnp.where(outside, r / jnp.where(outside, norm, 1), 1)


def _project_l1(U: jax.Array, r: jax.Array) -> jax.Array:
    size = jnp.abs(U)
    ordered = -jnp.sort(-size, axis=1)
    rank = jnp.arange(1, U.shape[1] + 1, dtype=U.dtype)[None]
    level = (jnp.cumsum(ordered, axis=1) - r) / rank
    last = jnp.maximum((ordered > level).sum(1, keepdims=True) - 1, 0)
    threshold = jnp.maximum(jnp.take_along_axis(level, last, 1), 0)
    return jnp.sign(U) * jnp.maximum(size - threshold, 0)


def _project_unit(u: jax.Array, p: float) -> jax.Array:
    # The projection solves x + mu x^(p-1) = u with ||x||_p = 1. As a polynomial
    # a t^k + b t = u with k >= 1, it is convex and Newton's method from above monotone.
    k = p - 1 if p >= 2 else 1 / (p - 1)

    def solve(mu):
        a, b = (mu, 1.0) if p >= 2 else (1.0, mu)

        def newton(_, t):
            slope = a * k * t ** (k - 1) + b
            return jnp.maximum(t - (a * t**k + b * t - u) / slope, 0)

        start = jnp.minimum((u / a) ** (1 / k), u / b)
        t = jax.lax.fori_loop(0, 20, newton, start)
        return t if p >= 2 else t**k

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        outside = (solve(middle) ** p).sum(1, keepdims=True) > 1
        return jnp.where(outside, middle, low), jnp.where(outside, high, middle)

    # With this mu every entry is at most dim^(-1/p).
    most = u.max(1, keepdims=True) * u.shape[1] ** ((p - 1) / p)
    _, high = jax.lax.fori_loop(0, 60, halve, (jnp.zeros_like(most), most))
    return solve(high)
