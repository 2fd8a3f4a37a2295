"""Checks name the argument, its value and the rule."""

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
