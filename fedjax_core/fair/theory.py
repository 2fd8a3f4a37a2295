r"""What is known of decisions on responses in [C1, C2]: slopes, regret and its bounds.

Regret is what decisions :math:`p_t`, made before the responses :math:`r_t`, cost more
than the best fixed one in hindsight,
:math:`\sum_t \ell(p_t; r_t) - \min_p \sum_t \ell(p; r_t)`.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, sections 3.3 and 3.7.
  Cover, "An Algorithm for Maximizing Expected Log Investment Return", IEEE Transactions
  on Information Theory 30, 1984: the iteration of `best_fixed`.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float
from fedjax_core.fair.responses import decision_loss


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


def best_fixed(responses: ArrayLike, steps: int = 2000) -> jax.Array:
    r"""The fixed decision that is best in hindsight; ``[K]``.

    By :math:`p_i \leftarrow p_i \frac1T \sum_t (1 + r_{t,i}) / (1 + \langle p, r_t
    \rangle)`, which never leaves the simplex and never makes p worse.

    Args:
      responses: ``[T, K]``.
      steps: of the iteration.
    """
    wealth = 1 + as_float(responses)

    def step(_, p):
        p = p * (wealth / (wealth @ p)[:, None]).mean(0)
        return p / p.sum()

    K = wealth.shape[1]
    return jax.lax.fori_loop(0, steps, step, jnp.full(K, 1 / K, wealth.dtype))


def regret(decisions: ArrayLike, responses: ArrayLike) -> jax.Array:
    """Regret after each round against the best fixed decision of all rounds; ``[T]``.

    Args:
      decisions: ``[T, K]``, made before the round's responses.
      responses: ``[T, K]``.
    """
    best = best_fixed(responses)
    excess = decision_loss(decisions, responses) - decision_loss(best, responses)
    return jnp.cumsum(excess)


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
    return 2 * slope * jnp.sqrt(as_float(rounds) * math.log(num_clients))
