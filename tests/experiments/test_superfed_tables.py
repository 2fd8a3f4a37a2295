"""What SuPerFed's tables compare, choose and print."""

import dataclasses

import numpy as np
import pytest

from fedjax_core import Result, study
from fedjax_core.experiments import superfed_tables as tables

SMOKE = tables.PRESETS["smoke"]


def test_printed_numbers_have_their_place():
    first = tables.PRINTED["table 2.3"]["mnist, 50 clients"]
    assert tuple(first["SuPerFed-LM"]) == (99.48, 0.54)
    last = tables.PRINTED["table 2.3"]["cifar10, 500 clients"]
    assert tuple(last["SCAFFOLD"]) == (40.27, 26.90)
    assert tuple(tables.PRINTED["table 2.4"]["alpha 100"]["APFL"]) == (55.43, 5.45)
    assert tuple(tables.PRINTED["table 2.5"]["writers"]["pFedMe"]) == (5.98, 4.55)
    noisy = tables.PRINTED["table 2.6"]
    assert tuple(noisy["mnist, pair 0.4"]["FedAvg"]) == (0.38, 0.67, 41.01)
    assert tuple(noisy["cifar10, symmetric 0.6"]["FedRep"]) == (0.71, 0.85, 22.94)


def test_every_part_compares_its_methods():
    whole = dataclasses.replace(
        SMOKE, parts=tables.PARTS, methods=tables.NAMES, alphas=(1.0, 100.0),
        noises=(("pair", 0.4),), mus=(0.0, 1.0), hidden=(12, 12),
    )  # fmt: skip
    clients = tables.populations(whole)
    studies = tables.make_studies(whole, clients)
    for name, this in studies.items():
        (setting,) = this.settings.values()
        assert setting.data.validation is not None
        assert this.eval_splits == ("validation", "test")
        if not name.startswith(("table 2.7", "figure")):
            assert tuple(this.methods) == tables.NAMES, name
    (starts,) = (s for n, s in studies.items() if n.startswith("table 2.7"))
    begins = [m.config.warm_up for m in starts.methods.values()]
    assert begins == [0, 1, 2, 3, 4] * 2
    # Labels are wrong where clients train and choose, and right in the test.
    noisy = clients["table 2.6"]["digits, pair 0.4"].data.test
    clean = tables._dirichlet(whole, "digits", 10.0).test
    assert noisy is not None
    assert clean is not None
    np.testing.assert_array_equal(noisy.examples["y"], clean.examples["y"])


def outcome(values) -> study.Outcome:
    """Cells of two seeds and two clients: method -> lambda -> accuracy by client."""
    rows = []
    for name, of_lambda in values.items():
        evaluations, by_client = {}, {}
        for split, shift in (("validation", 0), ("test", 1)):
            for lam, accuracy in of_lambda.items():
                a = np.array([accuracy, accuracy], float)
                if split == "validation":
                    a = a[:, ::-1] * 0 + a.mean() + lam * shift
                key = f"{split}_personal_{lam:g}_"
                for metric, v in (("accuracy", a), ("loss", 1 - a), ("top5", a)):
                    evaluations[f"{key}{metric}_client_mean"] = v.mean(1)[:, None]
                    by_client[key + metric] = v
        result = Result((0, 1), 5, {}, np.array([5]), evaluations, by_client, None, [])
        metric = "test_personal_0.5_accuracy"
        rows.append(study.Row(name, "here", None, metric, result, "", ()))
    return study.Outcome(None, None, rows, {})  # pyright: ignore


def test_the_shared_lambda_and_the_spreads_are_those_of_the_clients():
    grid = dict.fromkeys(tables.LAMBDAS, (0.5, 0.5))
    grid |= {0.3: (0.9, 0.7), 0.7: (0.6, 0.8)}
    found = tables.cells(outcome({"SuPerFed-MM": grid}))
    chosen, hindsight = found
    assert hindsight.method == "SuPerFed-MM, best on test"
    for cell in (chosen, hindsight):
        np.testing.assert_array_equal(cell.lambdas, [0.3, 0.3])
        np.testing.assert_allclose(cell.mean["accuracy"], [0.8, 0.8])
        np.testing.assert_allclose(cell.std["accuracy"], 0.1)
    table = tables.accuracies("table 2.3", "mnist, 50 clients", found)
    assert table.rows[0][:2] == ("SuPerFed-MM", "80.00 ± 0.00")
    assert table.rows[0][2] == "10.00"
    assert table.rows[0][4:] == ("99.45 (0.46)", "0.3 0.3")
    lines = tables.records({"table 2.3": {"here": found}})
    assert [x["metric"] for x in lines[:3]] == ["accuracy", "top5", "loss"]


def cell(method, accuracy, ece=0.1):
    mean = {"accuracy": np.full(5, accuracy) + np.arange(5) * 1e-4}
    mean |= {"ece": np.full(5, ece), "top5": mean["accuracy"]}
    return tables.Cell(method, "here", mean, {}, np.zeros(0))


def test_claims_are_held_or_not_by_the_seeds():
    some = [cell("FedAvg", 0.5, 0.3), cell("SuPerFed-MM", 0.6), cell("APFL", 0.7)]
    said = tables.claims({"table 2.6": {"here": some}})
    verdicts = {row[0]: row[3] for row in said.rows}
    assert verdicts["SuPerFed-MM > FedAvg"] == "held"
    assert verdicts["SuPerFed-MM > APFL"] == "not held"
    assert verdicts["ECE of SuPerFed-MM < FedAvg"] == "held"
    grid = [
        cell(f"MM, mu {mu:g}, nu {nu:g}", 0.5 + 0.1 * (nu == 1) - 0.2 * (mu == 1))
        for mu in (0.0, 0.01, 1.0)
        for nu in (0.0, 1.0, 5.0)
    ]
    said = tables.claims({"figure 2.3": {"here": grid}})
    assert [row[0] for row in said.rows] == ["MM: nu 1 > 0", "MM: mu 0.01 > 1"]
    assert {row[3] for row in said.rows} == {"held"}
    falls = {
        f"alpha {a}": [cell("FedPer", x), cell("SuPerFed-MM", 0.9)]
        for a, x in ((1, 0.8), (100, 0.6))
    }
    said = tables.claims({"table 2.4": falls})
    assert said.rows[-1][0] == "FedPer falls as clients become alike"
    assert said.rows[-1][3] == "held"


def test_impossible_tables_are_refused():
    with pytest.raises(ValueError, match="parts must be one of"):
        dataclasses.replace(SMOKE, parts=("table 9",))
    with pytest.raises(ValueError, match="methods must be one of"):
        dataclasses.replace(SMOKE, methods=("FedSAM",))
    with pytest.raises(ValueError, match=r"cohort_size must be in \[1, 10\]"):
        dataclasses.replace(SMOKE, cohort_size=11)
