"""The figures of private networks: what is compared, how orderings are counted."""

import csv
import dataclasses

import numpy as np

from fedjax_core import Result
from fedjax_core.experiments import zcdp_nfl
from fedjax_core.experiments.zcdp_nfl import EXACT, OURS, REFERENCE, SPLIT, Cell
from fedjax_core.privacy import DynamicBudget, budget_epsilon

DEFAULT = zcdp_nfl.PRESETS["default"]


def cell(method, budget, errors) -> Cell:
    """A finished run whose seeds end with these errors."""
    seen = {"normalised_error": np.array([[50.0, error] for error in errors])}
    seeds = tuple(range(len(errors)))
    result = Result(seeds, 2, {}, np.array([1, 2]), seen, {}, None, [])
    return Cell("3.3", method, budget, 10.0, result)


def test_orderings_are_tested_at_every_budget_and_the_reference_stands_beside():
    e = dataclasses.replace(DEFAULT, budgets=(1e-3, 1e-2), num_seeds=6)
    up = np.linspace(1, 2, 6)
    cells = [
        cell(method, budget, factor * up)
        for budget, factors in ((1e-3, (1, 2, 0.5)), (1e-2, (1, 2, 2)))
        for method, factor in zip((OURS, SPLIT, EXACT), factors, strict=True)
    ]
    others = [
        cell(method, budget, np.where(np.arange(6) % 2, 0.5, 2) * up)
        for budget in e.budgets
        for method in zcdp_nfl.FIGURES["3.3"].others
    ]
    rows = zcdp_nfl.orderings(e, "3.3", cells + others).rows
    assert rows[0][1:] == ("printed", "0.001 (x 2), 0.01 (x 2)", "", "")
    assert rows[1][1:] == ("printed", "0.01 (x 2)", "", "0.001 (x 0.5)")
    assert rows[2][1:] == ("not printed", "", "0.001 (x 1), 0.01 (x 1)", "")
    shown = zcdp_nfl.errors(e, "3.3", cells).rows
    assert [row[4] for row in shown[:3]] == ["0.023", "12", "0.105"]
    other = dataclasses.replace(e, rounds=100)
    assert all(not row[4] for row in zcdp_nfl.errors(other, "3.3", cells).rows)


def test_the_reference_is_of_methods_and_budgets_that_run():
    for (name, method), errors in REFERENCE.items():
        figure = zcdp_nfl.FIGURES[name]
        assert method in (OURS, *figure.printed, *figure.others)
        assert errors.keys() <= set(DEFAULT.budgets)


def test_a_figure_is_run_drawn_and_written(tmp_path, capsys):
    small = dataclasses.replace(
        zcdp_nfl.PRESETS["smoke"],
        num_nodes=5,
        num_examples=5,
        rounds=4,
        budgets=(0.1,),
        num_seeds=2,
        figures=("3.2",),
        out=tmp_path,
    )
    zcdp_nfl.main(small)
    out = capsys.readouterr().out
    assert "zCDP-NFL" in out
    assert (tmp_path / "figure_3_2.png").stat().st_size > 10_000
    with (tmp_path / "zcdp_nfl.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 6
    total = DynamicBudget(0.1, small.decay).total(4)
    assert float(lines[0]["epsilon"]) == budget_epsilon(total, small.delta)
