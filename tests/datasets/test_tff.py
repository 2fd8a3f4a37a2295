"""TFF's containers, written by the tests: HDF5 with h5py, SQLite with sqlite3.

`tf.train.Example` is encoded here field by field, from the Protocol Buffers
documentation; its documented examples are a test of their own.
"""

import lzma
import sqlite3
import struct
import sys

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import characters, tf_example, tff, tff_hdf5, tff_sqlite

h5py = pytest.importorskip("h5py")

WRITERS = ["f0000_14", "f2150_02", "f3999_00"]
SIZES = {"train": [3, 1, 2], "test": [1, 2, 1]}


def varint(value):
    value %= 2**64
    out = []
    while value > 127:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def field(number, content):
    return varint(number * 8 + 2) + varint(len(content)) + content


def feature(values):
    values = np.asarray(values).ravel()
    if values.dtype.kind in "SO":
        return field(1, b"".join(field(1, v) for v in values))
    if values.dtype.kind == "f":
        return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
    return field(3, field(1, b"".join(varint(int(v)) for v in values)))


def example(**features):
    entries = [
        field(1, field(1, k.encode()) + field(2, feature(v)))
        for k, v in features.items()
    ]
    return field(1, b"".join(entries))


def write_sqlite(path, splits, index=True):
    """Rows of a client are spread over the table, as nothing keeps them together."""
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL,"
            " serialized_example_proto BLOB NOT NULL)"
        )
        database.execute(
            "CREATE TABLE client_metadata (client_id TEXT NOT NULL,"
            " split_name TEXT NOT NULL, num_examples INTEGER NOT NULL)"
        )
        if index:
            database.execute(
                "CREATE INDEX idx_examples_client_id_split"
                " ON examples (split_name, client_id)"
            )
        for split, clients in splits.items():
            metadata = [(c, split, len(messages)) for c, messages in clients.items()]
            database.executemany(
                "INSERT INTO client_metadata VALUES (?, ?, ?)", metadata
            )
            rows = [
                (i, split, c, message)
                for c, messages in clients.items()
                for i, message in enumerate(messages)
            ]
            rows.sort(key=lambda row: row[0])
            database.executemany(
                "INSERT INTO examples VALUES (?, ?, ?)", [row[1:] for row in rows]
            )
    database.close()
    return path


def write_hdf5(path, clients):
    with h5py.File(path, "w") as file:
        examples = file.create_group("examples")
        for client_id, features in clients.items():
            group = examples.create_group(client_id)
            for name, values in features.items():
                text = np.asarray(values).dtype.kind in "SO"
                dtype = h5py.string_dtype("ascii") if text else None
                group.create_dataset(name, data=values, dtype=dtype)
    return path


@pytest.fixture(scope="module")
def images():
    """Split -> writer -> pixels [n, 28, 28] and label [n], as TFF has them."""
    rng = np.random.default_rng(0)
    return {
        split: {
            writer: {
                "pixels": rng.random((n, 28, 28), np.float32),
                "label": rng.integers(0, 10, n).astype(np.int32),
            }
            for writer, n in zip(WRITERS, sizes, strict=True)
        }
        for split, sizes in SIZES.items()
    }


def emnist_sqlite(path, images, index=True):
    splits = {
        f"digits_only_{split}": {
            # Ids in the table are not sorted.
            writer: [
                example(label=features["label"][i], pixels=features["pixels"][i])
                for i in range(len(features["label"]))
            ]
            for writer, features in sorted(clients.items(), reverse=True)
        }
        for split, clients in images.items()
    }
    return write_sqlite(path, splits, index)


def assert_is_emnist(data, images):
    assert data.client_ids == tuple(WRITERS)
    for split, packed in data.splits.items():
        assert packed.sizes.tolist() == SIZES[split]
        for i, writer in enumerate(WRITERS):
            stored, got = images[split][writer], packed.client(i)
            assert (got["x"].dtype, got["y"].dtype) == (np.float32, np.int32)
            np.testing.assert_array_equal(got["x"][..., 0], 1 - stored["pixels"])
            np.testing.assert_array_equal(got["y"], stored["label"])


