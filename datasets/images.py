"""What the readers of image sets share: from stored bytes to x in [0, 1] and labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_core.data.packed import Dataset
from fedjax_core.data.readers import npz
from fedjax_core.data.readers.files import DataFileError, find
from fedjax_core.datasets import idx

COUNTS = (60_000, 10_000)  # train and test images of MNIST and its replacements


def to_float(images: np.ndarray) -> np.ndarray:
    """Grey [n, H, W] or colour [n, H, W, C] of 0..255 as float32 [n, H, W, C] / 255."""
    x = images.astype(np.float32)
    x /= 255
    return x[..., None] if x.ndim == 3 else x


def to_labels(
    path: Path | str,
    where: str,
    labels: np.ndarray,
    num_images: int,
    num_classes: int,
    first: int = 0,
) -> np.ndarray:
    """Checks labels that run from `first`; returns [n] int32 that run from 0.

    Raises:
      DataFileError: not one label per image, or one that is no class.
    """
    if len(labels) != num_images:
        problem = f"expected one label for each of {num_images} images, found"
        raise DataFileError(path, where, f"{problem} {len(labels)}.")
    last = first + num_classes - 1
    wrong = np.flatnonzero((labels < first) | (labels > last))
    if wrong.size:
        i = wrong[0]
        problem = f"expected labels {first} to {last}, found {labels[i]} at row {i}."
        raise DataFileError(path, where, problem)
    return labels.astype(np.int32) - np.int32(first)


def from_idx(
    folder: Path | str,
    prefixes: Sequence[str],
    source: str,
    num_classes: int,
    counts: Sequence[int | None],
    **options: Any,
) -> Dataset:
    """Train and test, each by `read_idx` with its prefix and its count.

    Raises:
      FileNotFoundError, DataFileError: as `read_idx`; also if test is a copy of train.
    """
    train, test = (
        read_idx(folder, prefix, source, num_classes, count, **options)
        for prefix, count in zip(prefixes, counts, strict=True)
    )
    if np.array_equal(train.images, test.images):
        problem = f"expected images of its own, found a copy of {train.image_path}."
        raise DataFileError(test.image_path, "content", problem)
    return Dataset(*({"x": to_float(s.images), "y": s.labels} for s in (train, test)))


class IdxPair(NamedTuple):
    """Images and their labels, and the files they are from."""

    image_path: Path
    images: np.ndarray  # [n, 28, 28] uint8
    label_path: Path
    labels: np.ndarray  # [n] int32, from 0


def read_idx(
    folder: Path | str,
    prefix: str,
    source: str,
    num_classes: int,
    count: int | None,
    first_label: int = 0,
    transposed: bool = False,
) -> IdxPair:
    """Reads 28x28 grey images and their labels from two idx files.

    Args:
      folder: holds the files, or a folder "gzip" with them.
      prefix: of the files' names: "train-" for ``train-images-idx3-ubyte.gz`` and
        ``train-labels-idx1-ubyte.gz``, which may also be unpacked.
      source: where to get the files, for the error; {} stands for a file's name.
      num_classes: number of classes.
      count: number of images, None for any.
      first_label: the smallest label in the file.
      transposed: the file holds an image column by column.

    Raises:
      FileNotFoundError: a file is absent.
      DataFileError: a file is damaged or not what it should be.
    """
    image_path, label_path = (
        find(folder, names, source.format(names[0]))
        for names in map(
            _names, (f"{prefix}images-idx3-ubyte", f"{prefix}labels-idx1-ubyte")
        )
    )
    images = idx.read(image_path, (count, 28, 28), np.uint8)
    labels = idx.read(label_path, (count,), np.uint8)
    return IdxPair(
        image_path,
        images.swapaxes(1, 2) if transposed else images,
        label_path,
        to_labels(label_path, "labels", labels, len(images), num_classes, first_label),
    )


def from_npz(
    path: Path,
    num_classes: int,
    shape: Sequence[int],
    counts: Sequence[int | None],
) -> Dataset:
    """Train and test from the arrays x_train, y_train, x_test and y_test.

    Args:
      path: the file.
      num_classes: number of classes, labelled from 0.
      shape: of one image, uint8.
      counts: images in train and test, None for any number.

    Raises:
      DataFileError: the file is damaged, or an array is not what it should be.
    """
    expected: dict[str, npz.Expected] = {}
    for split, count in zip(("train", "test"), counts, strict=True):
        expected[f"x_{split}"] = (np.uint8, (count, *shape))
        expected[f"y_{split}"] = (np.integer, (count,))
    arrays = npz.read(path, expected)
    splits = []
    for split in ("train", "test"):
        images, labels = arrays[f"x_{split}"], arrays[f"y_{split}"]
        where = f"array 'y_{split}'"
        y = to_labels(path, where, labels, len(images), num_classes)
        splits.append({"x": to_float(images), "y": y})
    return Dataset(*splits)


def find_npz(path: Path | str, names: Sequence[str]) -> Path | None:
    """The npz file that `path` is, or the first of `names` in it; None without one.

    Raises:
      FileNotFoundError: `path` is the name of an npz file that is absent.
    """
    path = Path(path)
    if path.suffix == ".npz":
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}.")
        return path
    return next((path / name for name in names if (path / name).is_file()), None)


def _names(name: str) -> list[str]:
    # As published; unpacked; by a program that puts a dot; EMNIST's archive.
    dotted = name.replace("-idx", ".idx")
    return [f"{name}.gz", name, dotted, f"gzip/{name}.gz", f"gzip/{name}"]
