"""Arrays from an npz file that may be damaged or hostile.

`numpy.load` believes a header before it looks at the data, so a few wrong bytes can ask
for more memory than there is. Here names, dtypes, shapes and sizes are checked first.
"""

import math
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from fedjax_core.data.readers.files import (
    DataFileError,
    check_shape,
    max_unpacked,
    named,
    shape_name,
)

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


def read(
    path: Path | str, expected: Mapping[str, Expected] | None = None
) -> dict[str, np.ndarray]:
    """Reads arrays of an npz file.

    Args:
      path: the file.
      expected: name -> what the array must be: ``(np.uint8, (None, 28, 28))``, or
        ``(np.integer, (None,))`` for ints of any width. Others are not looked at. None
        for all arrays, whatever they are.

    Returns:
      name -> array in the machine's byte order, in the order of `expected`.

    Raises:
      FileNotFoundError: no such file.
      DataFileError: not an npz file, damaged, more than `files.max_unpacked`, or an
        array is absent, twice there, of Python objects, or empty or not as expected.
        Says which.
    """
    size = Path(path).stat().st_size
    problem = "not an npz file or cut off, {}."
    with named(path, "zip directory", *_DAMAGE, problem=problem):
        archive = zipfile.ZipFile(path)
    with archive:
        count = Counter(member.filename for member in archive.infolist())
        wanted: Mapping[str, Expected | None] = (
            dict.fromkeys(name.removesuffix(".npy") for name in count)
            if expected is None
            else expected
        )
        members = {}
        for name in wanted:
            if (found := count[f"{name}.npy"]) != 1:
                times = f"it {found} times among {', '.join(count):.200}"
                raise DataFileError(path, f"array {name!r}", f"{name}.npy once", times)
            members[name] = archive.getinfo(f"{name}.npy")
        limit = max_unpacked(size)
        if sum(member.file_size for member in members.values()) > limit:
            sizes = {name: member.file_size for name, member in members.items()}
            most = f"at most {limit} bytes in a file of {size}"
            raise DataFileError(path, "zip directory", most, f"{sizes!s:.200}")
        return {
            name: _read_array(archive, path, name, member, wanted[name])
            for name, member in members.items()
        }


def _read_array(
    archive: zipfile.ZipFile,
    path: Path | str,
    name: str,
    member: zipfile.ZipInfo,
    expected: Expected | None,
) -> np.ndarray:
    where = f"array {name!r}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        found = f"zip method {member.compress_type}"
        raise DataFileError(path, where, "it stored or deflated", found)
    with (
        named(path, where, *_DAMAGE, problem="damaged, {}."),
        archive.open(member) as file,
    ):
        stored, sizes, fortran = _read_header(file)
        dtype, shape = expected or (np.generic, [None] * len(sizes))
        if not np.issubdtype(stored, dtype) or stored.hasobject:
            problem = f"expected {dtype.__name__} values, found {stored}."
            if stored.hasobject:
                problem += (
                    " These are pickled Python objects, which can run code when read. "
                    "If you trust the file, convert it once: load it with "
                    "numpy.load(path, allow_pickle=True) and write the arrays in it "
                    "with numpy.savez."
                )
            raise DataFileError(path, where, problem)
        check_shape(path, where, sizes, shape, least=0 if expected is None else 1)
        num_bytes = math.prod(sizes) * stored.itemsize
        if (found := member.file_size - file.tell()) != num_bytes:
            problem = f"{stored} {shape_name(sizes)} takes {num_bytes} bytes, found"
            raise DataFileError(path, where, f"{problem} {found}.")
        content = file.read()  # to the end, where the checksum is compared
        if len(content) != num_bytes:
            raise EOFError(f"expected {num_bytes} bytes, found {len(content)}")
        values = np.frombuffer(content, stored)
        values = values.astype(stored.newbyteorder("="), copy=False)
        return values.reshape(sizes[::-1]).T if fortran else values.reshape(sizes)


def _read_header(file: IO[bytes]) -> tuple[np.dtype, tuple[int, ...], bool]:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"npy version {version} is none of {list(_HEADERS)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # headers written by Python 2
        sizes, fortran, dtype = _HEADERS[version](file)
    return dtype, sizes, fortran
