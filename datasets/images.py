"""What the readers of image sets share: from stored bytes to x in [0, 1] and labels.

What every `load` of images takes, gives and raises, unless it says otherwise:

Args:
  path: folder that holds the files that the module names, or one of them.
  complete: insist on the published numbers of images; False accepts a part of them.

Returns:
  Train and test, each ``{"x": [n, H, W, C] float32 in [0, 1], "y": [n] int32}``, labels
  from 0, in the original order.

Raises:
  FileNotFoundError: a file is absent; says what to fetch.
  DataFileError: a file is damaged, not what it should be, or a copy of another.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_core.data.packed import Dataset
from fedjax_core.data.readers import npz
from fedjax_core.data.readers.files import DataFileError, find
from fedjax_core.datasets import idx, tables

COUNTS = (60_000, 10_000)  # train and test images of MNIST and its replacements


def to_float(images: np.ndarray) -> np.ndarray:
    """Grey [n, H, W] or colour [n, H, W, C] of 0..255 as float32 [n, H, W, C] / 255."""
    x = images.astype(np.float32)
    x /= 255
    return x[..., None] if x.ndim == 3 else x


def resized(x: np.ndarray, size: int) -> np.ndarray:
    """Images [n, H, W, C] as [n, size, size, C], interpolated linearly.

    Those of 28 pixels lose the frame of four that is around MNIST's digits.
    """
    if x.shape[1] == 28 and size < 28:
        x = x[:, 4:24, 4:24]
    if x.shape[1] == size:
        return x
    shape = (size, size, x.shape[3])
    resize = jax.jit(jax.vmap(lambda one: jax.image.resize(one, shape, "linear")))
    return np.asarray(resize(x))


def some(data: Dataset, num_train: int, num_test: int) -> Dataset:
    """Random examples of both splits, at most so many and always the same."""
    rng, splits = np.random.default_rng(0), []
    for split, most in ((data.train, num_train), (data.test, num_test)):
        rows = rng.permutation(len(split["y"]))[:most]
        splits.append({name: x[rows] for name, x in split.items()})
    return Dataset(*splits)


def mapped(data: Dataset, function: Callable[[np.ndarray], np.ndarray]) -> Dataset:
    """The same examples with a function of all their images in the place of these."""
    splits = {k: {**v, "x": function(v["x"])} for k, v in data.splits.items()}
    return data._replace(**splits)


def as_vectors(data: Dataset) -> Dataset:
    """The same examples with every image as a row of pixels, x ``[n, d]``."""
    return mapped(data, lambda x: x.reshape(len(x), -1))


def to_labels(
    path: Path | str,
    where: str,
    labels: np.ndarray,
    num_images: int,
    num_classes: int,
    first: int = 0,
    what: str = "label",
) -> np.ndarray:
    """Checks labels that run from `first`; returns [n] int32 that run from 0."""
    if len(labels) != num_images:
        wanted = f"one {what} for each of {num_images} images"
        raise DataFileError(path, where, wanted, len(labels))
    last = first + num_classes - 1
    wrong = np.flatnonzero((labels < first) | (labels > last))
    if wrong.size:
        i = wrong[0]
        problem = f"expected {what}s {first} to {last}, found {labels[i]} at row {i}."
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
    """Train and test, each by `read_idx` with its prefix and its count."""
    train, test = (
        read_idx(folder, prefix, source, num_classes, count, **options)
        for prefix, count in zip(prefixes, counts, strict=True)
    )
    if np.array_equal(train.images, test.images):
        copy = f"a copy of {train.image_path}"
        raise DataFileError(test.image_path, "content", "images of its own", copy)
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

    `folder` holds ``<prefix>images-idx3-ubyte.gz`` and
    ``<prefix>labels-idx1-ubyte.gz``, which may also be unpacked, or a folder "gzip"
    with them. `source` says where to get a file, {} stands for its name; `count` is the
    number of images, None for any; labels run from `first_label`. In files that are
    `transposed` an image comes column by column.
    """
    files = (_names(f"{prefix}{k}-ubyte") for k in ("images-idx3", "labels-idx1"))
    image_path, label_path = (find(folder, n, source.format(n[0])) for n in files)
    images = idx.read(image_path, (count, 28, 28), np.uint8)
    labels = idx.read(label_path, (count,), np.uint8)
    return IdxPair(
        image_path,
        images.swapaxes(1, 2) if transposed else images,
        label_path,
        to_labels(label_path, "labels", labels, len(images), num_classes, first_label),
    )


def from_npz(
    path: Path, num_classes: int, shape: Sequence[int], counts: Sequence[int | None]
) -> Dataset:
    """Train and test from the arrays x_train, y_train, x_test and y_test.

    Images have the `shape` and are uint8, `counts` are how many, None for any number.
    """
    names = {split: (f"x_{split}", f"y_{split}") for split in ("train", "test")}
    pairs = read_npz(path, names, shape, (), counts)
    splits = []
    for split, (images, labels) in pairs.items():
        where = f"array '{names[split][1]}'"
        y = to_labels(path, where, labels, len(images), num_classes)
        splits.append({"x": to_float(images), "y": y})
    return Dataset(*splits)


def read_npz(
    path: Path | str,
    names: Mapping[str, Sequence[str]],
    shape: Sequence[int],
    label_shape: Sequence[int],
    counts: Sequence[int | None],
) -> dict[str, list[np.ndarray]]:
    """Per split, uint8 images [n, *shape] and ints [n, *label_shape], unchecked.

    `names` are the arrays of a split, images first; `counts` the images in each split,
    None for any number.
    """
    expected: dict[str, npz.Expected] = {}
    for (x_name, *others), n in zip(names.values(), counts, strict=True):
        expected[x_name] = (np.uint8, (n, *shape))
        expected |= dict.fromkeys(others, (np.integer, (n, *label_shape)))
    arrays = npz.read(path, expected)
    return {split: [arrays[k] for k in keys] for split, keys in names.items()}


def hold_out(keys: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Chooses test images, a share of those of every key [n], rounded: [n] bool."""
    return tables.choose(
        keys, fraction, np.random.default_rng(seed).permutation, keep=0
    )


def find_npz(path: Path | str, names: Sequence[str]) -> Path | None:
    """The npz file that `path` is, or the first of `names` in it; None without one."""
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
