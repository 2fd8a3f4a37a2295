"""School scores from a MATLAB file the test writes, and from the real npz file."""

import struct
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import school

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "school_exam"
SIZES = (4, 7, 3)


def cells(arrays):
    out = np.empty((1, len(arrays)), object)
    out[0] = arrays
    return out


def tasks(rng=None):
    rng = rng or np.random.default_rng(0)
    x = [rng.integers(0, 5, (n, 28)).astype(float) for n in SIZES]
    for block in x:
        block[:, -1] = 1
    return x, [rng.integers(1, 71, (n, 1)).astype(float) for n in SIZES]


@pytest.mark.parametrize("compressed", [False, True])
def test_cells_are_schools(tmp_path, compressed):
    x, y = tasks()
    path = tmp_path / "school.mat"
    savemat(path, {"X": cells(x), "Y": cells(y)}, do_compression=compressed)
    data = school.load(tmp_path, test_fraction=0, standardize=False)
    assert data.client_ids == ("0", "1", "2")
    assert data.test is None
    for i in range(3):
        client = data.train.client(i)
        assert client["x"].dtype == client["y"].dtype == np.float32
        np.testing.assert_array_equal(client["x"], x[i])
        np.testing.assert_array_equal(client["y"], y[i][:, 0])


def test_both_layouts_give_the_same(tmp_path):
    x, y = tasks()
    mat, npz = tmp_path / "school.mat", tmp_path / "school_exam.npz"
    savemat(mat, {"X": cells(x), "Y": cells(y)})
    np.savez(
        npz,
        x=np.concatenate(x).astype(np.float32),
        y=np.concatenate(y)[:, 0].astype(np.float32),
        school=np.repeat(np.arange(3, dtype=np.uint8), SIZES),
    )
    a, b = school.load(mat), school.load(npz)
    assert a.client_ids == b.client_ids
    for name, split in a.splits.items():
        np.testing.assert_array_equal(split.sizes, b.splits[name].sizes)
        for k, v in split.examples.items():
            np.testing.assert_array_equal(v, b.splits[name].examples[k])


def test_all_but_the_intercept_is_standardised_with_train_rows(tmp_path):
    x, y = tasks()
    savemat(tmp_path / "school.mat", {"X": cells(x), "Y": cells(y)})
    raw, data = school.load(tmp_path, standardize=False), school.load(tmp_path)
    train = raw.train.examples["x"].astype(np.float64)
    for name, split in data.splits.items():
        expected = raw.splits[name].examples["x"].astype(np.float64)
        expected = (expected - train.mean(0)) / np.maximum(train.std(0), 1e-9)
        expected[:, -1] = 1
        np.testing.assert_allclose(split.examples["x"], expected, 1e-5, 1e-6)


def put(variable, i, value):
    return lambda variables: variables[variable].__setitem__((0, i), value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("Y"), "variable 'Y': expected it, found none"),
        (
            lambda v: v.update(X=np.ones((3, 28))),
            "variable 'X': expected 1 x n cells, found cl",
        ),
        (
            lambda v: v.update(Y=v["Y"][:, :2]),
            "'Y': expected 3 cells as in 'X', found 2",
        ),
        (put("X", 1, np.ones((7, 4))), r"X\{2\}: expected shape \[n, 28\]"),
        (put("Y", 2, np.ones((2, 1))), r"Y\{3\}: expected shape \[3, 1\]"),
        (put("X", 0, np.full((4, 28), np.nan)), r"X\{1\}: .* numbers without gaps"),
        (put("X", 0, "text"), r"X\{1\}: expected a matrix of numbers, found class 4"),
        (put("Y", 0, -np.ones((4, 1))), "scores: expected none below 0, found -1"),
    ],
)
def test_wrong_cells_are_named(tmp_path, change, message):
    x, y = tasks()
    variables = {"X": cells(x), "Y": cells(y)}
    change(variables)
    path = tmp_path / "school.mat"
    savemat(path, variables)
    with pytest.raises(DataFileError, match=message) as raised:
        school.load(path)
    assert str(path) in str(raised.value)


def test_the_other_endianness(tmp_path):
    def element(kind, content):
        padding = bytes(-len(content) % 8)
        return struct.pack(">II", kind, len(content)) + content + padding

    def matrix(name, cls, shape, content):
        flags = element(6, struct.pack(">II", cls, 0))
        sizes = element(5, struct.pack(">2i", *shape))
        # One letter fits into the tag itself: size and type, two bytes each.
        label = struct.pack(">HH4s", len(name), 1, name) if name else element(1, name)
        return element(14, flags + sizes + label + content)

    x, y = tasks()
    content = bytes(116) + b"no subsy" + b"\1\0MI"
    for name, blocks, dtype, kind in ((b"X", x, ">f8", 9), (b"Y", y, ">u2", 4)):
        cells = [
            matrix(b"", 6, b.shape, element(kind, b.astype(dtype).tobytes("F")))
            for b in blocks
        ]
        content += matrix(name, 1, (1, len(cells)), b"".join(cells))
    (tmp_path / "school.mat").write_bytes(content)
    data = school.load(tmp_path, test_fraction=0, standardize=False)
    np.testing.assert_array_equal(data.train.examples["x"], np.concatenate(x))
    np.testing.assert_array_equal(data.train.examples["y"], np.concatenate(y)[:, 0])
    (tmp_path / "school.mat").write_bytes(content + content[128:])
    with pytest.raises(DataFileError, match="variable 'X': expected it once"):
        school.load(tmp_path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "school.mat"
    for content in (b"", b"MATLAB 7.3 MAT-file" + bytes(105) + b"\0\2IM", b"x" * 200):
        path.write_bytes(content)
        with pytest.raises(DataFileError, match=r"bytes 124 to 128: .* version 5 to 7"):
            school.load(path)
    with pytest.raises(
        FileNotFoundError, match=r"school\.mat .*fetch it from .*MALSAR"
    ):
        school.load(tmp_path / "nowhere")


def check(data):
    for split in data.splits.values():
        assert split.examples["x"].shape[1:] == (28,)
        assert split.examples["x"].dtype == split.examples["y"].dtype == np.float32
        assert np.isfinite(split.examples["x"]).all()
        assert np.isfinite(split.examples["y"]).all()


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_mat_files_give_named_errors_or_good_data(tmp_path, compressed):
    x, y = tasks()
    path = tmp_path / "school.mat"
    savemat(path, {"X": cells(x), "Y": cells(y)}, do_compression=compressed)
    assert survives(path, lambda: school.load(path), check) > 50


def test_damaged_npz_files_give_named_errors_or_good_data(tmp_path):
    path = tmp_path / "school_exam.npz"
    rng = np.random.default_rng(0)
    x, y = rng.random((6, 28), np.float32), rng.random(6, np.float32)
    np.savez(path, x=x, y=y, school=np.array([0, 0, 0, 1, 1, 1], np.uint8))
    assert survives(path, lambda: school.load(path), check) > 50


def test_the_real_schools():
    if not REAL.is_dir():
        pytest.skip(f"no {REAL}")
    data = school.load(REAL)
    sizes = np.sum([split.sizes for split in data.splits.values()], axis=0)
    assert (data.num_clients, sizes.sum()) == (139, 15362)
    assert (sizes.min(), sizes.max()) == (22, 251)
    y = np.concatenate([split.examples["y"] for split in data.splits.values()])
    assert (y.min(), y.max()) == (1, 70)
    assert np.all(data.train.examples["x"][:, -1] == 1)
