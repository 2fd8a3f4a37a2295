"""Random damage to files, for the tests of readers.

A reader meets many damaged copies of a good file. Each must give a `DataFileError` or
data of the promised names, dtypes and consistent shapes: never another exception, never
a hang. (Formats without checksums can't tell a changed pixel from a good one, so the
values are not compared.)
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_core.data.readers.files import DataFileError


def mutations(content: bytes, count: int = 200, seed: int = 0) -> Iterator[bytes]:
    """Yields damaged copies: empty, cut, flipped, overwritten, repeated, swapped."""
    rng = np.random.default_rng(seed)

    def flip(b: bytearray) -> bytes:
        for _ in range(rng.integers(1, 9)):
            b[rng.integers(len(b))] ^= 1 << rng.integers(8)
        return bytes(b)

    def flip_early(b: bytearray) -> bytes:  # where headers are
        b[rng.integers(min(len(b), 64))] = rng.integers(256)
        return bytes(b)

    def cut(b: bytearray) -> bytes:
        return bytes(b[: rng.integers(len(b))])

    def drop(b: bytearray) -> bytes:
        i, j = np.sort(rng.integers(len(b) + 1, size=2))
        return bytes(b[:i] + b[j:])

    def insert(b: bytearray) -> bytes:
        i = rng.integers(len(b) + 1)
        return bytes(b[:i]) + rng.bytes(int(rng.integers(1, 64))) + bytes(b[i:])

    def double(b: bytearray) -> bytes:
        return bytes(b + b)

    def swap_bytes(b: bytearray) -> bytes:  # the other endianness, in part
        i, j = np.sort(rng.integers(len(b) // 4 + 1, size=2)) * 4
        words = np.frombuffer(bytes(b[i:j]), np.uint32).byteswap()
        return bytes(b[:i]) + words.tobytes() + bytes(b[j:])

    def blank(b: bytearray) -> bytes:
        i, j = np.sort(rng.integers(len(b) + 1, size=2))
        return bytes(b[:i]) + bytes(int(j - i)) + bytes(b[j:])

    kinds = (flip, flip_early, cut, drop, insert, double, swap_bytes, blank)
    yield b""
    for i in range(count - 1):
        yield kinds[i % len(kinds)](bytearray(content))


def survives(
    path: Path, read: Callable[[], Any], check: Callable[[Any], None], count: int = 200
) -> int:
    """Damages `path` `count` times over and reads it; returns how often that failed.

    Args:
      path: a good file; restored at the end.
      read: reads the data set that `path` is part of.
      check: asserts names, dtypes and shapes of what `read` returned.
      count: number of mutations.
    """
    good, failed = path.read_bytes(), 0
    try:
        for i, bad in enumerate(mutations(good, count)):
            path.write_bytes(bad)
            try:
                result = read()
            except DataFileError as error:
                named, failed = str(path) in str(error), failed + 1
                if not named:
                    raise AssertionError(f"mutation {i}: file not named") from error
            else:
                check(result)
    finally:
        path.write_bytes(good)
    return failed
