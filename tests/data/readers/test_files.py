"""Files are unpacked within bounds, and what is wrong with them has a place."""

import gzip

import pytest

import fedjax_core
from fedjax_core.data.readers.files import DataFileError, read_bytes


def test_gzipped_files_are_unpacked(tmp_path):
    path = tmp_path / "a"
    members = gzip.compress(b"one, ") + gzip.compress(b"two" * 10**6)
    for content, expected in (
        (b"", b""),
        (b"plain", b"plain"),
        (gzip.compress(b""), b""),
        (members, b"one, " + b"two" * 10**6),
    ):
        path.write_bytes(content)
        assert read_bytes(path) == expected


def test_bombs_do_not_go_off(tmp_path, monkeypatch):
    path = tmp_path / "a.gz"
    monkeypatch.setattr(
        "fedjax_core.data.readers.files.max_unpacked", lambda n: 1 << 20
    )
    path.write_bytes(gzip.compress(bytes(1 << 20)))
    assert len(read_bytes(path)) == 1 << 20
    path.write_bytes(gzip.compress(bytes((1 << 20) + 1)))
    with pytest.raises(
        DataFileError, match=r"a\.gz, gzip stream: .* than 1048576 bytes"
    ):
        read_bytes(path)


def test_the_error_is_exported():
    assert fedjax_core.DataFileError is DataFileError
