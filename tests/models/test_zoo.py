"""The larger networks: published sizes, and forward passes against plain NumPy."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_core import models
from fedjax_core.types import Stateful, trained

KEY = jax.random.key(0)
LR = 0.1


# ---- sizes ----


def conv(size, inputs, outputs):
    return size**2 * inputs * outputs + outputs


def dense(inputs, outputs):
    return inputs * outputs + outputs


def norm_conv(size, inputs, outputs):
    """A convolution without bias, and a scale and a shift for every channel."""
    return size**2 * inputs * outputs + 2 * outputs


VGG = (3, 32, 64, 128, 128, 128, 128, 128, 128)  # five poolings: 32 x 32 to 1 x 1
VGG11 = sum(conv(3, *pair) for pair in itertools.pairwise(VGG)) + sum(
    (dense(128, 128), dense(128, 128), dense(128, 10))
)


def resnet(blocks, classes):
    stages = [64 * 2**i for i in range(4)]
    total = norm_conv(3, 3, 64) + dense(512, classes)
    total += blocks * sum(2 * norm_conv(3, c, c) for c in stages)
    # The first block of a later stage comes from half the channels, and its shortcut.
    for c in stages[1:]:
        total += norm_conv(1, c // 2, c) - 9 * (c - c // 2) * c
    return total


def mobilenet(shrink):
    """Rows of Table 2 one block at a time: inputs, expansion, outputs, stride."""
    outputs = [16] + [24] * 2 + [32] * 3 + [64] * 4 + [96] * 3 + [160] * 3 + [320]
    outputs = [c // shrink for c in outputs]
    strided = {3, 6, 13}
    total, inputs = norm_conv(3, 3, 32), 32
    for i, c in enumerate(outputs):
        wide = inputs * (6 if i else 1)
        total += norm_conv(1, inputs, wide) + norm_conv(3, 1, wide)
        total += norm_conv(1, wide, c)
        total += norm_conv(1, inputs, c) if i not in strided and c != inputs else 0
        inputs = c
    last = 1280 // shrink
    return total + norm_conv(1, inputs, last) + dense(last, 10)


def transformer(v, t, d, depth, tied):
    attention = dense(d, 3 * d) + dense(d, d)
    block = attention + dense(d, 4 * d) + dense(4 * d, d) + 2 * 2 * d
    return v * d + t * d + depth * block + 2 * d + (0 if tied else dense(d, v))


# model, its size added up layer by layer, the size as printed or documented.
TWO_CNN = conv(5, 1, 32) + conv(5, 32, 64) + dense(7 * 7 * 64, 512) + dense(512, 10)
TWO_CNN_CIFAR = (
    conv(5, 3, 32) + conv(5, 32, 64) + dense(8 * 8 * 64, 512) + dense(512, 10)
)
KWS = conv(5, 1, 32) + conv(5, 32, 64) + dense(5 * 5 * 64, 512) + dense(512, 10)
SIZES = {
    "two_cnn": (models.two_cnn, TWO_CNN, 1663370),
    "two_cnn, CIFAR-10": (
        lambda: models.two_cnn(10, (32, 32, 3)),
        TWO_CNN_CIFAR,
        2156490,
    ),
    "kws_cnn": (models.kws_cnn, KWS, 876938),
    "vgg11_small": (models.vgg11_small, VGG11, 865482),
    "resnet8": (models.resnet8, resnet(1, 10), 4903242),
    "resnet8, 100 classes": (lambda: models.resnet8(100), resnet(1, 100), 4949412),
    "resnet18": (models.resnet18, resnet(2, 100), 11220132),
    "mobilenet_v2": (models.mobilenet_v2, mobilenet(1), 2296922),
    "mobilenet_v2, half": (
        lambda: models.mobilenet_v2(shrink=2),
        mobilenet(2),
        604178,
    ),
    "transformer_lm": (
        models.transformer_lm,
        transformer(90, 80, 128, 2, True),
        418560,
    ),
    "transformer_lm, untied": (
        lambda: models.transformer_lm(tied=False),
        transformer(90, 80, 128, 2, False),
        430170,
    ),
}


def shapes_of(model):
    return jax.eval_shape(model.init, KEY)


@functools.cache
def made(make):
    """A model of full size and the shapes of its parameters."""
    model = make()
    return model, shapes_of(model)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name):
    make, added_up, published = SIZES[name]
    leaves = jax.tree.leaves(trained(made(make)[1]))
    assert sum(leaf.size for leaf in leaves) == added_up == published


def test_both_normalisations_have_the_same_parameters():
    models_of = [models.ResNet(3, (1, 1), norm, 4) for norm in ("batch", "group")]
    batch, group = (shapes_of(models.classifier(m, (8, 8, 3))) for m in models_of)
    assert isinstance(batch, Stateful)
    assert not isinstance(group, Stateful)
    sizes = [
        sorted(x.size for x in jax.tree.leaves(trained(p))) for p in (batch, group)
    ]
    assert sizes[0] == sizes[1]


IMAGES = {
    "two_cnn": (models.two_cnn, (28, 28, 1)),
    "kws_cnn": (models.kws_cnn, (32, 32, 1)),
    "vgg11_small": (models.vgg11_small, (32, 32, 3)),
    "resnet8": (models.resnet8, (32, 32, 3)),
    "mobilenet_v2": (models.mobilenet_v2, (32, 32, 3)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_models_of_images_answer_per_example(name):
    make, shape = IMAGES[name]
    model, params = made(make)
    batch = {"x": jnp.zeros((4, *shape), jnp.uint8), "y": jnp.zeros(4, jnp.int32)}
    losses = jax.eval_shape(model.loss, params, batch, KEY)
    if isinstance(params, Stateful):
        losses, stats = losses
        assert jax.tree.structure(stats) == jax.tree.structure(params.stats)
    metrics = jax.eval_shape(model.metrics, params, batch)
    assert set(metrics) == {"loss", "accuracy"}
    for x in (losses, *metrics.values()):
        assert (x.shape, x.dtype) == ((4,), jnp.float32)


# ---- networks of every kind, as small as they get ----

ROWS = ((1, 4, 1, 1), (2, 8, 2, 2))
TINY = {
    "vgg": lambda how: models.CNN(3, ((4,), (4, 6)), padding="SAME", lowering=how),
    "resnet": lambda how: models.ResNet(3, (1, 1), "batch", 4, how),
    "resnet, group": lambda how: models.ResNet(3, (1, 1), "group", 4, how),
    "mobilenet, group": lambda how: models.MobileNetV2(3, "group", 2, ROWS, how),
    "transformer": lambda how: models.TransformerLM(7, 8, 2, 2),
}
TRAINED = ("vgg", "resnet", "mobilenet, group", "transformer")


def tiny(name, how="auto"):
    """A model, and batches of two clients [2, 4, ...], the last row padding."""
    rng, module = np.random.default_rng(0), TINY[name](how)
    mask = jnp.tile(jnp.arange(4) < 3, (2, 1))
    if name == "transformer":
        x, y = jnp.asarray(rng.integers(1, 7, (2, 2, 4, 5), np.int32))
        return models.language_model(module, 5), {"x": x, "y": y, "example_mask": mask}
    x = jnp.asarray(rng.standard_normal((2, 4, 8, 8, 2)), jnp.float32)
    y = jnp.tile(jnp.asarray([0, 1, 2, 0], jnp.int32), (2, 1))
    return models.classifier(module, (8, 8, 2)), {"x": x, "y": y, "example_mask": mask}


def drawn(shapes):
    """Parameters away from the ones and zeros that scales and biases start from."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jnp.asarray(0.3 + 0.5 * rng.standard_normal(s.shape), s.dtype), shapes
    )


