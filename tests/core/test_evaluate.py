"""Evaluation equals plain NumPy averages, whatever the batches and devices."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedjax_core import (
    Execution,
    FederatedData,
    Packed,
    client_mesh,
    evaluate,
    models,
    simulate,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.evaluate import Evaluator, compile_evaluation
from fedjax_core.metrics import AUROC, Mean, Sum, gini

evaluate_lib = sys.modules["fedjax_core.evaluate"]  # the package exports the function

PARAMS = {"w": jnp.array([0.5, -1.0, 2.0])}
SIZES = {
    "ragged": (3, 0, 1, 7, 2, 0, 5),
    "one client": (4,),
    "one example": (0, 1, 0, 0, 0, 0, 0),
    "empty ends": (0, 0, 6, 0, 0, 0, 0),
    "a batch exactly": (4, 4, 0, 0, 0, 0, 0),
    "many": tuple(range(12)),
}


def metrics(params, batch):
    """One metric that knows no bounds and one that is 0 or 1."""
    score = batch["x"] @ params["w"]
    return {"score": score, "above": score > batch["y"]}


def make(sizes, seed=0):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    examples = {
        "x": rng.standard_normal((n, 3)).astype(np.float32),
        "y": rng.standard_normal(n).astype(np.float32),
    }
    return Packed(examples, np.concatenate([[0], np.cumsum(sizes)]))


def reference(packed):
    """Client by client in float64."""
    w = np.asarray(PARAMS["w"], np.float64)
    by_client: dict[str, list] = {"score": [], "above": []}
    for i in range(packed.num_clients):
        client = packed.client(i)
        score = client["x"].astype(np.float64) @ w
        by_client["score"].append(score)
        by_client["above"].append((score > client["y"]).astype(np.float64))
    out = {}
    for name, values in by_client.items():
        means = np.array([v.mean() if len(v) else np.nan for v in values])
        there = means[~np.isnan(means)]
        out[name] = {
            "pooled": np.concatenate(values).mean(),
            "client_mean": there.mean(),
            "client_p10": np.quantile(there, 0.1),
            "per_client": means,
        }
    return out


def reference_auroc(packed):
    """Pooled and by client, over the scores' bins."""
    score = packed.examples["x"].astype(np.float64) @ np.asarray(PARAMS["w"])
    label, bin = packed.examples["y"] > 0, np.floor((score + 16) * 8)
    parts = [slice(*packed.offsets[i : i + 2]) for i in range(packed.num_clients)]
    return [
        roc_auc_score(label[part], bin[part])
        if len(np.unique(label[part])) == 2
        else np.nan
        for part in (slice(None), *parts)
    ]


averages = jax.jit(lambda sums: evaluate_lib.averages(sums, {}))


def evaluation(evaluator, params=PARAMS):
    """That of one model, on the host."""
    sums = jax.jit(evaluator.sums)
    sums = [sums(params, piece) for piece in evaluator.pieces()]
    return jax.tree.map(np.asarray, averages(*sums))


def identity(params, batch):
    return {"v": batch["v"]}


def compare(evaluation, packed):
    for name, expected in reference(packed).items():
        for field, value in expected.items():
            np.testing.assert_allclose(
                getattr(evaluation, field)[name], value, 1e-5, 1e-6, err_msg=field
            )


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("devices", [1, 8])
def test_averages_are_those_of_numpy(name, devices):
    packed = make(SIZES[name])
    mesh = client_mesh(jax.devices()[:devices])
    compare(evaluation(Evaluator(metrics, packed, mesh, batch_size=4)), packed)


@pytest.mark.parametrize("batch_size", [1, 7, 18, 1000])
def test_the_batch_size_does_not_matter(batch_size):
    packed = make(SIZES["ragged"])
    compare(evaluation(Evaluator(metrics, packed, batch_size=batch_size)), packed)


