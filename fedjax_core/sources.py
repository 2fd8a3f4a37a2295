"""Populations from the forms that data comes in.

==================  ===============================================================
function            data
==================  ===============================================================
`from_arrays`       pooled arrays, one of which says whose example it is
`from_csv`          tables with a column for the client
`from_npz`          a folder with one .npz file per client
`from_iterator`     client id and arrays, one client after the other
`from_huggingface`  a data set of the package `datasets` with a column for the client
==================  ===============================================================

Lists with one dict of arrays per client go into `FederatedData.from_lists`.

A client that is in one split is in all of them, without examples where it has none.
Clients are sorted by id, numbers by value and text alphabetically, or with
``sort=False`` in order of first appearance: in train, then in test, then in validation.
A client's examples stay in the order they come in.

For populations larger than memory see `store.build`.
"""

import csv
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedjax_core import check
from fedjax_core.data import FederatedData, Packed, check_alike, check_examples

SPLITS = ("train", "test", "validation")


def from_arrays(
    train: Mapping[str, Any],
    test: Mapping[str, Any] | None = None,
    validation: Mapping[str, Any] | None = None,
    *,
    client: str = "client",
    sort: bool = True,
) -> FederatedData:
    """Groups pooled examples by client.

    Args:
      train: name -> array [n, ...], `client` among the names.
      test: likewise.
      validation: likewise.
      client: name of the array [n] that says whose example it is, ints or text. It is
        left out of the result.
      sort: clients by id rather than in order of first appearance.

    Returns:
      The population. Arrays whose rows are grouped already are held, others copied.

    Raises:
      ValueError: no array `client`, one of another shape, arrays of unequal length, or
        no example at all.
      TypeError: clients are neither ints nor text, or not the same in every split.
    """
    given = {"train": train, "test": test, "validation": validation}
    pooled = {
        split: {name: _array(value) for name, value in examples.items()}
        for split, examples in given.items()
        if examples is not None
    }
    columns = []
    for split, examples in pooled.items():
        check.one_of(examples, client=client)
        column = examples.pop(client)
        n = check_examples(examples)
        if column.shape != (n,):
            raise ValueError(
                f"{client} must have one client for each of the {n} rows of {split}, "
                f"got shape {column.shape}."
            )
        kind = "number" if column.dtype.kind in "iu" else column.dtype.kind
        # Sorting 2 and "10" together would follow neither order.
        if kind not in ("number", "U") or kind != (columns or [(kind, None)])[0][0]:
            raise TypeError(
                f"{client} must be ints or text, the same in every split, got "
                f"{column.dtype} in {split}."
            )
        columns.append((kind, column))
    values, first, index = np.unique(
        np.concatenate([column for _, column in columns]),
        return_index=True,
        return_inverse=True,
    )
    if not len(values):
        raise ValueError("train must hold at least one example, got none.")
    if not sort:
        order = np.argsort(first)
        values, index = values[order], np.argsort(order)[index]
    splits, start = {}, 0
    for split, examples in pooled.items():
        n = check_examples(examples)
        of_split = index[start : start + n]
        start += n
        if np.any(np.diff(of_split) < 0):
            rows = np.argsort(of_split, kind="stable")
            examples = {name: a[rows] for name, a in examples.items()}
        sizes = np.bincount(of_split, minlength=len(values))
        splits[split] = Packed(examples, np.concatenate([[0], np.cumsum(sizes)]))
    return FederatedData(**splits, client_ids=tuple(map(str, values.tolist())))


def from_iterator(
    clients: Iterable[tuple[str, Mapping[str, Any]]],
) -> FederatedData:
    """Packs clients as they come; `store.build` does the same on disk.

    Args:
      clients: pairs of a client id and its examples: name -> array [n_i, ...], or the
        same for each split, ``{"train": {"x": ...}, "test": {"x": ...}}``. Clients must
        agree as for `Packed.from_lists`.

    Returns:
      The population in memory. Clients are in the order of the iterator.

    Raises:
      ValueError: clients disagree, an id comes twice, or nobody has train examples.
      TypeError: an id that is not a str.
    """
    ids: list[str] = []
    splits: dict[str, list[Mapping[str, Any]]] = {}
    for client_id, examples in clients:
        for name, arrays in by_split(examples).items():
            split = splits.setdefault(name, [])
            split += [{}] * (len(ids) - len(split))
            split.append(arrays)
        ids.append(client_id)
    if "train" not in splits:
        raise ValueError(
            f"clients must include one with train examples, got {len(ids)} clients "
            f"without."
        )
    lists = {
        name: split + [{}] * (len(ids) - len(split)) for name, split in splits.items()
    }
    return FederatedData.from_lists(**lists, client_ids=ids)


