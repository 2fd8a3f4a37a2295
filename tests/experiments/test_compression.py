"""Experiments on compression: what they claim, print and leave behind."""

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from fedjax_core.compress import theory
from fedjax_core.experiments import sbc_ratios, stc_tables


def test_accuracy_against_bits(tmp_path, capsys):
    experiment = dataclasses.replace(
        stc_tables.PRESETS["smoke"], iterations=8, out=tmp_path
    )
    place = stc_tables.environments(experiment)["iid"]
    loaded = stc_tables.load(experiment)
    results = stc_tables.run(experiment, loaded, "iid", place, {"DSGD", "STC 1/25"})
    stc_tables.show_bits(experiment, results, Console(width=120))
    out = capsys.readouterr().out
    assert "STC 1/25" in out
    assert "(309.9)" in out  # printed
    assert (tmp_path / "bits.png").read_bytes().startswith(b"\x89PNG")
    sent = [result.total("uplink_bytes") for result in results.values()]
    expected = theory.compression_ratio("stc", 1 / 25)
    assert sent[0] / sent[1] == pytest.approx(expected, rel=0.03)
    # Of a dense message in every round until the goal.
    accuracy = results["DSGD"].evaluations["test_accuracy"]
    goal = accuracy.max(1).min()
    rounds = results["DSGD"].evaluated[(accuracy >= goal).argmax(1)]
    model = sum(x[0].size for x in jax.tree.leaves(results["DSGD"].params))
    spent, reached = stc_tables.megabytes(results["DSGD"], "uplink", goal)
    assert spent == pytest.approx(rounds.mean() * 4 * model / 1e6)
    assert (reached, rounds.max() > 1) == (len(rounds), True)


def test_claims_can_be_tested_and_are():
    experiment = stc_tables.PRESETS["smoke"]
    places = stc_tables.environments(experiment)
    names = stc_tables.methods(experiment, places["iid"])
    claims = stc_tables.claims(experiment)
    assert all({better, worse} <= names.keys() for better, worse, _ in claims)
    assert {where for *_, where in claims} <= places.keys()
    results: Any = {
        place: {
            name: types.SimpleNamespace(
                evaluations={"test_accuracy": np.full((5, 1), k) + np.eye(5)[:, :1]},
                final=lambda metric, k=k: (k, 0.0),
            )
            for k, name in enumerate(["FedAvg 10", "STC 1/25", "signSGD"])
        }
        for place in places
    }
    console = Console(record=True, width=120)
    stc_tables.show_environments(experiment, results, console)
    lines = [line for line in console.export_text().splitlines() if ">" in line]
    assert len(lines) == len(claims)
    for line in lines:
        assert ("not held" in line) == ("> signSGD" in line)
        assert "held" in line


def test_environments_split_as_they_say():
    experiment = stc_tables.PRESETS["smoke"]
    pooled, _ = stc_tables.load(experiment)
    places = stc_tables.environments(experiment)
    for name, classes in (("1 class", 1), ("2 classes", 2)):
        train = stc_tables.split(places[name], pooled, 20).train
        for a, b in zip(train.offsets[:-1], train.offsets[1:], strict=True):
            assert len(np.unique(train.examples["y"][a:b])) == classes
    sizes = stc_tables.split(places["unbalanced"], pooled, 20).train.sizes
    assert sizes.max() > 2 * sizes.min()
    with pytest.raises(ValueError, match="path must be given for usps"):
        stc_tables.Experiment(data="usps")


def test_ratios_by_formula_and_measured(tmp_path, capsys, monkeypatch):
    one = {"SBC(2)": sbc_ratios.TABLE["SBC(2)"]}
    monkeypatch.setattr(sbc_ratios, "TABLE", one)
    experiment = dataclasses.replace(
        sbc_ratios.PRESETS["smoke"], measured_iterations=20, iterations=10,
        delays=(10,), rates=(0.01,), out=tmp_path,
    )  # fmt: skip
    sbc_ratios.main(experiment)
    out = capsys.readouterr().out
    assert "3165 (3166)" in out
    assert "3165.8" in out
    assert "3946.8" in out
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")
