"""The idx format of MNIST and its relatives: one array per file, often gzipped.

Everything is big-endian: two bytes 0, one byte for the type of the values, one for the
number of dimensions, one 32-bit int per dimension, then the values row by row.

References:
  LeCun, Cortes & Burges, "The MNIST database of handwritten digits", section "File
  formats", http://yann.lecun.com/exdb/mnist/.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_core.data.readers.files import DataFileError, check_shape, read_bytes

_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read(
    path: Path | str,
    shape: Sequence[int | None] | None = None,
    dtype: type[np.generic] | None = None,
) -> np.ndarray:
    """Reads one idx file, gzipped or not, in the machine's byte order.

    Values are uint8, int8, int16, int32, float32 or float64. `shape` is what it must
    be, None for a dimension of any size; `dtype` what values must be: `np.uint8`, say,
    or all of a kind, `np.integer`.

    Raises:
      FileNotFoundError: no such file.
      DataFileError: not idx, little-endian, cut off, followed by more bytes, empty, or
        of another shape or dtype than asked for. Says at which offset.
    """
    content = read_bytes(path)
    if len(content) < 4:
        raise DataFileError(path, "offset 0", "4 bytes of magic number", len(content))
    zeros, code, ndim = content[:2], content[2], content[3]
    if content[2:4] == b"\0\0" and content[1] in _TYPES and content[0]:
        problem = f"the magic number {content[:4].hex(' ')} is little-endian; idx files"
        raise DataFileError(path, "offset 0", f"{problem} are big-endian.")
    if zeros != b"\0\0":
        found = zeros.hex(" ")
        raise DataFileError(path, "offset 0", "an idx file, two bytes 0", found)
    if code not in _TYPES:
        types = ", ".join(map(str, _TYPES))
        raise DataFileError(path, "offset 2", f"a type of values, one of {types}", code)
    if not 0 < ndim <= 32:  # NumPy 1 has no more, and no file has ten
        raise DataFileError(path, "offset 3", "1 to 32 dimensions", ndim)
    start = 4 + 4 * ndim
    if (found := len(content) - start) < 0:
        wanted = f"{ndim} dimensions of 4 bytes"
        raise DataFileError(path, "offset 4", wanted, f"{len(content) - 4} bytes")

    stored = np.dtype(_TYPES[code])
    sizes = tuple(np.frombuffer(content, ">u4", ndim, 4).tolist())
    num_bytes = math.prod(sizes) * stored.itemsize
    if num_bytes != found:
        swapped = np.frombuffer(content, "<u4", ndim, 4).tolist()
        if math.prod(swapped) * stored.itemsize == found:
            problem = f"the dimensions are little-endian: {sizes}, if read as"
            raise DataFileError(path, "offset 4", f"{problem} big-endian.")
        wanted = f"{num_bytes} bytes of {stored.name} {sizes}"
        raise DataFileError(path, f"offset {start}", wanted, found)
    if 0 in sizes:
        raise DataFileError(path, "offset 4", "values", f"shape {sizes}")
    if shape is not None:
        check_shape(path, "offset 4", sizes, shape)
    if dtype is not None and not np.issubdtype(stored, dtype):
        raise DataFileError(path, "offset 2", f"{dtype.__name__} values", stored.name)
    values = np.frombuffer(content, stored, offset=start).reshape(sizes)
    return values.astype(stored.newbyteorder("="))
