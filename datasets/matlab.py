"""Cell arrays of MATLAB files, a cell per task, as multi-task data sets come.

A reader of its own for the little these files use of the MAT format, versions 5 to 7:
numbers in cells. SciPy's reader trusts the sizes that a file states, so that damaged
files end the process.

References:
  MathWorks, "MAT-File Format", chapter 1, "Level 5 MAT-File Format".
"""

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedjax_core.data.readers import npz
from fedjax_core.data.readers.files import (
    DataFileError,
    check_shape,
    read_bytes,
    shape_name,
)
from fedjax_core.datasets import tables

_INT8, _INT32, _UINT32, _MATRIX, _COMPRESSED = 1, 5, 6, 14, 15  # types of elements
_STORED = {  # types that numbers are stored as, whatever the class of the matrix
    **{1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4"},
    **{7: "f4", 9: "f8", 12: "i8", 13: "u8"},
}
_CELL, _NUMBERS = 1, range(6, 16)  # classes of matrices
_COMPLEX = 0x800
_MOST = 2**28  # bytes of a variable, against files that unpack to fill memory


def read_tasks(
    path: Path,
    cells: tuple[str, str],
    task: str,
    num_features: int,
    y_type: type[np.generic],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads two cell arrays with a cell per task, or the same from an npz file.

    `path` is a MATLAB file (versions 5 to 7) whose variables `cells` hold matrices
    [n_i, num_features] and columns [n_i, 1], or an npz file with the arrays x, y of
    `y_type`, and `task` [n].

    Returns:
      x [n, d] and y [n], float64, and the task of every row, [n] ints from 0.

    Raises:
      DataFileError: not such a file; names the variable and the cell.
    """
    if path.suffix == ".npz":
        columns: dict[str, npz.Expected] = {
            "x": (np.floating, (None, num_features)),
            "y": (y_type, (None,)),
            task: (np.integer, (None,)),
        }
        x, y, of_row = tables.read_npz(path, columns).values()
        x, y = (
            tables.no_gaps(path, f"array {k!r}", v)
            for k, v in zip("xy", (x, y), strict=True)
        )
        return x, y, of_row
    found = _read_cells(path, cells)
    all_x, all_y = (found[name] for name in cells)
    if len(all_x) != len(all_y):
        problem = f"expected {len(all_x)} cells as in {cells[0]!r}, found {len(all_y)}."
        raise DataFileError(path, f"variable {cells[1]!r}", problem)
    for i, (x, y) in enumerate(zip(all_x, all_y, strict=True)):
        shapes = (None, num_features), (len(x), 1)
        for name, cell, shape in zip(cells, (x, y), shapes, strict=True):
            where = f"{name}{{{i + 1}}}"
            check_shape(path, where, cell.shape, shape)
            if not np.all(np.abs(cell) <= np.finfo(np.float32).max):  # or NaN
                problem = "expected numbers without gaps that fit float32."
                raise DataFileError(path, where, problem)
    of_row = np.repeat(np.arange(len(all_x)), [len(x) for x in all_x])
    return np.concatenate(all_x), np.concatenate(all_y)[:, 0], of_row


def _read_cells(
    path: Path | str, names: tuple[str, ...]
) -> dict[str, list[np.ndarray]]:
    """Name -> the matrices in the cells of that variable, 1 x n or n x 1."""
    content = memoryview(read_bytes(path))
    version, order = bytes(content[124:126]), bytes(content[126:128])
    endian = {(b"\0\1", b"IM"): "<", (b"\1\0", b"MI"): ">"}.get((version, order))
    if endian is None:
        problem = (
            f"expected a MAT file of version 5 to 7, found {version + order!r}; "
            f"if it is of version 7.3 (HDF5), save it again with '-v7'."
        )
        raise DataFileError(path, "bytes 124 to 128", problem)
    found: dict[str, list[np.ndarray]] = {}
    where = "byte 128"
    try:
        for kind, piece in _elements(content[128:], endian):
            where = f"after {', '.join(found) or 'the header'}"
            if kind == _COMPRESSED:
                unpacker = zlib.decompressobj()
                unpacked = unpacker.decompress(piece, _MOST)
                _require(unpacker.eof, f"cut off, or more than {_MOST} bytes")
                kind, piece = next(_elements(memoryview(unpacked), endian), (0, piece))
            _require(kind == _MATRIX, f"expected a variable, found type {kind}")
            name, cls, shape, rest = _head(piece, endian)
            if name not in names:
                continue
            where = f"variable {name!r}"
            _require(name not in found, "expected it once, found it again")
            _require(
                cls == _CELL and len(shape) == 2 and min(shape) == 1,
                f"expected 1 x n cells, found class {cls}, shape {shape_name(shape)}",
            )
            found[name] = []
            for kind, piece in rest:
                where = f"{name}{{{len(found[name]) + 1}}}"
                _require(kind == _MATRIX, f"expected a matrix, found type {kind}")
                found[name].append(_numbers(piece, endian))
            where = f"variable {name!r}"
            count = len(found[name])
            _require(count == max(shape), f"expected {max(shape)} cells, found {count}")
    except (ValueError, struct.error, zlib.error) as error:
        raise DataFileError(path, where, f"{error}.") from None
    for name in names:
        if name not in found:
            raise DataFileError(path, f"variable {name!r}", "expected it, found none.")
    return found


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise ValueError(problem)


def _elements(piece: memoryview, endian: str) -> Iterator[tuple[int, memoryview]]:
    """Type and content of every element in a piece of the file."""
    at = 0
    while at < len(piece):
        _require(at + 8 <= len(piece), "cut off within a tag")
        kind, size = struct.unpack_from(f"{endian}II", piece, at)
        start = at + 8
        if kind >> 16:  # a short element: size and type share a word
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
            _require(size <= 4, f"expected at most 4 bytes, found {size}")
        _require(start + size <= len(piece), f"cut off, {size} bytes expected")
        yield kind, piece[start : start + size]
        at = start + size
        if kind != _COMPRESSED:
            at += -at % 8


def _head(
    piece: memoryview, endian: str
) -> tuple[str, int, tuple[int, ...], Iterator[tuple[int, memoryview]]]:
    """Name, class and shape of a matrix, and the elements that follow."""
    elements = _elements(piece, endian)
    parts = [next(elements, (0, piece[:0])) for _ in range(3)]
    kinds = [kind for kind, _ in parts]
    _require(kinds == [_UINT32, _INT32, _INT8], f"not a matrix, its parts are {kinds}")
    flags, sizes, name = (part for _, part in parts)
    (flag,) = struct.unpack_from(f"{endian}I", flags)
    _require(len(sizes) % 4 == 0, f"expected sizes of 4 bytes, found {len(sizes)}")
    shape = struct.unpack(f"{endian}{len(sizes) // 4}i", sizes)
    _require(not flag & _COMPLEX, "expected real numbers, found complex ones")
    return bytes(name).decode("latin-1"), flag & 0xFF, shape, elements


def _numbers(piece: memoryview, endian: str) -> np.ndarray:
    """A matrix of numbers as float64."""
    _, cls, shape, rest = _head(piece, endian)
    _require(cls in _NUMBERS, f"expected a matrix of numbers, found class {cls}")
    kind, values = next(rest, (0, piece[:0]))
    _require(kind in _STORED, f"expected numbers, found type {kind}")
    dtype = np.dtype(endian + _STORED[kind])
    _require(
        min(shape, default=-1) >= 0
        and math.prod(shape) * dtype.itemsize == len(values),
        f"expected {shape_name(shape)} of {dtype}, found {len(values)} bytes",
    )
    return np.frombuffer(values, dtype).reshape(shape, order="F").astype(np.float64)
