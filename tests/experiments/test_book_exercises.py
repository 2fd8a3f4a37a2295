"""The book's exercises agree with their numbers, and say so when they do not."""

import dataclasses

import numpy as np
import pytest

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
    assert rows["attacked: °C at 3 o'clock"] > rows["clean: °C at 3 o'clock"]


def test_numbers_of_the_specification_stand_in_the_table(solved):
    text = [
        " ".join(str(cell) for cell in column.cells)
        for column in book_exercises.table(solved).columns
    ]
    for number in ("0.133931, 29.8661", "0.272293", "0.706546, 0.998", "666.556, 500"):
        assert number in text[2]
        assert number in text[3]
    assert "report only" in text[2]
    assert "DIFFER" not in text[4]


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
    assert "eigenvalues of X'X" in out
    assert "squared: slope, y5 = 20" in out
    assert "5.1" not in out


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="only must be one of"):
        Experiment(only=("2.1",))
    with pytest.raises(ValueError, match="trials must be >= 1"):
        dataclasses.replace(SMOKE, trials=0)
    with pytest.raises(ValueError, match=r"num_stations must be in \[5"):
        Experiment(num_stations=4)
