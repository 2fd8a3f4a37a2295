"""Shards and numbers of classes come out as the papers say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.datasets.partition_helpers import (
    assert_exact_cover,
    counts,
    datasets,
    make_dataset,
    seeds,
)

from fedjax_core import split_examples
from fedjax_core.data.packed import FederatedData
from fedjax_core.datasets import partition

# Of MNIST's 60,000 train images, by digit.
MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize(
    ("totals", "sizes"),
    [
        (MNIST, {50: 960, 100: 480, 500: 96}),
        ([5000] * 10, {50: 800, 100: 400, 500: 80}),
    ],
    ids=["MNIST", "CIFAR-10"],
)
def test_pathological_gives_the_published_sizes(totals, sizes):
    # Hahn prints train examples per client after clients set a fifth aside.
    dataset = make_dataset(np.repeat(np.arange(10), totals))
    for num_clients, size in sizes.items():
        data = partition.pathological(dataset, num_clients)
        assert np.all(data.train.sizes == sum(totals) // num_clients)
        own = split_examples(FederatedData(data.train), 0.2)
        assert np.all(own.train.sizes == size)
        classes = (data.label_counts() > 0).sum(axis=1)
        assert classes.min() >= 1
        # Two shards; those of MNIST may straddle two classes each.
        assert classes.max() <= (2 if totals[0] == 5000 else 4)
        assert np.mean(classes == 2) > 0.5


@settings(deadline=None)
@given(datasets(), st.integers(1, 4), seeds, st.booleans(), st.data())
def test_shards_are_runs_of_the_sorted_labels(
    dataset, shards_per_client, seed, drop, draws
):
    n = len(dataset.train["y"])
    if n < shards_per_client:
        return
    num_clients = draws.draw(st.integers(1, n // shards_per_client))
    num_shards = num_clients * shards_per_client
    data = partition.pathological(dataset, num_clients, shards_per_client, seed, drop)
    sizes = data.train.sizes
    if drop:
        assert np.all(sizes == n // num_shards * shards_per_client)
        ids = data.train.examples["id"]
        assert len(np.unique(ids)) == len(ids)
    else:
        assert_exact_cover(data, dataset)
        assert np.ptp(sizes) <= shards_per_client
    classes = (data.label_counts() > 0).sum(axis=1)
    cuts = len(np.unique(dataset.train["y"])) - 1
    # Only shards in which the class changes hold more than one.
    assert classes.sum() <= num_shards + cuts


def test_shards_per_client_of_one_class_each():
    dataset = make_dataset(np.repeat(np.arange(4), 12), np.repeat(np.arange(4), 6))
    matrix = counts(partition.pathological(dataset, 6, 2).train, range(4))
    assert set(np.unique(matrix)) <= {0, 4, 8}
    assert np.all(matrix.sum(axis=0) == 8)


def test_what_train_discards_the_test_split_discards_too():
    dataset = make_dataset(np.repeat([0, 1], [10, 10]), np.repeat([0, 1], [100, 100]))
    data = partition.pathological(dataset, 3, 2, drop_remainder=True)
    assert data.train.num_examples == 18
    assert np.array_equal(counts(data.test, [0, 1]).sum(axis=1), [100, 80])


@settings(deadline=None)
@given(st.integers(1, 6), seeds, st.data())
def test_clients_have_exactly_so_many_classes(num_names, seed, draws):
    num_classes = draws.draw(st.integers(1, num_names))
    num_clients = draws.draw(st.integers(-(-num_names // num_classes), 12))
    fewest = -(-num_clients * num_classes // num_names)  # an example for every holder
    names = np.array([f"class {i}" for i in range(num_names)])
    sizes = st.lists(
        st.integers(fewest, fewest + 20), min_size=num_names, max_size=num_names
    )
    dataset = make_dataset(*(np.repeat(names, draws.draw(sizes)) for _ in range(3)))
    data = partition.classes_per_client(dataset, num_clients, num_classes, seed)
    assert_exact_cover(data, dataset)
    matrix = counts(data.train, names)
    assert np.all((matrix > 0).sum(axis=0) == num_classes)
    holders = (matrix > 0).sum(axis=1)
    assert np.ptp(holders) <= 1
    for row in matrix:
        assert np.ptp(row[row > 0]) <= 1
    # Nobody is tested on what they do not train on.
    for split in list(data.splits.values())[1:]:
        assert not np.any(counts(split, names)[matrix == 0])


@pytest.mark.parametrize(
    ("num_clients", "num_classes"), [(20, 1), (20, 2), (10, 5), (30, 10), (5, 2)]
)
def test_equal_classes_give_equal_sizes(num_clients, num_classes):
    # Sattler: N / M examples each, N / (M A) in every held class.
    dataset = make_dataset(np.repeat(np.arange(10), 600))
    data = partition.classes_per_client(dataset, num_clients, num_classes)
    assert np.all(data.train.sizes == 6000 // num_clients)
    matrix = data.label_counts()
    assert np.all(matrix[matrix > 0] == 6000 // (num_clients * num_classes))


def test_equal_sizes_discard_what_larger_classes_have_more():
    dataset = make_dataset(
        np.repeat(np.arange(5), [20, 30, 25, 21, 40]), np.repeat(np.arange(5), 60)
    )
    data = partition.classes_per_client(dataset, 10, 2, equal_sizes=True)
    # Four clients per class; the smallest class of 20 gives five to each.
    matrix = data.label_counts()
    assert set(np.unique(matrix)) == {0, 5}
    ids = data.train.examples["id"]
    assert len(np.unique(ids)) == len(ids) == 100
    kept = counts(data.test, range(5)).sum(axis=1)
    assert np.abs(kept - 60 * 20 / np.array([20, 30, 25, 21, 40])).max() < 1


def test_which_classes_go_together_depends_on_the_seed():
    dataset = make_dataset(np.repeat(np.arange(10), 60))
    held = {
        tuple(
            np.flatnonzero(
                partition.classes_per_client(dataset, 10, 2, s).label_counts()[0]
            )
        )
        for s in range(30)
    }
    assert len(held) > 10


def test_impossible_arguments_are_refused():
    dataset = make_dataset([0, 1, 1, 2], [0])
    with pytest.raises(ValueError, match=r"at most the 4 train examples, got 3 \* 2"):
        partition.pathological(dataset, 3, 2)
    with pytest.raises(ValueError, match="shards_per_client must be >= 1"):
        partition.pathological(dataset, 3, 0)
    with pytest.raises(ValueError, match=r"num_classes must be in \[1, 3\], got 4"):
        partition.classes_per_client(dataset, 3, 4)
    with pytest.raises(ValueError, match="num_classes must be >= 1"):
        partition.classes_per_client(dataset, 3, 0)
    with pytest.raises(
        ValueError, match=r"at least the 3 classes of train, got 2 \* 1"
    ):
        partition.classes_per_client(dataset, 2, 1)
    with pytest.raises(ValueError, match=r"got 1 of .*[02].* for 2 clients"):
        partition.classes_per_client(dataset, 2, 3)
    with pytest.raises(TypeError, match="num_classes must be an int"):
        partition.classes_per_client(dataset, 2, 1.0)  # pyright: ignore
    empty = make_dataset([], [])
    with pytest.raises((ValueError, TypeError)):
        partition.pathological(empty, 1)