def by_split(examples: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """A client's examples by split; without splits, all of them train.

    Raises:
      ValueError: splits and arrays side by side, or a split of another name.
    """
    nested = [isinstance(value, Mapping) for value in examples.values()]
    if not any(nested):
        return {"train": examples}
    if not all(nested) or not set(examples) <= set(SPLITS):
        raise ValueError(
            f"a client's examples must be arrays, or dicts of arrays called "
            f"{', '.join(SPLITS)}, got {', '.join(map(repr, examples))}."
        )
    return examples


def from_npz(folder: str | os.PathLike) -> FederatedData:
    """Reads a folder with one .npz file per client, as `numpy.savez` writes them.

    The files lie in sub-folders ``train``, ``test`` and ``validation``, or right in the
    folder if all examples train. A file's name without ".npz" is the client's id; other
    files are passed over.

    Args:
      folder: the folder.

    Returns:
      The population, sorted by client id.

    Raises:
      FileNotFoundError: the folder has no .npz file where they are expected.
      ValueError: a file is damaged, holds Python objects or differs from the others;
        the message names file and array.
    """
    return from_iterator(npz_clients(folder))


def npz_clients(
    folder: str | os.PathLike,
) -> Iterator[tuple[str, dict[str, dict[str, np.ndarray]]]]:
    """Yields the clients of `from_npz` one by one, for `store.build`.

    Args:
      folder: see `from_npz`.

    Raises:
      FileNotFoundError, ValueError: see `from_npz`.
    """
    folder = Path(folder)
    files = {name: sorted((folder / name).glob("*.npz")) for name in SPLITS}
    loose = sorted(folder.glob("*.npz"))
    if loose and any(files.values()):
        raise ValueError(
            f"{folder} must have its files in folders {', '.join(SPLITS)} or beside "
            f"each other, got both: {loose[0].name} is in none."
        )
    files["train"] += loose
    if not files["train"]:
        raise FileNotFoundError(
            f"no .npz file in {folder} or {folder / 'train'}; put one file per client "
            f"there, CLIENT.npz."
        )
    of_client: dict[str, dict[str, Path]] = {}
    for name, paths in files.items():
        for path in paths:
            of_client.setdefault(path.stem, {})[name] = path
    first: dict[str, tuple[Path, dict[str, np.ndarray]]] = {}
    for client_id in sorted(of_client):
        examples = {}
        for name, path in of_client[client_id].items():
            arrays = _read_npz(path)
            try:
                if check_examples(arrays):
                    like = first.setdefault(
                        name, (path, {k: a[:0] for k, a in arrays.items()})
                    )
                    check_alike(str(like[0]), like[1], str(path), arrays)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: {error}") from None
            examples[name] = arrays
        yield client_id, examples


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    where = "zip directory"
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                where = entry.filename
                name = where.removesuffix(".npy")
                if name == where or name in arrays:
                    raise ValueError("must be .npy files of different names.")
                with archive.open(entry) as file:
                    arrays[name] = _read_npy(file, entry.file_size)
    # The parsers of zip and npy raise whatever their own code trips over.
    except Exception as error:
        raise ValueError(f"{path}, {where}: damaged, {error}") from error
    return arrays


def _read_npy(file: IO[bytes], num_bytes: int) -> np.ndarray:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    if dtype.hasobject:
        raise ValueError("must not hold Python objects, which are never unpickled.")
    # Before anything of that size is asked for.
    rest = num_bytes - file.tell()
    if rest != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{dtype} of shape {shape} does not fill {rest} bytes.")
    content = file.read()  # to the end: then the checksum is compared
    array = np.frombuffer(bytearray(content), dtype)
    array = array.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def from_csv(
    path: str | os.PathLike | Mapping[str, str | os.PathLike],
    *,
    client: str,
    label: str,
    features: Sequence[str] | None = None,
    split: str | None = None,
    classes: Sequence[str] | None = None,
    regression: bool = False,
    delimiter: str = ",",
    sort: bool = True,
) -> FederatedData:
    """Reads tables of numbers whose first line names the columns.

    Args:
      path: the file, or a dict from "train", "test" and "validation" to files.
      client: column of client ids, taken as text.
      label: column of labels.
      features: columns of features, in that order; by default all others.
      split: column that says "train", "test" or "validation". Without it all examples
        of a single file train; `split_examples` takes some to test on.
      classes: what the label column says for class 0, 1, ...; by default it says ints.
      regression: labels are numbers to predict, not classes.
      delimiter: what separates columns.
      sort: clients by id rather than in order of first appearance.

    Returns:
      The population: ``x`` [n, d] float32, and ``y`` [n] int32, or float32 for
      regression.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a column is missing or twice there, a line has more or fewer fields
        than the first, or a field is not what it should be: a finite number, a label, a
        split or a client. The message names file, line and column.
    """
    if split is not None and isinstance(path, Mapping):
        raise ValueError(f"split must be None where path names splits, got {split!r}.")
    if regression and classes is not None:
        raise ValueError("classes must be None for regression.")
    paths = path if isinstance(path, Mapping) else {"train": path}
    for name in paths:
        check.one_of(SPLITS, path=name)
    index = {name: i for i, name in enumerate(classes or ())}
    read_label: Callable[[str], float]
    if regression:
        read_label, rule = _finite, "a finite number"
    elif index:
        read_label, rule = index.__getitem__, f"one of {', '.join(map(repr, index))}"
    else:
        read_label, rule = _int32, "an int of 32 bits"

    others = [client, label] if split is None else [client, label, split]
    columns = None if features is None else list(features)
    rows = {"train": ([], [], [])}
    for of_file, file in paths.items():
        table = _csv_rows(Path(file), delimiter)
        _, header = next(table)
        found = [name for name in header if name not in others]
        columns = found if columns is None else columns
        for name in [*others, *columns]:
            if name not in header:
                raise ValueError(
                    f"{file}, line 1: must name a column {name!r}, got {header}."
                )
        if features is None and set(found) != set(columns):
            raise ValueError(
                f"{file}, line 1: must name columns {columns}, got {found}."
            )
        for line, fields in table:
            row = _Row(file, line, dict(zip(header, fields, strict=True)))
            name = of_file
            if split is not None:
                name = row.read(split, _split, f"one of {', '.join(SPLITS)}")
            ids, x, y = rows.setdefault(name, ([], [], []))
            ids.append(row.read(client, _text, "a client id"))
            x.append([row.read(name, _finite, "a finite number") for name in columns])
            y.append(row.read(label, read_label, rule))
    if not any(ids for ids, _, _ in rows.values()):
        files = ", ".join(map(str, paths.values()))
        raise ValueError(f"{files}, line 2: must hold at least one example, got none.")
    dtype = np.float32 if regression else np.int32
    pooled = {
        name: {
            "x": np.array(x, np.float32).reshape(len(x), len(columns or ())),
            "y": np.array(y, dtype),
            "client": np.array(ids, str),
        }
        for name, (ids, x, y) in rows.items()
    }
    return from_arrays(
        pooled["train"], pooled.get("test"), pooled.get("validation"), sort=sort
    )


class _Row(NamedTuple):
    """A line of a table, column -> text."""

    file: Any
    line: int
    fields: dict[str, str]

    def read(self, column: str, parse: Callable[[str], Any], rule: str) -> Any:
        text = self.fields[column].strip()
        try:
            return parse(text)
        except (ValueError, KeyError):
            raise ValueError(
                f"{self.file}, line {self.line}, column {column!r}: must be {rule}, "
                f"got {text!r}."
            ) from None


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and fields; the first line too, whose names are unique."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        width = None
        try:
            for fields in reader:
                if not fields:
                    continue  # a blank line, as at the end of many files
                if width is None:
                    width = len(fields)
                    twice = {name for name in fields if fields.count(name) > 1}
                    if twice:
                        raise ValueError(f"must name each column once, got {fields}.")
                if len(fields) != width:
                    raise ValueError(f"must have {width} fields, got {len(fields)}.")
                yield reader.line_num, fields
            if width is None:
                raise ValueError("must name the columns, got an empty file.")
        except (ValueError, csv.Error) as error:
            line = max(reader.line_num, 1)
            raise ValueError(f"{path}, line {line}: {error}") from None


_LARGEST = float(np.finfo(np.float32).max)


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) <= _LARGEST:
        raise ValueError
    return value


