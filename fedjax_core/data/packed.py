"""A population's examples on the host, packed client by client.

Clients differ in size, and nothing here is padded: each split is one set of arrays
whose rows run client after client, and `offsets` says where each client starts. Arrays
are kept as they are given, memory maps included; a client's examples are views of them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_core import check

_RESERVED = "example_mask"  # batches mark their padding under this name


class Dataset(NamedTuple):
    """Pooled examples, not yet split among clients: name -> array [n, ...]."""

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    validation: dict[str, np.ndarray] | None = None

    @property
    def splits(self) -> dict[str, dict[str, np.ndarray]]:
        """The splits there are, by name."""
        return {k: v for k, v in self._asdict().items() if v is not None}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Packed:
    """One split of N clients: rows ``offsets[i]:offsets[i + 1]`` belong to client i.

    A client may have no examples. Arrays are held, not copied.

    Attributes:
      examples: name -> array [n, ...]; any dtype without Python objects, any name but
        ``"example_mask"``.
      offsets: [N + 1] int64, read-only.

    Raises:
      ValueError: no array, no client, unequal numbers of rows, a reserved name, or
        offsets that do not run from 0 to n without decreasing.
      TypeError: a name that is not a str, an object dtype, offsets that are not ints.
    """

    examples: Mapping[str, np.ndarray]
    offsets: np.ndarray

    def __post_init__(self):
        examples = {name: as_array(name, x) for name, x in self.examples.items()}
        num_examples = check_examples(examples)
        offsets = _int_vector("offsets", self.offsets).astype(np.int64)  # always a copy
        if offsets.size < 2:
            wanted = "shape (num_clients + 1,) with at least one client"
            raise ValueError(f"offsets must have {wanted}, got shape {offsets.shape}.")
        if offsets[0] != 0 or offsets[-1] != num_examples:
            wanted = f"start at 0 and end at the number of examples, {num_examples}"
            found = f"{offsets[0]} and {offsets[-1]}"
            raise ValueError(f"offsets must {wanted}, got {found}.")
        decreasing = np.flatnonzero(np.diff(offsets) < 0)
        if decreasing.size:
            i = decreasing[0]
            found = f"{offsets[i]} then {offsets[i + 1]} at client {i}"
            raise ValueError(f"offsets must not decrease, got {found}.")
        offsets.setflags(write=False)
        object.__setattr__(self, "examples", examples)
        object.__setattr__(self, "offsets", offsets)

    @classmethod
    def from_lists(cls, clients: Iterable[Mapping[str, Any]]) -> "Packed":
        """Concatenates one dict of arrays per client.

        Clients with examples must agree on names, shapes behind the example axis and
        dtypes (strings only on the kind: the width grows to the longest). What a client
        without examples gives, ``{}`` included, is not looked at as long as another
        client tells names, shapes and dtypes.

        Args:
          clients: per client, name -> array [n_i, ...] or what NumPy makes one from.

        Raises:
          ValueError: clients disagree, or none tells shapes and dtypes.
        """
        given = list(clients)
        arrays = [{k: as_array(k, v) for k, v in c.items()} for c in given]
        sizes = [check_client(f"client {i}", c) for i, c in enumerate(arrays)]
        filled = [i for i, size in enumerate(sizes) if size]
        # Even without rows an array has a shape and a dtype; an empty list has not.
        typed = (
            i
            for i, client in enumerate(given)
            if client and all(isinstance(v, np.ndarray) for v in client.values())
        )
        first = filled[0] if filled else next(typed, None)
        if first is None:
            wanted = "one that tells names, shapes and dtypes"
            found = f"{len(given)} clients without examples"
            raise ValueError(f"clients must include {wanted}, got {found}.")
        for i in filled:
            check_alike(f"client {first}", arrays[first], f"client {i}", arrays[i])
        parts = [arrays[i] for i in filled] or [arrays[first]]
        examples = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        return cls(examples, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @property
    def num_clients(self) -> int:
        """N, clients without examples included."""
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        """n, over all clients."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64, examples per client."""
        return np.diff(self.offsets)

    def client(self, i: int) -> dict[str, np.ndarray]:
        """The examples of client i, name -> view [n_i, ...].

        Raises:
          IndexError: i is not in 0..N-1.
        """
        _check_clients(np.asarray([i]), self.num_clients)
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return {name: array[rows] for name, array in self.examples.items()}

    def take(self, clients: Sequence[int] | np.ndarray) -> "Packed":
        """The given clients, in the given order; a client may be repeated.

        Consecutive clients come as views, any other choice copies its rows.

        Args:
          clients: [M] ints in 0..N-1, M >= 1. A boolean mask is refused.

        Raises:
          ValueError: no client is given.
          IndexError: a client is not in 0..N-1.
          TypeError: the clients are not ints.
        """
        if len(clients) == 0:
            raise ValueError("clients must name at least one client, got none.")
        ids = _int_vector("clients", clients)
        _check_clients(ids, self.num_clients)
        starts, sizes = self.offsets[ids], self.sizes[ids]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        if np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids))):
            rows = slice(starts[0], starts[0] + offsets[-1])
        else:
            rows = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
        return Packed({k: v[rows] for k, v in self.examples.items()}, offsets)

    def __repr__(self):
        return (
            f"Packed({self.num_clients} clients, {self.num_examples} examples, "
            f"{_describe(self.examples)})"
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """The data of a population: client i is row i of every split.

    Attributes:
      train: what clients train on.
      test: held-out examples of the same clients.
      validation: more held-out examples, for choosing hyperparameters.
      client_ids: one name per client, unique; left out (or None), "0" to "N-1".
      public: arrays of the server, which belong to no client: algorithms find them as
        ``cohort.public``. Device memory holds them once, whatever the rounds and seeds.

    Raises:
      ValueError: splits of different numbers of clients; splits with examples that
        differ in the names of arrays, in dtypes or in shapes behind the example axis;
        ids that are not unique or not one per client.
      TypeError: ids that are not str.
    """

    train: Packed
    test: Packed | None = None
    validation: Packed | None = None
    client_ids: tuple[str, ...] = ()
    public: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, split in self.splits.items():
            if split.num_clients != self.num_clients:
                found = f"got {split.num_clients}; those without examples have size 0"
                wanted = f"the {self.num_clients} clients of train"
                raise ValueError(f"{name} must have {wanted}, {found}.")
        filled = {k: s.examples for k, s in self.splits.items() if s.num_examples}
        for name, examples in filled.items():
            first = next(iter(filled))
            check_alike(first, filled[first], name, examples)
        if isinstance(self.client_ids, str):
            raise TypeError(f"client_ids must be strs, got one: {self.client_ids!r}.")
        ids = () if self.client_ids is None else tuple(self.client_ids)
        ids = ids or tuple(map(str, range(self.num_clients)))
        if len(ids) != self.num_clients:
            wanted = f"one id per client, {self.num_clients}"
            raise ValueError(f"client_ids must hold {wanted}, got {len(ids)}.")
        seen = set()
        for client_id in ids:
            if not isinstance(client_id, str):
                raise TypeError(f"client_ids must be strs, got {client_id!r}.")
            if client_id in seen:
                raise ValueError(f"client_ids must be unique, got {client_id!r} twice.")
            seen.add(client_id)
        object.__setattr__(self, "client_ids", ids)

    @classmethod
    def from_lists(
        cls,
        train: Iterable[Mapping[str, Any]],
        test: Iterable[Mapping[str, Any]] | None = None,
        validation: Iterable[Mapping[str, Any]] | None = None,
        client_ids: Iterable[str] | None = None,
    ) -> "FederatedData":
        """Packs one dict of arrays per client and split; see `Packed.from_lists`."""
        return cls(
            Packed.from_lists(train),
            None if test is None else Packed.from_lists(test),
            None if validation is None else Packed.from_lists(validation),
            () if client_ids is None else tuple(client_ids),
        )

    @property
    def num_clients(self) -> int:
        """N, the same for every split."""
        return self.train.num_clients

    @property
    def splits(self) -> dict[str, Packed]:
        """The splits there are, by name."""
        splits = {"train": self.train, "test": self.test, "validation": self.validation}
        return {name: split for name, split in splits.items() if split is not None}

    def subset(self, clients: Sequence[int] | np.ndarray) -> "FederatedData":
        """The given clients of every split, in the given order, with their ids.

        Args:
          clients: [M] distinct ints in 0..N-1, M >= 1.

        Raises:
          As `Packed.take`; ValueError also if a client is repeated.
        """
        splits = {name: split.take(clients) for name, split in self.splits.items()}
        client_ids = tuple(self.client_ids[i] for i in clients)
        return dataclasses.replace(self, **splits, client_ids=client_ids)

    def map(
        self, function: Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
    ) -> "FederatedData":
        """Applies a function to the examples of every split.

        Args:
          function: gets a split's name -> array [n, ...], all clients at once, and
            returns the new arrays, each with the same n rows in the same order. It
            must not write into what it gets.

        Returns:
          The same clients with the new arrays. What the function returns is held in
          memory; for a population larger than that, `store.build` with a generator.

        Raises:
          ValueError: the function changes the number of rows.
          TypeError: the function does not return a dict.
        """
        splits = {}
        for split, packed in self.splits.items():
            new = function(dict(packed.examples))
            if not isinstance(new, Mapping):
                given = type(new).__name__
                raise TypeError(f"function must return a dict of arrays, got {given}.")
            for name, array in new.items():
                if np.shape(array)[:1] != (packed.num_examples,):
                    rows = f"the {packed.num_examples} rows of {split}"
                    found = f"{name} of shape {np.shape(array)}"
                    raise ValueError(f"function must keep {rows}, got {found}.")
            splits[split] = Packed(new, packed.offsets)
        return dataclasses.replace(self, **splits)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Split -> "examples" in all, and "min", "median", "mean", "max" per client."""
        of_sizes = {"min": np.min, "median": np.median, "mean": np.mean, "max": np.max}
        return {
            name: {
                "examples": float(split.num_examples),
                **{what: float(of(split.sizes)) for what, of in of_sizes.items()},
            }
            for name, split in self.splits.items()
        }

    def label_values(self, label: str = "y") -> np.ndarray:
        """The distinct labels of all splits, [K], sorted.

        Raises:
          ValueError: there is no array `label`, or it is not [n].
          TypeError: labels are neither ints, bools nor text.
        """
        given = []
        for split in self.splits.values():
            y = labels_of(split.examples, label)
            if split.num_examples or not given:  # those agree on the dtype
                given.append(np.unique(y))
        return np.unique(np.concatenate(given))

    def label_counts(self, label: str = "y", split: str = "train") -> np.ndarray:
        """Examples per client and label, [N, K] int64.

        Args:
          label: name of the labels, [n] ints, bools or text.
          split: which split to count.

        Returns:
          Column k counts ``label_values(label)[k]``: the same columns for every split,
          whether or not all labels occur in it.

        Raises:
          As `label_values`; ValueError also if there is no such split.
        """
        check.one_of(self.splits, split=split)
        values, packed = self.label_values(label), self.splits[split]
        column = np.searchsorted(values, packed.examples[label])
        client = np.repeat(np.arange(self.num_clients), packed.sizes)
        shape = self.num_clients, len(values)
        cells = client * len(values) + column
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)

    def summary(self) -> str:
        """A table: examples, smallest, median and largest client, arrays per split."""
        lines = [
            f"FederatedData, {self.num_clients} clients",
            "split        examples     min    median     max  arrays",
        ]
        for name, split in self.splits.items():
            sizes = split.sizes
            lines.append(
                f"{name:<10} {split.num_examples:>10} {sizes.min():>7} "
                f"{np.median(sizes):>9g} {sizes.max():>7}  {_describe(split.examples)}"
            )
        return "\n".join(lines)

    __repr__ = summary


def check_examples(examples: Mapping[str, np.ndarray]) -> int:
    """Checks names, dtypes and equal numbers of rows; returns that number.

    Raises:
      ValueError: no array, the reserved name, a scalar, or unequal numbers of rows.
      TypeError: a name that is not a str, or an object dtype.
    """
    if not examples:
        raise ValueError("examples must hold at least one array, got none.")
    for name, array in examples.items():
        if not isinstance(name, str):
            raise TypeError(f"names of examples must be strs, got {name!r}.")
        if name == _RESERVED:
            raise ValueError(f"examples must not use the reserved name {_RESERVED!r}.")
        if array.dtype.hasobject:
            found = f"dtype {array.dtype}; for text, convert with astype(str)"
            raise TypeError(f"{name} must not hold Python objects, got {found}.")
        if array.ndim == 0:
            raise ValueError(f"{name} must have a leading example axis, got a scalar.")
    rows = {name: len(array) for name, array in examples.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"arrays must have equal numbers of rows, got {rows}.")
    return next(iter(rows.values()))


def divided(
    arrays: Mapping[str, np.ndarray], chosen: np.ndarray
) -> list[dict[str, np.ndarray]]:
    """The rows of arrays that are not `chosen` [n] bool, and those that are."""
    return [{k: a[rows] for k, a in arrays.items()} for rows in (~chosen, chosen)]


def check_client(who: str, examples: Mapping[str, np.ndarray]) -> int:
    """As `check_examples`, or 0 without any array; errors say whose they are."""
    try:
        return check_examples(examples) if examples else 0
    except (TypeError, ValueError) as error:
        raise type(error)(f"{who}: {error}") from None


def labels_of(
    examples: Mapping[str, np.ndarray], label: str, kinds: str = "iubSU"
) -> np.ndarray:
    """The class labels of examples, [n].

    Raises:
      ValueError: there is no array `label`, or it is not [n].
      TypeError: labels of another kind than `kinds`, that is ints, bools and text.
    """
    check.one_of(examples, label=label)
    y = np.asarray(examples[label])
    if y.dtype.kind not in kinds:
        wanted = "ints" if kinds == "iu" else "ints, bools or text"
        raise TypeError(f"{label} must be {wanted}, got {y.dtype}.")
    if y.ndim != 1:
        raise ValueError(f"{label} must be one label per row, got shape {y.shape}.")
    return y


def as_array(name: str, value: Any) -> np.ndarray:
    """What is given as an array: text of any kind as fixed-width text, native bytes.

    Arrays that need no conversion, memory maps among them, are returned as they are.

    Raises:
      TypeError: an array that masks values, which nothing behind would look at.
    """
    # np.asarray would strip np.memmap.
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array; fill it or drop rows.")
    # As pandas and NumPy 2 hold text.
    text = array.dtype.kind in "OT" and all(isinstance(x, str) for x in array.flat)
    if text and array.size:
        return np.array(array.tolist())  # which NumPy's StringDType can't be cast to
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array


def check_alike(
    this: str, one: Mapping[str, np.ndarray], that: str, other: Mapping[str, np.ndarray]
) -> None:
    """Raises unless two dicts of arrays can be concatenated without promotion.

    Args:
      this: what to call the first in the error, say "client 0".
      one: name -> array [n, ...].
      that: what to call the second.
      other: name -> array [m, ...].

    Raises:
      ValueError: other names, shapes behind the example axis or dtypes (of text, kinds
        of dtype).
    """
    if one.keys() != other.keys():
        found = f"{sorted(one)} for {this} and {sorted(other)} for {that}"
        raise ValueError(f"arrays must be the same, got {found}.")
    for name, a in one.items():
        b = other[name]
        text = a.dtype.kind in "SU" and a.dtype.kind == b.dtype.kind
        # Concatenating would promote, e.g. turn everyone's int labels into floats.
        if a.shape[1:] != b.shape[1:] or not (text or a.dtype == b.dtype):
            found = f"{_array_type(a)} for {this} and {_array_type(b)} for {that}"
            raise ValueError(f"{name} must have one dtype and shape, got {found}.")


def _int_vector(name: str, values: Any) -> np.ndarray:
    vector = np.asarray(values)
    if vector.dtype.kind not in "iu":
        raise TypeError(f"{name} must be ints, got dtype {vector.dtype}.")
    if vector.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {vector.shape}.")
    return vector


def _check_clients(ids: np.ndarray, num_clients: int) -> None:
    # Negative ids too: offsets[i + 1] has no meaning for the last one.
    outside = ids[(ids < 0) | (ids >= num_clients)]
    if outside.size:
        raise IndexError(f"client must be in 0..{num_clients - 1}, got {outside[0]}.")


def _array_type(array: np.ndarray) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape[1:]))}]"


def _describe(examples: Mapping[str, np.ndarray]) -> str:
    """Dtypes and shapes behind the example axis: ``x: float32[28, 28], y: int32[]``."""
    return ", ".join(f"{name}: {_array_type(a)}" for name, a in examples.items())
