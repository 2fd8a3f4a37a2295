"""Quantised vectors, and how to spread a budget of bits over the steps of a method.

References:
  Jung, "Federated Learning: From Theory to Practice", Exercise 4.6 and Section 4.4.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float
from fedjax_core.metrics import Bits
from fedjax_core.transform import Message, Transform, stateless
from fedjax_core.types import PyTree


def quantise(x: PyTree, bits: ArrayLike) -> PyTree:
    r"""Rounds every coordinate to one of :math:`2^b` levels between -s and s.

    The scale s is the largest magnitude over all leaves and has to be sent along. The
    levels are the midpoints of equal cells, so that no coordinate errs by more than
    :math:`s\,2^{-b}`, and the whole vector by no more than
    :math:`\sqrt d\,s\,2^{-b}`. None of them is 0: zeros become :math:`s\,2^{-b}`.

    Args:
      x: what to send.
      bits: b > 0 per coordinate, a whole number to be sendable; may be traced.

    Raises:
      ValueError: bits <= 0, or no array in x.
    """
    check.positive(bits=bits)
    leaves, form = jax.tree.flatten(jax.tree.map(as_float, x))
    if not leaves:
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

    return jax.tree.unflatten(form, [one(leaf) for leaf in leaves])


def quantise_update(bits: int) -> Transform:
    """`quantise` for the updates of a server's clients; b bits each and one float32.

    It bounds no norm: clip after it where a bound is needed. Nor does it follow a
    sparsifier: it sends every coordinate, and those that are 0 no longer as 0. Where
    many are, as in a model that stands still, they drift by the scale over 2^b a round.
    """
    check.positive_int(bits=bits)

    def apply(message, key):
        del key
        size = sum(x.size for x in jax.tree.leaves(message.update))
        sent = quantise(message.update, bits)
        return Message(sent, Bits.of(bits * size + 32))

    return stateless(apply, name=f"quantise_update({bits})", statistics=True)


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
    missing = int(total) - int(floor.sum())
    largest = np.argsort(floor - plan, kind="stable")[:missing]
    floor[largest] += 1
    return floor
