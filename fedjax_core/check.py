"""Argument checks whose messages name the argument, its value and the rule."""

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from jax.core import Tracer


def _require(name: str, value: Any, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")


def _known(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that are not traced; raises TypeError for one that is no number."""
    for name, value in values.items():
        if isinstance(value, Tracer):
            continue  # under vmap or jit it has no value to look at yet
        try:
            float(value)
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be a number, got {value!r}.") from None
        yield name, value


def open_interval(low: float, high: float, /, **values: Any) -> None:
    """Raises ValueError unless low < value < high for every value."""
    above = "finite" if high == math.inf else f"< {high}"
    for name, value in _known(values):
        _require(name, value, low < value < high, f"> {low} and {above}")


def positive(**values: Any) -> None:
    """Raises ValueError unless every value is finite and > 0."""
    open_interval(0, math.inf, **values)


def fraction(below: float = 1, /, **values: Any) -> None:
    """Raises ValueError unless every value lies in [0, below)."""
    for name, value in _known(values):
        _require(name, value, 0 <= value < below, f"in [0, {below})")


def non_negative(**values: Any) -> None:
    """Raises ValueError unless every value is finite and >= 0."""
    for name, value in _known(values):
        _require(name, value, 0 <= value < math.inf, ">= 0 and finite")


def each_non_negative(of: str, **arrays: Any) -> None:
    """Raises ValueError unless every entry is finite and >= 0; names the first.

    What an entry is of, as "node", is named, too. Traced arrays are not looked at.
    """
    for name, array in arrays.items():
        if isinstance(array, Tracer):
            continue
        known = np.asarray(array)
        wrong = np.flatnonzero(~(np.isfinite(known) & (known >= 0)))
        if wrong.size:
            raise ValueError(
                f"{name} must be finite and >= 0, got {known.flat[wrong[0]]} for {of} "
                f"{wrong[0]}."
            )


def rows(num_clients: int, **tables: Any) -> None:
    """Raises ValueError unless every array has one row per client.

    A row past the end would be read as the last one in a compiled program.
    """
    for name, table in tables.items():
        if np.ndim(table) < 1 or len(table) != num_clients:
            raise ValueError(
                f"{name} must have a row for each of {num_clients} clients, got shape "
                f"{np.shape(table)}."
            )


def in_range(low: float, high: float, /, **values: Any) -> None:
    """Raises ValueError unless every value lies in the closed interval [low, high]."""
    for name, value in _known(values):
        _require(name, value, low <= value <= high, f"in [{low}, {high}]")


def each_in_range(low: float, high: float, /, **arrays: Any) -> None:
    """Raises ValueError unless every entry lies in [low, high]; names the first."""
    for name, array in arrays.items():
        known = np.asarray(array)
        wrong = known[~((low <= known) & (known <= high))]
        if wrong.size:
            raise ValueError(f"{name} must be in [{low}, {high}], got {wrong[0]}.")


def _ints(values: dict[str, Any], low: int, high: float, rule: str) -> None:
    for name, value in values.items():
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be an int, got {value!r}.") from None
        if isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}.")
        _require(name, value, low <= value < high, rule)


def positive_int(**values: Any) -> None:
    """Raises TypeError unless every value is an int, ValueError unless it is >= 1."""
    _ints(values, 1, math.inf, ">= 1")


def non_negative_int(**values: Any) -> None:
    """Raises TypeError unless every value is an int, ValueError unless it is >= 0."""
    _ints(values, 0, math.inf, ">= 0")


def seed(**values: Any) -> None:
    """Raises TypeError unless every value is an int, ValueError unless 0 to 2**63-1."""
    _ints(values, 0, 2**63, ">= 0 and < 2**63")


def one_of(allowed: Collection[Any], /, **values: Any) -> None:
    """Raises ValueError unless every value is one of `allowed`."""
    for name, value in values.items():
        rule = f"one of {', '.join(map(repr, allowed))}"
        _require(name, value, value in allowed, rule)


def among(allowed: Collection[Any], /) -> Callable[..., None]:
    """`one_of` these, as a rule of a field."""
    return functools.partial(one_of, allowed)


def each(rule: Callable[..., None], size: int | None, /, **values: Any) -> None:
    """Raises TypeError unless every value is a tuple, or a collection that is no text.

    ValueError where it is empty or of another number of entries than `size`. The rule
    is called for each entry as those of this module are.
    """
    for name, value in values.items():
        if isinstance(value, str) or not isinstance(value, Collection):
            raise TypeError(f"{name} must be a tuple, got {value!r}.")
        if not len(value):
            raise ValueError(f"{name} must not be empty.")
        if size is not None:
            _require(name, value, len(value) == size, f"of {size} entries")
        for entry in value:
            rule(**{name: entry})


def one_given(**values: Any) -> None:
    """Raises ValueError unless exactly one value is given, that is not None."""
    if sum(value is not None for value in values.values()) != 1:
        got = " and ".join(f"{name}={value!r}" for name, value in values.items())
        both = " and ".join(values)
        raise ValueError(f"exactly one of {both} must be given, got {got}.")


def names(**values: Any) -> None:
    """Raises TypeError unless every value is a tuple of strings that are not empty."""
    for name, value in values.items():
        named = isinstance(value, tuple) and all(isinstance(x, str) for x in value)
        if not named or not all(value):
            raise TypeError(f"{name} must be a tuple of names, got {value!r}.")


def functions(**values: Any) -> None:
    """Raises TypeError unless every value maps names to functions."""
    for name, value in values.items():
        if not isinstance(value, Mapping) or not all(map(callable, value.values())):
            raise TypeError(f"{name} must map names to functions, got {value!r}.")


def instance(kind: type, /, **values: Any) -> None:
    """Raises TypeError unless every value is of a kind."""
    for name, value in values.items():
        if not isinstance(value, kind):
            article = "an" if kind.__name__[0] in "AEIOU" else "a"
            raise TypeError(
                f"{name} must be {article} {kind.__name__}, got {type(value).__name__}."
            )
