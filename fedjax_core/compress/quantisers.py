r"""Dense quantisers, and how to spread a budget of bits over the steps of a method.

A message of d digits in base q takes :math:`\lceil d \log_2 q \rceil` bits, see
`fedjax_core.compress.coders`.

References:
  Jung, "Federated Learning: From Theory to Practice", Exercise 4.6 and Section 4.4.
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, table 4.1.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float
from fedjax_core.metrics import Bits
from fedjax_core.reduce import Reduction, total
from fedjax_core.transform import Message, Transform, flat_norm, of_vectors, stateless
from fedjax_core.types import PyTree, trained, with_trained


def quantise(x: PyTree, bits: ArrayLike) -> PyTree:
    r"""Rounds every coordinate to one of :math:`2^b` levels between -s and s.

    The scale s is the largest magnitude over all leaves and has to be sent along. The
    levels are the midpoints of equal cells, so that no coordinate errs by more than
    :math:`s\,2^{-b}`, and the whole vector by no more than
    :math:`\sqrt d\,s\,2^{-b}`. None of them is 0: zeros become :math:`s\,2^{-b}`.

    Args:
      x: what to send, an array or more.
      bits: b > 0 per coordinate, a whole number to be sendable; may be traced.
    """
    check.positive(bits=bits)
    x = jax.tree.map(as_float, x)
    if not (leaves := jax.tree.leaves(x)):
        raise ValueError(f"x must hold an array, got {x!r}.")
    scale = leaves[0].dtype.type(0)
    for leaf in leaves:
        scale = jnp.maximum(scale, jnp.max(jnp.abs(leaf), initial=0))
    # Near the largest float 2 s overflows, and 1 / s, by which XLA may multiply,
    # underflows.
    huge = scale > jnp.finfo(scale.dtype).max / 2**8
    down = jnp.where(huge, 2.0**-8, 1).astype(scale.dtype)
    # Whole numbers of bits give 2^b exactly, which exp2 alone does not.
    bits = jnp.asarray(bits, scale.dtype)
    whole = jnp.floor(bits)
    power = jnp.ldexp(jnp.exp2(bits - whole), whole.astype(int))
    cell = 2 * (scale * down) / power
    # The coordinate s itself belongs to the last cell.
    last = jnp.ceil(power / 2) - 1

    def one(leaf):
        exact = leaf.astype(scale.dtype) * down
        index = jnp.floor(exact / jnp.where(cell > 0, cell, 1))
        sent = jnp.clip(index, -last - 1, last) * cell + cell / 2
        return (sent / down).astype(leaf.dtype)

    return jax.tree.map(one, x)


def quantise_update(bits: int) -> Transform:
    """`quantise` for the updates of a server's clients; b bits each and one float32.

    It bounds no norm: clip after it where a bound is needed. It sends every coordinate,
    and those that are 0 no longer as 0. Where many are, behind a sparsifier or in a
    model that stands still, they drift by the scale over 2^b a round.
    """
    check.positive_int(bits=bits)

    def apply(message, key):
        del key
        sent = quantise(message.update, bits)
        size = sum(x.size for x in jax.tree.leaves(sent))
        return Message(sent, Bits.of(bits * size + 32))

    return stateless(apply, name=f"quantise_update({bits})", statistics=True)


def digit_bits(d: int, base: int) -> int:
    r"""Bits of d digits, :math:`\lceil d \log_2 q \rceil`."""
    return math.ceil(d * math.log2(base))


def sign() -> Transform:
    """Sends the sign of every coordinate, one bit each: signSGD's client.

    A coordinate that is 0, as gradients of units are that no example of a batch
    reaches, stays 0 and is counted as one bit all the same, as in Bernstein et al.,
    "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018.
    """
    return of_vectors(lambda v, key: (jnp.sign(v), Bits.of(v.size)), name="sign()")


def majority_vote(by: Any = "uniform") -> Reduction:
    """What most clients send, by sign: -1, 1, or 0 where the votes are equal.

    Weights of the votes are as in `total`, by which running statistics are added up.
    Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault
    Tolerant", ICLR 2019, Algorithm 1.
    """
    votes = total(by)

    def finish(acc, cast):
        result = votes.finish(acc, cast)
        return with_trained(result, jax.tree.map(jnp.sign, trained(result)))

    name = votes.name.replace("total", "majority_vote")
    return votes._replace(finish=finish, name=name)


def terngrad() -> Transform:
    r"""Rounds to 0 and the largest magnitude s at random, without bias.

    :math:`s\,\mathrm{sign}(v_j)` with probability :math:`|v_j| / s`, else 0: ternary
    digits and one float32. Wen et al., "TernGrad: Ternary Gradients to Reduce
    Communication in Distributed Deep Learning", NeurIPS 2017, equation 3.
    """

    def compress(v, key):
        scale = jnp.abs(v).max()
        chance = jnp.abs(v) / jnp.where(scale > 0, scale, 1)
        hit = jax.random.uniform(key, v.shape) < chance
        return scale * jnp.sign(v) * hit, Bits.of(digit_bits(v.size, 3) + 32)

    return of_vectors(compress, name="terngrad()")


def qsgd(levels: int) -> Transform:
    r"""Rounds magnitudes to multiples of the norm over q at random, without bias.

    :math:`\lVert v \rVert_2\,\mathrm{sign}(v_j)\,\xi_j` with :math:`\xi_j` one of the
    two multiples of 1/q next to :math:`|v_j| / \lVert v \rVert_2`; q >= 1 `levels`. A
    sign, a level of :math:`\lceil \log_2 (q + 1) \rceil` bits each, and one float32.
    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding", NeurIPS 2017, section 3.1.
    """
    check.positive_int(levels=levels)

    def compress(v, key):
        norm = flat_norm(v)
        exact = levels * jnp.abs(v) / jnp.where(norm > 0, norm, 1)
        low = jnp.floor(exact)
        up = jax.random.uniform(key, v.shape) < exact - low
        bits = Bits.of(v.size * (1 + levels.bit_length()) + 32)
        return norm * jnp.sign(v) * (low + up) / levels, bits

    return of_vectors(compress, name=f"qsgd({levels})")


def sketch(rate: float, *, quantised: bool = True) -> Transform:
    """Sends a random part of the coordinates, each in one bit: sketched updates.

    A coordinate is kept with probability `rate`, in (0, 1], and divided by it; then it
    is rounded at random to the smallest or the largest of those that are kept, unless
    `quantised` is False: then it is a float32. Both steps have no bias. The positions
    follow from a seed of 64 bits; ends take two float32. Konečný et al., "Federated
    Learning: Strategies for Improving Communication Efficiency", 2016, section 3.
    """
    check.positive(rate=rate)
    check.in_range(0.0, 1.0, rate=rate)

    def compress(v, key):
        which, rounding = jax.random.split(key)
        there = jax.random.bernoulli(which, rate, v.shape)
        sent = v / rate
        if quantised:
            low = jnp.min(sent, where=there, initial=jnp.inf)
            high = jnp.max(sent, where=there, initial=-jnp.inf)
            span = jnp.where(high > low, high - low, 1)
            up = jax.random.uniform(rounding, v.shape) * span < sent - low
            sent = jnp.where(up, high, low)
        bits = Bits.of(there.sum(dtype=jnp.int32)) * (1 if quantised else 32)
        return jnp.where(there, sent, 0), bits + (128 if quantised else 64)

    return of_vectors(compress, name=f"sketch({rate}, {quantised})")


def bit_plan(
    total: float, rounds: int, kappa: float, *, whole: bool = False
) -> np.ndarray:
    r"""Bits per step that minimise the bound on the last error.

    A perturbation made s steps before the end counts :math:`\kappa^s` times in
    `contraction.perturbed_bound`. With errors :math:`c\,2^{-b_s}` and B bits in all,
    the bound is least for

    .. math::

      b_s = \frac BT + \Bigl(s - \frac{T-1}{2}\Bigr) \log_2 \kappa ,

    so later steps get more. Where that is negative the first steps get none and the
    others share the budget in the same way.

    Args:
      total: B >= 0, per coordinate.
      rounds: T.
      kappa: contraction factor of the step, in (0, 1].
      whole: round to whole numbers with the same sum, which must be an int.

    Returns:
      ``[T]`` float64, in the order of the steps: entry t is made T - 1 - t steps before
      the end.
    """
    check.non_negative(total=total)
    check.positive_int(rounds=rounds)
    check.positive(kappa=kappa)
    check.in_range(0.0, 1.0, kappa=kappa)
    slope = -math.log2(kappa)
    # The largest number of last steps whose shares are all >= 0.
    count = max(k for k in range(1, rounds + 1) if total / k >= (k - 1) / 2 * slope)
    plan = np.zeros(rounds)
    plan[-count:] = total / count + (np.arange(count) - (count - 1) / 2) * slope
    plan = np.maximum(plan, 0.0)
    if not whole:
        return plan
    if total != int(total):
        raise ValueError(f"total must be an int for whole bits, got {total}.")
    floor = np.floor(plan + 1e-9)
    largest = np.argsort(floor - plan, kind="stable")
    floor[largest[: int(total) - int(floor.sum())]] += 1
    return floor
