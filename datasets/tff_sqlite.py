"""Reads the SQLite files of TensorFlow Federated, client by client.

One file per data set. A row of the table `examples` is one example of one client, a
serialised `tf.train.Example`; `client_metadata` says how many a client has in a split.
The families that come so are in `tff`.
"""

import lzma
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedjax_core.data.readers.files import DataFileError, max_unpacked, named
from fedjax_core.datasets import tf_example
from fedjax_core.datasets.containers import Arrays, Clients, choose, open_sqlite

_CHUNK = 1 << 20
_MEMORY_LIMIT = 1 << 30  # of the LZMA dictionary: its strongest preset needs 65 MiB
_TABLES = {
    "examples": ("split_name", "client_id", "serialized_example_proto"),
    "client_metadata": ("client_id", "split_name", "num_examples"),
}


def iterate(
    path: Path | str,
    split: str,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> Clients:
    """Yields the clients of a split, sorted by id, one in memory at a time.

    Arguments and errors as in `containers`. An `.sqlite.lzma` file is unpacked beside
    itself first, see `unpack`.

    Yields:
      Client id and feature name -> [n_i, k], or [n_i] where every example has one
      value: float32, int64, or object arrays of bytes.
    """
    path = Path(path)
    if path.suffix == ".lzma":
        path = unpack(path)
    with open_sqlite(path, _TABLES) as connection:
        query = "SELECT client_id, num_examples FROM client_metadata"
        query += " WHERE split_name = ? ORDER BY client_id"
        metadata = connection.execute(query, [split]).fetchall()
        if not metadata:
            query = "SELECT DISTINCT split_name FROM client_metadata LIMIT 20"
            splits = sorted(repr(name) for (name,) in connection.execute(query))
            problem = f"no clients of split {split!r}; splits are {', '.join(splits)}."
            raise DataFileError(path, "table client_metadata", problem)
        names = (client_id for client_id, _ in metadata)
        chosen = choose(path, names, clients, max_clients)
        sizes = dict(metadata)
        if len(chosen) == len(sizes):
            query = "SELECT COUNT(*) FROM examples WHERE split_name = ?"
            (found,) = connection.execute(query, [split]).fetchone()
            if found != sum(size for size in sizes.values() if isinstance(size, int)):
                problem = f"{found} rows of split {split!r} are not what metadata say."
                raise DataFileError(path, "table examples", problem)

        # One query in the order wanted. It runs along the index that the published
        # files have; without one SQLite builds it once, not once per client.
        query = "CREATE TEMP TABLE wanted (id TEXT PRIMARY KEY) WITHOUT ROWID"
        connection.execute(query)
        values = ((name,) for name in chosen)
        connection.executemany("INSERT INTO temp.wanted VALUES (?)", values)
        rows = connection.execute(
            "SELECT wanted.id, serialized_example_proto FROM temp.wanted CROSS JOIN"
            " examples ON split_name = ? AND client_id = wanted.id"
            " ORDER BY wanted.id, examples.rowid",
            [split],
        )
        row = next(rows, None)
        for client_id in chosen:
            where = f"split {split!r}, client {client_id!r}"
            messages: list[bytes] = []
            while row is not None and row[0] == client_id:
                messages.append(row[1])
                row = next(rows, None)
            if len(messages) != sizes[client_id] or not messages:
                problem = f"found {len(messages)} rows, metadata: {sizes[client_id]!r}."
                raise DataFileError(path, where, problem)
            yield client_id, _stack(path, where, messages)


def unpack(path: Path | str) -> Path:
    """Unpacks `<name>.sqlite.lzma` to `<name>.sqlite` beside it, as TFF does.

    A file of that name which is there already is kept and used. A process that is
    stopped leaves no half of a file under that name.
    """
    path = Path(path)
    target = path.with_suffix("")
    if target.is_file():
        return target
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            for chunk in _decompress(path):
                file.write(chunk)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _decompress(path: Path) -> Iterator[bytes]:
    decompressor = lzma.LZMADecompressor(memlimit=_MEMORY_LIMIT)
    limit = max_unpacked(path.stat().st_size)
    size = 0
    with path.open("rb") as packed:
        while not decompressor.eof:
            at = packed.tell()
            content = packed.read(_CHUNK) if decompressor.needs_input else b""
            if decompressor.needs_input and not content:
                raise DataFileError(path, f"byte {at}", "LZMA stream is cut off.")
            problem = "LZMA stream is damaged, {}."
            with named(path, f"from byte {at}", lzma.LZMAError, problem=problem):
                chunk = decompressor.decompress(content, _CHUNK)
            size += len(chunk)
            if size > limit:
                problem = f"unpacks to more than {limit} bytes."
                raise DataFileError(path, f"byte {at}", problem)
            yield chunk
        at = packed.tell() - len(decompressor.unused_data)
        if decompressor.unused_data or packed.read(1):
            raise DataFileError(path, f"byte {at}", "more data after the LZMA stream.")


def _stack(path: Path, where: str, messages: list[bytes]) -> Arrays:
    """The examples of a client, feature by feature."""
    examples: list[Arrays] = []
    for i, message in enumerate(messages):
        with named(path, f"{where}, example {i}"):
            if not isinstance(message, bytes):
                raise ValueError(f"expected a BLOB, found {message!r:.40}.")
            examples.append(tf_example.parse(message))
    kinds = [{k: (v.dtype, v.shape) for k, v in e.items()} for e in examples]
    first = kinds[0]
    for i, found in enumerate(kinds):
        if found != first:
            wanted = f"the features of example 0, {first}"
            raise DataFileError(path, f"{where}, example {i}", wanted, found)
    stacked = {name: np.stack([e[name] for e in examples]) for name in first}
    return {k: v[:, 0] if v.shape[1:] == (1,) else v for k, v in stacked.items()}
