"""Rows of arrays that may be memory-mapped, without keeping what was read resident."""

import math
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

BLOCK = 2**24  # bytes read or written at once


def gather(array: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies rows, and keeps none of a memory-mapped array resident.

    Args:
      array: [n, ...], in memory or memory-mapped.
      rows: [m] ints in 0..n-1; runs of consecutive rows are read together.
      out: [m, ...] of the same dtype, written to.
    """
    pages = _pages(array)
    if not pages or not len(rows) or not array.flags.c_contiguous:
        # With "clip" NumPy writes into `out` right away; no row is out of range.
        np.take(array, rows, axis=0, out=out, mode="clip")
        release(array)
        return
    cuts = np.flatnonzero(np.diff(rows) != 1)
    first, after = rows[[0, *(cuts + 1)]], rows[[*cuts, -1]] + 1
    # All are asked for at once, or each would wait for the disk in its turn.
    start = array.ctypes.data - np.frombuffer(pages, np.uint8).ctypes.data
    begin, end = start + first * array.strides[0], start + after * array.strides[0]
    begin -= begin % mmap.PAGESIZE
    for a, b in zip(begin.tolist(), end.tolist(), strict=True):
        pages.madvise(mmap.MADV_WILLNEED, a, b - a)
    plain, at = array.view(np.ndarray), 0
    for a, b in zip(first.tolist(), after.tolist(), strict=True):
        out[at : at + b - a] = plain[a:b]
        at += b - a
    release(array)


def row_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Views of consecutive rows, some MB each; no more than one at a time is resident.

    Args:
      array: [n, ...], in memory or memory-mapped.
    """
    row_bytes = math.prod(array.shape[1:]) * array.itemsize
    step = max(1, BLOCK // max(1, row_bytes))
    for first in range(0, len(array), step):
        yield array[first : first + step]
        release(array)


def release(array: np.ndarray) -> None:
    """Lets the system take back the pages of a memory-mapped file that were read.

    They are read again when needed, from the system's cache where they still are.
    Nothing happens to arrays that are not mapped, or mapped copy-on-write.
    """
    if pages := _pages(array):
        pages.madvise(mmap.MADV_DONTNEED)


def _pages(array: np.ndarray) -> Any:
    """The map that an array is a view of, where its pages can be let go of."""
    at: Any = array
    while isinstance(at, np.ndarray) and not isinstance(at.base, mmap.mmap):
        at = at.base
    # Pages of a copy-on-write map may hold changes that exist nowhere else.
    if isinstance(at, np.memmap) and at.mode != "c" and hasattr(mmap, "MADV_DONTNEED"):
        return at.base
    return None
