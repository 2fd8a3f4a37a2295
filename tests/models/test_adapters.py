"""Networks of flax and plain functions: padding, statistics and dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_core import models
from fedjax_core.types import Stateful

EXAMPLE = jax.ShapeDtypeStruct((4,), jnp.float32)
KEY = jax.random.key(0)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(3)(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 3, rngs=rngs)])
        self.before = nnx.Dropout(0.5, rngs=rngs)
        self.after = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.after(self.layers[0](self.before(self.norm(x))))


def zeros_of(outputs, batch):
    """How many outputs of an example dropout has set to 0."""
    del batch
    return (outputs == 0).sum(-1).astype(jnp.float32)


TASK = models.Task(zeros_of, lambda outputs, batch: {"first": outputs[:, 0]})
MODELS = {
    "linen": models.from_linen(Linen(), EXAMPLE, TASK),
    "nnx": models.from_nnx(Nnx, EXAMPLE, TASK),
}


def batch_of(size=8, real=5, spoil=np.nan):
    x = np.random.default_rng(0).standard_normal((size, 4)).astype(np.float32) + 1
    x[real:] = spoil
    return {"x": x, "y": np.zeros(size, int), "example_mask": np.arange(size) < real}


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_real_rows(name):
    model, batch = MODELS[name], batch_of()

    @jax.jit
    def values(key, batch):
        params = model.init(KEY)
        losses, stats = model.loss(params, batch, key)
        moved = model.metrics(params._replace(stats=stats), batch)
        return params, losses, stats, moved

    params, losses, stats, moved = values(KEY, batch)
    assert isinstance(params, Stateful)
    x = batch["x"][:5].astype(np.float64)
    mean, var = 0.1 * x.mean(0), 0.9 + 0.1 * x.var(0)
    got = jax.tree.leaves(stats)
    np.testing.assert_allclose(got, [mean, var], rtol=1e-5)
    # Evaluation: running statistics, no dropout.
    kernel = next(p for p in jax.tree.leaves(params.params) if p.shape == (4, 3))
    outputs = (x - mean) / np.sqrt(var + 1e-5) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(moved["first"][:5], outputs[:, 0], rtol=1e-4, atol=1e-6)
    # Padding alone, of a client without work, is no NaN.
    nothing = values(KEY, {**batch_of(spoil=1.0), "example_mask": np.zeros(8, bool)})
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nothing))
    # Dropout is a function of the key.
    np.testing.assert_array_equal(values(KEY, batch)[1], losses)
    assert np.any(values(jax.random.key(1), batch)[1] != losses)


def test_random_streams_of_nnx_draw_apart():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            return jnp.concatenate([part(x) for part in self.parts], axis=-1)

    # Both layers keep the same of 64 values with a chance of 2^-64.
    task = models.Task(
        lambda outputs, batch: (outputs[:, :64] != outputs[:, 64:]).sum(-1)
    )
    model = models.from_nnx(Twice, jax.ShapeDtypeStruct((64,), jnp.float32), task)
    params = model.init(KEY)
    assert jax.tree.leaves(params) == []
    assert jax.jit(model.loss)(params, {"x": jnp.ones((1, 64))}, KEY)[0] > 0


@pytest.mark.parametrize("name", MODELS)
def test_batch_normalisation_must_see_the_batch(name):
    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 2))[:, 0]

    class FlatNnx(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(2, rngs=rngs)

        def __call__(self, x):
            return self.norm(x.reshape(-1, 2))[:, 0]

    model = (
        models.from_linen(Flat(), EXAMPLE, TASK)
        if name == "linen"
        else models.from_nnx(FlatNnx, EXAMPLE, TASK)
    )
    with pytest.raises(ValueError, match=r"leading axis of 8 examples, got shape \(16"):
        jax.eval_shape(lambda: model.loss(model.init(KEY), batch_of(), KEY))


def test_plain_functions_get_the_key_of_the_step():
    def init(key):
        return {"w": jax.random.normal(key, (4, 3))}

    def apply(params, x, key):
        if key is not None:
            x = x * jax.random.bernoulli(key, 0.5, x.shape)
        return x @ params["w"]

    model = models.from_functions(init, apply, EXAMPLE, models.classes())
    assert model.ids == {"y": models.Ids(3)}
    batch = batch_of()

    @jax.jit
    def values(batch):
        params = model.init(KEY)
        losses, measured = model.loss(params, batch, KEY), model.metrics(params, batch)
        return params, losses, measured["loss"], jax.random.bernoulli(KEY, 0.5, (8, 4))

    params, losses, measured, kept = values(batch)
    kept = batch["x"][:5] * np.asarray(kept)[:5]
    for got, x in ((losses, kept), (measured, batch["x"][:5])):
        logits = x.astype(np.float64) @ np.asarray(params["w"])
        expected = np.log(np.exp(logits).sum(1)) - logits[:, 0]
        np.testing.assert_allclose(got[:5], expected, rtol=1e-5)
