"""The data sets of TensorFlow Federated with the clients they have by nature.

All are read from TFF's own files, without TensorFlow: `<name>.sqlite`, the same packed
as `<name>.sqlite.lzma` (unpacked beside itself at the first read, as TFF does), or the
older HDF5 files, one per split. The folder decides; where it has several, the first of
these is read.

==============  =======================  ========================================
family          natural clients          examples
==============  =======================  ========================================
EMNIST          3,400 writers            671,585 + 77,483 (62 classes)
EMNIST digits   3,383 writers            341,873 + 40,832 (10 classes)
Shakespeare     715 roles                16,068 + 2,356 snippets
CIFAR-100       500 + 100, made          50,000 + 10,000
Stack Overflow  342,477 + 38,758 +       135,818,730 + 16,491,230 + 16,586,035
                204,088 users            sentences
CelebA          9,343 celebrities        177,457 + 22,831 (or 8,408 + 935 of them
                                         with 180,429 + 19,859)
==============  =======================  ========================================

Client key: the ids of the files, in sorted order. EMNIST: ``f<writer>_<2 digits>``;
Shakespeare: ``<PLAY>_<ROLE>``; CIFAR-100: a number, the clients made by Pachinko
allocation (Dirichlet 0.1 over coarse and 10 over fine labels), 100 examples each.

Splits: EMNIST, Shakespeare and CelebA (by examples) hold the same clients in train and
test, and one call gives both. CIFAR-100, Stack Overflow and CelebA (by clients) hold
out clients: ``split=`` chooses, and the result has that split as ``.train``.

Arguments and errors as in `containers`.

Polarity: the EMNIST of TFF has paper 1 and ink 0, and is inverted here to ink 1.
Normalisation: colours are divided by 255; nothing is centred or scaled beyond that.

A population larger than memory is read client by client, by `iterate` with one of the
`*_examples` functions, for instance into a store on disk.

Licence: EMNIST: NIST Special Database 19, public domain. Shakespeare: public domain.
CIFAR-100: none stated. Stack Overflow: CC BY-SA 3.0. CelebA: research use only, no
redistribution.

References:
  Cohen et al., "EMNIST: Extending MNIST to handwritten letters", IJCNN 2017; by writer:
  Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097.

  McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
  Data", AISTATS 2017 (Shakespeare by role).

  Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; clients:
  Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

  The TensorFlow Federated authors, "TensorFlow Federated Stack Overflow dataset", 2019.

  The TensorFlow Federated authors, `tff.simulation.datasets` (the files),
  https://github.com/google-parfait/tensorflow-federated.

  Liu et al., "Deep Learning Face Attributes in the Wild", ICCV 2015.
"""

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers.files import DataFileError, find, named
from fedjax_core.datasets import characters, containers, tff_hdf5, tff_sqlite
from fedjax_core.datasets.containers import Arrays, Clients

PAD, BOS, EOS, FIRST_WORD = 0, 1, 2, 3  # ids of the words of Stack Overflow
_SENTENCES = {"train": "train", "heldout": "held_out", "test": "test"}  # in files
_URL = "https://storage.googleapis.com/tff-datasets-public/"


