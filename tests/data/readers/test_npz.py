"""The npz reader believes nothing that a file says about itself."""

import io
import zipfile

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers import npz
from fedjax_core.data.readers.files import DataFileError

EXPECTED: dict[str, npz.Expected] = {
    "x": (np.uint8, (None, 2, 3)),
    "y": (np.integer, (None,)),
}


def write_member(path, header: bytes, body: bytes, name="x.npy", deflate=True):
    method = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        npy = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + body
        archive.writestr(name, npy)


def header(shape="(4, 2, 3)", descr="'|u1'", fortran=False) -> bytes:
    return (
        f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}\n".encode()
    )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_saved_comes_back(tmp_path, save):
    x = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    y = np.array([1, 2, 3, 400], ">u2")
    save(tmp_path / "a.npz", x=np.asfortranarray(x), y=y, other=np.zeros(3))
    got = npz.read(tmp_path / "a.npz", EXPECTED)
    assert list(got) == ["x", "y"]
    np.testing.assert_array_equal(got["x"], x)
    np.testing.assert_array_equal(got["y"], y)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (header("(4, 2, 4)"), r"expected shape \[n, 2, 3\], found \[4, 2, 4\]"),
        (header("(0, 2, 3)"), r"expected shape \[n, 2, 3\], found \[0, 2, 3\]"),
        (header("(3, 2, 3)"), r"uint8 \[3, 2, 3\] takes 18 bytes, found 24"),
        (header("(10**9, 2, 3)"), "damaged"),
        (header("(1000000000000, 2, 3)"), "takes 6000000000000 bytes, found 24"),
        (header("(-4, 2, 3)"), r"expected shape \[n, 2, 3\], found \[-4, 2, 3\]"),
        (header("(4.0, 2, 3)"), "damaged"),
        (header(descr="'<f4'"), "expected uint8 values, found float32"),
        (header(descr="'|O'"), "expected uint8 values, found object"),
        (header(descr="[('a', '|O')]"), "expected uint8 values, found"),
        (header(descr="'nonsense'"), "damaged"),
        (b"-" * 9000 + b"1\n", "damaged"),
        (b"(" * 9000 + b"1\n", "damaged"),
        (b"__import__('os').abort()\n", "damaged"),
    ],
)
def test_headers_are_checked_first(tmp_path, head, message):
    write_member(tmp_path / "a.npz", head, bytes(24))
    with pytest.raises(DataFileError, match=f"a.npz, array 'x': .*{message}"):
        npz.read(tmp_path / "a.npz", {"x": EXPECTED["x"]})


def test_a_pickle_is_never_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([print, 1], object))
    with pytest.raises(DataFileError, match="expected generic values, found object"):
        npz.read(tmp_path / "a.npz", {"x": (np.generic, (None,))})


def test_names_must_be_there_once(tmp_path):
    np.savez(tmp_path / "a.npz", z=np.zeros(3))
    with pytest.raises(DataFileError, match=r"array 'x': .* 0 times among z\.npy\."):
        npz.read(tmp_path / "a.npz", EXPECTED)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        buffer = io.BytesIO()
        np.save(buffer, np.zeros((1, 2, 3), np.uint8))
        archive.writestr("x.npy", buffer.getvalue())
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("x.npy", buffer.getvalue())
    with pytest.raises(DataFileError, match=r"x\.npy once, found it 2 times"):
        npz.read(tmp_path / "a.npz", EXPECTED)


def test_sizes_that_the_file_can_not_hold(tmp_path):
    # The directory of the archive, too, may claim anything.
    write_member(tmp_path / "a.npz", header("(1000000000, 2, 3)"), b"", deflate=False)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    entry = content.index(b"PK\1\2")
    content[entry + 24 : entry + 28] = (2**32 - 2).to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataFileError, match=r"directory: .* at most .*'x': 4294967294"):
        npz.read(tmp_path / "a.npz", {"x": EXPECTED["x"]})


def test_bombs_do_not_go_off(tmp_path):
    path = tmp_path / "a.npz"
    zeros = np.zeros((12 << 20, 2, 3), np.uint8)  # 72 MiB, and 64 MiB are the least
    np.savez_compressed(path, x=zeros)
    for expected in (None, {"x": EXPECTED["x"]}):
        with pytest.raises(DataFileError, match="expected at most 67108864 bytes in"):
            npz.read(path, expected)


def test_all_arrays(tmp_path):
    path = tmp_path / "a.npz"
    arrays = {
        "b": np.zeros((0, 2), ">f4"),
        "a": np.array(["x", "yz"]),
        "c": np.ones(()),
    }
    np.savez(path, **arrays)
    got = npz.read(path)
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype.isnative
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "")
    with pytest.raises(DataFileError, match=r"'notes\.txt': expected notes\.txt\.npy"):
        npz.read(path)


def test_files_that_are_no_archive(tmp_path):
    path = tmp_path / "a.npz"
    for content in (b"", b"PK\3\4", b"\x93NUMPY\1\0", bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(DataFileError, match=r"a.npz, zip directory: not an npz"):
            npz.read(path, EXPECTED)
    with pytest.raises(FileNotFoundError):
        npz.read(tmp_path / "b.npz", EXPECTED)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_random_damage(tmp_path, save):
    path = tmp_path / "a.npz"
    rng = np.random.default_rng(0)
    save(path, x=rng.integers(0, 256, (4, 2, 3), np.uint8), y=np.arange(4))

    def check(arrays):
        assert arrays["x"].dtype == np.uint8
        assert arrays["x"].shape == (4, 2, 3)
        assert arrays["y"].shape == (4,)

    assert survives(path, lambda: npz.read(path, EXPECTED), check) > 100
