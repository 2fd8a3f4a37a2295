"""EMNIST: handwritten digits and letters of 28x28 pixels, in six selections.

============  =======  ========  =======  ==========================================
selection     train    test      classes  labels
============  =======  ========  =======  ==========================================
byclass       697,932  116,323   62       0-9, A-Z, a-z
bymerge       697,932  116,323   47       letters alike in both cases are merged
balanced      112,800   18,800   47       the same, equally many of each class
letters       124,800   20,800   26       A-Z with a-z, equally many of each class
digits        240,000   40,000   10       0-9, equally many of each class
mnist          60,000   10,000   10       0-9, made like MNIST
============  =======  ========  =======  ==========================================

Of 47 classes, 0 to 35 are 0-9 and A-Z, then come the 11 lower-case letters that do not
look like their capitals: a b d e f g h n q r t.

Client key: none, these files don't tell the writers; the files of TensorFlow Federated
and LEAF do. Clients have to be made with `partition`.

Polarity: ink is 1 and paper 0, as stored; pixels are divided by 255, no more. The files
hold images column by column; here they stand upright.

Licence: none stated; a work of the US government (NIST Special Database 19).

References:
  Cohen, Afshar, Tapson & van Schaik, "EMNIST: an extension of MNIST to handwritten
  letters", arXiv:1702.05373.
"""

from pathlib import Path

from fedjax_core import check
from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import images

SOURCE = "https://www.nist.gov/itl/products-and-services/emnist-dataset (gzip.zip)"

SELECTIONS = {
    "byclass": (62, (697_932, 116_323)),
    "bymerge": (47, (697_932, 116_323)),
    "balanced": (47, (112_800, 18_800)),
    "letters": (26, (124_800, 20_800)),
    "digits": (10, (240_000, 40_000)),
    "mnist": (10, (60_000, 10_000)),
}
"""Selection -> number of classes, and of images in train and test."""


def load(path: Path | str, selection: str, complete: bool = True) -> Dataset:
    """Loads the pooled images of one selection; arguments and errors as in `images`.

    The files are four of the selection, say
    ``emnist-letters-train-images-idx3-ubyte.gz``, in `path` or in the folder ``gzip``
    that the published archive unpacks to; unpacked files will do. x is [n, 28, 28, 1];
    the 1..26 of the letters are 0..25 here.
    """
    check.one_of(SELECTIONS, selection=selection)
    num_classes, counts = SELECTIONS[selection]
    return images.from_idx(
        path,
        (f"emnist-{selection}-train-", f"emnist-{selection}-test-"),
        SOURCE,
        num_classes,
        counts if complete else (None, None),
        first_label=1 if selection == "letters" else 0,
        transposed=True,
    )
