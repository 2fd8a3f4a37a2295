"""An adaptive arithmetic coder: what entropies promise, in bits that can be decoded.

Sender and receiver count symbols as they go, each starting at one, so that no table is
sent. On the host; rounds count entropies.

References:
  Witten, Neal and Cleary, "Arithmetic Coding for Data Compression", CACM 30, 1987.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fedjax_core import check

_BITS = 40  # of the interval; symbols and their counts may add up to 2^38
_HALF, _QUARTER = 1 << (_BITS - 1), 1 << (_BITS - 2)


class _Model:
    """The interval, and how often symbols were seen."""

    def __init__(self, num_symbols: int):
        check.positive_int(num_symbols=num_symbols)
        self.counts = np.ones(num_symbols, np.int64)
        self.low, self.high = 0, 2 * _HALF - 1

    def narrow(self, symbol: int) -> Iterator[int | None]:
        """Narrows the interval; yields leading bits, None for one that is open."""
        total = int(self.counts.sum())
        below = int(self.counts[:symbol].sum())
        width = self.high - self.low + 1
        self.high = self.low + width * (below + int(self.counts[symbol])) // total - 1
        self.low += width * below // total
        self.counts[symbol] += 1
        while True:
            if self.high < _HALF:
                shift, bit = 0, 0
            elif self.low >= _HALF:
                shift, bit = _HALF, 1
            elif self.low >= _QUARTER and self.high < 3 * _QUARTER:
                shift, bit = _QUARTER, None
            else:
                return
            self.low, self.high = 2 * (self.low - shift), 2 * (self.high - shift) + 1
            yield bit


def encode(symbols: Iterable[int], num_symbols: int) -> list[int]:
    """The bits of a sequence of symbols 0 to num_symbols - 1.

    About n times their entropy, and ``(num_symbols - 1) / 2 log2 n`` for learning it.
    """
    model, out, waiting = _Model(num_symbols), [], 0
    for symbol in symbols:
        check.in_range(0, num_symbols - 1, symbol=symbol)
        for bit in model.narrow(operator.index(symbol)):
            if bit is None:
                waiting += 1
            else:
                out += [bit, *[1 - bit] * waiting]
                waiting = 0
    bit = int(model.low >= _QUARTER)
    return [*out, bit, *[1 - bit] * (waiting + 1)]


def decode(bits: Sequence[int], length: int, num_symbols: int) -> np.ndarray:
    """The symbols, `length` of them, that `encode` made `bits` of, int64.

    ValueError for what are no bits, or more or fewer than so many symbols take.
    """
    check.each_in_range(0, 1, bits=bits)
    check.non_negative(length=length)
    model, out, read = _Model(num_symbols), np.zeros(length, np.int64), _BITS
    code = sum(b << (_BITS - 1 - i) for i, b in enumerate(bits[:_BITS]))
    for i in range(length):
        total, width = int(model.counts.sum()), model.high - model.low + 1
        at = ((code - model.low + 1) * total - 1) // width
        out[i] = np.searchsorted(np.cumsum(model.counts), at, side="right")
        for bit in model.narrow(int(out[i])):
            shift = _QUARTER if bit is None else bit * _HALF
            after = bits[read] if read < len(bits) else 0
            code, read = 2 * (code - shift) + after, read + 1
    if len(bits) != read - _BITS + 2:
        raise ValueError(
            f"bits must be the {read - _BITS + 2} of a code of {length} symbols, got "
            f"{len(bits)}."
        )
    return out