def check_emnist(data):
    for packed in data.splits.values():
        x, y = packed.examples["x"], packed.examples["y"]
        assert (x.dtype, y.dtype) == (np.float32, np.int32)
        assert x.shape == (len(y), 28, 28, 1)
        assert x.min(initial=0) >= 0
        assert x.max(initial=0) <= 1
        assert np.isin(y, np.arange(10)).all()


# The message format.


def test_example_of_the_protocol_buffers_documentation():
    # "Encoding": 150 is 96 01, "testing" is field 2 of 07 bytes, [3, 270, 86942] is
    # packed as 03 8e 02 9e a7 05.
    numbers = bytes.fromhex("038e029ea705")
    assert b"".join(map(varint, (3, 270, 86942))) == numbers
    message = example(a=[150], b=np.array([b"testing"], object), c=[3, 270, 86942])
    assert bytes.fromhex("1a040a029601") in message
    assert bytes.fromhex("0a0774657374696e67") in message
    parsed = tf_example.parse(message)
    assert parsed["a"].tolist() == [150]
    assert parsed["b"].tolist() == [b"testing"]
    assert parsed["c"].tolist() == [3, 270, 86942]


def test_every_kind_and_size_of_number():
    ints = [0, 1, -1, 127, 128, 2**31, 2**62, 2**63 - 1, -(2**63)]
    floats = np.array([0, -1.5, 3.4e38, 1e-45, np.inf], np.float32)
    parsed = tf_example.parse(example(i=ints, f=floats, t=np.array([b"", b"\0x"])))
    assert parsed["i"].dtype == np.int64
    assert parsed["i"].tolist() == ints
    assert parsed["f"].dtype == np.float32
    np.testing.assert_array_equal(parsed["f"], floats)
    assert parsed["t"].tolist() == [b"", b"\0x"]
    assert tf_example.parse(b"") == {}


def test_numbers_need_not_be_packed_and_unknown_fields_are_skipped():
    unpacked = b"".join(varint(1 * 8) + varint(v) for v in (7, -7))
    floats = b"".join(varint(1 * 8 + 5) + struct.pack("<f", v) for v in (0.5, 2))
    unknown = varint(9 * 8) + varint(5) + varint(8 * 8 + 1) + bytes(8) + field(7, b"x")
    entries = [
        field(1, unknown + field(1, b"i") + field(2, field(3, unpacked))),
        field(1, field(1, b"f") + field(2, field(2, floats) + unknown)),
    ]
    parsed = tf_example.parse(unknown + field(1, b"".join(entries)))
    assert parsed["i"].tolist() == [7, -7]
    assert parsed["f"].tolist() == [0.5, 2]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (example(a=[1, 2])[:-1], "damaged"),
        (b"\x0a", "damaged"),
        (b"\x0b", "damaged"),
        (b"\x0a" + b"\xff" * 10 + b"\x01", "damaged"),
        (field(1, field(1, field(1, b"\xff"))), "not UTF-8"),
        (field(1, field(1, field(2, field(2, field(1, b"abc"))))), "damaged"),
        (field(1, field(1, field(2, field(3, field(1, b"\x80"))))), "damaged"),
        (
            field(1, field(1, field(2, field(3, field(1, b"\x80" * 10 + b"\1"))))),
            "damaged",
        ),
        (field(1, field(1, field(2, field(3, b"") + field(2, b"")))), "two lists"),
        (example(a=[1]) + example(a=[1]), "'a' occurs twice"),
    ],
)
def test_a_damaged_example_is_refused(message, problem):
    with pytest.raises(ValueError, match=problem):
        tf_example.parse(message)


# EMNIST, the same from every container.


@pytest.mark.parametrize("index", [True, False])
def test_emnist_from_sqlite(tmp_path, images, index):
    emnist_sqlite(tmp_path / "emnist_all.sqlite", images, index)
    assert_is_emnist(tff.emnist(tmp_path, only_digits=True), images)


