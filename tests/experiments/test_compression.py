"""Experiments on compression: what they claim, print and leave behind."""

import csv
import dataclasses
import json

import jax
import numpy as np
import pytest

from fedjax_core import models, read_result
from fedjax_core.compress import theory
from fedjax_core.experiments import report, sbc_ratios, stc_tables


def test_accuracy_against_bits(tmp_path, capsys, monkeypatch):
    experiment = dataclasses.replace(
        stc_tables.PRESETS["smoke"], iterations=8, out=tmp_path
    )
    kept, all_methods = ("DSGD", "STC 1/25"), stc_tables.methods
    monkeypatch.setattr(
        stc_tables, "methods", lambda *a: {k: all_methods(*a)[k] for k in kept}
    )
    stc_tables.main(experiment)
    out = capsys.readouterr().out
    assert "STC 1/25 < DSGD" in out
    assert "x 310" in out  # printed
    assert (tmp_path / "bits.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text("utf-8")
    for found in ("118.4 / 1184.3", "Claims of table 4.2", "best round", "<img"):
        assert found in page
    assert "10 times the uploads of STC" not in out, "of 4 in 20 clients"
    assert "5 times the uploads of STC" in (tmp_path / "summary.md").read_text("utf-8")
    with open(tmp_path / "more.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {"table", "row", "column", "value"} == lines[0].keys()
    assert {line["row"] for line in lines} >= set(kept)
    dense = read_result(tmp_path / "iid" / "DSGD")
    sparse = read_result(tmp_path / "iid" / "STC 1_25")
    expected = theory.compression_ratio("stc", 1 / 25)
    ratio = dense.total("uplink_bytes") / sparse.total("uplink_bytes")
    assert ratio == pytest.approx(expected, rel=0.03)
    # Of a dense message in every round until the goal.
    accuracy = dense.evaluations["test_accuracy"]
    goal = accuracy.max(1).min()
    rounds = dense.evaluated[(accuracy >= goal).argmax(1)]
    assert rounds.max() > 1
    model = 64 * 100 + 100 * 100 + 100 * 10 + 210
    mine = report.spent(dense, "uplink", "test_accuracy", goal)
    np.testing.assert_allclose(mine, rounds * 4 * model / 1e6)


def test_claims_can_be_tested():
    experiment = stc_tables.Experiment()
    places = stc_tables.environments(experiment)
    names = stc_tables.methods(experiment, places["iid"])
    claims, fewer = stc_tables.claims(experiment), stc_tables.fewer(experiment)
    assert all({*claim[:2]} <= names.keys() for claim in [*claims, *fewer])
    assert {where for *_, where in claims} <= places.keys()
    assert all(column.keys() == names.keys() for column in stc_tables.PRINTED.values())
    grid = stc_tables.methods(experiment, places["five clients"])
    assert len(grid) == len(names) + 6
    config = grid["STC 1/25 up, 1/400 down"][1]
    assert (config.sparsity_up, config.sparsity_down) == (25, 400)


def test_rows_of_images_have_the_published_model():
    model = models.classifier(stc_tables.RowLSTM(), (28, 28, 1))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(shapes))
    # PyTorch, which has 8 x 128 biases more, has 214,282.
    assert size == 214_282 - 8 * 128


def test_environments_split_as_they_say():
    experiment = stc_tables.PRESETS["smoke"]
    pooled, _ = stc_tables.load(experiment)
    places = stc_tables.environments(experiment)
    for name, classes in (("1 class", 1), ("2 classes", 2)):
        train = stc_tables.split(places[name], pooled, 20).train
        for a, b in zip(train.offsets[:-1], train.offsets[1:], strict=True):
            assert len(np.unique(train.examples["y"][a:b])) == classes
    whole = stc_tables.split(places["1 class, some shared"], pooled, 20).train
    assert len(np.unique(whole.client(0)["y"])) == 10
    sizes = stc_tables.split(places["unbalanced"], pooled, 20).train.sizes
    assert sizes.max() > 2 * sizes.min()
    with pytest.raises(ValueError, match="path must be given for usps"):
        stc_tables.Experiment(data="usps")
    with pytest.raises(ValueError, match="environments must be False for shakespeare"):
        stc_tables.Experiment(data="shakespeare")


def test_roles_are_clients_as_they_are(tmp_path):
    path = tmp_path / "roles.jsonl"
    said = {f"ROLE {i}": [f"to be or not to be, {i} times"] * 3 for i in range(4)}
    lines = [{"client_id": f"play/{k}", "snippets": v} for k, v in said.items()]
    path.write_text("\n".join(map(json.dumps, lines)))
    experiment = stc_tables.Experiment(
        data="shakespeare", path=path, num_clients=3, cohort_size=2, environments=False
    )
    roles, model = stc_tables.load(experiment)
    place = stc_tables.environments(experiment)["iid"]
    assert stc_tables.split(place, roles, 3) is roles
    assert len(roles.train.sizes) == 3  # pyright: ignore
    assert "x" in model.ids


def test_ratios_by_formula_and_measured(tmp_path, monkeypatch):
    one = {"SBC(2)": sbc_ratios.TABLE["SBC(2)"]}
    monkeypatch.setattr(sbc_ratios, "TABLE", one)
    experiment = dataclasses.replace(
        sbc_ratios.PRESETS["smoke"], measured_iterations=20, iterations=10,
        delays=(10,), rates=(0.01,), out=tmp_path,
    )  # fmt: skip
    sbc_ratios.main(experiment)
    page = (tmp_path / "report.html").read_text("utf-8")
    for found in ("3165 (3166)", "3165.8", "3946.8", "held", "Figure 3.2", "undecided"):
        assert found in page
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")


def test_errors_that_depend_on_the_product_alone_are_even_along_diagonals():
    experiment = sbc_ratios.Experiment(delays=(1, 10), rates=(1.0, 0.1))
    saved = np.array([[0.0, 1.0], [1.0, 2.0]])[..., None]
    errors = 0.1 * saved + 0.01 * np.arange(5)  # of five seeds
    (row,) = sbc_ratios.claims(experiment, errors).rows
    assert row[1:] == ("0.0000 ± 0.0000", "0.0816 ± 0.0000", "held")
    (row,) = sbc_ratios.claims(experiment, errors[:, ::-1]).rows
    assert row[1] == "0.1414 ± 0.0000"
