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

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_core import check
from fedjax_core.data import packed
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.data.readers import csv_files, npz
from fedjax_core.data.readers.files import DataFileError, named, visible_files

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
        split: {name: packed.as_array(name, value) for name, value in examples.items()}
        for split, examples in given.items()
        if examples is not None
    }
    columns = {}
    for split, examples in pooled.items():
        check.one_of(examples, client=client)
        columns[split] = examples.pop(client)
    return _grouped(pooled, columns, client, sort)


def _grouped(
    pooled: Mapping[str, Mapping[str, np.ndarray]],
    columns: Mapping[str, np.ndarray],
    client: str,
    sort: bool,
) -> FederatedData:
    """Groups the examples of each split by its column of clients, called `client`."""
    kinds = []
    for split, column in columns.items():
        n = packed.check_examples(pooled[split])
        if column.shape != (n,):
            wanted = f"one client for each of the {n} rows of {split}"
            raise ValueError(f"{client} must have {wanted}, got shape {column.shape}.")
        kind = "number" if column.dtype.kind in "iu" else column.dtype.kind
        # Sorting 2 and "10" together would follow neither order.
        kinds.append(kind)
        if kind not in ("number", "U") or kind != kinds[0]:
            wanted = "ints or text, the same in every split"
            found = f"{column.dtype} in {split}"
            raise TypeError(f"{client} must be {wanted}, got {found}.")
    together = list(columns.values())
    if np.result_type(*together).kind == "f":
        # Of signed and unsigned ints NumPy makes floats, which merge large ones.
        together = [column.astype(object) for column in together]
    values, first, index = np.unique(
        np.concatenate(together), return_index=True, return_inverse=True
    )
    if not len(values):
        raise ValueError("train must hold at least one example, got none.")
    if not sort:
        order = np.argsort(first)
        values, index = values[order], np.argsort(order)[index]
    splits, ends = {}, np.cumsum([len(column) for column in together])[:-1]
    for (split, examples), of_split in zip(
        pooled.items(), np.split(index, ends), strict=True
    ):
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
      ValueError: clients or splits disagree, an id comes twice, or nobody has train
        examples.
      TypeError: an id that is not a str, or examples that are not a dict.
    """
    given = [(client_id, by_split(examples)) for client_id, examples in clients]
    names = dict.fromkeys(name for _, splits in given for name in splits)
    check_train(names, len(given))
    lists = {n: [splits.get(n, {}) for _, splits in given] for n in names}
    return FederatedData.from_lists(**lists, client_ids=[name for name, _ in given])


def check_train(splits: Collection[str], num_clients: int) -> None:
    """Raises ValueError unless a split that holds examples is "train"."""
    if "train" not in splits:
        found = f"got {num_clients} clients without"
        raise ValueError(f"clients must include one with train examples, {found}.")


def by_split(examples: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """A client's examples by split; without splits, all of them train.

    Raises:
      TypeError: examples are not a dict.
      ValueError: splits and arrays side by side, or a split of another name.
    """
    if not isinstance(examples, Mapping):
        found = f"{examples!r:.60}"
        raise TypeError(f"a client's examples must be a dict of arrays, got {found}.")
    nested = [isinstance(value, Mapping) for value in examples.values()]
    if not any(nested):
        return {"train": examples}
    if not all(nested) or not set(examples) <= set(SPLITS):
        wanted = f"arrays, or dicts of arrays called {', '.join(SPLITS)}"
        found = ", ".join(map(repr, examples))
        raise ValueError(f"a client's examples must be {wanted}, got {found}.")
    return examples


def from_npz(folder: str | os.PathLike) -> FederatedData:
    """Reads a folder with one .npz file per client, as `numpy.savez` writes them.

    The files lie in sub-folders ``train``, ``test`` and ``validation``, or right in the
    folder if all examples train. A file's name without ".npz" is the client's id; other
    files are passed over.

    Returns:
      The population, sorted by client id.

    Raises:
      FileNotFoundError: the folder has no .npz file where they are expected.
      DataFileError: a file is damaged, unpacks to more than `files.max_unpacked`, holds
        Python objects or differs from the others; the message names file and array.
      ValueError: there are files in sub-folders and beside them.
    """
    return from_iterator(npz_clients(folder))


def npz_clients(
    folder: str | os.PathLike,
) -> Iterator[tuple[str, dict[str, dict[str, np.ndarray]]]]:
    """Yields the clients of `from_npz` one by one, for `store.build`; errors as it."""
    folder = Path(folder)
    files = {name: visible_files(folder / name, "*.npz") for name in SPLITS}
    loose = visible_files(folder, "*.npz")
    if loose and any(files.values()):
        where = f"in folders {', '.join(SPLITS)} or beside each other"
        found = f"got both: {loose[0].name} is in none"
        raise ValueError(f"{folder} must have its files {where}, {found}.")
    files["train"] += loose
    if not files["train"]:
        put = "put one file per client there, CLIENT.npz"
        raise FileNotFoundError(f"no .npz file in {folder} or {folder}/train; {put}.")
    of_client: dict[str, dict[str, Path]] = {}
    for name, paths in files.items():
        for path in paths:
            of_client.setdefault(path.stem, {})[name] = path
    first: tuple[str, dict[str, np.ndarray]] | None = None
    for client_id in sorted(of_client):
        examples = {}
        for name, path in of_client[client_id].items():
            arrays = npz.read(path)
            with named(path, "arrays", TypeError, ValueError):
                if packed.check_examples(arrays):
                    empty = {k: np.empty_like(a[:0]) for k, a in arrays.items()}
                    first = first or (str(path), empty)
                    packed.check_alike(*first, str(path), arrays)
            examples[name] = arrays
        yield client_id, examples


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
    """Reads tables of numbers whose first line names the columns, gzipped or not.

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
      DataFileError: a column is missing or twice there, a line has more or fewer fields
        than the first, there is no row or all are there twice, or a field is not what
        it should be: a finite number, a label, a split or a client. The message names
        file, line and column.
      ValueError: an argument is not as described, or a column has two roles.
    """
    if split is not None and isinstance(path, Mapping):
        raise ValueError(f"split must be None where path names splits, got {split!r}.")
    if regression and classes is not None:
        raise ValueError("classes must be None for regression.")
    for argument, names in (("features", features), ("classes", classes)):
        if names is not None and (isinstance(names, str) or not len(names)):
            raise ValueError(f"{argument} must be a sequence of names, got {names!r}.")
        if len(set(names or ())) < len(names or ()):
            raise ValueError(f"{argument} must be distinct, got {names!r}.")
    paths = path if isinstance(path, Mapping) else {"train": path}
    if not paths:
        raise ValueError(f"path must name at least one file, got {path!r}.")
    for name in paths:
        check.one_of(SPLITS, path=name)
    special = [client, label] if split is None else [client, label, split]
    used = [*special, *(features or ())]
    if len(set(used)) < len(used):
        roles = "client, label, split and features"
        raise ValueError(f"{roles} must be different columns, got {used}.")
    labels = csv_files.number if regression else csv_files.integer
    fields = {
        client: csv_files.name,
        label: labels if classes is None else csv_files.category(classes),
        **({} if split is None else {split: csv_files.category(SPLITS)}),
        **dict.fromkeys(features or (), csv_files.number),
    }
    others = csv_files.number if features is None else None
    columns, pooled, examples = features, {}, {}
    for name, file in paths.items():
        file = Path(file)
        table = csv_files.read(file, fields, others=others, delimiter=delimiter)
        found = [column for column in table if column not in special]
        columns = found if columns is None else columns
        if set(found) != set(columns):
            raise DataFileError(file, "header", f"columns {list(columns)}", found)
        y = table[label]
        x = np.array([table[column] for column in columns], np.float32)
        examples = {
            "x": np.ascontiguousarray(x.reshape(len(columns), len(y)).T),
            "y": y.astype(np.float32 if regression else np.int32),
            "client": table[client],
        }
        of_split = (
            np.full(len(y), SPLITS.index(name)) if split is None else table[split]
        )
        for i in np.unique(of_split):
            pooled[SPLITS[i]] = {k: a[of_split == i] for k, a in examples.items()}
    pooled.setdefault("train", {k: a[:0] for k, a in examples.items()})
    return from_arrays(**pooled, sort=sort)


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
      ValueError: a split of another name, no such column, rows of unequal shape, ints
        beyond 32 bits, or numbers that are not finite or don't fit float32.
      TypeError: not a data set, or a column of something else.
    """
    given = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    check.one_of(given, split="train")
    pooled, ids = {}, {}
    for split, rows in given.items():
        check.one_of(SPLITS, split=split)
        if not hasattr(rows, "column_names") or not hasattr(rows, "iter"):
            wanted = "a datasets.Dataset or DatasetDict"
            raise TypeError(f"dataset must be {wanted}, got {type(rows).__name__}.")
        # A data set that streams may know its columns only from its rows.
        found = rows.column_names or list(next(iter(rows), {}))
        kept = columns or {name: name for name in found if name != client}
        for name in (client, *kept.values()):
            check.one_of(found, column=name)
        pieces = []
        ids[split] = []
        # In pieces: as Python objects a column takes many times its size.
        for piece in rows.with_format(None).iter(1000):
            ids[split] += piece[client]
            pieces.append({k: _column(name, piece[name]) for k, name in kept.items()})
            where = f"row {1000 * len(pieces) - 1000} of {split}"
            packed.check_alike("row 0", pieces[0], where, pieces[-1])
        if not pieces:
            raise ValueError(f"{split} must hold at least one row, got none.")
        pooled[split] = {k: np.concatenate([p[k] for p in pieces]) for k in kept}
    columns_of_clients = {split: np.array(column) for split, column in ids.items()}
    return _grouped(pooled, columns_of_clients, f"column {client!r}", sort)


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
        # NaN is not <= anything.
        if not np.all(np.abs(array) <= np.finfo(np.float32).max):
            wanted = "finite numbers that fit float32"
            raise ValueError(f"column {name!r} must hold {wanted}.")
        return array.astype(np.float32)
    if array.dtype.kind not in "bU":
        wanted, found = "images, numbers or text", type(values[0]).__name__
        raise TypeError(f"column {name!r} must be {wanted}, got {found}.")
    return array


def _pixels(image: Any) -> np.ndarray:
    """A PIL image as float32 [H, W, C] in [0, 1]."""
    if image.mode == "P":
        image = image.convert("RGB")  # or its pixels would be numbers of colours
    if image.mode not in ("1", "L", "RGB"):
        found = f"got {image.mode!r}; convert them first"
        raise ValueError(f"images must be of mode '1', 'L', 'RGB' or 'P', {found}.")
    scale = 1 if image.mode == "1" else 255
    return np.atleast_3d(np.asarray(image)).astype(np.float32) / scale
