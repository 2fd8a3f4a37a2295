"""CIFAR-10 and CIFAR-100: 60,000 colour photographs of 32x32 pixels.

50,000 training and 10,000 test images each. CIFAR-10 has 10 classes of 5,000 + 1,000
images: 0 airplane, 1 automobile, 2 bird, 3 cat, 4 deer, 5 dog, 6 frog, 7 horse, 8 ship,
9 truck. CIFAR-100 has 100 classes of 500 + 100, in 20 coarse classes of five.

Client key: none; clients have to be made with `partition`.

Normalisation: pixels are divided by 255, no more.

Licence: none stated; cite Krizhevsky 2009.

References:
  Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report,
  University of Toronto, 2009.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_core.data.packed import Dataset
from fedjax_core.data.readers.files import DataFileError, find, read_bytes
from fedjax_core.datasets import images

SOURCE = "https://www.cs.toronto.edu/~kriz"
_PIXELS = 3 * 32 * 32
_COUNTS = (50_000, 10_000)


def load_cifar10(path: Path | str, complete: bool = True) -> Dataset:
    """Loads CIFAR-10 from its binary version; arguments and errors as in `images`.

    The files are ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``,
    in `path` or in the folder ``cifar-10-batches-bin``; a pickle is refused. Or an npz
    file of x_train, y_train, x_test and y_test, images uint8 [n, 32, 32, 3], under the
    name ``cifar10.npz``, ``cifar10_subset.npz`` (which never is complete) or, with its
    full path, any other. x is [n, 32, 32, 3], y in 0..9.
    """
    file = images.find_npz(path, ("cifar10.npz", "cifar10_subset.npz"))
    if file:
        whole = complete and file.name != "cifar10_subset.npz"
        counts = _COUNTS if whole else (None, None)
        return images.from_npz(file, 10, (32, 32, 3), counts)
    stems = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    folders = ("cifar-10-batches-bin", "cifar-10-batches-py")
    files = _find(path, stems, "cifar-10-binary.tar.gz", *folders)
    counts = [10_000 if complete else None] * 6
    *batches, test = _read(files, counts, {"y": 10})
    train = {k: np.concatenate([b[k] for b in batches]) for k in test}
    return Dataset(train, test)


def load_cifar100(path: Path | str, complete: bool = True) -> Dataset:
    """Loads CIFAR-100 from its binary version; arguments and errors as in `images`.

    The files are ``train.bin`` and ``test.bin``, in `path` or in the folder
    ``cifar-100-binary``; a pickle is refused. x is [n, 32, 32, 3], y the fine label in
    0..99, and "coarse" [n] int32 in 0..19.
    """
    folders = ("cifar-100-binary", "cifar-100-python")
    files = _find(path, ["train", "test"], "cifar-100-binary.tar.gz", *folders)
    counts = _COUNTS if complete else (None, None)
    return Dataset(*_read(files, counts, {"coarse": 20, "y": 100}))


def _find(
    folder: Path | str, stems: Sequence[str], archive: str, binary: str, pickled: str
) -> list[Path]:
    """The binary files; where there are only pickles, an error that says so.

    `stems` are their names without ``.bin``, `archive` is what is published, `binary`
    the folder in it, and `pickled` that of the Python version.
    """
    source = f"{SOURCE}/{archive} (unpack it)"
    try:
        return [find(folder, [f"{s}.bin", f"{binary}/{s}.bin"], source) for s in stems]
    except FileNotFoundError:
        for name in (stems[0], f"{pickled}/{stems[0]}"):
            if (Path(folder) / name).is_file():
                problem = (
                    f"a pickle, which could run code and is never read; expected the "
                    f"binary version: fetch {source} and put its folder into {folder}."
                )
                raise DataFileError(Path(folder) / name, "format", problem) from None
        raise


def _read(
    files: Sequence[Path], counts: Sequence[int | None], labels: dict[str, int]
) -> list[dict[str, np.ndarray]]:
    """Reads files of records: a byte per label, then red, green and blue, row by row.

    No two files may be the same; `counts` are the records in each, None for any number,
    and `labels` name -> number of classes, in the order of the bytes.
    """
    record = len(labels) + _PIXELS
    seen: dict[bytes, Path] = {}
    splits = []
    for path, count in zip(files, counts, strict=True):
        content = read_bytes(path)
        n, rest = divmod(len(content), record)
        if rest or n == 0:
            wanted, at = f"whole records of {record} bytes", f"offset {n * record}"
            raise DataFileError(path, at, wanted, f"{rest} bytes")
        if count is not None and n != count:
            raise DataFileError(path, "size", f"{count} records of {record} bytes", n)
        if content in seen:
            copy = f"a copy of {seen[content]}"
            raise DataFileError(path, "content", "images of its own", copy)
        seen[content] = path
        table = np.frombuffer(content, np.uint8).reshape(n, record)
        split = {}
        for i, (name, classes) in enumerate(labels.items()):
            where = f"byte {i} of each record of {record}"
            split[name] = images.to_labels(path, where, table[:, i], n, classes)
        pixels = table[:, len(labels) :].reshape(n, 3, 32, 32)
        splits.append({"x": images.to_float(pixels.transpose(0, 2, 3, 1)), **split})
    return splits
