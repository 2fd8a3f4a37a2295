"""Whatever form data comes in, the population is the one that was put there."""

import gzip
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.test_packed import assert_clients_equal
from tests.datasets.mutations import mutations

from fedjax_core.data import sources
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers.files import DataFileError

rows = st.lists(st.integers(0, 20), max_size=12)


def pooled(clients, start=0):
    """Examples that carry their number, and whose they are."""
    return {
        "x": np.arange(start, start + len(clients), dtype=np.float32)[:, None],
        "client": np.array(clients, np.int64),
    }


@settings(deadline=None)
@given(rows.filter(bool), rows, st.booleans())
def test_arrays_are_grouped_by_client(train, test, sort):
    data = sources.from_arrays(pooled(train), pooled(test, 100), sort=sort)
    order = sorted({*train, *test}) if sort else list(dict.fromkeys([*train, *test]))
    assert data.client_ids == tuple(map(str, order))
    for start, split, owners in ((0, data.train, train), (100, data.test, test)):
        assert split is not None
        assert list(split.examples) == ["x"]
        for i, owner in enumerate(order):
            expected = [start + k for k, who in enumerate(owners) if who == owner]
            assert split.client(i)["x"][:, 0].tolist() == expected


def test_numbers_are_sorted_by_value_and_text_alphabetically():
    def ids(client, **kwargs):
        train = {"who": client, "y": np.zeros(len(client))}
        return sources.from_arrays(train, client="who", **kwargs).client_ids

    assert ids([10, 9, 10, 2]) == ("2", "9", "10")
    assert ids([10, 9, 10, 2], sort=False) == ("10", "9", "2")
    assert ids(np.array([3, 1], np.uint8)) == ("1", "3")
    assert ids(["b", "10", "2", "ä", "a"]) == ("10", "2", "a", "b", "ä")


def test_large_numbers_stay_apart():
    def ids(train, test, **kwargs):
        return sources.from_arrays(
            {"y": np.arange(len(train)), "client": train},
            {"y": np.arange(len(test)), "client": test},
            **kwargs,
        ).client_ids

    big, small = np.array([2**60, 2**60 + 2], np.uint64), np.array([2**60 + 1, -1])
    ordered = (-1, 2**60, 2**60 + 1, 2**60 + 2)
    assert ids(big, small) == tuple(map(str, ordered))
    assert ids(small, big, sort=False) == tuple(map(str, (2**60 + 1, -1, *big)))
    assert ids(np.array([3], np.uint64), np.array([3])) == ("3",)


def test_grouped_arrays_are_held():
    x = np.zeros((3, 2))
    data = sources.from_arrays({"x": x, "client": [1, 1, 2]})
    assert data.train.examples["x"] is x


@pytest.mark.parametrize(
    ("train", "test", "error", "message"),
    [
        ({"y": [1]}, None, ValueError, "one of 'y', got 'client'"),
        ({"y": [1], "client": [[1]]}, None, ValueError, r"1 rows of train, got shape"),
        ({"y": [1, 2], "client": [1]}, None, ValueError, r"2 rows of train, got"),
        ({"y": [1], "client": [1.0]}, None, TypeError, "got float64 in train"),
        ({"y": [1], "client": [None]}, None, TypeError, "got object in train"),
        ({"y": [1], "client": [1]}, {"y": [1], "client": ["1"]}, TypeError, "in test"),
        ({"y": [], "client": np.zeros(0, int)}, None, ValueError, "at least one exam"),
        ({"client": [1]}, None, ValueError, "at least one array"),
        (
            {"x": np.zeros((1, 3)), "client": [1]},
            {"x": np.zeros((1, 4), np.float32), "client": [1]},
            ValueError,
            r"x must .* float64\[3\] for train and float32\[4\] for test",
        ),
    ],
)
def test_bad_arrays_are_refused(train, test, error, message):
    with pytest.raises(error, match=message):
        sources.from_arrays(train, test)


def clients_one_by_one():
    yield "b", {"y": np.array([1, 2])}
    yield "a", {"test": {"y": np.array([3])}}
    yield "c", {"train": {"y": np.array([4])}, "validation": {"y": np.array([5, 6])}}
    yield "d", {}


def test_an_iterator_keeps_its_order():
    data = sources.from_iterator(clients_one_by_one())
    assert data.client_ids == ("b", "a", "c", "d")
    got = {
        name: [split.client(i)["y"].tolist() for i in range(4)]
        for name, split in data.splits.items()
    }
    assert got == {
        "train": [[1, 2], [], [4], []],
        "test": [[], [3], [], []],
        "validation": [[], [], [5, 6], []],
    }


