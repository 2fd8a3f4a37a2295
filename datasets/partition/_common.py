"""What partitioners share: labels, Dirichlet draws, rounding and dealing.

Most partitioners decide one matrix of counts, [K, N] ints: how many train examples of
class c go to client i. `follow` carries it over to the other splits, `deal` picks rows.
"""

import heapq
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData, Packed

Label = str | tuple[str, int]
"""The name of labels [n], or the name and a column of labels [n, L]."""


class Pools(NamedTuple):
    """A dataset's splits, each as one client, and the class of every row.

    Attributes:
      splits: checked; their arrays are those of the dataset.
      classes: split -> [n] int64 in 0..K-1.
      names: [K] labels of the classes, ascending; of all splits together.
    """

    splits: dict[str, Packed]
    classes: dict[str, np.ndarray]
    names: np.ndarray

    @property
    def totals(self) -> dict[str, np.ndarray]:
        """Split -> [K] int64, examples of every class."""
        n = len(self.names)
        return {k: np.bincount(of, minlength=n) for k, of in self.classes.items()}


def prepare(
    dataset: Dataset,
    num_clients: int,
    seed: int,
    stream: int,
    label: Label | None = None,
) -> tuple[Pools, np.random.Generator]:
    """The pools, and a source of random numbers of `seed` and `stream`; checks all."""
    check.positive_int(num_clients=num_clients)
    return pools(dataset, label), generator(seed, stream)


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Random numbers of a seed; `stream` sets them apart from its other uses."""
    check.seed(seed=seed)
    return np.random.default_rng([seed, *stream])


def pools(dataset: Dataset, label: Label | None) -> Pools:
    """Checks a dataset and indexes its classes; without `label`, all rows are alike."""
    check_dataset(dataset)
    splits = {}
    for name, arrays in dataset.splits.items():
        shape = np.shape(next(iter(arrays.values()), ()))
        splits[name] = Packed(arrays, np.array([0, *shape[:1]]))
    if label is None:
        return all_alike(splits)
    labels = [labels_of(split, label) for split in splits.values()]
    kinds = {y.dtype.kind for y in labels}
    # Comparing 1 with "1", or 1 with 1.0, would make or merge classes unseen.
    if len(kinds) > 1 or not kinds <= set("iubSU"):
        given = " and ".join(str(y.dtype) for y in labels)
        wanted = "ints, bools or strings, of the same kind in every split"
        raise TypeError(f"{label} must be {wanted}, got {given}.")
    names, index = np.unique(np.concatenate(labels), return_inverse=True)
    ends = np.cumsum([len(y) for y in labels])[:-1]
    return Pools(splits, dict(zip(splits, np.split(index, ends), strict=True)), names)


def all_alike(splits: dict[str, Packed]) -> Pools:
    """Pools of a single class."""
    rows = {k: np.zeros(v.num_examples, np.int64) for k, v in splits.items()}
    return Pools(splits, rows, np.zeros(1, np.int64))


def labels_of(split: Packed, label: Label) -> np.ndarray:
    """The class labels of a split, [n].

    Of a multi-label array [n, L] the chosen column; 0.0 and 1.0, as losses of several
    labels take them, are the classes 0 and 1.
    """
    name, column = (label, None) if isinstance(label, str) else label
    check.one_of(split.examples, label=name)
    y = split.examples[name]
    if y.ndim == 2 and column is not None:
        check.in_range(0, y.shape[1] - 1, **{f"column of {name}": column})
        chosen = y[:, column]
        binary = y.dtype.kind == "f" and np.isin(chosen, (0, 1)).all()
        return chosen.astype(np.int64) if binary else chosen
    if y.ndim != 1 or column is not None:
        raise ValueError(
            f"{name} must be one label per row, got shape {y.shape} for {label=}. Of "
            f"several labels per row, [n, L], choose a column, as label=({name!r}, 0), "
            f"or take a partitioner that reads no labels, such as iid."
        )
    return y


def with_labels(split: Packed, label: Label, labels: np.ndarray) -> Packed:
    """The split with other class labels [n] in the place that `labels_of` reads."""
    if isinstance(label, str):
        return Packed({**split.examples, label: labels}, split.offsets)
    name, column = label
    y = split.examples[name].copy()
    y[:, column] = labels
    return Packed({**split.examples, name: y}, split.offsets)


def ints_of(
    name: str, values: ArrayLike, n: int, least: int, of: str = "client"
) -> np.ndarray:
    """Ints >= `least`, one or one per client, as [n]; errors name the values."""
    ints = np.asarray(values)
    if ints.dtype.kind not in "iu":
        raise TypeError(f"{name} must be ints, got {values!r}.")
    if ints.shape not in ((), (n,)) or np.any(ints < least):
        wanted = f"one int >= {least} or one per {of}, [{n}]"
        raise ValueError(f"{name} must be {wanted}, got {values!r}.")
    return np.broadcast_to(ints, n)


def check_dataset(dataset: Any) -> None:
    """Raises TypeError unless it is a Dataset."""
    if not isinstance(dataset, Dataset):
        given = type(dataset).__name__
        raise TypeError(f"dataset must be a Dataset(train, test), got a {given}.")


def log_gamma(
    rng: np.random.Generator, alpha: ArrayLike, size: int | tuple[int, ...]
) -> np.ndarray:
    """Logarithms of Gamma(alpha) draws, float64 of shape `size`, for any alpha > 0.

    They are independent and finite. Normalised, `softmax` of them, they are one draw of
    Dir(alpha); alpha is broadcast to `size`.
    """
    # For alpha = 1e-3 most gammas are below the smallest float, and 0 / 0 is no
    # distribution. Gamma(alpha) is distributed as Gamma(alpha + 1) U^(1 / alpha), and
    # -log U is exponential.
    # Beyond these bounds draws do not change, but quotients may overflow.
    alpha = np.clip(np.asarray(alpha, np.float64), 1e-300, 1e300)
    draw = np.log(rng.standard_gamma(alpha + 1, size))
    return draw - rng.standard_exponential(size) / alpha


def softmax(logits: np.ndarray) -> np.ndarray:
    """Shares [n] proportional to exp(logits), of sum 1; -inf has share 0."""
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def round_shares(shares: np.ndarray, n: int, phase: float) -> np.ndarray:
    """Integers in proportion to shares [N] >= 0, of sum n, each less than 1 off.

    With a phase uniform in [0, 1), every integer has its share as mean; a share of 0
    gives 0.
    """
    # Rounding the edges, not the shares, keeps the sum. The common random phase gives
    # every share its mean; without it, nearly equal shares would be rounded up for the
    # same clients in every class.
    edges = np.cumsum(shares)
    cuts = np.floor(edges / edges[-1] * n + phase).astype(np.int64)
    return np.diff(np.minimum(cuts, n), prepend=0)


def round_classes(
    shares: np.ndarray, totals: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """`round_shares` of every class, [K, N]: of shares [K, N] and totals [K]."""
    phases = rng.random(len(totals))
    rows = map(round_shares, shares, totals, phases)
    return np.array(list(rows), np.int64).reshape(shares.shape)


def even(n: int, parts: int) -> np.ndarray:
    """Integers [parts] of sum n that differ by one at most."""
    return np.diff(np.arange(parts + 1) * n // parts)


def follow(
    train: np.ndarray, totals: Mapping[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Counts [K, N] for every split: a client's share of a class is that of train.

    What is discarded in train is discarded elsewhere in the same proportion, and a
    class that train lacks is spread evenly. `totals` are [K] ints per split; a row of
    `train` sums to its total or to less, where some are discarded.
    """
    num_clients = train.shape[1]
    discarded = totals["train"] - train.sum(axis=1)
    shares = np.column_stack([train, discarded])
    shares[totals["train"] == 0, :num_clients] = 1
    counts = {"train": train}
    for split in [name for name in totals if name != "train"]:
        counts[split] = round_classes(shares, totals[split], rng)[:, :num_clients]
    return counts