@pytest.mark.parametrize("format", [lzma.FORMAT_ALONE, lzma.FORMAT_XZ])
def test_emnist_from_lzma(tmp_path, images, format):
    plain = emnist_sqlite(tmp_path / "emnist_all.sqlite", images)
    content = plain.read_bytes()
    (tmp_path / "emnist_all.sqlite.lzma").write_bytes(lzma.compress(content, format))
    plain.unlink()
    assert_is_emnist(tff.emnist(tmp_path, only_digits=True), images)
    assert len(list(tmp_path.iterdir())) == 2  # nothing but the two
    assert plain.read_bytes() == content
    assert_is_emnist(tff.emnist(tmp_path, only_digits=True), images)


def test_emnist_from_hdf5(tmp_path, images):
    for split, clients in images.items():
        write_hdf5(tmp_path / f"fed_emnist_digitsonly_{split}.h5", clients)
    assert_is_emnist(tff.emnist(tmp_path, only_digits=True), images)
    with pytest.raises(FileNotFoundError, match=r"emnist_all\.sqlite.*fed_emnist_test"):
        tff.emnist(tmp_path)


def test_test_is_no_copy_of_train(tmp_path, images):
    for split in ("train", "test"):
        path = tmp_path / f"fed_emnist_digitsonly_{split}.h5"
        write_hdf5(path, images["train"])
    with pytest.raises(DataFileError, match=r"test: .* its own, found those of tra"):
        tff.emnist(tmp_path, only_digits=True)


def test_a_part_of_the_clients(tmp_path, images):
    folder = {name: tmp_path / name for name in ("sqlite", "hdf5")}
    for path in folder.values():
        path.mkdir()
    emnist_sqlite(folder["sqlite"] / "emnist_all.sqlite", images)
    for split, clients in images.items():
        write_hdf5(folder["hdf5"] / f"fed_emnist_digitsonly_{split}.h5", clients)
    for path in folder.values():
        data = tff.emnist(path, True, clients=[WRITERS[2], WRITERS[0]])
        assert data.client_ids == (WRITERS[0], WRITERS[2])
        assert data.train.sizes.tolist() == [3, 2]
        data = tff.emnist(path, True, max_clients=2)
        assert data.client_ids == tuple(WRITERS[:2])
        assert data.splits["test"].sizes.tolist() == [1, 2]
        with pytest.raises(DataFileError, match=r"'f9999_00': not among the 3 clients"):
            tff.emnist(path, True, clients=["f9999_00"])
        with pytest.raises(ValueError, match="clients must be distinct"):
            tff.emnist(path, True, clients=["f9999_00"] * 2)
        with pytest.raises(ValueError, match="max_clients must be >= 1"):
            tff.emnist(path, True, max_clients=0)
        with pytest.raises(TypeError, match="clients must be a sequence"):
            tff.emnist(path, True, clients=WRITERS[0])


def test_iterating_gives_what_loading_packs(tmp_path, images):
    path = emnist_sqlite(tmp_path / "emnist_all.sqlite", images)
    parts = dict(tff.iterate(path, "digits_only_train", tff.emnist_examples))
    assert isinstance(tff.emnist(tmp_path, True), FederatedData)
    packed = Packed.from_lists(parts.values())
    train = tff.emnist(tmp_path, True).train
    np.testing.assert_array_equal(packed.examples["x"], train.examples["x"])
    _, raw = next(tff_sqlite.iterate(path, "digits_only_train"))
    assert {k: (v.dtype, v.shape) for k, v in raw.items()} == {
        "pixels": (np.float32, (3, 784)),
        "label": (np.int64, (3,)),
    }


def test_writers_of_two_kinds():
    assert [tff.is_high_school(w) for w in WRITERS] == [False, True, False]
    assert tff.is_high_school("0123456789abcdef:f2599_99")
    with pytest.raises(ValueError, match="client_id must be like"):
        tff.is_high_school("2100")


# The other families.


