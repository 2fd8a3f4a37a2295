"""Reads the HDF5 files of TensorFlow Federated (up to about 2021), client by client.

One file per split. Its group `examples` holds one group per client, named by the client
id, and that one data set per feature, with the examples along its first axis. The
families that come so are in `tff`.
"""

import contextlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedjax_core.data.readers.files import DataFileError, max_unpacked, named
from fedjax_core.datasets.containers import Arrays, Clients, choose, extra

_ERRORS = OSError, KeyError, RuntimeError, TypeError, ValueError  # of h5py
_REFERENCE = np.dtype([("length", "<u4"), ("heap", "<u8"), ("number", "<u4")])


def iterate(
    path: Path | str,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> Clients:
    """Yields the clients of a file, sorted by id, one in memory at a time.

    Arguments and errors as in `containers`. Data that lie in other files (links,
    external storage) are refused.

    Yields:
      Client id and feature name -> [n_i, ...], as stored; texts as object arrays of
      bytes.
    """
    h5py = extra("h5py", "TFF's HDF5 files")  # slow to import
    path = Path(path)
    limit = max_unpacked(path.stat().st_size)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(path.open("rb"))
        with named(path, "HDF5 structure", *_ERRORS, problem="damaged, {}."):
            file = stack.enter_context(h5py.File(path, "r"))
            examples = _child(h5py, path, file, "examples", h5py.Group)
            # A set, as a damaged index may give a name twice; HDF5 finds one by it.
            names = sorted(set(examples))
        checked: set[int] = set()
        for client_id in choose(path, names, clients, max_clients):
            where = f"client {client_id!r}"
            features: Arrays = {}
            with named(path, where, *_ERRORS, problem="damaged, {}."):
                group = _child(h5py, path, examples, client_id, h5py.Group)
                for name in group:
                    dataset = _child(h5py, path, group, name, h5py.Dataset)
                    _check(h5py, path, dataset, limit)
                    if dataset.dtype.kind == "O":
                        _check_heaps(path, raw, dataset, limit, checked)
                    values = dataset[()]
                    is_text = dataset.dtype.kind in "SO"
                    features[name] = values.astype(object) if is_text else values
            rows = {name: len(array) for name, array in features.items()}
            if len(set(rows.values())) != 1:
                raise DataFileError(path, where, "features of one length", rows)
            yield client_id, features


def _child(h5py: Any, path: Path, group: Any, name: str, kind: Any) -> Any:
    if name not in group:
        raise DataFileError(path, f"group {group.name}", f"expected {name!r} in it.")
    # A link may lead out of the file, to anything the user can read.
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise DataFileError(path, f"{group.name}/{name}", "links are not followed.")
    child = group[name]
    if not isinstance(child, kind):
        found = type(child).__name__
        raise DataFileError(path, f"{group.name}/{name}", f"a {kind.__name__}", found)
    return child


def _check(h5py: Any, path: Path, dataset: Any, limit: int) -> None:
    """Checks what is read: that it is of the file, numbers or texts, and can fit."""
    shape, dtype = dataset.shape, dataset.dtype
    is_text = h5py.check_string_dtype(dtype) is not None
    problem = ""
    if dataset.external or dataset.is_virtual:
        problem = "data in other files are not read."
    elif not shape or not (is_text or dtype.kind in "biuf"):
        problem = f"expected [n, ...] numbers or texts, found {dtype} {shape}."
    elif dataset.size * dtype.itemsize > limit:
        problem = f"shape {shape} of {dtype} is more than a file of this size can hold."
    if problem:
        raise DataFileError(path, f"data set {dataset.name}", problem)


def _check_heaps(
    path: Path, raw: BinaryIO, dataset: Any, limit: int, checked: set[int]
) -> None:
    """Checks the heaps that hold the texts of a data set, as HDF5 does not.

    A text is stored as its length, the address of a heap (a "global heap collection")
    and its number in it. HDF5 walks the objects of a heap by their sizes, and never
    comes to an end if a damaged size is 0. References behind a filter, such as gzip,
    are not checked, heaps that are `checked` already neither.
    """
    if dataset.id.get_create_plist().get_nfilters():
        return
    if dataset.chunks is None:
        blocks = [(dataset.id.get_offset(), dataset.id.get_storage_size())]
    else:
        chunks = map(dataset.id.get_chunk_info, range(dataset.id.get_num_chunks()))
        blocks = [(chunk.byte_offset, chunk.size) for chunk in chunks]
    for start, size in blocks:
        if start is None:  # nothing stored, or in the header
            continue
        raw.seek(start)
        content = raw.read(size)
        count = len(content) // _REFERENCE.itemsize
        references = np.frombuffer(content, _REFERENCE, count)
        if references["length"].sum(dtype=np.int64) > limit:
            problem = "its texts are longer than a file of this size can hold."
            raise DataFileError(path, f"data set {dataset.name}", problem)
        for heap in np.unique(references["heap"]).tolist():
            if heap not in checked:
                _check_heap(path, raw, heap)
                checked.add(heap)


def _check_heap(path: Path, raw: BinaryIO, start: int) -> None:
    if start >= (end := path.stat().st_size):
        return  # HDF5 reports this one
    raw.seek(start)
    signature, size = struct.unpack("<8sQ", raw.read(16).ljust(16, b"\0"))
    if not signature.startswith(b"GCOL"):
        return  # and this
    content = raw.read(max(min(size, end) - 16, 0))
    at = 0
    while at + 16 <= len(content):
        number, object_size = struct.unpack_from("<H6xQ", content, at)
        # Number 0 is what is left of the heap; its size includes these 16 bytes.
        step = object_size if number == 0 else 16 + -(-object_size // 8) * 8
        if not 16 <= step <= len(content) - at:
            wanted = f"an object of the heap at byte {start}"
            raise DataFileError(path, f"byte {start + 16 + at}", wanted, "damage")
        at += step
