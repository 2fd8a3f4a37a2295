"""What readers of containers share: files that hold many clients under their own names.

A container's `iterate` yields ``(client_id, {name: array [n_i, ...]})`` and reads one
client at a time, so a population need not fit in memory. Features come as stored until
a `convert` makes the model's ``{"x": ..., "y": ...}`` of them. A loader packs what
`iterate` yields:

* where train and test hold the same clients, one call gives both, as ``.train`` and
  ``.test`` of one population;
* where they hold different clients, a split is a population of its own: ``split=`` says
  which, and its examples are ``.train``.

What all readers of containers take and raise:

Args:
  folder: holds the files that the reader names.
  clients: names of those wanted, distinct; None for all.
  max_clients: the first so many of them, in the order of the file, >= 1; None for all.

Raises:
  FileNotFoundError: there are no such files. Says how to get them.
  DataFileError: a file is damaged or laid out differently, a client wanted is not in
    it, or one call reads train and test and they hold different clients.
  ValueError: no such split, or another argument out of its range.
  TypeError: `clients` is one str, or a number not an int.
  ImportError: a package that the format needs is missing. Says which.
"""

import contextlib
import importlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData, check_alike
from fedjax_core.data.readers.files import DataFileError, named

Arrays = dict[str, np.ndarray]
Clients = Iterator[tuple[str, Arrays]]
_Features = TypeVar("_Features")


def choose(
    path: Path | str,
    names: Iterable[Any],
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> list[str]:
    """The clients to read, in the order of `names`, all that `path` holds.

    Raises:
      DataFileError: a name is not text, occurs twice, or a client wanted is not there.
    """
    check_wanted(clients, max_clients)
    seen: dict[str, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise DataFileError(path, "client ids", "text", repr(name))
        if name in seen:
            raise DataFileError(path, f"client {name!r}", "occurs twice.")
        seen[name] = None
    chosen = list(seen)
    if clients is not None:
        wanted = set(clients)
        if missing := sorted(wanted - seen.keys()):
            problem = f"not among the {len(seen)} clients."
            raise DataFileError(path, f"client {missing[0]!r}", problem)
        chosen = [name for name in chosen if name in wanted]
    return chosen[:max_clients]


def check_wanted(clients: Sequence[str] | None, max_clients: int | None) -> None:
    """Checks a choice of clients, before a file is looked for."""
    if max_clients is not None:
        check.positive_int(max_clients=max_clients)
    if clients is None:
        return
    if isinstance(clients, str):
        raise TypeError(f"clients must be a sequence of names, got {clients!r}.")
    if not clients or len(set(clients)) < len(clients):
        raise ValueError(f"clients must be distinct names, got {clients!r:.80}.")


def convert(
    path: Path | str,
    clients: Iterable[tuple[str, _Features]],
    function: Callable[[_Features], Arrays] | None,
) -> Iterator[tuple[str, Any]]:
    """Applies `function`, if any, to each client; its errors name file and client."""
    if function is None:
        yield from clients
        return
    for client_id, features in clients:
        with named(path, f"client {client_id!r}"):
            arrays = function(features)
        yield client_id, arrays


def one_split(path: Path | str, clients: Clients) -> FederatedData:
    """Packs a split that is a population of its own; it becomes ``.train``."""
    train = _collect(path, clients)
    with named(path, "clients"):
        return FederatedData.from_lists(train.values(), client_ids=train)


def same_clients(
    path: Path | str,
    read: Callable[[str, Sequence[str] | None, int | None], Clients],
    clients: Sequence[str] | None,
    max_clients: int | None,
    hint: str = "",
) -> FederatedData:
    """Packs train and test of the same clients, in the order of train.

    `read` gives the clients of "train" or "test" in `path`. Test is read for the
    clients of train.

    Raises:
      DataFileError: the splits hold different clients, which `hint` is added to, or
        different shapes or dtypes, or one is a copy of the other.
    """
    train = _collect(path, read("train", clients, max_clients))
    part = clients is not None or max_clients is not None
    test = _collect(path, read("test", list(train) if part else None, None))
    if different := sorted(train.keys() ^ test.keys()):
        problem = f"is in one of train and test only, as are {len(different) - 1} more."
        problem = f"{problem} {hint}".strip()
        raise DataFileError(path, f"client {different[0]!r}", problem)
    with named(path, "clients"):
        lists = train.values(), [test[name] for name in train]
        data = FederatedData.from_lists(*lists, client_ids=train)
        one, other = data.splits.values()
        check_alike("train", one.examples, "test", other.examples)
    # A single example may well occur in both: two short speeches, say.
    first, second = ({"": s.offsets, **s.examples} for s in (one, other))
    if one.num_examples > 1 and all(np.array_equal(first[k], second[k]) for k in first):
        again = "those of train again"
        raise DataFileError(path, "test", "examples of its own", again)
    return data


def parse_json(path: Path | str, where: str, text: str | bytes) -> dict[str, Any]:
    """The object that a JSON text is; a member may not be there twice, nor NaN."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} occurs twice in one object")
        return dict(pairs)

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    problem = "expected JSON, {}; it is damaged."
    with named(path, where, ValueError, RecursionError, problem=problem):
        content = json.loads(text, object_pairs_hook=members, parse_constant=constant)
    if not isinstance(content, dict):
        raise DataFileError(path, where, "expected an object.")
    return content


@contextlib.contextmanager
def open_sqlite(
    path: Path | str, tables: Mapping[str, Sequence[str]]
) -> Iterator[sqlite3.Connection]:
    """Opens an SQLite file read-only and checks that it has tables and columns.

    Errors of SQLite inside the block become a DataFileError.
    """
    path = Path(path)
    if not path.stat().st_size:  # to SQLite, a sound database without tables
        raise DataFileError(path, "byte 0", "an SQLite database", "none")
    # Immutable: no lock, no journal, and nothing is written beside the file.
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    errors = sqlite3.Error, UnicodeDecodeError
    with (
        named(path, "SQLite", *errors, problem="damaged, {}."),
        contextlib.closing(sqlite3.connect(uri, uri=True)) as connection,
    ):
        # What the file says must not run: no function of its schema, no view.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        present = {name for (name,) in connection.execute(query)}
        for table, columns in tables.items():
            rows = connection.execute(f"PRAGMA table_info({table})")
            found = [row[1] for row in rows] if table in present else []
            if not set(columns) <= set(found):
                wanted = f"columns {list(columns)}"
                raise DataFileError(path, f"table {table}", wanted, found)
        yield connection


def extra(package: str, needs: str) -> Any:
    """A package of the extra "formats"; an ImportError says what `needs` it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        install = "pip install 'fedjax_core[formats]'"
        raise ImportError(f"{needs} need {package}: {install}.") from error


def _collect(path: Path | str, clients: Clients) -> dict[str, Arrays]:
    collected = dict(clients)
    if not collected:
        raise DataFileError(path, "clients", "at least one", "none")
    return collected
