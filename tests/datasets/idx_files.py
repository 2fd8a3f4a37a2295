"""Writes idx files by the description of the format, for the tests of readers."""

import gzip
import struct
from pathlib import Path

import numpy as np

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def write(path: Path, array: np.ndarray, header: str = ">", values: str = ">") -> None:
    """Writes `array`, gzipped if the name ends so; the byte orders may be wrong."""
    code = CODES[array.dtype.str[1:]]
    content = struct.pack(f"{header}I", code * 256 + array.ndim)
    content += struct.pack(f"{header}{array.ndim}I", *array.shape)
    content += array.astype(f"{values}{array.dtype.str[1:]}").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_pair(
    folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray, end: str = ".gz"
) -> None:
    """Writes images and labels under the names that MNIST gave them."""
    write(folder / f"{prefix}images-idx3-ubyte{end}", images)
    write(folder / f"{prefix}labels-idx1-ubyte{end}", labels)
