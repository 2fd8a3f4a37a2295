"""Splitting loses and doubles nothing, and a client's part is its own business."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.test_packed import assert_clients_equal, make_clients, make_packed

from fedjax_core import FederatedData, hold_out_clients, merge, split_examples
from fedjax_core.data.splits import split_public

sizes_with_some = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
fractions = st.tuples(st.floats(0, 0.6), st.floats(0, 0.39)).filter(any)


def population(sizes, ids=None):
    return FederatedData(make_packed(sizes), client_ids=tuple(ids or ()))


@settings(deadline=None)
@given(sizes_with_some, fractions, st.integers(0, 2**63 - 1))
def test_every_example_goes_to_one_split_of_its_client(sizes, fractions, seed):
    data = population(sizes)
    split = split_examples(data, *fractions, seed=seed)
    assert set(split.splits) == {"train"} | {
        name for name, f in zip(("test", "validation"), fractions, strict=True) if f
    }
    for i, n in enumerate(sizes):
        parts = {name: s.client(i) for name, s in split.splits.items()}
        for part in parts.values():
            np.testing.assert_array_equal(part["x"][:, 0], part["y"])
            assert (np.diff(part["y"]) > 0).all()  # in their old order
        together = np.concatenate([part["y"] for part in parts.values()])
        assert sorted(together.tolist()) == data.train.client(i)["y"].tolist()
        if n:
            assert len(parts["train"]["y"]) >= 1


@pytest.mark.parametrize(
    ("n", "test", "validation", "expected"),
    [
        (10, 0.2, 0.1, (7, 2, 1)),
        (10, 0.25, 0.25, (5, 3, 2)),
        (1, 0.9, 0.0, (1, 0, 0)),
        (1, 0.5, 0.4, (1, 0, 0)),
        (2, 0.5, 0.49, (1, 1, 0)),
        (3, 0.1, 0.0, (3, 0, 0)),
        (0, 0.2, 0.2, (0, 0, 0)),
    ],
)
def test_sizes_of_the_parts(n, test, validation, expected):
    split = split_examples(population([n, 1]), test, validation)
    sizes = [int(s.sizes[0]) for s in split.splits.values()]
    assert sizes == list(expected[: len(sizes)])
    assert not any(expected[len(sizes) :])


def test_a_clients_split_depends_neither_on_others_nor_on_their_order():
    ids, sizes = ["a", "b", "c"], [9, 20, 14]
    clients = dict(zip(ids, make_clients(sizes), strict=True))

    def tested(order):
        data = FederatedData.from_lists([clients[i] for i in order], client_ids=order)
        split = split_examples(data, 0.4, seed=5)
        return {
            i: split.splits["test"].client(k)["y"].tolist()
            for k, i in enumerate(split.client_ids)
        }

    whole = tested(ids)
    assert tested(["c", "a", "b"]) == whole
    assert tested(["b"]) == {"b": whole["b"]}


def test_seeds_and_clients_draw_differently():
    data = FederatedData.from_lists([{"y": np.arange(50)}] * 2)
    first, other = (split_examples(data, 0.5, seed=s).train for s in (0, 1))
    assert first.client(0)["y"].tolist() != first.client(1)["y"].tolist()
    assert first.client(0)["y"].tolist() != other.client(0)["y"].tolist()


def test_every_example_is_tested_equally_often():
    # 400 seeds, 10 examples, 3 tested each: every count is Binomial(400, 0.3), of
    # standard deviation 9.2. Five of them on ten examples: false alarm below 1e-5.
    data, counts = population([10]), np.zeros(10)
    for seed in range(400):
        counts[split_examples(data, 0.3, seed=seed).splits["test"].examples["y"]] += 1
    assert counts.sum() == 1200
    assert np.abs(counts - 120).max() < 46


def test_a_split_that_is_there_stays():
    data = FederatedData(make_packed([10]), make_packed([3]))
    split = split_examples(data, test_fraction=0, validation_fraction=0.3)
    assert split.test is data.test
    assert {k: s.num_examples for k, s in split.splits.items()} == {
        "train": 7, "test": 3, "validation": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match="test_fraction must be 0 for data that has"):
        split_examples(data, 0.2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-0.1,), r"test_fraction must be in \[0, 1\], got -0.1"),
        ((0.5, 0.5), "below 1, got 0.5 \\+ 0.5"),
        ((0.0, 0.0), "above 0"),
        ((0.5, 0.1, -1), "seed must be >= 0"),
    ],
)
def test_bad_fractions_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        split_examples(population([3]), *args)
    with pytest.raises(TypeError, match=r"seed must be an int, got 1\.9"):
        split_examples(population([3]), seed=1.9)  # type: ignore[arg-type]


@given(st.integers(2, 30), st.floats(0, 1), st.integers(0, 99))
def test_held_out_clients_are_others(n, fraction, seed):
    ids = [f"c{i}" for i in range(n)]
    data = FederatedData(
        make_packed([1] * n), make_packed(range(n)), client_ids=tuple(ids)
    )
    count = int(np.floor(fraction * n + 0.5))
    if not 0 < count < n:
        with pytest.raises(ValueError, match="leave clients on both sides"):
            hold_out_clients(data, fraction, seed)
        return
    stay, out = hold_out_clients(data, fraction, seed)
    assert out.num_clients == count
    assert not set(stay.client_ids) & set(out.client_ids)
    assert [i for i in ids if i in stay.client_ids] == list(stay.client_ids)
    assert [i for i in ids if i in out.client_ids] == list(out.client_ids)
    for part in (stay, out):
        rows = [ids.index(i) for i in part.client_ids]
        assert part.splits["test"].sizes.tolist() == rows
        assert part.train.examples["y"].tolist() == rows


def test_who_is_held_out_does_not_depend_on_the_order():
    ids = [f"c{i}" for i in range(20)]
    data = population([1] * 20, ids)
    first = hold_out_clients(data, seed=3)[1]
    turned = hold_out_clients(data.subset(np.arange(20)[::-1]), seed=3)[1]
    assert set(first.client_ids) == set(turned.client_ids)
    assert set(hold_out_clients(data, seed=4)[1].client_ids) != set(first.client_ids)


@given(sizes_with_some, sizes_with_some)
def test_merge_appends_clients(sizes, more):
    a, b = population(sizes), population(more)
    merged = merge(a, b, prefixes=("a/", "b/"))
    assert_clients_equal(merged.train, make_clients(sizes) + make_clients(more))
    assert merged.client_ids == (
        *(f"a/{i}" for i in range(len(sizes))),
        *(f"b/{i}" for i in range(len(more))),
    )


def test_merge_gives_empty_splits_where_there_are_none():
    a = FederatedData(make_packed([1]), client_ids=("a",))
    b = FederatedData(make_packed([2]), make_packed([3]), client_ids=("b",))
    for order, sizes in (((a, b), [0, 3]), ((b, a), [3, 0])):
        merged = merge(*order)
        assert merged.splits["test"].sizes.tolist() == sizes
        assert list(merged.splits) == ["train", "test"]
    assert merge(a).client_ids == ("a",)


def test_merge_undoes_hold_out():
    data = population([3, 1, 0, 2, 5], "abcde")
    merged = merge(*hold_out_clients(data, 0.4))
    back = merged.subset([merged.client_ids.index(i) for i in data.client_ids])
    assert_clients_equal(back.train, make_clients([3, 1, 0, 2, 5]))


def test_what_can_not_be_merged():
    a = population([1, 1])
    with pytest.raises(ValueError, match="'0' in populations 0 and 1; give prefixes"):
        merge(a, a)
    with pytest.raises(ValueError, match="unique, got 'xx' in"):
        merge(population([1], ["x"]), population([1], ["xx"]), prefixes=["x", ""])
    with pytest.raises(ValueError, match="one string per population, 2, got"):
        merge(a, a, prefixes=["a"])
    with pytest.raises(ValueError, match="at least one, got none"):
        merge()
    other = FederatedData.from_lists([{"y": [1.5], "x": np.zeros((1, 2), "f4")}])
    with pytest.raises(
        ValueError, match=r"y must .* train of population 0 and float64"
    ):
        merge(a, other, prefixes=["a", "b"])


def test_public_data_fall_into_two_parts():
    x = {"x": np.arange(50) ** 2, "y": np.arange(50)}
    negatives, rest = split_public(x, seed=3)
    assert len(negatives["y"]) == 10
    together = np.concatenate([negatives["y"], rest["y"]])
    assert sorted(together.tolist()) == list(range(50))
    for part in (negatives, rest):
        np.testing.assert_array_equal(part["x"], part["y"] ** 2)
        assert (np.diff(part["y"]) > 0).all()
    again, _ = split_public(x, seed=3)
    other, _ = split_public(x, seed=4)
    np.testing.assert_array_equal(negatives["y"], again["y"])
    assert (negatives["y"] != other["y"]).any()
    with pytest.raises(ValueError, match=r"both parts of 2, got 0.2"):
        split_public({"x": np.zeros(2)})
    with pytest.raises(ValueError, match=r"fraction must be > 0 and < 1, got 1.0"):
        split_public(x, 1.0)