def test_shakespeare(tmp_path):
    lines = {
        "train": {"HAMLET_GHOST": [b"Mark me.", b"I am"], "LEAR_FOOL": [b"\xe9"]},
        "test": {"HAMLET_GHOST": [b"Pity me not"], "LEAR_FOOL": [b"a" * 12]},
    }
    for split, roles in lines.items():
        features = {r: {"snippets": np.array(s, object)} for r, s in roles.items()}
        write_hdf5(tmp_path / f"shakespeare_{split}.h5", features)
    from_hdf5 = tff.shakespeare(tmp_path, length=5)
    messages = {
        split: {
            r: [example(snippets=np.array([s], object)) for s in snippets]
            for r, snippets in roles.items()
        }
        for split, roles in lines.items()
    }
    write_sqlite(tmp_path / "shakespeare.sqlite", messages)
    for data in (from_hdf5, tff.shakespeare(tmp_path, length=5)):
        assert data.client_ids == ("HAMLET_GHOST", "LEAR_FOOL")
        ghost = data.train.client(0)
        # bos, 8 characters, eos, bos, 4 characters, eos: 15 pairs.
        assert ghost["x"].shape == ghost["y"].shape == (3, 5)
        assert characters.decode(ghost["x"]) == "Mark me.I am"
        assert ghost["y"][-1, -1] == characters.EOS
        assert data.train.client(1)["x"].tolist() == [
            [characters.BOS, characters.OUT_OF_VOCABULARY, 0, 0, 0]
        ]
        assert data.splits["test"].sizes.tolist() == [3, 3]  # 12 and 13 pairs


def test_cifar100_has_other_clients_in_test(tmp_path):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (4, 32, 32, 3))
    label, coarse = np.array([0, 99, 5, 6]), np.array([0, 19, 3, 4])

    splits = {"train": {"0": [0], "1": [1]}, "test": {"0": [2, 3]}}
    messages = {
        split: {
            c: [
                example(image=image[i], label=label[i], coarse_label=coarse[i])
                for i in rows
            ]
            for c, rows in of_split.items()
        }
        for split, of_split in splits.items()
    }
    write_sqlite(tmp_path / "cifar100.sqlite", messages)
    train, test = tff.cifar100(tmp_path), tff.cifar100(tmp_path, "test")
    assert (train.client_ids, test.client_ids) == (("0", "1"), ("0",))
    assert list(train.splits) == list(test.splits) == ["train"]
    got = test.train.examples
    assert got["x"].dtype == np.float32
    np.testing.assert_array_equal(got["x"], image[2:].astype(np.float32) / 255)
    assert (got["y"].tolist(), got["coarse"].tolist()) == ([5, 6], [3, 4])
    features = {"image": image[2:].astype(np.uint8), "label": label[2:]}
    (tmp_path / "cifar100.sqlite").unlink()
    features["coarse_label"] = coarse[2:]
    write_hdf5(tmp_path / "fed_cifar100_test.h5", {"0": features})
    from_hdf5 = tff.cifar100(tmp_path, "test").train.examples
    for name, values in got.items():
        np.testing.assert_array_equal(from_hdf5[name], values)
    with pytest.raises(ValueError, match="split must be one of 'train', 'test'"):
        tff.cifar100(tmp_path, "heldout")


def test_stack_overflow(tmp_path):
    (tmp_path / "stackoverflow.word_count").write_text("the 90\nto 80\nint 7\nrare 1\n")
    word_ids = tff.read_word_ids(tmp_path, 3)
    assert word_ids == {"the": 3, "to": 4, "int": 5}
    tokens = [b"how to cast the int", b"", b"the"]
    messages = [
        example(tokens=np.array([t], object), score=[-3], type=np.array([b"question"]))
        for t in tokens
    ]
    write_sqlite(tmp_path / "stackoverflow.sqlite", {"heldout": {"17": messages}})
    write_hdf5(
        tmp_path / "stackoverflow_held_out.h5",
        {"17": {"tokens": np.array(tokens, object), "score": np.array([-3, -3, -3])}},
    )
    x = [[1, 6, 4, 6], [1, 0, 0, 0], [1, 3, 0, 0]]
    y = [[6, 4, 6, 3], [2, 0, 0, 0], [3, 2, 0, 0]]
    for _ in range(2):
        data = tff.stack_overflow(tmp_path, "heldout", word_ids, length=4)
        assert data.client_ids == ("17",)
        assert data.train.examples["x"].tolist() == x
        assert data.train.examples["y"].tolist() == y
        assert data.train.examples["x"].dtype == np.int32
        (tmp_path / "stackoverflow.sqlite").unlink(missing_ok=True)  # then the HDF5
    with pytest.raises(DataFileError, match="10000 words, found 4"):
        tff.stack_overflow(tmp_path, "heldout")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("the 90\nthe 80\n", "line 2: 'the' occurs twice"),
        ("the 90\nto 91\n", "line 2: expected counts that do not rise"),
        ("the 90\nto\n", "line 2: expected a word and its count"),
        ("the 90\n\n", "line 2: expected a word"),
        (b"\xff 9\n", "line 1: not UTF-8"),
        ("", "at least 2 words, found 0"),
    ],
)
def test_damaged_word_counts(tmp_path, content, problem):
    path = tmp_path / "stackoverflow.word_count"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataFileError, match=problem):
        tff.read_word_ids(path, 2)


