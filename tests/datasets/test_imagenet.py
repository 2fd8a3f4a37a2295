"""Subsets of small ImageNet, on files of a few classes."""

import numpy as np
import pytest

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import imagenet

BIRD, DOG = imagenet.SUBSETS["birds"][0], imagenet.SUBSETS["dogs"][0]
WORDS = f"""\
n00000001 {BIRD}
n00000001 {DOG}
{BIRD} n00000002
n00000002 n00000003
n00000002 n00000004
n00000005 n00000003
{DOG} n00000006
"""
CLASSES = "n00000006 1 hound\nn00000004 2 wren\nn00000003 3 owl\nn00000009 4 car\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "wordnet.is_a.txt").write_text(WORDS)
    (tmp_path / "map_clsloc.txt").write_text(CLASSES)
    rng = np.random.default_rng(0)
    for i, labels in ((1, [1, 2, 3, 4]), (3, [3, 4, 2])):
        data = rng.integers(0, 256, (len(labels), 3072), np.uint8)
        path = tmp_path / f"train_data_batch_{i}.npz"
        np.savez(path, data=data, labels=np.array(labels), mean=data.mean(0))
    return tmp_path


def test_a_subset_is_what_lies_below_a_word(folder):
    assert imagenet.below(folder, BIRD) == {
        BIRD, "n00000002", "n00000003", "n00000004"
    }  # fmt: skip
    birds = imagenet.load_subset(folder, "birds", complete=False)
    assert birds["y"].tolist() == [0, 1, 1, 0]
    assert birds["x"].shape == (4, 32, 32, 3)
    first = np.load(folder / "train_data_batch_1.npz")["data"][1]
    for channel in range(3):
        plane = first[channel * 1024 : (channel + 1) * 1024].reshape(32, 32)
        np.testing.assert_allclose(birds["x"][0, ..., channel], plane / 255, rtol=1e-6)
    by_word = imagenet.load_subset(folder, "n00000003", complete=False)
    np.testing.assert_array_equal(by_word["x"], birds["x"][birds["y"] == 1])
    assert imagenet.load_subset(folder, "dogs", complete=False)["y"].tolist() == [0]


def test_what_is_wrong_with_files_is_named(folder):
    with pytest.raises(FileNotFoundError, match=r"train_data_batch_2.npz; fetch it"):
        imagenet.load_subset(folder, "birds")
    with pytest.raises(ValueError, match="subset must be one of 'devices', 'birds'"):
        imagenet.load_subset(folder, "cats", complete=False)
    for i in range(2, 11):
        copy = (folder / "train_data_batch_1.npz").read_bytes()
        (folder / f"train_data_batch_{i}.npz").write_bytes(copy)
    with pytest.raises(DataFileError, match="expected 76541 images below n01503061"):
        imagenet.load_subset(folder, "birds")
    (folder / "map_clsloc.txt").write_text("n00000003 1\n")
    with pytest.raises(DataFileError, match=r"line 1.*expected 3 words, found 2"):
        imagenet.load_subset(folder, "birds")
