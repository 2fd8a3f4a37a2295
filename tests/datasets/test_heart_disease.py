"""Heart disease as FLamby prepares it, from written files and from the real ones."""

from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import heart_disease

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "heart_disease"

# age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num
ROWS = {
    "cleveland": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n"
    "67.0,0.0,4.0,160.0,286.0,0.0,0.0,108.0,1.0,1.5,2.0,3.0,3.0,2\n"
    "41.0,0.0,2.0,130.0,204.0,0.0,1.0,172.0,0.0,1.4,1.0,0.0,?,0\n",
    "hungarian": "28,1,2,130,132,0,2,185,0,0,?,?,?,0\n"
    "29,1,3,120,243,0,0,160,0,0,?,?,?,3\n"
    "29,1,2,140,?,0,0,170,0,0,?,?,?,0\n",
    "switzerland": "32,1,1,95,0,?,0,127,0,.7,1,?,?,1\n"
    "40,1,1,95,0,0,0,127,0,-.7,1,?,?,1\n41,1,1,95,0,0,0,127,0,.7,1,?,?,4\n",
    "va": "63,1,4,140,260,0,1,112,1,3,2,?,?,2\n44,1,4,130,209,0,1,127,0,0,?,?,?,0\n",
}


@pytest.fixture
def folder(tmp_path):
    for hospital, rows in ROWS.items():
        (tmp_path / f"processed.{hospital}.data").write_text(rows)
    return tmp_path


def pooled(data, name):
    return np.concatenate([split.examples[name] for split in data.splits.values()])


def test_features_are_flambys_in_order(folder):
    data = heart_disease.load(folder, standardize=False)
    assert data.client_ids == heart_disease.HOSPITALS
    sizes = [split.sizes for split in data.splits.values()]
    np.testing.assert_array_equal(sizes, [[1, 1, 1, 1], [2, 1, 1, 1]])
    x, y = pooled(data, "x"), pooled(data, "y")
    assert x.dtype == np.float32
    assert y.dtype == np.int32
    # age sex trestbps chol fbs thalach exang oldpeak, cp 2 3 4, restecg 1 2
    expected = np.array(
        [
            [63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1, 0],
            [67, 0, 160, 286, 0, 108, 1, 1.5, 0, 0, 1, 0, 0, 1],
            [41, 0, 130, 204, 0, 172, 0, 1.4, 1, 0, 0, 1, 0, 0],
            [28, 1, 130, 132, 0, 185, 0, 0, 1, 0, 0, 0, 1, 0],
            [29, 1, 120, 243, 0, 160, 0, 0, 0, 1, 0, 0, 0, 1],
            [40, 1, 95, 0, 0, 127, 0, -0.7, 0, 0, 0, 0, 0, 1],
            [41, 1, 95, 0, 0, 127, 0, 0.7, 0, 0, 0, 0, 0, 1],
            [63, 1, 140, 260, 0, 112, 1, 3, 0, 0, 1, 1, 0, 1],
            [44, 1, 130, 209, 0, 127, 0, 0, 0, 0, 1, 1, 0, 0],
        ],
        np.float32,
    )
    got = np.column_stack([x, y])
    np.testing.assert_array_equal(
        got[np.lexsort(got.T)], expected[np.lexsort(expected.T)]
    )


def test_measured_columns_are_standardised_with_train_rows(folder):
    raw = heart_disease.load(folder, standardize=False)
    data = heart_disease.load(folder)
    measured = [0, 2, 3, 5, 7]
    others = [i for i in range(13) if i not in measured]
    train = raw.train.examples["x"].astype(np.float64)
    mean, std = train.mean(0), train.std(0)
    for name, split in data.splits.items():
        x = raw.splits[name].examples["x"]
        expected = (x - mean)[:, measured] / std[measured]
        np.testing.assert_allclose(split.examples["x"][:, measured], expected, 1e-5)
        np.testing.assert_array_equal(split.examples["x"][:, others], x[:, others])


def test_the_files_can_be_had_as_they_are(folder):
    raw = heart_disease.read(folder)
    assert list(raw) == list(heart_disease.HOSPITALS)
    assert [len(rows) for rows in raw.values()] == [3, 3, 3, 2]
    np.testing.assert_array_equal(
        raw["switzerland"][0],
        [32, 1, 1, 95, 0, np.nan, 0, 127, 0, 0.7, 1, np.nan, np.nan, 1],
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("28,1,2,130,132", "28,1,2,130", "line 1: expected 14 fields, found 13"),
        (
            "28,1,2,",
            "28,1,5,",
            "line 1, column 'cp': expected one of 1, 2, 3, 4, found",
        ),
        ("28,1,", "28,male,", "line 1, column 'sex': expected a number, found 'male'"),
        ("?,?,?,3", "?,?,?,?", "line 2, column 'num': expected a number"),
        (ROWS["hungarian"], "", "line 1: expected rows of data, found none"),
        (ROWS["hungarian"], ROWS["va"], "the same as in .*processed.va|hungarian"),
        ("29,1,3", "?,1,3", "all rows: expected at least 2 without gaps, found 1"),
    ],
)
def test_errors_name_the_file_and_the_place(folder, old, new, message):
    path = folder / "processed.hungarian.data"
    path.write_text(ROWS["hungarian"].replace(old, new))
    with pytest.raises(DataFileError, match=message):
        heart_disease.load(folder)


def test_seeds_are_those_of_scikit_learn(folder):
    for seed in (-1, 2**33):
        with pytest.raises(ValueError, match=f"seed must be .*, got {seed}"):
            heart_disease.load(folder, seed)
    with pytest.raises(TypeError, match=r"seed must be an int, got 1\.5"):
        heart_disease.load(folder, 1.5)  # pyright: ignore


def test_a_missing_file_says_where_to_get_it(folder):
    (folder / "processed.va.data").unlink()
    with pytest.raises(FileNotFoundError, match=r"processed\.va\.data; fetch .*uci"):
        heart_disease.load(folder)


def test_damaged_files_give_named_errors_or_good_data(folder):
    def check(data):
        for split in data.splits.values():
            assert split.examples["x"].shape[1:] == (13,)
            assert split.examples["x"].dtype == np.float32
            assert np.isfinite(split.examples["x"]).all()
            assert split.examples["y"].dtype == np.int32

    path = folder / "processed.cleveland.data"
    assert survives(path, lambda: heart_disease.load(folder), check) > 50


def test_the_real_hospitals_have_flambys_sizes():
    if not REAL.is_dir():
        pytest.skip(f"no {REAL}")
    assert [len(v) for v in heart_disease.read(REAL).values()] == [303, 294, 123, 200]
    data = heart_disease.load(REAL)
    assert data.train.sizes.tolist() == [199, 172, 30, 85]
    assert data.splits["test"].sizes.tolist() == [104, 89, 16, 45]
    other = heart_disease.load(REAL, seed=0)
    assert other.train.sizes.tolist() == [199, 172, 30, 85]
    assert not np.array_equal(data.train.examples["y"], other.train.examples["y"])
    x = data.train.examples["x"].astype(np.float64)[:, [0, 2, 3, 5, 7]]
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(x.std(0), 1, atol=1e-6)