@pytest.mark.parametrize(
    ("clients", "error", "message"),
    [
        ([], ValueError, "got 0 clients without"),
        ([("a", {"test": {"y": [1]}})], ValueError, "got 1 clients without"),
        ([("a", {"y": [1]}), ("a", {"y": [1]})], ValueError, "'a' twice"),
        ([(1, {"y": [1]})], TypeError, "must be strs, got 1"),
        ([("a", {"y": [1], "test": {"y": [1]}})], ValueError, "got 'y', 'test'"),
        ([("a", {"training": {"y": [1]}})], ValueError, "got 'training'"),
        ([("a", [1, 2])], TypeError, r"must be a dict of arrays, got \[1, 2\]"),
        (
            [("a", {"train": {"y": [1]}, "test": {"z": [1]}})],
            ValueError,
            r"arrays must be the same, got \['y'\] for train and \['z'\] for test",
        ),
        ([("a", {"y": [1]}), ("b", {"y": [1.5]})], ValueError, "y must have one dtype"),
    ],
)
def test_bad_iterators_are_refused(clients, error, message):
    with pytest.raises(error, match=message):
        sources.from_iterator(clients)


def write_npz(path, n, start=0):
    path.parent.mkdir(exist_ok=True, parents=True)
    y = np.arange(start, start + n, dtype=np.int32)
    arrays = {"x": np.stack([y, -y], 1).astype(np.float32), "y": y}
    np.savez(path, **arrays)
    return arrays


def test_a_folder_of_npz_files(tmp_path):
    first = write_npz(tmp_path / "train" / "b.npz", 3)
    second = write_npz(tmp_path / "train" / "a.b.npz", 2, 10)
    third = write_npz(tmp_path / "test" / "z.npz", 1, 20)
    (tmp_path / "train" / "notes.txt").write_text("passed over")
    data = sources.from_npz(tmp_path)
    assert data.client_ids == ("a.b", "b", "z")
    none = {"x": np.zeros((0, 2), np.float32), "y": np.zeros(0, np.int32)}
    assert_clients_equal(data.train, [second, first, none])
    assert_clients_equal(data.test, [none, none, third])
    assert sources.from_npz(tmp_path / "train").client_ids == ("a.b", "b")


def test_layouts_in_npz_files(tmp_path):
    given = {
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big": np.arange(2, dtype=">f4"),
        "text": np.array(["a", "bc"]),
    }
    np.savez_compressed(tmp_path / "a.npz", **given)
    got = sources.from_npz(tmp_path).train.client(0)
    for name, array in given.items():
        np.testing.assert_array_equal(got[name], array)
    assert got["big"].dtype == np.float32
    assert got["big"].dtype.isnative


