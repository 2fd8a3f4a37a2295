"""What SuPerFed's tables compare, choose and print."""

import dataclasses
import gzip
import json

import jax
import numpy as np
import pytest

from fedjax_core import Result, models, study, study_report
from fedjax_core.algorithms import superfed
from fedjax_core.experiments import superfed_tables as tables
from fedjax_core.experiments.superfed_printed import BEST, NAMES, PRINTED

SMOKE = tables.PRESETS["smoke"]


def test_printed_numbers_have_their_place():
    for part, setting, method, expected in (
        ("table 2.3", "mnist, 50 clients", "SuPerFed-LM", {"accuracy": [99.48, 0.54]}),
        ("table 2.3", "cifar10, 500 clients", "SCAFFOLD", {"accuracy": [40.27, 26.90]}),
        ("table 2.4", "cifar100, alpha 100", "APFL", {"top5": [55.43, 5.45]}),
        (
            "table 2.5", "writers", "pFedMe",
            {"accuracy": [5.98, 4.55], "top5": [24.64, 9.43]},
        ),
        (
            "table 2.5", "roles", "FedRep",
            {"accuracy": [38.15, 9.54], "top5": [68.65, 12.50]},
        ),
        (
            "table 2.6", "mnist, pair 0.4", "FedAvg",
            {"ece": [0.38], "mce": [0.67], "accuracy": [41.01]},
        ),
        (
            "table 2.6", "cifar10, symmetric 0.6", "FedRep",
            {"ece": [0.71], "mce": [0.85], "accuracy": [22.94]},
        ),
        (
            "table 2.7", "", "LM from 0.8",
            {"accuracy": [90.59, 9.93], "loss": [6.28, 1.76]},
        ),
    ):  # fmt: skip
        assert PRINTED[part][setting][method] == expected, (part, setting)
        assert {*expected} == {*tables.MEASURED[part]}
    for part, setting, method, metric, expected in (
        ("table 2.4", "cifar10, alpha 1", "FedAvg", "top5", (0.5812, 0.0706)),
        ("table 2.7", "digits, 10 clients", "MM from 0.4", "loss", (0.78, 0.31)),
        ("table 2.5", "writers", "SuPerFed-MM", "loss", ()),
        ("table 2.3", "digits, 10 clients", "FedAvg", "accuracy", ()),
    ):
        got = tables.printed_of(part, method, setting, metric)
        assert got == pytest.approx(expected)


def test_every_part_compares_its_methods():
    whole = dataclasses.replace(
        SMOKE, parts=tables.PARTS, methods=NAMES, alphas=(1.0, 100.0),
        noises=("pair 0.4",), mus=(0.0, 1.0), hidden=(12, 12),
    )  # fmt: skip
    clients = tables.populations(whole)
    studies = tables.make_studies(whole, clients)
    for (part, _), this in studies.items():
        (setting,) = this.settings.values()
        assert setting.data.validation is not None
        assert this.eval_splits == ("validation", "test")
        if part not in ("table 2.7", "figure 2.3"):
            assert tuple(this.methods) == NAMES, part
        if part == "figure 2.3":  # rows of other numbers share a program
            assert len({m.make for m in this.methods.values()}) == 1
    (starts,) = (s for (part, _), s in studies.items() if part == "table 2.7")
    begins = [m.config.warm_up for m in starts.methods.values()]
    assert begins == [0, 1, 2, 3, 4] * 2
    # Labels are wrong where clients train and choose, and right in the test.
    noisy = clients["table 2.6"]["digits, pair 0.4"].data.test
    clean = tables._dirichlet(whole, "table 2.6", "digits", 10.0).test
    assert noisy is not None
    assert clean is not None
    np.testing.assert_array_equal(noisy.examples["y"], clean.examples["y"])


def test_roles_have_a_network_and_numbers_of_their_own(tmp_path):
    file = tmp_path / "shakespeare_roles" / "shakespeare_roles.jsonl.gz"
    file.parent.mkdir()
    speeches = [f"To be, or not to be: {i} " * 5 for i in range(10)]
    lines = [{"client_id": f"play/{i}", "snippets": speeches} for i in range(4)]
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    e = dataclasses.replace(
        SMOKE, data="files", path=tmp_path, parts=("table 2.5",), natural=("roles",),
        num_roles=3, methods=NAMES,
    )  # fmt: skip
    clients = tables.populations(e)
    assert clients["table 2.5"]["roles"].data.num_clients == 3
    (this,) = tables.make_studies(e, clients).values()
    assert this.methods["FedPer"].config.personal == ("Dense_0",)
    assert this.methods["LG-FedAvg"].config.shared == ("Dense_0", "LSTM_0")
    config = this.methods["SuPerFed-MM"].config
    assert (config.nu, config.warm_up, config.work.batch_size) == (1.5, 2, 50)
    assert this.methods["pFedMe"].config.prox == 0.1


