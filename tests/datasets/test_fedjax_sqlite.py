"""FedJAX's SQLite files, with msgpack and its extension types written by hand."""

import sqlite3
import struct
import sys
import zlib

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers import files
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import characters, fedjax_sqlite, tff

pytest.importorskip("msgpack")

WRITERS = ["fedcba9876543210:f2200_01", "0123456789abcdef:f0001_41"]  # as in the file


def integer(value):
    """A msgpack uint, from the specification: positive fixint or uint 32."""
    return bytes([value]) if value < 128 else b"\xce" + struct.pack(">I", value)


def text(value):
    return b"\xdb" + struct.pack(">I", len(value)) + value.encode()


def binary(value):
    return b"\xc6" + struct.pack(">I", len(value)) + value


def array(*items):
    return b"\xdd" + struct.pack(">I", len(items)) + b"".join(items)


def extension(code, content):
    return b"\xc9" + struct.pack(">Ib", len(content), code) + content


def mapping(members):
    pairs = [text(name) + value for name, value in members.items()]
    return b"\xdf" + struct.pack(">I", len(members)) + b"".join(pairs)


def numbers(values, dtype=None):
    shape = array(*map(integer, values.shape))
    name = text(dtype or values.dtype.name)
    return extension(1, array(shape, name, binary(values.tobytes())))


def texts(values):
    return extension(4, array(array(integer(len(values))), array(*map(binary, values))))


def write(path, clients):
    """Client -> (msgpack or already compressed data, number of examples)."""
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY,"
            " data BLOB NOT NULL, num_examples INTEGER NOT NULL)"
        )
        rows = [(c.encode(), zlib.compress(d), n) for c, (d, n) in clients.items()]
        database.executemany("INSERT INTO federated_data VALUES (?, ?, ?)", rows)
    database.close()
    return path


@pytest.fixture
def emnist(tmp_path):
    """Split -> writer -> pixels and labels; the files are in tmp_path."""
    rng = np.random.default_rng(0)
    images = {
        split: {
            w: (rng.random((n, 28, 28), np.float32), rng.integers(0, 62, n, np.int32))
            for w, n in zip(WRITERS, sizes, strict=True)
        }
        for split, sizes in (("train", (3, 1)), ("test", (1, 2)))
    }
    for split, of_split in images.items():
        # Test has the clients in another order: they belong together by id.
        order = WRITERS if split == "train" else WRITERS[::-1]
        clients = {}
        for writer in order:
            x, y = of_split[writer]
            members = {"pixels": numbers(x), "label": numbers(y)}
            clients[writer] = mapping(members), len(y)
        write(tmp_path / f"federated_emnist_{split}.sqlite", clients)
    return images


def test_emnist(tmp_path, emnist):
    data = fedjax_sqlite.emnist(tmp_path)
    assert data.client_ids == tuple(WRITERS)
    assert [tff.is_high_school(c) for c in data.client_ids] == [True, False]
    for split, packed in data.splits.items():
        for i, writer in enumerate(WRITERS):
            x, y = emnist[split][writer]
            got = packed.client(i)
            assert (got["x"].dtype, got["y"].dtype) == (np.float32, np.int32)
            np.testing.assert_array_equal(got["x"], 1 - x[..., None])
            np.testing.assert_array_equal(got["y"], y)


def test_test_is_no_copy_of_train(tmp_path, emnist):
    train = tmp_path / "federated_emnist_train.sqlite"
    (tmp_path / "federated_emnist_test.sqlite").write_bytes(train.read_bytes())
    with pytest.raises(DataFileError, match=r"test: .* its own, found those of tra"):
        fedjax_sqlite.emnist(tmp_path)


def test_a_part_of_the_clients(tmp_path, emnist):
    data = fedjax_sqlite.emnist(tmp_path, max_clients=1)
    assert data.client_ids == (WRITERS[0],)
    assert data.splits["test"].sizes.tolist() == [1]
    assert fedjax_sqlite.emnist(tmp_path, clients=WRITERS[1:]).client_ids == (
        WRITERS[1],
    )
    with pytest.raises(DataFileError, match="'nobody': not among the 2 clients"):
        fedjax_sqlite.emnist(tmp_path, clients=["nobody"])
    for split in ("train", "test"):
        file = tmp_path / f"federated_emnist_{split}.sqlite"
        file.rename(tmp_path / f"federated_emnist_digitsonly_{split}.sqlite")
    with pytest.raises(DataFileError, match=r"label must be in 0\.\.9"):
        fedjax_sqlite.emnist(tmp_path, only_digits=True)


def test_shakespeare(tmp_path):
    for split, snippet in (("train", b"Ho!"), ("test", b"Who's there?")):
        members = {"snippets": texts([snippet, b""])}
        path = tmp_path / f"shakespeare_{split}.sqlite"
        write(path, {"HAMLET_BERNARDO": (mapping(members), 2)})
    data = fedjax_sqlite.shakespeare(tmp_path, length=6)
    assert data.client_ids == ("HAMLET_BERNARDO",)
    got = data.train.examples
    assert got["x"].dtype == np.int32
    assert characters.decode(got["y"]) == "Ho!"
    assert got["y"].tolist()[0][3:] == [characters.EOS, characters.BOS, characters.EOS]
    assert data.splits["test"].sizes.tolist() == [3]  # 12 + 2 + 2 - 1 pairs of ids


def test_stack_overflow(tmp_path):
    members = {"tokens": texts([b"a b", b"b"]), "score": numbers(np.array([-1, 5]))}
    write(tmp_path / "stackoverflow_held_out.sqlite", {"42": (mapping(members), 2)})
    data = fedjax_sqlite.stack_overflow(tmp_path, "heldout", {"b": 3}, length=3)
    assert data.client_ids == ("42",)
    assert data.train.examples["x"].tolist() == [[1, 4, 3], [1, 3, 0]]
    assert data.train.examples["y"].tolist() == [[4, 3, 2], [3, 2, 0]]


