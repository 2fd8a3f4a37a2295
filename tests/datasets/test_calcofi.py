"""CalCOFI: the original bottle.csv written by the test, and the real excerpt."""

import logging
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import calcofi

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "calcofi_bottle"

HEADER = (
    "Cst_Cnt,Btl_Cnt,Sta_ID,Depth_ID,Depthm,T_degC,Salnty,O2ml_L,STheta,R_O2µmol/Kg"
)
BOTTLES = HEADER + (
    """
1,1,054.0 056.0,19-4903CR-HY-060-0930-05400560-0000A-3,0,10.5,33.44,5,25.649,
1,2,054.0 056.0,19-4903CR-HY-060-0930-05400560-0008A-3,8,10.46,33.44,,25.656,
2,3,054.0 056.0,20-1012CR-HY-061-0930-05400560-0008A-3,8,11,33.5,4,25.6,å
3,4,052.0 075.0,20-0106CR-HY-061-0930-05200750-0010A-3,10,12,,4,,
3,5,052.0 075.0,20-0106CR-HY-061-0930-05200750-0020A-3,20,11.5,33.25,3.5,,
"""
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "bottle.csv"
    path.write_text(BOTTLES, encoding="latin-1")
    return path


def check(data):
    for split in data.splits.values():
        x, y = split.examples["x"], split.examples["y"]
        assert x.dtype == y.dtype == np.float32
        assert x.shape[1:] == (5,)
        assert y.ndim == 1
        assert np.isfinite(x).all()
        assert np.isfinite(y).all()


def test_rows_by_station(path, caplog):
    with caplog.at_level(logging.INFO, "fedjax_core"):
        data = calcofi.load(path, test_fraction=0, standardize=False)
    assert "dropped 2 of 5 rows" in caplog.text
    check(data)
    assert data.client_ids == ("052.0 075.0", "054.0 056.0")
    assert data.test is None
    # Depth, temperature, oxygen; June, March and December are 11, 5 and 23 24ths of a
    # turn.
    turn = 2 * np.pi * np.array([11, 5, 23]) / 24
    expected = np.column_stack(
        [[20, 0, 8], [11.5, 10.5, 11], [3.5, 5, 4], np.sin(turn), np.cos(turn)]
    )
    np.testing.assert_allclose(data.train.examples["x"], expected, 1e-6, 1e-6)
    np.testing.assert_allclose(data.train.examples["y"], [33.25, 33.44, 33.5])


def test_temperature_as_the_target(path):
    data = calcofi.load(path, "temperature_c", test_fraction=0, standardize=False)
    np.testing.assert_allclose(data.train.examples["y"], [11.5, 10.5, 11])
    np.testing.assert_allclose(data.train.examples["x"][:, 1], [33.25, 33.44, 33.5])


def test_a_cast_is_in_train_or_in_test(tmp_path):
    rows = [
        f"{cast},0,000.0 000.0,20-0106X,{depth},{cast},33,4,,"
        for cast in range(10)
        for depth in range(5)
    ]
    (tmp_path / "bottle.csv").write_text("\n".join([HEADER, *rows]), "latin-1")
    data = calcofi.load(tmp_path, test_fraction=0.3, standardize=False)
    casts = [set(s.examples["x"][:, 1].tolist()) for s in data.splits.values()]
    assert list(map(len, casts)) == [7, 3]
    assert casts[0] | casts[1] == set(range(10))
    scaled = calcofi.load(tmp_path, test_fraction=0.3)
    mean = data.train.examples["x"][:, 1].mean(dtype=np.float64)
    std = data.train.examples["x"][:, 1].std(dtype=np.float64)
    expected = (data.splits["test"].examples["x"][:, 1] - mean) / std
    got = scaled.splits["test"].examples["x"][:, 1]
    np.testing.assert_allclose(got, expected, 1e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Salnty", "Salinity", "line 1: expected a header with 'Salnty' once"),
        ("33.44,5,25.649,", "33.44,5", "line 2: expected 10 fields, found 8"),
        (
            "33.44,5,",
            "salty,5,",
            "line 2, column 'Salnty': expected a number, found 's",
        ),
        ("19-4903", "19-4913", "line 2, column 'Depth_ID': expected century, year"),
        (BOTTLES, HEADER, "line 1: expected rows of data, found none"),
    ],
)
def test_errors_name_the_line_and_the_column(path, old, new, message):
    path.write_text(BOTTLES.replace(old, new, 1), encoding="latin-1")
    with pytest.raises(DataFileError, match=message) as raised:
        calcofi.load(path)
    assert str(path) in str(raised.value)


def write_npz(path, **changes):
    arrays = {
        "station_names": np.array(["b", "a"]),
        "station": np.array([0, 0, 1, 1], np.uint8),
        "cast": np.array([1, 1, 2, 3], np.int32),
        "date": np.array([0, 31, 400, -1], np.int32),
        **{c: np.arange(4, dtype=np.float32) for c in ("depth_m", "temperature_c")},
        **{c: np.arange(4, dtype=np.float32) for c in ("salinity", "oxygen_ml_l")},
        **changes,
    }
    np.savez(path, **arrays)


def test_the_arrays_of_the_excerpt(tmp_path):
    path = tmp_path / "calcofi_bottle.npz"
    write_npz(path, oxygen_ml_l=np.array([1, np.nan, 2, 3], np.float32))
    data = calcofi.load(tmp_path, test_fraction=0, standardize=False)
    check(data)
    assert data.client_ids == ("a", "b")
    # 1971-02-05, 1969-12-31 and 1970-01-01.
    turn = 2 * np.pi * (np.array([2, 12, 1]) - 0.5) / 12
    np.testing.assert_allclose(data.train.examples["x"][:, 3], np.sin(turn), 1e-6)
    write_npz(path, station=np.array([0, 0, 1, 2], np.uint8))
    with pytest.raises(
        DataFileError, match="array 'station': expected 0 to 1, found 0"
    ):
        calcofi.load(path)
    write_npz(path, cast=np.array([1], np.int32))
    with pytest.raises(DataFileError, match="array 'cast': expected 4 rows"):
        calcofi.load(path)


def test_a_missing_file_and_a_wrong_target(path):
    with pytest.raises(
        FileNotFoundError, match=r"bottle\.csv .*fetch it from .*calcofi"
    ):
        calcofi.load(path.parent / "nowhere")
    with pytest.raises(ValueError, match="target must be one of 'salinity'"):
        calcofi.load(path, "oxygen_ml_l")  # pyright: ignore


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_damaged_files_give_named_errors_or_good_data(path, kind):
    if kind == "npz":
        path = path.parent / "calcofi_bottle.npz"
        write_npz(path)
    assert survives(path, lambda: calcofi.load(path), check) > 30


def test_the_real_samples(caplog):
    if not REAL.is_dir():
        pytest.skip(f"no {REAL}")
    with caplog.at_level(logging.INFO, "fedjax_core"):
        data = calcofi.load(REAL)
    assert "dropped 19351 of 317143 rows" in caplog.text
    check(data)
    assert data.num_clients == 73
    assert sum(split.num_examples for split in data.splits.values()) == 297_792
