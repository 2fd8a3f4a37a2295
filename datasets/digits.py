"""Handwritten digits of 8x8 pixels, shipped with scikit-learn: nothing to download.

1,797 images of 10 classes (174 to 183 of each), written by 13 people: the test part of
"Optical Recognition of Handwritten Digits" of the UCI repository.

Client key: none, who wrote what is not recorded; clients have to be made with
`partition`.

Licence: CC BY 4.0.

References:
  Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
  Repository, 1998, https://doi.org/10.24432/C50P49.
"""

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, divided
from fedjax_core.datasets import images


def load(test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Loads the digits, split class by class into train and test.

    A pixel counts the inked points of a 4x4 cell of the scan, 0 to 16, here divided by
    16: paper is 0, full ink is 1. There is no centring or scaling beyond that.

    `test_fraction` in [0, 1] is the share of every class that goes to test, rounded to
    whole images; 0 leaves test empty, 1 train. `seed`, an int >= 0, chooses them.

    Returns:
      Train and test, each ``{"x": [n, 64] float32 in [0, 1], "y": [n] int32 in 0..9}``.
      The 64 pixels run row by row; both splits keep the order of the original.
    """
    from sklearn.datasets import load_digits  # slow to import, needed only here

    check.seed(seed=seed)
    pixels, labels = load_digits(return_X_y=True)
    is_test = images.hold_out(np.asarray(labels), test_fraction, seed)
    x, y = np.asarray(pixels, np.float32) / 16, np.asarray(labels, np.int32)
    return Dataset(*divided({"x": x, "y": y}, is_test))
