r"""What is known of compressed training before it runs: bits, noise, contraction.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, chapters 3 and 4; its formulas are corrected where said.
"""

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.compress import golomb
from fedjax_core.compress.sparsifiers import KINDS

Kind = Literal["top_k", "stc", "sbc"]
Accounting = Literal["golomb", "seed_table"]


class Budget(NamedTuple):
    """Bits of a client over a whole run, each way that messages go (equation 3.1)."""

    total: float
    entropy: float  # of it, what no coding can save
    overhead: float  # of it, what the code takes beyond


def value_bits(method: Kind, rate: float, accounting: Accounting = "golomb") -> float:
    """Expected bits of a coordinate that is sent, its position included.

    Without the one mean of a message, which does not grow with the model. The rate p in
    (0, 1) is the share of coordinates sent; "seed_table" has the surplus bits of the
    thesis's tables.
    """
    check.one_of(KINDS, method=method)
    check.one_of(get_args(Accounting), accounting=accounting)
    # Beyond a half both signs of SBC's message may cancel.
    check.in_range(0, 0.5 if method == "sbc" else 1, rate=rate)
    surplus = KINDS[method].surplus if accounting == "seed_table" else 0
    return golomb.expected_bits(rate) + KINDS[method].value + surplus


def compression_ratio(
    method: Kind, rate: float, delay: int = 1, accounting: Accounting = "golomb"
) -> float:
    r"""How many times less is sent than by distributed SGD: :math:`32 n / (p\,\bar b)`.

    Args:
      method: as in `value_bits`.
      rate: p, the gradient sparsity.
      delay: n, local iterations per round; 1 / n is the temporal sparsity.
      accounting: as in `value_bits`.
    """
    check.positive_int(delay=delay)
    return 32 * delay / (rate * value_bits(method, rate, accounting))


def information_budget(
    method: Kind, rate: float, delay: int, iterations: int, d: int
) -> Budget:
    r"""Bits of a client, :math:`\frac{T}{n} d\,(\bar H + \bar\eta)`.

    Entropy is that of which coordinates are sent and of their values, if every
    coordinate had the same chance. What a method is worth follows from
    :math:`p / n` alone, the thesis finds, over a wide range of both.

    Args:
      method: as in `value_bits`.
      rate: p in (0, 1).
      delay: n >= 1.
      iterations: T, local iterations.
      d: coordinates.
    """
    check.positive_int(delay=delay, iterations=iterations, d=d)
    coordinates = iterations / delay * d
    total = coordinates * rate * value_bits(method, rate)
    which = -(rate * math.log2(rate) + (1 - rate) * math.log1p(-rate) / math.log(2))
    entropy = coordinates * (which + rate * KINDS[method].value)
    return Budget(total, entropy, total - entropy)


def download_ratio(participation: float, method: Literal["stc", "signsgd"]) -> float:
    """Bits that a client downloads per bit it uploads when it catches up on messages.

    It takes part every 1 / C rounds on average, C the participation rate; signSGD's
    votes add up to numbers of so many values.
    """
    check.positive(participation=participation)
    check.in_range(0.0, 1.0, participation=participation)
    check.one_of(("stc", "signsgd"), method=method)
    gap = 1 / participation
    return gap if method == "stc" else math.log2(2 * gap + 1)


def accumulated_variance(
    steps: int, beta: float, sigma: float = 1.0
) -> tuple[float, float]:
    r"""The variance of accumulated noise, exactly and bounded (Theorem 1).

    Noise of a weight is stationary, :math:`n^t = \beta n^{t-1} + N^t` with
    :math:`-1 < \beta < 0` and standard deviation :math:`\sigma`. Then

    .. math::

      \mathrm{Var} \sum_{t \le T} n^t = \sigma^2 \Bigl(T \frac{1 + \beta}{1 - \beta}
        + 2 \frac{\beta^{T + 1} - \beta}{(1 - \beta)^2}\Bigr)
        \le \sigma^2 (T (1 + \beta) + 1) .
    """
    check.positive_int(steps=steps)
    check.open_interval(-1, 0, beta=beta)
    check.positive(sigma=sigma)
    exact = steps * (1 + beta) / (1 - beta)
    exact += 2 * (beta ** (steps + 1) - beta) / (1 - beta) ** 2
    return sigma**2 * exact, sigma**2 * (steps * (1 + beta) + 1)


def signal_to_noise(
    mean_step: float, steps: int, beta: float, sigma: float = 1.0
) -> float:
    r"""A lower bound on the signal-to-noise ratio of accumulated updates (Corollary 1).

    :math:`T \bar s / \sqrt{\sigma^2 (T (1 + \beta) + 1)}`: it grows with the delay,
    where the thesis once says that residuals reduce it.
    """
    _, bound = accumulated_variance(steps, beta, sigma)
    return steps * mean_step / math.sqrt(bound)


def contraction(v: jax.Array, k: int) -> jax.Array:
    r"""The share of :math:`\lVert v \rVert^2` that STC of k coordinates leaves out.

    :math:`\alpha(v) = 1 - \lVert \mathrm{top}_k(v) \rVert_1^2 / (k \lVert v \rVert^2)`;
    Lemma 2 prints what is subtracted. Never more than `worst_contraction`.
    """
    check.in_range(1, v.size, k=k)
    largest = jax.lax.top_k(jnp.abs(v), k)[0]
    return 1 - largest.sum() ** 2 / (k * jnp.square(v).sum())


def worst_contraction(k: int, d: int) -> float:
    r"""The largest share that STC may leave out, :math:`1 - \min(1 / k, k / d)`.

    Met by a vector of equal magnitudes, and approached by one with a single large
    coordinate. Where the others are exactly 0 less is left out, for their sign is 0.
    """
    check.positive_int(k=k, d=d)
    check.in_range(1, d, k=k)
    return 1 - min(1 / k, k / d)


def residual_bound(alpha: float, largest: float) -> float:
    r"""A bound on the norm of a residual, :math:`u \sqrt\alpha / (1 - \sqrt\alpha)`.

    Of a compressor with a contraction of at most alpha for every vector, and updates
    of norms of at most u, `largest`.
    """
    check.fraction(alpha=alpha)
    check.non_negative(largest=largest)
    return largest * math.sqrt(alpha) / (1 - math.sqrt(alpha))


def convergence_terms(
    steps: int, rate: float, *, smoothness: float, convexity: float, gradient: float
) -> tuple[float, float, float]:
    r"""The three terms of the rate of compressed SGD with memory, without constants.

    .. math::

      \frac{U^2}{\zeta T}, \qquad \frac{U^2 \kappa}{p^2 \zeta T^2}, \qquad
      \frac{U^2}{p^3 \zeta T^3}

    with :math:`\kappa = L / \zeta`. From :math:`T > \kappa / p^2` on the first one,
    that of SGD, is the largest; both papers say :math:`\sqrt\kappa / p`, where the
    second one still is. The thesis prints other letters for U and :math:`\kappa` and
    leaves out :math:`\zeta`.

    Args:
      steps: T.
      rate: p, one minus the contraction factor.
      smoothness: L.
      convexity: :math:`\zeta`, of strong convexity.
      gradient: U, a bound on the norm of gradients.

    References:
      Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, Theorem
      2.4.
    """
    check.positive_int(steps=steps)
    check.positive(rate=rate, smoothness=smoothness, convexity=convexity)
    check.in_range(0, 1, rate=rate)
    check.non_negative(gradient=gradient)
    first = gradient**2 / (convexity * steps)
    second = first * (smoothness / convexity) / (rate**2 * steps)
    return first, second, first / (rate**3 * steps**2)
