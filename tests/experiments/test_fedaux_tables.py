"""The tables of FedAUX: which there are, and one of them to the end."""

import dataclasses
from pathlib import Path

import pytest

from fedjax_core import privacy
from fedjax_core.experiments import fedaux_tables

SMOKE = fedaux_tables.PRESETS["smoke"]
ALL = dataclasses.replace(
    SMOKE, methods=fedaux_tables.NAMES, tables=fedaux_tables.TABLES
)


@pytest.fixture(scope="module")
def prepared():
    private = privacy.CertaintyConfig(epsilon=0.5)
    return fedaux_tables.pretrained(dataclasses.replace(SMOKE, certainty=private))


@pytest.fixture
def problem(prepared, monkeypatch):
    """Prepared once, whatever asks for it."""
    monkeypatch.setattr(fedaux_tables, "pretrained", lambda *_, **__: prepared)
    return prepared


def test_every_table_is_a_study_of_its_methods(problem):
    photographs = dataclasses.replace(
        ALL, auxiliary=(Path("stl10.npz"), Path("svhn.npz"))
    )
    studies = fedaux_tables.make_studies(photographs, problem)
    assert list(studies) == [
        "7.1",
        "7.2 svhn",
        "7.3",
        "7.4",
        "7.5",
        "7.7",
        "7.8",
        "C.4",
    ]
    assert list(studies["7.1"].methods) == list(fedaux_tables.NAMES)
    assert studies["7.1"].printed["FedAUX", "alpha 0.01"] == pytest.approx(0.712)
    assert studies["7.2 svhn"].printed["FedDF", "alpha 0.01"] == pytest.approx(0.281)
    (one_shot,) = studies["7.3"].settings.values()
    assert one_shot.rounds == 1
    assert one_shot.options["cohort_size"] == 5
    # Every scorer and every noise has its table among the server's data.
    for name in ("7.4", "7.7"):
        (setting,) = studies[name].settings.values()
        assert set(studies[name].methods) <= set(setting.data.public)
    assert ("logistic", "density", "alpha 0.01") in studies["7.4"].claims
    grids = {name: m.points() for name, m in studies["C.4"].methods.items()}
    assert (len(grids["FedAvg"]), len(grids["FedAUX"]), len(grids["FedProx"])) == (
        4,
        16,
        16,
    )
    assert studies["C.4"].printed["FedAUX", "alpha 0.01"] == pytest.approx(0.7501)
    (tuned,) = studies["C.4"].settings.values()
    assert set(tuned.data.splits) == {"train", "test", "validation"}
    assert "scores" in tuned.data.public
    (linear,) = studies["7.8"].settings.values()
    assert linear.data.train.examples["x"].shape[1:] == (64,)


def test_a_run_ends_in_a_report_of_its_tables(problem, tmp_path, capsys):
    few = dataclasses.replace(
        SMOKE,
        rounds=1,
        methods=("FedDF+P", "FedAUX"),
        tables=("7.8",),
        certainty=privacy.CertaintyConfig(epsilon=0.5),
        out=tmp_path,
    )
    fedaux_tables.main(few)
    out = capsys.readouterr().out
    assert "FedAUX > FedDF+P" in out
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "(0.5, 1e-05)-DP" in page
    assert "undecided" in page
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_impossible_tables_are_refused():
    with pytest.raises(ValueError, match=r"tables must be one of '7.1', .* got '7.9'"):
        dataclasses.replace(SMOKE, tables=("7.9",))
    with pytest.raises(ValueError, match="methods must be one of 'FedAvg'"):
        dataclasses.replace(SMOKE, methods=("SGD",))
