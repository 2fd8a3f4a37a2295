"""A study fills its cells, survives those that fail, and shows what it measured."""

import csv
import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import permutation_test
from tests.core.test_sweep import DATA, MODEL, PACKED, WORK

from fedjax_core import RunDirError, command, study, study_report
from fedjax_core.algorithms import ditto, fedavg
from fedjax_core.study import Method, Outcome, Row, Setting, Study

WITH_VALIDATION = dataclasses.replace(DATA, validation=PACKED)
FEDAVG = fedavg.Config(work=WORK)
OPTIONS = {"cohort_size": 3, "eval_every": 2, "checkpoint_every": 2}
SETTING = Setting(data=WITH_VALIDATION, model=MODEL, rounds=4, options=OPTIONS)
METHODS = {
    "slow": Method(make=fedavg.make, config=fedavg.Config(client_lr=0.01, work=WORK)),
    "fast": Method(make=fedavg.make, config=FEDAVG),
    "tuned": Method(
        make=fedavg.make, config=FEDAVG, grid={"client_lr": (0.05, 1e38, 0.2)}
    ),
    "broken": Method(make=fedavg.make, config=fedavg.Config(client_lr=1e38, work=WORK)),
    "ditto": Method(
        make=ditto.make, config=ditto.Config(work=WORK), metric="personal_loss"
    ),
}


def a_study(**changes) -> Study:
    fields: dict[str, Any] = {
        "methods": METHODS,
        "settings": {"toy": SETTING},
        "seeds": range(5),
        "metric": "loss",
        "higher_is_better": False,
        "printed": {("fast", "toy"): 1.5},
        "claims": [("fast", "slow", "toy"), ("slow", "fast", "toy")],
    }
    return Study(**(fields | changes))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Outcome:
    out = tmp_path_factory.mktemp("studies") / "a study"
    return study.run(a_study(), out, progress=False)


def test_cells_are_run_directories_and_failures_are_rows(outcome: Outcome):
    assert [row.method for row in outcome.rows] == list(METHODS)
    broken = outcome.row("broken", "toy")
    assert broken.result is None
    assert "not finite" in broken.error
    for row in outcome.rows:
        assert (outcome.out / "runs" / "toy" / row.method / "config.json").exists()
        assert len(row.values) == (0 if row is broken else 5)
    assert outcome.row("ditto", "toy").metric == "test_personal_loss"
    # Four cells of FedAvg and three points of a grid, and Ditto.
    compiled = [r.result.compilations for r in outcome.rows if r.result]
    assert compiled == [1, 1, 1, 1]


def test_the_winner_of_a_grid_is_chosen_on_validation_data_alone(outcome: Outcome):
    row = outcome.row("tuned", "toy")
    scores = [trial.score for trial in row.trials]
    assert math.isnan(scores[1])
    assert "not finite" in row.trials[1].error
    assert row.config.client_lr == (0.05, 0.2)[scores[0] > scores[2]]
    for folder in (outcome.out / "tuning" / "toy" / "tuned").iterdir():
        config = json.loads((folder / "config.json").read_text())
        assert config["eval_splits"] == ["validation"]
        assert config["seeds"] == [1000]
    record = json.loads((outcome.out / "study.json").read_text())
    tuned = next(r for r in record["rows"] if r["method"] == "tuned")
    assert [trial["point"] for trial in tuned["trials"]] == [
        "client_lr=0.05", "client_lr=1e+38", "client_lr=0.2",
    ]  # fmt: skip
    assert tuned["config"]["client_lr"] == row.config.client_lr


def test_a_second_call_reads_what_is_there(outcome: Outcome, tmp_path):
    methods = {k: METHODS[k] for k in ("slow", "fast")}
    copy = shutil.copytree(outcome.out, tmp_path / "copy")
    again = study.run(a_study(methods=methods), copy, progress=False)
    for row in again.rows:
        assert row.result is not None
        assert row.result.timed_rounds == 0
        np.testing.assert_array_equal(row.values, outcome.row(row.method, "toy").values)


