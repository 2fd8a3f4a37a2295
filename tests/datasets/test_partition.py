"""What holds for every partitioner: exact cover, one map, the seed and nothing else."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.datasets.partition_helpers import (
    assert_exact_cover,
    assert_same,
    counts,
    datasets,
    make_dataset,
    seeds,
    shuffled,
)

from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets import digits, partition

# (dataset, clients, seed, parameter in [0, 1]) -> partition. By label:
BY_LABEL: dict[str, Callable[[Dataset, int, int, float], FederatedData]] = {
    "dirichlet": lambda d, n, seed, u: partition.dirichlet(
        d, n, 10 ** (7 * u - 3), seed
    ),
    "dirichlet, capped": lambda d, n, seed, u: partition.dirichlet(
        d, n, 10 ** (7 * u - 3), seed, capped=True
    ),
    "dirichlet_by_client": lambda d, n, seed, u: partition.dirichlet_by_client(
        d, n, 10 ** (7 * u - 3), seed
    ),
    "dirichlet_by_client, pooled": lambda d, n, seed, u: partition.dirichlet_by_client(
        d, n, 10 ** (7 * u - 3), seed, prior="pooled"
    ),
    "alternating_dirichlet": lambda d, n, seed, u: partition.alternating_dirichlet(
        d, n, 10 ** (7 * u - 3), seed
    ),
    "pathological": lambda d, n, seed, u: partition.pathological(
        d, n, 1 + round(u), seed
    ),
    "classes_per_client": lambda d, n, seed, u: partition.classes_per_client(
        d, n, 1 + round(u), seed
    ),
    "balancedness, classes": lambda d, n, seed, u: partition.balancedness(
        d, n, 1 - 0.9 * u, 1, seed
    ),
}
# The rest ignores labels, and may give any client any class:
ALL = {
    **BY_LABEL,
    "iid": lambda d, n, seed, u: partition.iid(d, n, seed),
    "contiguous": lambda d, n, seed, u: partition.contiguous(d, n),
    "log_normal": lambda d, n, seed, u: partition.log_normal(d, n, 3 * u, seed),
    "balancedness": lambda d, n, seed, u: partition.balancedness(
        d, n, 1 - 0.9 * u, None, seed
    ),
}


REFUSALS = "num_clients *", "num_classes must", "classes_per_client must", "y must"


def accepted(split, dataset, num_clients, seed, u):
    """The partition, or None where the arguments are refused for what they are."""
    try:
        return split(dataset, num_clients, seed, u)
    except ValueError as error:
        if not str(error).startswith(REFUSALS):
            raise
        return None


@pytest.mark.parametrize("split", ALL.values(), ids=ALL)
@settings(deadline=None, max_examples=30)
@given(datasets(), st.integers(1, 20), seeds, st.floats(0, 1))
def test_every_example_of_every_split_goes_to_one_client(
    split, dataset, num_clients, seed, u
):
    data = accepted(split, dataset, num_clients, seed, u)
    if data is not None:
        assert data.num_clients == num_clients
        assert_exact_cover(data, dataset)
        assert_same(data, split(dataset, num_clients, seed, u))


@pytest.mark.parametrize("split", ALL.values(), ids=ALL)
@settings(deadline=None, max_examples=15)
@given(datasets(), st.integers(1, 10), seeds, st.floats(0, 1))
def test_class_counts_do_not_depend_on_the_order_of_rows(
    split, dataset, num_clients, seed, u
):
    if split is ALL["contiguous"]:
        return
    by_label = split in BY_LABEL.values()
    a = accepted(split, dataset, num_clients, seed, u)
    b = accepted(split, shuffled(dataset), num_clients, seed, u)
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        for one, other in zip(a.splits.values(), b.splits.values(), strict=True):
            np.testing.assert_array_equal(one.sizes, other.sizes)
        if by_label:
            for name in a.splits:
                np.testing.assert_array_equal(
                    a.label_counts(split=name), b.label_counts(split=name)
                )


@pytest.mark.parametrize("u", [0, 0.25, 0.5, 0.75, 1])  # alpha 1e-3 to 1e4
@pytest.mark.parametrize("split", BY_LABEL.values(), ids=BY_LABEL)
def test_two_string_classes_in_three_shuffled_splits(split, u):
    # Row 25 of the shared cases. A class of 7 for 10 clients is soon exhausted.
    rng = np.random.default_rng(0)
    labels = [
        rng.permutation(np.repeat(["no", "yes"], [n, m]))
        for n, m in ((93, 17), (30, 6), (33, 3))
    ]
    dataset = make_dataset(*labels)
    for seed in range(5):
        data = split(dataset, 10, seed, u)
        assert_exact_cover(data, dataset)
        ids = [set(s.examples["id"].tolist()) for s in data.splits.values()]
        assert len(set.union(*ids)) == sum(map(len, ids)) == 182
        assert_same(data, split(dataset, 10, seed, u))


@pytest.mark.parametrize("u", [0, 0.5, 1])
@pytest.mark.parametrize("split", BY_LABEL.values(), ids=BY_LABEL)
def test_splits_follow_one_map(split, u):
    y = np.repeat(np.arange(4), [600, 300, 240, 480])
    dataset = make_dataset(y, y[::3], y[::6])
    data = split(dataset, 9, 0, u)
    train, test, validation = (counts(s, range(4)) for s in data.splits.values())
    n = train.sum(axis=1, keepdims=True)
    # Rounding to a whole example is all that may differ.
    assert np.abs(train / n - test / (n / 3)).max() <= 4 / n.min()
    assert np.abs(train / n - validation / (n / 6)).max() <= 7 / n.min()


@pytest.mark.parametrize("split", ALL.values(), ids=ALL)
def test_the_seed_decides_and_the_global_generator_does_not(split):
    dataset = make_dataset(np.arange(60) % 3, np.arange(30) % 3)
    first = split(dataset, 5, 1, 0.4)
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002  # pyright: ignore
    assert_same(first, split(dataset, 5, 1, 0.4))
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002  # pyright: ignore
    if split is not ALL["contiguous"]:
        other = split(dataset, 5, 2, 0.4)
        ids = first.train.examples["id"], other.train.examples["id"]
        assert not np.array_equal(*ids)
        with pytest.raises(ValueError):
            split(dataset, 5, -1, 0.4)


@pytest.mark.parametrize("split", BY_LABEL.values(), ids=BY_LABEL)
def test_rows_of_a_class_and_their_order_are_random(split):
    dataset = make_dataset(np.repeat([0, 1], 200))
    data = split(dataset, 2, 0, 0.5)
    for i in range(2):
        ids = data.train.client(i)["id"]
        assert np.any(np.diff(ids) < 0)
        y = data.train.client(i)["y"]
        # A client of both classes does not have one after the other.
        assert len(set(y)) == 1 or np.count_nonzero(np.diff(y)) > 5


@pytest.mark.parametrize("split", BY_LABEL.values(), ids=BY_LABEL)
def test_digits_keep_their_arrays(split):
    data = split(digits.load(), 20, 0, 0.6)
    assert sum(s.num_examples for s in data.splits.values()) == 1797
    assert data.train.examples["x"].dtype == np.float32
    assert data.train.examples["x"].shape == (1438, 64)


@pytest.mark.parametrize("split", ALL.values(), ids=ALL)
def test_no_row_is_dropped_in_silence(split):
    dataset = Dataset(
        {"x": np.zeros(5), "y": np.zeros(4, int)}, {"y": np.zeros(1, int)}
    )
    with pytest.raises(ValueError, match="equal numbers of rows"):
        split(dataset, 2, 0, 0.0)


@pytest.mark.parametrize("split", ALL.values(), ids=ALL)
@pytest.mark.parametrize(
    ("num_clients", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError)]
)
def test_there_is_at_least_one_client(split, num_clients, error):
    with pytest.raises(error, match="num_clients must be"):
        split(make_dataset([0, 1, 1], [0]), num_clients, 0, 0.0)


@pytest.mark.parametrize(
    ("y_train", "y_test", "error"),
    [
        ([0.0, 1.0], [1.0], TypeError),
        ([0, 1], ["1"], TypeError),
        ([[0], [1]], [[1]], ValueError),
    ],
)
@pytest.mark.parametrize("split", BY_LABEL.values(), ids=BY_LABEL)
def test_labels_that_are_not_classes_are_refused(split, y_train, y_test, error):
    with pytest.raises(error, match="y must be"):
        split(make_dataset(y_train, y_test), 2, 0, 0.5)


@pytest.mark.parametrize("name", partition.__all__)
def test_every_function_says_where_its_labels_are(name):
    function = getattr(partition, name)
    if "label" in inspect.signature(function).parameters:
        dataset = make_dataset([0, 1, 1, 0], [0])
        wanted = inspect.signature(function).parameters
        arguments = {
            "alpha": 1.0,
            "gamma": 0.9,
            "num_classes": 1,
            "num_clusters": 1,
            "classes_per_client": 1,
        }
        given = {k: v for k, v in arguments.items() if k in wanted}
        with pytest.raises(ValueError, match="label must be one of 'id', 'y', got 'z'"):
            function(dataset, 2, **given, label="z")


@settings(deadline=None)
@given(datasets(), st.integers(1, 20), seeds)
def test_iid_and_contiguous_sizes_differ_by_one_at_most(dataset, num_clients, seed):
    for data in (
        partition.iid(dataset, num_clients, seed),
        partition.contiguous(dataset, num_clients),
    ):
        for packed in data.splits.values():
            assert np.ptp(packed.sizes) <= 1


def test_iid_examples_are_not_sorted_by_class():
    data = partition.iid(make_dataset(np.repeat(np.arange(10), 50)), 2)
    assert np.any(np.diff(data.train.client(0)["y"]) < 0)


def test_contiguous_pieces_are_a_stream_in_order():
    tokens = np.arange(100, 110)
    data = partition.contiguous(Dataset({"x": tokens}, {"x": tokens[:3]}), 3)
    pieces = [data.train.client(i)["x"] for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(pieces), tokens)
    assert [len(piece) for piece in pieces] == [3, 3, 4]
    assert np.shares_memory(data.train.examples["x"], tokens)


@pytest.mark.parametrize(
    ("seed", "error", "match"),
    [
        (-1, ValueError, "seed must be >= 0 and < 2.*, got -1"),
        ("a", TypeError, "seed must be an int, got 'a'"),
        (None, TypeError, "seed must be an int, got None"),
        (1.9, TypeError, "seed must be an int, got 1.9"),
    ],
)
def test_impossible_seeds_are_refused(seed, error, match):
    dataset = make_dataset([0, 1, 2, 0, 1, 2], [0, 1])
    clustered = {
        "label_swap": lambda d, n, seed, u: partition.label_swap(d, n, 1, seed),
        "label_permutation": lambda d, n, seed, u: partition.label_permutation(
            d, n, 1, seed
        ),
        "domains": lambda d, n, seed, u: partition.domains({"a": d}, n, seed),
    }
    for name, split in {**ALL, **clustered}.items():
        if name != "contiguous":  # which draws nothing
            with pytest.raises(error, match=match):
                split(dataset, 3, seed, 0.5)  # pyright: ignore


def test_what_is_no_dataset_is_refused():
    arrays = make_dataset([0, 1, 2, 0, 1, 2]).train
    natural = {"natural": lambda d, n, seed, u: partition.natural(d, "y")}
    for split in (ALL | natural).values():
        with pytest.raises(TypeError, match=r"must be a Dataset\(.*, got a dict"):
            split(arrays, 3, 0, 0.5)  # pyright: ignore


def several_labels(n_train=60, n_test=30):
    """Three labels of 0.0 and 1.0 a row, as chestmnist has 14."""
    rng = np.random.default_rng(0)
    rows = np.split(np.arange(n_train + n_test), [n_train])
    y = (rng.random((n_train + n_test, 3)) < [0.2, 0.5, 0.7]).astype(np.float32)
    return Dataset(*({"id": i, "y": y[i]} for i in rows))


LABELLED = {
    "dirichlet": {"alpha": 0.5},
    "dirichlet_by_client": {"alpha": 0.5},
    "alternating_dirichlet": {"alpha": 0.5},
    "pathological": {},
    "classes_per_client": {"num_classes": 1},
    "balancedness": {"gamma": 0.9, "classes_per_client": 1},
    "label_swap": {"num_clusters": 1},
    "label_permutation": {"num_clusters": 2},
}


def without_clusters(partitioned) -> FederatedData:
    is_clustered = isinstance(partitioned, partition.Clustered)
    return partitioned.data if is_clustered else partitioned


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("column", [0, 2])
def test_a_column_of_several_labels_decides_as_if_it_were_alone(name, column):
    split, arguments = getattr(partition, name), LABELLED[name]
    several = several_labels()
    alone = Dataset(
        *(
            {"id": s["id"], "y": s["y"][:, column].astype(int)}
            for s in (several.train, several.test)
        )
    )
    a, b = (
        without_clusters(split(dataset, 4, **arguments, seed=3, label=label))
        for dataset, label in ((several, ("y", column)), (alone, "y"))
    )
    for one, other in zip(a.splits.values(), b.splits.values(), strict=True):
        np.testing.assert_array_equal(one.offsets, other.offsets)
        np.testing.assert_array_equal(one.examples["id"], other.examples["id"])
        y = one.examples["y"]
        assert (y.dtype, y.shape[1]) == (np.float32, 3)
        np.testing.assert_array_equal(y[:, column], other.examples["y"])
        others = [c for c in range(3) if c != column]
        whole = np.concatenate([several.train["y"], several.test["y"]])
        np.testing.assert_array_equal(
            y[:, others], whole[one.examples["id"]][:, others]
        )


@pytest.mark.parametrize("name", LABELLED)
def test_several_labels_without_a_choice_say_how_to_choose(name):
    split, arguments = getattr(partition, name), LABELLED[name]
    with pytest.raises(
        ValueError, match=r"y must be one .*\(60, 3\).*label=\('y', 0\)"
    ):
        split(several_labels(), 4, **arguments)
    with pytest.raises(ValueError, match=r"column of y must be in \[0, 2\], got 3"):
        split(several_labels(), 4, **arguments, label=("y", 3))
    with pytest.raises(ValueError, match="y must be one label per row, got shape"):
        split(make_dataset([0, 1, 1], [0]), 2, **arguments, label=("y", 0))


def test_partitioners_that_read_no_labels_take_several_of_them():
    dataset = several_labels()
    for data in (
        partition.iid(dataset, 4),
        partition.contiguous(dataset, 4),
        partition.log_normal(dataset, 4, 0.5),
        partition.balancedness(dataset, 4, 0.9),
        partition.domains({"a": dataset}, 4).data,
    ):
        assert_exact_cover(data, dataset)
