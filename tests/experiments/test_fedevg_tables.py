"""The tables of synthetic data: what they claim, and one of them to the end."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from fedjax_core import Result
from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import partition
from fedjax_core.experiments import fedevg_tables
from fedjax_core.models import as_classifier
from fedjax_core.study_report import orderings, tables

SMOKE = fedevg_tables.PRESETS["smoke"]


SETTING = fedevg_tables.name_of("mnist", 10, 0.01)


def cell(name, accuracy, frechet, seeds=5):
    """A cell that is the same for all seeds."""
    seen = {"test_accuracy": np.full((seeds, 1), accuracy)}
    bytes_ = np.full((seeds, 2), 1e6)
    train = {"uplink_bytes": bytes_, "downlink_bytes": bytes_}
    result = Result(tuple(range(seeds)), 2, train, np.array([2]), seen, {}, None, [])
    made, none = np.zeros((seeds, 20, 8, 8, 1)), np.full(seeds, 0.5)
    distance = np.full(seeds, frechet)
    return fedevg_tables.Cell(name, SETTING, result, made, distance, none)


HERE = [
    cell("FedCGAN", 0.3, 9.0), cell("FedCVAE", 0.5, 5.0), cell("FedEvg", 0.4, 7.0),
]  # fmt: skip
FAILED = fedevg_tables.Cell("FedCVAE", SETTING, None, error="no memory")


def verdicts(found):
    return {o[:2]: o.verdict for o in orderings(found)}


def test_claims_are_the_orders_that_the_chapter_prints(tmp_path):
    e = dataclasses.replace(SMOKE, num_seeds=5, out=tmp_path)
    # Here alone another method is printed as more accurate than FedEvg.
    accuracy = fedevg_tables.outcome(e, HERE, "accuracy")
    assert verdicts(accuracy) == {
        ("FedCVAE", "FedEvg"): "held",
        ("FedCVAE", "FedCGAN"): "held",
        ("FedEvg", "FedCGAN"): "held",
    }
    assert accuracy.study.printed["FedEvg", SETTING] == pytest.approx((0.6295, 0.0543))
    frechet = fedevg_tables.outcome(e, HERE, "frechet")
    assert verdicts(frechet) == {
        ("FedEvg", "FedCVAE"): "not held",
        ("FedEvg", "FedCGAN"): "held",
        ("FedCVAE", "FedCGAN"): "held",
    }
    assert tables(frechet)[0].rows[2][:3] == (
        "FedEvg", "7.0000 ± 0.0000", "171.5300 ± 0.2400",
    )  # fmt: skip


def test_that_fedevg_is_best_is_a_claim_of_its_own(tmp_path):
    e = dataclasses.replace(SMOKE, num_seeds=5, out=tmp_path)

    def best(cells, which):
        return list(fedevg_tables.best(fedevg_tables.outcome(e, cells, which)).rows)

    for cells, which, printed, ends in (
        (HERE, "accuracy", "FedCVAE", ("-0.1000", "not held")),
        (HERE, "frechet", "FedEvg", ("-2.0000", "not held")),
        (HERE[::2], "frechet", "FedEvg", ("+2.0000", "held")),
    ):
        what = f"FedEvg is best by {which}, printed: {printed}"
        assert best(cells, which) == [(what, SETTING, *ends)]


def test_a_cell_that_failed_is_a_row_that_says_why(tmp_path, monkeypatch):
    e = dataclasses.replace(SMOKE, num_seeds=5, out=tmp_path)
    found = fedevg_tables.outcome(e, [HERE[0], FAILED, HERE[2]], "accuracy")
    shown = {table.title: table.rows for table in tables(found)}
    assert shown[SETTING][1][:2] == ("FedCVAE", "failed")
    assert shown["Failed"] == [("FedCVAE", SETTING, "no memory")]
    assert fedevg_tables.best(found).rows[0][2:] == ("", "undecided")
    assert fedevg_tables.membership([FAILED]).rows[0][1] == "failed"

    def refuse(*args, **options):
        raise MemoryError("no memory")

    monkeypatch.setattr(fedevg_tables, "simulate", refuse)
    train = {"x": np.zeros((4, 8, 8, 1), np.float32), "y": np.zeros(4, np.int32)}
    pool = Dataset(train, train)
    data = partition.dirichlet_by_client(pool, 2, 1.0)
    cells = fedevg_tables.run(e, SETTING, data, pool, lambda x: x, 10)
    assert [(c.method, c.error) for c in cells] == [
        (name, "no memory") for name in fedevg_tables.NAMES
    ]


def test_pictures_have_a_row_of_images_for_each_class():
    x = np.arange(20, dtype=float).repeat(64).reshape(1, 20, 8, 8, 1) / 20
    figure = fedevg_tables.draw([HERE[0]._replace(made=x)] * 2, 10)
    image = figure.axes[1].images[0].get_array()
    assert image.shape == (80, 16)
    np.testing.assert_allclose(image[::8, ::8], np.arange(20).reshape(10, 2) / 20)


def test_messages_have_the_printed_sizes():
    paper, sizes = fedevg_tables.PRESETS["paper"], []
    for image, classes in (
        ((32, 32, 1), 10), ((32, 32, 3), 10), ((64, 64, 3), 7), ((64, 64, 1), 11),
    ):  # fmt: skip
        local = as_classifier(fedevg_tables.network(paper, classes), image)
        method = fedevg_tables.methods(paper, image, classes, local)["FedEvg"]
        samples = jax.eval_shape(method.init, jax.random.key(0))
        sizes.append(samples.size)
    assert sizes == [102_400, 307_200, 860_160, 450_560]


def test_presets_say_their_schedule():
    text = {k: fedevg_tables.described(e) for k, e in fedevg_tables.PRESETS.items()}
    assert "500 rounds of an epoch" in text["paper"]
    assert "near its first value to the end" in text["paper"]
    assert "half a cosine" in text["smoke"]


def test_best_is_printed_in_all_cells_but_one():
    best = {"accuracy": 0, "frechet": 0}
    for data in ("mnist", "cifar10", "derma", "organ"):
        for clients, alpha in fedevg_tables.CELLS:
            setting = fedevg_tables.name_of(data, clients, alpha)
            for which, pick in (("accuracy", max), ("frechet", min)):
                known = fedevg_tables.printed_of(setting, which)
                best[which] += pick(known, key=lambda k: known[k]) == "FedEvg"
    assert best == {"accuracy": 15, "frechet": 15}
    last = fedevg_tables.name_of("organ", 100, 1.0)
    assert fedevg_tables.printed_of(last, "frechet")["FedCVAE"] == (438.63, 19.01)
    assert fedevg_tables.printed_of("digits, 10 clients, alpha 1", "accuracy") == {}


def test_a_run_ends_in_a_page_of_tables_and_pictures(tmp_path, capsys, monkeypatch):
    # Convolutions take seconds to compile, here and in the other methods.
    linear = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(10)])
    monkeypatch.setattr(fedevg_tables, "network", lambda *args: linear)
    few = dataclasses.replace(
        SMOKE,
        num_train=60,
        num_test=40,
        rounds=1,
        local_steps=1,
        methods=("FedEvg",),
        per_class=2,
        num_clients=(2,),
        width=2,
        latent=2,
        fit_epochs=1,
        feature_epochs=1,
        num_seeds=1,
        out=tmp_path,
    )
    fedevg_tables.main(few)
    page = (tmp_path / "fedevg_tables.md").read_text()
    setting = "digits, 2 clients, alpha 1"
    assert f"![{setting}](<figures/{setting}.png>)" in page
    assert (tmp_path / "figures" / f"{setting}.png").exists()
    for which in ("accuracy", "frechet"):
        table = (tmp_path / which / "table.csv").read_text()
        assert table.count(setting) == 1
    assert "Membership attack" in capsys.readouterr().out


def test_usps_and_medical_images_are_read_if_asked_for(tmp_path):
    (tmp_path / "usps").mkdir()
    x, y = np.full((4, 16, 16), 255, np.uint8), np.arange(4)
    np.savez(tmp_path / "usps" / "usps.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    e = dataclasses.replace(SMOKE, path=tmp_path, size=12)
    pool, classes = fedevg_tables.load(e, "usps")
    assert (pool.train["x"].shape, classes) == ((4, 12, 12, 1), 10)
    np.testing.assert_allclose(pool.train["x"], 1, rtol=1e-6)
    for size, file in ((12, "organcmnist.npz"), (64, "organcmnist_64.npz")):
        with pytest.raises(FileNotFoundError, match=f"records/10519652/files/{file}"):
            fedevg_tables.load(dataclasses.replace(e, size=size), "organ")


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match=r"data must be one of 'mnist', .* got 'svhn'"):
        dataclasses.replace(SMOKE, data=("svhn",))
    with pytest.raises(ValueError, match="num_clients must not be empty"):
        dataclasses.replace(SMOKE, num_clients=())
