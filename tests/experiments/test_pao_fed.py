"""Figures of asynchronous online learning: what is run, tuned, said and drawn."""

import csv
import dataclasses
import itertools

import numpy as np
import pytest

from fedjax_core.algorithms.networks import pao_fed as method
from fedjax_core.experiments import pao_fed

SMOKE = pao_fed.PRESETS["smoke"]
TINY = dataclasses.replace(SMOKE, num_clients=16, iterations=100, num_features=50)


@pytest.fixture
def only(monkeypatch):
    """Leaves two curves, one of them tuned, and the claim about them."""
    whole = dataclasses.replace(TINY, figures=("4.3",))
    u1, *_, fed_sgd = pao_fed.curves(whole)["4.3a"]
    assert (u1.name, fed_sgd.name, fed_sgd.as_fast_as) == ("U1", "Online-FedSGD", "U1")
    claim = pao_fed.Claim("4.3a", ("base", "U1"), ("base", "Online-FedSGD"))
    monkeypatch.setattr(pao_fed, "curves", lambda _: {"4.3a": [u1, fed_sgd]})
    monkeypatch.setattr(pao_fed, "claims", lambda _: [claim])
    return whole


def test_it_says_what_held_and_draws(only, tmp_path, capsys):
    e = dataclasses.replace(only, out=tmp_path)
    pao_fed.main(e)
    shown = " ".join(capsys.readouterr().out.split())  # as wide as the terminal is
    for words in ("U1 > Online-FedSGD", "2 runs decide no ordering", "undecided"):
        assert words in shown
    assert (tmp_path / "pao_fed.png").stat().st_size > 10_000
    assert "largest eigenvalue" in (tmp_path / "summary.md").read_text("utf-8")
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        u1, fed_sgd = csv.DictReader(file)
    # m = 4 of 50 entries both ways, and all of them.
    assert (u1["bits_of_a_client"], fed_sgd["bits_of_a_client"]) == ("256.0", "3200.0")
    assert float(u1["saving"]) == pytest.approx(0.92)
    assert float(fed_sgd["step_size"]) in np.round(pao_fed.STEP_SIZES, 5)
    again = pao_fed.find(e)  # from the run directories
    assert f"{again['base', 'U1'].level()[0]:.5g}" == u1["values_db"].split()[0]


def test_tuning_finds_the_method_itself():
    world = pao_fed.world_of(TINY, "base")
    step = float(pao_fed.STEP_SIZES[20])
    config = dataclasses.replace(method.METHODS["PAO-Fed-U1"], step_size=step)
    like = pao_fed.Curve("base", "U1", config)
    assert pao_fed.tune(TINY, world, like, like) == step


def test_every_claim_and_pair_is_of_curves_that_run():
    whole = pao_fed.PRESETS["paper"]
    groups = pao_fed.curves(whole)
    run = {(curve.setting, curve.name) for group in groups.values() for curve in group}
    for claim in pao_fed.claims(whole):
        assert {claim.better, claim.worse} <= run, claim
        assert claim.figure in groups
    for _, one, other in pao_fed._ALIKE:
        assert {one, other} <= run
    for setting, names in pao_fed.REFERENCE.items():
        assert {(setting, name) for name in names} <= run
    for curve in itertools.chain(*groups.values()):
        assert not curve.as_fast_as or (curve.setting, curve.as_fast_as) in run
    assert set(pao_fed.settings(whole)) == {setting for setting, _ in run}


def test_loads_are_the_printed_ones():
    # 128 of 6,400 bits in each direction: 98 % saved; signs save 31/64.
    found = {}
    for name in ("PAO-Fed-U1", "Online-FedSGD", "SignSGD"):
        m = method.METHODS[name].num_shared or 200
        up = 200 if method.METHODS[name].signs else 32 * m
        found[name] = up + 32 * m
    assert found["PAO-Fed-U1"] == 256
    assert 1 - found["PAO-Fed-U1"] / found["Online-FedSGD"] == 0.98
    assert 1 - found["SignSGD"] / found["Online-FedSGD"] == 31 / 64


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"iterations": 99}, r"iterations must be in \[100"),
        ({"num_features": 20}, r"num_features must be in \[50"),
        ({"figures": ("4.7",)}, "figures must be one of"),
        ({"num_runs": 0}, "num_runs must be >= 1"),
    ],
)
def test_impossible_settings_are_refused(setting, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(SMOKE, **setting)
