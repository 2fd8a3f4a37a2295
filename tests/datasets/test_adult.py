"""Adult: original files written by the test, and the real rows."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import adult

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "adult_income"

TRAIN = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White,\
 Male, 2174, 0, 40, United-States, <=50K
50, Private, 83311, Doctorate, 16, Divorced, Exec-managerial, Husband, Black, Female,\
 0, 10, 13, Cuba, >50K
31, ?, 83311, Doctorate, 16, Divorced, ?, Husband, Black, Female, 0, 0, 13, Cuba, >50K
41, Private, 83315, Doctorate, 16, Divorced, Sales, Husband, Black, Female,\
 0, 20, 23, Cuba, <=50K

"""
TEST = """\
|1x3 Cross validator
25, Private, 226802, Bachelors, 7, Never-married, Sales, Own-child, Black, Male, 0, 0,\
 40, United-States, >50K.
25, Private, 226802, 11th, 7, Never-married, Sales, Own-child, Black, Male, 0, 0, 40,\
 United-States, <=50K.
"""
CSV = """\
age,type_employer,fnlwgt,education,education_num,marital,occupation,relationship,race,\
sex,capital_gain,capital_loss,hr_per_week,country,income
""" + TRAIN.replace(", ", ",")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adult.data").write_text(TRAIN)
    (tmp_path / "adult.test").write_text(TEST)
    return tmp_path


def test_numbers_come_first_then_a_column_per_level(folder):
    data = adult.load(folder, standardize=False)
    assert data.client_ids == ("11th", "Bachelors", "Doctorate")
    assert data.train.sizes.tolist() == [0, 1, 2]
    assert data.splits["test"].sizes.tolist() == [1, 1, 0]
    assert data.train.examples["y"].tolist() == [0, 1, 0]
    assert data.splits["test"].examples["y"].tolist() == [0, 1]
    x = data.train.client(1)["x"]
    assert x.dtype == np.float32
    assert x.shape == (1, 105)
    assert x[0, :6].tolist() == [39, 77516, 13, 2174, 0, 40]
    # Places of the levels in adult.names: State-gov 5 of 8, Bachelors 0 of 16,
    # Never-married 2 of 7, Adm-clerical 8 of 14, Not-in-family 3 of 6, White 0 of 5,
    # Male 1 of 2, United-States 0 of 41.
    starts = 6 + np.cumsum([0, 8, 16, 7, 14, 6, 5, 2])
    ones = np.add(starts, [5, 0, 2, 8, 3, 0, 1, 0])
    np.testing.assert_array_equal(np.flatnonzero(x[0, 6:]) + 6, ones)


def test_numbers_are_standardised_with_train_rows(folder):
    data = adult.load(folder)
    # capital-loss of the three complete train rows: 0, 10, 20.
    loss = np.concatenate([data.train.client(i)["x"][:, 4] for i in (1, 2)])
    np.testing.assert_allclose(loss, [-(1.5**0.5), 0, 1.5**0.5], 1e-6)
    # Hours are 40, 13, 23 there and 40 in both test rows.
    hours = np.array([40, 13, 23])
    got = data.splits["test"].examples["x"][:, 5]
    np.testing.assert_allclose(got, (40 - hours.mean()) / hours.std(), 1e-6)


@pytest.mark.parametrize(
    ("client", "names"),
    [
        ("occupation", ("Adm-clerical", "Exec-managerial", "Sales")),
        ("country", ("Cuba", "United-States")),
    ],
)
def test_other_clients(folder, client, names):
    assert adult.load(folder, client).client_ids == names


def test_the_table_with_a_header_gives_the_same_rows(folder):
    path = folder / "adult_income.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    a = adult.load(path, test_fraction=0)
    b = adult.load(folder, test_fraction=0)
    assert a.test is None
    assert a.client_ids == b.client_ids
    np.testing.assert_array_equal(a.train.examples["x"], b.train.examples["x"])
    half = adult.load(path, test_fraction=0.5)
    assert half.splits["test"].sizes.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("data", ", White", "", "line 1: expected 15 fields, found 14"),
        ("data", "Sales", "Selling", "line 4, column 'occupation': expected one of 'T"),
        ("data", "77516", "many", "line 1, column 'fnlwgt': expected a number"),
        ("data", TRAIN, "", "line 1: expected rows of data, found none"),
        ("data", "\n", "\xe5\n", "line 1, byte .*: expected utf-8 text"),
        ("test", "K.", "K", "line 2, column 'income': expected one of '<=50K"),
        ("data", TRAIN, TRAIN.split("\n")[2] + "\n", "expected rows without gaps"),
    ],
)
def test_errors_name_the_line_and_the_column(folder, name, old, new, message):
    path = folder / f"adult.{name}"
    path.write_text(path.read_text().replace(old, new), encoding="latin-1")
    with pytest.raises(DataFileError, match=message) as raised:
        adult.load(folder)
    assert str(path) in str(raised.value)


def test_wrong_arguments_and_missing_files(folder):
    with pytest.raises(ValueError, match="client must be one of 'education', 'occupat"):
        adult.load(folder, "race")  # pyright: ignore
    with pytest.raises(ValueError, match="test_fraction must be in"):
        adult.load(folder, test_fraction=2)
    (folder / "adult.test").unlink()
    with pytest.raises(FileNotFoundError, match=r"adult\.test; fetch it from .*uci"):
        adult.load(folder)
    assert adult.load(folder, test_fraction=0).train.num_examples == 3


@pytest.mark.parametrize("name", ["adult.data", "adult_income.csv.gz"])
def test_damaged_files_give_named_errors_or_good_data(tmp_path, name):
    def check(data):
        for split in data.splits.values():
            assert split.examples["x"].shape[1:] == (105,)
            assert split.examples["x"].dtype == np.float32
            assert np.isfinite(split.examples["x"]).all()
            assert set(np.unique(split.examples["y"])) <= {0, 1}

    path = tmp_path / name
    packed = name.endswith("gz")
    path.write_bytes(gzip.compress(CSV.encode()) if packed else TRAIN.encode())
    assert survives(path, lambda: adult.load(path, test_fraction=0.5), check) > 50


def test_the_real_rows():
    if not REAL.is_dir():
        pytest.skip(f"no {REAL}")
    data = adult.load(REAL, test_fraction=0.2)
    total = sum(split.num_examples for split in data.splits.values())
    positive = sum(split.examples["y"].sum() for split in data.splits.values())
    assert (total, positive, data.num_clients) == (30162, 7508, 16)
    sizes = np.sum([split.sizes for split in data.splits.values()], axis=0)
    assert sizes[data.client_ids.index("Doctorate")] == 375
    assert adult.load(REAL, "occupation", test_fraction=0).num_clients == 14
    assert adult.load(REAL, "country", test_fraction=0).num_clients == 41
