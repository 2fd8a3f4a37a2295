"""Classifiers answer per example, and the zoo has the published sizes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import models
from fedjax_core.model import Model, classifier

KEY = jax.random.key(0)
ZOO = {
    "logistic_regression": (lambda: models.logistic_regression(784, 62), (784,), 48670),
    "2nn": (lambda: models.mlp(784, 10), (784,), 199210),
    "mlp": (lambda: models.mlp(5, 3, hidden=(4,)), (5,), 24 + 15),
    "emnist_cnn": (models.emnist_cnn, (28, 28, 1), 1206590),
    "emnist_cnn_digits": (lambda: models.emnist_cnn(10), (28, 28, 1), 1199882),
    "cifar_cnn": (models.cifar_cnn, (32, 32, 3), 1626442),
}


def batch_of(shape, num_classes=3, size=4):
    rng = np.random.default_rng(1)
    return {
        "x": jnp.asarray(rng.standard_normal((size, *shape)), jnp.float32),
        "y": jnp.asarray(rng.integers(0, num_classes, size), jnp.int32),
        "example_mask": jnp.asarray([True, False, True, False][:size]),
    }


def mean_loss(model: Model, batch):
    def f(params):
        mask = batch["example_mask"]
        values = jnp.where(mask, model.loss(params, batch, KEY), 0.0)
        return jnp.sum(values) / jnp.maximum(jnp.sum(mask), 1)

    return f


@pytest.mark.parametrize("name", ZOO)
def test_parameter_counts_are_the_published_ones(name):
    make, _, expected = ZOO[name]
    shapes = jax.eval_shape(make().init, KEY)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected


@pytest.mark.parametrize("name", ["2nn", "emnist_cnn", "cifar_cnn"])
def test_values_are_per_example_and_rows_do_not_mix(name):
    make, shape, _ = ZOO[name]
    model, batch = make(), batch_of(shape)
    params = model.init(KEY)
    loss = jax.jit(model.loss)(params, batch, KEY)
    metrics = jax.jit(model.metrics)(params, batch)
    assert loss.shape == (4,)
    assert loss.dtype == jnp.float32
    assert set(metrics) == {"loss", "accuracy"}
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_array_equal(np.isin(metrics["accuracy"], [0, 1]), True)
    for i in (0, 2):
        alone = {k: v[i : i + 1] for k, v in batch.items()}
        got = model.loss(params, alone, KEY)
        np.testing.assert_allclose(got[0], loss[i], rtol=1e-4)


def test_cross_entropy_and_accuracy_match_the_formula():
    model, batch = models.logistic_regression(6, 5), batch_of((6,), 5)
    batch.pop("example_mask")
    params = model.init(KEY)
    (dense,) = params.values()
    kernel, bias = np.asarray(dense["kernel"]), np.asarray(dense["bias"])
    logits = np.asarray(batch["x"], np.float64) @ kernel.T + bias
    y = np.asarray(batch["y"])
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), y]
    metrics = model.metrics(params, batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_array_equal(metrics["accuracy"], logits.argmax(1) == y)


@pytest.mark.parametrize("name", ["logistic_regression", "emnist_cnn"])
def test_masked_rows_may_hold_anything(name):
    make, shape, _ = ZOO[name]
    model, batch = make(), batch_of(shape)
    spoilt = dict(batch)
    hidden = np.array([1, 3])
    spoilt["x"] = batch["x"].at[hidden].set(jnp.nan)
    spoilt["y"] = batch["y"].at[hidden].set(-7)
    params = model.init(KEY)
    expected = jax.jit(jax.value_and_grad(mean_loss(model, batch)))(params)
    got = jax.jit(jax.value_and_grad(mean_loss(model, spoilt)))(params)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_lowerings_agree_on_loss_and_gradient():
    batch = batch_of((28, 28, 1))
    params = models.emnist_cnn().init(KEY)
    results = [
        jax.jit(jax.value_and_grad(mean_loss(models.emnist_cnn(lowering=how), batch)))(
            params
        )
        for how in ("patches", "lax")
    ]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *results
    )


def test_init_depends_on_the_key_only():
    model = models.mlp(5, 3, hidden=(4,))
    first, again, other = (model.init(jax.random.key(i)) for i in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    kernels = [p["Dense_0"]["kernel"] for p in (first, other)]
    assert not np.allclose(*kernels)


def test_errors_name_the_argument():
    model = classifier(nn.Dense(3), (5,))
    batch = batch_of((5,))
    params = model.init(KEY)
    with pytest.raises(ValueError, match=r"batch\['x'\] must have shape \(B, \*\(5,\)"):
        model.loss(params, {**batch, "x": jnp.zeros((4, 6))}, KEY)
    with pytest.raises(ValueError, match="one label per example"):
        model.loss(params, {**batch, "y": jnp.zeros((4, 1), jnp.int32)}, KEY)
    with pytest.raises(TypeError, match="must be integer, got float32"):
        model.metrics(params, {**batch, "y": jnp.zeros(4)})
    with pytest.raises(ValueError, match="example_shape must be >= 1, got 0"):
        classifier(nn.Dense(3), (0,))
    with pytest.raises(ValueError, match="hidden must be >= 1"):
        models.mlp(5, 3, hidden=(4, 0))