def test_every_kind_of_number(tmp_path):
    names = ["bool", *(f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64))]
    names += ["float16", "float32", "float64"]
    values = {name: np.array([[0, 1], [1, 0]], name) for name in names}
    data = mapping({name: numbers(v) for name, v in values.items()})
    path = write(tmp_path / "x.sqlite", {"c": (data, 2)})
    [(client_id, features)] = fedjax_sqlite.iterate(path)
    assert client_id == "c"
    for name, expected in values.items():
        assert features[name].dtype == expected.dtype
        np.testing.assert_array_equal(features[name], expected)


@pytest.mark.usefixtures("emnist")
def test_without_msgpack_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match=r"'fedjax_core\[formats\]'"):
        fedjax_sqlite.emnist(tmp_path)


def test_an_absent_file_says_what_to_fetch(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"https.*/fedjax/emnist/federated_"):
        fedjax_sqlite.emnist(tmp_path)


ONES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (mapping({"x": numbers(np.ones(3))}), r"expected 2 examples, found {'x': 3}"),
        (mapping({"x": numbers(ONES, "object")}), "expected a dtype of numbers"),
        (mapping({"x": numbers(ONES, "float64")}), r"float64 of shape \[2\], found 8"),
        (mapping({"x": extension(3, b"\x93\x90\xc4\x00\xc4\x00")}), "extension 3"),
        (mapping({"x": extension(1, b"\x01")}), "as 3 parts"),
        (
            mapping({"x": extension(1, array(array(text("a")), text("b"), text("c")))}),
            "the shape of an array",
        ),
        (
            mapping({"x": extension(4, array(array(integer(2)), array(integer(1))))}),
            "a list of texts of shape",
        ),
        (
            mapping({"x": extension(4, array(array(integer(1)), array(integer(1))))}),
            "expected texts, found 1",
        ),
        (mapping({"x": integer(2)}), "feature 'x' is no array"),
        (mapping({"x": numbers(np.float32(1))}), "feature 'x' is a scalar"),
        (mapping({}), "expected a map"),
        (array(), "expected a map"),
        (mapping({"x": numbers(ONES)})[:-1], "msgpack is damaged|incomplete"),
        (b"\x91" * 100_000, "msgpack is damaged"),
        (b"\xdd\xff\xff\xff\xff", "max_array_len|incomplete"),
        (b"\x81\xa1\xff\x90", "utf-8"),
    ],
)
def test_wrong_arrays(tmp_path, data, problem):
    path = write(tmp_path / "x.sqlite", {"c": (data, 2)})
    with pytest.raises(DataFileError, match=rf"x\.sqlite, client 'c': .*({problem})"):
        list(fedjax_sqlite.iterate(path))


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("ALTER TABLE federated_data RENAME TO data", "table federated_data"),
        ("UPDATE federated_data SET data = 1", "expected a BLOB"),
        ("UPDATE federated_data SET data = substr(data, 1, 40)", "does not end"),
        ("UPDATE federated_data SET data = x'0000'", "zlib stream is damaged"),
        ("UPDATE federated_data SET data = CAST(data || x'00' AS BLOB)", "more data"),
        ("UPDATE federated_data SET num_examples = 7 WHERE rowid = 2", "expected 7"),
        ("UPDATE federated_data SET client_id = x'ff' WHERE rowid = 1", "is no text"),
        ("UPDATE federated_data SET client_id = 7 WHERE rowid = 1", "is no text"),
        ("DELETE FROM federated_data WHERE rowid = 1", "one of train and test only"),
        ("DELETE FROM federated_data", "at least one"),
    ],
)
def test_wrong_tables(tmp_path, emnist, sql, problem):
    path = tmp_path / "federated_emnist_test.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(sql)
    database.close()
    with pytest.raises(DataFileError, match=rf"emnist_test\.sqlite.*{problem}"):
        fedjax_sqlite.emnist(tmp_path)


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(fedjax_sqlite, "max_unpacked", lambda n: 1 << 20)
    path = write(tmp_path / "x.sqlite", {"c": (bytes(3 << 20), 1)})
    with pytest.raises(DataFileError, match="does not end within 1048576 bytes"):
        list(fedjax_sqlite.iterate(path))
    # What the published files need is far below.
    assert files.max_unpacked(1 << 20) == 256 << 20


def check_emnist(data):
    for packed in data.splits.values():
        x, y = packed.examples["x"], packed.examples["y"]
        assert (x.dtype, y.dtype) == (np.float32, np.int32)
        assert x.shape == (len(y), 28, 28, 1)
        assert np.isin(y, np.arange(62)).all()


@pytest.mark.usefixtures("emnist")
def test_fuzz_sqlite(tmp_path):
    path = tmp_path / "federated_emnist_test.sqlite"
    assert survives(path, lambda: fedjax_sqlite.emnist(tmp_path), check_emnist, 80) > 40


def test_fuzz_msgpack(tmp_path):
    """Damage behind the checksum of zlib, to the arrays of a client."""
    path = tmp_path / "arrays"
    members = {"tokens": texts([b"a b", b"b"]), "score": numbers(np.array([-1, 5]))}
    path.write_bytes(mapping(members))

    def read():
        try:
            return fedjax_sqlite._unpack(zlib.compress(path.read_bytes()))
        except ValueError as error:  # `iterate` adds the file
            raise DataFileError(path, "client", str(error)) from error

    def check(features):
        for name, values in features.items():
            assert isinstance(name, str)
            assert values.ndim
            assert values.dtype.kind in "biufO"

    assert survives(path, read, check) > 100
