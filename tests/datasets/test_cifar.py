"""CIFAR's binary versions, on records written byte by byte."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import cifar

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "cifar10_subset"
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def record(labels, image):
    """Labels, then all red, all green and all blue values, row by row."""
    planes = [image[row, column, c] for c in range(3) for row in range(32)
              for column in range(32)]  # fmt: skip
    return bytes([*labels, *planes])


def images(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), np.uint8)


def write_cifar10(folder, n=2):
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(BATCHES):
        content = [record([(i + j) % 10], x) for j, x in enumerate(images(n, i))]
        (folder / f"{name}.bin").write_bytes(b"".join(content))


def write_cifar100(folder, n=2):
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(("train", "test")):
        content = [record([19 - j, 99 - j], x) for j, x in enumerate(images(n, i))]
        (folder / f"{name}.bin").write_bytes(b"".join(content))


def check(split, num_classes, n=None):
    assert split["x"].dtype == np.float32
    assert split["y"].dtype == np.int32
    assert split["x"].shape == (len(split["y"]), 32, 32, 3)
    assert n in (None, len(split["y"]))
    assert split["x"].min() >= 0
    assert split["x"].max() <= 1
    assert split["y"].min() >= 0
    assert split["y"].max() < num_classes


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar10(tmp_path, inner):
    write_cifar10(tmp_path / inner)
    dataset = cifar.load_cifar10(tmp_path, complete=False)
    check(dataset.train, 10, 10)
    check(dataset.test, 10, 2)
    x = np.concatenate([images(2, i) for i in range(5)])
    np.testing.assert_array_equal(dataset.train["x"], x / np.float32(255))
    np.testing.assert_array_equal(dataset.test["x"], images(2, 5) / np.float32(255))
    assert dataset.train["y"].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert dataset.test["y"].tolist() == [5, 6]


@pytest.mark.parametrize("inner", ["", "cifar-100-binary"])
def test_cifar100(tmp_path, inner):
    write_cifar100(tmp_path / inner)
    dataset = cifar.load_cifar100(tmp_path, complete=False)
    for i, split in enumerate(dataset.splits.values()):
        check(split, 100, 2)
        np.testing.assert_array_equal(split["x"], images(2, i) / np.float32(255))
        assert split["y"].tolist() == [99, 98]
        assert split["coarse"].tolist() == [19, 18]
        assert split["coarse"].dtype == np.int32


def test_damage_is_named(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    good = path.read_bytes()
    for content, message in (
        (b"", "offset 0: expected whole records of 3073 bytes, found 0 bytes"),
        (good[:-1], "offset 3073: .* records of 3073 bytes, found 3072 bytes"),
        (good + b"\1", "offset 6146: .* found 1 bytes"),
        (good[:3073] + b"\x0a" + good[3074:], "labels 0 to 9, found 10 at row 1"),
        ((tmp_path / "data_batch_1.bin").read_bytes(), "found a copy of .*batch_1.bin"),
        (gzip.compress(good)[:50], "gzip stream: damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataFileError, match=f"data_batch_3.bin, .*{message}"):
            cifar.load_cifar10(tmp_path, complete=False)
    path.write_bytes(gzip.compress(good))
    check(cifar.load_cifar10(tmp_path, complete=False).train, 10, 10)
    with pytest.raises(DataFileError, match=r"expected 10000 records .*, found 2"):
        cifar.load_cifar10(tmp_path)


def test_coarse_labels_out_of_range(tmp_path):
    write_cifar100(tmp_path)
    (tmp_path / "test.bin").write_bytes(record([20, 3], images(1)[0]))
    with pytest.raises(DataFileError, match=r"byte 0 of each .* 0 to 19, found 20"):
        cifar.load_cifar100(tmp_path, complete=False)


def test_pickles_are_refused(tmp_path):
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    (inner / "data_batch_1").write_bytes(pickle.dumps({b"data": 1}))
    with pytest.raises(DataFileError, match=r"data_batch_1, .* a pickle, which could"):
        cifar.load_cifar10(tmp_path)
    with pytest.raises(DataFileError, match=r"pickle, .*cifar-10-binary.tar.gz"):
        cifar.load_cifar10(inner)
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": 1}))
    with pytest.raises(DataFileError, match=r"pickle, .*cifar-100-binary.tar.gz"):
        cifar.load_cifar100(tmp_path)


def test_absent_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data_batch_1.bin .*cifar-10-binary"):
        cifar.load_cifar10(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"train.bin .*cifar-100-binary.tar.gz"):
        cifar.load_cifar100(tmp_path)
    write_cifar10(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_batch.bin"):
        cifar.load_cifar10(tmp_path)


def test_npz(tmp_path):
    x, y = images(3), np.array([0, 9, 4], np.uint8)
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    for path in (tmp_path, tmp_path / "cifar10.npz"):
        dataset = cifar.load_cifar10(path, complete=False)
        np.testing.assert_array_equal(dataset.train["x"], x / np.float32(255))
        np.testing.assert_array_equal(dataset.train["y"], y)
        check(dataset.test, 10, 1)
    with pytest.raises(DataFileError, match=r"shape \[50000, 32, 32, 3\], found \[3,"):
        cifar.load_cifar10(tmp_path)


def test_random_damage(tmp_path):
    write_cifar10(tmp_path, n=1)
    write_cifar100(tmp_path, n=1)

    def read10():
        return cifar.load_cifar10(tmp_path, complete=False)

    def read100():
        return cifar.load_cifar100(tmp_path, complete=False)

    path = tmp_path / "data_batch_2.bin"
    assert survives(path, read10, lambda d: check(d.train, 10)) > 50
    path = tmp_path / "train.bin"
    assert survives(path, read100, lambda d: check(d.train, 100)) > 50


def test_the_real_subset():
    if not REAL.is_dir():
        pytest.skip("shared/data/cifar10_subset is absent")
    dataset = cifar.load_cifar10(REAL)
    check(dataset.train, 10, 4000)
    check(dataset.test, 10, 1000)
    assert dataset.train["y"][:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert np.bincount(dataset.test["y"]).tolist() == [100] * 10
