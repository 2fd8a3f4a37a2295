"""The studies of clustered learning end in pages, figures and a summary."""

import dataclasses

import pytest

from fedjax_core import study
from fedjax_core.experiments import cfl_clusters


def test_it_says_what_held_and_what_a_small_setting_cannot_show(
    tmp_path, capsys, monkeypatch
):
    smoke = dataclasses.replace(
        cfl_clusters.PRESETS["smoke"], rounds=2, attack_rounds=2, out=tmp_path
    )
    for name, methods in (("clusters", ["CFL"]), ("adversaries", ["CFL", "FL"])):
        make = cfl_clusters.STUDIES[name]
        part = lambda e, make=make, methods=methods: make(e).only(methods)  # noqa: E731
        monkeypatch.setitem(cfl_clusters.STUDIES, name, part)
    run, done = study.run, []

    def once(this, out):
        if "one cluster" not in this.methods:
            done.append(run(this, out))
            return done[-1]
        # The first run stands for those of the same method in other settings.
        row = done[0].row("CFL", "label permutation")
        rows = [row._replace(method="one cluster", setting=s) for s in this.settings]
        out.mkdir()
        return done[0]._replace(study=this, out=out, rows=rows)

    monkeypatch.setattr(study, "run", once)
    cfl_clusters.main(smoke)
    out = capsys.readouterr().out
    page = (tmp_path / "summary.md").read_text("utf-8")
    assert "undecided" in out  # two seeds decide nothing
    for text in ("CFL > FL", "2 seeds decide no ordering", "byzantine clients stay"):
        assert text in page
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    for name in cfl_clusters.STUDIES:
        assert (tmp_path / name / "report.html").exists()


def test_thresholds_are_chosen_on_validation_examples_of_another_seed():
    few = dataclasses.replace(cfl_clusters.PRESETS["smoke"], points=20)
    tuned = dataclasses.replace(few, eps1=(1.0, 2.0), eps2=(0.0, 0.5))
    this = cfl_clusters.clusters_study(tuned)
    assert len(this.methods["CFL"].points()) == 4
    assert (*this.tuning_seeds,) == (0,)
    (setting,) = this.settings.values()
    sizes = {name: split.sizes for name, split in setting.data.splits.items()}
    assert (set(sizes["train"]), set(sizes["validation"])) == ({20}, {5})
    assert "chosen by validation" in " ".join(cfl_clusters.limits(tuned))
    (setting,) = cfl_clusters.clusters_study(few).settings.values()
    assert "validation" not in setting.data.splits
    assert set(setting.data.train.sizes) == {20}


def test_printed_numbers_stand_beside_their_cells():
    digits = dataclasses.replace(cfl_clusters.PRESETS["smoke"], kinds=("noisy",))
    assert not cfl_clusters.adversaries_study(digits).printed
    table = cfl_clusters._PRINTED["mnist"]
    assert table["CFL"][0] - table["FL"][0] == pytest.approx(83.39)


def test_impossible_experiments_are_refused():
    for change, message in (
        ({"gap_points": (20, 10)}, "gap_points must ascend"),
        ({"kinds": ("evil",)}, "kinds must be one of"),
        ({"num_clusters": 21}, "num_clusters must be in"),
        ({"splits": ()}, "splits must not be empty"),
        ({"eps1": (0.0,)}, "eps1 must be > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            cfl_clusters.Experiment(**change)  # type: ignore[arg-type]