def test_celeba_by_examples_and_by_clients(tmp_path):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (4, 84, 84, 3))
    rows = [example(image=image[i], smiling=[i % 2], male=[i // 2]) for i in range(4)]
    splits = {
        "split_by_examples_train": {"7": rows[:1], "8": rows[1:2]},
        "split_by_examples_test": {"7": rows[2:3], "8": rows[3:]},
        "split_by_clients_train": {"7": rows[::2]},
        "split_by_clients_test": {"8": rows[1::2]},
    }
    write_sqlite(tmp_path / "celeba.sqlite", splits)
    data = tff.celeba(tmp_path)
    assert data.client_ids == ("7", "8")
    assert data.train.examples["y"].tolist() == [0, 1]
    expected = image[2:].astype(np.float32) / 255
    np.testing.assert_array_equal(data.splits["test"].examples["x"], expected)
    males = tff.celeba(tmp_path, "male", split="test")
    assert (males.client_ids, list(males.splits)) == (("8",), ["train"])
    assert males.train.examples["y"].tolist() == [0, 1]
    with pytest.raises(DataFileError, match="'bald', found image, smiling, male"):
        tff.celeba(tmp_path, "bald")


# What is wrong is said, with its place.


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    path = write_hdf5(tmp_path / "fed_cifar100_train.h5", {"0": {"label": [1]}})
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"'fedjax_core\[formats\]'"):
        list(tff.iterate(path, "train"))


def test_an_absent_file_says_what_to_fetch(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"https.*tff-datasets-public/celeba"):
        tff.celeba(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"stackoverflow\.word_count.*https"):
        tff.read_word_ids(tmp_path)


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("DROP TABLE examples", "table examples: expected columns"),
        ("ALTER TABLE examples RENAME client_id TO user", "found .*'user'"),
        ("DELETE FROM examples WHERE rowid = 2", "rows of split"),
        ("UPDATE client_metadata SET num_examples = 'x'", "rows of split"),
        ("INSERT INTO client_metadata SELECT * FROM client_metadata", "occurs twice"),
        ("UPDATE client_metadata SET split_name = 'other'", "splits are 'other'"),
        ("UPDATE client_metadata SET client_id = x'00'", "expected text, found b'"),
        ("UPDATE examples SET serialized_example_proto = 'text'", "example 0: .*BLOB"),
        (
            "UPDATE examples SET client_id = 'f3999_00' WHERE client_id = 'f0000_14'",
            "'f0000_14': found 0 rows",
        ),
        (
            "DELETE FROM examples WHERE split_name || client_id LIKE '%testf2%';"
            "DELETE FROM client_metadata WHERE split_name || client_id LIKE '%testf2%'",
            "'f2150_02': is in one of train and test only",
        ),
    ],
)
def test_wrong_tables(tmp_path, images, sql, problem):
    path = emnist_sqlite(tmp_path / "emnist_all.sqlite", images)
    with sqlite3.connect(path) as database:
        database.executescript(sql)
    database.close()
    with pytest.raises(DataFileError, match=rf"emnist_all\.sqlite.*{problem}"):
        tff.emnist(tmp_path, only_digits=True)


