"""What a result says of its numbers, against the same in NumPy."""

import numpy as np
import pytest

from fedjax_core import Result
from fedjax_core.result import Exclusion, plot, spread

LOSS = np.array([[3.0, 2.0, 1.0], [4.0, 4.0, 2.0]])
BYTES = np.array([[1e6, 2e6, 3e6], [3e6, 2e6, 1e6]])
ACCURACY = np.array([[0.25, 0.5], [0.5, 1.0]])


def make(seeds=(3, 5)) -> Result:
    few = slice(len(seeds))
    return Result(
        seeds=seeds,
        rounds=3,
        train={
            "loss": LOSS[few],
            "uplink_bytes": BYTES[few],
            "downlink_bytes": 2 * BYTES[few],
        },
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
    with pytest.raises(KeyError, match=r"'f1'; there are: downlink_bytes, loss, "):
        make().series("f1")


def test_final_and_total():
    mean, std = make().final("loss")
    assert (mean, std) == (1.5, np.std([1, 2], ddof=1))
    mean, std = make(seeds=(3,)).final("loss")
    assert mean == 1.0
    assert np.isnan(std)
    assert make().total("loss") == (6 + 10) / 2


def test_the_best_so_far_is_a_running_maximum():
    result = make()
    np.testing.assert_array_equal(result.best("loss"), [[3, 3, 3], [4, 4, 4]])
    lowest = [[3, 2, 1], [4, 4, 2]]
    np.testing.assert_array_equal(result.best("loss", lowest=True), lowest)


def test_what_did_not_run_has_no_speed_and_no_execution():
    assert np.isnan(make().rounds_per_second)
    assert make().execution is None


def test_its_text_can_be_printed_anywhere():
    text = repr(make())
    assert text.isascii()
    assert text.splitlines()[1].split() == ["test_accuracy", "0.75", "+-", "0.3536"]


def test_numbers_of_seeds_become_one_text():
    values = np.array([1.0, 2.0, 4.0])
    expected = f"{np.mean(values):.3f} ± {np.sqrt(7 / 3):.3f}"
    assert spread(values, ".3f") == expected
    assert spread(values[:1], ".3f") == "1.000"
    assert spread([]) == ""


def test_bytes_both_ways_add_up():
    result = make()
    assert result.total("megabytes") == 18
    spent, values = result.series("test_accuracy", over="megabytes")
    np.testing.assert_allclose(spent, [[9, 18], [15, 18]])
    np.testing.assert_array_equal(values, ACCURACY)


def test_several_results_are_drawn_into_one_figure(tmp_path):
    results = {"both": make(), "one": make(seeds=(3,))}
    path = tmp_path / "two.png"
    figure = plot(results, ("test_accuracy", "loss"), over="megabytes", path=path)
    assert path.read_bytes().startswith(b"\x89PNG")
    left, right = figure.axes
    both, one = left.lines
    np.testing.assert_allclose(both.get_xydata(), [[12, 0.375], [18, 0.75]])
    np.testing.assert_allclose(one.get_xydata(), [[9, 0.25], [18, 0.5]])
    (band,) = left.collections  # one deviation of two seeds; a single one has none
    low = band.get_paths()[0].vertices[:, 1].min()
    np.testing.assert_allclose(low, 0.375 - np.std([0.25, 0.5], ddof=1))
    assert [text.get_text() for text in right.get_legend().get_texts()] == [*results]
    assert (left.get_xlabel(), right.get_ylabel()) == ("megabytes", "loss")
