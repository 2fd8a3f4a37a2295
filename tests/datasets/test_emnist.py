"""EMNIST's files hold images column by column, and letters from 1."""

import numpy as np
import pytest
from tests.datasets import idx_files
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import emnist


def write(folder, selection, labels, end=".gz"):
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28), np.uint8)
    parts = {"train": images, "test": 255 - images}
    for part, of_part in parts.items():
        prefix = f"emnist-{selection}-{part}-"
        idx_files.write_pair(folder, prefix, of_part, np.array(labels, np.uint8), end)
    return parts


@pytest.mark.parametrize("selection", emnist.SELECTIONS)
@pytest.mark.parametrize("folder", ["", "gzip"])
def test_images_stand_upright_and_labels_start_at_0(tmp_path, selection, folder):
    num_classes, _ = emnist.SELECTIONS[selection]
    first = selection == "letters"
    stored = np.array([0, num_classes - 1, 3]) + first
    parts = write(tmp_path / folder, selection, stored)
    dataset = emnist.load(tmp_path, selection, complete=False)
    for part, split in dataset.splits.items():
        assert split["x"].dtype == np.float32
        assert split["x"].shape == (3, 28, 28, 1)
        for got, image in zip(split["x"], parts[part], strict=True):
            np.testing.assert_array_equal(got[..., 0], image.T / np.float32(255))
        assert split["y"].dtype == np.int32
        np.testing.assert_array_equal(split["y"], [0, num_classes - 1, 3])


def test_labels_out_of_range(tmp_path):
    write(tmp_path, "letters", [1, 0])
    with pytest.raises(DataFileError, match=r"labels 1 to 26, found 0 at row 1"):
        emnist.load(tmp_path, "letters", complete=False)
    write(tmp_path, "digits", [9, 10])
    with pytest.raises(DataFileError, match=r"labels 0 to 9, found 10 at row 1"):
        emnist.load(tmp_path, "digits", complete=False)


def test_a_part_must_be_asked_for(tmp_path):
    write(tmp_path, "balanced", [1, 2])
    with pytest.raises(DataFileError, match=r"\[112800, 28, 28\], found \[2, 28, 28\]"):
        emnist.load(tmp_path, "balanced")


def test_absent_files_and_selections(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"emnist-digits-train-images-.*nist.gov"
    ):
        emnist.load(tmp_path, "digits")
    with pytest.raises(ValueError, match="selection must be one of 'byclass'"):
        emnist.load(tmp_path, "capitals")


def test_random_damage(tmp_path):
    write(tmp_path, "letters", [1, 26, 5, 5], end="")

    def check(dataset):
        assert dataset.train["x"].shape == (4, 28, 28, 1)
        assert dataset.train["y"].min() >= 0
        assert dataset.train["y"].max() <= 25

    path = tmp_path / "emnist-letters-train-images-idx3-ubyte"
    assert survives(path, lambda: emnist.load(tmp_path, "letters", False), check) > 80
