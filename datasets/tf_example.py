"""Parses a serialised `tf.train.Example` without TensorFlow.

The message is a map from feature names to lists of bytes, of float32 or of int64::

  Example {1: Features}     Features {1: Entry, ...}     Entry {1: name, 2: Feature}
  Feature {1: BytesList} or {2: FloatList} or {3: Int64List}, each with its values in 1

Numbers may be packed (one field for all) or not (one field each); both are legal.

References:
  Protocol Buffers, "Encoding", https://protobuf.dev/programming-guides/encoding/.

  TensorFlow, tensorflow/core/example/{example,feature}.proto (the messages).
"""

from collections.abc import Iterator

import numpy as np

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types
_KINDS = {1: "bytes", 2: "float", 3: "int64"}  # fields of Feature


def parse(message: bytes) -> dict[str, np.ndarray]:
    """The features of one example.

    Args:
      message: a serialised `tf.train.Example`.

    Returns:
      Name -> [k] values: float32, int64, or for bytes an object array of bytes. A
      feature without a list is missing, as TensorFlow has it.

    Raises:
      ValueError: the message is damaged, or a name occurs twice. Says at which byte.
    """
    features: dict[str, np.ndarray] = {}
    for number, start, end in _fields(message, 0, len(message)):
        if number != 1:
            continue
        for number_, start_, end_ in _fields(message, start, end):
            if number_ != 1:
                continue
            name, values = _parse_entry(message, start_, end_)
            if name in features:
                raise ValueError(f"byte {start_}: feature {name!r} occurs twice.")
            if values is not None:
                features[name] = values
    return features


def _parse_entry(data: bytes, start: int, end: int) -> tuple[str, np.ndarray | None]:
    name, values = "", None
    for number, a, b in _fields(data, start, end):
        if number == 1:
            try:
                name = data[a:b].decode()
            except UnicodeDecodeError as error:
                message = f"byte {a}: the name of a feature is not UTF-8."
                raise ValueError(message) from error
        elif number == 2:
            for kind, c, d in _fields(data, a, b):
                if kind in _KINDS:
                    if values is not None:
                        raise ValueError(f"byte {c}: a feature has two lists.")
                    values = _parse_list(data, c, d, _KINDS[kind])
    return name, values


def _parse_list(data: bytes, start: int, end: int, kind: str) -> np.ndarray:
    if kind == "bytes":
        texts = [data[a:b] for n, a, b in _fields(data, start, end) if n == 1]
        values = np.empty(len(texts), object)
        values[:] = texts
        return values
    # Packed or not, the values are what lies between the tags.
    scalar = _VARINT if kind == "int64" else _FOUR_BYTES
    raw = b"".join(data[a:b] for n, a, b in _fields(data, start, end, scalar) if n == 1)
    if kind == "int64":
        return _varints(raw, start)
    if len(raw) % 4:
        raise ValueError(f"byte {start}: {len(raw)} bytes are no float32 values.")
    return np.frombuffer(raw, "<f4").astype(np.float32)


def _fields(
    data: bytes, start: int, end: int, scalar: int = _BYTES
) -> Iterator[tuple[int, int, int]]:
    """Yields number, start and end of the length-delimited fields in data[start:end].

    Fields of the wire type `scalar` are given as well, others are skipped.
    """
    i = start
    while i < end:
        at = i
        key, i = _varint(data, i, end)
        number, wire = key >> 3, key & 7
        if wire == _BYTES:
            length, i = _varint(data, i, end)
            stop = i + length
        elif wire == _VARINT:
            _, stop = _varint(data, i, end)
        elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
            stop = i + (8 if wire == _EIGHT_BYTES else 4)
        else:
            raise ValueError(f"byte {at}: wire type {wire} does not exist here.")
        if stop > end:
            raise ValueError(
                f"byte {at}: field {number} ends at byte {stop}, beyond {end}."
            )
        if wire in (_BYTES, scalar):
            yield number, i, stop
        i = stop


def _varint(data: bytes, i: int, end: int) -> tuple[int, int]:
    """The varint at i and where the next thing starts."""
    value = 0
    for shift in range(0, 70, 7):
        if i >= end:
            raise ValueError(f"byte {i}: a varint is cut off.")
        byte = data[i]
        i += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, i
    raise ValueError(f"byte {i - 10}: a varint has more than 10 bytes.")


def _varints(raw: bytes, at: int) -> np.ndarray:
    """All varints of `raw`, as int64 in two's complement."""
    septets = np.frombuffer(raw, np.uint8)
    ends = np.flatnonzero(septets < 128) + 1
    if len(septets) and (not len(ends) or ends[-1] != len(septets)):
        raise ValueError(f"byte {at}: the last varint of a list is cut off.")
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    lengths = ends - starts
    longest = lengths.max(initial=0)
    if longest > 10:
        raise ValueError(f"byte {at}: a varint has more than 10 bytes.")
    values = np.zeros(len(ends), np.uint64)
    for k in range(longest):
        has = lengths > k
        septet = septets[starts[has] + k].astype(np.uint64) & np.uint64(127)
        values[has] |= septet << np.uint64(7 * k)
    return values.view(np.int64)