def fill_small(counts: np.ndarray, min_size: int) -> None:
    """Moves examples in counts [K, N], in place, until columns sum to min_size or more.

    They move one by one from the client that is largest at that moment, from its most
    frequent class.
    """
    num_clients, num_examples = counts.shape[1], int(counts.sum())
    if num_clients * min_size > num_examples:
        wanted = f"num_clients * min_size within the {num_examples} train examples"
        found = f"{num_clients} * {min_size}"
        raise ValueError(f"min_size must leave {wanted}, got {found}.")
    # As long as a client is too small, the largest has more than min_size: clients
    # being filled are never taken from, and moves are as many as examples missing.
    sizes = counts.sum(axis=0)
    largest = [(-size, i) for i, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    for i in np.flatnonzero(sizes < min_size):
        for _ in range(min_size - sizes[i]):
            minus_size, donor = largest[0]
            c = counts[:, donor].argmax()
            counts[c, donor] -= 1
            counts[c, i] += 1
            heapq.heapreplace(largest, (minus_size + 1, donor))


def deal(
    pools: Pools, counts: Mapping[str, np.ndarray], rng: np.random.Generator
) -> FederatedData:
    """Gives client i ``counts[split][c, i]`` random rows of class c, in any order."""
    dealt: dict[str, Any] = {
        name: _deal(split, pools.classes[name], counts[name], rng)
        for name, split in pools.splits.items()
    }
    return FederatedData(**dealt, client_ids=())


def _deal(
    pool: Packed, classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> Packed:
    num_classes, num_clients = counts.shape
    rows = rng.permutation(pool.num_examples)
    of_row = classes[rows]
    by_class = np.argsort(of_row, kind="stable")
    totals = np.bincount(classes, minlength=num_classes)
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(totals) - totals, totals)
    rows = rows[by_class][rank < np.repeat(counts.sum(axis=1), totals)]
    clients = np.repeat(np.tile(np.arange(num_clients), num_classes), counts.ravel())
    # Shuffled again, or every client would hold its examples sorted by class.
    again = rng.permutation(len(rows))
    rows = rows[again][np.argsort(clients[again], kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(counts.sum(axis=0))])
    return Packed({name: a[rows] for name, a in pool.examples.items()}, offsets)


def deal_evenly(
    pools: Pools, num_clients: int, rng: np.random.Generator
) -> FederatedData:
    """Deals random rows to clients of sizes that differ by one at most."""
    counts = {
        name: even(split.num_examples, num_clients)[None]
        for name, split in pools.splits.items()
    }
    return deal(pools, counts, rng)


def deal_sizes(
    pools: Pools, shares: np.ndarray, rng: np.random.Generator, min_size: int = 0
) -> FederatedData:
    """Deals random rows to clients of sizes in proportion to shares [N]."""
    counts = {
        name: round_shares(shares, split.num_examples, rng.random())[None]
        for name, split in pools.splits.items()
    }
    fill_small(counts["train"], min_size)
    return deal(pools, counts, rng)
