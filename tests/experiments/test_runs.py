"""Runs on disk: found, joined over seeds, compared, drawn and put on a page."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.core.test_sweep import DATA, MODEL, WORK

from fedjax_core import Result, RunDirError, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.experiments import cli, runs


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two runs that differ in the seed, one with another rate, one that is longer."""
    out = tmp_path_factory.mktemp("runs")
    for name, seeds, client_lr, rounds in (
        ("first", (0,), 0.1, 2),
        ("second", (1,), 0.1, 4),
        ("other", (0, 1), 0.2, 2),
    ):
        algorithm = fedavg.make(
            fedavg.Config(client_lr=client_lr, work=WORK), MODEL.loss
        )
        simulate(
            algorithm, DATA, MODEL, rounds=rounds, cohort_size=3, seeds=seeds,
            eval_every=2, progress=False, run_dir=out / name,
        )  # fmt: skip
    return out


def losses(path: Path, round: int) -> list[float]:
    """As they stand in a run directory."""
    with open(path / "evaluations.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["round"] == str(round)]
    return [float(row["test_loss"]) for row in rows]


def test_runs_that_differ_in_seeds_alone_are_one_result(root):
    found = runs.gather([root])
    assert list(found) == ["first ... second", "other"]
    joined = found["first ... second"]
    assert (joined.seeds, joined.rounds, joined.evaluated.tolist()) == ((0, 1), 2, [2])
    expected = losses(root / "first", 2) + losses(root / "second", 2)
    assert joined.evaluations["test_loss"][:, 0].tolist() == expected
    assert joined.train["train_loss"].shape == (2, 2)
    # The same run twice is no error bar.
    other = root / "other"
    assert [len(r.seeds) for r in runs.gather([other, other]).values()] == [2]
    assert list(runs.gather([root / "first"])) == [str(root / "first")]


def test_runs_are_compared_as_they_stand(root, capsys, monkeypatch):
    monkeypatch.chdir(root)
    assert cli.main(["compare", "first", "other"]) == 0
    out = capsys.readouterr().out
    (first,), other = losses(root / "first", 2), losses(root / "other", 2)
    # Paths may be relative and absolute.
    assert list(runs.gather([Path("first"), root / "other"])) == ["first", "other"]
    (line,) = [line for line in out.splitlines() if "test_loss " in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    spread = f"{np.mean(other):.4g} ± {np.std(other, ddof=1):.4g}"
    assert cells == ["test_loss", f"{first:.4g}", spread]


def test_runs_without_evaluations_are_compared_by_what_rounds_reported(
    capsys, monkeypatch
):
    train = {"distance": np.array([[3.0, 0.25]])}
    result = Result((0,), 2, train, np.zeros(0, int), {}, {}, None, [])
    monkeypatch.setattr(runs, "gather", lambda paths: {"fedgd": result})
    runs.compare([])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "distance" in x]
    assert line.strip("│ ").split() == ["distance", "│", "0.25"]


@pytest.mark.parametrize("over", ["rounds", "bytes"])
def test_curves_are_one_picture(over, root, tmp_path, capsys):
    out = tmp_path / "curves.png"
    options = ["--over", over, "--metric", "loss", "--metric", "train_loss"]
    assert cli.main(["plot", str(root), *options, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in capsys.readouterr().out


def test_runs_have_a_page(root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(root / "other")]) == 0
    page = root / "other" / "report.html"
    assert str(page) in capsys.readouterr().out.replace("\n", "")
    values = losses(root / "other", 2)
    spread = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    assert f"<td>{spread}</td>" in page.read_text()
    both = [str(root / "first"), str(root / "other")]
    assert cli.main(["report", *both, "--metric", "train_loss"]) == 0
    text = (tmp_path / "report" / "report.html").read_text()
    assert "train_loss" in text
    for found in ("&quot;client_lr&quot;: 0.2", "jaxlib", "<td>first</td>"):
        assert found in text
    with open(tmp_path / "report" / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == ["first", "other"]
    assert [line["rounds"] for line in lines] == ["2", "2"]


def test_what_cannot_be_shown_ends_with_one_line_and_status_2(
    root, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("begun").mkdir()
    config = json.loads((root / "first" / "config.json").read_text())
    Path("begun/config.json").write_text(json.dumps(config))
    Path("damaged").mkdir()
    Path("damaged/config.json").write_text("{")
    for name, file, content in (
        ("seedless", "config.json", "{}"),
        ("reseeded", "config.json", json.dumps(config | {"seeds": [3]})),
        ("unversioned", "versions.json", "{"),
    ):
        shutil.copytree(root / "first", name)
        Path(name, file).write_text(content)
    first = str(root / "first")
    for argv, message in (
        (["compare", first, "empty"], "empty holds no run"),
        (["plot", first, "nowhere"], "nowhere holds no run"),
        (["report", "begun"], "begun holds no checkpoint yet"),
        (["compare", "damaged"], "config.json is not JSON of a run"),
        (["compare", "seedless"], "must name the seeds of its tables, [0], got None"),
        (["plot", "reseeded"], "must name the seeds of its tables, [0], got [3]"),
        (["report", "unversioned"], "versions.json is not JSON of a run"),
        (["plot", first, "--metric", "f1"], "no metric 'f1' that all runs have"),
        (["report", first, "--metric", "f1"], "there are: test_loss, test_loss_client"),
        (["plot", first, "--over", "virtual_seconds"], "no metric 'virtual_seconds'"),
    ):
        assert cli.main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("fedjax-core: ")
        assert message in line
    assert not list(Path().glob("*.png"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plot", first, "--over", "moons"])
    assert stopped.value.code == 2


def test_points_of_grids_are_not_among_the_runs(root, tmp_path):
    out = tmp_path / "study"
    for part in ("tuning/s/m/lr=1", "runs/s/m"):
        (out / part).mkdir(parents=True)
        (out / part / "config.json").write_text("{}")
    assert len(runs.find(out)) == 2
    (out / "study.json").write_text("{}")
    assert runs.find(out) == [out / "runs/s/m"]
    assert runs.find(tmp_path) == [out / "runs/s/m"]
    with pytest.raises(RunDirError, match="holds no run"):
        runs.find(out / "runs/s/n")
