"""Winograd's form is the convolution, in value and in every derivative."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.models import layers, winograd

# Tiles that fill the image and not, in rows and in columns.
SHAPES = [(3, 6, 6, 4, 5), (2, 10, 13, 3, 4), (1, 4, 9, 1, 2)]


def normal(seed, *shape, dtype: Any = np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def plain(x, kernel):
    """The sum over the nine places of the kernel, in NumPy or jax."""
    height, width = x.shape[1] - 2, x.shape[2] - 2
    return sum(
        x[:, i : i + height, j : j + width] @ kernel[i, j]
        for i in range(3)
        for j in range(3)
    )


@pytest.mark.parametrize("tile_bytes", [winograd._TILE_BYTES, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_sum_over_the_kernel_with_both_derivatives(
    shape, tile_bytes, x64, monkeypatch
):
    monkeypatch.setattr(winograd, "_TILE_BYTES", tile_bytes)  # one by one
    batch, height, width, channels, features = shape
    x = normal(0, batch, height, width, channels)
    kernel = normal(1, 3, 3, channels, features)
    dy = normal(2, batch, height - 2, width - 2, features)
    y, pull = jax.vjp(jax.jit(winograd.conv), x, kernel)
    dx, dkernel = pull(dy)
    np.testing.assert_allclose(y, plain(x, kernel), atol=1e-12)
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    around = np.pad(dy, ((0, 0), (2, 2), (2, 2), (0, 0)))
    np.testing.assert_allclose(dx, plain(around, turned), atol=1e-12)
    for i in range(3):
        for j in range(3):
            seen = x[:, i : i + height - 2, j : j + width - 2]
            np.testing.assert_allclose(
                dkernel[i, j],
                np.tensordot(seen, dy, ([0, 1, 2], [0, 1, 2])),
                atol=1e-12,
            )


def test_derivatives_of_derivatives(x64):
    x, kernel = normal(0, 1, 7, 7, 2), normal(1, 3, 3, 2, 3)

    def steep(f):
        def slope(x):
            return jax.grad(lambda x: jnp.sin(f(x, kernel)).sum())(x)

        return jax.jit(jax.grad(lambda x: jnp.square(slope(x)).sum()))(x)

    np.testing.assert_allclose(steep(winograd.conv), steep(plain), rtol=1e-9)


def test_rounding_is_below_1e_5_of_the_largest_output():
    x, kernel = normal(0, 4, 18, 18, 32, dtype=np.float32), normal(1, 3, 3, 32, 16)
    kernel = kernel.astype(np.float32)
    exact = plain(x.astype(np.float64), kernel.astype(np.float64))
    got = jax.jit(winograd.conv)(x, kernel)
    assert got.dtype == jnp.float32
    assert np.abs(got - exact).max() < 1e-5 * np.abs(exact).max()


def test_clients_side_by_side_have_kernels_of_their_own():
    x = normal(0, 3, 16, 6, 6, 4, dtype=np.float32)
    kernel = normal(1, 3, 3, 3, 4, 2, dtype=np.float32)
    got = jax.jit(jax.vmap(layers.conv))(x, kernel)
    for i in range(3):
        np.testing.assert_allclose(got[i], plain(x[i], kernel[i]), atol=1e-4)


def ones(*shape, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def test_it_stands_in_where_it_pays():
    def by_place(x, kernel, **how):
        text = str(jax.make_jaxpr(lambda x, k: layers.conv(x, k, **how))(x, kernel))
        return "36,16" in text  # of 36 places, 16 tiles

    x, kernel = ones(16, 6, 6, 4), ones(3, 3, 4, 2)
    assert by_place(x, kernel) == (jax.default_backend() == "cpu")
    assert not by_place(x, kernel, lowering="patches")
    assert not by_place(x, kernel, stride=2)
    assert winograd.pays(ones(4, 9, 9, 4), kernel)  # 7 of 8 pixels are in the image
    for other, its_kernel in (
        (x[..., :3], kernel[:, :, :3]),  # few channels
        (x, ones(3, 3, 4, 17)),  # few for so many outputs
        (x[:15], kernel),  # few tiles
        (ones(16, 7, 7, 4), kernel),  # 5 of 8 pixels
        (x, ones(3, 2, 4, 2)),
        (ones(16, 6, 6, 4, dtype=jnp.bfloat16), ones(3, 3, 4, 2, dtype=jnp.bfloat16)),
    ):
        assert not winograd.pays(other, its_kernel)
