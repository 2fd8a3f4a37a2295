"""What the tables of compressed distillation compare, and how they count."""

import dataclasses

import numpy as np
import pytest

from fedjax_core import Result, study
from fedjax_core.experiments import cfd_tables

SMOKE = cfd_tables.PRESETS["smoke"]


def result(accuracy, up, down, clients=4) -> Result:
    """A run of two seeds: its accuracies, and bytes of a participant in each round."""
    train = {
        "uplink_bytes": np.array([up, up], np.float32) * clients,
        "downlink_bytes": np.array([down, down], np.float32) * clients,
        "valid_clients": np.full((2, len(up)), clients),
    }
    seen = {"test_accuracy": np.asarray(accuracy)}
    rounds = np.arange(1, len(up) + 1)
    return Result((0, 1), len(up), train, rounds, seen, {}, None, [])


def runs(this, **results) -> list[study.Row]:
    setting = f"concentration {SMOKE.alphas[0]:g}"
    return [
        study.Row(name, setting, None, "test_accuracy", results.get(name), "", ())
        for name in this.methods
    ]


def test_every_table_compares_what_it_claims():
    whole = dataclasses.replace(SMOKE, parts=cfd_tables.PARTS, fewer=(50, 100))
    studies = cfd_tables.make_studies(whole)
    assert list(studies) == ["table 5.1", "table 5.2", "figure 5.1", "figure 5.2"]
    assert {"CFD-32-1", "CFD-32-32"} <= studies["table 5.2"].methods.keys()
    assert cfd_tables.MEGABYTES.keys() <= studies["table 5.2"].methods.keys()
    for printed in cfd_tables.PRINTED.values():
        assert printed.keys() == studies["table 5.1"].methods.keys()
    assert all(this.claims for n, this in studies.items() if n != "table 5.2")
    (setting,) = studies["table 5.1"].settings.values()
    assert setting.data.public["x"].shape == (SMOKE.num_public, 64)
    assert setting.data.train.num_examples == SMOKE.num_train


def test_megabytes_are_a_participants_up_to_the_target():
    this = cfd_tables.make_studies(SMOKE)["table 5.2"]
    n, name = SMOKE.num_public, "CFD-1-32 delta"
    late = result([[0.0, 0.1, 0.4], [0.0, 0.4, 0.4]], [2e6, 1e6, 1e6], [3e6] * 3)
    never = result([[0.0] * 3] * 2, [1e6] * 3, [1e6] * 3)
    bits = result([[1.0] * 3] * 2, n / 8 * 2 * np.arange(1.0, 4) ** -0.5, [0] * 3)
    found = runs(this, **{"FD": late, "FedAvg": never, name: bits})
    table, claims = cfd_tables.to_target(SMOKE, found)
    rows = {row[0]: row[1:] for row in table.rows}
    # The target is reached after three rounds with one seed and two with the other.
    assert rows["FD"][:2] == ("3.5 ± 0.7071", "7.5 ± 2.121")
    assert rows["FD"][3:] == ("2 of 2", "48.0 / 48.0", "0.4000 ± 0.0000")
    assert rows["FedAvg"][:4] == ("n.a.", "n.a.", "n.a.", "0 of 2")
    fit = cfd_tables.entropies(SMOKE, found)
    assert fit.rows == [(f"{name}, concentration 1", "2.000", "1.155", "2.00 t^-0.500")]
    assert {row[3] for row in claims.rows} == {"undecided"}, "of two seeds"
    assert claims.rows[0] == ("FD < FedAvg, uplink", "n.a.", "x 21.4", "undecided")


def test_impossible_tables_are_refused():
    with pytest.raises(ValueError, match="targets must be one for each of 2 alphas"):
        dataclasses.replace(SMOKE, alphas=(1.0, 0.1))
    with pytest.raises(
        ValueError, match=r"parts must be one of 'table 5.1', .* got 'a"
    ):
        dataclasses.replace(SMOKE, parts=("all",))
