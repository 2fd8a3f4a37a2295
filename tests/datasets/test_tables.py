"""Held-out rows, scaling and packing, against values worked out by hand."""

import logging

import numpy as np
import pytest

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import tables

NAN = np.nan


def test_standardising_looks_at_train_rows_only():
    # Train: 1, 3 has mean 2 and deviation 1; 5, 5 is constant.
    x = np.array([[1.0, 5], [100, 7], [3, 5]])
    train = np.array([True, False, True])
    got = tables.standardize(x, train)
    np.testing.assert_array_equal(got, [[-1, 0], [98, 2], [1, 0]])
    x[1] = [-7, 0]
    np.testing.assert_array_equal(tables.standardize(x, train)[[0, 2]], got[[0, 2]])


def test_what_is_far_off_still_fits_float32():
    x = np.array([[0.0], [1e-30], [1e38]])
    got = tables.standardize(x, np.array([True, True, False]))
    assert np.isfinite(got.astype(np.float32)).all()


def test_gaps_get_the_train_mean():
    x = np.array([[1.0, NAN, NAN], [3, 4, NAN], [NAN, 8, NAN], [9, NAN, 5]])
    train = np.array([True, True, True, False])
    np.testing.assert_array_equal(
        tables.fill_gaps(x, train), [[1, 6, 0], [3, 4, 0], [2, 8, 0], [9, 6, 5]]
    )


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.6, 1.0])
def test_every_client_holds_out_its_share(fraction):
    keys = np.array(["b"] * 8 + ["a"] * 20 + ["c"])
    order = np.random.default_rng(1).permutation(len(keys))
    test = tables.hold_out(keys[order], fraction, 0)
    for key, n in (("a", 20), ("b", 8), ("c", 1)):
        count = test[keys[order] == key].sum()
        assert count == min(round(fraction * n), n - 1)


def test_held_out_rows_depend_on_the_seed_alone():
    keys = np.repeat(np.arange(5), 40)
    first = tables.hold_out(keys, 0.5, 7)
    np.testing.assert_array_equal(first, tables.hold_out(keys, 0.5, 7))
    assert not np.array_equal(first, tables.hold_out(keys, 0.5, 8))
    with pytest.raises(ValueError, match="test_fraction must be in"):
        tables.hold_out(keys, 1.5, 0)
    with pytest.raises(ValueError, match="seed must be >= 0"):
        tables.hold_out(keys, 0.5, -1)
    with pytest.raises(TypeError, match="seed must be an int, got None"):
        tables.hold_out(keys, 0.5, None)  # pyright: ignore


def test_groups_are_not_split():
    keys, groups = np.repeat([0, 1], 30), np.repeat(np.arange(12), 5)
    test = tables.hold_out(keys, 0.5, 0, groups)
    by_group = test.reshape(12, 5)
    assert np.all(by_group.all(1) | ~by_group.any(1))
    assert by_group[:6, 0].sum() == by_group[6:, 0].sum() == 3


def test_clients_are_sorted_and_rows_keep_their_order():
    keys = np.array([10, 9, 10, 9, 10])
    test = np.array([False, False, True, False, False])
    data = tables.by_client(keys, test, {"x": np.arange(5)})
    assert data.client_ids == ("9", "10")
    assert data.train.client(0)["x"].tolist() == [1, 3]
    assert data.train.client(1)["x"].tolist() == [0, 4]
    assert data.splits["test"].client(0)["x"].tolist() == []
    assert data.splits["test"].client(1)["x"].tolist() == [2]
    assert tables.by_client(keys, test & False, {"x": np.arange(5)}).test is None


def test_dropped_rows_are_counted(caplog):
    table = {"a": np.array([1, 2, 3])}
    with caplog.at_level(logging.INFO, "fedjax_core"):
        kept = tables.drop_rows("f.csv", table, np.array([True, False, True]))
    assert kept["a"].tolist() == [2]
    assert "f.csv: dropped 2 of 3 rows" in caplog.text
    with pytest.raises(DataFileError, match=r"f\.csv.*rows without gaps"):
        tables.drop_rows("f.csv", table, np.ones(3, bool))


def test_columns_of_an_npz_file_have_one_length_and_fit_float32(tmp_path):
    path = tmp_path / "a.npz"
    columns = {"x": (np.floating, (None,)), "k": (np.integer, (None,))}
    np.savez(path, x=[1.0, NAN], k=[1, 2])
    table = tables.read_npz(path, columns)
    assert table["k"].tolist() == [1, 2]
    with pytest.raises(DataFileError, match="array 'x': expected numbers, found NaN"):
        tables.no_gaps(path, "array 'x'", table["x"])
    np.savez(path, x=[1.0, 2.0], k=[1])
    with pytest.raises(DataFileError, match="array 'k': expected 2 rows as in 'x'"):
        tables.read_npz(path, columns)
    np.savez(path, x=[np.inf], k=[1])
    with pytest.raises(DataFileError, match="array 'x': expected finite numbers"):
        tables.read_npz(path, columns)