def test_a_model_is_evaluated_in_one_call():
    packed = make(SIZES["ragged"])
    result = evaluate(metrics, PARAMS, packed)
    compare(result, packed)
    assert set(result.named("validation")) == {
        f"validation_{name}{suffix}"
        for name in ("score", "above")
        for suffix in ("", "_client_mean", "_client_p10")
    }


def test_padding_is_masked_and_repeats_a_real_row():
    packed = make((2, 3))
    packed.examples["x"][:] += 100
    seen = []

    def metrics_fn(params, batch):
        jax.debug.callback(seen.append, batch["example_mask"])
        return {
            # What a careless model would notice: a mean over the rows of a batch.
            "smallest": jnp.full(batch["x"].shape[0], batch["x"].min()),
            "rows": jnp.ones(batch["x"].shape[0]),
        }

    result = evaluation(Evaluator(metrics_fn, packed, batch_size=4))
    jax.effects_barrier()
    assert sorted(map(np.sum, seen)) == [1, 4]
    assert {mask.shape for mask in seen} == {(4,)}
    assert result.pooled["smallest"] > 90
    np.testing.assert_array_equal(result.pooled["rows"], 1)


def test_what_a_metric_says_of_padding_stays_out():
    packed = make((2, 3))

    def metrics_fn(params, batch):
        return {"v": jnp.where(batch["example_mask"], 1.0, jnp.nan)}

    result = evaluation(Evaluator(metrics_fn, packed, client_mesh(), batch_size=3))
    np.testing.assert_array_equal(result.per_client["v"], [1, 1])
    assert result.pooled["v"] == result.client_mean["v"] == result.client_p10["v"] == 1


@pytest.mark.parametrize("mesh", [None, client_mesh()])
def test_sums_of_small_whole_numbers_are_exact(mesh):
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 50, 40)
    hits = rng.integers(0, 2, sizes.sum())
    packed = Packed({"v": hits}, np.concatenate([[0], np.cumsum(sizes)]))
    result = evaluation(Evaluator(identity, packed, mesh))
    assert result.pooled["v"] == np.float32(hits.sum()) / np.float32(len(hits))
    sums = np.array([packed.client(i)["v"].sum() for i in range(40)])
    with np.errstate(invalid="ignore"):
        expected = sums.astype(np.float32) / sizes.astype(np.float32)
    np.testing.assert_allclose(result.per_client["v"], expected, rtol=2e-7)


def test_a_diverged_model_shows_in_every_average():
    values = np.array([1, 2, np.nan, 4], np.float32)
    result = evaluation(Evaluator(identity, Packed({"v": values}, np.arange(5))))
    for average in (result.pooled, result.client_mean, result.client_p10):
        assert np.isnan(average["v"])
    np.testing.assert_array_equal(result.per_client["v"], values)
    infinite = Packed({"v": np.array([np.inf, 1, 1, 1], np.float32)}, np.arange(5))
    result = evaluation(Evaluator(identity, infinite))
    assert result.pooled["v"] == np.inf
    assert result.client_p10["v"] == 1


def test_nothing_to_evaluate_on_is_an_error():
    with pytest.raises(ValueError, match="at least one example"):
        Evaluator(metrics, make((0, 0)))
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        Evaluator(metrics, make((1,)), batch_size=0)


@pytest.mark.parametrize("mesh", [None, client_mesh()])
def test_a_mean_weighs_examples_by_their_denominators(mesh):
    right = np.array([[1, 2, 3, 0, 0, 5, 7, 0]]).T.astype(np.float32)
    tokens = np.array([[2, 4, 3, 0, 4, 5, 9, 0]]).T.astype(np.float32)
    packed = Packed({"right": right, "tokens": tokens}, np.array([0, 3, 4, 7, 8]))

    def metrics_fn(params, batch):
        return {"v": Mean(batch["right"][:, 0], batch["tokens"][:, 0])}

    out = evaluation(Evaluator(metrics_fn, packed, mesh, batch_size=2))
    np.testing.assert_allclose(out.pooled["v"], 18 / 27, rtol=1e-6)
    # A client whose only example has nothing to count counts as one without examples.
    means = np.array([6 / 9, np.nan, 12 / 18, np.nan])
    np.testing.assert_allclose(out.per_client["v"], means, rtol=1e-6)
    np.testing.assert_allclose(out.client_mean["v"], np.nanmean(means))


