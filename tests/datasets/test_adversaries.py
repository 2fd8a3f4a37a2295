"""Adversaries touch their own train examples, and nothing else changes."""

from typing import Any

import numpy as np
import pytest

from fedjax_core.data.packed import FederatedData
from fedjax_core.datasets.adversaries import KINDS, adversaries

RNG = np.random.default_rng(0)
BAD = np.array([False, True, False, True, False])


def make_clients(dtype: Any = np.float32) -> Any:
    def client(n):
        x = (10 * RNG.uniform(size=(n, 4, 4))).astype(dtype)
        return {"x": x, "y": RNG.integers(1, 5, n).astype(np.uint8)}

    train, test = ([client(n) for n in (30, 40, 0, 25, 7)] for _ in range(2))
    return FederatedData.from_lists(train, test, client_ids=list("abcde"))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_attacked_change(kind):
    clean = make_clients()
    data: Any = adversaries(clean, BAD, kind, seed=3)
    assert data.client_ids == clean.client_ids
    rows = np.repeat(BAD, clean.train.sizes)
    for name in ("x", "y"):
        before, after = clean.train.examples[name], data.train.examples[name]
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after[~rows], before[~rows])
        touched = (name, kind) in (("x", "noisy"), ("y", "label-flip"))
        assert (after[rows] != before[rows]).all() == touched
        np.testing.assert_array_equal(
            data.test.examples[name], clean.test.examples[name]
        )
    if kind == "label-flip":
        assert not data.train.examples["y"][rows].any()
    if kind == "noisy":
        noise = (data.train.examples["x"] - clean.train.examples["x"])[rows]
        assert np.abs(noise).max() <= 10
        # 65 x 16 uniform draws: a mean beyond 4.5 standard errors is one in 100,000.
        assert abs(noise.mean()) < 4.5 * 10 / np.sqrt(3 * noise.size)
        assert abs(noise.std() - 10 / np.sqrt(3)) < 0.5
        again = adversaries(clean, BAD, kind, seed=3)
        np.testing.assert_array_equal(
            again.train.examples["x"], data.train.examples["x"]
        )
    np.testing.assert_array_equal(
        data.train.examples["attacker"], rows & (kind == "byzantine")
    )
    assert not data.test.examples["attacker"].any()


def test_what_is_no_adversary_is_refused():
    data = make_clients()
    with pytest.raises(ValueError, match="kind must be one of 'clean'"):
        adversaries(data, BAD, "evil")
    with pytest.raises(ValueError, match=r"attacked must be bool of shape \(5,\)"):
        adversaries(data, [1, 3], "clean")
    with pytest.raises(TypeError, match="x must be floats"):
        adversaries(make_clients(np.uint8), BAD, "noisy")