def test_the_preset_paper_has_the_settings_of_the_text():
    paper, kept = tables.PRESETS["paper"], tables.PRESETS["default"]
    names = ("warm_ups", "nus", "rounds", "local_epochs", "batch_size", "client_lr")
    common = ((1, 2), 500, 10, 10, 0.01)
    of_cifar, of_tiny = ((1, 2), 500, 5, 20, 0.01), ((1, 2), 500, 5, 20, 0.02)
    for part, setting, clients, expected in (
        ("table 2.3", "mnist, 50 clients", 50, ((0.6, 0.8), *common)),
        ("table 2.3", "cifar10, 100 clients", 50, ((0.4, 0.6), *common)),
        ("table 2.3", "cifar10, 500 clients", 50, ((0.2, 0.4), *common)),
        ("table 2.4", "cifar100, alpha 10", 100, ((0.4, 0.6), *of_cifar)),
        ("table 2.4", "tinyimagenet, alpha 1", 200, ((0.35, 0.45), *of_tiny)),
        ("table 2.4", "tinyimagenet, alpha 10", 200, ((0.45, 0.5), *of_tiny)),
        ("table 2.4", "tinyimagenet, alpha 100", 200, ((0.55, 0.55), *of_tiny)),
        ("table 2.5", "writers", 50, ((0.25, 0.45), (2, 3), *common[1:])),
        ("table 2.5", "roles", 50, ((0.45, 0.35), (1.5, 2), 500, 5, 50, 0.8)),
        ("table 2.6", "mnist, pair 0.1", 100, ((0.4, 0.6), *common)),
        (
            "table 2.7",
            "cifar10, 50 clients",
            50,
            ((0.4, 0.6), (2, 2), 200, 10, 10, 0.01),
        ),
        (
            "figure 2.3",
            "cifar10, 50 clients",
            50,
            ((0.4, 0.4), (1, 2), 100, 10, 10, 0.01),
        ),
    ):
        own = tables.of_text(paper, part, setting)
        assert tuple(getattr(own, name) for name in names) == expected, setting
        assert own.num_clients[0] == clients
        if setting != "roles":
            assert tables.of_text(kept, part, setting) == kept
    assert tables.of_text(paper, "table 2.5", "writers").prox == 5
    # What is given otherwise stays, and the page says what a setting has of its own.
    short = dataclasses.replace(paper, rounds=20, noisy_test=True)
    said = tables.described(short, {"table 2.7": ["cifar10, 50 clients"]})
    assert said.endswith("* table 2.7, cifar10, 50 clients: nus (2.0, 2.0)")
    assert "test examples are wrong too" in said


def test_every_network_has_one_head_and_another_first_layer():
    paper = tables.PRESETS["paper"]
    last = {"roles": 90, "cifar100": 100, "tinyimagenet": 200}
    for e, name, image, head, first in (
        (paper, "mnist", (784,), "Dense_2", "Dense_0"),
        (paper, "cifar10", (32, 32, 3), "Dense_1", "Conv_0"),
        (paper, "cifar100", (32, 32, 3), "Dense_0", "Conv_0"),
        (paper, "tinyimagenet", (64, 64, 3), "Dense_0", "Conv_0"),
        (paper, "roles", (80,), "Dense_0", "embedding"),
        (SMOKE, "digits", (64,), "Dense_1", "Dense_0"),
    ):
        kind = np.int32 if name == "roles" else np.float32
        module = tables.network(e, name, len(image))
        example = jax.ShapeDtypeStruct(image, kind)
        model = models.from_linen(module, example, models.classes())
        e = dataclasses.replace(e, methods=NAMES)
        found = {name: m.config for name, m in tables.methods(e, model).items()}
        layers = jax.eval_shape(model.init, jax.random.key(0))
        assert found["FedPer"].personal == found["FedRep"].personal == (head,)
        assert layers.keys() - {*found["LG-FedAvg"].shared} == {first}
        classes = last.get(name, 10)
        assert (classes,) in [x.shape for x in jax.tree.leaves(layers[head])]
    no_head = model._replace(init=lambda key: {"Conv_0": {}, "SpectralDense_0": {}})
    with pytest.raises(ValueError, match=r"need a network with a dense.*Spectral"):
        tables.methods(SMOKE, no_head)


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
    run = outcome({"SuPerFed-MM": grid})
    found = tables.results_of(run, "accuracy")
    assert list(found) == [("SuPerFed-MM", "here"), (f"SuPerFed-MM{BEST}", "here")]
    for result in found.values():
        np.testing.assert_allclose(result.series("test_accuracy")[1], [[0.8], [0.8]])
    shown = tables.details("table 2.3", "accuracy", run, found)
    assert shown.rows[0][:2] == ("SuPerFed-MM", "0.1000")
    assert shown.rows[0][4] == "0.3 0.3"
    # Deviations of two metrics, each beside the text's.
    for result in found.values():
        result.client_metrics["test_top5"] *= 2
    cell = {("SuPerFed-MM", "writers"): found["SuPerFed-MM", "here"]}
    shown = tables.details("table 2.5", "accuracy", run, cell)
    ours = dict(zip(shown.header, shown.rows[0], strict=True))
    assert ours["accuracy over clients"] == "0.1000"
    assert ours["accuracy over clients, printed"] == "0.0840"
    assert ours["top5 over clients"] == "0.2000"
    assert ours["top5 over clients, printed"] == "0.0213"