@pytest.mark.parametrize("mesh", [None, client_mesh()])
def test_summands_that_are_no_means_add_up_over_batches_and_devices(mesh, monkeypatch):
    monkeypatch.setattr(evaluate_lib, "_CHUNK_ROWS", 9)
    packed = make(SIZES["ragged"], seed=1)

    def metrics_fn(params, batch):
        return {"v": AUROC.per_example(batch["x"] @ params["w"], batch["y"] > 0)}

    out = evaluation(Evaluator(metrics_fn, packed, mesh, batch_size=4))
    pooled, *per_client = reference_auroc(packed)
    np.testing.assert_allclose(out.pooled["v"], pooled, rtol=1e-6)
    np.testing.assert_allclose(out.per_client["v"], per_client, rtol=1e-6)
    np.testing.assert_allclose(out.client_mean["v"], np.nanmean(per_client), 1e-6)


@pytest.mark.parametrize("mesh", [None, client_mesh()])
@pytest.mark.parametrize("on_host", [False, True])
def test_chunks_and_the_place_of_the_examples_change_nothing(
    mesh, on_host, monkeypatch
):
    monkeypatch.setattr(evaluate_lib, "_CHUNK_ROWS", 6)
    # Two models, and a split of the population's two.
    data = FederatedData(make(SIZES["ragged"]), make(SIZES["many"][:7], seed=1))
    models = {"w": jnp.stack([-PARAMS["w"], PARAMS["w"]])}
    run = compile_evaluation(
        metrics, data, ("train", "test", "validation"), mesh, on_host=on_host
    )
    scalars, per_client = run(models)
    assert {name.split("_")[0] for name in scalars} == {"train", "test"}
    for split, packed in data.splits.items():
        for name, expected in reference(packed).items():
            key = f"{split}_{name}"
            close = (1e-5, 1e-6)
            np.testing.assert_allclose(scalars[key][1], expected["pooled"], *close)
            for field in ("client_mean", "client_p10"):
                got = scalars[f"{key}_{field}"]
                np.testing.assert_allclose(got[1], expected[field], *close)
            np.testing.assert_allclose(
                per_client[key][1], expected["per_client"], *close
            )
        score = scalars[f"{split}_score"]
        np.testing.assert_allclose(score[0], -score[1], rtol=1e-5)


def test_sums_go_on_where_float32_would_stand_still(monkeypatch):
    monkeypatch.setattr(evaluate_lib, "_CHUNK_ROWS", 16)
    values = np.ones(16 * 64, np.float32)
    values[0] = 2**24
    packed = Packed({"v": values}, np.array([0, len(values)]))
    mean = evaluate(identity, {}, packed).pooled["v"]
    np.testing.assert_allclose(mean, values.mean(dtype=np.float64), rtol=5e-6)


def test_metrics_in_double_precision_are_summed_in_it(x64):
    values = np.array([2.0**53, 3.0, -(2.0**53), 4.0])
    out = evaluation(Evaluator(identity, Packed({"v": values}, np.arange(5)), None, 1))
    assert out.pooled["v"].dtype == np.float64
    assert out.pooled["v"] == (values[0] + 3 + values[2] + 4) / 4
    np.testing.assert_array_equal(out.per_client["v"], values)


