"""Columns of CSV files, every field checked: errors name the line and the column."""

import codecs
import csv
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_core.data.readers.files import DataFileError, is_name, read_bytes

_LARGEST = float(np.finfo(np.float32).max)

Field = Callable[[str], Any]
"""Turns the text of a field into a value; its ValueError says what it expected."""


def number(text: str) -> float:
    """A decimal number that fits float32."""
    # Python's float also takes "nan", "inf" and "1_000", no file format here does.
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if abs(value) <= _LARGEST:
        return value
    raise ValueError("expected a number")


def integer(text: str) -> int:
    """A whole number of 32 bits."""
    if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 12:
        value = int(text)
        if -(2**31) <= value < 2**31:
            return value
    raise ValueError("expected a whole number of 32 bits")


def name(text: str) -> str:
    """The name of a client, say."""
    if is_name(text):
        return text
    raise ValueError("expected a name of 1 to 200 characters, none of control")


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
    others: Field | None = None,
    header: Sequence[str] | None = None,
    delimiter: str = ",",
    encoding: str = "utf-8",
    comment: str | None = None,
    skip: int = 0,
) -> dict[str, np.ndarray]:
    """Reads columns of a file of comma-separated values, gzipped or not.

    Blanks around a field don't count. Blank lines are passed over.

    Args:
      path: the file.
      fields: column name -> how its texts are read.
      others: how all other columns are read; by default they are not looked at.
      header: names of all columns where the file has no header line.
      delimiter: what separates columns.
      encoding: of the text.
      comment: lines that start with it are passed over.
      skip: lines before the header, or before the first row.

    Returns:
      Column name -> [n], n >= 1: float64, int64 or str. Columns of `fields` come first,
      others in the order of the header.

    Raises:
      DataFileError: text of another encoding, a quote left open, a column missing or
        there twice, a row of another length, a field not as expected, no row, the
        header again, or all rows again (of several that differ). Names the line and
        the column.
    """
    content = read_bytes(path).removeprefix(codecs.BOM_UTF8)
    rows = _rows(path, content, encoding, comment, skip, delimiter)
    line, first = skip + 1, None
    if header is None:
        line, first = next(rows, (line, []))
        header = [column.strip() for column in first]
    if others is not None:
        fields = {**fields, **{c: others for c in header if c not in fields}}
    for column in fields:
        if not column:
            where = f"line {line}, column {header.index(column) + 1}"
            problem = (
                "expected a name, found none: numbers of rows, perhaps, that were "
                "written with the table. Name the columns that are features."
            )
            raise DataFileError(path, where, problem)
        if header.count(column) != 1:
            shown = ", ".join(map(repr, header[:8])) or "nothing"
            problem = f"expected a header with {column!r} once, found {shown[:200]}."
            raise DataFileError(path, f"line {line}", problem)
    if encoding == "utf-8" and comment is None and skip == 0 and first is not None:
        fast = _read_plain(content, header, fields, delimiter)
        if fast is not None:
            return fast
    wanted = [(c, header.index(c), parse, []) for c, parse in fields.items()]
    lines, hashes = [], []
    for line, row in rows:
        where = f"line {line}"
        if len(row) != len(header):
            raise DataFileError(path, where, f"{len(header)} fields", len(row))
        if row == first:
            raise DataFileError(path, where, "rows", "the header again")
        for column, i, parse, values in wanted:
            try:
                values.append(parse(row[i].strip()))
            except ValueError as error:
                where = f"{where}, column {column!r}"
                problem = f"{error}, found {row[i].strip()[:60]!r}."
                raise DataFileError(path, where, problem) from None
        lines.append(line)
        hashes.append(hash(tuple(row)))
    if not lines:
        raise DataFileError(path, f"line {line}", "rows of data", "none")
    half = len(lines) // 2
    if hashes[:half] == hashes[half:] and len(set(hashes)) > 1:
        again = f"the first {half} again"
        raise DataFileError(path, f"line {lines[half]}", "every row once", again)
    return {column: np.array(values) for column, _, _, values in wanted}


def _read_plain(
    content: bytes, header: Sequence[str], fields: Mapping[str, Field], delimiter: str
) -> dict[str, np.ndarray] | None:
    """What `read` returns, many times faster, or None where anything is unusual.

    Files without a quote are read by Arrow. Whatever it or a field does not take is
    left to the reader that knows lines, which then says what is wrong.
    """
    import pyarrow as pa
    from pyarrow import compute
    from pyarrow import csv as arrow

    if b'"' in content or b"\0" in content or _lone_returns(content):
        return None
    top = content.split(b"\n", 1)[0].rstrip()
    if not top or b"\n" + top in content:  # blank lines first, or the header again
        return None
    places = [str(i) for i in range(len(header))]
    try:
        table = arrow.read_csv(
            pa.BufferReader(content),
            arrow.ReadOptions(column_names=places, skip_rows=1),
            arrow.ParseOptions(delimiter=delimiter, quote_char=False),
            arrow.ConvertOptions(
                column_types=dict.fromkeys(places, pa.string()),
                strings_can_be_null=False,
            ),
        )
        out = {}
        for column, parse in fields.items():
            texts = compute.call_function(
                "utf8_trim_whitespace", [table[str(header.index(column))]]
            )
            if parse is number:
                out[column] = texts.cast(pa.float64()).to_numpy()
                if not (np.abs(out[column]) <= _LARGEST).all():
                    return None
            else:  # each text once
                texts = texts.combine_chunks().dictionary_encode()
                values = np.array([parse(t) for t in texts.dictionary.to_pylist()])
                out[column] = values[texts.indices.to_numpy()]
    except (pa.ArrowInvalid, ValueError, IndexError):
        return None
    half, odd = divmod(table.num_rows, 2)
    again = not odd and table[:half].equals(table[half:])
    return None if again else out


def _lone_returns(content: bytes) -> bool:
    return b"\r" in content and content.count(b"\r\n") != content.count(b"\r")


def _rows(
    path: Path | str,
    content: bytes,
    encoding: str,
    comment: str | None,
    skip: int,
    delimiter: str,
) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and texts of every row, the header's included."""
    # Bytes split at line ends only; a str would also split at form feeds and the like.
    split = content.splitlines(keepends=True) if _lone_returns(content) else None

    def lines() -> Iterator[str]:
        """The lines after the first `skip`; a comment is an empty line."""
        rest = itertools.islice(split or io.BytesIO(content), skip, None)
        for i, line in enumerate(rest, skip + 1):
            try:
                text = line.decode(encoding)
            except UnicodeDecodeError as error:
                where = f"line {i}, byte {error.start}"
                problem = f"expected {encoding} text, {error.reason}."
                raise DataFileError(path, where, problem) from None
            yield "\n" if comment and text.startswith(comment) else text

    reader = csv.reader(
        lines(), delimiter=delimiter, strict=True, skipinitialspace=True
    )
    try:
        for row in reader:
            if row:
                yield reader.line_num + skip, row
    except csv.Error as error:
        where = f"line {reader.line_num + skip}"
        raise DataFileError(path, where, f"not CSV, {error}.") from None
