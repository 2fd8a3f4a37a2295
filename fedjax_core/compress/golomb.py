r"""Golomb coding of positions: what a sparse message needs to say where its values go.

Of the increasing positions :math:`I_1 < \dots < I_k` in 1..d, with :math:`I_0 = 0`, the
distances :math:`D_r = I_r - I_{r-1}` are nearly geometric with :math:`p = k / d`. Each
is sent as :math:`\lfloor (D_r - 1) / 2^b \rfloor` ones, a zero, and the remainder in b
bits.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, equation 3.9, Algorithms 16 and 17.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core import check
from fedjax_core.metrics import Bits


def parameter(rate: float) -> int:
    r"""The b of least expected length at rate p in (0, 1).

    :math:`\max(0, 1 + \lfloor \log_2 (\ln(\phi - 1) / \ln(1 - p)) \rfloor)` with the
    golden ratio :math:`\phi`. The thesis leaves out the maximum, which is needed from
    :math:`p > \phi - 1` on.
    """
    check.open_interval(0, 1, rate=rate)
    golden = (math.sqrt(5) + 1) / 2
    ratio = math.log(golden - 1) / math.log1p(-rate)
    return max(0, 1 + math.floor(math.log2(ratio)))


def expected_bits(rate: float, b: int | None = None) -> float:
    """Bits per position of geometric distances, :math:`b + 1 / (1 - (1 - p)^{2^b})`.

    At rate p in (0, 1), with b remainder bits, by default the best.
    """
    best = parameter(rate)
    b = best if b is None else b
    check.in_range(0, 62, b=b)
    return b - 1 / math.expm1(2**b * math.log1p(-rate))


def position_bits(positions: jax.Array, d: int) -> Bits:
    """The exact length of the code of `positions`, ``[k]`` ascending from 0.

    With all d of them there is nothing to send.
    """
    k = positions.shape[-1]
    if k == d:
        return Bits.of(0)
    b = parameter(k / d)
    first = jnp.full_like(positions[..., :1], -1)
    between = jnp.diff(positions, axis=-1, prepend=first) - 1
    return Bits.of(k * (1 + b)) + (between >> b).sum(-1)


def mask_bits(there: jax.Array) -> Bits:
    """`position_bits` of where a mask ``[d]`` is True, however many that are."""
    d = there.size
    count = there.sum(dtype=jnp.int32)
    # The parameter is at least b up to this many positions of d.
    golden = (math.sqrt(5) - 1) / 2
    most = [int(-d * math.expm1(math.log(golden) / 2**b)) for b in range(31)]
    b = (count <= jnp.array(most, jnp.int32)).sum(dtype=jnp.int32)
    place = jnp.arange(d, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(there, place, -1))
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), last[:-1]])
    long = jnp.where(there, (place - before - 1) >> b, 0).sum(dtype=jnp.int32)
    return (Bits.of(count) * (1 + b) + long) * (count < d)


def encode(
    positions: np.ndarray, d: int, b: int, extra: list[str] | None = None
) -> str:
    """The code of `positions`, from 0, as a text of zeros and ones.

    Args:
      positions: ``[k]`` ints, increasing, in 0..d - 1.
      d: how many there could be.
      b: remainder bits.
      extra: bits behind each position: those of its value.

    Raises:
      ValueError: positions that do not increase, lie outside or are no ints.
    """
    check.in_range(0, 62, b=b)
    given, positions = positions, np.asarray(positions, np.int64)
    steps = np.diff(positions, prepend=-1) - 1
    if (steps < 0).any() or (positions >= d).any() or (positions != given).any():
        raise ValueError(
            f"positions must be ints that increase in 0..{d - 1}, got {given}."
        )
    return "".join(
        "1" * (step >> b) + "0" + (f"{step % 2**b:0{b}b}" if b else "") + own
        for step, own in zip(steps.tolist(), extra or [""] * len(steps), strict=True)
    )


def check_binary(code: str) -> None:
    """Raises ValueError unless the code is a text of zeros and ones."""
    if rest := code.strip("01"):
        raise ValueError(f"code must be of zeros and ones, got {rest[0]!r}.")


def decode(code: str, d: int, b: int, extra: int = 0) -> tuple[np.ndarray, list[str]]:
    """Positions ``[k]`` and, for each, the `extra` bits behind it.

    Raises:
      ValueError: the code ends early or leads past d - 1.
    """
    check_binary(code)
    positions, values = [], []
    at, place = 0, -1
    while at < len(code):
        zero = code.find("0", at)
        value = zero + 1 + b
        if zero < 0 or value + extra > len(code):
            raise ValueError(
                f"code must end with a whole position, got its bits from {at} on: "
                f"{code[at:]!r}."
            )
        place += (zero - at << b) + int(code[zero + 1 : value] or "0", 2) + 1
        at = value + extra
        positions.append(place)
        values.append(code[value:at])
    if place >= d:
        raise ValueError(f"positions of the code must lie in 0..{d - 1}, got {place}.")
    return np.array(positions, np.int64), values
