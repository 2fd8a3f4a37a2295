"""A history holds what rounds reported, by seed, and names who was excluded."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.history import History
from fedjax_core.metrics import Bits
from fedjax_core.result import Exclusion


def failure(*places):
    out = np.zeros((2, 2, 3), int)
    for place, stage in places:
        out[place] = stage
    return out


def test_rounds_are_counted_on_and_kept_by_seed():
    history = History([7, 9], ("a", "b", "c"))
    loss = np.arange(4, dtype=np.float32).reshape(2, 2)
    assert history.add_rounds({"loss": loss, "per_client": np.ones((2, 2, 3))}) == []
    history.add_rounds({"loss": loss[:1] + 10})
    assert history.rounds == 3
    result = history.result(state=None, execution="one device")
    assert result.train.keys() == {"loss"}
    np.testing.assert_array_equal(result.train["loss"], [[0, 2, 10], [1, 3, 11]])
    assert result.seeds == (7, 9)
    assert result.execution == "one device"


@pytest.mark.parametrize("cohorts", [True, False])
def test_the_excluded_are_named(cohorts):
    history = History([7, 9], ("a", "b", "c", "d"))
    history.add_rounds({"loss": np.zeros((1, 2))})
    failed = failure(((0, 1, 2), 1), ((1, 0, 0), 2))
    drawn = [
        [np.array([0, 1, 2]), np.array([0, 1, 3])],
        [np.array([2, 3, 1]), np.array([0, 1, 2])],
    ]
    found = history.add_rounds(
        {"loss": np.zeros((2, 2)), "failure": failed}, drawn if cohorts else None
    )
    # Place 2 of seed 9 in round 2; place 0 of seed 7 in round 3.
    assert found == [
        Exclusion(2, 9, "d" if cohorts else "c", "local update"),
        Exclusion(3, 7, "c" if cohorts else "a", "transform"),
    ]
    assert history.result(None).excluded == found


def test_evaluations_follow_the_rounds():
    history = History([7], ("a",))
    for k in range(4):
        history.add_rounds({"loss": np.zeros((1, 1))})
        if k % 2:
            client_metrics = {"accuracy": np.full((1, 1), k)}
            history.add_evaluation({"accuracy": np.array([k / 4])}, client_metrics)
    result = history.result(None)
    np.testing.assert_array_equal(result.evaluated, [2, 4])
    np.testing.assert_array_equal(result.evaluations["accuracy"], [[0.25, 0.75]])
    np.testing.assert_array_equal(result.client_metrics["accuracy"], [[3]])


def test_bits_add_up_exactly_over_any_run():
    # A dense message of 10^9 parameters and a bit, in 100,000 rounds.
    one = Bits.of(32 * 10**9 + 1).as_bytes()
    sent = np.broadcast_to(np.asarray(one * jnp.int32([1, 1000])), (100_000, 2))
    history = History([7, 9], ("a",))
    history.add_rounds({"uplink_bytes": sent})
    result = history.result(None)
    total = 100_000 * (32 * 10**9 + 1)
    assert result.total_bits("uplink_bytes") == (total, 1000 * total)
    # A table is text: what is read back is the same number.
    assert float(repr(sent[0, 1].item())) == sent[0, 1] == 1000 * (32 * 10**9 + 1) / 8
