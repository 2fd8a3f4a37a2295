r"""Responses: losses of clients as bounded numbers that a decision is paid by.

A server that mixes by :math:`p` pays :math:`\ell(p; r) = -\log(1 + \langle p, r
\rangle)` for responses :math:`r \in [C_1, C_2]^K`: it does well to have weight where
losses are large. Responses of clients out of a cohort are estimated.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, section 3.3; equations are its.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, as_mask, is_known

CDFS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "weibull": lambda x: -jnp.expm1(-jnp.square(jnp.maximum(x, 0))),
    "frechet": lambda x: jnp.where(x <= 0, 0, jnp.exp(-1 / jnp.where(x <= 0, 1, x))),
    "gumbel": lambda x: jnp.exp(-jnp.exp(-(x - 1))),
    "exponential": lambda x: -jnp.expm1(-jnp.maximum(x, 0)),
    "logistic": lambda x: jax.nn.sigmoid(x - 1),
    "normal": lambda x: ndtr(x - 1),
}
"""Distribution functions of a loss over the mean loss, of scale and location 1."""


def respond(
    losses: ArrayLike,
    valid: ArrayLike | None = None,
    *,
    cdf: str = "normal",
    low: ArrayLike = 0.0,
    high: ArrayLike = 1.0,
) -> jax.Array:
    r"""Responses :math:`C_1 + (C_2 - C_1) \mathrm{CDF}(F_i / \bar F)` (3.8); ``[C]``.

    Losses that are all 0 tell nothing: every response is that of a mean loss. A loss
    below 0, of which no share of a mean has a meaning, makes all responses NaN.

    Args:
      losses: ``[C]``, >= 0; those of the cohort.
      valid: ``[C]`` bool, clients that count, over which the mean is taken: all.
      cdf: name in `CDFS`.
      low: :math:`C_1`, >= 0.
      high: :math:`C_2`, > low.

    Raises:
      ValueError: a known bound is out of range; of traced ones, responses are NaN.
    """
    check.one_of(CDFS, cdf=cdf)
    check.non_negative(low=low, high=high)
    if is_known(low, high) and np.asarray(low) >= np.asarray(high):
        raise ValueError(f"low must be < high, got {low} and {high}.")
    # Or the reciprocal of their mean may be no number, that of 16 times it as well.
    losses = jnp.asarray(jax.lax.optimization_barrier(as_float(losses) / 16))
    low, high = jnp.asarray(low, losses.dtype), jnp.asarray(high, losses.dtype)
    there = jnp.ones(losses.shape, bool) if valid is None else jnp.asarray(valid)
    heard = jnp.where(there, losses, 0)
    # Their sum may be out of range. A NaN is no zero: it goes on.
    mean = (heard / jnp.maximum(there.sum(), 1)).sum()
    mean = jnp.where((heard < 0).any(), jnp.nan, mean)
    x = jnp.where(mean == 0, 1, losses / jnp.where(mean == 0, 1, mean))
    return low + jnp.where(high > low, high - low, jnp.nan) * CDFS[cdf](x)


def decision_loss(p: ArrayLike, r: ArrayLike) -> jax.Array:
    r"""The loss :math:`-\log(1 + \langle p, r \rangle)` (3.3) of decisions; ``[...]``.

    Of points of the simplex and responses, both ``[..., K]``. Where :math:`\langle p, r
    \rangle \le -1`, which no responses >= 0 have, it is NaN, as the gradient is.
    """
    p, r = jnp.broadcast_arrays(as_float(p), as_float(r))
    return -jnp.log1p((p * r).sum(-1))


def decision_gradient(p: ArrayLike, r: ArrayLike) -> jax.Array:
    r"""Its gradient :math:`-r / (1 + \langle p, r \rangle)` in p; ``[K]``."""
    p, r = as_float(p), as_float(r)
    at = 1 + p @ r
    return -r / jnp.where(at > 0, at, jnp.nan)


def doubly_robust(
    responses: ArrayLike, sampled: ArrayLike, imputed: ArrayLike | None = None
) -> jax.Array:
    r"""Responses of all clients from those of a cohort S (3.10); ``[K]``.

    :math:`\bar r + 1[i \in S] (r_i - \bar r) / c` where :math:`c = |S| / K` is the
    chance of being sampled.

    With :math:`\bar r` of the same cohort, as in the thesis, this is *not* unbiased,
    see `shrinkage`; with a value fixed before sampling it is.

    Args:
      responses: ``[K]``, looked at where `sampled`.
      sampled: ``[K]`` bool.
      imputed: :math:`\bar r`, a number or ``[K]``; the mean over the cohort by default.
    """
    r = as_float(responses)
    here = as_mask("sampled", sampled, r.shape)
    share = here.mean(dtype=r.dtype)
    own = jnp.where(here, r, 0).sum() / here.sum()
    guess = own if imputed is None else as_float(imputed)
    return guess + jnp.where(here, (r - guess) / share, 0)


def linearised_gradient(p: ArrayLike, r: ArrayLike, about: ArrayLike) -> jax.Array:
    r"""The gradient of `decision_loss` in p, linear in r around a reference (3.11).

    :math:`-\frac{r}{1 + \langle p, r_0 \rangle} + r_0 \frac{\langle p, r - r_0 \rangle}
    {(1 + \langle p, r_0 \rangle)^2}`, all ``[K]``. Linear, so that it stays unbiased in
    estimated responses while the reference :math:`r_0` does not depend on them.
    """
    p, r, about = as_float(p), as_float(r), as_float(about)
    at = 1 + p @ about
    return -r / at + about * (p @ (r - about)) / at**2


def shrinkage(num_clients: int, cohort_size: int) -> float:
    r"""How far the estimate (3.10) falls short: :math:`\kappa = (K - m) / (m (K - 1))`.

    Its mean over cohorts of m of K clients, drawn without replacement, is
    :math:`r_i + \kappa (\bar r - r_i)`: unbiased for m = K only, and with m = 1 it
    tells nothing.
    """
    check.in_range(2, float("inf"), num_clients=num_clients)
    check.in_range(1, num_clients, cohort_size=cohort_size)
    return (num_clients - cohort_size) / (cohort_size * (num_clients - 1))
