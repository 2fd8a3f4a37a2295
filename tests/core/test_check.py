"""Checks name the argument, its value and the rule."""

import jax
import numpy as np
import pytest

from fedjax_core import check


def test_seeds():
    check.seed(seed=0, other=np.uint64(2**63 - 1))
    for value in (True, 1.9, "a", None, np.float32(1)):
        with pytest.raises(TypeError, match=f"seed must be an int, got .*{value}"):
            check.seed(seed=value)
    for value in (-1, 2**63):
        with pytest.raises(ValueError, match=f"seed must be >= 0 and .*got {value}"):
            check.seed(seed=value)


def test_entries_are_named_by_what_they_belong_to():
    check.each_non_negative("node", weight=np.array([0, 1]), other=[2.0])
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"weight must be .*{bad} for node 1"):
            check.each_non_negative("node", weight=[1.0, bad, -2.0])
    jax.jit(lambda w: check.each_non_negative("node", weight=w))(-1.0)
