"""A population on disk, memory-mapped: for populations larger than memory.

A store is a folder that is written once::

    header.json         format, version, and dtype, shape and checksum of every array
    client_ids.json     one string per client
    train-offsets.npy   [N + 1] int64
    train.x.npy         [n, ...], client after client, and so on per array and split

The arrays are plain .npy files in little-endian order. A store is built in a folder
beside its own, ``.NAME.partial-...``, which takes its name when complete; one that a
kill left behind has no header.json, is never opened and may be deleted.

Opening reads and checks everything but the values of the examples: only `verify=True`
reads those. Nothing is ever unpickled.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np

from fedjax_core.data import memmap
from fedjax_core.data.packed import FederatedData, Packed, check_alike, check_client
from fedjax_core.data.readers.files import DataFileError, named
from fedjax_core.data.sources import by_split, check_train

_FORMAT, _VERSION = "fedjax_core store", 1
_HEADER, _CLIENT_IDS = "header.json", "client_ids.json"


def save(
    data: FederatedData, path: str | os.PathLike, *, overwrite: bool = False
) -> None:
    """Writes a population to a store.

    Args:
      data: any population; arrays of numbers, bools, dates or fixed-width text.
      path: the folder to make.
      overwrite: replace the store that `path` holds.

    Raises:
      FileExistsError: `path` holds something, and `overwrite` is False or it is no
        store.
      ValueError: an array's name is too long for that of a file.
      TypeError: an array has a dtype that .npy files can't hold.
    """
    with _new_folder(path, overwrite) as folder:
        splits = {}
        for split, packed in data.splits.items():
            files = {}
            for name, array in packed.examples.items():
                files[name] = folder.create(split, name, array)
                for rows in memmap.row_blocks(array):
                    files[name].write(rows)
            splits[split] = files, packed.offsets
        folder.finish(data.client_ids, splits)


def build(
    path: str | os.PathLike,
    clients: Iterable[tuple[str, Mapping[str, Any]]],
    *,
    overwrite: bool = False,
) -> FederatedData:
    """Writes clients to a store one by one, never holding more than one of them.

    Args:
      path: the folder to make.
      clients: client id and examples, as for `sources.from_iterator`. The first client
        with examples decides names, dtypes and shapes; later text may not be wider.
      overwrite: replace the store that `path` holds.

    Returns:
      The population, opened. Clients are in the order of the iterator; a split in which
      nobody has examples is left out.

    Raises:
      FileExistsError: `path` holds something, and `overwrite` is False or it is no
        store.
      ValueError: clients or splits disagree, an id comes twice, nobody has train
        examples, or an array's name is too long for that of a file.
      TypeError: an id that is not a str, or a dtype that .npy files can't hold.
    """
    with _new_folder(path, overwrite) as folder:
        ids: dict[str, None] = {}
        splits: dict[str, _SplitWriter] = {}
        for client_id, examples in clients:
            if not isinstance(client_id, str):
                raise TypeError(f"client ids must be strs, got {client_id!r}.")
            if client_id in ids:
                raise ValueError(f"client ids must be unique, got {client_id!r} twice.")
            for name, arrays in by_split(examples).items():
                if name not in splits:
                    splits[name] = _SplitWriter(folder, name)
                splits[name].add(len(ids), client_id, arrays)
            ids[client_id] = None
        filled = {k: s for k, s in splits.items() if s.files}
        check_train(filled, len(ids))
        written = {k: (s.files, s.offsets(len(ids))) for k, s in filled.items()}
        folder.finish(tuple(ids), written)
    return open(path)


def open(path: str | os.PathLike, *, verify: bool = False) -> FederatedData:
    """Opens a store.

    Train on it with ``simulate(..., feed="host")``, which reads the rows of the drawn
    clients and lets go of them again.

    Args:
      path: the folder.
      verify: read all examples once and compare their checksums.

    Returns:
      The population; arrays are read-only `np.memmap`, client ids and offsets are in
      memory.

    Raises:
      FileNotFoundError: there is no store at `path`.
      DataFileError: a file is missing, cut off or altered, or of another version.
    """
    folder = Path(path)
    if not (folder / _HEADER).is_file():
        why = f"since it has no {_HEADER}; write one with store.save or store.build"
        raise FileNotFoundError(f"no store at {folder}, {why}.")
    header = _read_header(folder / _HEADER)
    # After its checksum: whoever made a malformed header was no store.
    errors = AttributeError, KeyError, TypeError, ValueError
    with named(folder / _HEADER, "content", *errors, problem="malformed, {!r}"):
        ids = _read_ids(folder / _CLIENT_IDS, header["client_ids"])
        splits = {}
        for split, entry in header["splits"].items():
            file = _array_path(folder, split, "offsets", "-")
            offsets = np.array(_map(file, entry["offsets"], verify=True))
            examples = {
                name: _map(_array_path(folder, split, name, "."), array, verify)
                for name, array in entry["arrays"].items()
            }
            splits[split] = Packed(examples, offsets)
        return FederatedData(**splits, client_ids=ids)


class _ArrayWriter:
    """Writes the rows of one .npy file; how many is known at the end only."""

    def __init__(self, file: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]):
        self._file, self.dtype, self.shape = file, dtype, shape
        self._rows, self._crc = 0, 0
        file.write(_npy_header(dtype, (0, *shape)))

    def write(self, rows: np.ndarray) -> None:
        whole = np.ascontiguousarray(rows, self.dtype)
        content = whole.reshape(-1).view(np.uint8).data
        self._crc = zlib.crc32(content, self._crc)
        self._file.write(content)
        self._rows += len(rows)

    def finish(self) -> dict[str, Any]:
        """Completes the file; returns its entry in the header."""
        shape = (self._rows, *self.shape)
        self._file.seek(0)
        self._file.write(_npy_header(self.dtype, shape))
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"dtype": self.dtype.str, "shape": shape, "crc32": self._crc}


class _SplitWriter:
    """Writes one split client by client."""

    def __init__(self, folder: "_Folder", split: str):
        self._folder, self._split = folder, split
        self._first = ""
        self._sizes: dict[int, int] = {}
        self.files: dict[str, _ArrayWriter] = {}

    def add(self, i: int, client_id: str, arrays: Mapping[str, Any]) -> None:
        """Appends the examples of client number i."""
        examples = {name: np.asarray(a) for name, a in arrays.items()}
        size = check_client(where := f"client {client_id!r}", examples)
        if not size:
            return
        for name, a in examples.items():
            examples[name] = a.astype(_stored(a.dtype), copy=False)
        this = f"{self._split} of {where}"
        if self._folder.first is None:
            like = {name: np.empty_like(a[:0]) for name, a in examples.items()}
            self._folder.first = this, like
        check_alike(*self._folder.first, this, examples)
        if not self.files:
            self._first = where
            self.files = {
                name: self._folder.create(self._split, name, a)
                for name, a in examples.items()
            }
        for name, a in examples.items():
            if a.dtype.itemsize > (widest := self.files[name].dtype).itemsize:
                wanted = f"no wider than that of {self._first}, {widest}"
                found = f"{a.dtype} for {where}; give all clients the widest"
                raise ValueError(f"{name} must be text {wanted}, got {found}.")
            self.files[name].write(a)
        self._sizes[i] = size

    def offsets(self, num_clients: int) -> np.ndarray:
        sizes = (self._sizes.get(i, 0) for i in range(num_clients))
        return np.cumsum([0, *sizes], dtype=np.int64)


def _stored(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("<")


def _array_path(folder: Path, split: str, name: str, kind: str) -> Path:
    # Names are anything, file names are not; "-" keeps offsets apart from an array.
    text = quote(name, safe="", errors="surrogatepass")
    return folder / f"{split}{kind}{text}.npy"


def _npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The header of a .npy file, version 1.0, as long for any number of rows."""

    def text(rows: int) -> str:
        layout = {"descr": dtype.str, "fortran_order": False}
        return repr(layout | {"shape": (rows, *map(int, shape[1:]))})

    # 10 bytes come before the text, a line feed ends it, 64 divides the sum.
    length = -(-(len(text(2**63 - 1)) + 11) // 64) * 64 - 10
    content = text(int(shape[0])).ljust(length - 1) + "\n"
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + content.encode()


def _map(path: Path, entry: dict[str, Any], verify: bool) -> np.memmap:
    """The array of a .npy file that must be what its entry in the header says."""
    dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
    # The one right header is known, so none needs to be parsed.
    header = _npy_header(dtype, shape)
    expected = len(header) + math.prod(shape) * dtype.itemsize
    with named(path, "file", FileNotFoundError, problem="missing."):
        size = path.stat().st_size
    if size != expected:
        raise DataFileError(path, "size", f"must be {expected} bytes, got {size}.")
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            what = f"must describe {dtype} of shape {shape}"
            raise DataFileError(path, "offset 0", f"{what}, as {_HEADER} does.")
        crc = 0
        while verify and (block := file.read(memmap.BLOCK)):
            crc = zlib.crc32(block, crc)
    if verify:
        _compare(path, f"offset {len(header)} on", entry["crc32"], crc)
    return np.memmap(path, dtype, "r", len(header), shape)


def _read_header(path: Path) -> dict[str, Any]:
    problem = "must be JSON, got {}."
    with named(path, "content", ValueError, RecursionError, problem=problem):
        header = json.loads(path.read_bytes())
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise DataFileError(path, "format", f"must be {_FORMAT!r}.")
    version = header.get("version")
    if version != _VERSION:
        raise DataFileError(path, "version", f"must be {_VERSION}, got {version!r}.")
    if header.pop("crc32", None) != _crc_of(header):
        raise DataFileError(path, "crc32", "must be that of the other fields.")
    return header


def _read_ids(path: Path, crc: int) -> tuple[str, ...]:
    with named(path, "file", FileNotFoundError, problem="missing."):
        content = path.read_bytes()
    _compare(path, "content", crc, zlib.crc32(content))
    return tuple(json.loads(content))


def _compare(path: Path, where: str, crc: int, got: int) -> None:
    if got != crc:
        problem = f"must have the checksum {crc:08x}, got {got:08x}."
        raise DataFileError(path, where, problem)


def _crc_of(header: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True).encode())


