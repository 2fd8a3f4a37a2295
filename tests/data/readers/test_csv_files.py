"""CSV files field by field, right and wrong."""

import gzip
import math

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers import csv_files
from fedjax_core.data.readers.files import DataFileError

FIELDS = {
    "town": csv_files.name,
    "n": csv_files.integer,
    "t": csv_files.optional(csv_files.number, "-"),
}
GOOD = 'town,skipped,n,t\n"Å, B",x, 3 ,-1.5\n\nC,,-4,-\n'


def test_columns_come_by_name_and_with_their_types(tmp_path):
    path = tmp_path / "a.csv"
    for content in (
        GOOD.encode(),
        b"\xef\xbb\xbf" + GOOD.encode(),
        GOOD.replace("\n", "\r\n").encode(),
        gzip.compress(GOOD.encode(), mtime=0),
    ):
        path.write_bytes(content)
        table = csv_files.read(path, FIELDS)
        assert table["town"].tolist() == ["Å, B", "C"]
        assert table["n"].tolist() == [3, -4]
        assert table["n"].dtype == np.int64
        assert table["t"].dtype == np.float64
        np.testing.assert_array_equal(table["t"], [-1.5, math.nan])


def test_a_file_without_header_with_comments_and_other_encodings(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("ignored\n|c,d\nÅ,1\nb,2\n".encode("latin-1"))
    fields = {"town": csv_files.name, "n": csv_files.level(1, 2)}
    table = csv_files.read(
        path,
        fields,
        header=("town", "n"),
        encoding="latin-1",
        comment="|",
        skip=1,
    )
    assert table["town"].tolist() == ["Å", "b"]
    assert table["n"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: expected a header with 'town' once, found nothing"),
        ("town,skipped,n,t\n", "line 1: expected rows of data, found none"),
        ("town,n\na,1\n", "header with 't' once, found 'town', 'n'"),
        ("town,n,t,n\na,1,2,3\n", "header with 'n' once"),
        (GOOD + "D,,1\n", "line 5: expected 4 fields, found 3"),
        (GOOD + "D,,1,2,3\n", "line 5: expected 4 fields, found 5"),
        (GOOD + "D,,1.5,2\n", "line 5, column 'n': expected a whole number of 32 bits"),
        (GOOD + "D,,1,warm\n", "line 5, column 't': expected a number, found 'warm'"),
        (GOOD + "D,,1,nan\n", "line 5, column 't': expected a number, found 'nan'"),
        (GOOD + "D,,1,1e39\n", "line 5, column 't': expected a number, found '1e39'"),
        (GOOD + "D,,1,1_0\n", "column 't': expected a number"),
        (GOOD + "D,,1,\N{ARABIC-INDIC DIGIT ONE}\n", "column 't': expected a number"),
        (GOOD + ",,1,2\n", "line 5, column 'town': expected a name of 1 to 200"),
        (GOOD + "a\0b,,1,2\n", "line 5, column 'town': expected a name"),
        (GOOD + '"D,,1,2\n', "line 5: not CSV, unexpected end of data"),
        (GOOD + GOOD, "line 5: expected rows, found the header again"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataFileError, match=message) as raised:
        csv_files.read(path, FIELDS)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD.encode("latin-1"), "line 2, byte 1: expected utf-8 text"),
        (GOOD.encode("utf-16"), "expected utf-8 text"),
        (gzip.compress(GOOD.encode(), mtime=0)[:-9], "gzip stream: damaged"),
    ],
)
def test_other_encodings_and_cut_files_are_refused(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataFileError, match=message):
        csv_files.read(path, FIELDS)


def test_a_file_appended_to_itself_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1,2\n3,4\n" * 2)
    fields = dict.fromkeys("ab", csv_files.number)
    with pytest.raises(DataFileError, match="line 3: expected every row once"):
        csv_files.read(path, fields, header="ab")
    path.write_text("a,b\n1,2\n\n3,4\n1,2\n3,4")  # the header is not there again
    with pytest.raises(DataFileError, match=r"line 5: .*found the first 2 again"):
        csv_files.read(path, fields)


def test_rows_may_be_alike(tmp_path):
    path = tmp_path / "a.csv"
    fields = dict.fromkeys("ab", csv_files.number)
    for times in (2, 4):
        path.write_text("1,2\n" * times)
        assert csv_files.read(path, fields, header="ab")["a"].tolist() == [1] * times


