r"""What is known of decisions on responses in [C1, C2]: slopes, regret and its bounds.

Regret is what decisions :math:`p_t`, made before the responses :math:`r_t`, cost more
than the best fixed one in hindsight,
:math:`\sum_t \ell(p_t; r_t) - \min_p \sum_t \ell(p; r_t)`.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, sections 3.3 and 3.7.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, check_finite, is_known
from fedjax_core.fair.responses import decision_loss
from fedjax_core.fair.simplex import minimise


def lipschitz(low: ArrayLike, high: ArrayLike) -> ArrayLike:
    r"""A bound :math:`C_2 / (1 + C_1)` on each coordinate of the decision's gradient.

    The thesis (Lemma 3.1) reads it as a Lipschitz constant in the largest norm, which
    is false; it is one in the 1-norm.
    """
    return high / (1 + low)  # type: ignore[operator]


def lipschitz_of_estimates(low: ArrayLike, high: ArrayLike, share: ArrayLike):
    r"""The same for linearised gradients at estimated responses (Lemma 3.5).

    :math:`C_2 / (1 + C_1) + 2 (C_2 - C_1) / (c (1 + C_1))` where clients are sampled
    with a chance of `share`, c.
    """
    return (high + 2 * (high - low) / share) / (1 + low)  # type: ignore[operator]


def _checked(responses: ArrayLike) -> jax.Array:
    r = as_float(responses)
    check_finite(responses=r)
    if is_known(r) and (np.asarray(r) <= -1).any():
        raise ValueError(f"responses must be > -1, got {np.min(r)}.")
    return r


def _best(
    r: jax.Array, share: jax.Array, start: jax.Array, steps: int = 50
) -> jax.Array:
    r"""The fixed decision that is best in hindsight; ``[K]``.

    The maximiser of :math:`\sum_t s_t \log(1 + \langle p, r_t \rangle)` for responses
    ``[T, K]`` and the rounds' shares ``[T]``, by Newton steps on the simplex from
    `start`, shortened where they would lose. It takes `steps` at most, and ends where
    none is gained by moving to any corner.
    """
    share = share / share.sum()
    shorter = 0.5 ** jnp.arange(8, dtype=r.dtype)

    def paid(p):
        return -share @ jnp.log1p(r @ p)

    def slopes(p):
        return (1 + r) / (1 + r @ p)[:, None]

    def step(carry):
        i, p, _ = carry
        each = slopes(p)
        apart = each - each.mean(1, keepdims=True)
        curvature = (share[:, None] * apart).T @ apart
        target = minimise(curvature, curvature @ p + share @ each)
        tried = p[None] + shorter[:, None] * (target - p)[None]
        losses = jax.vmap(paid)(tried)
        best = losses.argmin()
        new = jnp.where(losses[best] <= paid(p), tried[best], p)
        return i + 1, new, (share @ slopes(new)).max() - 1

    def unfinished(carry):
        return (carry[0] < steps) & (carry[2] > 4 * jnp.finfo(r.dtype).eps)

    carry = jnp.int32(0), start, jnp.asarray(jnp.inf, r.dtype)
    with jax.default_matmul_precision("highest"):
        return jax.lax.while_loop(unfinished, step, carry)[1]


def regret(decisions: ArrayLike, responses: ArrayLike) -> jax.Array:
    """Regret after each round t against what was best in rounds 1 to t (3.5); ``[T]``.

    The best fixed decision changes from round to round: that of all rounds would make
    all regrets but the last too small. Decisions, made before the round's responses,
    and responses are ``[T, K]``.

    Raises:
      ValueError: a known response is not finite, or -1 or less, which has no logarithm.
    """
    r = _checked(responses)
    return _regret(decision_loss(decisions, r), r)


@jax.jit
def _regret(paid: jax.Array, r: jax.Array) -> jax.Array:
    start, t = jnp.full(r.shape[1], 1 / r.shape[1], r.dtype), jnp.arange(len(r))

    def after(best, now):
        past = t <= now
        best = _best(r, past.astype(r.dtype), best)
        return best, jnp.where(past, paid - decision_loss(best, r), 0).sum()

    return jax.lax.scan(after, start, t)[1]


def ons_bound(
    rounds: ArrayLike, num_clients: int, slope: float = 1.0, curvature: float = 0.25
) -> jax.Array:
    r"""What the regret of the online Newton step is at most (Theorem 3.1).

    :math:`\frac\alpha2 + \frac{K}{2 \beta} \log(1 + \beta T L^2 / \alpha)` with
    :math:`\alpha = 4 K L`; :math:`2 L K (1 + \log(1 + T / 16 K))` for :math:`\beta = 1
    / 4 L`. It is proven for :math:`\beta \le 1/2` and :math:`2 \beta L \le 1`: not for
    the thesis's own range [0, 1 / K] of responses with K > 2, where it may fail.

    Args:
      rounds: T, a number or an array.
      num_clients: K.
      slope: L, of `lipschitz`.
      curvature: :math:`\beta`.

    Raises:
      ValueError: a curvature for which nothing is proven.
    """
    check.positive_int(num_clients=num_clients)
    check.positive(slope=slope)
    check.open_interval(0, 0.5 + 1e-12, curvature=curvature)
    check.open_interval(0, 0.5 / slope + 1e-12, curvature=curvature)
    T, alpha = as_float(rounds), 4 * num_clients * slope
    growth = jnp.log1p(curvature * T * slope**2 / alpha)
    return alpha / 2 + num_clients / (2 * curvature) * growth


def ftrl_bound(rounds: ArrayLike, num_clients: int, slope: float) -> jax.Array:
    r"""The bound :math:`2 L \sqrt{T \log K}` of entropic FTRL (Theorem 3.2).

    It holds along every path of gradients whose coordinates are at most L = `slope`: on
    regret itself for exact gradients, on that of the linearised losses for estimated
    ones.
    """
    check.positive_int(num_clients=num_clients)
    check.non_negative(slope=slope)
    return 2 * slope * jnp.sqrt(as_float(rounds) * math.log(num_clients))
