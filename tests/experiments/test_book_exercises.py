"""The book's exercises agree with their numbers, and say so when they do not."""

import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from fedjax_core.experiments import book_exercises, cli
from fedjax_core.experiments.book_exercises import Experiment, Row

SMOKE = book_exercises.PRESETS["smoke"]


@pytest.fixture(scope="module")
def solved():
    return book_exercises.solve(SMOKE)


def test_every_exercise_is_solved_and_agrees(solved):
    expected = "1.3 1.4 3.1 3.11 3.12 3.13 4.1 5.1 6.2 7.1 9.5 10.2 10.3 10.4"
    assert list(solved) == expected.split()
    for name, rows in solved.items():
        assert [row.quantity for row in rows if row.agrees is False] == [], name
        assert any(row.agrees for row in rows), name


def test_what_only_data_can_say_is_reported(solved):
    reported = {name for name, rows in solved.items() for r in rows if r.agrees is None}
    assert reported == {"3.11", "9.5", "10.2", "10.3"}
    rows = {r.quantity: float(r.ours) for r in solved["10.3"]}
    assert rows["attacked: prediction at 3, °C"] > rows["clean: prediction at 3, °C"]


def _printed(solved, width=80):
    """Lines of every exercise's table."""
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        for part in book_exercises.tables(solved):
            console.print(part)
    return capture.get().splitlines()


def test_numbers_of_the_specification_stand_in_the_table(solved):
    lines = _printed(solved)
    for number in (
        "0.133931",
        "29.8661",
        "0.272293",
        "0.706546, 0.998",
        "666.556, 500",
    ):
        assert any(line.count(number) == 2 for line in lines), number
    assert "report only" in "".join(lines)
    assert "DIFFER" not in "".join(lines)


def test_every_exercise_has_a_title_and_the_same_columns(solved):
    lines = _printed(solved)
    for name, exercise in book_exercises.EXERCISES.items():
        title = (exercise.__doc__ or "").splitlines()[0].rstrip(".")
        assert f"{name}  {title}" in (line.rstrip() for line in lines)
    headers = {
        line for line in lines if line.split() == ["quantity", "expected", "ours"]
    }
    assert len(headers) == 1
    # Nothing is wrapped or cut off at 80 columns.
    count = sum(map(len, solved.values())) + 2 * len(solved)
    assert len(lines) == count
    assert _printed(solved, 200) == lines


def test_the_room_of_numbers_from_chance_is_printed(solved):
    verdicts = {row.quantity: row.verdict for row in solved["7.1"]}
    assert verdicts["P(a wrong one), 10 candidates"] == "within 5e-05"
    row = next(row for row in solved["7.1"] if row.quantity.endswith("m = 10"))
    assert row.verdict == f"within {float(row.tol):.2g}"
    assert Row("", 200.0, 201.0, 0.01).verdict == "within 2"
    assert Row("", [0.5, 0.1], [0.5, 0.1], 1e-6).verdict == "agree"
    assert "DIFFER" in Row("", 1.0, 2.0, 0.01).verdict
    assert Row("", None, 3).verdict == ""


def test_rows_say_what_they_measure(solved):
    for row in solved["5.1"][:9]:
        assert row.quantity.startswith("contraction factor, alpha = ")
    measured = [row.quantity for name in ("10.2", "10.3") for row in solved[name]]
    assert sum("MSE" in quantity for quantity in measured) == 7
    for quantity in measured:
        assert "error" not in quantity
        assert "MSE" not in quantity or "°C²" in quantity or "+20 %" in quantity


def test_how_far_apart_numbers_may_be():
    assert Row("", 1.0, 1.0 + 1e-10).agrees
    assert Row("", 1.0, 1.1).agrees is False
    assert Row("", 1e6, 1e6 + 0.5, 1e-6).agrees  # in proportion above 1
    assert Row("", 0.0, 0.5, 1e-6).agrees is False
    assert Row("", [1, 2], np.array([1.0, np.nan])).agrees is False
    assert Row("", [1, 2], [1.0]).agrees is False
    assert Row("", None, 3).agrees is None


def test_a_number_that_differs_ends_the_run(monkeypatch, capsys):
    wrong = {"1.3": lambda e: [Row("right", 1, 1.0), Row("wrong one", 2.0, 3.0)]}
    monkeypatch.setattr(book_exercises, "EXERCISES", wrong)
    with pytest.raises(SystemExit, match=r"differ in 1\.3 \(wrong one\)") as stop:
        book_exercises.main(Experiment())
    assert stop.value.code not in (0, None)
    assert "DIFFER" in capsys.readouterr().out


def test_some_exercises_can_be_chosen(monkeypatch, capsys):
    monkeypatch.setitem(cli.EXPERIMENTS, "book_exercises", "")
    argv = ["run", "book_exercises", "--devices", "8", "--only", "1.4", "10.4"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "largest eigenvalue of X'X" in out
    assert "least squares: slope, y5 = 20" in out
    assert "5.1" not in out


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="only must be one of"):
        Experiment(only=("2.1",))
    with pytest.raises(ValueError, match="trials must be >= 1"):
        dataclasses.replace(SMOKE, trials=0)
    with pytest.raises(ValueError, match=r"num_stations must be in \[5"):
        Experiment(num_stations=4)
