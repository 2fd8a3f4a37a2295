r"""Soft labels in few bits: a constrained quantiser, and codes for what it says.

References:
  Sattler et al., "CFD: Communication-Efficient Federated Distillation via Soft-Label
  Quantization and Delta Coding", IEEE TNSE 2022; Sattler, "Concepts for Efficient,
  Adaptive and Robust Deep Learning from Distributed Data", TU Berlin 2021, chapter 5.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from scipy import optimize
from scipy.special import entr

from fedjax_core import check
from fedjax_core.arrays import wide
from fedjax_core.metrics import Bits
from fedjax_core.transform import Message, Transform
from fedjax_core.types import Key

_PLACES = 24  # binary ones, of code lengths in sums
_UNITS = 2**_PLACES


def quantise_probabilities(p: jax.Array, bits: int, key: Key) -> jax.Array:
    r"""The nearest probabilities in multiples of :math:`1 / L`, :math:`L = 2^b - 1`.

    .. math::

      Q_b(p) = \arg\min_q \lVert q - p \rVert_1 \quad \text{subject to} \quad
      L q_k \in \{0, 1, \dots\}, \; \sum_k q_k = 1,

    by largest remainders; ties fall to a random class. One bit is a vote for the
    likeliest class. No entry moves by :math:`1 / L` or more, and a second time nothing
    moves.

    Args:
      p: ``[..., K]`` non-negative, summing to 1 along the last axis, K >= 2.
      bits: b, 1 to 16: float32 has no room for more.
      key: of the ties.

    Returns:
      ``[..., K]`` in the dtype of `p`, float32 or wider. What is no probability
      vector, its sum off by more than 1e-3, becomes NaN.
    """
    check.in_range(1, 16, bits=bits)
    levels, p = 2**bits - 1, wide(p)
    if p.shape[-1] < 2:
        raise ValueError(f"p must be of at least 2 classes, got shape {p.shape}.")
    fine = (p >= 0).all(-1, keepdims=True) & (abs(p.sum(-1, keepdims=True) - 1) < 1e-3)
    p = jnp.where(fine, p, jnp.nan)
    ties = jax.random.uniform(key, p.shape)
    if bits == 1:
        best = p == p.max(-1, keepdims=True)
        chosen = jnp.where(best, ties, -1).argmax(-1)
        votes = jax.nn.one_hot(chosen, p.shape[-1], dtype=p.dtype)
        return jnp.where(fine, votes, jnp.nan)
    scaled = levels * p
    # Numbers that rounding took just below whole ones count as whole.
    whole = jnp.floor(scaled + (1e-6 + levels * 2.0**-22))
    at = lax.broadcasted_iota(jnp.int32, p.shape, p.ndim - 1)
    # Sorted along, whole numbers are fixed: XLA may round a product that it works out
    # for each of its uses in another way each time, and sums would not add up.
    _, _, whole, place = lax.sort((whole - scaled, ties, whole, at), num_keys=2)
    missing = levels - whole.sum(-1, keepdims=True)
    # Too many of many classes may count as whole: in the order, those that were rounded
    # up the most come last.
    whole = whole + (at < missing) - (at >= p.shape[-1] + missing)
    return lax.sort((place, whole), num_keys=1)[1] / levels


def num_label_vectors(bits: int, num_classes: int) -> int:
    """How many probability vectors `quantise_probabilities` tells apart."""
    check.positive_int(bits=bits, num_classes=num_classes)
    return math.comb(2**bits - 1 + num_classes - 1, num_classes - 1)


def coded_bits(symbols: jax.Array, num_symbols: int) -> Bits:
    """What an ideal coder sends of symbols 0 to num_symbols - 1, in 2^-24 bits.

    Their number times their empirical entropy, see `fedjax_core.compress.arithmetic`.
    The logarithm of a share is a float32; sums are exact whole numbers of units.
    """
    counts = jnp.bincount(symbols.ravel(), length=num_symbols)
    lengths = -jnp.log2(jnp.where(counts > 0, counts, symbols.size) / symbols.size)
    return (Bits.of(jnp.round(lengths * _UNITS)) * counts).sum()


def delta_encode(labels: jax.Array, previous: jax.Array) -> jax.Array:
    """What changed: labels 1 to K where they differ from `previous`, 0 elsewhere."""
    return jnp.where(labels != previous, labels, jnp.zeros_like(labels))


def delta_decode(message: jax.Array, previous: jax.Array) -> jax.Array:
    """The labels of `delta_encode`, from it and the labels decoded before."""
    return jnp.where(message != 0, message, previous)


def soft_labels(bits: int, *, delta: bool = False) -> Transform:
    """`quantise_probabilities` for labels ``[n, K]`` of a public set, entropy coded.

    One bit sends classes, in as many bits as their empirical entropy says. More bits
    send the number of a vector. With `delta`, both are coded against what the same
    sender last said, example by example: a class as itself or "as before", a vector
    after an entropy coded flag. The state is that history, in integers of 8 or 32 bits.
    The public set and its order must stay the same.
    """
    check.positive_int(bits=bits)
    check.in_range(1, 16, bits=bits)
    levels = 2**bits - 1

    def init(labels):
        largest = labels.shape[1] if bits == 1 else levels
        dtype = jnp.int8 if largest < 2**7 else jnp.int32
        return jnp.zeros(labels.shape[: 1 + (bits > 1)], dtype) if delta else ()

    def apply(message, previous, key):
        sent = quantise_probabilities(message.update, bits, key)
        n, num_classes = sent.shape
        if bits == 1:
            labels = 1 + sent.argmax(-1)
            new = delta_encode(labels, previous) if delta else labels
            units = coded_bits(new, num_classes + 1)
        else:
            labels = jnp.round(levels * sent).astype(jnp.int32)
            vectors = num_label_vectors(bits, num_classes)
            units = Bits.of(round(math.log2(vectors) * _UNITS))  # of one
            if delta:
                changed = (labels != previous).any(-1)
                units = coded_bits(changed.astype(jnp.int32), 2) + units * changed.sum()
            else:
                units = units * n
        kept = labels.astype(previous.dtype) if delta else ()
        sent = sent.astype(message.update.dtype)
        # A message has whole bits, but for what logarithms are rounded.
        whole = (units + (_UNITS - 1 - _UNITS // 1000)) >> _PLACES
        return Message(sent, whole), kept

    name = f"soft_labels({bits}{', delta' if delta else ''})"
    return Transform(init, apply, lambda bound: float("inf"), name)


def delta_entropy(agreement: ArrayLike, num_classes: int) -> np.ndarray:
    r"""Bits a label of delta coding, :math:`h(a) + (1 - a) \log_2 K`.

    The agreement a is the chance that a label stays; one that changes is uniform over
    the K classes, and h is the entropy of a coin.
    """
    check.each_in_range(0, 1, agreement=agreement)
    check.positive_int(num_classes=num_classes)
    a = np.asarray(agreement, float)
    coin = (entr(a) + entr(1 - a)) / math.log(2)
    return coin + (1 - a) * math.log2(num_classes)


def break_even_agreement(num_classes: int) -> float:
    """The agreement above which delta coding of uniform labels pays off."""
    check.in_range(2, math.inf, num_classes=num_classes)

    # Near 0 the coin costs more than a tells; from one agreement on it costs less.
    def lost(agreement: float) -> float:
        return float(delta_entropy(agreement, num_classes)) - math.log2(num_classes)

    least = 1e-9
    if lost(least) <= 0:
        return least
    root: Any = optimize.brentq(lost, least, 1, xtol=1e-15)
    return root


def fit_power_law(rounds: ArrayLike, entropy: ArrayLike) -> tuple[float, float]:
    r"""Fits :math:`H_t = c\,t^{-d}` by least squares of logarithms; returns c and d.

    Of rounds t >= 1, two different ones or more, and entropies > 0 in bits a label.
    """
    check.each_in_range(1, math.inf, rounds=rounds)
    check.each_in_range(np.finfo(float).tiny, math.inf, entropy=entropy)
    t, h = np.asarray(rounds, float), np.asarray(entropy, float)
    if t.ndim != 1 or t.shape != h.shape or len(np.unique(t)) < 2:
        raise ValueError(
            f"rounds and entropy must be [T] of two different rounds or more, got "
            f"{t} and {h}."
        )
    slope, intercept = np.polyfit(np.log(t), np.log(h), 1)
    return float(np.exp(intercept)), float(-slope)