class _Folder:
    """The files of a store that is being written."""

    def __init__(self, path: Path, files: contextlib.ExitStack):
        self._path, self._files = path, files
        # Who came first, with arrays like those that everyone must have.
        self.first: tuple[str, dict[str, np.ndarray]] | None = None

    def create(
        self, split: str, name: str, like: np.ndarray, kind: str = "."
    ) -> _ArrayWriter:
        """A file for rows like those of an array."""
        dtype = _stored(like.dtype)
        # Structured and extension dtypes (bfloat16) come back as others.
        if not dtype.itemsize or np.dtype(dtype.str) != dtype:
            wanted = "a dtype that .npy files hold"
            raise TypeError(f"{name} must have {wanted}, got {dtype}.")
        path = _array_path(self._path, split, name, kind)
        if len(path.name) > 255:  # what file systems take
            found = f"makes a file name of {len(path.name)} bytes; 255 fit"
            raise ValueError(f"{name} must have a shorter name, got one that {found}.")
        file = self._files.enter_context(path.open("xb"))
        return _ArrayWriter(file, dtype, like.shape[1:])

    def finish(
        self,
        ids: tuple[str, ...],
        splits: Mapping[str, tuple[dict[str, _ArrayWriter], np.ndarray]],
    ) -> None:
        """Writes what describes the arrays; the header last."""
        entries = {}
        for split, (files, offsets) in splits.items():
            file = self.create(split, "offsets", offsets, "-")
            file.write(offsets)
            arrays = {name: array.finish() for name, array in files.items()}
            entries[split] = {"offsets": file.finish(), "arrays": arrays}
        content = json.dumps(ids).encode()
        self._write(_CLIENT_IDS, content)
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "client_ids": zlib.crc32(content),
            "splits": entries,
        }
        header["crc32"] = _crc_of(header)
        self._write(_HEADER, json.dumps(header, indent=1).encode() + b"\n")

    def _write(self, name: str, content: bytes) -> None:
        with (self._path / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _new_folder(path: str | os.PathLike, overwrite: bool) -> Iterator[_Folder]:
    """A folder to fill, which gets the name `path` when that went well."""
    path = Path(path).absolute()
    occupied = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if occupied and not overwrite:
        instead = "name a new folder, or pass overwrite=True to replace a store"
        raise FileExistsError(f"{path} exists; {instead}.")
    if occupied and not (path / _HEADER).is_file():
        why = f"since it has no {_HEADER}; it is not overwritten"
        raise FileExistsError(f"{path} is no store, {why}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    partial = path.with_name(f".{path.name}.partial-{token}")
    old = path.with_name(f".{path.name}.old-{token}")
    partial.mkdir()
    try:
        with contextlib.ExitStack() as files:
            yield _Folder(partial, files)
        if occupied:
            path.rename(old)
        try:
            partial.rename(path)
        except OSError:
            if occupied:
                old.rename(path)
            raise
    finally:
        for folder in (partial, old):
            shutil.rmtree(folder, ignore_errors=True)
