"""MedMNIST's npz files: every flag in small, and PneumoniaMNIST where it is."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import medmnist, partition

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "pneumoniamnist"
SIZES = {"train": 4, "val": 2, "test": 3}


def arrays(flag, size=28):
    info, rng = medmnist.FLAGS[flag], np.random.default_rng(0)
    colour = (3,) if info.channels == 3 else ()
    out = {}
    for split, n in SIZES.items():
        out[f"{split}_images"] = rng.integers(
            0, 256, (n, size, size, *colour), np.uint8
        )
        wide, top = (14, 2) if flag == "chestmnist" else (1, info.classes)
        out[f"{split}_labels"] = rng.integers(0, top, (n, wide), np.uint8)
    return out


def check(dataset, flag, size=28):
    info = medmnist.FLAGS[flag]
    for split in dataset.splits.values():
        n = len(split["x"])
        assert split["x"].dtype == np.float32
        assert split["x"].shape == (n, size, size, info.channels)
        assert split["x"].min() >= 0
        assert split["x"].max() <= 1
        if flag == "chestmnist":
            assert split["y"].dtype == np.float32
            assert split["y"].shape == (n, 14)
            assert set(np.unique(split["y"])) <= {0, 1}
        else:
            assert split["y"].dtype == np.int32
            assert split["y"].shape == (n,)
            assert split["y"].min() >= 0
            assert split["y"].max() < info.classes


@pytest.mark.parametrize("flag", medmnist.FLAGS)
def test_every_flag(tmp_path, flag):
    stored = arrays(flag)
    np.savez(tmp_path / f"{flag}.npz", **stored)  # pyright: ignore
    for path in (tmp_path, tmp_path / f"{flag}.npz"):
        dataset = medmnist.load(path, flag, complete=False)
        check(dataset, flag)
    for name, split in zip(
        ("train", "test", "val"), dataset.splits.values(), strict=True
    ):
        x = stored[f"{name}_images"].reshape(split["x"].shape) / np.float32(255)
        np.testing.assert_array_equal(split["x"], x)
        y = stored[f"{name}_labels"].reshape(split["y"].shape)
        np.testing.assert_array_equal(split["y"], y)


def test_other_sizes(tmp_path):
    np.savez(tmp_path / "octmnist_64.npz", **arrays("octmnist", 64))  # pyright: ignore
    check(medmnist.load(tmp_path, "octmnist", 64, complete=False), "octmnist", 64)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("val_images", lambda a: a[..., 0], r"shape \[n, 28, 28, 3\], found"),
        ("val_images", lambda a: a / 255, "expected uint8 values, found float64"),
        ("val_labels", lambda a: a[:, 0], r"shape \[n, 1\], found \[2\]"),
        ("val_labels", lambda a: a[1:], "one label for each of 2 images, found 1"),
        ("val_labels", lambda a: a * 0 + 7, "labels 0 to 6, found 7 at row 0"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, name, change, message):
    stored = arrays("dermamnist")
    stored[name] = change(stored[name])
    np.savez(tmp_path / "dermamnist.npz", **stored)  # pyright: ignore
    with pytest.raises(DataFileError, match=f"array '{name}': .*{message}"):
        medmnist.load(tmp_path, "dermamnist", complete=False)


def test_chest_labels_are_0_or_1(tmp_path):
    stored = arrays("chestmnist")
    stored["test_labels"][1, 13] = 2
    np.savez(tmp_path / "chestmnist.npz", **stored)  # pyright: ignore
    with pytest.raises(
        DataFileError, match=r"'test_labels': .* 0 to 1, found 2 at row 1"
    ):
        medmnist.load(tmp_path, "chestmnist", complete=False)


def test_chest_images_go_to_clients_by_one_finding_or_by_none(tmp_path):
    np.savez(tmp_path / "chestmnist.npz", **arrays("chestmnist"))  # pyright: ignore
    dataset = medmnist.load(tmp_path, "chestmnist", complete=False)
    for data in (
        partition.dirichlet(dataset, 2, 1.0, label=("y", 3)),
        partition.iid(dataset, 2),
    ):
        for name, split in data.splits.items():
            rows = [tuple(y) for y in split.examples["y"]]
            assert sorted(rows) == sorted(tuple(y) for y in dataset.splits[name]["y"])


def test_counts_and_md5(tmp_path, monkeypatch):
    path = tmp_path / "bloodmnist.npz"
    np.savez(path, **arrays("bloodmnist"))  # pyright: ignore
    with pytest.raises(DataFileError, match=r"\[11959, 28, 28, 3\], found \[4, 28,"):
        medmnist.load(tmp_path, "bloodmnist")
    with pytest.raises(DataFileError, match=r"bloodmnist.npz, MD5: expected 7053d0"):
        medmnist.load(tmp_path, "bloodmnist", verify=True)
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    info = medmnist.FLAGS["bloodmnist"]._replace(md5=md5)
    monkeypatch.setitem(medmnist.FLAGS, "bloodmnist", info)
    dataset = medmnist.load(tmp_path, "bloodmnist", verify=True, complete=False)
    check(dataset, "bloodmnist")


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="flag must be one of 'pathmnist'"):
        medmnist.load(tmp_path, "mnist")
    with pytest.raises(ValueError, match="size must be one of 28, 64"):
        medmnist.load(tmp_path, "octmnist", 32)
    with pytest.raises(ValueError, match="verify must be False for size 64"):
        medmnist.load(tmp_path, "octmnist", 64, verify=True)
    with pytest.raises(
        FileNotFoundError, match=r"octmnist_64.npz; fetch it from .*zenodo"
    ):
        medmnist.load(tmp_path, "octmnist", 64)


def test_random_damage(tmp_path):
    path = tmp_path / "retinamnist.npz"
    np.savez_compressed(path, **arrays("retinamnist"))  # pyright: ignore

    def read():
        return medmnist.load(tmp_path, "retinamnist", complete=False)

    assert survives(path, read, lambda d: check(d, "retinamnist")) > 100


def test_the_real_pneumoniamnist():
    if not REAL.is_dir():
        pytest.skip("shared/data/pneumoniamnist is absent")
    dataset = medmnist.load(REAL, "pneumoniamnist")
    check(dataset, "pneumoniamnist")
    counts = {k: np.bincount(s["y"]).tolist() for k, s in dataset.splits.items()}
    assert counts == {
        "train": [1214, 3494],
        "test": [234, 390],
        "validation": [135, 389],
    }
