"""Contrastive pre-training against its formula, and what it leaves of a model."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core import (
    FederatedData,
    LocalWork,
    Packed,
    models,
    plan_round,
    pretrain,
    server,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.types import Stateful

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(size=(20, 6, 6, 1)).astype(np.float32)
X = RNG.normal(size=(20, 4)).astype(np.float32)
MODEL = models.mlp(4, 3, hidden=(5,))
INIT = jax.jit(MODEL.init)
ONCE = pretrain.Config(projection=(8, 4), work=LocalWork(batch_size=20))
VIEWS = pretrain.Views(shift=1)
nt_xent = jax.jit(pretrain.nt_xent, static_argnums=2)


def shaken(key, x):
    return x + 0.1 * jax.random.normal(key, x.shape)


class Net(nn.Module):
    """A layer, batch normalisation and a head."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(5)(x))
        return nn.Dense(3)(x)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def loss_of_pairs(z, temperature):
    """The printed formula, one view at a time."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    size, losses = len(z), []
    for a in range(size):
        b = (a + size // 2) % size
        others = sum(np.exp(z[a] @ z[c] / temperature) for c in range(size) if c != a)
        losses.append(-np.log(np.exp(z[a] @ z[b] / temperature) / others))
    return np.array(losses)


def test_the_contrastive_loss_is_its_formula_and_leaves_padding_out():
    z = RNG.normal(size=(10, 3)).astype(np.float32)
    everyone = np.ones(10, bool)
    np.testing.assert_allclose(
        nt_xent(z, everyone), loss_of_pairs(z.astype(np.float64), 0.5), rtol=1e-4
    )
    real = np.tile([True, True, True, False, False], 2)
    got = nt_xent(np.where(real[:, None], z, 0), real)[real]
    np.testing.assert_allclose(got, loss_of_pairs(z[real], 0.5), rtol=1e-4)
    slopes = jax.jit(jax.grad(lambda z: (nt_xent(z, real) * real).sum()))
    slopes = slopes(np.where(real[:, None], z, 0))
    assert np.isfinite(slopes).all()
    assert not slopes[~real].any()


def test_views_keep_shape_and_range_and_differ():
    views = jax.jit(VIEWS)(KEY, IMAGES)
    assert views.shape == IMAGES.shape
    assert 0 <= views.min() < views.max() <= 1
    assert np.abs(views[0] - views[1]).max() > 0
    still = pretrain.Views(shift=0, flip=False, brightness=0, contrast=0, noise=0)
    same = jax.jit(still)(KEY, IMAGES)
    np.testing.assert_allclose(same, IMAGES, atol=1e-6)
    # By one pixel at most, the border repeated: a constant image stays one.
    moved = jax.jit(dataclasses.replace(still, shift=1, flip=True))(KEY, IMAGES)
    wide = np.pad(IMAGES, ((0, 0), (1, 1), (1, 1), (0, 0)), "edge")
    mirrored = 0
    for image, source in zip(np.asarray(moved), wide, strict=True):
        windows = [source[i : i + 6, j : j + 6] for i in range(3) for j in range(3)]
        plain = any(np.allclose(image, w, atol=1e-6) for w in windows)
        mirrored += not plain
        assert plain or any(np.allclose(image[:, ::-1], w, atol=1e-6) for w in windows)
    assert 0 < mirrored < 20  # fails once in 2^19 keys


@pytest.fixture(scope="module")
def trained():
    return pretrain.contrastive(ONCE, MODEL, "Dense_1", X, KEY, shaken)


def test_features_are_what_the_head_receives():
    params = jax.tree.map(np.asarray, INIT(KEY))
    h = pretrain.features(MODEL, "Dense_1", params, X, batch_size=8)
    body, head = params["Dense_0"], params["Dense_1"]
    expected = np.maximum(X @ body["kernel"] + body["bias"], 0)
    np.testing.assert_allclose(h, expected, rtol=1e-5, atol=1e-6)
    assert pretrain.features(MODEL, "Dense_1", params, X[:0]).shape == (0, 5)
    batch: Any = {"x": X, "y": np.zeros(20, np.int32)}
    losses = jax.jit(MODEL.metrics)(params, batch)["loss"]
    logits = h @ head["kernel"].T + head["bias"]
    expected = np.log(np.exp(logits).sum(1)) - logits[:, 0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    with pytest.raises(ValueError, match=r"head must name a layer .* got 'Dense_2'"):
        pretrain.features(MODEL, "Dense_2", params, X)


def test_training_moves_the_extractor_alone_and_lowers_the_loss(trained):
    params, loss = trained
    longer = dataclasses.replace(ONCE, work=LocalWork(batch_size=8, epochs=40))
    far, less = pretrain.contrastive(longer, MODEL, "Dense_1", X, KEY, shaken)
    assert less < loss
    # The head has no part in the loss: it stays as it was drawn.
    assert_same(params["Dense_1"], far["Dense_1"])
    assert np.abs(params["Dense_0"]["kernel"] - far["Dense_0"]["kernel"]).max() > 0.01


def test_running_statistics_are_those_of_the_views():
    model = models.classifier(Net(), (4,))
    params, _ = pretrain.contrastive(
        ONCE, model, "Dense_1", X, KEY, lambda key, x: jnp.asarray(x)
    )
    assert isinstance(params, Stateful)
    # One batch of twice the examples, with momentum 1/2 from a mean of 0; one step of
    # Adam moves a weight by 1e-3.
    hidden = X @ np.asarray(params.params["Dense_0"]["kernel"])
    got = params.stats["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(got, 0.5 * hidden.mean(0), atol=5e-3)
    assert pretrain.features(model, "Dense_1", params, X).shape == (20, 5)


def test_a_method_starts_from_the_extractor_with_a_head_of_its_own(trained):
    extractor, _ = trained
    plain = fedavg.make(fedavg.Config(), MODEL.loss)
    algorithm = pretrain.starting_from(plain, extractor, ("Dense_1",))
    fresh = INIT(jax.random.key(7))
    state = algorithm.init(fresh, 2)
    for name, leaves in state.params.items():
        expected = (fresh if name == "Dense_1" else extractor)[name]
        assert_same(leaves, expected)
    other = pretrain.starting_from(plain, fresh, ("Dense_1",))
    assert algorithm.parts["extractor"] != other.parts["extractor"]
    both = pretrain.starting_from(
        plain, (extractor, fresh), ("0/Dense_1", "1/Dense_1")
    ).init((fresh, extractor), 2)
    assert_same(both.params[0], state.params)
    assert_same(both.params[1]["Dense_1"], extractor["Dense_1"])


def test_a_linear_model_on_features_is_the_head_of_a_network_that_stays():
    params = INIT(KEY)
    y = RNG.integers(0, 3, 20).astype(np.int32)
    data = FederatedData(
        Packed({"x": X, "y": y}, np.array([0, 8, 20])), public={"x": X[:5], "s": y}
    )
    parts = {"Dense_0": "still", "Dense_1": "head"}
    optimizers: Any = {"still": optax.set_to_zero(), "head": optax.sgd(0.1)}
    config = fedavg.Config(work=LocalWork(batch_size=4, epochs=2))
    whole = fedavg.make(
        config,
        MODEL.loss,
        client_optimizer=optax.multi_transform(
            optimizers,
            {k: jax.tree.map(lambda _: v, params[k]) for k, v in parts.items()},  # noqa: B023
        ),
    )
    mapped = pretrain.on_features(
        lambda x: pretrain.features(MODEL, "Dense_1", params, x), data
    )
    linear = models.logistic_regression(5, 3)
    head = fedavg.make(config, linear.loss)
    ends = []
    for algorithm, start, split in (
        (whole, params, data.train),
        (head, {"Dense_0": params["Dense_1"]}, mapped.train),
    ):
        cohort = plan_round([0, 1], split, config.work, seed=0, round=0)
        ends.append(jax.jit(algorithm.round)(algorithm.init(start, 2), cohort, KEY)[0])
    assert_same(ends[0].params["Dense_0"], params["Dense_0"])
    got, expected = ends[1].params["Dense_0"], ends[0].params["Dense_1"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected
    )
    assert mapped.public["x"].shape == (5, 5)
    assert_same(mapped.public["s"], y)


def test_text_is_trained_on_by_its_next_word():
    model = models.char_lstm(num_ids=5, length=6, embedding=4, hidden=())
    text = np.tile(np.arange(1, 5), 10)[: 7 * 5].reshape(5, 7).astype(np.int32)
    examples: Any = {"x": text[:, :-1], "y": text[:, 1:]}
    start, adam = jax.jit(model.init)(KEY), optax.adam(0.03)
    work = LocalWork(batch_size=5, epochs=60)
    params, _ = jax.jit(server.fit, static_argnums=(0, 1, 5))(
        model.loss, adam, start, examples, KEY, work
    )
    loss = jax.jit(lambda params: model.loss(params, examples, KEY).mean())
    before, after = loss(start), loss(params)
    assert after < 0.5 * before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pretrain.Config(temperature=0.0), "temperature must be > 0"),
        (lambda: pretrain.Config(projection=(4, 0)), "projection must be >= 1, got 0"),
        (lambda: pretrain.Views(contrast=1.5), r"contrast must be in \[0, 1\)"),
        (lambda: pretrain.Views(shift=-1), "shift must be >= 0"),
    ],
)
def test_configs_name_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