def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(
    outcome, tmp_path, monkeypatch
):
    methods = {k: METHODS[k] for k in ("slow", "ditto")}
    small = a_study(methods=methods, printed={}, claims=())

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ditto, "client_program", interrupted)
        with pytest.raises(KeyboardInterrupt, match="1 of 2 runs done; the same call"):
            study.run(small, tmp_path, progress=False)
    rows = study.read(tmp_path).rows
    np.testing.assert_array_equal(rows[0].values, outcome.row("slow", "toy").values)
    assert (rows[1].error, rows[1].finished) == ("has not run", False)
    resumed = study.run(small, tmp_path, progress=False)
    assert [row.result.timed_rounds for row in resumed.rows if row.result] == [0, 4]
    for row in resumed.rows:
        np.testing.assert_array_equal(row.values, outcome.row(row.method, "toy").values)


def test_a_study_is_shown_from_disk_as_from_memory(outcome: Outcome, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(outcome.out, moved)
    read = study.read(moved)
    assert study_report.markdown(read) == study_report.markdown(outcome)
    assert str(study_report.records(read)) == str(study_report.records(outcome))
    assert str(study.summary(read)) == str(study.summary(outcome))
    assert command.read(moved) == command.of_program()
    # A cell that is not there yet counts for nothing.
    shutil.rmtree(moved / "runs" / "toy" / "fast" / "checkpoints" / "4")
    shutil.rmtree(moved / "runs" / "toy" / "ditto")
    (moved / "runs" / "toy" / "tuned" / "metrics.csv").write_text("")
    read = study.read(moved)
    fast, gone = read.row("fast", "toy"), read.row("ditto", "toy")
    assert (fast.error, fast.finished) == ("is at round 2 of 4", False)
    assert gone.error.endswith("is gone")
    assert "lacks rows" in read.row("tuned", "toy").error
    assert not [row for row in (fast, gone) if len(row.values)]
    assert {o.verdict for o in study_report.orderings(read)} == {"undecided"}
    page = study_report.write(read).read_text()
    assert "<td>unfinished</td>" in page
    assert "is at round 2 of 4" in page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no study, since it has no study.json"),
        ("{", "is not JSON of a run"),
        ('{"design": {"printed": []}}', "is damaged: KeyError('rows')"),
        ('{"design": "printed"}', "is damaged: AttributeError"),
        ('{"design": {"printed": [], "level": 1, "x": 2}}', "is damaged: TypeError"),
    ],
)
def test_a_folder_of_no_study_is_refused(content, message, tmp_path):
    if content is not None:
        (tmp_path / "study.json").write_text(content)
    with pytest.raises(RunDirError, match=re.escape(message)):
        study.read(tmp_path)


def test_a_setting_that_cannot_run_fails_alone(outcome, tmp_path):
    crowded = dataclasses.replace(SETTING, options={"cohort_size": 99})
    settings = {"crowded": crowded, "toy": SETTING}
    both = a_study(
        methods={"slow": METHODS["slow"]}, settings=settings, printed={}, claims=()
    )
    rows = study.run(both, tmp_path, progress=False).rows
    assert "cohort_size" in rows[0].error
    np.testing.assert_array_equal(rows[1].values, outcome.row("slow", "toy").values)


def test_no_point_is_taken_while_one_of_the_grid_could_not_run(tmp_path):
    alone = a_study(
        methods={"tuned": METHODS["tuned"]}, printed={}, claims=(), tuning_seeds=9
    )
    occupied = tmp_path / "tuning" / "toy" / "tuned" / "client_lr=0.2"
    occupied.mkdir(parents=True)
    (occupied / "mine").touch()
    (row,) = study.run(alone, tmp_path, progress=False).rows
    assert "point client_lr=0.2 of its grid did not run" in row.error
    assert (row.config, row.taken, len(row.trials)) == (None, "", 3)
    assert not (tmp_path / "runs").exists()
    (occupied / "mine").unlink()
    (row,) = study.run(alone, tmp_path, progress=False).rows
    assert (row.error, len(row.values)) == ("", 5)