def emnist(
    folder: Path | str,
    only_digits: bool = False,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """Handwritten digits and letters by writer.

    Files: emnist_all.sqlite[.lzma], or fed_emnist_{train,test}.h5, or
    fed_emnist_digitsonly_{train,test}.h5. Train and test of the same writers, each
    ``{"x": [n, 28, 28, 1] float32 in [0, 1] with ink 1, "y": [n] int32}``. Labels:
    digits 0-9, A-Z 10-35, a-z 36-61; `only_digits` gives the 10 digits (3,383 writers)
    rather than all 62 classes (3,400).
    """
    split = "digits_only" if only_digits else "all"
    hdf5 = "fed_emnist_digitsonly" if only_digits else "fed_emnist"
    num_classes = 10 if only_digits else 62
    to_arrays = functools.partial(emnist_examples, num_classes=num_classes)
    wanted = clients, max_clients
    return _both(folder, "emnist_all", hdf5, f"{split}_", to_arrays, *wanted)


def shakespeare(
    folder: Path | str,
    length: int = 80,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """The next character in what a role of Shakespeare's plays says.

    Files: shakespeare.sqlite[.lzma] or shakespeare_{train,test}.h5. Train and test of
    the same 715 roles, each ``{"x": [n, length] int32, "y": [n, length] int32}``, ids
    and cuts as in `characters`, in pieces of `length` >= 1.
    """
    check.positive_int(length=length)
    to_arrays = functools.partial(shakespeare_examples, length=length)
    files = "shakespeare", "shakespeare"
    return _both(folder, *files, "", to_arrays, clients, max_clients)


def cifar100(
    folder: Path | str,
    split: str = "train",
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """Small photographs of 100 classes; 500 clients for training, 100 others for test.

    Files: cifar100.sqlite[.lzma] or fed_cifar100_{train,test}.h5. The clients "0", "1",
    "10", ... of the split "train" or "test", as ``.train``: ``{"x": [n, 32, 32, 3]
    float32 in [0, 1], "y": [n] int32 in 0..99, "coarse": [n] int32 in 0..19}``. A
    client "0" of one split is not that of the other.
    """
    check.one_of(("train", "test"), split=split)
    path = _find(folder, "cifar100", "fed_cifar100", split)
    raw = iterate(path, split, cifar100_examples, clients, max_clients)
    return containers.one_split(path, raw)


def stack_overflow(
    folder: Path | str,
    split: str = "train",
    word_ids: Mapping[str, int] | None = None,
    length: int = 20,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """The next word in the questions and answers of a user.

    Files: stackoverflow.sqlite[.lzma] or stackoverflow_{train,held_out,test}.h5, and
    stackoverflow.word_count if `word_ids` is None. The users of the split "train",
    "heldout" or "test", three populations, as ``.train``: ``{"x": [n, length] int32,
    "y": [n, length] int32}``, see `stack_overflow_examples`. A split in full needs tens
    of gigabytes of memory: take a part of the clients, or read it with `iterate`.

    `word_ids` are ids of words, `FIRST_WORD` + 0, 1, ...; None for the 10,000 most
    frequent, by `read_word_ids`. `length` >= 1 is the words of an example.
    """
    check.one_of(_SENTENCES, split=split)
    path = _find(folder, "stackoverflow", "stackoverflow", _SENTENCES[split])
    to_arrays = _sentences(folder, word_ids, length)
    raw = iterate(path, split, to_arrays, clients, max_clients)
    return containers.one_split(path, raw)


def celeba(
    folder: Path | str,
    attribute: str = "smiling",
    split: str | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """Faces of celebrities, each a client, with one of 40 attributes as the label.

    File: celeba.sqlite[.lzma]. ``{"x": [n, 84, 84, 3] float32 in [0, 1], "y": [n] int32
    in 0..1}``. With `split` None the 9,343 clients, their examples split into train and
    test; "train" or "test" gives 8,408 and 935 different clients with all of theirs, as
    ``.train``. `attribute` is "smiling", "male" or "five_o_clock_shadow", say.
    """
    to_arrays = functools.partial(celeba_examples, attribute=attribute)
    if split is None:
        wanted = clients, max_clients
        return _both(folder, "celeba", "", "split_by_examples_", to_arrays, *wanted)
    check.one_of(("train", "test"), split=split)
    path, name = _find(folder, "celeba", "", split), f"split_by_clients_{split}"
    raw = iterate(path, name, to_arrays, clients, max_clients)
    return containers.one_split(path, raw)


def iterate(
    path: Path | str,
    split: str,
    to_arrays: Callable[[Arrays], Arrays] | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> Clients:
    """Yields the clients of any file of TFF, sorted by id, one in memory at a time.

    Arguments and errors as in `containers`, and:

    - path: an `.h5`, `.sqlite` or `.sqlite.lzma` file.
    - split: its name in an SQLite file; an HDF5 file is one split and ignores it.
    - to_arrays: makes arrays of a client's features, such as `emnist_examples`; None
      for the features as stored, see `tff_hdf5.iterate` and `tff_sqlite.iterate`.
    """
    path = Path(path)
    if path.suffix == ".h5":
        raw = tff_hdf5.iterate(path, clients, max_clients)
    else:
        raw = tff_sqlite.iterate(path, split, clients, max_clients)
    return containers.convert(path, raw, to_arrays)


def emnist_examples(
    features: Mapping[str, np.ndarray], num_classes: int = 62
) -> Arrays:
    """One client's `pixels` (float32, paper 1) and `label`, as `emnist` gives them."""
    pixels = _feature(features, "pixels", "f")
    x = _images(pixels, (28, 28, 1))
    if not np.all((x >= 0) & (x <= 1)):  # false for NaN too
        raise ValueError("pixels must be in [0, 1].")
    return {"x": 1 - x.astype(np.float32), "y": _labels(features, "label", num_classes)}


def cifar100_examples(features: Mapping[str, np.ndarray]) -> Arrays:
    """One client's `image`, `label` and `coarse_label`, as `cifar100` gives them."""
    return {
        "x": _colours(features, (32, 32, 3)),
        "y": _labels(features, "label", 100),
        "coarse": _labels(features, "coarse_label", 20),
    }


def celeba_examples(
    features: Mapping[str, np.ndarray], attribute: str = "smiling"
) -> Arrays:
    """One client's `image` and an attribute, as `celeba` gives them."""
    return {"x": _colours(features, (84, 84, 3)), "y": _labels(features, attribute, 2)}


def shakespeare_examples(
    features: Mapping[str, np.ndarray], length: int = 80
) -> Arrays:
    """One client's `snippets`, as `shakespeare` gives them."""
    return characters.pairs(_feature(features, "snippets", "O"), length)


def stack_overflow_examples(
    features: Mapping[str, np.ndarray], word_ids: Mapping[str, int], length: int = 20
) -> Arrays:
    """One client's `tokens`: in each sentence, the next word.

    Ids: `PAD` 0, `BOS` 1, `EOS` 2, the V words from `FIRST_WORD` 3, and V + 3 for any
    other. That is FedJAX's order; TFF puts the words first. With length 4 "how are you"
    gives ``x: [BOS how are you]``, ``y: [how are you EOS]``. Longer sentences are cut
    to `length`, shorter ones padded; targets that are `PAD` are not to be scored.
    `tokens` are [n] UTF-8 bytes, words parted by blanks.
    """
    sentences = _feature(features, "tokens", "O")
    unknown = len(word_ids) + FIRST_WORD
    x, y = np.full((2, len(sentences), length), PAD, np.int32)
    for i, sentence in enumerate(sentences):
        words = sentence.decode().split(maxsplit=length)[:length]
        ids = [BOS, *(word_ids.get(word, unknown) for word in words), EOS]
        ids = ids[: length + 1]
        x[i, : len(ids) - 1], y[i, : len(ids) - 1] = ids[:-1], ids[1:]
    return {"x": x, "y": y}


def read_word_ids(path: Path | str, num_words: int = 10_000) -> dict[str, int]:
    """The `num_words` most frequent words of Stack Overflow, ids from `FIRST_WORD`.

    `path` is stackoverflow.word_count, lines "word count", most frequent first; or its
    folder. DataFileError names a line that is no word and count, a word that occurs
    twice, counts that rise, or that there are fewer words.
    """
    check.positive_int(num_words=num_words)
    name = "stackoverflow.word_count"
    path = find(path, [name], f"{_URL}{name}.tar.bz2 (unpacked)")
    ids: dict[str, int] = {}
    before = 10**18
    with path.open("rb") as file:
        for number, line in enumerate(itertools.islice(file, num_words), 1):
            where = f"line {number}"
            found = re.fullmatch(rb"(\S+)[ \t]+(\d{1,18})\s*", line)
            if not found:
                problem = f"expected a word and its count, found {line!r:.80}."
                raise DataFileError(path, where, problem)
            with named(path, where, UnicodeDecodeError, problem="not UTF-8."):
                word, count = found[1].decode(), int(found[2])
            if word in ids:
                raise DataFileError(path, where, f"{word!r} occurs twice.")
            if count > before:
                counts = f"{before}, {count}"
                raise DataFileError(path, where, "counts that do not rise", counts)
            ids[word], before = len(ids) + FIRST_WORD, count
    if len(ids) < num_words:
        raise DataFileError(path, "end", f"at least {num_words} words", len(ids))
    return ids


def is_high_school(client_id: str) -> bool:
    """Whether a writer of EMNIST was a student; the others were census staff.

    The two groups write differently, and make two natural domains. An id has the form
    ``f<4 digits>_<2 digits>``, with a hash in front in FedJAX's files.
    """
    found = re.fullmatch(r"(?:.{16}:)?f(\d{4})_\d{2}", client_id)
    if not found:
        raise ValueError(f"client_id must be like 'f0123_45', got {client_id!r}.")
    return 2100 <= int(found[1]) <= 2599


def _find(folder: Path | str, sqlite: str, hdf5: str, split: str) -> Path:
    names = [f"{sqlite}.sqlite", f"{sqlite}.sqlite.lzma"]
    source = f"{_URL}{sqlite}.sqlite.lzma"
    if hdf5:
        names.append(f"{hdf5}_{split}.h5")
        source += f" (or, unpacked, {_URL}{hdf5}.tar.bz2)"
    return find(folder, names, source)


def _both(
    folder: Path | str,
    sqlite: str,
    hdf5: str,
    prefix: str,
    to_arrays: Callable[[Any], Arrays],
    *wanted: Any,
) -> FederatedData:
    """Train and test of the same clients; in SQLite with a `prefix` to their names."""

    def read(split: str, *wanted: Any) -> Clients:
        path = _find(folder, sqlite, hdf5, split)
        return iterate(path, f"{prefix}{split}", to_arrays, *wanted)

    return containers.same_clients(_find(folder, sqlite, hdf5, "test"), read, *wanted)


def _sentences(
    folder: Path | str, word_ids: Mapping[str, int] | None, length: int
) -> Callable[[Mapping[str, np.ndarray]], Arrays]:
    """`stack_overflow_examples` with these words, or else those of the folder."""
    check.positive_int(length=length)
    ids = read_word_ids(folder) if word_ids is None else word_ids
    return functools.partial(stack_overflow_examples, word_ids=ids, length=length)


def _feature(features: Mapping[str, np.ndarray], name: str, kinds: str) -> np.ndarray:
    if name not in features:
        raise ValueError(f"expected feature {name!r}, found {', '.join(features)}.")
    values, text = features[name], kinds == "O"
    if values.dtype.kind not in kinds:
        expected = "texts" if text else "numbers"
        raise ValueError(f"{name} must hold {expected}, found dtype {values.dtype}.")
    for value in values.ravel() if text else ():
        if not isinstance(value, bytes):
            raise ValueError(f"{name} must hold texts, found {value!r:.40}.")
    if text and values.ndim != 1:
        raise ValueError(f"{name} must be [n], found shape {values.shape}.")
    return values


def _images(values: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """[n, H, W(, C)], or flat as in SQLite, to [n, H, W, C]."""
    flat = (np.prod(shape),)
    if values.shape[1:] not in (shape, shape[:2], flat):
        raise ValueError(f"images must be [n, *{shape}], found shape {values.shape}.")
    return values.reshape(len(values), *shape)


def _colours(
    features: Mapping[str, np.ndarray], shape: tuple[int, int, int]
) -> np.ndarray:
    images = _images(_feature(features, "image", "iu"), shape)
    if not np.all((images >= 0) & (images <= 255)):
        raise ValueError("image must hold values in 0..255.")
    return images.astype(np.float32) / np.float32(255)


def _labels(
    features: Mapping[str, np.ndarray], name: str, num_classes: int
) -> np.ndarray:
    labels = _feature(features, name, "biu")
    if labels.ndim != 1:
        raise ValueError(f"{name} must be [n], found shape {labels.shape}.")
    if not np.all((labels >= 0) & (labels < num_classes)):
        raise ValueError(f"{name} must be in 0..{num_classes - 1}.")
    return labels.astype(np.int32)
