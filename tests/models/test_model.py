"""Models answer per example, and the zoo has the published sizes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import FederatedData, LocalWork, evaluate, models, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.models import classifier, language_model
from fedjax_core.models.model import Model

KEY = jax.random.key(0)
ZOO = {
    "logistic_regression": (lambda: models.logistic_regression(784, 62), (784,), 48670),
    "2nn": (lambda: models.mlp(784, 10), (784,), 199210),
    "mlp": (lambda: models.mlp(5, 3, hidden=(4,)), (5,), 24 + 15),
    "emnist_cnn": (models.emnist_cnn, (28, 28, 1), 1206590),
    "emnist_cnn_digits": (lambda: models.emnist_cnn(10), (28, 28, 1), 1199882),
    "cifar_cnn": (models.cifar_cnn, (32, 32, 3), 1626442),
    # 90 * 8 + 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1) + 90 * (256 + 1)
    "char_lstm": (models.char_lstm, (80,), 820522),
    "char_lstm_leaf": (
        lambda: models.char_lstm(80, every_position=False),
        (80,),
        820522 - 10 * (8 + 257),
    ),
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


def tiny():
    """A model of 5 ids out of 7, and its logits."""
    module = models.CharLSTM(7, 3, (4, 6))

    def logits(params, x) -> jax.Array:
        return module.apply({"params": params}, x)  # pyright: ignore

    return models.char_lstm(7, 5, 3, (4, 6)), jax.jit(logits)


def texts(sizes=(4,), seed=0, length=5):
    """Clients' pieces of text, ids 1 to 6, the last of each client part padding."""
    rng = np.random.default_rng(seed)
    clients = []
    for n in sizes:
        x, y = rng.integers(1, 7, (2, n, length), np.int32)
        if n:
            x[-1, 2:] = y[-1, 2:] = 0
        clients.append({"x": x, "y": y})
    return FederatedData.from_lists(clients)


def token_values(logits, y):
    """Cross-entropy and correctness of every token, and which ones are scored."""
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scored = y > 0
    loss = -np.take_along_axis(log_p, y[..., None], -1)[..., 0]
    return loss, logits.argmax(-1) == y, scored


def test_text_is_scored_where_there_is_a_target():
    (model, logits), packed = tiny(), texts().train
    params = model.init(KEY)
    x, y = packed.examples.values()
    loss, right, scored = token_values(logits(params, x), y)
    assert scored.sum() == 17
    batch = {k: jnp.asarray(v) for k, v in packed.examples.items()}
    expected = (loss * scored).sum(1) / scored.sum(1)
    got = jax.jit(model.loss)(params, batch, KEY)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    metrics = jax.jit(model.metrics)(params, batch)
    for name, values in (("loss", loss), ("accuracy", right)):
        total, count = metrics[name]
        np.testing.assert_allclose(total, (values * scored).sum(1), rtol=1e-5)
        np.testing.assert_array_equal(count, [5, 5, 5, 2])

    nothing = {**batch, "y": jnp.zeros_like(batch["y"])}
    value, gradient = jax.value_and_grad(lambda p: model.loss(p, nothing, KEY).sum())(
        params
    )
    assert value == 0
    assert all(not np.any(g) for g in jax.tree.leaves(gradient))


def test_evaluation_averages_over_tokens():
    sizes = (3, 0, 1, 6)
    (model, logits), packed = tiny(), texts(sizes).train
    params = model.init(KEY)
    x, y = packed.examples.values()
    loss, right, scored = token_values(logits(params, x), y)
    got = evaluate(model.metrics, params, packed)
    client = np.repeat(np.arange(4), sizes)
    for name, values in (("loss", loss), ("accuracy", right)):
        np.testing.assert_allclose(got.pooled[name], values[scored].mean(), rtol=1e-5)
        means = [values[client == i][scored[client == i]].mean() for i in (0, 2, 3)]
        np.testing.assert_allclose(got.client_mean[name], np.mean(means), rtol=1e-5)
        np.testing.assert_allclose(got.per_client[name], np.insert(means, 1, np.nan))


def test_future_and_hidden_rows_reach_nothing():
    (model, logits), packed = tiny(), texts().train
    params = model.init(KEY)
    batch = {k: jnp.asarray(v) for k, v in packed.examples.items()}
    later = batch["x"].at[:, 3:].set(1)
    now, then = (logits(params, x)[:, :3] for x in (batch["x"], later))
    np.testing.assert_array_equal(now, then)

    batch["example_mask"] = jnp.array([True, False, True, False])
    spoilt = {**batch, "x": batch["x"].at[1].set(999), "y": batch["y"].at[3].set(-9)}
    results = [
        jax.jit(jax.value_and_grad(mean_loss(model, b)))(params)
        for b in (batch, spoilt)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_one_character_from_many_is_the_last_position():
    every = models.CharLSTM(7, 3, (4,))
    last = models.CharLSTM(7, 3, (4,), every_position=False)
    x = texts().train.examples["x"]
    params = every.init(KEY, x)
    one, many = last.apply(params, x), every.apply(params, x)
    assert isinstance(one, jax.Array)
    assert isinstance(many, jax.Array)
    np.testing.assert_allclose(one, many[:, -1], rtol=1e-5)
    model = models.char_lstm(7, 5, 3, (4,), every_position=False)
    batch = {"x": jnp.asarray(x), "y": jnp.array([1, 0, 6, 2])}
    metrics = model.metrics(model.init(KEY), batch)
    assert metrics["loss"].shape == metrics["accuracy"].shape == (4,)


def test_a_federation_learns_a_sequence():
    x = np.tile(np.arange(1, 7, dtype=np.int32), 20)
    clients = [{"x": x[i:-1][:100].reshape(-1, 5)} for i in range(4)]
    for i, client in enumerate(clients):
        client["y"] = x[i + 1 :][:100].reshape(-1, 5)
    data = FederatedData.from_lists(clients, clients)
    model = models.char_lstm(7, 5, hidden=(16,))
    algorithm = fedavg.make(
        fedavg.Config(client_lr=2.0, work=LocalWork(batch_size=5)), model.loss
    )
    result = simulate(algorithm, data, model, rounds=20, cohort_size=4, progress=False)
    assert result.final("test_accuracy")[0] > 0.9


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
    with pytest.raises(ValueError, match="length must be >= 1"):
        language_model(nn.Dense(3), 0)
    model, _ = tiny()
    batch = {"x": jnp.zeros((4, 5), jnp.int32), "y": jnp.zeros(4, jnp.int32)}
    with pytest.raises(ValueError, match=r"5 targets per example, shape \(4, 5\)"):
        model.loss(model.init(KEY), batch, KEY)