def mean_loss(model, batch):
    """The mean loss of the real rows as a function of (trained, params)."""

    def f(weights, params):
        if isinstance(params, Stateful):
            losses, stats = model.loss(Stateful(weights, params.stats), batch, KEY)
        else:
            losses, stats = model.loss(weights, batch, KEY), ()
        mask = batch["example_mask"]
        return jnp.where(mask, losses, 0).sum() / mask.sum(), stats

    return jax.value_and_grad(f, has_aux=True)


def descend(model, params, batch, steps=6):
    """Losses of steps of SGD, and the last params."""

    def step(params, _):
        weights = trained(params)
        (loss, stats), gradient = mean_loss(model, batch)(weights, params)
        weights = jax.tree.map(lambda w, g: w - LR * g, weights, gradient)
        new = Stateful(weights, stats) if isinstance(params, Stateful) else weights
        return new, loss

    params, losses = lax.scan(step, params, length=steps)
    return losses, params


def assert_close(got, expected, rtol=1e-3):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10),
        got,
        expected,
    )


@pytest.mark.parametrize("name", TRAINED)
def test_clients_side_by_side_learn_on_their_own(name):
    model, batches = tiny(name)
    params = jax.jit(model.init)(KEY)
    learn = jax.jit(jax.vmap(lambda batch: descend(model, params, batch)))
    together = learn(batches)
    losses = together[0]
    assert np.all(losses[:, -1] < losses[:, 0])
    # What padding holds reaches nothing, running statistics neither.
    spoilt = learn({**batches, "x": batches["x"].at[:, 3].set(99)})
    jax.tree.map(np.testing.assert_array_equal, together, spoilt)
    # Beside another client, and in another place.
    other = {**batches, "x": batches["x"].at[0].set(1)}
    moved = learn(jax.tree.map(lambda x: x[::-1], other))
    first, second = (
        jax.tree.map(lambda x, i=i: x[i], t) for i, t in ((0, moved), (1, together))
    )
    assert_close(first, second)


