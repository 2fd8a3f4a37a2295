"""Every lowering of convolution and pooling computes what `lax` computes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_core.models import layers


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def reference_conv(x, kernel, padding, stride=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // kernel.shape[-2],
    )


def reference_pool(x, window):
    window = (1, *window, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def with_gradients(f, cotangent):
    """Value and vector-Jacobian product of f."""

    def run(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(cotangent)

    return run


def assert_close(got, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        got,
        expected,
    )


LOWERINGS: tuple[layers.Lowering, ...] = ("auto", "patches", "lax")
SIZES = ((3, 3), (2, 5), (1, 1))


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_conv_matches_lax_with_gradients(padding):
    @jax.jit
    def compare(x):
        pairs = []
        for i, size in enumerate(SIZES):
            kernel = normal(1 + i, *size, 3, 4)
            cotangent = normal(5, *reference_conv(x, kernel, padding).shape)
            run = partial(with_gradients, cotangent=cotangent)
            expected = run(lambda x, k: reference_conv(x, k, padding))(x, kernel)
            for how in LOWERINGS:
                got = run(partial(layers.conv, padding=padding, lowering=how))
                pairs.append((got(x, kernel), expected))
        return pairs

    for got, expected in compare(normal(0, 2, 7, 8, 3)):
        assert_close(got, expected)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("size", "stride"), [((3, 3), 2), ((2, 5), 3), ((1, 1), 2)])
def test_a_strided_conv_matches_lax_with_gradients(padding, size, stride):
    @jax.jit
    def compare(x):
        kernel = normal(1, *size, 3, 4)
        shape = reference_conv(x, kernel, padding, stride).shape
        run = partial(with_gradients, cotangent=normal(2, *shape))
        expected = run(lambda x, k: reference_conv(x, k, padding, stride))(x, kernel)
        one = partial(layers.conv, padding=padding, lowering="patches", stride=stride)
        return run(one)(x, kernel), expected

    assert_close(*compare(normal(0, 2, 7, 8, 3)))


@pytest.mark.parametrize("stride", [1, 2])
def test_every_channel_alone_matches_lax_with_gradients(stride):
    @jax.jit
    def compare(x, kernel):
        shape = reference_conv(x[0], kernel[0], "SAME", stride).shape
        run = partial(with_gradients, cotangent=normal(2, *shape))
        reference = run(lambda x, k: reference_conv(x, k, "SAME", stride))
        alone = [reference(x[i], kernel[i]) for i in range(2)]
        got = []
        for how in LOWERINGS:
            one = run(partial(layers.depthwise_conv, stride=stride, lowering=how))
            got.append(jax.vmap(one)(x, kernel))  # two clients
        return got, jax.tree.map(lambda *rows: jnp.stack(rows), *alone)

    got, expected = compare(normal(0, 2, 2, 7, 8, 4), normal(1, 2, 3, 3, 1, 4))
    for values in got:
        assert_close(values, expected)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize("kernel_axis", [0, None])
def test_conv_under_vmap_over_clients(padding, kernel_axis):
    kernel = normal(1, 3, 3, 3, 2, 4) if kernel_axis == 0 else normal(1, 3, 3, 2, 4)

    @jax.jit
    def compare(x):
        kernels = kernel if kernel_axis == 0 else jnp.stack([kernel] * 3)
        shape = reference_conv(x[0], kernels[0], padding).shape
        run = partial(with_gradients, cotangent=normal(2, *shape))
        reference = run(lambda x, k: reference_conv(x, k, padding))
        alone = [reference(x[i], kernels[i]) for i in range(3)]
        got = []
        for how in LOWERINGS:
            one = run(partial(layers.conv, padding=padding, lowering=how))
            got.append(jax.vmap(one, in_axes=(0, kernel_axis))(x, kernel))
        return got, jax.tree.map(lambda *rows: jnp.stack(rows), *alone)

    got, expected = compare(normal(0, 3, 2, 6, 6, 2))
    for values in got:
        assert_close(values, expected)


def test_conv_inside_a_loop_with_a_data_dependent_bound():
    x, kernel, cotangent = (
        normal(0, 2, 6, 6, 1),
        normal(1, 3, 3, 1, 2),
        normal(2, 2, 4, 4, 2),
    )

    def descend(conv):
        def step(_, kernel):
            _, (_, gradient) = with_gradients(conv, cotangent)(x, kernel)
            return kernel - 0.01 * gradient

        return jax.jit(lambda n: lax.fori_loop(0, n, step, kernel))(3)

    assert_close(
        descend(layers.conv), descend(lambda x, k: reference_conv(x, k, "VALID"))
    )


@pytest.mark.parametrize("patch_bytes", [1, 3 * 16 * 18 * 4])  # 1 and 3 of 6 images
def test_conv_in_chunks_of_the_batch(monkeypatch, patch_bytes):
    monkeypatch.setattr(layers, "_PATCH_BYTES_CPU", patch_bytes)
    x, kernel, cotangent = (
        normal(0, 6, 6, 6, 2),
        normal(1, 3, 3, 2, 4),
        normal(2, 6, 4, 4, 4),
    )
    got = with_gradients(lambda x, k: layers.conv(x, k, "VALID", "patches"), cotangent)
    expected = with_gradients(lambda x, k: reference_conv(x, k, "VALID"), cotangent)
    assert_close(jax.jit(got)(x, kernel), expected(x, kernel))


def test_max_pool_sends_the_gradient_to_the_first_maximum():
    x = jnp.asarray([[[1.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])[..., None]

    @jax.jit
    def gradients(x):
        run = partial(with_gradients, cotangent=jnp.ones((2, 1, 1, 1)))
        pool = [partial(layers.max_pool, lowering=how) for how in LOWERINGS]
        return [run(one)(x)[1] for one in pool]

    for (gradient,) in gradients(x):
        np.testing.assert_array_equal(gradient.reshape(2, 4), [[1, 0, 0, 0]] * 2)


@pytest.mark.parametrize("window", [(2, 2), (2, 3), (1, 1)])
def test_max_pool_matches_reduce_window_with_gradients(window):
    @jax.jit
    def compare(x):
        cotangent = normal(1, *reference_pool(x, window).shape)
        run = partial(with_gradients, cotangent=cotangent)
        reference = run(lambda x: reference_pool(x, window))
        clients = jnp.stack([x, -x, 2 * x])
        alone = [reference(client) for client in clients]
        expected = reference(x), jax.tree.map(lambda *r: jnp.stack(r), *alone)
        got = []
        for how in LOWERINGS:
            one = run(partial(layers.max_pool, window=window, lowering=how))
            got.append((one(x), jax.vmap(one)(clients)))
        return got, expected

    got, expected = compare(normal(0, 2, 4, 6, 3))
    for values in got:
        assert_close(values, expected)


def test_max_pool_drops_what_does_not_fill_a_window():
    x = normal(0, 1, 5, 7, 2)
    assert_close(layers.max_pool(x), reference_pool(x, (2, 2)))
    with pytest.raises(ValueError, match="window must divide the image, 5 x 7"):
        layers.max_pool(x, lowering="patches")


def test_conv_module_is_convolution_plus_bias():
    x = normal(0, 2, 5, 5, 3)
    params = {"kernel": normal(1, 3, 2, 3, 4), "bias": normal(2, 4)}
    expected = reference_conv(x, params["kernel"], "SAME")
    expected += params["bias"].reshape(1, 1, 1, 4)
    plain = layers.Conv(4, (3, 2), padding="SAME", use_bias=False)
    shapes = jax.eval_shape(plain.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(lambda s: s.shape, shapes) == {"kernel": (3, 2, 3, 4)}
    for how in LOWERINGS:
        module = layers.Conv(4, (3, 2), padding="SAME", lowering=how)
        shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
        assert jax.tree.map(lambda s: s.shape, shapes) == {
            "kernel": (3, 2, 3, 4),
            "bias": (4,),
        }
        assert_close(jax.jit(module.apply)({"params": params}, x), expected)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_images_of_integers_are_images_of_floats(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 4, 4, 1)))

    @jax.jit
    def values(x):
        kernel = normal(1, 3, 3, 1, 2)
        return [layers.max_pool(x, lowering=how) for how in LOWERINGS] + [
            layers.conv(x, kernel, lowering=how) for how in LOWERINGS
        ]

    got, expected = values(x.astype(dtype)), values(x.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_errors_name_the_argument():
    x, kernel = normal(0, 1, 4, 4, 3), normal(1, 3, 3, 2, 4)
    with pytest.raises(ValueError, match="kernel must take the 3 channels of x"):
        layers.conv(x, kernel)
    with pytest.raises(ValueError, match="kernel must fit into the image, 4 x 4"):
        layers.conv(x, normal(1, 5, 3, 3, 4))
    with pytest.raises(ValueError, match="padding must be one of"):
        layers.conv(x, kernel, "FULL")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="stride must be >= 1, got 0"):
        layers.conv(x, kernel, stride=0)
    with pytest.raises(ValueError, match="lowering must be one of"):
        layers.max_pool(x, lowering="eigen")  # pyright: ignore[reportArgumentType]
