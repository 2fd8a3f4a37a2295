"""The data sets of FedJAX, from its own SQLite files, with their natural clients.

They are TFF's (see `tff` for counts, licences and what the examples are), one file per
split, one row per client: its arrays in msgpack, compressed by zlib. The functions of a
family give the same arrays as those of `tff`, with two differences: clients run in the
order of the file, which FedJAX has shuffled, and an id of EMNIST has a hash in front,
``<16 characters>:f<writer>_<2 digits>``.

Arguments and errors as in `containers`, others as those of `tff`; msgpack is needed.

Client key: the ids of the files. Polarity and normalisation: as in `tff`; EMNIST is
inverted to ink 1.

Licence: as in `tff`.

References:
  Ro et al., "FedJAX: Federated learning simulation with JAX", arXiv:2108.02117,
  https://github.com/google/fedjax.
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers.files import DataFileError, find, max_unpacked, named
from fedjax_core.datasets import containers, tff
from fedjax_core.datasets.containers import Arrays, Clients

_URL = "https://storage.googleapis.com/gresearch/fedjax/"
_TABLE = {"federated_data": ("client_id", "data", "num_examples")}
_ARRAY, _TEXTS = 1, 4  # extension codes of msgpack; 2 and 3 are scalars
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")  # as raw bytes, written on x86 or ARM
    for name in (
        *("bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    )
}


def emnist(
    folder: Path | str,
    only_digits: bool = False,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """As `tff.emnist`, of federated_emnist[_digitsonly]_{train,test}.sqlite."""
    name = "federated_emnist_digitsonly" if only_digits else "federated_emnist"
    num_classes = 10 if only_digits else 62
    to_arrays = functools.partial(tff.emnist_examples, num_classes=num_classes)
    return _both(folder, "emnist", name, to_arrays, clients, max_clients)


def shakespeare(
    folder: Path | str,
    length: int = 80,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """As `tff.shakespeare`, of shakespeare_{train,test}.sqlite."""
    check.positive_int(length=length)
    to_arrays = functools.partial(tff.shakespeare_examples, length=length)
    return _both(folder, "shakespeare", "shakespeare", to_arrays, clients, max_clients)


def stack_overflow(
    folder: Path | str,
    split: str = "train",
    word_ids: Mapping[str, int] | None = None,
    length: int = 20,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """As `tff.stack_overflow`, of stackoverflow_{train,held_out,test}.sqlite."""
    check.one_of(tff._SENTENCES, split=split)
    path = _find(folder, "stackoverflow", f"stackoverflow_{tff._SENTENCES[split]}")
    to_arrays = tff._sentences(folder, word_ids, length)
    return containers.one_split(path, iterate(path, to_arrays, clients, max_clients))


def iterate(
    path: Path | str,
    to_arrays: Callable[[Arrays], Arrays] | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> Clients:
    """Yields the clients of a file in its order, one in memory at a time.

    `to_arrays` makes arrays of a client's features, such as `tff.emnist_examples`; None
    gives the features as stored, texts as object arrays of bytes.
    """
    raw = _iterate(Path(path), clients, max_clients)
    return containers.convert(path, raw, to_arrays)


def _iterate(
    path: Path, clients: Sequence[str] | None, max_clients: int | None
) -> Clients:
    with containers.open_sqlite(path, _TABLE) as connection:
        query = "SELECT client_id, rowid FROM federated_data ORDER BY rowid"
        rows = [(_text(path, name), i) for name, i in connection.execute(query)]
        names = (name for name, _ in rows)
        chosen = containers.choose(path, names, clients, max_clients)
        rowids = dict(rows)
        query = "SELECT data, num_examples FROM federated_data WHERE rowid = ?"
        for client_id in chosen:
            where = f"client {client_id!r}"
            row = connection.execute(query, [rowids[client_id]]).fetchone()
            if row is None or not isinstance(row[0], bytes):
                raise DataFileError(path, where, "a BLOB", f"{row!r:.80}")
            with named(path, where):
                features = _unpack(row[0])
            sizes = {name: len(array) for name, array in features.items()}
            if set(sizes.values()) != {row[1]}:
                raise DataFileError(path, where, f"{row[1]!r} examples", sizes)
            yield client_id, features


def _unpack(data: bytes) -> Arrays:
    """A client's arrays; every error is a ValueError."""
    msgpack = containers.extra("msgpack", "FedJAX's files")
    limit = max_unpacked(len(data))
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(data, limit)
    except zlib.error as error:
        raise ValueError(f"zlib stream is damaged, {error}.") from error
    if not decompressor.eof:
        # Cut off, or there is more than the limit lets through.
        raise ValueError(f"zlib stream does not end within {limit} bytes of content.")
    if decompressor.unused_data:
        raise ValueError("more data after the zlib stream.")

    def array(code: int, packed: bytes) -> np.ndarray:
        parts = msgpack.unpackb(packed, raw=True)
        if code == _ARRAY:
            return _numbers(*_parts(parts, 3))
        if code == _TEXTS:
            return _texts(*_parts(parts, 2))
        raise ValueError(f"expected arrays, found msgpack extension {code}.")

    try:
        features = msgpack.unpackb(content, ext_hook=array, raw=False)
    except (msgpack.UnpackException, TypeError, RecursionError) as error:
        raise ValueError(f"msgpack is damaged, {error!r}.") from error
    if not isinstance(features, dict) or not features:
        raise ValueError("expected a map of features to arrays.")
    for name, value in features.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise ValueError(f"feature {name!r} is no array.")
        if value.ndim == 0:
            raise ValueError(f"feature {name!r} is a scalar.")
    return features


