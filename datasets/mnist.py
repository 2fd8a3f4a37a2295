"""MNIST: 70,000 handwritten digits of 28x28 pixels, pooled or by their writers.

60,000 training and 10,000 test images of 10 classes, 5,421 to 6,742 and 892 to 1,135 of
each.

Client key: the writer, known from QMNIST's label files. 539 writers wrote the training
images (19 to 131 each, median 116) and 297 **others** the test images (8 to 130, median
21), so the parts are two populations: the second is for testing on new clients. About
half of each are employees of the US census (writer ids below 2100), the rest students
of a high school (2100 to 2599): two natural groups, see `groups`.

Polarity: ink is 1 and paper 0, as stored; pixels are divided by 255, no more.

Licence: MNIST CC BY-SA 3.0; QMNIST's label files BSD-style; the scans are works of the
US government (NIST).

References:
  LeCun, Bottou, Bengio & Haffner, "Gradient-based learning applied to document
  recognition", Proceedings of the IEEE 86(11), 1998.

  Yadav & Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019 (QMNIST).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_core import check
from fedjax_core.data import sources
from fedjax_core.data.packed import Dataset, FederatedData, divided
from fedjax_core.data.readers.files import DataFileError, find
from fedjax_core.datasets import idx, images

SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/{}"
QMNIST_SOURCE = "https://github.com/facebookresearch/qmnist"
_PREFIXES = {"train": "train-", "test": "t10k-"}
_FIRST_STUDENT = 2100


def load(path: Path | str, complete: bool = True) -> Dataset:
    """Loads the pooled images; arguments and errors as in `images`.

    The files are four of idx (``train-images-idx3-ubyte.gz``,
    ``train-labels-idx1-ubyte.gz``, ``t10k-...``; unpacked ones will do), or
    ``mnist.npz`` of Keras, which is preferred. x is [n, 28, 28, 1].
    """
    counts = images.COUNTS if complete else (None, None)
    file = images.find_npz(path, ("mnist.npz", "mnist_by_writer.npz"))
    if file:
        return images.from_npz(file, 10, (28, 28), counts)
    return images.from_idx(path, list(_PREFIXES.values()), SOURCE, 10, counts)


def load_by_writer(
    path: Path | str,
    part: str = "train",
    test_fraction: float = 0.2,
    seed: int = 0,
    complete: bool = True,
) -> FederatedData:
    """Loads one part of MNIST with its writers as clients.

    No writer is in both parts. Every writer's images are split here, so that a client
    is tested on its own hand; with ``part="test"`` and ``test_fraction=1`` the writers
    that no model was trained on are left to test it. Arguments and errors as in
    `images`, and:

    - path: a folder with the idx files of the part, as for `load`, and with
      ``qmnist-train-labels-idx2-int.gz`` or ``qmnist-test-...``, whose classes are
      compared; or with ``mnist_by_writer.npz``, which is preferred, or that file:
      x_train, y_train and writer_train, the same for test.
    - part: "train" for 539 clients, "test" for the 297 others.
    - test_fraction: share in [0, 1] of every client's images that goes to its test
      split, rounded to whole images.
    - seed: int >= 0 that chooses them.

    Clients are in ascending order of the writers. Ids are the writers' with four
    digits, "0003" say; arrays as those of `load`, each client's in the original order.
    """
    check.one_of(_PREFIXES, part=part)
    check.in_range(0, 1, test_fraction=test_fraction)
    check.seed(seed=seed)
    count = images.COUNTS[part == "test"] if complete else None
    file = images.find_npz(path, ("mnist_by_writer.npz",))
    read = _part_of_npz if file else _part_of_idx
    x, y, writers = read(file or path, part, count)
    is_test = images.hold_out(writers, test_fraction, seed)
    columns = {"x": x, "y": y, "client": np.array([f"{w:04d}" for w in writers])}
    data = sources.from_arrays(*divided(columns, is_test))
    return data.map(lambda e: {**e, "x": images.to_float(e["x"])})


def groups(client_ids: Sequence[str]) -> np.ndarray:
    """Where each writer comes from: 0 a census employee, 1 a high-school student.

    A natural split of the clients [N], ids of `load_by_writer`, in two; [N] int32. It
    is also the series of the form the digits were written on, hsf_0 or hsf_4.
    """
    return np.array([int(w) >= _FIRST_STUDENT for w in client_ids], np.int32)


def _part_of_npz(
    path: Path | str, part: str, count: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images [n, 28, 28] uint8, labels [n] int32, writers [n]."""
    names = [f"{k}_{part}" for k in ("x", "y", "writer")]
    x, y, writers = images.read_npz(path, {part: names}, (28, 28), (), [count])[part]
    y = images.to_labels(path, f"array {names[1]!r}", y, len(x), 10)
    where = f"array {names[2]!r}"
    return x, y, images.to_labels(path, where, writers, len(x), 10_000, what="writer")


def _part_of_idx(
    path: Path | str, part: str, count: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images [n, 28, 28] uint8, labels [n] int32, writers [n]."""
    name = f"qmnist-{part}-labels-idx2-int"
    image_path, x, label_path, y = images.read_idx(
        path, _PREFIXES[part], SOURCE, 10, count
    )
    qmnist_path = find(path, [f"{name}.gz", name], QMNIST_SOURCE)
    # Class, form series, writer, and five more columns. QMNIST restored the lost test
    # images: of its 60,000 the first 10,000 are those of MNIST.
    columns = idx.read(qmnist_path, (None, 8), np.int32)
    if len(columns) < len(x) or (part == "train" and len(columns) > len(x)):
        wanted = f"a row for each of the {len(x)} images of {image_path}"
        raise DataFileError(qmnist_path, "rows", wanted, len(columns))
    columns = columns[: len(x)]
    wrong = np.flatnonzero(columns[:, 0] != y)
    if wrong.size:
        i = wrong[0]
        problem = f"expected class {y[i]} as in {label_path}, found {columns[i, 0]}"
        if columns[i, 0] == y[i : i + 1].byteswap()[0]:
            problem += ", which is it in little-endian; idx files are big-endian"
        raise DataFileError(qmnist_path, f"row {i}, column 0", f"{problem}.")
    where, n = "column 2", len(x)
    writers = columns[:, 2]
    return x, y, images.to_labels(qmnist_path, where, writers, n, 10_000, what="writer")
