"""Data sets for the tests of partitioners, and what every partition must fulfil."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from fedjax_core.data.packed import Dataset

NO_LABELS = np.zeros(0, int)

alphas = st.floats(-3, 4).map(lambda power: 10.0**power)
seeds = st.integers(0, 2**32)


def make_dataset(
    y_train: ArrayLike, y_test: ArrayLike = NO_LABELS, y_validation=None
) -> Dataset:
    """Every example has a number of its own, "id"."""
    labels = [np.asarray(y) for y in (y_train, y_test, y_validation) if y is not None]
    ids = np.split(
        np.arange(sum(map(len, labels))), np.cumsum([*map(len, labels)])[:-1]
    )
    return Dataset(*({"id": i, "y": y} for i, y in zip(ids, labels, strict=True)))


def counts(packed, names):
    """[K, N]: how often client i holds class names[c]."""
    clients = [packed.client(i)["y"] for i in range(packed.num_clients)]
    return np.array([[np.sum(y == c) for y in clients] for c in names])


def assert_exact_cover(data, dataset, without=()):
    """Every row of every split is there once, all its arrays together."""
    assert list(data.splits) == list(dataset.splits)
    for packed, pool in zip(data.splits.values(), dataset.splits.values(), strict=True):
        order = np.argsort(packed.examples["id"])
        for name, array in pool.items():
            if name not in without:
                assert packed.examples[name].dtype == array.dtype
                np.testing.assert_array_equal(packed.examples[name][order], array)


def assert_same(a, b):
    assert list(a.splits) == list(b.splits)
    for one, other in zip(a.splits.values(), b.splits.values(), strict=True):
        np.testing.assert_array_equal(one.offsets, other.offsets)
        for name in one.examples:
            np.testing.assert_array_equal(one.examples[name], other.examples[name])


def shuffled(dataset):
    """The same rows in another order."""
    rng = np.random.default_rng(0)
    splits = []
    for arrays in dataset.splits.values():
        rows = rng.permutation(len(arrays["id"]))
        splits.append({k: v[rows] for k, v in arrays.items()})
    return Dataset(*splits)


@st.composite
def datasets(draw):
    """1 to 5 classes, ints or strings, each possibly missing from some splits."""
    names = draw(st.sampled_from([np.arange(5), np.array(["a", "bb", "c", "d", "e"])]))
    num_classes = draw(st.integers(1, 5))
    sizes = st.lists(st.integers(0, 12), min_size=num_classes, max_size=num_classes)
    num_splits = draw(st.integers(2, 3))
    labels = [np.repeat(names[:num_classes], draw(sizes)) for _ in range(num_splits)]
    return make_dataset(*labels)


def mean_distance(data) -> float:
    """Mean total variation distance of the clients' train labels to the pooled."""
    table = data.label_counts()
    table = table[table.sum(axis=1) > 0]
    own = table / table.sum(axis=1, keepdims=True)
    pooled = table.sum(axis=0) / table.sum()
    return float(np.abs(own - pooled).sum(axis=1).mean() / 2)