def test_a_grid_without_a_number_says_so(tmp_path):
    blind = MODEL._replace(
        metrics=lambda params, batch: {"loss": jnp.full(batch["y"].shape, jnp.nan)}
    )
    alone = a_study(
        methods={"tuned": METHODS["tuned"]},
        settings={"toy": dataclasses.replace(SETTING, model=blind)},
        printed={}, claims=(),
    )  # fmt: skip
    (row,) = study.run(alone, tmp_path, progress=False).rows
    assert row.error == "no point of its grid is of use: its validation_loss is nan"


def test_a_bar_shows_runs(tmp_path, capfd):
    methods = {"slow": METHODS["slow"]}
    study.run(a_study(methods=methods, printed={}, claims=()), tmp_path)
    assert "1/1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"a/b": METHODS["slow"]}}, "names of folders, got 'a/b'"),
        ({"tuning_seeds": (3,)}, r"got \[3\] in both"),
        ({"tuning_seeds": 3}, r"got \[3\] in both"),
        ({"methods": {}}, "methods must name one or more, got {}"),
        ({"printed": {("fats", "toy"): 1.0}}, "printed must be one of"),
        ({"claims": [("fast", "slow", "joy")]}, "claims must be one of 'toy', got"),
        (
            {"settings": {"toy": dataclasses.replace(SETTING, data=DATA)}},
            "'toy' must have a validation split to tune 'tuned' on",
        ),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(changes, message):
    fields: dict[str, Any] = {"printed": {}, "claims": ()} | changes
    with pytest.raises(ValueError, match=message):
        a_study(**fields)


def test_a_study_of_fewer_methods_keeps_what_is_said_of_them():
    whole = a_study(claims=[("fast", "slow", "toy"), ("fast", "ditto", "toy")])
    few = whole.only(["slow", "fast"])
    assert list(few.methods) == ["slow", "fast"]
    assert [*few.claims] == [("fast", "slow", "toy")]
    assert few.printed == whole.printed
    assert not whole.only(["slow"]).printed
    same = Method.of(fedavg, client_lr=0.01, work=WORK)
    assert same == METHODS["slow"]


def test_a_grid_is_validated_when_built():
    with pytest.raises(ValueError, match="client_lr must be > 0 and finite, got 0"):
        Method(make=fedavg.make, config=FEDAVG, grid={"client_lr": (0.1, 0)})
    with pytest.raises(ValueError, match=r"grid must be one of .*got 'rate'"):
        Method(make=fedavg.make, config=FEDAVG, grid={"rate": (0.1,)})
    with pytest.raises(ValueError, match="options must leave seeds to the study"):
        dataclasses.replace(SETTING, options=OPTIONS | {"seeds": 3})


def test_the_sign_flip_test_is_scipys_and_keeps_its_level():
    d = np.array([0.3, -0.1, 0.4, 0.2, 0.25, -0.05])
    expected = permutation_test(
        (d,), np.sum, permutation_type="samples", n_resamples=64,
        alternative="greater",
    )  # fmt: skip
    assert study_report.sign_flip(d) == pytest.approx(expected.pvalue)
    assert study_report.sign_flip(np.ones(5)) == 1 / 32
    # Under no difference all signs are alike: exactly so many give a false alarm.
    signs = np.array(list(itertools.product((1, -1), repeat=6)))
    p = np.array([study_report.sign_flip(s * np.abs(d)) for s in signs])
    for level in (0.01, 0.05, 0.1, 0.5):
        assert (p <= level).mean() <= level
    assert study_report.sign_flip(np.ones(30)) == 2**-16
    # One seed that counts is above 0 half of the time, whichever it is.
    for seed in np.eye(18):
        assert study_report.sign_flip(seed) == 0.5
    assert study_report.sign_flip(np.zeros(30)) == 1


