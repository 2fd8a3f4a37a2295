"""Fashion-MNIST: 70,000 pictures of clothes in the files and the shape of MNIST.

60,000 training and 10,000 test images of 28x28 pixels, of 10 classes of 6,000 + 1,000
each: 0 T-shirt or top, 1 trouser, 2 pullover, 3 dress, 4 coat, 5 sandal, 6 shirt,
7 sneaker, 8 bag, 9 ankle boot.

Client key: none; clients have to be made with `partition`.

Polarity: the garment is bright and the background 0, as stored; pixels are divided by
255, no more.

Licence: MIT.

References:
  Xiao, Rasul & Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
  Learning Algorithms", arXiv:1708.07747.
"""

from pathlib import Path

from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import images

SOURCE = "https://github.com/zalandoresearch/fashion-mnist"


def load(path: Path | str, complete: bool = True) -> Dataset:
    """Loads the pooled images; arguments and errors as in `images`.

    The files are ``train-images-idx3-ubyte.gz``, ``train-labels-idx1-ubyte.gz``,
    ``t10k-...``; unpacked ones will do. MNIST's have the same names and sizes: keep the
    two in folders of their own. x is [n, 28, 28, 1].
    """
    counts = images.COUNTS if complete else (None, None)
    return images.from_idx(path, ("train-", "t10k-"), SOURCE, 10, counts)
