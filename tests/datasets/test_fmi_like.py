"""Drawn weather: shapes, what was promised about it, and what is refused."""

import numpy as np
import pytest

from fedjax_core.datasets import fmi_like


def test_stations_come_in_the_form_of_the_real_ones():
    data, place = fmi_like.daily(20, num_windows=6, seed=3)
    assert data.client_ids == tuple(map(str, range(20)))
    assert place.shape == (20, 2)
    assert place.min(0)[0] >= 60
    assert place.max(0)[1] <= 31
    assert data.test is not None
    for split, rows in ((data.train, 5), (data.test, 1)):
        assert np.diff(split.offsets).tolist() == [rows] * 20
        assert split.examples["x"].shape == (20 * rows, 10)
        assert split.examples["x"].dtype == split.examples["y"].dtype == np.float32
    x = data.train.examples["x"]
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0), 1, rtol=1e-5)


def test_windows_are_cut_from_one_series():
    data, place = fmi_like.daily(
        3, num_windows=4, first_day=7, test_fraction=0, standardize=False, seed=5
    )
    assert data.test is None
    rng = np.random.default_rng([5, 201])
    rng.random((2, 3))  # the places
    series = fmi_like._temperature(rng, place, np.arange(7 * 24, (7 + 24) * 24))
    x, y = data.train.examples["x"], data.train.examples["y"]
    for station in range(3):
        for window in range(4):
            days = [
                series[24 * d : 24 * (d + 1), station]
                for d in range(6 * window, 6 * window + 6)
            ]
            past = [*(d.max() for d in days[:5]), *(d.min() for d in days[:5])]
            row = 4 * station + window
            np.testing.assert_allclose(x[row], past, rtol=1e-5)
            np.testing.assert_allclose(y[row], days[5].max(), rtol=1e-5)


def test_the_seed_decides():
    (first, place), (again, same) = (fmi_like.daily(5, 4, seed=1) for _ in range(2))
    other, elsewhere = fmi_like.daily(5, 4, seed=2)
    np.testing.assert_array_equal(first.train.examples["x"], again.train.examples["x"])
    np.testing.assert_array_equal(place, same)
    assert not np.any(place == elsewhere)
    assert not np.any(first.train.examples["y"] == other.train.examples["y"])


def test_places_differ_as_they_should():
    """Six standard errors: 4,000 hours with a memory of 67 hold 30 independent ones."""
    rng = np.random.default_rng(0)
    place = np.array([[60.0, 20.0], [60.0, 20.1], [70.0, 31.0]])
    hours = np.arange(0, 40_000, 1.0)
    t = fmi_like._temperature(rng, place, hours)
    year = t[: 8766 * 4].mean(0)
    assert year[0] == pytest.approx(4, abs=1.5)
    assert year[2] == pytest.approx(4 - 9, abs=1.5)
    day = t[: 24 * 1600].reshape(-1, 24, 3).mean(0)
    assert np.ptp(day[:, 0]) == pytest.approx(4, abs=0.6)
    assert np.ptp(day[:, 2]) == pytest.approx(10, abs=0.6)
    np.testing.assert_array_equal(day[:, 2].argmax(0), 15)
    # Near stations share their weather, far ones do not.
    noise = np.diff(t, axis=0)
    noise -= noise[: 24 * 1600].reshape(-1, 24, 3).mean(0)[np.arange(len(noise)) % 24]
    near, far = np.corrcoef(noise.T)[0, 1:]
    assert near == pytest.approx(np.exp(-5.2 / 40), abs=0.1)  # 5.2 km at 65 degrees
    assert abs(far) < 0.1


def test_hours_of_the_exercise():
    table = fmi_like.hourly()
    assert table.shape == (720, len(fmi_like.COLUMNS))
    hour = table[:, -1]
    np.testing.assert_array_equal(hour, np.tile(np.arange(1, 25), 30))
    column = dict(zip(fmi_like.COLUMNS, table.T, strict=True))
    assert np.all(column["min temperature"] <= column["mean temperature"])
    assert np.all(column["mean temperature"] <= column["max temperature"])
    assert np.all(column["wind speed"] <= column["max wind speed"])
    assert np.all(column["max wind speed"] <= column["gust speed"])
    assert np.all((column["relative humidity"] <= 100) & (column["wind speed"] >= 0))
    assert np.mean(column["precipitation"] == 0) > 0.5
    assert np.linalg.matrix_rank(table - table.mean(0)) == 11


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_stations": 0}, "num_stations must be >= 1"),
        ({"num_windows": 0}, "num_windows must be >= 1"),
        ({"first_day": -1}, "first_day must be >= 0"),
        ({"test_fraction": 2}, r"test_fraction must be in \[0, 1\]"),
        ({"seed": -1}, "seed must be >= 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        fmi_like.daily(**arguments)
    if set(arguments) <= {"first_day", "seed"}:
        with pytest.raises(ValueError, match=match):
            fmi_like.hourly(**arguments)
