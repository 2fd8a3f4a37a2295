"""Experiments that compare methods: what they claim, print and leave behind."""

import dataclasses

import pytest

from fedjax_core import read_result, study
from fedjax_core.experiments import personalization, server_optimizers, stragglers
from fedjax_core.experiments.report import show


@pytest.mark.parametrize(
    ("module", "pair"),
    [
        (server_optimizers, ("FedAvg", "FedYogi")),
        (personalization, ("FedAvg", "FedPer")),
    ],
)
def test_a_study_of_two_methods_ends_in_a_page(module, pair, tmp_path, capsys):
    whole = module.make_study(module.PRESETS["smoke"])
    (setting,) = whole.settings
    assert all(claim[1:] == ("FedAvg", setting) for claim in whole.claims)
    few = whole.only(pair)
    assert len(few.claims) == 1
    show(study.run(few, tmp_path))
    out = capsys.readouterr().out
    assert pair[1] in out
    assert "undecided" in out  # two seeds decide nothing
    page = (tmp_path / "report.html").read_text("utf-8")
    assert all(name in page for name in pair)


def test_stragglers_are_timed_and_drawn(tmp_path, capsys):
    experiment = dataclasses.replace(stragglers.PRESETS["smoke"], out=tmp_path)
    stragglers.main(experiment)
    out = capsys.readouterr().out
    assert "FedBuff" in out
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "seconds to 0.2" in page
    assert "digits: virtual seconds" in page
    names = ("FedAvg waits", "FedAvg drops the slow")
    waits, drops = (read_result(tmp_path / name) for name in names)
    assert drops.total("virtual_seconds") < waits.total("virtual_seconds")


def test_impossible_comparisons_are_refused():
    with pytest.raises(ValueError, match="select must be"):
        stragglers.Experiment(cohort_size=10, select=9)
    with pytest.raises(ValueError, match="cohort_size must be"):
        personalization.Experiment(num_clients=5, cohort_size=6)
