"""Labels that hold or not: loss by formula, areas under curves by scikit-learn."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedjax_core import Packed, evaluate, models
from fedjax_core.metrics import CalibrationError
from fedjax_core.models import classes

KEY = jax.random.key(0)


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float32"])
def test_multi_label_loss_is_the_mean_over_labels(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 4)).astype(np.float32)
    y = rng.integers(0, 2, (6, 5))
    example = jax.ShapeDtypeStruct((4,), jnp.float32)
    model = models.from_linen(nn.Dense(5), example, models.multi_label())
    assert model.ids == {"y": models.Ids(2)}
    mask = np.arange(6) < 4
    spoilt = np.where(mask[:, None], x, np.nan), np.where(mask[:, None], y, 7)
    batch = {"x": spoilt[0], "y": jnp.asarray(y.astype(dtype)), "example_mask": mask}
    params = model.init(KEY)
    z = x.astype(np.float64) @ np.asarray(params["kernel"])
    expected = (np.log1p(np.exp(z)) - y * z).mean(1)
    loss, metrics = jax.jit(model.loss), jax.jit(model.metrics)(params, batch)
    for got in (loss(params, batch, KEY), metrics["loss"]):
        np.testing.assert_allclose(got[:4], expected[:4], rtol=1e-5)
    right = ((z > 0) == y).mean(1)
    np.testing.assert_allclose(metrics["accuracy"][:4], right[:4], rtol=1e-6)
    assert [f"auroc_{k}" in metrics for k in range(6)] == [True] * 5 + [False]
    if dtype != "bool":
        wrong = {**batch, "y": batch["y"].at[0, 1].set(2)}
        assert np.isnan(loss(params, wrong, KEY)[0])


def test_evaluation_has_an_area_for_every_label():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((60, 2)).astype(np.float32)
    y = (x + rng.standard_normal((60, 2)) > 0).astype(np.uint8)
    model = models.from_functions(
        lambda key: jnp.ones(()),
        lambda scale, x, key: scale * x,
        jax.ShapeDtypeStruct((2,), jnp.float32),
        models.multi_label(),
    )
    split = Packed({"x": x, "y": y}, np.array([0, 20, 60]))
    got = evaluate(model.metrics, jnp.ones(()), split)
    bins = np.floor(x * 8)
    for k in range(2):
        name, rows = f"auroc_{k}", (slice(20), slice(20, 60))
        areas = [roc_auc_score(y[r, k], bins[r, k]) for r in rows]
        np.testing.assert_allclose(got.per_client[name], areas, rtol=1e-5)
        pooled = roc_auc_score(y[:, k], bins[:, k])
        np.testing.assert_allclose(got.pooled[name], pooled, rtol=1e-5)


def test_targets_of_another_shape_are_refused():
    model = models.from_linen(
        nn.Dense(5), jax.ShapeDtypeStruct((4,), jnp.float32), models.multi_label()
    )
    batch = {"x": jnp.ones((2, 4)), "y": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match=r"5 targets per example, shape \(2, 5\)"):
        model.loss(model.init(KEY), batch, KEY)


def measure(logits, batch, **of_task):
    metrics = classes(**of_task).metrics
    assert metrics is not None
    return metrics(logits, batch)


def test_the_label_is_among_the_largest_logits():
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(200, 7)), 1).astype(np.float32)  # with ties
    y = rng.integers(0, 7, 200)
    batch = {"y": jnp.asarray(y), "example_mask": np.ones(200, bool)}
    largest = np.argsort(-logits, axis=1, kind="stable")
    for k in (1, 5):
        found = measure(jnp.asarray(logits), batch, top=k)
        expected = (largest[:, :k] == y[:, None]).any(1)
        np.testing.assert_array_equal(found[f"top{k}"], expected)
    np.testing.assert_array_equal(
        measure(jnp.asarray(logits), batch, top=1)["top1"], found["accuracy"]
    )
    # Nothing is known of a model that has diverged.
    nan = measure(jnp.full((200, 7), jnp.nan), batch, top=5)
    assert not nan["top5"].any()


def test_of_texts_the_largest_logits_are_counted_by_token():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)
    y = jnp.array([[1, 2, 0], [3, 0, 0]])
    found = measure(logits, {"y": y}, missing=0, top=2)["top2"]
    largest = np.argsort(-np.asarray(logits), axis=-1)[..., :2]
    right = (largest == np.asarray(y)[..., None]).any(-1) & (np.asarray(y) != 0)
    np.testing.assert_array_equal(found.total, right.sum(1))
    np.testing.assert_array_equal(found.count, [2, 1])
    with pytest.raises(ValueError, match="calibration must be of one label"):
        measure(logits, {"y": y}, calibration=True)


def test_calibration_is_measured_of_probabilities():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(25, 3)), jnp.float32)
    batch = {
        "y": jnp.asarray(rng.integers(0, 3, 25)),
        "example_mask": np.arange(25) < 23,
    }
    found = measure(logits, batch, calibration=True, per_batch=True)
    assert set(found) == {
        "loss", "accuracy", "ece", "mce", "ece_per_batch", "mce_per_batch"
    }  # fmt: skip
    p = np.asarray(jax.nn.softmax(logits))
    one = CalibrationError.per_example(p.max(1), p.argmax(1) == batch["y"])
    np.testing.assert_allclose(found["ece"].gap, one.gap, rtol=1e-6)
    assert found["ece_per_batch"].total[:20].std() > 0
