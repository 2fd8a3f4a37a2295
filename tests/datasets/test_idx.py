"""The idx reader, on files written byte by byte."""

import gzip

import numpy as np
import pytest
from tests.datasets import idx_files
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import idx


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 250, 5, 6]))
    got = idx.read(path)
    np.testing.assert_array_equal(got, [[1, 2, 3], [250, 5, 6]])
    assert got.dtype == np.uint8
    path.write_bytes(bytes([0, 0, 12, 1, 0, 0, 0, 2, 255, 255, 255, 254, 0, 1, 0, 0]))
    np.testing.assert_array_equal(idx.read(path), [-2, 65536])


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
def test_every_type_comes_back(tmp_path, dtype, end):
    path = tmp_path / f"a{end}"
    array = np.arange(100, 124).reshape(2, 3, 4).astype(dtype)
    idx_files.write(path, array)
    got = idx.read(path, shape=(None, 3, 4), dtype=array.dtype.type)
    np.testing.assert_array_equal(got, array)
    assert got.dtype == array.dtype
    assert got.dtype.isnative


HEADER = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"offset 0: expected 4 bytes of magic number, found 0"),
        (b"\0\0\x08", r"offset 0: expected 4 bytes of magic number, found 3"),
        (b"PK\x08\x01", r"offset 0: expected an idx file, two bytes 0, found 50 4b"),
        (b"\0\0\x07\x01", r"offset 2: expected a type .* 8, 9, 11, .* found 7"),
        (b"\0\0\x08\0\x01", r"offset 3: expected 1 to 32 dimensions, found 0"),
        (b"\0\0\x08\x64" + b"\0\0\0\1" * 100 + b"\7", r"offset 3: .* found 100"),
        (HEADER[:10], r"offset 4: expected 2 dimensions of 4 bytes, found 6 bytes"),
        (HEADER + bytes(5), r"offset 12: expected 6 bytes of uint8 \(2, 3\), found 5"),
        (HEADER + bytes(7), r"offset 12: expected 6 bytes of uint8 \(2, 3\), found 7"),
        (HEADER[:4] + bytes(8), r"offset 4: expected values, found shape \(0, 0\)"),
        (b"\0\0\x08\x02" + b"\xff" * 8, r"expected 18446744065119617025 bytes"),
    ],
)
def test_damage_is_named_with_its_offset(tmp_path, content, message):
    path = tmp_path / "bad.gz"
    for stored in (content, gzip.compress(content)):
        path.write_bytes(stored)
        with pytest.raises(DataFileError, match=f"bad.gz, .*{message}"):
            idx.read(path)


def test_little_endian_files_are_recognised(tmp_path):
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    idx_files.write(tmp_path / "a", array, header="<")
    with pytest.raises(
        DataFileError, match="offset 0: the magic number 02 0c 00 00 is"
    ):
        idx.read(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content[:4][::-1] + content[4:])
    with pytest.raises(DataFileError, match="offset 4: the dimensions are little-end"):
        idx.read(tmp_path / "a")


def test_another_shape_or_dtype_than_asked_for(tmp_path):
    idx_files.write(tmp_path / "a", np.zeros((2, 3), np.uint8))
    with pytest.raises(
        DataFileError, match=r"expected shape \[n, 28\], found \[2, 3\]"
    ):
        idx.read(tmp_path / "a", (None, 28))
    with pytest.raises(DataFileError, match=r"expected shape \[6\], found \[2, 3\]"):
        idx.read(tmp_path / "a", (6,))
    with pytest.raises(DataFileError, match="expected int32 values, found uint8"):
        idx.read(tmp_path / "a", dtype=np.int32)
    assert idx.read(tmp_path / "a", (None, 3), np.integer).shape == (2, 3)
    with pytest.raises(FileNotFoundError):
        idx.read(tmp_path / "b")


@pytest.mark.parametrize("end", ["", ".gz"])
def test_random_damage(tmp_path, end):
    path = tmp_path / f"a{end}"
    rng = np.random.default_rng(0)
    idx_files.write(path, rng.integers(0, 9, (20, 4), np.int32))

    def check(array):
        assert array.dtype == np.int32
        assert array.ndim == 2
        assert array.shape[1] == 4

    failed = survives(path, lambda: idx.read(path, (None, 4), np.int32), check)
    assert failed > 100