@pytest.mark.parametrize(
    ("name", "metric", "message"),
    [
        ("a batch mean", lambda v: v.mean(), r"shape \(3,\), got shape \(\) for 'm'"),
        ("a number", lambda v: 0.5, r"shape \(3,\), got shape \(\) for 'm'"),
        ("one per label", lambda v: jnp.ones((3, 2)), r"got shape \(3, 2\) for 'm'"),
        ("scalars", lambda v: Mean(v.sum(), v.sum()), r"got shape \(\) for 'm'"),
        ("a scalar count", lambda v: Mean(v, v.sum()), r"got shape \(\) for 'm'"),
        ("no example axis", lambda v: AUROC(v[:2], v[:2]), r"got shape \(2,\) for 'm'"),
        ("a sum", lambda v: Sum(v), "values with a count for 'm', got Sum"),
        (
            "several values",
            lambda v: AUROC(jnp.ones((3, 2, 4)), jnp.ones((3, 2, 4))),
            r"summands with one value, got shape \(2,\) for 'm'",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) and " " in x else "",
)
def test_a_metric_of_another_shape_is_refused_by_name(name, metric, message):
    packed = Packed({"v": np.ones(3, np.float32)}, np.array([0, 1, 3]))
    with pytest.raises((ValueError, TypeError), match=message):
        evaluate(lambda params, batch: {"m": metric(batch["v"])}, {}, packed)


@pytest.mark.parametrize(
    ("metric", "summary", "message"),
    [
        (lambda losses: losses.mean(), gini, r"shape \(2,\), got shape \(\) for 'm'"),
        (lambda losses: losses, lambda v, c: v, r"number, got shape \(1,\) for 'm_s'"),
    ],
)
def test_simulate_refuses_metrics_of_another_shape_before_it_trains(
    metric, summary, message
):
    examples = {"x": np.ones((4, 2), np.float32), "y": np.zeros(4, np.int32)}
    packed = Packed(examples, np.array([0, 2, 4]))
    model = models.logistic_regression(2, 2)

    def metrics_fn(params, batch):
        return {"m": metric(model.metrics(params, batch)["loss"])}

    def never(*_):
        raise AssertionError("a round was traced")

    algorithm = dataclasses.replace(
        fedavg.make(fedavg.Config(), model.loss), round=never
    )
    with pytest.raises(ValueError, match=message):
        simulate(
            algorithm,
            FederatedData(packed, packed),
            model._replace(metrics=metrics_fn),
            rounds=3,
            cohort_size=1,
            progress=False,
            client_summaries={"s": summary},
            execution=Execution(),
        )


def test_client_summaries_are_named_after_metric_and_summary():
    values = np.array([1, 3, 0, 0, 4], np.float32)
    packed = Packed({"v": values}, np.array([0, 2, 2, 4, 5]))
    summaries = {"gini": gini, "clients": lambda values, counts: (counts > 0).sum()}
    run = compile_evaluation(
        identity, FederatedData(packed), ("train",), client_summaries=summaries
    )
    scalars, _ = run({"w": jnp.zeros(2)})
    # Clients have 2, 0 and 4, and one has nothing.
    np.testing.assert_allclose(scalars["train_v_gini"], [4 / 9] * 2, rtol=1e-6)
    np.testing.assert_array_equal(scalars["train_v_clients"], [3, 3])


@pytest.mark.parametrize("compiled", [True, False])
def test_the_debuggers_of_nan_and_of_compiled_code_work(compiled):
    packed = Packed({"v": np.array([1, 2, 3], np.float32)}, np.array([0, 1, 1, 3]))
    with jax.debug_nans(True), jax.disable_jit(not compiled):
        per_client = evaluate(identity, {}, packed).per_client["v"]
        np.testing.assert_array_equal(per_client, [1, np.nan, 2.5])
        packed.examples["v"][1] = np.nan  # what a model gives is looked at
        if compiled:
            with pytest.raises(FloatingPointError):
                evaluate(identity, {}, packed)


def test_evaluations_of_other_models_compile_nothing():
    traces = []

    def metrics_fn(params, batch):
        traces.append(1)
        return metrics(params, batch)

    data = FederatedData(make(SIZES["ragged"]))
    run = compile_evaluation(metrics_fn, data, ("train",))
    models = {"w": jnp.stack([PARAMS["w"], -PARAMS["w"]])}
    run(models)
    seen = len(traces)
    run(jax.tree.map(lambda w: 2 * w, models))
    assert len(traces) == seen
