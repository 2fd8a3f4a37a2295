"""Clusters agree within and disagree between, as they are told to."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.datasets.partition_helpers import (
    assert_exact_cover,
    assert_same,
    datasets,
    make_dataset,
    seeds,
    shuffled,
)

from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import digits, partition


def renamings(clustered, dataset):
    """Cluster -> {label in the pool: label at the clients}, over all splits."""
    data, cluster = clustered
    out = [{} for _ in range(cluster.max() + 1)]
    for name, pool in dataset.splits.items():
        packed = data.splits[name]
        before = pool["y"][np.searchsorted(pool["id"], packed.examples["id"])]
        of_row = np.repeat(cluster, packed.sizes)
        for k, a, b in zip(of_row, before, packed.examples["y"], strict=True):
            assert out[k].setdefault(a.item(), b.item()) == b.item()
    return out


@settings(deadline=None)
@given(datasets(), st.integers(1, 12), seeds, st.booleans(), st.data())
def test_rows_are_those_of_iid_and_labels_are_permuted(
    dataset, num_clients, seed, swap, draws
):
    names = np.unique(np.concatenate([s["y"] for s in dataset.splits.values()]))
    possible = math.comb(len(names), 2) if swap else math.factorial(len(names))
    if not possible:
        return
    num_clusters = draws.draw(st.integers(1, min(possible, num_clients)))
    make = partition.label_swap if swap else partition.label_permutation
    clustered = make(dataset, num_clients, num_clusters, seed)
    data, cluster = clustered
    assert_exact_cover(data, dataset, without=["y"])
    plain = partition.iid(dataset, num_clients, seed)
    for name, split in plain.splits.items():
        np.testing.assert_array_equal(split.offsets, data.splits[name].offsets)
        np.testing.assert_array_equal(
            split.examples["id"], data.splits[name].examples["id"]
        )
    assert np.ptp(np.bincount(cluster, minlength=num_clusters)) <= 1
    assert np.all(np.diff(cluster) >= 0)
    for renaming in renamings(clustered, dataset):
        assert len(set(renaming.values())) == len(renaming)  # invertible
        assert set(renaming.values()) <= set(names.tolist())
        moved = {a: b for a, b in renaming.items() if a != b}
        if swap:
            assert len(moved) <= 2
            assert all(moved.get(b, a) == a for a, b in moved.items())
    assert_same(data, make(dataset, num_clients, num_clusters, seed).data)
    again = make(shuffled(dataset), num_clients, num_clusters, seed)
    np.testing.assert_array_equal(again.cluster, cluster)


def test_the_setting_of_the_thesis():
    # M = 20, K = 4: pairs differ between clusters, and marginals stay nearly equal.
    dataset = digits.load()
    dataset = Dataset(
        *({**s, "id": np.arange(len(s["y"]))} for s in dataset.splits.values())
    )
    clustered = partition.label_swap(dataset, 20, 4)
    np.testing.assert_array_equal(clustered.cluster, np.repeat(np.arange(4), 5))
    moved = [
        frozenset(a for a, b in renaming.items() if a != b)
        for renaming in renamings(clustered, dataset)
    ]
    assert all(len(pair) == 2 for pair in moved)
    assert len(set(moved)) == 4
    pooled = clustered.data.label_counts().sum(axis=0)
    assert np.abs(pooled - 143.8).max() < 20  # of every label as many as before
    permuted = renamings(partition.label_permutation(dataset, 20, 4), dataset)
    tables = {tuple(r[c] for c in range(10)) for r in permuted}
    assert len(tables) == 4


def test_given_pairs_are_exchanged_in_every_split():
    dataset = make_dataset(["a", "bb", "c"] * 8, ["a", "bb"] * 4, ["c"] * 4)
    clustered = partition.label_swap(dataset, 4, 2, pairs=[("a", "bb"), ("c", "a")])
    assert renamings(clustered, dataset) == [
        {"a": "bb", "bb": "a", "c": "c"},
        {"a": "c", "bb": "bb", "c": "a"},
    ]


def test_swapping_twice_gives_the_labels_back():
    dataset = make_dataset(np.arange(60) % 5, np.arange(30) % 5)
    once = partition.label_swap(dataset, 1, 1, pairs=[(1, 3)]).data
    back = Dataset(*(dict(s.examples) for s in once.splits.values()))
    twice = partition.label_swap(back, 1, 1, pairs=[(1, 3)]).data
    assert_exact_cover(twice, dataset)


def test_rotations_can_be_given_as_permutations():
    dataset = make_dataset(np.arange(60) % 5, np.arange(30) % 5)
    rotations = np.add.outer(np.arange(3), np.arange(5)) % 5
    clustered = partition.label_permutation(dataset, 6, 3, permutations=rotations)
    for k, renaming in enumerate(renamings(clustered, dataset)):
        assert renaming == {c: (c + k) % 5 for c in range(5)}


def test_all_permutations_can_be_asked_for():
    dataset = make_dataset(np.arange(90) % 3)
    clustered = partition.label_permutation(dataset, 6, 6)
    found = {tuple(r[c] for c in range(3)) for r in renamings(clustered, dataset)}
    assert found == set(itertools.permutations(range(3)))


def test_labels_keep_their_dtype_and_inputs_stay():
    data = partition.label_permutation(digits.load(), 10, 2).data
    assert data.train.examples["y"].dtype == np.int32
    assert data.train.examples["x"].shape == (1438, 64)
    # A long name that only test has reaches train whole.
    mixed = make_dataset(["a"] * 4, ["long name"] * 4)
    swapped = partition.label_swap(mixed, 2, 1).data
    assert set(swapped.train.examples["y"]) == {"long name"}


def domain(n, offset, width=2):
    x = np.full((n, width), offset, np.float32)
    return {"x": x, "id": offset + np.arange(n), "y": np.arange(n) % 2}


def test_a_client_has_one_domain():
    photos = Dataset(domain(10, 0), domain(5, 100))
    sketches = Dataset(domain(7, 200), domain(2, 300))
    data, cluster = partition.domains({"photo": photos, "sketch": sketches}, 3, seed=4)
    assert cluster.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.client_ids == tuple(
        f"{name}/{i}" for name in ("photo", "sketch") for i in range(3)
    )
    for split, offsets in (("train", (0, 200)), ("test", (100, 300))):
        packed = data.splits[split]
        for i, k in enumerate(cluster):
            assert np.all(packed.client(i)["x"] == offsets[k])
        ids = packed.examples["id"]
        assert len(np.unique(ids)) == len(ids)
        for k in range(2):
            assert np.ptp(packed.sizes[cluster == k]) <= 1
    assert data.train.num_examples == 17
    again = partition.domains({"photo": photos, "sketch": sketches}, 3, seed=4)
    assert_same(again.data, data)


def test_parallel_domains_are_not_dealt_alike():
    same = Dataset(domain(100, 0), domain(10, 0))
    data, _ = partition.domains({"a": same, "b": same}, 2)
    first, second = (data.train.client(i)["id"] for i in (0, 2))
    assert set(first) != set(second)


def test_impossible_arguments_are_refused():
    dataset = make_dataset([0, 1, 1, 2], [0])
    for make in (partition.label_swap, partition.label_permutation):
        with pytest.raises(ValueError, match=r"num_clusters must be in \[1, 2\]"):
            make(dataset, 2, 3)
        with pytest.raises(ValueError, match="num_clusters must be >= 1"):
            make(dataset, 2, 0)
    with pytest.raises(ValueError, match="at most the 3 pairs of labels, got 4"):
        partition.label_swap(dataset, 4, 4)
    with pytest.raises(ValueError, match="at most the 6 permutations of 3 labels"):
        partition.label_permutation(dataset, 7, 7)
    for pairs in ([(1, 1)], [(1, 5)], [(0, 1, 2)], [(0,)], [(0, 1, 1)]):
        with pytest.raises(ValueError, match="two different labels of"):
            partition.label_swap(dataset, 2, 1, pairs=pairs)  # pyright: ignore
    with pytest.raises(ValueError, match="pairs must be one per cluster, 2, got 1"):
        partition.label_swap(dataset, 2, 2, pairs=[(0, 1)])
    for table in ([[0, 1]], [[0, 0, 1]], [[1, 2, 3]], [0, 1, 2], [[0.0, 1, 2]]):
        with pytest.raises(ValueError, match="permutations must be 1 rows"):
            partition.label_permutation(dataset, 2, 1, permutations=table)
    with pytest.raises(ValueError, match="at least one domain"):
        partition.domains({}, 2)
    with pytest.raises(ValueError, match="clients_per_domain must be >= 1, got 0"):
        partition.domains({"a": dataset}, 0)
    wide = Dataset(domain(4, 0, width=3), domain(4, 0, width=3))
    narrow = Dataset(domain(4, 0), domain(4, 0))
    with pytest.raises(ValueError, match="x must have one dtype and shape"):
        partition.domains({"wide": wide, "narrow": narrow}, 2)