def test_orderings_are_held_not_held_or_undecided(outcome: Outcome):
    held, not_held = study_report.orderings(outcome)
    assert (held.verdict, not_held.verdict) == ("held", "not held")
    assert held.p == 1 / 32
    assert held.difference == -not_held.difference > 0
    changed = outcome._replace(study=a_study(claims=[("fast", "broken", "toy")]))
    assert study_report.orderings(changed)[0].verdict == "undecided"
    few = a_study(seeds=range(4))
    values = {row.method: row for row in outcome.rows}
    assert values["fast"].values.mean() < values["slow"].values.mean()
    text = study_report.markdown(outcome._replace(study=few))
    assert "so few seeds decide nothing, p >= 0.0625" in text


def test_numbers_stand_beside_printed_ones(outcome: Outcome):
    page = study_report.write(outcome).read_text()
    with open(outcome.out / "table.csv", newline="") as file:
        lines = {line["method"]: line for line in csv.DictReader(file)}
    fast, values = lines["fast"], outcome.row("fast", "toy").values
    assert float(fast["mean"]) == pytest.approx(values.mean())
    assert float(fast["std"]) == pytest.approx(values.std(ddof=1))
    assert float(fast["difference"]) == pytest.approx(values.mean() - 1.5)
    assert [float(v) for v in fast["values"].split()] == values.tolist()
    # 3 clients receive and send 12 parameters of 4 bytes in each of 4 rounds.
    assert float(fast["megabytes"]) == pytest.approx(3 * 12 * 4 * 4 * 2 / 1e6)
    assert "not finite" in lines["broken"]["error"]
    text = (outcome.out / "table.md").read_text()
    assert "| broken | failed |" in text
    assert "| broken | toy | every update of a cohort was excluded" in text
    assert "| ditto (personal_loss) | " in text
    assert f"| {values.mean():.4f} ± {values.std(ddof=1):.4f} | 1.5000 |" in text
    assert "| fast > slow | toy | " in text
    assert re.search(r"\| tuned \| toy \| client_lr=0.\d+ \| [\d.]+ \| taken \|", text)
    best = outcome.row("fast", "toy").best(higher_is_better=False)
    assert float(fast["best"]) == pytest.approx(best.mean())
    shown = outcome._replace(study=dataclasses.replace(outcome.study, show_best=True))
    (lines,) = (t.rows for t in study_report.tables(shown) if t.title == "toy")
    (line,) = (row for row in lines if row[0] == "fast")
    assert line[2:5] == (
        f"{best.mean():.4f} ± {best.std(ddof=1):.4f}",
        "1.5000",
        f"{best.mean() - 1.5:+.4f}",
    )
    asked = a_study(printed={("fast", "toy"): (1.5, 0.25)})
    both = outcome._replace(study=asked)
    assert "| 1.5000 ± 0.2500 |" in study_report.markdown(both)
    (line,) = (x for x in study_report.records(both) if x["method"] == "fast")
    assert (line["printed"], line["printed_std"]) == (1.5, 0.25)
    # One file for a phone, with all that made it.
    assert '<meta name="viewport" content="width=device-width' in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert page.count("<img") == 3
    checksum = re.search(r"&quot;checksum&quot;: &quot;[0-9a-f]{8}&quot;", page)
    assert checksum
    for found in ("python", "client_lr", "jaxlib", "Claims", "1e+38"):
        assert found in page
    assert len(list((outcome.out / "figures").glob("*.png"))) == 3


def test_names_are_text_in_the_page(tmp_path: Path):
    names = {"<b>&": METHODS["slow"]}
    with pytest.raises(ValueError, match="names of folders"):
        a_study(methods=names, printed={}, claims=())
    ampersand = a_study(methods={"R&D": METHODS["slow"]}, printed={}, claims=())
    row = Row("R&D", "toy", FEDAVG, "test_loss", None, "<script>\n| line")
    page = study_report.write(Outcome(ampersand, tmp_path, [row], {})).read_text()
    text = (tmp_path / "table.md").read_text()
    assert text.endswith("| R&D | toy | <script> / line |\n")
    assert "R&amp;D" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
