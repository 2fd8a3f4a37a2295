"""WISDM: the original ARFF layout written by the test, and the real windows."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import wisdm

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "wisdm_activity"

NAMES = [n.upper() for n in wisdm.FEATURES]
HEADER = "\n".join(
    [
        "% a comment",
        "@relation person_activity_recognition",
        "",
        '@attribute "UNIQUE_ID" numeric',
        '@attribute "user"',
        *(f'@attribute "{n}" numeric' for n in NAMES),
        '@attribute "class" { "Walking" , "Jogging" }',
        "",
        "@data",
        "",
    ]
)
# User, first feature, gap in the last or not, activity.
ROWS = [
    (10, 1.0, "2", "Walking"),
    (9, 2.0, "?", "Standing"),
    (10, 4.0, "6", '"Jogging"'),
    (9, 5.0, "1", "Sitting"),
]
# The last line has no line end.
ARFF = HEADER + "\n".join(
    f"{i},{user},{first},{'0.5,' * 41}{last},{activity}"
    for i, (user, first, last, activity) in enumerate(ROWS)
)
CSV = "\n".join(
    [
        ",".join(["user", *wisdm.FEATURES, "activity"]),
        *(
            f"{user},{first},{'0.5,' * 41}{last.strip('?')},{activity}"
            for user, first, last, activity in ROWS
        ),
    ]
)


def write(folder, kind):
    if kind == "arff":
        path = folder / "WISDM_ar_v1.1_transformed.arff"
        path.write_text(ARFF)
    else:
        path = folder / "wisdm_activity.csv.gz"
        path.write_bytes(gzip.compress(CSV.encode()))
    return path


@pytest.mark.parametrize("kind", ["arff", "csv.gz"])
def test_both_layouts(tmp_path, kind):
    write(tmp_path, kind)
    data = wisdm.load(tmp_path, test_fraction=0, standardize=False)
    assert data.client_ids == ("9", "10")
    assert data.test is None
    x, y = data.train.examples["x"], data.train.examples["y"]
    assert x.dtype == np.float32
    assert y.dtype == np.int32
    assert x[:, 0].tolist() == [2, 5, 1, 4]
    assert np.all(x[:, 1:42] == 0.5)
    assert x[:, 42].tolist() == [3, 1, 2, 6]  # the gap is the mean of 1, 2 and 6
    assert [wisdm.ACTIVITIES[i] for i in y] == [
        "Standing",
        "Sitting",
        "Walking",
        "Jogging",
    ]


def test_only_train_rows_fill_gaps_and_scale(tmp_path):
    write(tmp_path, "arff")
    data = wisdm.load(tmp_path, test_fraction=0.5)
    assert data.train.sizes.tolist() == data.splits["test"].sizes.tolist() == [1, 1]
    # Two train rows: their first feature becomes -1 and 1 (or 1 and -1).
    assert sorted(data.train.examples["x"][:, 0].tolist()) == [-1, 1]
    assert np.all(data.train.examples["x"][:, 1:42] == 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@data", "@date", "line 55: expected @data, found the end"),
        ('"X3"', '"X2"', "lines 1 to 51: expected the attributes UNIQUE_ID, user"),
        ('@attribute "user"\n', "", "lines 1 to 50: expected the attributes"),
        ("Walking\n", "Swimming\n", "line 52, column 'class': expected one of 'Walkin"),
        (",Walking\n", "\n", "line 52: expected 46 fields, found 45"),
        (
            "1,9,2.0",
            "1,9,fast",
            "line 53, column 'x0': expected a number, found 'fast'",
        ),
        ("1,9,2.0", "1,?,2.0", "line 53, column 'user': expected a whole number"),
        (ARFF[len(HEADER) :], "", "line 52: expected rows of data, found none"),
        (ARFF, "", "line 0: expected @data, found the end"),
    ],
)
def test_errors_name_the_line_and_the_column(tmp_path, old, new, message):
    path = write(tmp_path, "arff")
    path.write_text(ARFF.replace(old, new))
    with pytest.raises(DataFileError, match=message) as raised:
        wisdm.load(tmp_path)
    assert str(path) in str(raised.value)


def test_a_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"transformed\.arff .*fetch it from"):
        wisdm.load(tmp_path)


@pytest.mark.parametrize("kind", ["arff", "csv.gz"])
def test_damaged_files_give_named_errors_or_good_data(tmp_path, kind):
    def check(data):
        for split in data.splits.values():
            assert split.examples["x"].shape[1:] == (43,)
            assert split.examples["x"].dtype == np.float32
            assert np.isfinite(split.examples["x"]).all()
            assert set(np.unique(split.examples["y"])) <= set(range(6))

    path = write(tmp_path, kind)
    assert survives(path, lambda: wisdm.load(path), check) > 50


def test_the_real_windows():
    if not REAL.is_dir():
        pytest.skip(f"no {REAL}")
    data = wisdm.load(REAL)
    sizes = np.sum([split.sizes for split in data.splits.values()], axis=0)
    assert (data.num_clients, sizes.sum()) == (36, 5418)
    assert (sizes.min(), sizes.max()) == (60, 273)
    assert data.client_ids == tuple(str(i + 1) for i in range(36))
    y = np.concatenate([split.examples["y"] for split in data.splits.values()])
    assert np.bincount(y).tolist() == [2081, 1625, 632, 528, 306, 246]
