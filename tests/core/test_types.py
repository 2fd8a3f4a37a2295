"""Fields of a config are checked by their types."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from fedjax_core.types import Checked, Positive, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    lr: Positive = 0.1
    count: PositiveInt | None = None
    rule: Literal["a", "b"] = "a"
    rates: tuple[Positive, ...] = (0.1,)
    pair: tuple[PositiveInt, PositiveInt] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(Config):
    lr: float = 0.5  # declared anew, without its rule
    rule: Literal["b", "c"] = "c"  # pyright: ignore


@pytest.mark.parametrize("kind", [Config, Derived])
def test_rules_hold_in_subclasses(kind):
    kind(lr=1, count=2, rule="b")
    for wrong, message in [
        ({"lr": 0}, "lr must be > 0 and finite, got 0"),
        ({"count": 0}, "count must be >= 1, got 0"),
        ({"rule": "d"}, "rule must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            kind(**wrong)
    with pytest.raises(TypeError, match="count must be an int"):
        kind(count=0.5)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"rates": ()}, ValueError, "rates must not be empty"),
        ({"rates": (1.0, -1.0)}, ValueError, "rates must be > 0 and finite, got -1"),
        ({"rates": "12"}, TypeError, "rates must be a tuple, got '12'"),
        (
            {"pair": (1, 2, 3)},
            ValueError,
            r"pair must be of 2 entries, got \(1, 2, 3\)",
        ),
        ({"pair": (1, 2.5)}, TypeError, "pair must be an int, got 2.5"),
    ],
)
def test_rules_hold_for_entries(wrong, kind, message):
    Config(rates=(1, 2), pair=(3, 4))
    with pytest.raises(kind, match=message):
        Config(**wrong)


def test_a_new_choice_replaces_the_old():
    with pytest.raises(ValueError, match="rule must be one of 'b', 'c', got 'a'"):
        Derived(rule="a")  # pyright: ignore


def test_names_of_a_function_are_no_rules_and_others_hold():
    Local = int

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Inner(Config):
        unit: Local = 1  # pyright: ignore

    Inner(unit=-1)
    with pytest.raises(ValueError, match="lr must be > 0"):
        Inner(lr=-1)