def test_printed_numbers_stand_beside_ours(tmp_path):
    found = results({"SuPerFed-MM": 0.6, f"SuPerFed-MM{BEST}": 0.6}, "mnist, pair 0.4")
    e = dataclasses.replace(SMOKE, out=tmp_path)
    by_metric = {
        metric: tables.table(e, "table 2.6", metric, found).study.printed
        for metric in ("accuracy", "ece", "mce")
    }
    for suffix in ("", BEST):
        cell = f"SuPerFed-MM{suffix}", "mnist, pair 0.4"
        assert by_metric["accuracy"][cell] == pytest.approx(0.4641)
        assert by_metric["ece"][cell] == 0.28
        assert by_metric["mce"][cell] == 0.69

    found = results({"LM from 0.8": 0.6}, "cifar10, 50 clients")
    shown = tables.table(e, "table 2.7", "loss", found)
    assert shown.study.printed == {("LM from 0.8", "cifar10, 50 clients"): 6.28}
    assert not shown.study.higher_is_better
    found = results({"FedAvg": 0.6}, "writers")
    assert tables.table(e, "table 2.5", "top5", found).study.printed == {
        ("FedAvg", "writers"): pytest.approx(0.9874)
    }
    # Each of a part's metrics has a folder of its own.
    assert tables.table(e, "table 2.5", "top5", found).out == tmp_path / "top5"
    assert tables.table(e, "table 2.5", "accuracy", found).out == tmp_path / "table 2.5"


def results(means, setting="here"):
    """Method -> accuracy, or (accuracy, ECE), as results of five seeds."""
    found = {}
    for method, value in means.items():
        accuracy, ece = value if isinstance(value, tuple) else (value, 0.1)
        values = {
            f"test_{name}": np.full((5, 1), x) + np.arange(5)[:, None] * 1e-4
            for name, x in (
                ("accuracy", accuracy),
                ("top5", accuracy),
                ("ece", ece),
                ("loss", ece),
            )
        }
        found[method, setting] = Result(
            tuple(range(5)), 5, {}, np.array([5]), values, {}, None, []
        )
    return found


def verdicts(shown):
    return {row[0]: row[-1] for row in shown.rows}


def test_orders_are_held_or_not_by_the_seeds(tmp_path):
    e = dataclasses.replace(
        SMOKE, out=tmp_path, mus=(0.0, 0.01, 1.0), more_nus=(0.0, 1.0, 5.0)
    )
    some = {"FedAvg": (0.5, 0.3), "SuPerFed-MM": 0.6, "APFL": 0.7}
    for metric, expected in (
        ("accuracy", {"FedAvg": "held", "APFL": "not held"}),
        ("ece", {"FedAvg": "held", "APFL": "undecided"}),
    ):
        *_, said = study_report.tables(
            tables.table(e, "table 2.6", metric, results(some))
        )
        for other, verdict in expected.items():
            assert verdicts(said)[f"SuPerFed-MM > {other}"] == verdict
    grid = {
        tables.grid_point("MM", mu, nu): 0.5 + 0.1 * (nu == 1) - 0.2 * (mu == 1)
        for mu in e.mus
        for nu in e.more_nus
    }
    outcome = tables.table(e, "figure 2.3", "accuracy", results(grid))
    *_, said = study_report.tables(outcome)
    assert len(said.rows) == 2
    assert {row[-1] for row in said.rows} == {"held"}