def test_npz_files_that_are_no_population(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.npz file in .*train; put one"):
        sources.from_npz(tmp_path)
    write_npz(tmp_path / "train" / "a.npz", 2)
    write_npz(tmp_path / "b.npz", 2)
    with pytest.raises(ValueError, match=r"got both: b\.npz is in none"):
        sources.from_npz(tmp_path)
    (tmp_path / "b.npz").unlink()
    np.savez(tmp_path / "train" / "c.npz", x=np.zeros((1, 2)), y=np.zeros(1, np.int32))
    with pytest.raises(
        ValueError, match=r"x must .*a\.npz and float64\[2\] for .*c\.npz"
    ):
        sources.from_npz(tmp_path)
    (tmp_path / "test").mkdir()
    (tmp_path / "train" / "c.npz").rename(tmp_path / "test" / "c.npz")
    with pytest.raises(DataFileError, match=r"x must .*train/a\.npz and .*test/c\.npz"):
        sources.from_npz(tmp_path)
    np.savez(tmp_path / "train" / "c.npz", x=np.zeros((1, 2)), y=np.zeros(2, np.int32))
    with pytest.raises(
        DataFileError, match=r"c\.npz, arrays: arrays must have equal numbers"
    ):
        sources.from_npz(tmp_path)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_npz_files_are_not_unpickled(tmp_path):
    array = np.empty(1, object)
    array[0] = Bomb()
    np.savez(tmp_path / "a.npz", x=array)
    with pytest.raises(ValueError, match=r"a\.npz, array 'x': .*found object"):
        sources.from_npz(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"a\.npz, array 'x': damaged"):
        sources.from_npz(tmp_path)


def outcome(read):
    """What reading gives: data, or the text of the one error allowed."""
    try:
        return read(), ""
    except DataFileError as error:
        return None, str(error)


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_npz_files_are_named(tmp_path, compressed):
    path = tmp_path / "a.npz"
    save = np.savez_compressed if compressed else np.savez
    good = {"x": np.arange(20, dtype=np.float32).reshape(10, 2), "y": np.arange(10)}
    save(path, **good)
    failed = 0
    for bad in mutations(path.read_bytes()):
        path.write_bytes(bad)
        data, error = outcome(lambda: sources.from_npz(tmp_path))
        if data is None:
            failed += 1
            assert str(path) in error
        else:  # zip has checksums: what is left is what was there
            for name, array in data.train.client(0).items():
                np.testing.assert_array_equal(array, good[name])
    assert failed > 120


CSV = """hospital,age,"blood, pressure",sick,fold
north,61,140.5,1,train
south,50,120,0,test

north,33,99,0,train
east,70,1e2,1,validation
south,48,101,1,train
"""


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table(tmp_path):
    path = write(tmp_path / "heart.csv", CSV)
    data = sources.from_csv(path, client="hospital", label="sick", split="fold")
    assert data.client_ids == ("east", "north", "south")
    assert data.train.sizes.tolist() == [0, 2, 1]
    x, y = data.train.examples["x"], data.train.examples["y"]
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert x.tolist() == [[61, 140.5], [33, 99], [48, 101]]
    assert y.tolist() == [1, 0, 1]
    assert data.splits["test"].examples["x"].tolist() == [[50, 120]]
    assert data.splits["validation"].sizes.tolist() == [1, 0, 0]


def test_columns_labels_and_order_of_a_table(tmp_path):
    text = "\ufeffsick;who;b;a\n yes ;10;1;2\nno;9;3;4\n"  # as spreadsheets save it
    path = write(tmp_path / "t.csv", text)
    data = sources.from_csv(
        path,
        client="who",
        label="sick",
        features=("a", "b"),
        classes=("no", "yes"),
        delimiter=";",
        sort=False,
    )
    assert data.client_ids == ("10", "9")
    assert data.train.examples["x"].tolist() == [[2, 1], [4, 3]]
    assert data.train.examples["y"].tolist() == [1, 0]
    data = sources.from_csv(
        path, client="sick", label="a", features=["b"], regression=True, delimiter=";"
    )
    assert data.client_ids == ("no", "yes")
    assert data.train.examples["y"].dtype == np.float32


def test_tables_by_split(tmp_path):
    train = write(tmp_path / "a.csv", "who,y,p,q\na,0,1,2\n")
    test = write(tmp_path / "b.csv", "q,p,y,who\n4,3,1,b\n")
    data = sources.from_csv({"train": train, "test": test}, client="who", label="y")
    assert data.train.examples["x"].tolist() == [[1, 2]]
    assert data.splits["test"].examples["x"].tolist() == [[3, 4]]
    write(test, "q,y,who\n4,1,b\n")
    with pytest.raises(
        ValueError, match=r"b\.csv, header: expected columns \['p', 'q'\], found"
    ):
        sources.from_csv({"train": train, "test": test}, client="who", label="y")
    write(test, "q,p,y,who,r\n4,1,1,b,0\n")
    with pytest.raises(ValueError, match=r"b\.csv, header: .* \['p', 'q'\], found"):
        sources.from_csv({"train": train, "test": test}, client="who", label="y")
    with pytest.raises(ValueError, match="split must be None"):
        sources.from_csv({"train": train}, client="who", label="y", split="p")
    with pytest.raises(ValueError, match="path must be one of 'train'"):
        sources.from_csv({"Train": train}, client="who", label="y")
    with pytest.raises(ValueError, match="path must name at least one file"):
        sources.from_csv({}, client="who", label="y")
    data = sources.from_csv({"test": train}, client="who", label="y")
    assert (data.train.num_examples, data.splits["test"].num_examples) == (0, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("61", "", r"line 2, column 'age': expected a number, found ''"),
        ("33", "old", r"line 5, column 'age': expected a number, found 'old'"),
        ("1e2", "nan", r"line 6, column 'blood, pressure': expected a number"),
        ("1e2", "1e39", r"line 6, column 'blood, pressure': expected a number"),
        ("1e2", "1_0", r"line 6, column 'blood, pressure': expected a number"),
        ("61", "\u0666\u0661", r"line 2, column 'age': expected a number"),
        (",1,train", ",1_0,train", r"line 2, column 'sick': expected a whole num"),
        (",1,train", ",1.5,train", r"line 2, column 'sick': expected a whole num"),
        (",1,train", ",3000000000,train", r"line 2, column 'sick': .* of 32"),
        ("0,test", "0,exam", r"line 3, column 'fold': expected one of 'train',"),
        ("east", " ", r"line 6, column 'hospital': expected a name of 1"),
        ("north,33", "33", r"line 5: expected 5 fields, found 4"),
        ("north,33", "north,33,1", r"line 5: expected 5 fields, found 6"),
        ("hospital", "age", r"line 1: expected a header with 'hospital' once"),
        ("hospital", "clinic", r"line 1: expected a header with 'hospital' once"),
        ('"blood, pressure"', '"blood', r"line 7: not CSV, unexpected end"),
        (CSV, "", r"line 1: expected a header .*found nothing"),
    ],
)
def test_a_damaged_table_names_line_and_column(tmp_path, old, new, message):
    path = write(tmp_path / "heart.csv", CSV.replace(old, new, 1))
    with pytest.raises(DataFileError, match=r"heart\.csv, " + message):
        sources.from_csv(path, client="hospital", label="sick", split="fold")


