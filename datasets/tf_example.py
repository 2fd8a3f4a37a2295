"""Parses a serialised `tf.train.Example` without TensorFlow.

The message is a map from feature names to lists of bytes, of float32 or of int64; the
package protobuf reads it by the schema below. Entries of the map are declared as
messages, which have the same bytes, so that a name that is there twice can be seen.

References:
  TensorFlow, tensorflow/core/example/{example,feature}.proto (the messages).
"""

import functools
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

_SCHEMA = {  # message -> its fields 1, 2, ...: a name, and a type
    "Example": [("features", "Features")],
    "Features": [("entries", "repeated Entry")],
    "Entry": [("name", "bytes"), ("value", "Feature")],
    "Feature": [("bytes", "Bytes"), ("float", "Floats"), ("int64", "Ints")],
    "Bytes": [("value", "repeated bytes")],
    "Floats": [("value", "repeated float")],
    "Ints": [("value", "repeated int64")],
}
_DTYPES = {"bytes": object, "float": np.float32, "int64": np.int64}


def parse(content: bytes) -> dict[str, np.ndarray]:
    """The features of one serialised `tf.train.Example`.

    Returns:
      Name -> [k] values: float32, int64, or for bytes an object array of bytes. A
      feature without a list is missing, as TensorFlow has it.

    Raises:
      ValueError: the message is damaged, or a name occurs twice.
    """
    try:
        entries = _example().FromString(content).features.entries
    except message.DecodeError as error:
        raise ValueError(f"no tf.train.Example or damaged, {error}.") from error
    features: dict[str, np.ndarray] = {}
    names = set()
    for entry in entries:
        try:
            name = entry.name.decode()
        except UnicodeDecodeError as error:
            raise ValueError("the name of a feature is not UTF-8.") from error
        kinds = [kind.name for kind, _ in entry.value.ListFields()]
        if name in names:
            raise ValueError(f"feature {name!r} occurs twice.")
        if len(kinds) > 1:
            raise ValueError(f"feature {name!r} has two lists.")
        names.add(name)
        for kind in kinds:
            values = getattr(entry.value, kind).value
            features[name] = np.fromiter(values, _DTYPES[kind], len(values))
    return features


@functools.cache
def _example() -> Any:
    """The class of the message."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto")
    for name, fields in _SCHEMA.items():
        described = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields, 1):
            label = "REPEATED" if kind.startswith("repeated") else "OPTIONAL"
            kind = kind.removeprefix("repeated ")
            entry = descriptor_pb2.FieldDescriptorProto(name=field, number=number)
            entry.label = entry.Label.Value(f"LABEL_{label}")
            if kind in _SCHEMA:
                entry.type, entry.type_name = entry.TYPE_MESSAGE, kind
            else:
                entry.type = entry.Type.Value(f"TYPE_{kind.upper()}")
            described.field.append(entry)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))
