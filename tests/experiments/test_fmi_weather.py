"""Weather alone, over a network and as one: on drawn stations and on a written file."""

import dataclasses
import gzip
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from fedjax_core import privacy
from fedjax_core.datasets import fmi_like
from fedjax_core.experiments import fmi_weather

TINY = fmi_weather.Experiment(
    num_stations=8,
    num_windows=5,
    num_neighbours=2,
    alphas=(0.1, 1e6),
    rounds=5,
    num_seeds=2,
)


@pytest.fixture(scope="module")
def outcomes():
    return [fmi_weather.solve(TINY, problem) for problem in fmi_weather.load(TINY)]


def test_the_ends_of_the_sweep_are_local_and_pooled_least_squares(outcomes):
    for seed, outcome in enumerate(outcomes):
        data, place = fmi_like.daily(8, 5, seed=seed)
        np.testing.assert_array_equal(outcome.problem.place, place)
        assert data.test is not None
        (x, y), (u, v) = (
            (
                np.column_stack([s.examples["x"], np.ones(s.num_examples)]),
                s.examples["y"].astype(np.float64),
            )
            for s in (data.train, data.test)
        )
        pooled = np.linalg.lstsq(x, y)[0]
        np.testing.assert_allclose(outcome.W[-1], np.tile(pooled, (8, 1)), rtol=1e-4)
        for split, a, b in (("train", x, y), ("test", u, v)):
            expected = np.sqrt(np.mean((a @ pooled - b) ** 2))
            assert getattr(outcome, split)[-1] == pytest.approx(expected, rel=1e-5)
        for i in range(8):  # four rows, eleven parameters: the least norm
            rows = slice(4 * i, 4 * i + 4)
            alone = np.linalg.lstsq(x[rows], y[rows])[0]
            np.testing.assert_allclose(outcome.W[0, i], alone, atol=1e-3)
        assert outcome.train[0] < 1e-3
        assert np.all(np.diff(outcome.train) > 0)


def test_alpha_is_chosen_without_the_rows_that_are_reported(outcomes):
    for seed, outcome in enumerate(outcomes):
        data, _ = fmi_like.daily(8, 5, seed=seed)
        x, y = (
            np.reshape(data.train.examples[k], (8, 4, -1)).astype(np.float64)
            for k in ("x", "y")
        )
        x = np.concatenate([x, np.ones((8, 4, 1))], -1)
        early = x[:, :3].reshape(24, -1), y[:, :3].reshape(24)
        pooled = np.linalg.lstsq(*early)[0]
        error = np.sqrt(np.mean((x[:, 3] @ pooled - y[:, 3, 0]) ** 2))
        assert outcome.validation[-1] == pytest.approx(error, rel=1e-5)

    flipped = [o._replace(test=o.test[::-1]) for o in outcomes]
    chosen = fmi_weather.best(TINY, outcomes)
    assert chosen == fmi_weather.best(TINY, flipped)
    mean = np.mean([o.validation for o in outcomes], 0)
    assert mean[chosen] == mean[1:-1].min()


def test_fedrelax_goes_to_the_solution(outcomes):
    longer = dataclasses.replace(TINY, rounds=400)
    distance = fmi_weather.relax(longer, outcomes[0], chosen=1).error
    assert np.all(np.diff(distance[:50]) < 0)
    assert distance[-1] < 0.1


def test_it_prints_a_table_and_draws(tmp_path, capsys):
    experiment = dataclasses.replace(TINY, out=tmp_path / "out")
    fmi_weather.main(experiment)
    out = capsys.readouterr().out
    for words in ("8 drawn stations, 2 times", "alone", "network, alpha", "for all"):
        assert words in out
    assert (tmp_path / "out" / "fmi_weather.png").stat().st_size > 10_000


def test_real_stations_come_from_the_folder(tmp_path):
    rng = np.random.default_rng(0)
    columns = [f"{c}_{i}" for c in ("tmax", "tmin") for i in range(1, 6)]
    lines = [",".join(["station", "lat", "lon", *columns, "y_tmax", "y_tmin"])]
    for k in range(8):
        for _ in range(5):
            numbers = ",".join(f"{t:.1f}" for t in rng.normal(0, 5, 12))
            lines.append(f"station {k},{60 + k},{25 + k / 3:.3f},{numbers}")
    text = "\n".join([*lines, ""])
    (tmp_path / fmi_weather.FILE).write_bytes(gzip.compress(text.encode()))
    experiment = dataclasses.replace(TINY, path=tmp_path, out=tmp_path)
    outcomes = [fmi_weather.solve(experiment, p) for p in fmi_weather.load(experiment)]
    assert len(outcomes) == 1
    np.testing.assert_allclose(outcomes[0].problem.place[3], [63, 26], rtol=1e-9)
    title = fmi_weather.table(experiment, outcomes).title
    assert title == "error in °C, 8 real stations"

    with pytest.raises(FileNotFoundError, match="fetch observations from"):
        fmi_weather.load(dataclasses.replace(TINY, path=tmp_path / "nowhere"))


def test_impossible_settings_are_refused():
    settings: list[tuple[dict[str, Any], str]] = [
        ({"num_windows": 2}, r"num_windows must be in \[3"),
        ({"num_stations": 5}, r"num_neighbours must be in \[1, 4\]"),
        ({"alphas": ()}, "alphas must not be empty"),
        ({"alphas": (0.0,)}, "alphas must be > 0"),
        ({"rounds": 0}, "rounds must be >= 1"),
    ]
    for setting, match in settings:
        with pytest.raises(ValueError, match=match):
            fmi_weather.Experiment(**setting)


def test_private_features_of_exercise_9_5():
    """T-P8 on the drawn table: no hour left, and most of the mean temperature is."""
    X = fmi_like.hourly()
    X = (X - X.mean(0)) / X.std(0)
    hour = X[:, -1]
    assert LinearRegression().fit(X[:, :-1], hour).score(X[:, :-1], hour) > 0.1
    with jax.enable_x64(True):
        c = privacy.cross_covariance(X, hour)
        Z = X @ np.asarray(privacy.private_projection(c).matrix)
    assert abs(LinearRegression().fit(Z, hour).score(Z, hour)) < 1e-9
    assert LinearRegression().fit(Z, X[:, 0]).score(Z, X[:, 0]) > 0.9
