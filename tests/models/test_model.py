"""Models answer per example, and the zoo has the published sizes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import FederatedData, LocalWork, evaluate, models, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.models import classifier, language_model, layers
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


class Tiny(nn.Module):
    """What `CNN` is made of, as small as it gets."""

    lowering: layers.Lowering = "auto"

    @nn.compact
    def __call__(self, x):
        x = layers.Conv(3, lowering=self.lowering)(x)
        x = nn.relu(layers.max_pool(x, lowering=self.lowering))
        return layers.Dense(3)(x.reshape(x.shape[0], -1))


# Every kind of the zoo: model, shape of an example.
KINDS = {
    "logistic_regression": (models.logistic_regression(6, 3), (6,)),
    "mlp": (models.mlp(6, 3, hidden=(5,)), (6,)),
    "cnn": (models.classifier(Tiny(), (6, 6, 1)), (6, 6, 1)),
    "cnn_lax": (models.classifier(Tiny("lax"), (6, 6, 1)), (6, 6, 1)),
}


@pytest.mark.parametrize("name", ["emnist_cnn", "cifar_cnn"])
def test_shapes_and_dtypes_of_the_large_networks(name):
    make, shape, _ = ZOO[name]
    model, batch = make(), batch_of(shape)

    def values(batch):
        params = model.init(KEY)
        return model.loss(params, batch, KEY), model.metrics(params, batch)

    loss, metrics = jax.eval_shape(values, batch)
    assert set(metrics) == {"loss", "accuracy"}
    for x in (loss, *metrics.values()):
        assert (x.shape, x.dtype) == ((4,), jnp.float32)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_values_are_per_example_and_rows_do_not_mix(name):
    model, shape = KINDS[name]
    batch, params = batch_of(shape), jax.jit(model.init)(KEY)
    batch.pop("example_mask")

    @jax.jit
    def values(batch):
        return model.loss(params, batch, KEY), model.metrics(params, batch)

    loss, metrics = values(batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_array_equal(np.isin(metrics["accuracy"], [0, 1]), True)
    # Row 2 beside other rows.
    others = batch["x"].at[jnp.array([0, 1, 3])].multiply(-3.0)
    np.testing.assert_allclose(values({**batch, "x": others})[0][2], loss[2], rtol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_integers_train_like_floats(name):
    model, shape = KINDS[name]
    batch = batch_of(shape)
    bits = np.random.default_rng(0).integers(0, 2, batch["x"].shape)

    @jax.jit
    def results(params, bits):
        return [
            jax.value_and_grad(mean_loss(model, {**batch, "x": bits.astype(dtype)}))(
                params
            )
            for dtype in ("float32", "uint8", "int32", "bool")
        ]

    expected, *got = results(jax.jit(model.init)(KEY), jnp.asarray(bits))
    for values in got:
        jax.tree.map(np.testing.assert_array_equal, values, expected)
    assert all(np.any(g) for g in jax.tree.leaves(expected[1]))


@pytest.mark.parametrize("name", KINDS)
def test_float64_stays_float64(name, x64):
    model, shape = KINDS[name]
    batch = batch_of(shape)
    batch["x"] = batch["x"].astype(jnp.float64)
    wide = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float64),
        jax.eval_shape(model.init, KEY),
    )
    values = jax.eval_shape(
        lambda p: (jax.value_and_grad(mean_loss(model, batch))(p), p), wide
    )
    assert {x.dtype for x in jax.tree.leaves(values)} == {jnp.dtype(jnp.float64)}


def test_debugging_aids_find_nothing_to_complain_about():
    jax.config.update("jax_debug_nans", True)
    try:
        model, shape = KINDS["mlp"]
        batch, params = batch_of(shape), jax.jit(model.init)(KEY)
        expected = jax.jit(jax.value_and_grad(mean_loss(model, batch)))(params)
        with jax.disable_jit():
            got = jax.value_and_grad(mean_loss(model, batch))(params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            got,
            expected,
        )
    finally:
        jax.config.update("jax_debug_nans", False)


def test_a_label_out_of_range_is_nan_and_not_learned():
    model, batch = models.logistic_regression(6, 5), batch_of((6,), 5)
    batch.pop("example_mask")

    @jax.jit
    def values(batch):
        params = model.init(KEY)
        gradient = jax.grad(lambda p: model.loss(p, batch, KEY).sum())(params)
        return model.loss(params, batch, KEY), gradient, model.metrics(params, batch)

    for label in (-1, 5, 255):
        wrong = np.array(batch["y"])
        wrong[2] = label
        losses, gradient, metrics = values({**batch, "y": wrong})
        for x in (losses, metrics["loss"], metrics["accuracy"]):
            np.testing.assert_array_equal(np.isnan(x), [False, False, True, False])
        assert all(np.isnan(g).any() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("missing", [-1, 255])
def test_missing_labels_are_not_scored(missing):
    module = nn.Dense(3)
    plain = models.classifier(module, (6,))
    model = models.classifier(module, (6,), missing=missing)
    batch = batch_of((6,))
    batch.pop("example_mask")
    hole = {**batch, "y": batch["y"].at[1].set(missing)}
    rest = {k: v[np.array([0, 2, 3])] for k, v in batch.items()}

    @jax.jit
    def values(hole, rest):
        params = model.init(KEY)
        return (
            model.loss(params, hole, KEY),
            plain.loss(params, rest, KEY),
            jax.grad(lambda p: model.loss(p, hole, KEY).sum())(params),
            jax.grad(lambda p: plain.loss(p, rest, KEY).sum())(params),
            model.metrics(params, hole)["loss"],
        )

    losses, expected, got, others, loss = values(hole, rest)
    expected = np.insert(expected, 1, 0)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, others)
    np.testing.assert_allclose(loss.total, expected, rtol=1e-6)
    np.testing.assert_array_equal(loss.count, [1, 0, 1, 1])


def test_cross_entropy_and_accuracy_match_the_formula():
    model, batch = models.logistic_regression(6, 5), batch_of((6,), 5)
    batch.pop("example_mask")
    params = jax.jit(model.init)(KEY)
    (dense,) = params.values()
    kernel, bias = np.asarray(dense["kernel"]), np.asarray(dense["bias"])
    logits = np.asarray(batch["x"], np.float64) @ kernel.T + bias
    y = np.asarray(batch["y"])
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), y]
    metrics = jax.jit(model.metrics)(params, batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_array_equal(metrics["accuracy"], logits.argmax(1) == y)


@pytest.mark.parametrize("name", ["logistic_regression", "cnn"])
def test_masked_rows_may_hold_anything(name):
    model, shape = KINDS[name]
    batch = batch_of(shape)
    spoilt = dict(batch)
    hidden = np.array([1, 3])
    spoilt["x"] = batch["x"].at[hidden].set(jnp.nan)
    spoilt["y"] = batch["y"].at[hidden].set(-7)
    params = jax.jit(model.init)(KEY)
    run = jax.jit(lambda batch: jax.value_and_grad(mean_loss(model, batch))(params))
    jax.tree.map(np.testing.assert_array_equal, run(spoilt), run(batch))


def test_lowerings_agree_on_loss_and_gradient():
    batch = batch_of((28, 28, 1))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: np.float32(0.05 * rng.standard_normal(s.shape)),
        jax.eval_shape(models.emnist_cnn().init, KEY),
    )
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
    init = jax.jit(model.init)
    first, again, other = (init(jax.random.key(i)) for i in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    kernels = [p["Dense_0"]["kernel"] for p in (first, other)]
    assert not np.allclose(*kernels)


def tiny():
    """A model of 5 ids out of 7, and its logits."""
    module = models.CharLSTM(7, 3, (4, 6))

    def logits(params, x) -> jax.Array:
        return module.apply({"params": params}, x)  # pyright: ignore

    return models.char_lstm(7, 5, 3, (4, 6)), jax.jit(logits)


@pytest.fixture(scope="module")
def text_model():
    """The tiny model, its logits, its parameters, and all values of a batch."""
    model, logits = tiny()

    @jax.jit
    def values(params, batch):
        loss, gradient = jax.value_and_grad(mean_loss(model, batch))(params)
        each = model.loss(params, batch, KEY)
        return loss, gradient, each, model.metrics(params, batch)

    return model, logits, jax.jit(model.init)(KEY), values


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


def test_text_is_scored_where_there_is_a_target(text_model):
    (_, logits, params, values_of), packed = text_model, texts().train
    x, y = packed.examples.values()
    loss, right, scored = token_values(logits(params, x), y)
    assert scored.sum() == 17
    batch = {k: jnp.asarray(v) for k, v in packed.examples.items()}
    batch["example_mask"] = jnp.ones(4, bool)
    expected = (loss * scored).sum(1) / scored.sum(1)
    _, _, got, metrics = values_of(params, batch)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for name, values in (("loss", loss), ("accuracy", right)):
        total, count = metrics[name]
        np.testing.assert_allclose(total, (values * scored).sum(1), rtol=1e-5)
        np.testing.assert_array_equal(count, [5, 5, 5, 2])

    nothing = {**batch, "y": jnp.zeros_like(batch["y"])}
    value, gradient, _, _ = values_of(params, nothing)
    assert value == 0
    assert all(not np.any(g) for g in jax.tree.leaves(gradient))


def test_evaluation_averages_over_tokens(text_model):
    sizes = (3, 0, 1, 6)
    (model, logits, params, _), packed = text_model, texts(sizes).train
    x, y = packed.examples.values()
    loss, right, scored = token_values(logits(params, x), y)
    got = evaluate(model.metrics, params, packed)
    client = np.repeat(np.arange(4), sizes)
    for name, values in (("loss", loss), ("accuracy", right)):
        np.testing.assert_allclose(got.pooled[name], values[scored].mean(), rtol=1e-5)
        means = [values[client == i][scored[client == i]].mean() for i in (0, 2, 3)]
        np.testing.assert_allclose(got.client_mean[name], np.mean(means), rtol=1e-5)
        np.testing.assert_allclose(got.per_client[name], np.insert(means, 1, np.nan))
    # Perplexity is the exponential of the mean over tokens, not a mean over texts.
    np.testing.assert_allclose(
        got.pooled["perplexity"], np.exp(loss[scored].mean()), rtol=1e-5
    )
    np.testing.assert_allclose(
        got.per_client["perplexity"], np.exp(got.per_client["loss"]), rtol=1e-5
    )


def test_future_and_hidden_rows_reach_nothing(text_model):
    (_, logits, params, values_of), packed = text_model, texts().train
    batch = {k: jnp.asarray(v) for k, v in packed.examples.items()}
    later = batch["x"].at[:, 3:].set(1)
    now, then = (logits(params, x)[:, :3] for x in (batch["x"], later))
    np.testing.assert_array_equal(now, then)

    batch["example_mask"] = jnp.array([True, False, True, False])
    spoilt = {**batch, "x": batch["x"].at[1].set(999), "y": batch["y"].at[3].set(-9)}
    results = [values_of(params, b)[:2] for b in (batch, spoilt)]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_one_character_from_many_is_the_last_position():
    every = models.CharLSTM(7, 3, (4,))
    last = models.CharLSTM(7, 3, (4,), every_position=False)
    x = texts().train.examples["x"]
    params = jax.jit(every.init)(KEY, x)
    one, many = (jax.jit(m.apply)(params, x) for m in (last, every))
    assert isinstance(one, jax.Array)
    assert isinstance(many, jax.Array)
    np.testing.assert_allclose(one, many[:, -1], rtol=1e-5)
    model = models.char_lstm(7, 5, 3, (4,), every_position=False)
    batch = {"x": jnp.asarray(x), "y": jnp.array([1, 0, 6, 2])}
    metrics = jax.eval_shape(lambda: model.metrics(model.init(KEY), batch))
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
    params = jax.jit(model.init)(KEY)
    with pytest.raises(ValueError, match=r"batch\['x'\] must have shape \(B, \*\(5,\)"):
        model.loss(params, {**batch, "x": jnp.zeros((4, 6))}, KEY)
    with pytest.raises(ValueError, match="one label per example"):
        model.loss(params, {**batch, "y": jnp.zeros((4, 1), jnp.int32)}, KEY)
    with pytest.raises(
        TypeError,
        match=r"must be integer, got float32; cast labels by y.astype\('int32'\)",
    ):
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
        jax.eval_shape(lambda: model.loss(model.init(KEY), batch, KEY))
