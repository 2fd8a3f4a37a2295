"""The geometric median is optimal and breaks down where it should."""

import jax
import numpy as np

from fedjax_core.robust.median import subgradient_residual, weiszfeld
from fedjax_core.robust.rules import (
    average,
)

means_of = jax.jit(jax.vmap(average))


median_of = jax.jit(weiszfeld)


medians_of = jax.jit(jax.vmap(weiszfeld))


residual_of = jax.jit(subgradient_residual)


residuals_of = jax.jit(jax.vmap(subgradient_residual))


def instances(seed, count, slots=9, d=3):
    """Values, weights with empty slots (at least 3 present), b < K/2 and corruption."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, slots, d))
    weights = rng.uniform(0.1, 3, (count, slots))
    present = rng.permuted(np.tile(np.arange(slots), (count, 1)), axis=1)
    sizes = rng.integers(3, slots + 1, count)
    weights *= present < sizes[:, None]
    b = rng.integers(0, (sizes - 1) // 2 + 1)
    bad = present < b[:, None]
    return values, weights, b, bad


# T-T4: the geometric median.


def test_geometric_median_is_optimal(x64):
    values, weights, _, _ = instances(5, 300)
    got = medians_of(values, weights)
    residual = residuals_of(values, weights, got)
    assert residual.max() < 1e-12
    # The residual is 1 far away and positive at the mean.
    far = residuals_of(values, weights, got + 1e6)
    np.testing.assert_allclose(far, 1, atol=1e-5)
    mean = means_of(values, weights)
    assert (residuals_of(values, weights, mean) > 1e-6).all()

    # No point nearby is better.
    def cost(p):
        distance = np.linalg.norm(values - np.asarray(p)[:, None], axis=-1)
        return (weights * distance).sum(1)

    step = np.random.default_rng(6).normal(size=got.shape) * 1e-3
    assert (cost(got) <= cost(got + step) + 1e-9).all()


def test_in_one_dimension_it_is_the_median(x64):
    rng = np.random.default_rng(7)
    values = rng.normal(size=(50, 9, 1))
    weights = np.ones((50, 9))
    weights[25:, 8] = 0  # an even number: the middle of the two in the middle
    values[0, :3, 0], weights[0, 3:] = [0, 1, 100], 0
    values[1, :3, 0], weights[1, :3], weights[1, 3:] = [0, 7, 9], [1, 3, 1], 0
    got = medians_of(values, weights)[:, 0]
    np.testing.assert_array_equal(got[:2], [1, 7])
    np.testing.assert_allclose(got[2:25], np.median(values[2:25, :, 0], 1), rtol=1e-12)
    np.testing.assert_allclose(got[25:], np.median(values[25:, :8, 0], 1), rtol=1e-9)


def test_it_ends_on_a_point_that_is_optimal(x64):
    # The corner of an obtuse triangle, and a point with half of the weight.
    far = [[8.0, 8], [9, 9]]
    triangle = np.array([[0.0, 0], [10, 1], [-10, 1], *far])
    got = median_of(triangle, np.array([1.0, 1, 1, 0, 0]))
    np.testing.assert_array_equal(got, [0, 0])
    heavy = np.array([[2.0, 3], [10, 1], [-10, 1], [0, 50], far[0]])
    got = median_of(heavy, np.array([3.0, 1, 1, 1, 0]))
    np.testing.assert_array_equal(got, [2, 3])
    # It starts on a data point, the median of both coordinates, and must leave it.
    cross = np.array([[0.0, 0], [1, 0.1], [1, -0.1], [-0.1, 5], [-0.1, -5]])
    weights = np.array([0.1, 1, 1, 1, 1])
    got = median_of(cross, weights)
    assert got[0] > 0
    assert residual_of(cross, weights, got) < 1e-9


def test_breakdown_bound(x64):
    rng = np.random.default_rng(8)
    h, count = 7, 400
    honest = rng.normal(size=(count, h, 3))
    honest /= np.linalg.norm(honest, axis=-1, keepdims=True)
    honest *= rng.uniform(0, 1, (count, h, 1)) ** 0.2  # within 1 of the origin
    b = rng.integers(0, h, count)
    away = rng.normal(size=(count, 1, 3)) * 10.0 ** rng.uniform(0, 6, (count, 1, 1))
    lies = np.broadcast_to(away, (count, h - 1, 3))
    values = np.concatenate([honest, lies], 1)
    weights = np.concatenate(
        [np.ones((count, h)), np.arange(h - 1) < b[:, None]], 1
    ).astype(float)
    got = medians_of(values, weights)
    bound = 1 / np.sqrt(1 - (b / h) ** 2)
    assert (np.linalg.norm(got, axis=1) <= bound + 1e-9).all()


def test_it_turns_and_moves_with_the_points(x64):
    values, weights, _, _ = instances(9, 300)
    turn = np.linalg.qr(np.random.default_rng(10).normal(size=(3, 3)))[0]
    straight = medians_of(values, weights)
    turned = medians_of(values @ turn.T + 4, weights)
    np.testing.assert_allclose(turned, straight @ turn.T + 4, atol=1e-9)
    # The norm is over all leaves.
    tree = {"a": values[..., :1], "b": values[..., 1:].reshape(300, 9, 2, 1)}
    got = medians_of(tree, weights)
    joined = np.concatenate([got["a"], got["b"][..., 0]], 1)
    np.testing.assert_allclose(joined, straight, rtol=1e-12)