def test_orders_that_the_text_s_numbers_contradict_are_not_claimed(tmp_path):
    e = dataclasses.replace(SMOKE, out=tmp_path)

    def claims(part, setting, metric):
        found = results(dict.fromkeys(NAMES, (0.5, 0.3)), setting)
        return tables.table(e, part, metric, found).study.claims

    everything = {(m, o) for m in NAMES[-2:] for o in NAMES[:-2]}
    for part, setting, metric, but in (
        ("table 2.3", "mnist, 500 clients", "accuracy", {("LM", "APFL")}),
        ("table 2.4", "cifar10, alpha 1", "top5", {("MM", "APFL")}),
        ("table 2.5", "writers", "accuracy", {("LM", "APFL")}),
        ("table 2.5", "writers", "top5", {("LM", "APFL"), ("LM", "SCAFFOLD")}),
        ("table 2.6", "mnist, pair 0.1", "ece", {("MM", "SCAFFOLD")}),  # equal
        ("table 2.6", "mnist, symmetric 0.2", "accuracy", {("LM", "SCAFFOLD")}),
    ):
        left = everything - {(f"SuPerFed-{a}", b) for a, b in but}
        assert {c[:2] for c in claims(part, setting, metric)} == left


def test_falls_over_alpha_are_compared():
    found = {}
    for alpha, partial in ((1, 0.8), (100, 0.6)):
        found |= results(
            {"FedPer": partial, "SuPerFed-MM": 0.9}, f"digits, alpha {alpha}"
        )
    said = verdicts(tables.over_alpha(found, "digits"))
    # Seeds repeat here, so that differences do.
    assert said == {
        "FedPer falls": "held",
        "SuPerFed-MM falls less than FedPer": "held",
    }


def test_the_inside_is_compared_with_ends_chosen_on_validation_data():
    grid = dict.fromkeys(tables.LAMBDAS, (0.5, 0.5))
    high = dict.fromkeys((0.4, 0.5), (0.7, 0.7))
    run = outcome({"inside": grid | high, "ends": grid | {1.0: (0.9, 0.9)}})
    config = superfed.Config(mu=0.01, nu=1.0)
    run = run._replace(rows=[row._replace(config=config) for row in run.rows])
    rows = tables.inside(run).rows
    assert [float(row[2]) for row in rows] == pytest.approx([0.2, -0.4])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parts": ("table 9",)}, "parts must be one of"),
        ({"methods": ("FedSAM",)}, "methods must be one of"),
        ({"cohort_size": 11}, r"cohort_size must be in \[1, 10\], got 11"),
        ({"noises": ("pair",)}, "noises must be .* as 'pair 0.4', got 'pair'"),
        ({"noises": ("pair 0.1.2",)}, "noises must be .* got 'pair 0.1.2'"),
        ({"noises": ("pair 0.5",)}, r"noises must be in \[0, 0.5\), got 0.5"),
        ({"noises": ("symmetric 1",)}, r"noises must be in \[0, 1\), got 1.0"),
        ({"mus": (-1.0,)}, "mus must be >= 0 and finite, got -1.0"),
        ({"more_nus": (-1.0,)}, "more_nus must be >= 0 and finite, got -1.0"),
        ({"mu": -1.0}, "mu must be >= 0 and finite, got -1.0"),
        ({"nus": (1.0,)}, r"nus must be of 2 entries, got \(1.0,\)"),
        ({"warm_ups": (0.4,)}, r"warm_ups must be of 2 entries, got \(0.4,\)"),
        ({"hidden": (0,)}, "hidden must be >= 1, got 0"),
        ({"lr_decay": 2.0}, r"lr_decay must be in \[0, 1\], got 2.0"),
        ({"lr_decay": 0.0}, "lr_decay must be > 0 and finite, got 0.0"),
        ({"prox": 0.0}, "prox must be > 0 and finite, got 0.0"),
        ({"shrink": 3}, "shrink must be one of 1, 2, 4, got 3"),
        ({"natural": ()}, "natural must not be empty"),
        ({"split": ()}, "split must not be empty"),
        ({"methods": ()}, "methods must not be empty"),
        ({"noises": ()}, "noises must not be empty"),
    ],
)
def test_impossible_tables_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(SMOKE, **change)
