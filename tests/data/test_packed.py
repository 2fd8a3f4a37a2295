"""Packed splits hold what they were given, and refuse what is not a population."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_core.data import sources
from fedjax_core.data.packed import Dataset, FederatedData, Packed


def make_clients(sizes):
    """Dicts whose "y" numbers the examples of all clients from 0 on."""
    ends = np.cumsum(sizes)
    ids = [
        np.arange(end - n, end, dtype=np.int32)
        for n, end in zip(sizes, ends, strict=True)
    ]
    return [{"x": np.stack([y, -y], axis=1).astype(np.float32), "y": y} for y in ids]


def make_packed(sizes):
    return Packed.from_lists(make_clients(sizes))


def assert_clients_equal(packed, clients):
    assert packed.num_clients == len(clients)
    for i, expected in enumerate(clients):
        got = packed.client(i)
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            assert got[name].dtype == array.dtype
            np.testing.assert_array_equal(got[name], array, strict=True)


sizes_with_some = st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any)


@given(sizes_with_some)
def test_from_lists_and_client_are_inverse(sizes):
    packed = make_packed(sizes)
    assert packed.offsets.dtype == packed.sizes.dtype == np.int64
    assert packed.sizes.tolist() == sizes
    assert packed.num_examples == sum(sizes)
    assert_clients_equal(packed, make_clients(sizes))


@settings(deadline=None)
@given(sizes_with_some, st.data())
def test_take_gives_those_clients_in_that_order(sizes, data):
    ids = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=10)
    chosen = data.draw(ids)
    taken = make_packed(sizes).take(chosen)
    clients = make_clients(sizes)
    assert_clients_equal(taken, [clients[i] for i in chosen])


def test_slices_and_consecutive_clients_are_views():
    packed = make_packed([2, 0, 3, 1])
    x = packed.examples["x"]
    assert np.shares_memory(packed.client(2)["x"], x)
    assert np.shares_memory(packed.take([1, 2, 3]).examples["x"], x)
    assert not np.shares_memory(packed.take([2, 0]).examples["x"], x)


def test_memory_maps_stay_memory_maps(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.uint8).reshape(6, 2))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    packed = Packed({"x": x}, np.array([0, 2, 6]))
    assert packed.examples["x"] is x
    part = FederatedData(packed).subset([1]).train.examples["x"]
    assert isinstance(part, np.memmap)
    assert np.shares_memory(part, x)


def test_building_copies_offsets_but_no_array():
    x, offsets = np.zeros((3, 2)), np.array([0, 1, 3], np.int32)
    packed = Packed({"x": x}, offsets)
    assert packed.examples["x"] is x
    offsets[1] = 2
    assert packed.offsets.tolist() == [0, 1, 3]
    with pytest.raises(ValueError, match="read-only"):
        packed.offsets[1] = 2


def test_fields_cannot_be_replaced():
    packed = make_packed([1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        packed.offsets = np.array([0, 1])  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("examples", "offsets", "error", "message"),
    [
        ({}, [0, 0], ValueError, "at least one array"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, [0, 2], ValueError, "'x': 2, 'y': 3"),
        ({"x": np.zeros(())}, [0, 1], ValueError, "x must have a leading example axis"),
        ({"example_mask": np.ones(2, bool)}, [0, 2], ValueError, "reserved name"),
        (
            {"x": np.array(["a", 1], object)},
            [0, 2],
            TypeError,
            "x must not hold Python",
        ),
        ({3: np.zeros(2)}, [0, 2], TypeError, "must be strs, got 3"),
        ({"x": np.zeros(2)}, [1, 2], ValueError, "start at 0 and end at .* 2, got 1"),
        ({"x": np.zeros(2)}, [0, 3], ValueError, "got 0 and 3"),
        ({"x": np.zeros(3)}, [0, 2, 1, 3], ValueError, "got 2 then 1 at client 1"),
        ({"x": np.zeros(0)}, [0], ValueError, r"got shape \(1,\)"),
        ({"x": np.zeros(2)}, [[0, 2]], ValueError, r"got shape \(1, 2\)"),
        ({"x": np.zeros(2)}, [0.0, 2.0], TypeError, "offsets must be ints"),
    ],
)
def test_bad_splits_are_refused(examples, offsets, error, message):
    with pytest.raises(error, match=message):
        Packed(examples, np.array(offsets))


@pytest.mark.parametrize("empty", [{}, {"x": [], "y": []}, {"x": np.zeros((0, 7))}])
def test_a_client_without_examples_need_not_tell_shapes(empty):
    clients = [empty, *make_clients([2]), empty]
    packed = Packed.from_lists(clients)
    assert packed.sizes.tolist() == [0, 2, 0]
    assert packed.client(0)["x"].shape == (0, 2)
    assert packed.client(0)["x"].dtype == np.float32


def test_a_split_without_examples_keeps_shapes_and_dtypes():
    packed = Packed.from_lists([{}, {"x": np.zeros((0, 2), np.uint8)}])
    assert packed.sizes.tolist() == [0, 0]
    assert packed.examples["x"].shape == (0, 2)
    assert packed.examples["x"].dtype == np.uint8


def test_strings_take_the_longest_width():
    packed = Packed.from_lists([{"text": ["a", "bc"]}, {"text": ["defg"]}])
    assert packed.examples["text"].tolist() == ["a", "bc", "defg"]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "got 0 clients without examples"),
        ([{}, {"x": []}], "got 2 clients without examples"),
        (
            [{"x": [1]}, {"y": [1]}],
            r"got \['x'\] for client 0 and \['y'\] for client 1",
        ),
        (
            [{"x": [1]}, {}, {"x": [1.5]}],
            r"int64\[\] for client 0 and float64\[\] for c",
        ),
        ([{"x": [[1]]}, {"x": [[1, 2]]}], r"int64\[1\] for client 0 and int64\[2\]"),
        ([{"x": [1]}, {"x": [1, 2], "y": [1]}], "client 1: arrays must have equal"),
    ],
)
def test_clients_that_disagree_are_refused(clients, message):
    with pytest.raises(ValueError, match=message):
        Packed.from_lists(clients)


@pytest.mark.parametrize("i", [-1, 2])
def test_clients_outside_the_population_are_refused(i):
    packed = make_packed([1, 1])
    with pytest.raises(IndexError, match=rf"in 0\.\.1, got {i}"):
        packed.client(i)
    with pytest.raises(IndexError, match=rf"in 0\.\.1, got {i}"):
        packed.take([0, i])


def test_take_refuses_masks_and_nothing():
    packed = make_packed([1, 1])
    with pytest.raises(TypeError, match="clients must be ints, got dtype bool"):
        packed.take(np.array([True, False]))
    with pytest.raises(ValueError, match="at least one client"):
        packed.take([])


def test_subset_takes_the_same_clients_from_every_split():
    data = FederatedData.from_lists(
        train=make_clients([1, 2, 3]),
        test=make_clients([0, 1, 1]),
        validation=make_clients([2, 0, 1]),
        client_ids=["a", "b", "c"],
    )
    part = data.subset(np.array([2, 0]))
    assert part.client_ids == ("c", "a")
    assert part.num_clients == 2
    assert {name: s.sizes.tolist() for name, s in part.splits.items()} == {
        "train": [3, 1],
        "test": [1, 0],
        "validation": [1, 2],
    }
    with pytest.raises(ValueError, match="unique, got 'a' twice"):
        data.subset([0, 0])


def test_client_ids_default_to_row_numbers():
    data = FederatedData(make_packed([1, 0, 2]))
    assert data.client_ids == ("0", "1", "2")
    assert list(data.splits) == ["train"]


@pytest.mark.parametrize(
    ("client_ids", "error", "message"),
    [
        (["a"], ValueError, "one id per client, 2, got 1"),
        (["a", "a"], ValueError, "unique, got 'a' twice"),
        ([b"a", b"b"], TypeError, "must be strs, got b'a'"),
        ("ab", TypeError, "must be strs, got one: 'ab'"),
    ],
)
def test_bad_client_ids_are_refused(client_ids, error, message):
    with pytest.raises(error, match=message):
        FederatedData(make_packed([1, 1]), client_ids=client_ids)


def test_splits_must_have_the_same_clients():
    with pytest.raises(
        ValueError, match="test must have the 2 clients of train, got 3"
    ):
        FederatedData(make_packed([1, 1]), make_packed([1, 1, 1]))


def test_reprs_describe_instead_of_printing_arrays():
    data = FederatedData(make_packed([1, 2, 4, 30]), make_packed([0, 1, 2, 0]))
    head, _, train, test = data.summary().splitlines()
    assert head == "FederatedData, 4 clients"
    arrays = ["x:", "float32[2],", "y:", "int32[]"]
    assert train.split() == ["train", "37", "1", "3", "30", *arrays]
    assert test.split() == ["test", "3", "0", "0.5", "2", *arrays]
    assert repr(data) == data.summary()
    assert repr(data.test) == (
        "Packed(4 clients, 3 examples, x: float32[2], y: int32[])"
    )


def test_data_survives_pickling():
    clients = make_clients([1, 0, 2])
    copy = pickle.loads(pickle.dumps(FederatedData.from_lists(clients)))
    assert_clients_equal(copy.train, clients)


def test_a_dataset_names_the_splits_it_has():
    two = Dataset({"y": np.zeros(2)}, {"y": np.zeros(1)})
    assert list(two.splits) == ["train", "test"]
    three = two._replace(validation={"y": np.zeros(3)})
    assert {k: len(v["y"]) for k, v in three.splits.items()} == {
        "train": 2, "test": 1, "validation": 3,
    }  # fmt: skip


def labelled(train, test):
    """A population whose clients hold the given labels."""
    return FederatedData.from_lists(
        [{"y": np.array(y)} for y in train], [{"y": np.array(y)} for y in test]
    )


def test_map_gives_new_arrays_for_the_same_clients():
    data = FederatedData(
        make_packed([1, 2]), make_packed([0, 3]), client_ids=("a", "b")
    )
    mapped = data.map(lambda e: {"z": e["x"][:, :1] * 2, "y": e["y"]})
    assert mapped.client_ids == ("a", "b")
    for name, split in data.splits.items():
        new = mapped.splits[name]
        np.testing.assert_array_equal(new.offsets, split.offsets)
        np.testing.assert_array_equal(
            new.examples["z"][:, 0], 2.0 * split.examples["y"]
        )
        assert new.examples["y"] is split.examples["y"]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda e: {"y": e["y"][1:]}, ValueError, r"keep the 3 rows of train.*\(2,\)"),
        (lambda e: {"y": np.float32(1)}, ValueError, r"got y of shape \(\)"),
        (lambda e: e["y"], TypeError, "must return a dict of arrays, got ndarray"),
        (lambda e: {}, ValueError, "at least one array"),
    ],
)
def test_map_refuses_other_rows(function, error, message):
    with pytest.raises(error, match=message):
        FederatedData(make_packed([1, 2])).map(function)


def test_statistics_of_sizes():
    data = FederatedData(make_packed([1, 2, 4, 30]), make_packed([0, 1, 2, 0]))
    assert data.statistics() == {
        "train": {"examples": 37, "min": 1, "median": 3, "mean": 9.25, "max": 30},
        "test": {"examples": 3, "min": 0, "median": 0.5, "mean": 0.75, "max": 2},
    }


@pytest.mark.parametrize("names", [(3, 5, 9), ("a", "bb", "c"), (False, True, True)])
def test_label_counts_have_the_same_columns_for_every_split(names):
    a, b, c = names
    data = labelled([[b, a, b], [a]], [[a], [c, c]])
    assert data.label_values().tolist() == sorted(set(names))
    train, test = data.label_counts(), data.label_counts(split="test")
    assert train.dtype == np.int64
    if b == c:
        assert train.tolist() == [[1, 2], [1, 0]]
        assert test.tolist() == [[1, 0], [0, 2]]
    else:
        assert train.tolist() == [[1, 2, 0], [1, 0, 0]]
        assert test.tolist() == [[1, 0, 0], [0, 0, 2]]


@given(st.lists(st.lists(st.integers(-3, 3), max_size=6), min_size=1).filter(any))
def test_label_counts_count(labels):
    data = FederatedData.from_lists([{"y": np.array(y, np.int32)} for y in labels])
    counts, values = data.label_counts(), data.label_values().tolist()
    assert counts.shape == (len(labels), len(values))
    for row, y in zip(counts, labels, strict=True):
        assert row.tolist() == [y.count(v) for v in values]


@pytest.mark.parametrize(
    ("data", "args", "error", "message"),
    [
        (labelled([[1]], [[1]]), {"label": "x"}, ValueError, "one of 'y', got 'x'"),
        (labelled([[1]], [[1]]), {"split": "z"}, ValueError, "'train', 'test', got"),
        (labelled([[1.0]], [[1.0]]), {}, TypeError, "got float64"),
        (labelled([[[1]]], [[[1]]]), {}, ValueError, r"got shape \(1, 1\)"),
    ],
)
def test_what_is_no_label_is_not_counted(data, args, error, message):
    with pytest.raises(error, match=message):
        data.label_counts(**args)


def test_text_of_any_kind_is_text():
    pandas = pytest.importorskip("pandas")
    given = ["a", "ü", "bcd"]
    for text in (
        np.array(given, object),
        np.array(given, np.dtypes.StringDType()),
        pandas.Series(given),
        pandas.Series(given).to_numpy(),
        pandas.Series(given, dtype="string"),
    ):
        packed = Packed({"x": np.arange(3), "who": text}, np.array([0, 3]))
        assert packed.examples["who"].dtype.kind == "U"
        assert packed.examples["who"].tolist() == given
        data = FederatedData(Packed({"x": np.arange(3)}, np.arange(4)), client_ids=text)  # type: ignore
        assert data.client_ids == tuple(given)
        grouped = sources.from_arrays({"x": np.arange(3), "client": text})
        assert grouped.client_ids == ("a", "bcd", "ü")
    with pytest.raises(TypeError, match="who must not hold Python objects"):
        Packed({"who": np.array(["a", 1, None], object)}, np.array([0, 3]))


def test_bytes_in_another_order_are_turned_and_masks_are_refused():
    packed = Packed(
        {"x": np.arange(3, dtype=">f4"), "y": np.arange(3, dtype=">i4")},
        np.array([0, 3]),
    )
    assert [a.dtype.str for a in packed.examples.values()] == ["<f4", "<i4"]
    assert packed.examples["x"].tolist() == [0, 1, 2]
    masked = np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])
    with pytest.raises(TypeError, match="x must not be a masked array"):
        Packed({"x": masked}, np.array([0, 3]))
    with pytest.raises(TypeError, match="x must not be a masked array"):
        FederatedData.from_lists([{"x": masked}])
