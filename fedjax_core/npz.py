"""Arrays from an npz file that may be damaged or hostile.

`numpy.load` believes a header before it looks at the data, so a few wrong bytes can ask
for more memory than there is. Here names, dtypes, shapes and sizes are checked first.
"""

import math
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from fedjax_core.files import DataFileError, fits, shape_name

Expected = tuple[type[np.generic], Sequence[int | None]]
"""A dtype or a kind of dtypes, and a shape, None for a dimension of any size."""

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# What zipfile, zlib and NumPy's header parser raise on bad input; NotImplementedError
# and RecursionError are RuntimeErrors.
_DAMAGE = (
    ValueError,
    TypeError,
    KeyError,
    OSError,
    EOFError,
    RuntimeError,
    SyntaxError,
    OverflowError,
    MemoryError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_MOST_DEFLATED = 1032  # bytes that one deflated byte can stand for


def read(path: Path | str, expected: Mapping[str, Expected]) -> dict[str, np.ndarray]:
    """Reads the named arrays of an npz file; others in it are not looked at.

    Args:
      path: the file.
      expected: name -> what the array must be: ``(np.uint8, (None, 28, 28))``, or
        ``(np.integer, (None,))`` for ints of any width.

    Returns:
      name -> array, read-only, in the order of `expected`.

    Raises:
      FileNotFoundError: no such file.
      DataFileError: not an npz file, damaged, or an array is absent, twice there,
        empty or not as expected. Says which.
    """
    size = Path(path).stat().st_size
    try:
        archive = zipfile.ZipFile(path)
    except _DAMAGE as error:
        problem = f"not an npz file or cut off, {error}."
        raise DataFileError(path, "zip directory", problem) from error
    with archive:
        return {
            name: _read_array(archive, size, path, name, *want)
            for name, want in expected.items()
        }


def _read_array(
    archive: zipfile.ZipFile,
    archive_size: int,
    path: Path | str,
    name: str,
    dtype: type[np.generic],
    shape: Sequence[int | None],
) -> np.ndarray:
    where = f"array {name!r}"
    members = [m for m in archive.infolist() if m.filename == f"{name}.npy"]
    if len(members) != 1:
        names = sorted(m.filename.removesuffix(".npy") for m in archive.infolist())
        problem = f"expected once, found {len(members)} times among {names}."
        raise DataFileError(path, where, problem)
    (member,) = members
    packed = member.compress_size
    if packed > archive_size or member.file_size > _MOST_DEFLATED * packed:
        problem = f"{member.file_size} bytes can't come from {packed} compressed ones"
        raise DataFileError(path, where, f"{problem} in a file of {archive_size}.")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        problem = (
            f"expected it stored or deflated, found zip method {member.compress_type}."
        )
        raise DataFileError(path, where, problem)
    try:
        with archive.open(member) as file:
            stored, sizes, fortran = _read_header(file)
            if not np.issubdtype(stored, dtype) or stored.hasobject:
                problem = f"expected {dtype.__name__} values, found {stored}."
                raise DataFileError(path, where, problem)
            if not fits(sizes, shape) or any(n < 1 for n in sizes):
                problem = f"expected shape {shape_name(shape)}, found"
                raise DataFileError(path, where, f"{problem} {shape_name(sizes)}.")
            num_bytes = math.prod(sizes) * stored.itemsize
            if file.tell() + num_bytes != member.file_size:
                problem = f"{stored} {shape_name(sizes)} takes {num_bytes} bytes, found"
                found = member.file_size - file.tell()
                raise DataFileError(path, where, f"{problem} {found}.")
            content = file.read(num_bytes)  # to the end, where the checksum is compared
        if len(content) != num_bytes:
            raise EOFError(f"expected {num_bytes} bytes, found {len(content)}")
        values = np.frombuffer(content, stored)
        return values.reshape(sizes[::-1]).T if fortran else values.reshape(sizes)
    except DataFileError:
        raise
    except _DAMAGE as error:
        raise DataFileError(path, where, f"damaged, {error}.") from error


def _read_header(file: IO[bytes]) -> tuple[np.dtype, tuple[int, ...], bool]:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"npy version {version} is none of {list(_HEADERS)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # headers written by Python 2
        sizes, fortran, dtype = _HEADERS[version](file)
    return dtype, sizes, fortran
