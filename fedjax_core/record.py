"""Values as JSON, to be recorded with a run and compared when it goes on."""

import datetime
import enum
import json
import pathlib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def to_json(value: Any, where: str = "config") -> Any:
    """A value as JSON, the same for equal values and different for different ones.

    Numbers, text, None, lists and mappings by text are themselves. Arrays and tuples
    become lists, paths text; other values are named by their type and told apart by
    their fields, or by what `pickle` would save. Functions and classes are taken at
    their qualified name.

    Raises:
      TypeError: a part has no value (a generator, a lock, an open file), or contains
        itself; the message says which, below `where`.
    """
    try:
        return _to_json(value, where)
    except RecursionError:
        raise TypeError(
            f"{where} must hold values to record, got one that contains itself."
        ) from None


def _to_json(value: Any, where: str) -> Any:
    if isinstance(value, enum.Enum):  # before numbers and text, which it may be too
        return _tagged(value, where, {"name": value.name, "value": value.value})
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _array(value, where)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name, None) for f in fields(value)}
        return _tagged(value, where, parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _tagged(value, where, value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {k: _to_json(v, f"{where}.{k}") for k, v in value.items()}
        return {"type": "mapping", "items": _sorted(value.items(), where)}
    if isinstance(value, (list, tuple)):
        return [_to_json(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return {"type": "set", "items": _sorted(value, where)}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"type": "bytes", "hex": value.hex()}
    if isinstance(value, pathlib.PurePath):
        return value.as_posix()
    if isinstance(value, (datetime.date, datetime.time)):
        return _tagged(value, where, {"value": value.isoformat()})
    if callable(value) and hasattr(value, "__qualname__"):
        # A function has no value to record; its name at least tells which one it was.
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (type, types.ModuleType)):
            return value.__qualname__
        return _tagged(value, where, {"name": value.__qualname__, "self": owner})
    return _object(value, where)


def _tagged(value: Any, where: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    recorded = {name: _to_json(v, f"{where}.{name}") for name, v in parts.items()}
    return {"type": type(value).__qualname__, **recorded}


def _sorted(values: Any, where: str) -> list[Any]:
    return sorted((_to_json(v, f"{where}[...]") for v in values), key=json.dumps)


def _array(value: Any, where: str) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        parts = {"impl": str(jax.random.key_impl(value))}
        return _tagged(value, where, {**parts, "data": jax.random.key_data(value)})
    if not isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value)
    if value.dtype.kind in "mM":  # as numbers they would lose their unit
        value = value.astype(str)
    return _to_json(value.tolist(), where)


def _object(value: Any, where: str) -> Any:
    """What `pickle` would save of an object of any other class."""
    try:
        saved = value.__reduce_ex__(4)
    except Exception as error:
        raise TypeError(
            f"{where} must be a value to record, or a function: {error}."
        ) from None
    if isinstance(saved, str):  # the name of a global
        return saved
    make, args, *rest = saved
    state, items, pairs = [*rest, None, None, None][:3]
    if getattr(make, "__name__", "") == "__newobj__":  # of copyreg
        make, *args = args
    parts = {
        "make": None if make is type(value) else make,
        "args": list(args) or None,
        "state": state,
        "items": list(items or ()) or None,
        "pairs": list(pairs or ()) or None,
    }
    given = {name: part for name, part in parts.items() if part is not None}
    return _tagged(value, where, given)


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def difference(old: Any, new: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Where two values of `to_json` first differ, and both there; None if nowhere.

    NaN equals itself. Of lists the whole is given unless they are long.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        names = {name: f"{where}.{name}".lstrip(".") for name in old | new}
        inside = [
            (at, old.get(k, _ABSENT), new.get(k, _ABSENT)) for k, at in names.items()
        ]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        inside = [(f"{where}[{i}]", a, b) for i, (a, b) in pairs]
    else:
        same = old == new or (old != old and new != new)
        same &= isinstance(old, bool) == isinstance(new, bool)  # True == 1
        return None if same else (where, old, new)
    first = next(filter(None, (difference(a, b, at) for at, a, b in inside)), None)
    whole = isinstance(old, list) and len(old) <= 8
    return (where, old, new) if first and whole else first
