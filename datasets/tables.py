"""From the rows of a table to clients: gaps, held-out rows, scaling, packing.

A reader gets columns from a file, chooses test rows with `hold_out` or `hold_out_last`,
and packs x and y by client with `population`, which scales with what the train rows
say. Test rows enter no statistic.

What every `load` of a table takes and raises, unless it says otherwise:

Args:
  path: folder that holds one of the files that the module names, or that file.
  test_fraction: share of every client's rows that goes to test, in [0, 1].
  seed: int >= 0 that chooses them.
  standardize: scale the features as the module says.

Returns:
  Train and, unless test_fraction is 0, test: x [n, d] float32, y [n].

Raises:
  FileNotFoundError: no file; says where to get it.
  DataFileError: a file is not as it should be; names the line and the column, the
    variable or the array.
  ValueError: an argument is out of its range.
  TypeError: seed is not an int.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_core import check
from fedjax_core.data import sources
from fedjax_core.data.packed import FederatedData, divided
from fedjax_core.data.readers import npz
from fedjax_core.data.readers.files import DataFileError

_LARGEST = float(np.finfo(np.float32).max)
_LOG = logging.getLogger("fedjax_core")


def read_npz(
    path: Path | str, columns: Mapping[str, npz.Expected]
) -> dict[str, np.ndarray]:
    """Reads arrays of equal length, the columns of a table, by `npz.read`.

    Arrays of other lengths are a DataFileError, and numbers that are infinite or don't
    fit float32. NaN is a gap, see `no_gaps`.
    """
    arrays = npz.read(path, columns)
    first = next(iter(arrays))
    for column, array in arrays.items():
        where = f"array {column!r}"
        if len(array) != len(arrays[first]):
            wanted = f"{len(arrays[first])} rows as in {first!r}"
            raise DataFileError(path, where, wanted, len(array))
        if array.dtype.kind == "f" and np.any(np.abs(array) > _LARGEST):
            problem = "expected finite numbers that fit float32."
            raise DataFileError(path, where, problem)
    return arrays


def no_gaps(path: Path | str, where: str, array: np.ndarray) -> np.ndarray:
    """The array as float64; a NaN in it is a DataFileError."""
    array = array.astype(np.float64)
    if np.isnan(array).any():
        raise DataFileError(path, where, "expected numbers, found NaN.")
    return array


def drop_rows(
    path: Path | str, table: Mapping[str, np.ndarray], gap: np.ndarray
) -> dict[str, np.ndarray]:
    """The table without the rows that have a gap; logs (INFO) how many those are.

    DataFileError if no row would be left.
    """
    if gap.all():
        raise DataFileError(path, "all rows", "expected rows without gaps, found none.")
    _LOG.info("%s: dropped %d of %d rows, with gaps", path, gap.sum(), len(gap))
    return {column: values[~gap] for column, values in table.items()}


def hold_out(
    keys: np.ndarray,
    fraction: float,
    seed: int,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Chooses test rows, a `fraction` in [0, 1] of those of every key [n]: [n] bool.

    Keys are ints or strs, the client of every row (or what else to split within). The
    share is rounded to whole rows, and the last row of a key stays in train whatever
    the fraction. Rows of a key with the same number in `groups` [n] stay together; the
    share is then of groups.
    """
    check.seed(seed=seed)
    rng = np.random.default_rng([seed, 120])  # apart from other users of the same seed
    return choose(keys, fraction, rng.permutation, groups)


def hold_out_last(keys: np.ndarray, fraction: float) -> np.ndarray:
    """Chooses the last rows of every key as test, as `hold_out`: [n] bool."""
    return choose(keys, fraction, np.flip)


def choose(
    keys: np.ndarray,
    fraction: float,
    arrange: Callable[[np.ndarray], np.ndarray],
    groups: np.ndarray | None = None,
    keep: int = 1,
) -> np.ndarray:
    """As `hold_out`, the first ones when arranged; `keep` always stay in train."""
    check.in_range(0, 1, test_fraction=fraction)
    test = np.zeros(len(keys), bool)
    client = np.unique(keys, return_inverse=True)[1]
    order = np.argsort(client, kind="stable")
    for rows in np.split(order, np.cumsum(np.bincount(client))[:-1]):
        unit = np.arange(len(rows)) if groups is None else groups[rows]
        units = arrange(np.unique(unit))
        chosen = units[: min(round(fraction * len(units)), len(units) - keep)]
        test[rows] = np.isin(unit, chosen)
    return test


def fill_gaps(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Puts the mean of the rows `train` [n] where x [n, d] is NaN, or 0 without any."""
    known = ~np.isnan(x[train])
    sums = np.where(known, x[train], 0).sum(0)
    return np.where(np.isnan(x), sums / np.maximum(known.sum(0), 1), x)


def standardize(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Gives every column of x [n, d] mean 0 and variance 1 over the rows `train` [n].

    One mean and one deviation (of the population, 1 / n) for all clients, as a server
    that sums up the clients' sums would find them; so clients stay as different as they
    are. A column that is constant in train is centred only.
    """
    mean, std = x[train].mean(0), x[train].std(0)
    varies = (np.ptp(x[train], axis=0) > 0) & (std > 0)
    scaled = (x - np.where(varies, mean, x[train][0])) / np.where(varies, std, 1)
    # A test row may be further off than float32 reaches.
    return np.clip(scaled, -_LARGEST, _LARGEST)


def population(
    keys: np.ndarray,
    test: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    scaled: bool,
    columns: slice | Sequence[int] = slice(None),
) -> FederatedData:
    """Packs features x [n, d] and targets y [n], see `by_client`.

    x becomes float32, and so do y of floats; y of ints become int32. With `scaled`,
    those `columns` of x are standardised first.
    """
    if scaled:
        x[:, columns] = standardize(x[:, columns], ~test)
    kind = np.float32 if y.dtype.kind == "f" else np.int32
    return by_client(keys, test, {"x": x.astype(np.float32), "y": y.astype(kind)})


def by_client(
    keys: np.ndarray, test: np.ndarray, examples: Mapping[str, np.ndarray]
) -> FederatedData:
    """Packs name -> [n, ...] by the client of every row, `keys` [n] ints or strs.

    Clients are in sorted order, rows in the order they have. Rows where `test` [n] is
    True are the test split; without any there is none.
    """
    train, held_out = divided({**examples, "client": keys}, test)
    return sources.from_arrays(train, held_out if test.any() else None)