def test_other_columns_and_separators(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("c\ta\tb\n1\tx\t3\n")
    fields = {"a": csv_files.name}
    table = csv_files.read(path, fields, others=csv_files.number, delimiter="\t")
    assert {c: v.tolist() for c, v in table.items()} == {"a": ["x"], "c": [1], "b": [3]}
    path.write_text("c\ta\tc\n1\tx\t3\n")
    with pytest.raises(DataFileError, match="expected a header with 'c' once"):
        csv_files.read(path, fields, others=csv_files.number, delimiter="\t")
    assert list(csv_files.read(path, fields, delimiter="\t")) == ["a"]


def test_whole_numbers_have_32_bits():
    for value in (-(2**31), 2**31 - 1, 0):
        assert csv_files.integer(str(value)) == value
    for text in (str(2**31), str(-(2**31) - 1), "1" * 30, "1_0", "+", "", "\u0661"):
        with pytest.raises(ValueError, match="whole number of 32 bits"):
            csv_files.integer(text)


def test_levels_and_categories_are_closed():
    assert csv_files.level(0, 1)("1.0") == 1
    with pytest.raises(ValueError, match="expected one of 0, 1"):
        csv_files.level(0, 1)("2")
    read = csv_files.category(("a", "b"), missing="?")
    assert [read(t) for t in "ab?"] == [0, 1, -1]
    with pytest.raises(ValueError, match=r"expected one of 'a', 'b', '\?'"):
        read("c")


def test_a_header_again_is_refused_where_its_fields_would_pass(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0,1\n5,6\n0,1\n7,8\n")
    with pytest.raises(DataFileError, match="line 3: expected rows, found the header"):
        csv_files.read(path, dict.fromkeys("01", csv_files.number))
    path.write_text("\n0,1\n5,6\n")
    table = csv_files.read(path, dict.fromkeys("01", csv_files.number))
    assert table["0"].tolist() == [5]


def test_names_are_of_any_script_and_without_controls(tmp_path):
    names = [
        "\N{ZERO WIDTH JOINER}a",
        "\N{WAVING HAND SIGN}",
        "a\N{NO-BREAK SPACE}b",
        "Å",
    ]
    path = tmp_path / "a.csv"
    path.write_text("who\n" + "\n".join(names) + "\n", encoding="utf-8")
    assert csv_files.read(path, {"who": csv_files.name})["who"].tolist() == names
    for control in ("\x07", "\x1b", "\x85"):
        path.write_text(f"who\na{control}b\n", encoding="utf-8")
        with pytest.raises(DataFileError, match=r"line 2, column .who.: .* of control"):
            csv_files.read(path, {"who": csv_files.name})


def test_a_column_without_a_name_is_refused_where_it_would_be_read(tmp_path):
    # pandas writes numbers of rows so: sorted by class, they give the class away.
    path = tmp_path / "a.csv"
    path.write_text(",who,x\n0,a,1.5\n1,b,2.5\n")
    fields = {"who": csv_files.name}
    with pytest.raises(DataFileError, match="line 1, column 1: expected a name, found"):
        csv_files.read(path, fields, others=csv_files.number)
    assert list(csv_files.read(path, fields)) == ["who"]


@pytest.mark.parametrize("seed", range(3))
def test_plain_files_read_the_same_with_and_without_quotes(tmp_path, seed):
    # A quote anywhere sends a file to the reader that knows lines.
    rng = np.random.default_rng(seed)
    rows = [
        f"{rng.choice(['a', ' b', 'Å '])},{rng.integers(-9, 9)},"
        f"{rng.choice(['-', '1e3', '.5', '-0', '7.25 '])},{rng.normal():.17g}"
        for _ in range(50)
    ]
    fields = FIELDS | {"w": csv_files.number}
    plain, quoted = tmp_path / "plain.csv", tmp_path / "quoted.csv"
    end = rng.choice(["\n", "\r\n", "\n\n"])
    plain.write_bytes((end.join(["town,n,t,w", *rows]) + end).encode())
    quoted.write_bytes((end.join(['town,n,t,"w"', *rows]) + end).encode())
    a, b = csv_files.read(plain, fields), csv_files.read(quoted, fields)
    for column in fields:
        assert a[column].dtype == b[column].dtype
        np.testing.assert_array_equal(a[column], b[column])


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_damaged_files_give_named_errors_or_good_columns(tmp_path, pack):
    path = tmp_path / "a.csv"
    path.write_bytes(pack(GOOD.encode()))

    def check(table):
        assert [v.dtype.kind for v in table.values()] == ["U", "i", "f"]
        assert len({len(v) for v in table.values()}) == 1

    assert survives(path, lambda: csv_files.read(path, FIELDS), check) > 50