def test_a_gzipped_table(tmp_path):
    path = tmp_path / "heart.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    data = sources.from_csv(path, client="hospital", label="sick", split="fold")
    assert data.train.num_examples == 3


def test_labels_of_a_table_are_those_allowed(tmp_path):
    path = write(tmp_path / "heart.csv", CSV)
    kwargs = {"client": "hospital", "label": "sick", "features": ["age"]}
    with pytest.raises(ValueError, match="'sick': expected one of 'yes', 'no', found"):
        sources.from_csv(path, **kwargs, classes=("yes", "no"))
    with pytest.raises(ValueError, match="classes must be None for regression"):
        sources.from_csv(path, **kwargs, classes=("yes", "no"), regression=True)
    for change, message in (
        ({"classes": ["0", "1", "1"]}, "classes must be distinct"),
        ({"classes": "01"}, "classes must be a sequence of names, got '01'"),
        ({"features": "f"}, "features must be a sequence of names, got 'f'"),
        ({"features": ["age", "age"]}, "features must be distinct"),
        ({"features": ["age", "sick"]}, "must be different columns, got"),
        ({"client": "sick"}, "must be different columns, got"),
    ):
        with pytest.raises(ValueError, match=message):
            sources.from_csv(path, **{**kwargs, **change})
    with pytest.raises(FileNotFoundError):
        sources.from_csv(tmp_path / "absent.csv", **kwargs)


def test_mutated_tables_are_named_or_read(tmp_path):
    path = write(tmp_path / "heart.csv", CSV)
    failed = 0
    for bad in mutations(path.read_bytes()):
        path.write_bytes(bad)
        data, error = outcome(
            lambda: sources.from_csv(
                path, client="hospital", label="sick", split="fold"
            )
        )
        if data is None:
            failed += 1
            assert str(path) in error
        else:
            for split in data.splits.values():
                assert split.examples["x"].shape == (split.num_examples, 2)
                assert split.examples["x"].dtype == np.float32
                assert np.isfinite(split.examples["x"]).all()
                assert split.examples["y"].dtype == np.int32
    assert failed > 80


hf = pytest.mark.filterwarnings("ignore")  # what others warn of when imported


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets", reason="needs fedjax_core[huggingface]")


@hf
def test_hugging_face_images(datasets):
    from PIL import Image

    rng = np.random.default_rng(0)
    grey = rng.integers(256, size=(4, 5, 6), dtype=np.uint8)
    whole = datasets.Dataset.from_dict(
        {
            "image": [Image.fromarray(image) for image in grey],
            "character": [7, 1, 2, 3],
            "writer_id": ["f2", "f1", "f2", "f1"],
            "hsf_id": [0, 0, 0, 0],
        }
    )
    assert isinstance(whole.features["image"], datasets.Image)
    data = sources.from_huggingface(
        whole, client="writer_id", columns={"x": "image", "y": "character"}
    )
    assert data.client_ids == ("f1", "f2")
    x, y = data.train.examples["x"], data.train.examples["y"]
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert y.tolist() == [1, 3, 7, 2]
    np.testing.assert_array_equal(x[..., 0], grey[[1, 3, 0, 2]] / np.float32(255))


