"""Labels that hold or not: loss by formula, areas under curves by scikit-learn."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedjax_core import Packed, evaluate, models

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
