"""What readers of files share: finding, opening, and saying what is wrong.

Nothing here, and no reader, unpickles: a data file must not be able to run code.
"""

import contextlib
import gzip
import io
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class DataFileError(ValueError):
    """A file is not what its format says.

    Attributes:
      path: the file.
      where: the place in it: an offset, a line, a field.
      problem: what was expected there, and what was found.
    """

    def __init__(self, path: Path | str, where: str, problem: str, found: Any = None):
        if found is not None:  # then `problem` is what was expected
            problem = f"expected {problem}, found {found}."
        super().__init__(f"{path}, {where}: {problem}")
        self.path, self.where, self.problem = Path(path), where, problem


@contextlib.contextmanager
def named(
    path: Path | str, where: str, *errors: type[Exception], problem: str = "{}"
) -> Iterator[None]:
    """Turns `errors`, ValueError by default, into a DataFileError with the place."""
    try:
        yield
    except DataFileError:
        raise
    except errors or (ValueError,) as error:  # noqa: B030
        raise DataFileError(path, where, problem.format(error)) from error


def find(folder: Path | str, names: Sequence[str], source: str) -> Path:
    """The first of `names` that is a file in `folder`.

    Args:
      folder: where the user keeps the data set; a path to one of the files will do.
      names: what the file may be called, the usual name first.
      source: where to get it, for the error.

    Raises:
      FileNotFoundError: there is none. Says what to fetch, from where, into which path.
    """
    folder = Path(folder)
    if folder.name in names and folder.is_file():
        return folder
    for name in names:
        if (folder / name).is_file():
            return folder / name
    others = f" (or {', '.join(names[1:])})" if names[1:] else ""
    raise FileNotFoundError(
        f"no file {folder / names[0]}{others}; fetch it from {source} and put it there."
    )


def visible_files(folder: Path | str, pattern: str) -> list[Path]:
    """The files in a folder that match a pattern and are not hidden, sorted."""
    found = Path(folder).glob(pattern)
    return sorted(p for p in found if p.is_file() and not p.name.startswith("."))


def max_unpacked(num_bytes: int) -> int:
    """How many bytes so many compressed ones may hold before they count as a bomb.

    Images and texts hardly shrink to a hundredth; a bomb shrinks to a thousandth.
    """
    return max(64 << 20, 256 * num_bytes)


def read_bytes(path: Path | str) -> bytes:
    """The content of a file, unpacked if it is gzipped, whatever its name.

    Raises:
      DataFileError: the compressed data is damaged, cut off or more than
        `max_unpacked`.
    """
    content = Path(path).read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    limit, unpacked = max_unpacked(len(content)), bytearray()
    errors = OSError, EOFError, zlib.error
    with (
        named(path, "gzip stream", *errors, problem="damaged, {}."),
        gzip.open(io.BytesIO(content)) as stream,
    ):
        while part := stream.read(1 << 20):
            unpacked += part
            if len(unpacked) > limit:
                problem = f"unpacks to more than {limit} bytes."
                raise DataFileError(path, "gzip stream", problem)
    return bytes(unpacked)


def is_name(text: str) -> bool:
    """Whether a file may name a client so: any script, emoji, joiners, no controls."""
    if not text or len(text) > 200:
        return False
    # The check of every character is slow, and hardly ever needed.
    return text.isprintable() or all(
        unicodedata.category(c) not in ("Cc", "Cs") for c in text
    )


def check_shape(
    path: Path | str,
    where: str,
    sizes: Sequence[int],
    shape: Sequence[int | None],
    least: int = 1,
) -> None:
    """Raises unless an array of these sizes, at `least`, has that shape (None: any)."""
    same = len(sizes) == len(shape) and all(
        want in (None, size) for size, want in zip(sizes, shape, strict=True)
    )
    if not same or any(size < least for size in sizes):
        wanted, found = shape_name(shape), shape_name(sizes)
        raise DataFileError(path, where, f"shape {wanted}", found)


def shape_name(shape: Sequence[int | None]) -> str:
    """The shape for an error: ``[n, 28, 28]``."""
    return f"[{', '.join('n' if size is None else str(size) for size in shape)}]"
