"""Messages as bits on a wire: what the counts of bits in a round stand for.

Codes are texts of zeros and ones, for the host; `to_bytes` packs them.
"""

from typing import Literal

import numpy as np

from fedjax_core import check
from fedjax_core.compress import golomb
from fedjax_core.compress.quantisers import digit_bits

Values = Literal["each", "signs", "mean"]
_BITS = {"each": 32, "signs": 1, "mean": 0}  # beside a position


def to_bytes(code: str) -> bytes:
    """The code in bytes, the last one filled with zeros."""
    return np.packbits(np.frombuffer(code.encode(), np.uint8) - ord("0")).tobytes()


def from_bytes(content: bytes, bits: int) -> str:
    """The code of so many bits that `to_bytes` packed."""
    if not 0 <= 8 * len(content) - bits < 8:
        raise ValueError(f"bits must fill {len(content)} bytes, got {bits}.")
    unpacked = np.unpackbits(np.frombuffer(content, np.uint8), count=bits)
    return (unpacked + ord("0")).tobytes().decode()


def encode_digits(digits: np.ndarray, base: int) -> str:
    """Digits in 0..base - 1 as one number: ``digit_bits(d, base)`` bits for d digits.

    The time is quadratic in d unless the base, 2 or more, is a power of two.
    """
    check.in_range(2, float("inf"), base=base)
    digits = np.asarray(digits)
    wrong = digits[(digits < 0) | (digits >= base)]
    if wrong.size:
        raise ValueError(f"digits must lie in 0..{base - 1}, got {wrong[0]}.")
    width = digit_bits(1, base)
    if base == 2**width:
        return "".join(f"{digit:0{width}b}" for digit in digits.tolist())
    number = 0
    for digit in digits.tolist():
        number = number * base + digit
    return f"{number:0{digit_bits(digits.size, base)}b}"


def decode_digits(code: str, d: int, base: int) -> np.ndarray:
    """The d digits of a code; raises ValueError where it is none of so many."""
    check.in_range(2, float("inf"), base=base)
    _check_length(code, digit_bits(d, base))
    width = digit_bits(1, base)
    if base == 2**width:
        starts = range(0, len(code), width)
        return np.array([int(code[i : i + width], 2) for i in starts], np.int64)
    digits, number = np.zeros(d, np.int64), int(code or "0", 2)
    for i in range(d - 1, -1, -1):
        number, digits[i] = divmod(number, base)
    if number:
        raise ValueError(
            f"code must be of {d} digits in base {base}, got a larger one."
        )
    return digits


def encode_floats(values: np.ndarray) -> str:
    """Float32 values, 32 bits each."""
    content = np.asarray(values, ">f4").tobytes()
    return from_bytes(content, 8 * len(content))


def decode_floats(code: str) -> np.ndarray:
    """Float32 values; raises ValueError unless the code is made of whole ones."""
    _check_length(code, len(code) // 32 * 32)
    return np.frombuffer(to_bytes(code), ">f4").astype(np.float32)


def encode_sparse(v: np.ndarray, k: int, values: Values) -> str:
    """A sparse message of `stc` ("signs"), `sbc` ("mean") or `top_k` ("each").

    Args:
      v: ``[d]`` float32, the message as the receiver will see it, of at most k values;
        those that are 0 are not sent. With a mean it holds its multiples by signs.
      k: decides the parameter of the code.
      values: what is sent of them besides their positions.
    """
    check.one_of(_BITS, values=values)
    v = np.asarray(v, np.float32)
    if v.ndim != 1:
        raise ValueError(f"v must be [d], got shape {v.shape}.")
    check.in_range(1, v.size, k=k)
    positions = np.flatnonzero(v)
    if len(positions) > k:
        raise ValueError(f"v must have at most k={k} values, got {len(positions)}.")
    there, head = v[positions], ""
    if values != "each":
        same = there if values == "mean" else np.abs(there)
        mean = same[:1] if there.size else np.zeros(1, np.float32)
        if (same != mean).any():
            raise ValueError(f"v must hold one magnitude, got {np.unique(same)}.")
        head = encode_floats(mean)
    own = {"each": encode_floats, "signs": lambda x: f"{x < 0:d}", "mean": lambda x: ""}
    extra = list(map(own[values], there))
    if k < v.size:
        b = golomb.parameter(k / v.size)
        return head + golomb.encode(positions, v.size, b, extra)
    if len(positions) < k:
        raise ValueError("v must have no 0 where positions are not sent.")
    return head + "".join(extra)


def decode_sparse(code: str, d: int, k: int, values: Values) -> np.ndarray:
    """The vector ``[d]`` float32 of a code; raises ValueError where it is none."""
    check.one_of(_BITS, values=values)
    check.in_range(1, d, k=k)
    size, start = _BITS[values], 0 if values == "each" else 32
    head, rest = code[:start], code[start:]
    _check_length(head, start)
    if k == d:
        _check_length(rest, size * d)
        positions = np.arange(d)
        extra = [rest[at : at + size] for at in positions * size]
    else:
        positions, extra = golomb.decode(rest, d, golomb.parameter(k / d), size)
    if len(positions) > k:
        raise ValueError(f"code must have at most k={k} values, got {len(positions)}.")
    v = np.zeros(d, np.float32)
    if values == "each":
        v[positions] = decode_floats("".join(extra))
    else:
        signs = [-1 if x == "1" else 1 for x in extra]
        v[positions] = decode_floats(head) * np.array(signs, np.float32)
    return v


def _check_length(code: str, bits: int) -> None:
    if len(code) != bits:
        raise ValueError(f"code must have {bits} bits, got {len(code)}.")
    golomb.check_binary(code)
