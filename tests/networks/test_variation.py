"""Penalties, total variation and prediction discrepancies."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import builders, variation

pytestmark = pytest.mark.usefixtures("x64")


def predict(w, x):
    return x @ w


def test_TV1_exact_test_set_gives_the_squared_distance():
    network = builders.cycle(5)
    W = jnp.asarray(np.random.default_rng(0).standard_normal((5, 4)))
    X = variation.exact_test_set(4)
    apart = W[network.head] - W[network.tail]
    found = variation.discrepancy(network, predict, W, X, shared=True)
    np.testing.assert_allclose(found, (apart**2).sum(1), rtol=1e-12)
    each = jnp.broadcast_to(X, (5, 4, 4))
    np.testing.assert_allclose(
        variation.discrepancy(network, predict, W, each), found, rtol=1e-12
    )


PENALTIES = {
    "squared": (variation.squared(), lambda u: (u**2).sum(1)),
    "l2": (variation.l2(), lambda u: np.linalg.norm(u, axis=1)),
    "l1": (variation.lp(1), lambda u: np.abs(u).sum(1)),
    "l3": (variation.lp(3.0), lambda u: (np.abs(u) ** 3).sum(1) ** (1 / 3)),
    "linf": (variation.lp(math.inf), lambda u: np.abs(u).max(1)),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_TV2_penalties_are_symmetric_and_vanish_on_components(name):
    penalty, expected = PENALTIES[name]
    u = np.random.default_rng(0).standard_normal((6, 3))
    np.testing.assert_allclose(penalty(u), expected(u), rtol=1e-12)
    np.testing.assert_array_equal(penalty(u), penalty(-u))
    # Over several leaves as over one long vector.
    tree = {"a": jnp.asarray(u[:, 0]), "b": jnp.asarray(u[:, 1:].reshape(6, 1, 2))}
    np.testing.assert_allclose(penalty(tree), expected(u), rtol=1e-12)
    network = builders.stochastic_block([3, 2], 1.0, 0.0)
    W = jnp.repeat(jnp.asarray([[1.0, 2.0], [5.0, -3.0]]), np.array([3, 2]), axis=0)
    total, slope = jax.value_and_grad(lambda W: variation.gtv(network, W, penalty))(W)
    assert total == 0
    np.testing.assert_array_equal(slope, 0)
    assert variation.gtv(network, W.at[1, 0].add(1e-3), penalty) > 0


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, math.inf])
def test_dual_norms_by_their_definition(p):
    rng = np.random.default_rng(0)
    u = rng.standard_normal((4, 3))
    v = rng.standard_normal((200_000, 3))
    penalty = variation.lp(p)
    assert penalty.dual_norm is not None
    inner = u @ (v / np.asarray(penalty(v))[:, None]).T
    dual = np.asarray(penalty.dual_norm(u))
    # The largest inner product with a unit vector, which a sample comes close to; of
    # the corners of the norms of 1 and infinity it would not.
    assert (inner <= dual[:, None] + 1e-9).all()
    np.testing.assert_allclose(inner.max(1), dual, rtol=0.05)
    assert variation.squared().dual_norm is None


def test_norms_neither_overflow_nor_underflow():
    u = jnp.asarray([[3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0]])
    norms = variation.l2()(u)
    np.testing.assert_allclose(norms, [5e200, 5e-200, 0], rtol=1e-12)
    slope = jax.grad(lambda u: variation.l2()(u).sum())(u)
    np.testing.assert_allclose(slope, [[0.6, 0.8], [0.6, 0.8], [0, 0]], rtol=1e-12)


def test_strengths_by_leaf_and_block():
    u = {"shared": jnp.asarray([[3.0, 4.0]]), "own": jnp.asarray([[2.0]])}
    by_leaf = variation.squared({"shared": 0.5, "own": 0.0})
    assert by_leaf(u).tolist() == [12.5]
    assert variation.squared(2.0)(u).tolist() == [58.0]
    parts = {"shared": (2.0, variation.l2()), "own": (3.0, variation.squared())}
    assert variation.blocks(parts)(u).tolist() == [22.0]
    swept = jax.vmap(
        lambda a: variation.blocks(parts | {"own": (a, variation.squared())})(u)
    )(jnp.arange(3.0))
    assert swept[:, 0].tolist() == [10.0, 14.0, 18.0]
    with pytest.raises(ValueError, match=r"blocks of W must be \['shared'\]"):
        variation.blocks({"shared": (1.0, variation.l2())})(u)


def test_TV3_discrepancy_is_symmetric_for_asymmetric_losses():
    def pinball(prediction, label):
        return jnp.maximum(0.9 * (label - prediction), 0.1 * (prediction - label))

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 7))
    assert not np.allclose(pinball(a, b).mean(1), pinball(b, a).mean(1))
    found = variation.prediction_discrepancy(a, b, pinball)
    np.testing.assert_array_equal(
        found, variation.prediction_discrepancy(b, a, pinball)
    )
    # The pinball losses of both directions add up to |a - b|.
    np.testing.assert_allclose(found, np.abs(a - b).mean(1) / 2, rtol=1e-12)


def test_masked_test_points_do_not_count():
    network = builders.chain(3)
    rng = np.random.default_rng(0)
    W, X = jnp.asarray(rng.standard_normal((3, 2))), rng.standard_normal((2, 4, 2))
    X[0, 2:] = np.nan
    mask = np.array([[True, True, False, False], [False] * 4])
    found = variation.discrepancy(network, predict, W, X, mask=jnp.asarray(mask))
    apart = X[0, :2] @ np.asarray(W[0] - W[1])
    np.testing.assert_allclose(found, [(apart**2).mean(), 0], rtol=1e-12)
    with pytest.raises(ValueError, match="one row per edge, 2, got"):
        variation.discrepancy(network, predict, W, X[0])


def test_TV4_gaussian_test_sets_converge_at_the_square_root_rate():
    # The discrepancy is ||u||^2 chi^2_m / m, with standard deviation ||u||^2 sqrt(2/m).
    u, repeats = np.array([1.0, -2.0]), 400
    errors = []
    for m in (100, 400, 1_600):
        X = np.random.default_rng(m).standard_normal((repeats, m, 2))
        found = variation.prediction_discrepancy(jnp.asarray(X @ u), jnp.zeros((1, m)))
        errors.append(np.sqrt(np.mean((np.asarray(found) - 5) ** 2)))
        # The root of a chi^2_400 / 400: within 4.5 standard errors, 1 / sqrt(800) each.
        expected = 5 * np.sqrt(2 / m)
        assert abs(errors[-1] / expected - 1) < 4.5 / np.sqrt(2 * repeats)
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("p", [0.5, math.nan, -1])
def test_bad_norms(p):
    with pytest.raises(ValueError, match="p must be >= 1"):
        variation.lp(p)


def test_bad_strengths():
    for build in (
        lambda a: variation.squared(a),
        lambda a: variation.blocks({"a": (a, variation.l2())}),
    ):
        for a in (-1.0, math.nan):
            with pytest.raises(ValueError, match="must be >= 0"):
                build(a)


def test_weights_do_not_widen_the_variation():
    network = builders.chain(3)
    assert network.weight.dtype == jnp.float64
    W = jnp.ones((3, 2), jnp.float32)
    assert variation.gtv(network, W).dtype == jnp.float32
    assert variation.gtv(network, W, variation.l2()).dtype == jnp.float32