@hf
def test_hugging_face_tables_by_split(datasets):
    def make(start, n):
        return datasets.Dataset.from_dict(
            {
                "who": [10 * (i % 2) for i in range(n)],
                "tokens": [[i, i + 1] for i in range(start, start + n)],
                "score": [i / 2 for i in range(start, start + n)],
                "text": ["x" * (i % 5) for i in range(start, start + n)],
            }
        )

    given = datasets.DatasetDict(train=make(0, 2500), test=make(9, 1))
    data = sources.from_huggingface(given, client="who")
    assert data.client_ids == ("0", "10")
    assert data.train.sizes.tolist() == [1250, 1250]
    first = data.train.client(0)
    assert first["tokens"].dtype == np.int32
    assert first["tokens"][:2].tolist() == [[0, 1], [2, 3]]
    assert first["score"].dtype == np.float32
    assert first["text"][:3].tolist() == ["", "xx", "xxxx"]
    assert data.splits["test"].client(0)["tokens"].tolist() == [[9, 10]]


@hf
def test_hugging_face_pictures_of_several_modes(datasets):
    from PIL import Image

    def read(image):
        rows = datasets.Dataset.from_dict({"x": [image], "who": [1]})
        return sources.from_huggingface(rows, client="who").train.examples["x"]

    red = Image.new("RGB", (2, 3), (255, 0, 51))
    expected = np.broadcast_to(np.array([1, 0, 0.2], np.float32), (1, 3, 2, 3))
    np.testing.assert_array_equal(read(red), expected)
    np.testing.assert_array_equal(read(red.quantize(2)), expected)
    assert read(Image.new("1", (2, 3), 1)).tolist() == np.ones((1, 3, 2, 1)).tolist()
    with pytest.raises(ValueError, match="got 'RGBA'; convert them first"):
        read(Image.new("RGBA", (2, 3)))


@hf
@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"y": [[1], [1, 2]]}, ValueError, "'y' must have rows of one shape"),
        ({"y": [1, 2**40]}, ValueError, "'y' must hold ints of 32 bits"),
        ({"y": [{"a": 1}, {"a": 2}]}, TypeError, "'y' must be images, numbers or t"),
        ({"y": [1, None]}, TypeError, "'y' must be images, numbers or text"),
        ({"y": [1.0, 1e300]}, ValueError, "'y' must hold finite numbers that fit"),
        ({"y": [1.0, float("nan")]}, ValueError, "'y' must hold finite numbers"),
        ({"y": []}, ValueError, "train must hold at least one row"),
        ({"z": [1, 2]}, ValueError, "column must be one of 'z', 'who', got 'y'"),
    ],
)
def test_hugging_face_columns_that_can_not_be_used(datasets, columns, error, message):
    n = len(next(iter(columns.values())))
    rows = datasets.Dataset.from_dict({**columns, "who": [0] * n})
    with pytest.raises(error, match=message):
        sources.from_huggingface(rows, client="who", columns={"y": "y"})


@hf
def test_hugging_face_clients_are_all_known(datasets):
    rows = datasets.Dataset.from_dict({"y": [1, 2], "who": ["a", None]})
    with pytest.raises(
        TypeError, match=r"column 'who' must be ints or text.* in train"
    ):
        sources.from_huggingface(rows, client="who")


def test_what_is_no_hugging_face_data_set():
    with pytest.raises(TypeError, match=r"datasets.Dataset or DatasetDict, got list"):
        sources.from_huggingface([1], client="who")
    with pytest.raises(ValueError, match="split must be one of 'all', got 'train'"):
        sources.from_huggingface({"all": None}, client="who")


def test_per_client_lists_agree_with_the_iterator():
    lists = FederatedData.from_lists([{"y": [1, 2]}, {}], client_ids=["a", "b"])
    data = sources.from_iterator([("a", {"y": [1, 2]}), ("b", {})])
    assert data.client_ids == lists.client_ids
    assert_clients_equal(data.train, [lists.train.client(i) for i in range(2)])


def test_hidden_files_are_no_clients(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    (tmp_path / "._a.npz").write_bytes(b"as a Mac leaves them on other disks")
    assert sources.from_npz(tmp_path).client_ids == ("a",)


def test_a_pickle_in_an_npz_file_is_called_one(tmp_path):
    np.savez(tmp_path / "0.npz", data=np.array({"x": np.ones(2)}, object))
    with pytest.raises(
        DataFileError, match=r"pickled Python objects.*allow_pickle=True"
    ):
        sources.from_npz(tmp_path)


def test_a_streaming_data_set_without_features_is_read():
    datasets = pytest.importorskip("datasets")
    rows = [{"who": w, "x": float(i)} for i, w in enumerate("abab")]
    streaming = datasets.IterableDataset.from_generator(lambda: iter(rows))
    assert streaming.column_names is None
    data = sources.from_huggingface(streaming, client="who")
    assert data.client_ids == ("a", "b")
    np.testing.assert_array_equal(data.train.examples["x"], [0, 2, 1, 3])