def test_a_view_is_not_run(tmp_path):
    path = tmp_path / "cifar100.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE client_metadata (client_id, split_name, num_examples)"
        )
        database.execute(
            "CREATE VIEW examples AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL"
            " SELECT i FROM n) SELECT 'train' AS split_name, '0' AS client_id,"
            " x'' AS serialized_example_proto FROM n"
        )
    database.close()
    with pytest.raises(DataFileError, match="table examples"):
        tff.cifar100(tmp_path)


@pytest.mark.parametrize(
    ("features", "problem"),
    [
        ({"label": [1]}, "expected feature 'pixels', found label"),
        ({"label": [1], "pixels": [0.5] * 783}, "images must be"),
        (
            {"label": [1], "pixels": [1] * 784},
            "pixels must hold numbers, found .*int64",
        ),
        ({"label": [1], "pixels": [1.5] * 784}, r"pixels must be in \[0, 1\]"),
        ({"label": [1], "pixels": [np.nan] * 784}, r"pixels must be in \[0, 1\]"),
        ({"label": [10], "pixels": [0.5] * 784}, r"label must be in 0\.\.9"),
        ({"label": [1, 2], "pixels": [0.5] * 784}, r"label must be \[n\]"),
    ],
)
def test_wrong_features(tmp_path, features, problem):
    rows = {"c": [example(**features)]}
    splits = {f"digits_only_{split}": rows for split in ("train", "test")}
    write_sqlite(tmp_path / "emnist_all.sqlite", splits)
    with pytest.raises(DataFileError, match=f"client 'c': {problem}"):
        tff.emnist(tmp_path, only_digits=True)


def test_examples_of_a_client_must_be_alike(tmp_path):
    path = tmp_path / "emnist_all.sqlite"
    write_sqlite(
        path, {"all_train": {"c": [example(label=[1]), example(label=[1, 2])]}}
    )
    with pytest.raises(DataFileError, match="client 'c', example 1: expected the feat"):
        list(tff_sqlite.iterate(path, "all_train"))


def hdf5_of_two_lengths(file):
    group = file.create_group("examples/c")
    group["pixels"], group["label"] = np.zeros((2, 28, 28), "f4"), np.zeros(3, int)


def hdf5_with_links(file):
    file.create_group("examples")["c"] = h5py.ExternalLink("/etc/passwd", "/")


def hdf5_with_soft_link(file):
    file.create_group("a/c")
    file["examples"] = h5py.SoftLink("/a")


def hdf5_of_other_files(file):
    dtype, where = np.uint8, [("/etc/passwd", 0, 100)]
    file.create_group("examples/c").create_dataset(
        "pixels", (100,), dtype, external=where
    )


def hdf5_larger_than_memory(file):
    file.create_group("examples/c").create_dataset(
        "pixels", (2**50, 28, 28), "f4", chunks=(1, 28, 28), compression="gzip"
    )


@pytest.mark.parametrize(
    ("fill", "problem"),
    [
        (lambda file: None, "expected 'examples'"),
        (lambda file: file.create_dataset("examples", data=1), "expected a Group"),
        (lambda file: file.create_group("examples"), "at least one"),
        (lambda file: file.create_group("examples/c"), "features of one length"),
        (lambda file: file.create_group("examples/c/pixels"), "expected a Dataset"),
        (lambda file: file.create_dataset("examples/c/x", data=1), "numbers or texts"),
        (hdf5_of_two_lengths, "one length, found .*'label': 3, 'pixels': 2"),
        (hdf5_with_links, "links are not followed"),
        (hdf5_with_soft_link, "links are not followed"),
        (hdf5_of_other_files, "data in other files are not read"),
        (hdf5_larger_than_memory, "more than a file of this size can hold"),
    ],
)
def test_wrong_hdf5(tmp_path, fill, problem):
    path = tmp_path / "fed_cifar100_train.h5"
    with h5py.File(path, "w") as file:
        fill(file)
    with pytest.raises(DataFileError, match=rf"fed_cifar100_train\.h5.*{problem}"):
        tff.cifar100(tmp_path)


