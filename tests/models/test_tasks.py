"""Labels that hold or not: loss by formula, areas under curves by scikit-learn."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedjax_core import models
from fedjax_core.models.tasks import Auroc

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


def test_histograms_add_up_to_the_area_under_the_curve():
    rng = np.random.default_rng(1)
    positive = rng.random(400) < 0.3
    scores = rng.normal(positive, 1.5).astype(np.float32)
    scores[:3] = [-40, 40, 0]
    each = Auroc.of(jnp.asarray(scores), jnp.asarray(positive))
    clients = jax.tree.map(lambda x: x.reshape(4, 100, 256).sum(1), each)
    pooled = jax.tree.map(lambda x: x.sum(0), clients)
    binned = np.clip(np.floor(scores * 8), -128, 127)
    expected = roc_auc_score(positive, binned)
    np.testing.assert_allclose(pooled.value, expected, rtol=1e-5)
    np.testing.assert_allclose(expected, roc_auc_score(positive, scores), atol=0.01)
    parts = [
        roc_auc_score(p, s)
        for p, s in zip(positive.reshape(4, 100), binned.reshape(4, 100), strict=True)
    ]
    np.testing.assert_allclose(clients.value, parts, rtol=1e-5)
    assert clients.count.shape == (4,)
    alone = Auroc.of(jnp.ones(3), jnp.ones(3, bool))
    assert np.isnan(alone.value).all()
    assert not np.any(alone.count)


def test_targets_of_another_shape_are_refused():
    model = models.from_linen(
        nn.Dense(5), jax.ShapeDtypeStruct((4,), jnp.float32), models.multi_label()
    )
    batch = {"x": jnp.ones((2, 4)), "y": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match=r"5 targets per example, shape \(2, 5\)"):
        model.loss(model.init(KEY), batch, KEY)
