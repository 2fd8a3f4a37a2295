"""Cosines in blocks, of whatever scale, and what a shared orthonormal map keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.clusters import (
    cluster_means,
    permutation,
    reflection,
    row_norms,
    similarity,
)

RNG = np.random.default_rng(0)
UPDATES = {
    "w": RNG.normal(size=(6, 5, 3)).astype(np.float32),
    "b": RNG.normal(size=(6, 4)).astype(np.float32),
}
FLAT = np.concatenate([UPDATES["b"], UPDATES["w"].reshape(6, -1)], 1).astype(np.float64)


def cosines(x):
    size = np.linalg.norm(x, axis=1)
    return x @ x.T / np.outer(size, size)


@pytest.mark.parametrize("block", [4, 7, 2**14])
def test_blocks_do_not_matter(block):
    on_device = jax.jit(functools.partial(similarity, block=block))(UPDATES)
    on_host = similarity(UPDATES, block)
    for got in (on_device, on_host):
        np.testing.assert_allclose(got, cosines(FLAT), atol=1e-6)
        np.testing.assert_array_equal(np.diagonal(got), 1)
    np.testing.assert_allclose(
        row_norms(UPDATES, block), np.linalg.norm(FLAT, axis=1), rtol=1e-6
    )


def test_a_memory_mapped_file_is_read_in_blocks(tmp_path):
    file = np.memmap(tmp_path / "u", np.float32, "w+", shape=FLAT.shape)
    file[:] = FLAT
    np.testing.assert_allclose(similarity(file, 5), cosines(FLAT), atol=1e-6)


def test_no_scale_matters_and_nothing_is_like_zero():
    # The norm of the last one that is not 0 is no float32 any more.
    scale = np.array([1e-30, 1e-20, 1, 1e18, 1e38, 0], np.float32)
    S = similarity(jnp.asarray(FLAT, jnp.float32) * scale[:, None])
    expected = np.eye(6)
    expected[:5, :5] = cosines(FLAT)[:5, :5]
    np.testing.assert_allclose(S, expected, atol=1e-6)
    halves = similarity(jnp.asarray(FLAT, jnp.bfloat16))
    assert halves.dtype == jnp.float32
    with pytest.raises(ValueError, match="must have coordinates"):
        similarity({})


@pytest.mark.parametrize("make", [permutation, reflection])
def test_a_shared_map_keeps_angles_lengths_and_means(make):
    shared = make(3)
    one = jax.tree.map(lambda x: x[0], UPDATES)
    secret = shared.init(one)
    hidden = jax.jit(jax.vmap(functools.partial(shared.apply, secret)))(UPDATES)
    assert np.abs(hidden["w"] - UPDATES["w"]).max() > 0.1
    assert jax.tree.map(np.shape, hidden) == jax.tree.map(np.shape, UPDATES)
    np.testing.assert_allclose(similarity(hidden), cosines(FLAT), atol=1e-6)
    np.testing.assert_allclose(row_norms(hidden), row_norms(UPDATES), rtol=1e-6)
    weights, cluster = jnp.array([1, 2, 3, 4, 5, 6]), jnp.array([0, 0, 1, -1, 1, 0])
    means = cluster_means(UPDATES, cluster, weights, 3)
    of_hidden = cluster_means(hidden, cluster, weights, 3)
    back = jax.vmap(functools.partial(shared.invert, secret))(of_hidden)
    for name, mean in means.items():
        expected = [
            np.average(UPDATES[name][rows], 0, weights=np.array(weights)[rows])
            for rows in ([0, 1, 5], [2, 4])
        ]
        np.testing.assert_allclose(mean[:2], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(mean[2], np.zeros_like(mean[2]))
        np.testing.assert_allclose(back[name], mean, atol=1e-6)
    if make is permutation:
        flat = np.concatenate([x.reshape(6, -1) for x in hidden.values()], 1)
        np.testing.assert_array_equal(np.sort(flat), np.sort(FLAT.astype(np.float32)))
        again = shared.invert(secret, jax.tree.map(lambda x: x[0], hidden))
        jax.tree.map(np.testing.assert_array_equal, again, one)
