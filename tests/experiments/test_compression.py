"""Experiments on compression: what they claim, print and leave behind."""

import dataclasses

import numpy as np
import pytest

from fedjax_core.compress import theory
from fedjax_core.experiments import sbc_ratios, stc_tables


def test_accuracy_against_bits(tmp_path, capsys):
    experiment = dataclasses.replace(
        stc_tables.PRESETS["smoke"], iterations=8, delays=(4,), out=tmp_path
    )
    stc_tables.main(experiment)
    out = capsys.readouterr().out
    assert "FedAvg 4" in out
    assert "STC 1/25" in out
    assert (tmp_path / "bits.png").read_bytes().startswith(b"\x89PNG")
    place = stc_tables.environments(experiment)["iid"]
    results = stc_tables.run(experiment, "iid", place)  # read again
    assert all(result.timed_rounds == 0 for result in results.values())
    assert results["DSGD"].total("uplink_bytes") == pytest.approx(
        4 * results["FedAvg 4"].total("uplink_bytes")
    )
    sent = results["STC 1/25"].total("uplink_bytes")
    ratio = results["DSGD"].total("uplink_bytes") / sent
    assert ratio == pytest.approx(theory.compression_ratio("stc", 1 / 25), rel=0.03)
    # What is claimed can be tested, with FedAvg of the longest delay.
    names = results.keys()
    for better, worse, where in stc_tables.claims(experiment):
        assert {better, worse} <= names
        assert where in stc_tables.environments(experiment)


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


def test_ratios_by_formula_and_measured(tmp_path, capsys):
    experiment = dataclasses.replace(
        sbc_ratios.PRESETS["smoke"], measured_iterations=2, rates=(0.1,), out=tmp_path,
        iterations=10,
    )  # fmt: skip
    sbc_ratios.main(experiment)
    out = capsys.readouterr().out
    for printed in ("719", "2371.3", "3165.8", "31658.4"):
        assert printed in out
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")