def _int32(text: str) -> int:
    value = int(text)
    if not -(2**31) <= value < 2**31:
        raise ValueError
    return value


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _split(text: str) -> str:
    if text not in SPLITS:
        raise ValueError
    return text


def from_huggingface(
    dataset: Any,
    *,
    client: str,
    columns: Mapping[str, str] | None = None,
    sort: bool = True,
) -> FederatedData:
    """Groups a data set of the package `datasets` by client.

    Needs the extra ``huggingface`` to load one; nothing is downloaded here.

    Args:
      dataset: a `datasets.Dataset`, whose examples all train, or a `DatasetDict` with
        splits called "train", "test" and "validation".
      client: column that says whose example it is, ints or text, such as
        ``"writer_id"`` of flwrlabs/femnist.
      columns: what to keep under which name, ``{"x": "image", "y": "character"}``; by
        default every column but `client`, under its own name.
      sort: clients by id rather than in order of first appearance.

    Returns:
      The population. Images become float32 [n, H, W, C] in [0, 1], ink and paper as
      they are; ints become int32 and floats float32; text stays text.

    Raises:
      ValueError: a split of another name, no such column, rows of unequal shape, or
        ints beyond 32 bits.
      TypeError: not a data set, or a column of something else.
    """
    given = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    check.one_of(given, split="train")
    pooled = {}
    for split, rows in given.items():
        check.one_of(SPLITS, split=split)
        if not hasattr(rows, "column_names") or not hasattr(rows, "iter"):
            raise TypeError(
                f"dataset must be a datasets.Dataset or DatasetDict, got "
                f"{type(rows).__name__}."
            )
        kept = columns or {name: name for name in rows.column_names if name != client}
        for name in (client, *kept.values()):
            check.one_of(rows.column_names, column=name)
        ids, pieces = [], []
        # In pieces: as Python objects a column takes many times its size.
        for piece in rows.with_format(None).iter(1000):
            ids += piece[client]
            pieces.append({k: _column(name, piece[name]) for k, name in kept.items()})
            start = 1000 * len(pieces) - 1000
            check_alike("row 0", pieces[0], f"row {start} of {split}", pieces[-1])
        if not pieces:
            raise ValueError(f"{split} must hold at least one row, got none.")
        pooled[split] = {k: np.concatenate([p[k] for p in pieces]) for k in kept}
        pooled[split][_CLIENT] = np.array(ids)
    return from_arrays(
        pooled["train"],
        pooled.get("test"),
        pooled.get("validation"),
        client=_CLIENT,
        sort=sort,
    )