def _parts(parts: Any, count: int) -> list[Any]:
    """Checks that there are so many, and that the first is a shape."""
    if not isinstance(parts, list) or len(parts) != count:
        raise ValueError(f"expected an array as {count} parts, found {parts!r:.80}.")
    sizes = parts[0] if isinstance(parts[0], list) else [None]
    if not all(isinstance(n, int) and 0 <= n < 2**40 for n in sizes):
        raise ValueError(f"expected the shape of an array, found {parts[0]!r:.80}.")
    return parts


def _numbers(shape: list[int], name: Any, raw: Any) -> np.ndarray:
    dtype = _DTYPES.get(name.decode("latin-1")) if isinstance(name, bytes) else None
    if dtype is None:
        raise ValueError(f"expected a dtype of numbers, found {name!r:.80}.")
    if not isinstance(raw, bytes) or len(raw) != math.prod(shape) * dtype.itemsize:
        size = len(raw) if isinstance(raw, bytes) else repr(raw)[:80]
        raise ValueError(f"expected {dtype} of shape {shape}, found {size} bytes.")
    return np.frombuffer(raw, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _texts(shape: list[int], flat: Any) -> np.ndarray:
    if not isinstance(flat, list) or len(flat) != math.prod(shape):
        raise ValueError(f"expected a list of texts of shape {shape}.")
    for text in flat:
        if not isinstance(text, bytes):
            raise ValueError(f"expected texts, found {text!r:.80}.")
    return np.fromiter(flat, object, len(flat)).reshape(shape)


def _text(path: Path, name: Any) -> str:
    try:
        return name if isinstance(name, str) else bytes.decode(name)
    except (TypeError, UnicodeDecodeError) as error:
        raise DataFileError(path, "client ids", f"{name!r:.80} is no text.") from error


def _find(folder: Path | str, family: str, name: str) -> Path:
    return find(folder, [f"{name}.sqlite"], f"{_URL}{family}/{name}.sqlite")


def _both(
    folder: Path | str,
    family: str,
    name: str,
    to_arrays: Callable[[Any], Arrays],
    *wanted: Any,
) -> FederatedData:
    def read(split: str, *wanted: Any) -> Clients:
        return iterate(_find(folder, family, f"{name}_{split}"), to_arrays, *wanted)

    return containers.same_clients(_find(folder, family, f"{name}_test"), read, *wanted)
