"""Columns of CSV files, every field checked: errors name the line and the column."""

import codecs
import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_core.files import DataFileError, read_bytes

_LARGEST = float(np.finfo(np.float32).max)

Field = Callable[[str], Any]
"""Turns the text of a field into a value; its ValueError says what it expected."""


def number(text: str) -> float:
    """A decimal number that fits float32."""
    # Python's float also takes "nan", "inf" and "1_000", no file format here does.
    if text.isascii() and "_" not in text:
        try:
            value = float(text)
        except ValueError:
            pass
        else:
            if math.isfinite(value) and abs(value) <= _LARGEST:
                return value
    raise ValueError("expected a number")


def integer(text: str) -> int:
    """A whole number of at most nine digits."""
    if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 11:
        return int(text)
    raise ValueError("expected a whole number")


def name(text: str) -> str:
    """A short printable text, of a client say."""
    if text and text.isprintable() and len(text) <= 200:
        return text
    raise ValueError("expected a name of 1 to 200 printable characters")


def level(*allowed: float) -> Field:
    """A number that is one of `allowed`."""

    def parse(text: str) -> float:
        value = number(text)
        if value not in allowed:
            raise ValueError(f"expected one of {', '.join(map(str, allowed))}")
        return value

    return parse


def category(names: Sequence[str], missing: str | None = None) -> Field:
    """The index of the text in `names`, or -1 for `missing`."""
    index = {n: i for i, n in enumerate(names)}
    if missing is not None:
        index[missing] = -1

    def parse(text: str) -> int:
        if text not in index:
            raise ValueError(f"expected one of {', '.join(map(repr, index))}")
        return index[text]

    return parse


def optional(field: Field, missing: str) -> Field:
    """The field, or NaN where its text is `missing`."""
    return lambda text: math.nan if text == missing else field(text)


def read(
    path: Path | str,
    fields: Mapping[str, Field],
    *,
    header: Sequence[str] | None = None,
    encoding: str = "utf-8",
    comment: str | None = None,
    skip: int = 0,
) -> dict[str, np.ndarray]:
    """Reads some columns of a file of comma-separated values, gzipped or not.

    Blanks around a field don't count. Blank lines are passed over.

    Args:
      path: the file.
      fields: column name -> how its texts are read. Other columns are not looked at.
      header: names of all columns where the file has no header line.
      encoding: of the text.
      comment: lines that start with it are passed over.
      skip: lines before the header, or before the first row.

    Returns:
      Column name -> [n], n >= 1: float64, int64 or str.

    Raises:
      DataFileError: text of another encoding, a quote left open, a column missing or
        there twice, a row of another length, a field not as expected, no row, or the
        whole content twice. Names the line and the column.
    """
    reader = csv.reader(
        _lines(path, encoding, comment, skip), strict=True, skipinitialspace=True
    )

    def rows() -> Iterator[tuple[str, list[str]]]:
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                where = f"line {reader.line_num + skip}"
                raise DataFileError(path, where, f"not CSV, {error}.") from None
            if row is None:
                return
            if row:
                yield f"line {reader.line_num + skip}", row

    numbered = rows()
    if header is None:
        where, first = next(numbered, (f"line {skip + 1}", []))
        header = [column.strip() for column in first]
        for column in fields:
            if header.count(column) != 1:
                shown = ", ".join(map(repr, header[:8])) or "nothing"
                raise DataFileError(
                    path,
                    where,
                    f"expected a header with {column!r} once, found {shown[:200]}.",
                )
    wanted = [(c, header.index(c), parse, []) for c, parse in fields.items()]
    where, num_rows = f"line {skip + 1}", 0
    for where, row in numbered:
        num_rows += 1
        if len(row) != len(header):
            raise DataFileError(
                path, where, f"expected {len(header)} fields, found {len(row)}."
            )
        for column, i, parse, values in wanted:
            try:
                values.append(parse(row[i].strip()))
            except ValueError as error:
                raise DataFileError(
                    path,
                    f"{where}, column {column!r}",
                    f"{error}, found {row[i].strip()[:60]!r}.",
                ) from None
    if num_rows == 0:
        raise DataFileError(path, where, "expected rows of data, found none.")
    return {column: np.array(values) for column, _, _, values in wanted}


def _lines(
    path: Path | str, encoding: str, comment: str | None, skip: int
) -> Iterator[str]:
    """The lines of a file after the first `skip`; a comment is an empty line."""
    content = read_bytes(path).removeprefix(codecs.BOM_UTF8)
    half = len(content) // 2
    # The first test spares the second one's copies.
    again = content.startswith(content[half : half + 64])
    if half and again and content[:half] == content[half:]:
        problem = f"expected every row once, found the first {half} bytes again."
        raise DataFileError(path, f"byte {half}", problem)
    # Bytes split at line ends only; a str would also split at form feeds and the like.
    for i, line in enumerate(content.splitlines(keepends=True)):
        if i < skip:
            continue
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError as error:
            where = f"line {i + 1}, byte {error.start}"
            problem = f"expected {encoding} text, {error.reason}."
            raise DataFileError(path, where, problem) from None
        yield "\n" if comment and text.startswith(comment) else text
