"""What a result says of its numbers, against the same in NumPy."""

import numpy as np
import pytest

from fedjax_core import Result
from fedjax_core.result import Exclusion

LOSS = np.array([[3.0, 2.0, 1.0], [4.0, 4.0, 2.0]])
ACCURACY = np.array([[0.25, 0.5], [0.5, 1.0]])


def make(seeds=(3, 5)) -> Result:
    few = slice(len(seeds))
    return Result(
        seeds=seeds,
        rounds=3,
        train={"loss": LOSS[few]},
        evaluated=np.array([2, 3]),
        evaluations={"test_accuracy": ACCURACY[few]},
        client_metrics={},
        state=None,
        excluded=[Exclusion(1, 3, "a", "transform")],
    )


def test_a_series_has_its_own_rounds():
    rounds, values = make().series("loss")
    np.testing.assert_array_equal(rounds, [1, 2, 3])
    np.testing.assert_array_equal(values, LOSS)
    np.testing.assert_array_equal(make().series("test_accuracy")[0], [2, 3])
    with pytest.raises(KeyError, match=r"no metric 'f1'; there are: loss, test_acc"):
        make().series("f1")


def test_final_and_total():
    mean, std = make().final("loss")
    assert (mean, std) == (1.5, np.std([1, 2], ddof=1))
    mean, std = make(seeds=(3,)).final("loss")
    assert mean == 1.0
    assert np.isnan(std)
    assert make().total("loss") == (6 + 10) / 2


def test_what_did_not_run_has_no_speed_and_no_execution():
    assert np.isnan(make().rounds_per_second)
    assert make().execution is None


def test_its_text_can_be_printed_anywhere():
    text = repr(make())
    assert text.isascii()
    assert text.splitlines()[1].split() == ["test_accuracy", "0.75", "+-", "0.3536"]