_CLIENT = "client id"  # no array of the result is called so


def _column(name: str, values: list) -> np.ndarray:
    """Some rows of a column as an array that can be trained on."""
    if all(hasattr(value, "getbands") for value in values):
        values = [_pixels(image) for image in values]
    try:
        array = np.array(values)
    except ValueError:
        raise ValueError(f"column {name!r} must have rows of one shape.") from None
    if array.dtype.kind in "iu":
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"column {name!r} must hold ints of 32 bits.")
        return array.astype(np.int32)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.dtype.kind not in "bU":
        raise TypeError(
            f"column {name!r} must be images, numbers or text, got "
            f"{type(values[0]).__name__}."
        )
    return array


def _pixels(image: Any) -> np.ndarray:
    """A PIL image as float32 [H, W, C] in [0, 1]."""
    if image.mode == "P":
        image = image.convert("RGB")  # or its pixels would be numbers of colours
    if image.mode not in ("1", "L", "RGB"):
        raise ValueError(
            f"images must be of mode '1', 'L', 'RGB' or 'P', got {image.mode!r}; "
            f"convert them first."
        )
    scale = 1 if image.mode == "1" else 255
    return np.atleast_3d(np.asarray(image)).astype(np.float32) / scale


def _array(values: Any) -> np.ndarray:
    # As `Packed` does: np.asarray would strip np.memmap.
    return values if isinstance(values, np.ndarray) else np.asarray(values)
