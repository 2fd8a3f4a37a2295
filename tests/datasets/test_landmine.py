"""Landmine fields from a MATLAB file the test writes, and from the real npz file."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import landmine

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "landmine"
SIZES = (8, 12)


def write(path):
    rng = np.random.default_rng(0)
    feature, label = (np.empty((1, 2), object) for _ in range(2))
    for i, n in enumerate(SIZES):
        feature[0, i] = rng.normal(size=(n, 9))
        label[0, i] = (np.arange(n) % 4 == 0).astype(np.uint8)[:, None]
    savemat(path, {"feature": feature, "label": label})
    return feature[0], label[0]


def check(data):
    for split in data.splits.values():
        assert split.examples["x"].shape[1:] == (9,)
        assert split.examples["x"].dtype == np.float32
        assert np.isfinite(split.examples["x"]).all()
        assert split.examples["y"].dtype == np.int32
        assert set(np.unique(split.examples["y"])) <= {0, 1}


def test_cells_are_fields(tmp_path):
    feature, label = write(tmp_path / "LandmineData.mat")
    data = landmine.load(tmp_path, test_fraction=0, standardize=False)
    check(data)
    assert data.client_ids == ("0", "1")
    for i in range(2):
        client = data.train.client(i)
        np.testing.assert_array_equal(client["x"], feature[i].astype(np.float32))
        np.testing.assert_array_equal(client["y"], label[i][:, 0])


def test_mines_and_clutter_are_held_out_alike(tmp_path):
    write(tmp_path / "LandmineData.mat")
    data = landmine.load(tmp_path, test_fraction=0.5)
    assert data.train.sizes.tolist() == [4, 6]
    for split in data.splits.values():  # 2 and 3 mines; of 3, two halves are 2 and 1
        assert split.client(0)["y"].sum() == 1
        assert split.client(1)["y"].sum() in (1, 2)


def test_labels_are_zero_or_one(tmp_path):
    path = tmp_path / "landmine.npz"
    np.savez(path, x=np.ones((2, 9)), y=np.array([0, 2]), field=np.array([0, 0]))
    with pytest.raises(DataFileError, match="labels: expected 0 and 1, found 2"):
        landmine.load(path)
    np.savez(path, x=np.ones((2, 8)), y=np.array([0, 1]), field=np.array([0, 0]))
    with pytest.raises(DataFileError, match=r"array 'x': expected shape \[n, 9\]"):
        landmine.load(path)
    with pytest.raises(FileNotFoundError, match=r"LandmineData\.mat .*fetch it from"):
        landmine.load(tmp_path / "nowhere")


def test_damaged_files_give_named_errors_or_good_data(tmp_path):
    path = tmp_path / "LandmineData.mat"
    write(path)
    assert survives(path, lambda: landmine.load(path), check) > 50


def test_the_real_fields():
    if not REAL.is_dir():
        pytest.skip(f"no {REAL}")
    data = landmine.load(REAL)
    check(data)
    sizes = np.sum([split.sizes for split in data.splits.values()], axis=0)
    assert (data.num_clients, sizes.sum()) == (29, 14820)
    assert (sizes.min(), sizes.max()) == (445, 690)
    mines = {name: s.examples["y"].sum() for name, s in data.splits.items()}
    assert sum(mines.values()) == 904
    assert abs(mines["test"] - 226) <= 15  # rounded in each of 29 fields
