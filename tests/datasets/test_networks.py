"""Generated networks of data follow the models they name.

Keys are fixed. Each statistical check would fail for 1 key in 10,000 (`RARE`) if the
code is right.
"""

import jax
import numpy as np
import pytest
from scipy import stats

from fedjax_core.datasets import networks
from fedjax_core.networks import builders, gtvmin, oracles

RARE = 1e-4
KEY = jax.random.key(0)
W_TRUE = np.array([[1.0, -2.0], [0.0, 3.0], [4.0, 0.5]])


def assert_standard_normal(values):
    assert stats.kstest(np.ravel(values), "norm").pvalue > RARE


def assert_variance(values, variance):
    """`values`, normal of mean 0, have this variance."""
    tail = stats.chi2.cdf(np.sum(np.square(values)) / variance, np.size(values))
    assert RARE / 2 < tail < 1 - RARE / 2


def assert_uncorrelated(a, b):
    """Independent normal values, many enough for the correlation to be normal."""
    z = np.corrcoef(a, b)[0, 1] * np.sqrt(len(a))
    assert 2 * stats.norm.sf(abs(z)) > RARE


def same(a, b):
    return all(
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_network_linear_has_the_moments_of_the_model():
    graph = builders.chain(3)
    draw = jax.jit(lambda key: networks.network_linear(key, graph, 2000, W_TRUE, 0.5))
    data = draw(KEY)
    assert data.X.shape == (3, 2000, 2)
    assert data.y.shape == data.mask.shape == (3, 2000)
    assert data.mask.all()
    np.testing.assert_array_equal(data.w_true, W_TRUE.astype(np.float32))
    noise = data.y - np.einsum("nmd,nd->nm", data.X, W_TRUE)
    for x, e in zip(data.X, noise, strict=True):
        assert_standard_normal(x)
        assert_standard_normal(e / 0.5)
        assert_variance(e, 0.25)
        assert_uncorrelated(x[:, 0], e)
    for other in (1, 2):
        for values in (data.X[..., 0], noise):
            assert_uncorrelated(values[0], values[other])


def test_networks_are_reproducible_and_map_over_keys():
    graph = builders.chain(3)
    data = networks.network_linear(KEY, graph, 4, W_TRUE, 0.5)
    draw = jax.jit(
        jax.vmap(lambda key: networks.network_linear(key, graph, 4, W_TRUE, 0.5))
    )
    many = draw(jax.random.split(KEY, 3).at[:2].set(KEY))
    first, again, other = (
        networks.LinearNodes(*row) for row in zip(*many, strict=True)
    )
    assert same(first, again)
    assert not same(first, other)
    np.testing.assert_allclose(first.y, data.y, rtol=1e-5)


def test_common_parameters_ragged_nodes_and_given_noise():
    graph = builders.star(3)
    noise = np.array([[1.0, np.nan, np.nan], [2.0, 3.0, np.nan], [4.0, 5.0, 6.0]])
    with jax.enable_x64(True):
        data = networks.network_linear(KEY, graph, [1, 2, 3], W_TRUE[0], noise=noise)
        assert data.X.dtype == data.y.dtype == np.float64
        np.testing.assert_array_equal(data.mask, ~np.isnan(noise))
        np.testing.assert_array_equal(data.w_true, W_TRUE[[0, 0, 0]])
        error = data.y - data.X @ W_TRUE[0]
        np.testing.assert_allclose(error, np.nan_to_num(noise), atol=1e-12)
        assert not data.X[~data.mask].any()
        # Noise that is drawn and noise that is given add up.
        both = networks.network_linear(KEY, graph, 3, W_TRUE[0], 0.5, np.ones((3, 3)))
        drawn = networks.network_linear(KEY, graph, 3, W_TRUE[0], 0.5)
        np.testing.assert_allclose(both.y, drawn.y + 1, atol=1e-12)
        # Without noise GTVMin finds the model, whatever alpha.
        exact = networks.network_linear(KEY, graph, [1, 2, 3], W_TRUE[0])
        Q, q, _ = oracles.least_squares_statistics(exact.X, exact.y, exact.mask)
        W = gtvmin.closed_form(graph, Q, q, 2.0)
        np.testing.assert_allclose(W, exact.w_true, rtol=1e-9)


def test_clustered_linear_is_dense_inside_and_one_model_per_cluster():
    sizes = (40, 60)
    found = networks.clustered_linear(KEY, sizes, 0.5, 0.05, 30, W_TRUE[:2], 0.5)
    np.testing.assert_array_equal(found.cluster, np.repeat([0, 1], sizes))
    np.testing.assert_array_equal(
        found.data.w_true, W_TRUE[found.cluster].astype(np.float32)
    )
    noise = found.data.y - np.einsum("nmd,nd->nm", found.data.X, found.data.w_true)
    assert_variance(noise, 0.25)
    ends = found.cluster[np.stack([found.graph.head, found.graph.tail])]
    inside = int((ends[0] == ends[1]).sum())
    pairs = 40 * 39 // 2 + 60 * 59 // 2
    for drawn, of, p in (
        (inside, pairs, 0.5),
        (found.graph.num_edges - inside, 40 * 60, 0.05),
    ):
        assert stats.binomtest(drawn, of, p).pvalue > RARE
    # The key decides the graph too.
    again, other = (
        networks.clustered_linear(jax.random.key(k), sizes, 0.5, 0.05, 30, W_TRUE[:2])
        for k in (0, 1)
    )
    assert same(again.graph, found.graph)
    assert (
        np.shape(other.graph.head) != np.shape(found.graph.head)
        or (other.graph.head != found.graph.head).any()
    )


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda g: (g, 0, W_TRUE[0]), ValueError, "m must be one int >= 1"),
        (lambda g: (g, [1, 2], W_TRUE[0]), ValueError, r"one per node, \[3\]"),
        (lambda g: (g, 1.5, W_TRUE[0]), TypeError, "m must be ints, got 1.5"),
        (lambda g: (g, True, W_TRUE[0]), TypeError, "m must be ints"),
        (lambda g: (g, 2, W_TRUE[:2]), ValueError, r"w_true must have shape \(d,\)"),
        (lambda g: (g, 2, 1.0), ValueError, "w_true must have shape"),
        (lambda g: (g, 2, np.array([np.nan, 1])), ValueError, "w_true must be finite"),
        (lambda g: (g, 2, W_TRUE, -1.0), ValueError, "noise_std must be >= 0"),
        (lambda g: (g, 4, W_TRUE, 0.0, np.ones(3)), ValueError, "noise must have"),
        (
            lambda g: (g, 4, W_TRUE, 0.0, np.full((3, 4), np.inf)),
            ValueError,
            "noise must be finite",
        ),
    ],
)
def test_bad_arguments_of_network_linear(call, error, match):
    with pytest.raises(error, match=match):
        networks.network_linear(KEY, *call(builders.chain(3)))