@pytest.mark.parametrize("name", TRAINED)
def test_steps_lower_for_accelerators_from_any_machine(name):
    for platform, how in (("cuda", "patches"), ("tpu", "lax")):
        model, batches = tiny(name, how)
        step = jax.vmap(lambda params, b, m=model: descend(m, params, b, 1), (None, 0))
        exported = jax.export.export(jax.jit(step), platforms=[platform])(
            shapes_of(model), batches
        )
        assert exported.platforms == (platform,)


# ---- forward passes in float64 ----


def np_conv(x, kernel, stride=1):
    """Cross-correlation padded as "SAME"; one input channel of several is depthwise."""
    size = kernel.shape[0]
    out = -(-x.shape[1] // stride)
    pad = max((out - 1) * stride + size - x.shape[1], 0)
    sides = (pad // 2, pad - pad // 2)
    x = np.pad(x, ((0, 0), sides, sides, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    windows = windows[:, ::stride, ::stride]
    if kernel.shape[2] < x.shape[3]:
        return np.einsum("bijchw,hwc->bijc", windows, kernel[:, :, 0])
    return np.einsum("bijchw,hwcf->bijf", windows, kernel)


def np_group_norm(x, weights):
    groups = x.reshape(*x.shape[:3], 2, -1)
    mean = groups.mean((1, 2, 4), keepdims=True)
    var = groups.var((1, 2, 4), keepdims=True)
    unit = ((groups - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)
    return unit * weights["scale"] + weights["bias"]


class Layers:
    """The layers of a network in the order in which it makes them."""

    def __init__(self, params):
        self.params, self.used = params, {}

    def __call__(self, kind):
        i = self.used.setdefault(kind, 0)
        self.used[kind] += 1
        return self.params[f"{kind}_{i}"]

    def conv(self, x, stride=1, kind="Conv"):
        x = np_conv(x, self(kind)["kernel"], stride)
        return np_group_norm(x, self("_Norm")["GroupNorm_0"])

    def head(self, x):
        head = self("Dense")
        return x.mean((1, 2)) @ head["kernel"].T + head["bias"]


def np_resnet(params, x):
    layer = Layers(params)
    x = np.maximum(layer.conv(x), 0)
    for stride in (1, 2):
        y = np.maximum(layer.conv(x, stride), 0)
        y = layer.conv(y)
        x = layer.conv(x, stride) if x.shape != y.shape else x
        x = np.maximum(x + y, 0)
    return layer.head(x)


def np_mobilenet(params, x):
    layer = Layers(params)
    x = np.maximum(layer.conv(x), 0)
    for stride in (1, 2, 1):
        y = np.maximum(layer.conv(x), 0)
        y = np.maximum(layer.conv(y, stride, "DepthwiseConv"), 0)
        y = layer.conv(y)
        if stride == 1:
            y = y + (layer.conv(x) if x.shape != y.shape else x)
        x = y
    return layer.head(np.maximum(layer.conv(x), 0))


def np_layer_norm(x, weights):
    unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return unit * weights["scale"] + weights["bias"]


def np_transformer(params, ids, heads=2, depth=2):
    layer = Layers(params)

    def dense(x):
        weights = layer("Dense")
        return x @ weights["kernel"] + weights["bias"]

    x = params["embedding"][ids] + params["positions"]
    batch, length, width = x.shape
    for _ in range(depth):
        y = dense(np_layer_norm(x, layer("LayerNorm")))
        parts = np.split(y, 3, axis=-1)
        q, k, v = (p.reshape(batch, length, heads, -1) for p in parts)
        scores = np.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(width / heads)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + dense(np.einsum("bhij,bjhc->bihc", shares, v).reshape(x.shape))
        y = dense(np_layer_norm(x, layer("LayerNorm")))
        # GELU in its approximation by tanh.
        inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
        x = x + dense(y * (1 + np.tanh(inner)) / 2)
    return np_layer_norm(x, layer("LayerNorm")) @ params["embedding"].T


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("resnet, group", np_resnet),
        ("mobilenet, group", np_mobilenet),
        ("transformer", np_transformer),
    ],
)
def test_logits_are_those_of_plain_numpy(name, reference):
    x = tiny(name)[1]["x"][0]
    module = TINY[name]("auto")
    told = () if name == "transformer" else (True,)
    params = drawn(jax.eval_shape(module.init, KEY, x, *told))
    logits = jax.jit(module.apply)(params, x, *told)
    exact = jax.tree.map(lambda w: np.asarray(w, np.float64), params["params"])
    x = np.asarray(x) if name == "transformer" else np.asarray(x, np.float64)
    np.testing.assert_allclose(logits, reference(exact, x), rtol=1e-3, atol=1e-4)


# ---- the transformer ----


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformer_sees_no_later_token(tied):
    module = models.TransformerLM(7, 8, 2, 2, tied)
    x = tiny("transformer")[1]["x"][0]
    logits = jax.jit(
        functools.partial(module.apply, drawn(jax.eval_shape(module.init, KEY, x)))
    )
    now, then = logits(x), logits(x.at[:, 3:].set(1))
    np.testing.assert_array_equal(now[:, :3], then[:, :3])
    assert not np.allclose(now[:, 3:], then[:, 3:])


def test_padding_of_a_text_is_neither_scored_nor_seen():
    model = models.transformer_lm(7, 5, 8, 1, 2)
    x = tiny("transformer")[1]["x"][0]
    y = jnp.roll(x, -1, 1)
    padded = {"x": x.at[:, 3:].set(0), "y": y.at[:, 2:].set(0)}
    other = {**padded, "x": x.at[:, 3:].set(5)}

    params = drawn(shapes_of(model))

    @jax.jit
    def run(batch):
        gradient = jax.grad(lambda p: model.loss(p, batch, KEY).sum())(params)
        return model.metrics(params, batch), gradient

    metrics, gradient = run(padded)
    np.testing.assert_array_equal(metrics["accuracy"].count, [2] * 4)
    assert_close((metrics, gradient), run(other), rtol=1e-5)
    assert model.ids["x"].num == model.ids["y"].num == 7
    assert model.ids["y"].missing == 0


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="heads must divide width, 8, got 3"):
        models.transformer_lm(width=8, heads=3)
    with pytest.raises(ValueError, match="depth must be >= 1, got 0"):
        models.transformer_lm(depth=0)
    with pytest.raises(ValueError, match="norm must be one of"):
        models.resnet8(norm="layer")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="shrink must be >= 1"):
        models.mobilenet_v2(shrink=0)
    with pytest.raises(ValueError, match="num_classes must be >= 1"):
        models.vgg11_small(0)