def test_a_heap_whose_objects_do_not_advance(tmp_path):
    # HDF5 2.0 reads this without end.
    path = write_hdf5(tmp_path / "x.h5", {"c": {"t": np.array([b"to be"], object)}})
    content = bytearray(path.read_bytes())
    at = content.index(b"to be") + 8  # the free object that ends the heap
    assert content[at : at + 2] == bytes(2)
    content[at + 8 : at + 16] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(DataFileError, match=f"byte {at}: expected an object"):
        list(tff_hdf5.iterate(path))


def test_bombs_and_leftovers_of_lzma(tmp_path, monkeypatch):
    path = tmp_path / "cifar100.sqlite.lzma"
    monkeypatch.setattr(tff_sqlite, "max_unpacked", lambda n: 1 << 20)
    path.write_bytes(lzma.compress(bytes(3 << 20)))
    with pytest.raises(DataFileError, match="unpacks to more than 1048576 bytes"):
        tff.cifar100(tmp_path)
    good = lzma.compress(b"x" * 1000)
    path.write_bytes(good + good)
    with pytest.raises(DataFileError, match=f"byte {len(good)}: more data"):
        tff.cifar100(tmp_path)
    path.write_bytes(good[:-1])
    with pytest.raises(DataFileError, match="cut off"):
        tff.cifar100(tmp_path)
    # A dictionary of 4 GiB, which the header only claims.
    alone = bytearray(lzma.compress(b"x" * 1000, lzma.FORMAT_ALONE))
    alone[1:5] = b"\xff" * 4
    path.write_bytes(alone)
    with pytest.raises(DataFileError, match="damaged"):
        tff.cifar100(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


# Random damage.


def test_fuzz_hdf5(tmp_path, images):
    for split, clients in images.items():
        write_hdf5(tmp_path / f"fed_emnist_digitsonly_{split}.h5", clients)
    path = tmp_path / "fed_emnist_digitsonly_test.h5"
    assert survives(path, lambda: tff.emnist(tmp_path, True), check_emnist, 80) > 20


def test_fuzz_hdf5_of_texts(tmp_path):
    roles = {r: {"snippets": np.array([b"Ay", b"No, sir."], object)} for r in "ABC"}
    for split in ("train", "test"):
        write_hdf5(tmp_path / f"shakespeare_{split}.h5", roles)

    def check(data):
        x, y = (data.splits["test"].examples[name] for name in "xy")
        assert x.dtype == y.dtype == np.int32
        assert x.shape == y.shape == (len(x), 80)

    path = tmp_path / "shakespeare_test.h5"
    assert survives(path, lambda: tff.shakespeare(tmp_path), check, 80) > 20


def test_fuzz_sqlite_and_its_examples(tmp_path, images):
    path = emnist_sqlite(tmp_path / "emnist_all.sqlite", images)
    assert survives(path, lambda: tff.emnist(tmp_path, True), check_emnist, 80) > 20


@pytest.mark.parametrize("format", [lzma.FORMAT_ALONE, lzma.FORMAT_XZ])
def test_fuzz_lzma(tmp_path, images, format):
    plain = emnist_sqlite(tmp_path / "emnist_all.sqlite", images)
    path = tmp_path / "emnist_all.sqlite.lzma"
    path.write_bytes(lzma.compress(plain.read_bytes(), format))

    def read():
        plain.unlink(missing_ok=True)
        tff_sqlite.unpack(path)  # its errors name the packed file, later ones the other
        try:
            return tff.emnist(tmp_path, True)
        except DataFileError as error:
            raise DataFileError(path, error.where, str(error)) from error

    assert survives(path, read, check_emnist, 80) > 60


def test_fuzz_tf_example(tmp_path):
    path = tmp_path / "example"
    texts = np.array([b"to", b"be"], object)
    path.write_bytes(example(pixels=[0.5] * 9, label=[300, -1], snippets=texts))

    def read():
        try:
            return tf_example.parse(path.read_bytes())
        except ValueError as error:  # tff_sqlite adds the file
            raise DataFileError(path, "example", str(error)) from error

    def check(features):
        for name, values in features.items():
            assert isinstance(name, str)
            assert values.ndim == 1
            assert values.dtype in (np.float32, np.int64, object)
            if values.dtype == object:
                assert all(isinstance(v, bytes) for v in values)

    assert survives(path, read, check) > 50