def test_bad_arguments_of_clusters():
    for w in (W_TRUE, W_TRUE[0]):
        with pytest.raises(ValueError, match=r"w_true must have shape \(2, d\)"):
            networks.clustered_linear(KEY, (3, 3), 0.5, 0.1, 2, w)
    with pytest.raises(ValueError, match="p_in"):
        networks.clustered_linear(KEY, (3, 3), 1.5, 0.1, 2, W_TRUE[:2])


def test_unit_rows_are_directions_with_labels_of_one_model():
    data = networks.unit_linear(KEY, 40, [50] * 39 + [7], 3, noise_std=0.5)
    X, y, mask, W = map(np.asarray, data)
    assert (mask.sum(1) == [50] * 39 + [7]).all()
    assert (X[~mask] == 0).all()
    assert (y[~mask] == 0).all()
    rows, noise = X[mask], y[mask] - X[mask] @ W[0]
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(W, np.tile(W[:1], (40, 1)))
    # The coordinates of a direction in space are uniform.
    assert stats.kstest(rows[:, 0], "uniform", (-1, 2)).pvalue > RARE
    assert_variance(noise, 0.25)
    assert_uncorrelated(rows[:, 0], noise)
    assert same(data, networks.unit_linear(KEY, 40, [50] * 39 + [7], 3, 0.5))
    models = [networks.unit_linear(jax.random.key(k), 1, 1, 50).w_true for k in (1, 2)]
    assert_standard_normal(np.ravel(models))
    with pytest.raises(ValueError, match="num_features must be >= 1"):
        networks.unit_linear(KEY, 2, 3, 0)


def test_related_tasks_have_the_laws_of_their_docstring():
    draw = jax.jit(
        lambda key: networks.related_tasks(key, 90, 3, 40, (5, 35), 0.5, (0.1, 1.0))
    )
    tasks = draw(KEY)
    assert same(tasks, draw(KEY))
    assert not same(tasks.train.X, draw(jax.random.key(1)).train.X)
    np.testing.assert_array_equal(np.bincount(tasks.cluster), [30, 30, 30])
    count = np.asarray(tasks.train.mask.sum(1))
    assert count.min() >= 5
    assert count.max() <= 35
    assert (
        stats.kstest((count + 0.0) / 36, "uniform", (4.5 / 36, 31 / 36)).pvalue > RARE
    )
    # Models of a cluster are one, those of others multiples within the spread.
    W = np.asarray(tasks.train.w_true)
    models = np.stack([W[tasks.cluster == q] for q in range(3)])
    assert np.ptp(models, 1).max() == 0
    ratios = models[:, 0] / models[0, :1]
    np.testing.assert_allclose(ratios, np.tile(ratios[:, :1], 40), rtol=1e-4)
    assert 0.5 / 1.5 < ratios.min() <= ratios.max() < 1.5 / 0.5
    noise = {}
    for name in ("train", "valid", "test"):
        split = getattr(tasks, name)
        np.testing.assert_array_equal(split.mask, tasks.train.mask)
        assert not split.X[~split.mask].any()
        assert_standard_normal(split.X[split.mask])
        e = split.y - np.einsum("nmd,nd->nm", split.X, W)
        noise[name] = np.asarray((e**2).sum(1))
        assert not np.asarray(split.y)[~split.mask].any()
    # E e^2 = 0.55; the sums of 270 nodes are within 4 deviations of that.
    total = np.sum([*noise.values()]) / (3 * count.sum())
    assert abs(total - 0.55) < 4 * 0.55 * np.sqrt(2 / count.sum() / 3 + 0.3 / 90)
    assert not same(tasks.train.X, tasks.valid.X)
    with pytest.raises(ValueError, match="least_size must be in"):
        networks.related_tasks(KEY, 9, 3, 4, (8, 5))
    with pytest.raises(ValueError, match="num_clusters must be in"):
        networks.related_tasks(KEY, 2, 3, 4)
