"""Values are recorded so that equal ones compare equal and others do not."""

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import json
import math
import random
import threading
import types
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import mean
from fedjax_core.record import difference, to_json


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Config:
    a: Any
    b: Any = None


class Plain:
    def __init__(self, a):
        self.a = a

    def method(self):
        return self.a


class Slots:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


class Listed(list):
    pass


def f(x, y=0):
    return x + y


def g(x, y=0):
    return x - y


def recorded(value):
    return json.loads(json.dumps(to_json(value)))


# Of each kind: a maker of a value, and others of that kind that differ from it.
KINDS = {
    "path": (lambda: Path("a/b"), [Path("a/c"), Path("/a/b")]),
    "enum": (lambda: Colour.RED, [Colour.BLUE, Level.LOW, 1]),
    "int enum": (lambda: Level.LOW, [Level.HIGH, Colour.RED]),
    "set": (lambda: {"b", "a", "c"}, [{"a", "b"}, ["a", "b", "c"]]),
    "frozenset": (lambda: frozenset({1, 2}), [{1, 3}]),
    "bytes": (lambda: b"\x00\xff", [b"\x00\xfe", "00ff"]),
    "complex": (lambda: 1 + 2j, [1 - 2j, 1.0]),
    "date": (lambda: datetime.date(2024, 5, 1), [datetime.date(2024, 5, 2)]),
    "datetime": (
        lambda: datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC),
        [datetime.datetime(2024, 5, 1, 12), datetime.date(2024, 5, 1)],
    ),
    "timedelta": (lambda: datetime.timedelta(0, 1), [datetime.timedelta(0, 1, 1)]),
    "decimal": (lambda: Decimal("0.1"), [Decimal("0.1000000000000000055"), 0.1]),
    "fraction": (lambda: Fraction(2, 6), [Fraction(2, 3)]),
    "range": (lambda: range(3), [range(4), range(0, 3, 2), [0, 1, 2]]),
    "slice": (lambda: slice(1, 4), [slice(1, 5), slice(1, 4, 2)]),
    "partial": (
        lambda: functools.partial(f, 1, y=2),
        [functools.partial(f, 1, y=3), functools.partial(g, 1, y=2), f],
    ),
    "namespace": (
        lambda: types.SimpleNamespace(a=1),
        [types.SimpleNamespace(a=2), types.SimpleNamespace(b=1)],
    ),
    "arguments": (lambda: argparse.Namespace(a=1), [argparse.Namespace(a=2)]),
    "mapping": (lambda: types.MappingProxyType({"a": 1}), [{"a": 2}, {"b": 1}]),
    "mapping by number": (lambda: {1: "a", "1": "b"}, [{1: "b", "1": "a"}, {1: "a"}]),
    "ordered": (lambda: collections.OrderedDict(a=1, b=2), [{"a": 1, "b": 3}]),
    "deque": (lambda: collections.deque([1, 2]), [collections.deque([2, 1])]),
    "named tuple": (lambda: Pair(1, 2), [Pair(2, 1), Config(1, 2)]),
    "dataclass": (lambda: Config(1, {2}), [Config(1, {3}), Pair(1, {2})]),
    "object": (lambda: Plain([1, {2}]), [Plain([1, {3}]), Slots([1, {2}])]),
    "slots": (lambda: Slots(1), [Slots(2)]),
    "subclass of list": (lambda: Plain(Listed([1])), [Plain(Listed([2]))]),
    "method": (lambda: Plain(1).method, [Plain(2).method]),
    "function": (lambda: f, [g, Plain]),
    "class": (lambda: Plain, [Slots]),
    "array": (lambda: np.array([1.5, 2]), [np.array([1.5, 3]), np.array([[1.5, 2]])]),
    "of 16 bits": (lambda: jnp.array([1.5], jnp.bfloat16), [jnp.ones(1, jnp.bfloat16)]),
    "of times": (
        lambda: np.array(["2024-05-01"], "M8[D]"),
        [np.array(["2024-05-02"], "M8[D]")],
    ),
    "of seconds": (lambda: np.array([1], "m8[s]"), [np.array([1], "m8[ms]")]),
    "of objects": (lambda: np.array([{1}, None]), [np.array([{2}, None])]),
    "key": (lambda: jax.random.key(1), [jax.random.key(2)]),
    "generator of numbers": (
        lambda: np.random.default_rng(1),
        [np.random.default_rng(2)],
    ),
    "random": (lambda: random.Random(1), [random.Random(2)]),
    "nan": (lambda: math.nan, [0.0, math.inf, None]),
    "nan in a list": (lambda: [1, [math.nan]], [[1, [2.0]], [math.nan, 1]]),
    "nan in an array": (lambda: Config(np.array([np.nan])), [Config(np.array([1.0]))]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_told_apart(kind):
    make, others = KINDS[kind]
    assert difference(recorded(make()), recorded(make())) is None
    for other in others:
        assert difference(recorded(make()), recorded(other)), other


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        ((1, 2), [1, 2]),
        (np.float32(0.5), 0.5),
        (np.array([1, 2]), jnp.array([1, 2])),
        ({1, 2}, frozenset({2, 1})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({2: "b", 1: "a"}, {1: "a", 2: "b"}),
        (f, f),
    ],
)
def test_equal_values_compare_equal(a, b):
    assert difference(recorded(a), recorded(b)) is None


def test_what_is_recorded_can_be_read():
    value = {"out": Path("runs/a"), "on": datetime.date(2024, 5, 1), "what": Colour.RED}
    assert recorded(value) == {
        "out": "runs/a",
        "on": {"type": "date", "value": "2024-05-01"},
        "what": {"type": "Colour", "name": "RED", "value": 1},
    }
    assert recorded(Config(1)) == {"type": "Config", "a": 1, "b": None}
    assert recorded(Plain(1)) == {"type": "Plain", "state": {"a": 1}}


def endless():
    out = []
    out.append(out)
    return out


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((i for i in range(3)), r"config\.a\[1\] must be a value .*generator"),
        (threading.Lock(), r"config\.a\[1\] must be a value .*lock"),
        (Plain(threading.Lock()), r"config\.a\[1\]\.state\.a must be a value"),
        (endless(), "config must hold values .* contains itself"),
    ],
)
def test_what_has_no_value_is_refused_by_its_place(value, message):
    with pytest.raises(TypeError, match=message):
        to_json({"a": [0, value]})


def test_the_first_difference_is_named():
    old = {"a": [{"b": 1}, {"b": 2}], "c": list(range(20)), "d": [1]}
    assert difference(old, old | {"d": [2]}) == ("d", [1], [2])
    assert difference(old, old | {"c": [*range(19), 7]}) == ("c[19]", 19, 7)
    assert difference(old, old | {"a": 3}) == ("a", old["a"], 3)


def test_mixing_weights_are_part_of_a_reductions_name():
    name = mean(np.array([1.0, 2.0])).name
    assert name == mean(jnp.array([1, 2])).name
    assert name != mean(np.array([1.0, 2.5])).name
    # Weights that are computed inside a compiled function have no value yet.
    assert jax.jit(lambda w: len(mean(w).name))(jnp.ones(2)) == len(
        "mean(mixing weights)"
    )


def test_what_is_absent_is_not_none_and_true_is_not_one():
    assert difference({"a": None}, {}) is not None
    assert difference({"a": True}, {"a": 1}) is not None
    assert difference({"a": 1.0}, {"a": 1}) is None
