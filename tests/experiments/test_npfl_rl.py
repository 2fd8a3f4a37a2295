"""The figures of chapter 6: what is compared, how claims are counted, what is shown."""

import csv
import dataclasses
from typing import Any

import numpy as np
import pytest

from fedjax_core import Result
from fedjax_core.experiments import npfl_rl
from fedjax_core.experiments.npfl_rl import BATCH_SAC, BEST, DPG, NFL, SAC, fixed
from fedjax_core.networks import policies

DEFAULT = npfl_rl.PRESETS["default"]
SEEDS = 6


def result(error, tau) -> Result:
    """Six runs that come near `error`, with weights like `tau`, ``[T]``."""
    up = np.linspace(1, 1.2, SEEDS)[:, None]
    falls = error + (1 - error) * 0.8 ** np.arange(50)
    measured = ("deviation", "printed_deviation", "test_mse")
    seen: dict[str, Any] = dict.fromkeys(measured, up * falls)
    names = ("few", "some", "many", "fewest", "median", "most")
    weights = {f"tau_{name}": np.tile(tau, (SEEDS, 1)) for name in names}
    weights["tau"] = weights["tau_few"]
    at = np.arange(5, 251, 5)
    nodes = {"deviation_of_node": np.c_[up * error, up * error, up]}
    return Result(tuple(range(SEEDS)), 250, weights, at, seen, nodes, None, [])


@pytest.fixture(scope="module")
def found():
    rises, falls = np.linspace(0, 1, 100), np.linspace(1, 0, 150)
    smooth, rough = (
        np.r_[rises, falls],
        np.r_[rises, falls] + 0.1 * (np.arange(250) % 2),
    )
    errors = {NFL: 0.5, fixed(0): 0.3, BEST: 0.1, DPG: 0.2, SAC: 0.05, BATCH_SAC: 0.04}
    return {
        name: result(errors.get(name, 0.15), rough if "SAC" in name else smooth)
        for name in npfl_rl.configs(DEFAULT)
    }


def test_every_method_of_the_figures_has_its_numbers():
    configs = npfl_rl.configs(DEFAULT)
    assert npfl_rl.REFERENCE.keys() < configs.keys()
    assert configs[NFL].num_clusters == 1
    assert configs[BEST].tau == 0.05
    assert configs[DPG].policy == policies.PolicyGradient(0.001)
    assert configs[BATCH_SAC].policy == policies.Batch(policies.ActorCritic(0.05, 0.04))
    assert {config.rho for config in configs.values()} == {3.0}


def test_claims_are_tested_and_the_reference_stands_beside(found):
    e = dataclasses.replace(DEFAULT, num_seeds=SEEDS)
    near = np.tile([True, True, False], (SEEDS, 1))
    said = npfl_rl.claims(e, found, near)
    gain = {claim.text: claim.gain for claim in said}
    wanted = 0.2 * np.linspace(1, 1.2, SEEDS)
    company = gain[f"{fixed(0)} < {NFL}, end, nodes with company"]
    np.testing.assert_allclose(company, wanted)
    verdict = {row[0]: row[3] for row in npfl_rl.orderings(e, said).rows}
    assert verdict[f"{fixed(0)} < {NFL}, end"] == "held"
    assert verdict[f"{DPG} < {BEST}, end"] == "not held"
    assert verdict[f"{SAC} < {DPG}, end"] == "held"
    assert verdict[f"{SAC} < {BEST}, start"] == "held"
    assert verdict["DPG has smoother tau than SAC"] == "held"
    # Both are alike in round 0 and at the end of the first tenth, 24.
    assert verdict["SAC has faster tau than DPG at first"] == "undecided"
    assert (
        verdict[f"{DPG}: tau of some rows ends below half of its first"] == "undecided"
    )
    assert verdict[f"{DPG}: tau of few rows rises at first"] == "held"
    assert verdict[f"{DPG}: tau of few rows falls afterwards"] == "held"
    assert verdict[f"{DPG}: tau of many rows falls at first"] == "not held"
    both = npfl_rl.overview({"a": said, "b": said}).rows
    assert {row[0]: row[2] for row in both} == verdict
    assert both[0][4] == "a, b"
    shown = {row[0]: row for row in npfl_rl.levels(e, found).rows}
    assert shown[BEST][3] == "-15.8"
    assert shown[BEST][2].startswith(f"{10 * np.log10(0.11):.2f}")
    other = dataclasses.replace(e, rounds=100)
    assert not any(row[3] for row in npfl_rl.levels(other, found).rows)


def test_roughness_is_that_of_a_curve_and_not_its_slope():
    line = np.linspace(0, 5, 20)[None]
    np.testing.assert_allclose(npfl_rl.roughness(line), 0, atol=1e-12)
    assert npfl_rl.roughness(line + (np.arange(20) % 2)) == pytest.approx(2, rel=0.01)


def test_it_runs_draws_and_writes(tmp_path, capsys):
    e = dataclasses.replace(
        npfl_rl.PRESETS["smoke"], taus=(0, 0.05), rounds=12, num_seeds=2, out=tmp_path
    )
    npfl_rl.main(e)
    assert "tau of few rows" in capsys.readouterr().out
    page = (tmp_path / "npfl_rl.md").read_text("utf-8")
    assert "connected parts" in page
    assert (tmp_path / "npfl_rl_thesis.png").stat().st_size > 10_000
    with (tmp_path / "npfl_rl.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 2
    assert all(0 < float(row["deviation"]) < 1 for row in rows)


def test_impossible_settings_are_refused():
    for wrong, match in (
        ({"taus": (0, 2.0)}, r"taus must be in \[0, 1\]"),
        ({"policies": ("greedy",)}, "policies must have DPG and SAC"),
        ({"taus": (0.1,)}, "taus must have 0 and 0.05"),
        ({"settings": ("other",)}, "settings must be one of"),
        ({"rounds": 3}, "rounds must be in"),
    ):
        with pytest.raises(ValueError, match=match):
            dataclasses.replace(DEFAULT, **wrong)
