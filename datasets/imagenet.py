"""ImageNet at 32x32 pixels, its subsets below a word: images that a server may hold.

The 1,281,167 training images of ILSVRC 2012 in 1,000 classes, made small. Each class is
a WordNet id, and WordNet says which of them are birds, dogs or devices.

Client key: none; FedAUX takes subsets as unlabelled data of the server.

Normalisation: pixels are divided by 255, no more.

Licence: research use without redistribution, as of ImageNet itself.

References:
  Deng et al., "ImageNet: A Large-Scale Hierarchical Image Database", CVPR 2009.
  Chrabaszcz, Loshchilov & Hutter, "A Downsampled Variant of ImageNet as an Alternative
  to the CIFAR datasets", arXiv 1707.08819, 2017.
  Sattler et al., "FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning",
  TNNLS 2021, for the subsets.
"""

from pathlib import Path

import numpy as np

from fedjax_core import check
from fedjax_core.data.readers import npz
from fedjax_core.data.readers.files import DataFileError, find, read_bytes
from fedjax_core.datasets import images

SOURCE = "https://image-net.org/download-images.php"
WORDS = "https://image-net.org/data/wordnet.is_a.txt"
CLASSES = "ILSVRC2012's development kit"

SUBSETS = {
    "devices": ("n03183080", 165_747),
    "birds": ("n01503061", 76_541),
    "animals": ("n00015388", 510_530),
    "dogs": ("n02084071", 147_873),
    "invertebrates": ("n01905661", 79_300),
    "structures": ("n04341686", 74_400),
}
"""Name -> WordNet id of a subset and how many images it has."""


def below(path: Path | str, word: str) -> set[str]:
    """The WordNet ids at and below one, by ``wordnet.is_a.txt`` in the folder `path`.

    Every line of that file is an id and one directly below it.
    """
    children: dict[str, list[str]] = {}
    for parent, child in _lines(path, "wordnet.is_a.txt", WORDS, 2):
        children.setdefault(parent, []).append(child)
    found, left = set(), [word]
    while left:  # a word may be below several
        if (one := left.pop()) not in found:
            found.add(one)
            left += children.get(one, [])
    return found


def load_subset(
    path: Path | str, subset: str, complete: bool = True
) -> dict[str, np.ndarray]:
    """Loads the training images below a word.

    Args:
      path: folder with ``train_data_batch_1.npz`` to ``train_data_batch_10.npz`` of
        data [n, 3072] uint8, all red, all green and all blue values of an image row by
        row, and labels [n] from 1; ``map_clsloc.txt``, whose lines are a WordNet id,
        its label and a name; and ``wordnet.is_a.txt``.
      subset: a name of `SUBSETS`, or a WordNet id.
      complete: insist on all ten files and on the number of images in `SUBSETS`.

    Returns:
      ``{"x": [n, 32, 32, 3] float32 in [0, 1], "y": [n] int32}``, labels from 0 in the
      order of the ids' own.

    Raises:
      FileNotFoundError: a file is absent; says what to fetch.
      DataFileError: a file is damaged or not what it should be.
      ValueError: no class is below the word.
    """
    word, count = SUBSETS.get(subset, (subset, None))
    inside = below(path, word)
    labels = sorted(
        int(label)
        for wnid, label, _ in _lines(path, "map_clsloc.txt", CLASSES, 3)
        if wnid in inside
    )
    if not labels:
        check.one_of(SUBSETS, subset=subset)
        raise ValueError(f"subset must have classes in map_clsloc.txt, got {subset!r}.")
    parts = []
    for i in range(1, 11):
        name = f"train_data_batch_{i}.npz"
        if not complete and i > 1 and not (Path(path) / name).is_file():
            continue
        file = find(path, [name], SOURCE)
        expected = {"data": (np.uint8, (None, 3072)), "labels": (np.integer, (None,))}
        arrays = npz.read(file, expected)
        all_y = images.to_labels(
            file, "labels", arrays["labels"], len(arrays["data"]), 1000, first=1
        )
        rows = np.isin(all_y + 1, labels)
        y = np.searchsorted(labels, all_y[rows] + 1).astype(np.int32)
        pixels = arrays["data"][rows].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        parts.append({"x": images.to_float(pixels), "y": y})
    out = {k: np.concatenate([part[k] for part in parts]) for k in ("x", "y")}
    if complete and count is not None and len(out["y"]) != count:
        problem = f"expected {count} images below {word}, found {len(out['y'])}."
        raise DataFileError(Path(path), "size", problem)
    return out


def _lines(path: Path | str, name: str, source: str, words: int) -> list[list[str]]:
    """The words of every line of a text file."""
    file = find(path, [name], source)
    lines = [line.split() for line in read_bytes(file).decode("utf-8").splitlines()]
    for i, line in enumerate(lines, 1):
        if len(line) != words:
            raise DataFileError(file, f"line {i}", f"{words} words", len(line))
    return lines
