"""The data sets of LEAF, from the JSON files that its scripts make, with their users.

A set is a folder with `train/` and `test/`, each of one or more JSON files with
`users`, `num_samples`, `user_data` and, for Shakespeare, `hierarchies` (plays).
The repositories of FedProx, Ditto and q-FFL keep their sets in the same layout.

=============  ======================  ==============================================
family         natural clients         examples
=============  ======================  ==============================================
FEMNIST        about 3,550 writers     about 805,000 images of 62 classes
Shakespeare    1,129 roles             80 characters and the next, one per character
Sent140        660,120 users           about 1.6 million tweets, positive or not
CelebA         9,343 celebrities       200,288 faces, smiling or not
synthetic      as many as one makes    features and classes
=============  ======================  ==============================================

The counts are those of LEAF's whole sets; its scripts sample and filter (Shakespeare
has 660 roles after the filter by length).

Client key: LEAF's users, in sorted order. Splits: with `-t sample` train and test hold
the same users, and one call gives both. With `-t user` they hold different ones:
``split="train"`` or ``"test"`` gives each as a population, as its ``.train``.

Arguments and errors as in `containers`: `folder` holds train/ and test/, `split` is
None for train and test of the same users, "train" or "test" for one of two populations.

Polarity: FEMNIST in LEAF has paper 1 and ink 0, and is inverted here to ink 1.
Normalisation: none beyond that.

Licence: LEAF's code: BSD 2-Clause. FEMNIST (NIST SD19) and Shakespeare: public domain.
CelebA: research use only. Sent140: none stated; it holds the names of users.

References:
  Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097,
  https://github.com/TalwalkarLab/leaf.

  Go et al., "Twitter Sentiment Classification using Distant Supervision", 2009.

  Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020 (FedProx).
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers.files import DataFileError, visible_files
from fedjax_core.datasets import containers
from fedjax_core.datasets.containers import Arrays, Clients

CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
"""The 80 characters of LEAF's Shakespeare; the id of one is its place."""

UNKNOWN_CHARACTER = len(CHARACTERS)
NUM_CHARACTER_IDS = UNKNOWN_CHARACTER + 1

_URL = "https://github.com/TalwalkarLab/leaf"
_LENGTH = 80  # of Shakespeare's x
_ID_OF_CODE = np.full(128, UNKNOWN_CHARACTER, np.int32)
_ID_OF_CODE[[ord(c) for c in CHARACTERS]] = np.arange(len(CHARACTERS))

UserData = dict[str, list[Any]]
"""What a file has of a user: "x" and "y", one entry per example."""


