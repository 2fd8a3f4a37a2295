"""MedMNIST v2: twelve sets of small medical images, each in one npz file.

===============  =======================  ========  ==========================
flag             classes                  channels  train / validation / test
===============  =======================  ========  ==========================
pathmnist        9                        3          89,996 / 10,004 /  7,180
chestmnist       14, any number at once   1          78,468 / 11,219 / 22,433
dermamnist       7                        3           7,007 /  1,003 /  2,005
octmnist         4                        1          97,477 / 10,832 /  1,000
pneumoniamnist   2                        1           4,708 /    524 /    624
retinamnist      5, ordered               3           1,080 /    120 /    400
breastmnist      2                        1             546 /     78 /    156
bloodmnist       8                        3          11,959 /  1,712 /  3,421
tissuemnist      8                        1         165,466 / 23,640 / 47,280
organamnist      11                       1          34,561 /  6,491 / 17,778
organcmnist      11                       1          12,975 /  2,392 /  8,216
organsmnist      11                       1          13,932 /  2,452 /  8,827
===============  =======================  ========  ==========================

Client key: none, patients are not told; clients have to be made with `partition`.

Normalisation: pixels are divided by 255, no more; polarity as stored.

Licence: CC BY 4.0; dermamnist CC BY-NC 4.0.

References:
  Yang et al., "MedMNIST v2 - A large-scale lightweight benchmark for 2D and 3D
  biomedical image classification", Scientific Data 10, 41, 2023. Cite the source of the
  set as well, https://medmnist.com names it.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset
from fedjax_core.data.readers.files import DataFileError, find
from fedjax_core.datasets import images

SOURCE = "https://zenodo.org/records/10519652/files"


class Info(NamedTuple):
    """What is published about one set."""

    classes: int
    channels: int
    counts: tuple[int, int, int]  # train, validation, test
    md5: str  # of the file of 28x28 pixels


_TABLE = """
pathmnist       9 3  89996  10004   7180 a8b06965200029087d5bd730944a56c1
chestmnist     14 1  78468  11219  22433 02c8a6516a18b556561a56cbdd36c4a8
dermamnist      7 3   7007   1003   2005 0744692d530f8e62ec473284d019b0c7
octmnist        4 1  97477  10832   1000 c68d92d5b585d8d81f7112f81e2d0842
pneumoniamnist  2 1   4708    524    624 28209eda62fecd6e6a2d98b1501bb15f
retinamnist     5 3   1080    120    400 bd4c0672f1bba3e3a89f0e4e876791e4
breastmnist     2 1    546     78    156 750601b1f35ba3300ea97c75c52ff8f6
bloodmnist      8 3  11959   1712   3421 7053d0359d879ad8a5505303e11de1dc
tissuemnist     8 1 165466  23640  47280 ebe78ee8b05294063de985d821c1c34b
organamnist    11 1  34561   6491  17778 68e3f8846a6bd62f0c9bf841c0d9eacc
organcmnist    11 1  12975   2392   8216 b9ceb9546e10131b32923c5bbeaea2b1
organsmnist    11 1  13932   2452   8827 9ab87b696fb54e2a387ebe992d6ed5f1
"""
FLAGS = {
    flag: Info(int(classes), int(channels), (int(n), int(m), int(k)), md5)
    for flag, classes, channels, n, m, k, md5 in map(
        str.split, _TABLE.split("\n")[1:-1]
    )
}
"""What is published, by flag."""


def load(
    path: Path | str,
    flag: str,
    size: int = 28,
    verify: bool = False,
    complete: bool = True,
) -> Dataset:
    """Loads one set with its validation split.

    Arguments and errors as in `images`, and:

    - path: the folder that holds ``<flag>.npz``, or ``<flag>_<size>.npz`` for other
      sizes than 28; or that file.
    - flag: which set, see the table above.
    - size: pixels along a side, 28, 64, 128 or 224.
    - verify: compare the file's MD5 with the published one, known for size 28.

    For chestmnist y is [n, 14] float32, 1 for each finding there is, else 0; partition
    it by one of them, ``label=("y", 3)``, or by none.
    """
    check.one_of(FLAGS, flag=flag)
    check.one_of((28, 64, 128, 224), size=size)
    if verify and size != 28:
        raise ValueError(f"verify must be False for size {size}: no MD5 is known.")
    name = f"{flag}.npz" if size == 28 else f"{flag}_{size}.npz"
    file = find(path, [name], f"{SOURCE}/{name}")
    info = FLAGS[flag]
    if verify:
        with open(file, "rb") as content:
            md5 = hashlib.file_digest(content, "md5").hexdigest()
        if md5 != info.md5:
            raise DataFileError(file, "MD5", f"expected {info.md5}, found {md5}.")

    several = flag == "chestmnist"
    colour = (info.channels,) if info.channels > 1 else ()
    names = {k: (f"{k}_images", f"{k}_labels") for k in ("train", "val", "test")}
    counts = info.counts if complete else (None, None, None)
    wide = (info.classes,) if several else (1,)
    arrays = images.read_npz(file, names, (size, size, *colour), wide, counts)

    def examples(split: str) -> dict[str, np.ndarray]:
        x, labels = arrays[split]
        where, num_classes = f"array '{split}_labels'", 2 if several else info.classes
        # A column at a time, each a choice between absent and present.
        size = len(x), num_classes
        columns = [images.to_labels(file, where, c, *size) for c in labels.T]
        y = np.stack(columns, 1).astype(np.float32) if several else columns[0]
        return {"x": images.to_float(x), "y": y}

    return Dataset(examples("train"), examples("test"), examples("val"))
