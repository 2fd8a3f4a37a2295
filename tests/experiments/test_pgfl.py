"""The figures of servers on a graph: what is compared, how orderings are counted."""

import csv
import dataclasses
from typing import Any

import numpy as np
import pytest

from fedjax_core import Dataset, Result
from fedjax_core.algorithms.networks.pgfl import Config
from fedjax_core.experiments import pgfl
from fedjax_core.experiments.pgfl import FIGURES, REFERENCE, fixed
from fedjax_core.privacy import DynamicBudget

DEFAULT = pgfl.PRESETS["default"]


def result(metric, start, end) -> Result:
    """A finished run with these values of its seeds at two rounds."""
    count = len(end)
    seen = {metric: np.stack([np.broadcast_to(start, count), end], 1)}
    spent = {"budget_of_node": np.ones((count, 4))}
    at = np.array([20, 300])
    return Result(tuple(range(count)), 2, {}, at, seen, spent, None, [])


def test_the_reference_is_of_methods_that_run_and_rounds_that_are_read():
    for name, methods in REFERENCE.items():
        figure = FIGURES[name]
        assert methods.keys() <= pgfl.configs(DEFAULT, name).keys()
        for rounds in methods.values():
            assert rounds.keys() <= {DEFAULT.every, getattr(DEFAULT, figure.rounds)}


def test_claims_are_of_figures_and_methods_that_run():
    for e in pgfl.PRESETS.values():
        for claim in pgfl.claims(e):
            for name, method in claim[:2]:
                known = pgfl.configs(e, name)
                assert method in known or e is pgfl.PRESETS["smoke"], (name, method)


def test_orderings_are_of_decibels_and_percents_and_numbers_stand_beside():
    down, e = np.linspace(1, 2, 6), dataclasses.replace(DEFAULT, num_seeds=6)
    found = {
        "5.3": {
            fixed(0): result("nmsd", 0.2 * down, 0.02 * down),
            fixed(0.4): result("nmsd", 0.1 * down, 0.2 * down),
            pgfl.FALLING: result("nmsd", 0.2 / down, 0.02 * down),
        },
        "5.5a": {
            fixed(0): result("accuracy", 0.5, 0.8 + 0.01 * down),
            fixed(0.4): result("accuracy", 0.5, 0.7 + 0.01 * down),
        },
    }
    rows = pgfl.orderings(e, found).rows
    assert rows[0][:3] == ("tau = 0.4 better than tau = 0, start", "5.3", "+3.01")
    assert [row[-1] for row in rows] == [
        *("held", "held", "held", "held", "undecided", "not held")
    ]
    assert rows[-1][2] == "-10.00"
    shown = pgfl.levels(e, "5.3", found["5.3"]).rows
    assert [row[2] for row in shown] == ["-7.0", "-7.4", "-7.7"]
    assert [row[4] for row in shown] == ["-16.3", "-9.1", "-16.4"]
    other = dataclasses.replace(e, noise_std=1.0)
    assert all(not row[2] for row in pgfl.levels(other, "5.3", found["5.3"]).rows)


def test_figures_change_what_they_are_about_and_nothing_else():
    of = {name: pgfl.configs(DEFAULT, name) for name in FIGURES}
    base, budget = of["5.1c"][fixed(0)], DynamicBudget(1e-3, 0.99)
    assert base == Config(
        *(3, 4.0, 0.1), per_server=3, budget=budget, gradient_bound=0.05
    )
    replace = dataclasses.replace
    loud = of["5.1b"][fixed(0)]
    assert loud == replace(base, budget=None, gradient_bound=None)
    assert of["5.1a"][fixed(0)] == replace(loud, per_server=None)
    assert of["5.1c"][pgfl.GFL] == replace(base, num_clusters=1)
    assert of["5.1c"][pgfl.CLUSTER_FL] == replace(base, tau=0.4, mixing="none")
    assert of["5.3"][pgfl.FALLING] == replace(base, tau=0.4, tau_decay=0.98)
    assert [config.tau for config in of["5.2"].values()] == list(DEFAULT.taus)
    for name, budgets in (
        ("5.4a", [DynamicBudget(first, 0.99) for first in DEFAULT.firsts]),
        ("5.4b", [DynamicBudget(1e-3, decay) for decay in DEFAULT.decays]),
    ):
        assert [config.budget for config in of[name].values()] == budgets
        assert {config.tau for config in of[name].values()} == {0.4}
    images = replace(base, rho=2.0, error="logistic", solver_steps=10, tau=0.4)
    for name, bound in (("5.5a", 0.1), ("5.5a, more noise", 0.4), ("5.5b", 0.3)):
        config = of[name][fixed(0.4)]
        assert config.gradient_bound == pytest.approx(bound)
        assert replace(config, gradient_bound=0.05) == images


def test_images_are_pooled_by_class():
    rng = np.random.default_rng(0)
    x, y = rng.random((12, 28, 28, 1)), np.arange(12) % 3
    train, test = pgfl.pool(Dataset({"x": x, "y": y}, {"x": x[:6], "y": y[:6]}), 3)
    assert train.shape == (3, 3, 196)
    assert test.shape == (3, 2, 196)
    np.testing.assert_allclose(train[1, 2, 0], x[7, :2, :2].mean(), rtol=1e-5)


def test_figures_are_run_drawn_and_written_and_left_out_without_files(tmp_path, capsys):
    small = dataclasses.replace(
        pgfl.PRESETS["smoke"],
        num_servers=3,
        mean_degree=2.0,
        clients=4,
        num_features=3,
        sweep_rounds=2,
        every=1,
        num_seeds=2,
        figures=("5.2", "5.6a"),
        organs=tmp_path / "nothing",
        out=tmp_path,
    )
    pgfl.main(small)
    out = capsys.readouterr().out
    assert "Figure 5.6a is left out" in out
    assert (tmp_path / "figure_5_2.png").stat().st_size > 5_000
    with (tmp_path / "pgfl.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines[::2]] == [fixed(0), fixed(0.4)]
    assert "tau = 0.4 better than tau = 0" in (tmp_path / "pgfl.md").read_text()


def test_settings_out_of_range_are_refused():
    wrong: Any
    for wrong, match in (
        ({"taus": (0, 0.2)}, "taus must have 0 and 0.4"),
        ({"figures": ("5.9",)}, "figures must be"),
        ({"sweep_rounds": 3}, "sweep_rounds must be"),
        ({"decays": (0.9, 1.1)}, "decays must be in"),
    ):
        with pytest.raises(ValueError, match=match):
            pgfl.Experiment(**wrong)