def femnist(
    folder: Path | str,
    split: str | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """Handwritten digits and letters by writer, of LEAF data/femnist/data.

    ``{"x": [n, 28, 28, 1] float32 in [0, 1] with ink 1, "y": [n] int32}``. Labels:
    digits 0-9, A-Z 10-35, a-z 36-61.
    """
    return _load(folder, femnist_examples, split, clients, max_clients)


def shakespeare(
    folder: Path | str,
    split: str | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """The character after 80 others in what a role says, of LEAF data/shakespeare/data.

    ``{"x": [n, 80] int32, "y": [n] int32}``. A character that is not one of the 80
    `CHARACTERS` gets the id 80, so a model needs 81 (`NUM_CHARACTER_IDS`). LEAF gives
    it -1, which its one-hot labels take for "}". Who said what in which play:
    `hierarchies`.
    """
    return _load(folder, shakespeare_examples, split, clients, max_clients)


def sent140(
    folder: Path | str,
    vocabulary: Sequence[str] | None = None,
    length: int = 25,
    split: str | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """Whether a tweet is positive, by user, of LEAF data/sent140/data.

    ``{"x": [n, length] int32, "y": [n] int32, 1 if positive}``, x as in LEAF: words and
    the marks ``.,!?;``, with the id V for other words and as padding at the end.
    Arguments beside those of all:

    - vocabulary: V distinct words; the id of a word is its place. LEAF takes those of
      GloVe, "vocab" in its models/sent140/embs.json. None leaves the text as it is: x
      is [n] str.
    - length: words of an example, >= 1, if there is a vocabulary.
    """
    check.positive_int(length=length)
    word_ids = None
    if vocabulary is not None:
        word_ids = {word: i for i, word in enumerate(vocabulary)}
        if len(word_ids) < len(vocabulary):
            raise ValueError("vocabulary must hold distinct words, got one twice.")
    to_arrays = functools.partial(sent140_examples, word_ids=word_ids, length=length)
    return _load(folder, to_arrays, split, clients, max_clients)


def celeba(
    folder: Path | str,
    split: str | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """Which image files show a celebrity, and whether smiling. Reads no image.

    Of LEAF data/celeba/data: ``{"x": [n] str, names of files in img_align_celeba,
    "y": [n] int32 in 0..1}``.
    """
    return _load(folder, celeba_examples, split, clients, max_clients)


def synthetic(
    folder: Path | str,
    split: str | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> FederatedData:
    """Tables of numbers with a class each, of LEAF data/synthetic/data or FedProx.

    ``{"x": [n, d] float32, "y": [n] int32, 0 or more}``, d the same for all users.
    """
    return _load(folder, synthetic_examples, split, clients, max_clients)


def iterate(
    folder: Path | str,
    split: str,
    to_arrays: Callable[[UserData], Arrays] | None = None,
    clients: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yields the users of a split in the order of the files, one file in memory.

    Arguments and errors as in `containers`, and:

    - split: "train" or "test".
    - to_arrays: makes arrays of a user's data, such as `femnist_examples`; None for the
      lists ``{"x": [...], "y": [...]}`` as they are, which serves Reddit too.
    """
    containers.check_wanted(clients, max_clients)
    wanted = None if clients is None else set(clients)
    missing = set(clients or ())
    given = 0
    seen: dict[str, Path] = {}
    for path in _files(folder, split):
        for user, data, _ in _read(path):
            if user in seen:
                problem = f"occurs in {seen[user]} too."
                raise DataFileError(path, f"user {user!r}", problem)
            seen[user] = path
            if wanted is not None and user not in wanted:
                continue
            yield from containers.convert(path, [(user, data)], to_arrays)
            given += 1
            missing.discard(user)
            if given in (max_clients, len(wanted or ())):
                return  # without reading the other files
    if missing:
        path, problem = Path(folder) / split, f"not among the {len(seen)} users."
        raise DataFileError(path, f"user {min(missing)!r}", problem)


def hierarchies(folder: Path | str, split: str = "train") -> dict[str, str]:
    """The group of each user that has one: in Shakespeare the play."""
    return {
        user: group
        for path in _files(folder, split)
        for user, _, group in _read(path)
        if group is not None
    }


def femnist_examples(data: UserData) -> Arrays:
    """One user's images, as `femnist` gives them."""
    x = _numbers("x", data["x"], 2, 784)
    if not np.all((x >= 0) & (x <= 1)):  # false for NaN too
        raise ValueError("x must be in [0, 1].")
    x = 1 - x.astype(np.float32).reshape(-1, 28, 28, 1)
    return {"x": x, "y": _classes(data["y"], 62)}


def shakespeare_examples(data: UserData) -> Arrays:
    """One user's characters, as `shakespeare` gives them."""
    return {
        "x": _characters("x", data["x"], _LENGTH),
        "y": _characters("y", data["y"], 1)[:, 0],
    }


def sent140_examples(
    data: UserData, word_ids: Mapping[str, int] | None = None, length: int = 25
) -> Arrays:
    """One user's tweets, as `sent140` gives them; `word_ids` are V words -> 0..V-1."""
    texts = []
    for i, entry in enumerate(data["x"]):
        if not isinstance(entry, list) or len(entry) != 5:
            problem = f"must be [id, date, query, user, text], got {entry!r:.80}."
            raise ValueError(f"x[{i}] {problem}")
        texts.append(entry[4])
    x, y = _texts("text of x", texts), _classes(data["y"], 2)
    if word_ids is not None:
        x = np.full((len(texts), length), len(word_ids), np.int32)
        for i, text in enumerate(texts):
            words = re.findall(r"[\w']+|[.,!?;]", text)[:length]
            x[i, : len(words)] = [word_ids.get(word, len(word_ids)) for word in words]
    return {"x": x, "y": y}


def celeba_examples(data: UserData) -> Arrays:
    """One user's image files, as `celeba` gives them."""
    return {"x": _texts("x", data["x"]), "y": _classes(data["y"], 2)}


def synthetic_examples(data: UserData) -> Arrays:
    """One user's rows, as `synthetic` gives them."""
    x = _numbers("x", data["x"], 2)
    if not np.all(np.abs(x) <= np.finfo(np.float32).max):  # false for NaN too
        raise ValueError("x must hold finite float32 values.")
    return {"x": x.astype(np.float32), "y": _classes(data["y"], 2**31)}


def _load(
    folder: Path | str,
    to_arrays: Callable[[UserData], Arrays],
    split: str | None,
    *wanted: Any,
) -> FederatedData:
    def read(split: str, *wanted: Any) -> Clients:
        users = iterate(folder, split, to_arrays, *wanted)
        yield from sorted(users, key=lambda user: user[0])

    if split is not None:
        return containers.one_split(Path(folder) / split, read(split, *wanted))
    hint = "For a split by user load split='train' and split='test' apart."
    return containers.same_clients(folder, read, *wanted, hint=hint)


def _files(folder: Path | str, split: str) -> list[Path]:
    check.one_of(("train", "test"), split=split)
    folder = Path(folder) / split
    paths = visible_files(folder, "*.json")
    if not paths:
        make = f"make it with preprocess.sh of {_URL} and put it there"
        raise FileNotFoundError(f"no file {folder / '*.json'}; {make}.")
    return paths


def _read(path: Path) -> Iterator[tuple[str, UserData, str | None]]:
    """Yields user, data and group (None without hierarchies), checked."""
    content = containers.parse_json(path, "JSON", path.read_bytes())
    users = _member(path, content, "users", list)
    counts = _member(path, content, "num_samples", list)
    user_data = _member(path, content, "user_data", dict)
    groups: list[Any] = [None] * len(users)
    if "hierarchies" in content:
        groups = _member(path, content, "hierarchies", list)
        if len(groups) == len(user_data) != len(users):
            # LEAF's split by sample drops users of one example from `users` only.
            of_user = dict(zip(user_data, groups, strict=True))
            groups = [of_user.get(user) for user in users if isinstance(user, str)]
        if not all(isinstance(group, str) for group in groups):
            raise DataFileError(path, "hierarchies", "expected texts.")
    if not len(users) == len(counts) == len(groups):
        found = f"{len(counts)} num_samples and {len(groups)} hierarchies"
        wanted = f"one entry per user, {len(users)}"
        raise DataFileError(path, "num_samples, hierarchies", wanted, found)
    names = containers.choose(path, users)  # texts, each once
    for name in user_data.keys() - set(names):
        data = user_data[name]
        if not isinstance(data, dict) or any(data.values()):
            problem = "has data, but is not in users."
            raise DataFileError(path, f"user {name!r}", problem)
    for name, count, group in zip(names, counts, groups, strict=True):
        where = f"user {name!r}"
        data = user_data.get(name)
        if not isinstance(data, dict):
            raise DataFileError(path, where, "expected x and y in user_data.")
        x, y = (_member(path, data, k, list, where) for k in ("x", "y"))
        if not len(x) == len(y) == count:
            found = f"{len(x)} x and {len(y)} y"
            raise DataFileError(path, where, f"{count!r} examples", found)
        yield name, {"x": x, "y": y}, group


def _member(
    path: Path, members: dict[str, Any], name: str, kind: type, where: str = "JSON"
) -> Any:
    value = members.get(name)
    if not isinstance(value, kind):
        found = type(value).__name__ if name in members else "nothing"
        raise DataFileError(path, where, f"{name!r} with a {kind.__name__}", found)
    return value


def _numbers(
    name: str, values: list[Any], ndim: int, width: int | None = None
) -> np.ndarray:
    """[n] or [n, d] ints or floats; without rows, d is what `width` says or 0."""
    if not values:
        return np.zeros((0, width or 0)[:ndim])
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of unequal lengths
        raise ValueError(f"{name} must hold rows of one length.") from error
    fits = array.ndim == ndim and width in (None, array.shape[-1])
    if array.dtype.kind not in "iuf" or not fits:
        found = f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"{name} must be numbers [n, {width or 'd'}], got {found}.")
    return array


def _classes(values: list[Any], num_classes: int) -> np.ndarray:
    y = _numbers("y", values, 1)
    if not np.all((y >= 0) & (y < num_classes) & (y == np.floor(y))):
        raise ValueError(f"y must hold whole numbers in 0..{num_classes - 1}.")
    return y.astype(np.int32)


def _texts(name: str, values: list[Any]) -> np.ndarray:
    """[n] str."""
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(f"{name}[{i}] must be text, got {value!r:.80}.")
    return np.asarray(values, np.str_)


def _characters(name: str, texts: list[Any], length: int) -> np.ndarray:
    """Ids of texts of one length, [n, length] int32."""
    for i, text in enumerate(texts):
        if not isinstance(text, str) or len(text) != length:
            message = f"must be {length} characters, got {text!r:.80}."
            raise ValueError(f"{name}[{i}] {message}")
    # A lone surrogate, which JSON can spell, is an unknown character too.
    raw = "".join(texts).encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(raw, "<u4").reshape(len(texts), length)
    ids = _ID_OF_CODE[np.minimum(codes, 127)]
    return np.where(codes < 128, ids, UNKNOWN_CHARACTER).astype(np.int32)
