"""Clustered, horizontal, vertical, semi-supervised, personalised and few-shot."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core.algorithms.networks import (
    clustered,
    few_shot,
    horizontal,
    online_gd,
    personalised,
    semi_supervised,
    vertical,
)
from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.gtvmin import closed_form
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.oracles import (
    Quadratic,
    least_squares_statistics,
    quadratic,
    smooth,
)
from fedjax_core.networks.schedules import power_decay
from fedjax_core.networks.spectrum import check_connected, components, extremes

OTHER: Any = "other"


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def weighted(graph, rng):
    weight = jnp.asarray(rng.uniform(0.2, 2, graph.num_edges))
    return graph.with_weight(weight)


def dense_solution(graph, Q, q, alpha):
    """The solution by NumPy; for many small networks."""
    Q, q, A = np.asarray(Q), np.asarray(q), np.asarray(graph.dense())
    n, d = q.shape
    whole = alpha * np.kron(np.diag(A.sum(1)) - A, np.eye(d))
    for i in range(n):
        whole[i * d : (i + 1) * d, i * d : (i + 1) * d] += Q[i]
    return np.linalg.solve(whole, -q.ravel() / 2).reshape(n, d)


def two_clusters(seed, sizes=(5, 4), m=6, d=2, noise=0.3):
    """A clustered network and linear data of it, in NumPy."""
    rng = np.random.default_rng(seed)
    graph = weighted(builders.stochastic_block(sizes, 0.8, 0.2, seed), rng)
    label = builders.block_labels(sizes)
    models = rng.normal(size=(2, d)) * 3
    X = rng.normal(size=(len(label), m, d))
    errors = noise * rng.normal(size=X.shape[:2])
    y = np.einsum("nmd,nd->nm", X, models[label]) + errors
    Q = np.einsum("nmd,nme->nde", X, X) / m
    q = -2 * np.einsum("nmd,nm->nd", X, y) / m
    return graph, label, models, X, y, Q, q, (errors**2).mean(1)


# --- clustered ---


def connectivity(A, members):
    """lambda_2 of the induced graph, by NumPy."""
    inner = A[np.ix_(members, members)]
    return np.linalg.eigvalsh(np.diag(inner.sum(1)) - inner)[1]


def spread(W):
    return np.sum((W - W.mean(0)) ** 2)


def test_prop_6_1_on_all_connected_sub_clusters():
    # T-C1
    checked = 0
    for seed, alpha in itertools.product(range(6), (0.1, 10.0)):
        graph, label, models, _, _, Q, q, noise = two_clusters(seed)
        W = dense_solution(graph, Q, q, alpha)
        A = np.asarray(graph.dense())
        sizes = np.sum(W**2, axis=1)
        nodes = [np.flatnonzero(label == c) for c in (0, 1)]
        subsets = [
            (c, np.isin(np.arange(len(label)), chosen))
            for c in (0, 1)
            for k in range(2, len(nodes[c]) + 1)
            for chosen in itertools.combinations(nodes[c], k)
        ]
        for c, members in subsets:
            lam2 = connectivity(A, members)
            if lam2 < 1e-9:
                continue
            border = A[members][:, ~members].sum()
            size = np.sum(models[c] ** 2) + sizes[~members].max()
            bound = noise[members].sum() + 2 * alpha * border * size
            assert spread(W[members]) <= bound / (alpha * lam2) + 1e-9
            checked += 1
    assert checked > 200


def test_prop_6_1_as_a_function():
    # T-C1: the bound and its ingredients against the formulas by hand.
    graph, label, models, X, _, Q, q, noise = two_clusters(0)
    members, W = label == 1, dense_solution(graph, Q, q, 3.0)
    A = np.asarray(graph.dense())
    sub = clustered.induced(graph, members)
    np.testing.assert_allclose(sub.dense(), A[np.ix_(members, members)])
    lam2 = connectivity(A, members)
    assert extremes(sub).second == pytest.approx(lam2, abs=1e-9)
    border = A[members][:, ~members].sum()
    size = np.sum(models[1] ** 2) + np.sum(W[~members] ** 2, axis=1).max()
    expected = (noise[members].sum() + 6 * border * size) / (3 * lam2)
    ours = clustered.cluster_deviation_bound(
        graph, members, 3.0, lam2, noise, models[1], W
    )
    assert float(ours) == pytest.approx(expected, rel=1e-9)
    # C = V: no boundary, and with one model everywhere it is Prop. 3.1.
    check_connected(graph)
    errors = np.random.default_rng(8).normal(size=X.shape[:2])
    q = -2 * np.einsum("nmd,nm->nd", X, X @ models[0] + errors) / X.shape[1]
    noise, lam2 = (errors**2).mean(1), extremes(graph).second
    for alpha in (0.1, 1.0, 100.0):
        W = dense_solution(graph, Q, q, alpha)
        bound = clustered.cluster_deviation_bound(
            graph, np.ones(len(X), bool), alpha, lam2, noise, models[0], W
        )
        assert float(bound) == pytest.approx(noise.sum() / (lam2 * alpha))
        assert spread(W) <= bound + 1e-9


def test_the_boundary_of_one_node_is_its_degree():
    # T-C2
    graph = two_clusters(1)[0]
    for i in range(graph.num_nodes):
        members = np.arange(graph.num_nodes) == i
        np.testing.assert_allclose(
            clustered.boundary_weight(graph, members), degree(graph)[i]
        )
    everyone = np.ones(graph.num_nodes, bool)
    assert clustered.boundary_weight(graph, everyone) == 0


@pytest.mark.parametrize(("method", "by"), [("k-means", "fit"), ("gmm", "gradient")])
def test_clustering_recovers_two_groups_and_pools_them(method, by):
    # T-C3
    label = builders.block_labels((6, 9))
    rng = np.random.default_rng(9)
    models = np.array([[3.0, -3.0], [-3.0, 3.0]])
    X = rng.normal(size=(15, 30, 2))
    y = np.einsum("nmd,nd->nm", X, models[label]) + 0.1 * rng.normal(size=(15, 30))
    mask = np.arange(30) < rng.integers(20, 31, 15)[:, None]
    stats = least_squares_statistics(X, y, mask)
    if by == "fit":
        Z = clustered.pool(stats, np.arange(15), 15)
    else:
        losses = quadratic(*stats)
        Z = losses.grad(jnp.tile(jnp.array([[0.5, 0.5]]), (15, 1)))
    found = clustered.cluster_nodes(Z, 2, method=method, seed=3)
    swap = found[0]
    np.testing.assert_array_equal(found ^ swap, label)
    pooled = clustered.pool(stats, found, 2)[jnp.array([swap, 1 - swap])]
    by_size = clustered.pool(stats, label, 2, mask.sum(1))
    for c in (0, 1):
        own = label == c
        Q, q = np.asarray(stats.Q)[own].sum(0), np.asarray(stats.q)[own].sum(0)
        np.testing.assert_allclose(pooled[c], np.linalg.solve(Q, -q / 2), rtol=1e-9)
        rows = mask & own[:, None]
        direct = np.linalg.lstsq(X[rows], y[rows])[0]
        np.testing.assert_allclose(by_size[c], direct, rtol=1e-9)
        np.testing.assert_allclose(by_size[c], models[c], atol=0.1)


def test_singular_and_empty_clusters_have_the_least_norm():
    stats = Quadratic(
        jnp.array([[[1.0, 0], [0, 0]]]), jnp.array([[-4.0, 0]]), jnp.zeros(1)
    )
    np.testing.assert_allclose(
        clustered.pool(stats, np.array([0]), 2), [[2, 0], [0, 0]], atol=1e-12
    )


def test_pooling_keeps_features_of_small_units():
    rng = np.random.default_rng(0)
    with jax.enable_x64(False):
        X = rng.normal(size=(4, 50, 2)).astype(np.float32) * np.array(
            [1000, 0.5], np.float32
        )
        stats = least_squares_statistics(X, 2 * X[..., 1])
        models = clustered.pool(stats, np.array([0, 0, 1, 1]), 2)
        np.testing.assert_allclose(models, [[0, 2]] * 2, atol=1e-3)


def test_clusters_merge_along_alpha():
    # The picture of Section 6.2: from n sets over the planted ones to one.
    rng = np.random.default_rng(10)
    inner = builders.stochastic_block((5, 5), 1.0, 0.0)
    edges = np.r_[np.stack([inner.head, inner.tail], 1), [[0, 5]]]
    weight = np.r_[np.full(20, 1.0), 1e-3]
    graph = Graph.from_edges(edges, weight, 10, np.float64)
    label = builders.block_labels((5, 5))
    q = -2 * (np.array([-5.0, 5])[label] + rng.uniform(-0.5, 0.5, 10))[:, None]
    Q = np.ones((10, 1, 1))
    counts = [
        clustered.n_clusters(graph, jnp.asarray(dense_solution(graph, Q, q, a)), 0.01)
        for a in (0.0, 1e3 * 0.03, 1e7)
    ]
    assert counts == [10, 2, 1]
    zero = graph.with_weight(graph.weight.at[-1].set(0.0))
    assert clustered.n_clusters(zero, jnp.zeros((10, 1)), 0.0) == 2


# --- horizontal ---


def test_horizontal_learning_tends_to_the_pooled_table():
    # T-C4 and Exercise 6.1
    rng = np.random.default_rng(11)
    size = np.array([3, 8, 5, 2])
    mask = np.arange(8) < size[:, None]
    X, y = rng.normal(size=(4, 8, 2)), rng.normal(size=(4, 8))
    X, y = np.where(mask[..., None], X, np.nan), np.where(mask, y, np.nan)
    table = np.linalg.lstsq(X[mask], y[mask])[0]
    graph = builders.chain(4)
    sums = horizontal.sum_of_squares(X, y, mask)
    means = least_squares_statistics(X, y, mask)
    residuals = X[1, : size[1]] @ table - y[1, : size[1]]
    np.testing.assert_allclose(
        quadratic(*sums).value(jnp.tile(jnp.asarray(table)[None], (4, 1)))[1],
        np.sum(residuals**2),
    )
    errors = []
    for alpha in (1e3, 1e4, 1e5):
        W = dense_solution(graph, sums.Q, sums.q, alpha)
        errors.append(np.abs(W - table).max() * alpha)
    # The error is of order 1 / alpha.
    np.testing.assert_allclose(errors, errors[-1], rtol=0.05)
    # The trap: average errors lead elsewhere, unless all sizes agree.
    trap = closed_form(graph, means.Q, means.q, 1e6)
    assert np.abs(np.asarray(trap) - table).max() > 0.01
    X, y = rng.normal(size=(4, 5, 2)), rng.normal(size=(4, 5))
    means = least_squares_statistics(X, y)
    same = dense_solution(graph, means.Q, means.q, 1e7)
    table = np.linalg.lstsq(X.reshape(-1, 2), y.ravel())[0]
    np.testing.assert_allclose(same, np.tile(table, (4, 1)), atol=1e-5)


# --- semi-supervised ---


def test_unlabelled_nodes_are_harmonic():
    # T-C5
    graph, _, _, X, y, *_ = two_clusters(12)
    labelled = np.arange(len(y)) % 3 == 0
    semi_supervised.check_labels(graph, labelled)
    y = np.where(labelled[:, None], y, 7.0)
    stats = semi_supervised.statistics_without_labels(
        least_squares_statistics(X, y), labelled
    )
    W = jnp.asarray(dense_solution(graph, stats.Q, stats.q, 0.7))
    residual = semi_supervised.harmonic_residual(graph, W, labelled)
    np.testing.assert_allclose(residual, 0, atol=1e-9)
    A = np.asarray(graph.dense())
    mean = A @ np.asarray(W) / A.sum(1)[:, None]
    np.testing.assert_allclose(np.asarray(W)[~labelled], mean[~labelled], atol=1e-9)
    moved = semi_supervised.harmonic_residual(graph, W.at[1].add(1.0), labelled)
    assert float(moved[1]) == pytest.approx(np.sqrt(2))
    # The same through losses whose unlabelled rows are unknown.
    unknown = quadratic(
        jnp.where(labelled[:, None, None], stats.Q, jnp.nan), stats.q, stats.c
    )
    losses = semi_supervised.without_labels(unknown, labelled)
    known = quadratic(*stats)
    ours, theirs = jax.jit(
        lambda W: [(f.value(W), f.grad(W), f.prox(W, 0.5)) for f in (losses, known)]
    )(W)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    np.testing.assert_array_equal(np.asarray(ours[2])[~labelled], W[~labelled])


def test_refuses_components_without_labels():
    graph = Graph.from_edges(np.array([(0, 1), (2, 3)]))
    with pytest.raises(ValueError, match="that of node 2"):
        semi_supervised.check_labels(graph, np.arange(4) == 0)
    with pytest.raises(ValueError, match="shape"):
        semi_supervised.check_labels(graph, np.ones(2, bool))
    assert components(graph).max() == 1


# --- vertical ---


def table_by_columns(seed, m=8, owner=(0, 1, 1, 2, 0), n=3):
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(m, len(owner))), rng.normal(size=m)
    return X, y, vertical.split_columns(X, owner, n)


def test_vertical_descent_is_descent_on_the_whole_table():
    # T-C6, first construction
    X, y, columns = table_by_columns(13)
    m = len(y)
    eta = 0.9 * m / np.linalg.eigvalsh(X.T @ X)[-1]
    W, path = vertical.vertical_gd(columns, y, 50, eta, record=lambda W: W)
    w = np.zeros(5)
    for t in range(50):
        w = w + 2 * eta / m * X.T @ (y - X @ w)
        np.testing.assert_allclose(vertical.assemble(columns, path[t]), w, rtol=1e-9)
    np.testing.assert_array_equal(W[columns.column < 0], 0)


@pytest.mark.parametrize(("alpha", "b"), [(1.0, 1.0), (1e4, 1.0), (1.0, 1e4)])
def test_vertical_learning_by_gtvmin_is_least_squares_for_every_alpha(alpha, b):
    # T-C6, second construction, Exercise 6.2
    for seed, graph, label_node in (
        (14, builders.chain(3), 0),
        (15, weighted(builders.star(3), np.random.default_rng(15)), 2),
    ):
        X, y, columns = table_by_columns(seed)
        stats = vertical.lifted_statistics(columns, y, label_node, b)
        Z = dense_solution(graph, stats.Q, stats.q, alpha)
        w = vertical.assemble(columns, vertical.read_out(columns, Z))
        expected = np.linalg.lstsq(X, y)[0]
        np.testing.assert_allclose(w, expected, atol=1e-7)


def test_the_lifted_loss_is_what_it_says():
    X, y, columns = table_by_columns(16, m=4)
    stats = vertical.lifted_statistics(columns, y, 1, 2.0)
    Z = np.random.default_rng(17).normal(size=(3, 4, 3))
    value = quadratic(*stats).value(jnp.asarray(Z.reshape(3, 12)))
    for i in range(3):
        own = X[:, np.array([0, 1, 1, 2, 0]) == i]
        off = Z[i, :, i] - own @ np.linalg.pinv(own) @ Z[i, :, i]
        expected = 2.0 / 4 * off @ off
        if i == 1:
            expected += np.sum((y - Z[i].sum(1)) ** 2) / 4
        assert float(value[i]) == pytest.approx(expected)


# --- personalised ---


def blocks(seed, n=5, m=10):
    """Linear losses on trees of a shared and an own block, and their statistics."""
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(n, m, 3)), rng.normal(size=(n, m))

    def loss(w, example):
        x, label = example
        return jnp.mean((label - x @ jnp.append(w["own"], w["shared"])) ** 2)

    losses = smooth(loss, (jnp.asarray(X), jnp.asarray(y)))
    start = {"own": jnp.zeros(n), "shared": jnp.zeros((n, 2))}
    return losses, least_squares_statistics(X, y), start, X, y


def flat(W):
    return np.c_[np.asarray(W["own"]), np.asarray(W["shared"])]


def test_a_block_of_strength_zero_is_fitted_locally():
    # T-C7
    losses, stats, start, X, y = blocks(18)
    graph = builders.cycle(5)
    alpha = {"own": 0.0, "shared": 2.0}
    step = personalised.personalised_gd(graph, losses, alpha, 0.05)
    W, values = iterate(
        step,
        start,
        3000,
        record=lambda W: personalised.objective(graph, losses, alpha, W),
    )
    assert np.diff(np.asarray(values, np.float64)).max() <= 1e-12
    for i in range(5):
        rest = y[i] - X[i, :, 1:] @ np.asarray(W["shared"][i])
        own = X[i, :, 0] @ rest / (X[i, :, 0] @ X[i, :, 0])
        assert float(W["own"][i]) == pytest.approx(own, abs=1e-8)
    # The solution by one dense system with a strength for every coordinate.
    A = np.asarray(graph.dense())
    whole = np.kron(np.diag(A.sum(1)) - A, np.diag([0.0, 2, 2]))
    for i in range(5):
        whole[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] += np.asarray(stats.Q[i])
    expected = np.linalg.solve(whole, -np.asarray(stats.q).ravel() / 2)
    np.testing.assert_allclose(flat(W).ravel(), expected, atol=1e-8)


def test_equal_strengths_are_plain_gtvmin():
    # T-C7
    losses, stats, start, *_ = blocks(19)
    graph = builders.chain(5)
    expected = closed_form(graph, stats.Q, stats.q, 0.5)
    by_coordinate = {"own": 0.5, "shared": jnp.full(2, 0.5)}
    for alpha in (0.5, by_coordinate):
        step = personalised.personalised_gd(graph, losses, alpha, 0.1)
        W, _ = iterate(step, start, 2000)
        np.testing.assert_allclose(flat(W), expected, atol=1e-8)


def test_a_large_strength_makes_a_block_common():
    losses, _, start, *_ = blocks(20)
    graph = builders.complete(5)
    alpha = {"own": 0.0, "shared": 50.0}
    step = personalised.personalised_gd(graph, losses, alpha, 1e-3)
    W, _ = iterate(step, start, 8000)
    shared, own = np.asarray(W["shared"]), np.asarray(W["own"])
    assert np.ptp(shared, axis=0).max() < 0.02
    assert np.ptp(own) > 0.1


def test_shares_the_hidden_layer_of_a_small_network():
    # Leaves of any rank and any loss: only the hidden layer is coupled.
    rng = np.random.default_rng(21)
    x = jnp.asarray(rng.normal(size=(3, 8, 2)))
    y = jnp.asarray(rng.normal(size=(3, 8)))

    def loss(w, example):
        x, y = example
        return jnp.mean((y - jnp.tanh(x @ w["hidden"]) @ w["output"]) ** 2)

    losses = smooth(loss, (x, y))
    start = {
        "hidden": jnp.asarray(rng.normal(size=(3, 2, 4))),
        "output": jnp.asarray(rng.normal(size=(3, 4))),
    }
    graph = builders.complete(3)
    alpha = {"hidden": 5.0, "output": 0.0}
    step = personalised.personalised_gd(graph, losses, alpha, 0.02)
    ours = jax.jit(step)(start, 0, None)
    slope = jax.jit(
        jax.grad(lambda W: personalised.objective(graph, losses, alpha, W))
    )(start)
    for name in start:
        np.testing.assert_allclose(
            ours[name], start[name] - 0.02 * slope[name], atol=1e-9
        )


# --- few-shot ---


def test_detectors_are_fitted_by_balanced_least_squares():
    X = np.random.default_rng(22).normal(size=(7, 2))
    label = np.array([0, 0, 0, 1, 1, 3, 3])
    stats = few_shot.one_vs_rest(X, label, 4)
    w = np.array([0.3, -1.2])
    values = quadratic(*stats).value(jnp.tile(jnp.asarray(w)[None], (4, 1)))
    for c in (0, 1, 3):
        own = label == c
        inside, outside = (
            np.mean((1 - X[own] @ w) ** 2),
            np.mean((-1 - X[~own] @ w) ** 2),
        )
        assert float(values[c]) == pytest.approx((inside + outside) / 2)
    assert values[2] == 0


def test_edges_help_detectors_with_one_example():
    # T-C8: 3 families of 3 categories; one of each family has a single example. The
    # text promises a gain without a number. Stable is that rare detectors err less;
    # over 30 seeds they did so in all of them, from 0.335 to 0.259 in the mean. Telling
    # a rare category from its relatives, by the loudest detector, does not get better
    # (error 0.82 to 0.86), so nothing is asserted about it.
    def errors(seed, alpha):
        rng = np.random.default_rng(seed)
        family = np.repeat(np.arange(3), 3)
        centre = 1.5 * rng.normal(size=(3, 10))[family] + rng.normal(size=(9, 10))
        count = np.where(np.arange(9) % 3 == 0, 1, 8)
        label, test = np.repeat(np.arange(9), count), np.repeat(np.arange(9), 30)

        def draw(labels):
            noise = 1.5 * rng.normal(size=(len(labels), 10))
            return np.c_[centre[labels] + noise, np.ones(len(labels))]

        X, X_test = draw(label), draw(test)
        stats = few_shot.one_vs_rest(X, label, 9)
        # A little ridge makes every detector unique, with and without edges.
        Q = np.asarray(stats.Q) + 1e-3 * np.eye(11)
        W = dense_solution(families, Q, stats.q, alpha)
        fires = X_test @ W.T > 0
        detection = [
            (np.mean(~fires[test == c, c]) + np.mean(fires[test != c, c])) / 2
            for c in (0, 3, 6)
        ]
        wrong = np.asarray(few_shot.classify(W, X_test)) != test
        return np.mean(detection), wrong.mean()

    families = builders.stochastic_block((3, 3, 3), 1.0, 0.0)
    alone = np.array([errors(seed, 0.0) for seed in range(8)])
    tied = np.array([errors(seed, 1.0) for seed in range(8)])
    print("rare detectors, all categories:", alone.mean(0), "with edges", tied.mean(0))
    assert (tied[:, 0] < alone[:, 0]).all()
    assert tied[:, 0].mean() < alone[:, 0].mean() - 0.03


def test_a_category_without_examples_takes_its_neighbours_detector():
    rng = np.random.default_rng(23)
    X, label = rng.normal(size=(12, 3)), np.repeat([0, 1], 6)
    stats = few_shot.one_vs_rest(X, label, 3)
    W = closed_form(builders.chain(3), stats.Q, stats.q, 0.1, require_unique=True)
    np.testing.assert_allclose(W[2], W[1], atol=1e-9)


# --- online ---


def test_tables_of_ints_are_floats():
    X, y = np.array([[1, 2], [3, 4]]), np.array([1, 2])
    columns = vertical.split_columns(X, np.array([0, 1]), 2)
    assert columns.X.dtype == jnp.float64
    whole = online_gd.online_gd(X, y, 0.01)
    np.testing.assert_allclose(whole, online_gd.online_gd(X * 1.0, y * 1.0, 0.01))
    stats = few_shot.one_vs_rest(X, np.array([0, 1]), 2)
    np.testing.assert_allclose(stats.c, 1)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        (power_decay(shift=6), lambda t: 1 / (t + 5)),
        (power_decay(power=0.5, shift=6), lambda t: (t + 5) ** -0.5),
    ],
    ids=["1/(t+5)", "1/sqrt(t+5)"],
)
def test_online_descent_follows_exercise_4_3(schedule, rate):
    rng = np.random.default_rng(24)
    true = np.array([1.0, -2.0])
    X = rng.uniform(-1, 1, size=(2000, 2))
    y = X @ true + 0.1 * rng.normal(size=2000)
    path = np.asarray(online_gd.online_gd(X, y, schedule))
    w = np.zeros(2)
    for t in range(1, 41):
        w = w + 2 * rate(t) * X[t - 1] * (y[t - 1] - w @ X[t - 1])
        np.testing.assert_allclose(path[t - 1], w, rtol=1e-9)
    assert np.linalg.norm(path[-1] - true) < 0.1
    constant = online_gd.online_gd(X[:1], y[:1], optax.constant_schedule(0.1))
    np.testing.assert_allclose(constant, 0.2 * X[:1] * y[:1, None])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: clustered.cluster_nodes(np.zeros((3, 1)), 4), "num_clusters"),
        (lambda: clustered.cluster_nodes(np.full((1, 1), np.nan), 1), "finite"),
        (lambda: clustered.cluster_nodes(np.zeros((3, 1)), 2, method=OTHER), "method"),
        (lambda: clustered.n_clusters(builders.chain(2), jnp.ones((2, 1)), -1), "tol"),
        (
            lambda: clustered.cluster_deviation_bound(
                builders.chain(2),
                np.arange(2) == 0,
                1.0,
                0.0,
                np.ones(2),
                1.0,
                np.eye(2),
            ),
            "lam2",
        ),
        (lambda: clustered.induced(builders.chain(2), np.zeros(2, bool)), "num_nodes"),
        (
            lambda: clustered.induced(builders.chain(5), np.arange(2)),
            "members must be bool",
        ),
        (
            lambda: clustered.boundary_weight(builders.chain(2), np.arange(2)),
            "members must be bool",
        ),
        (
            lambda: clustered.cluster_deviation_bound(
                builders.chain(2),
                np.array([True]),
                1.0,
                1.0,
                np.ones(2),
                1.0,
                np.eye(2),
            ),
            r"members must be bool of shape \(2,\)",
        ),
        (lambda: vertical.split_columns(np.ones((2, 2)), np.array([0, 2]), 2), "owner"),
        (lambda: vertical.split_columns(np.ones((2, 2)), np.array([0]), 2), "owner"),
        (
            lambda: vertical.vertical_gd(table_by_columns(0)[2], np.ones(3), 1, 0.1),
            "y must have shape",
        ),
        (
            lambda: vertical.lifted_statistics(table_by_columns(0)[2], np.ones(8), 3),
            "label_node",
        ),
        (
            lambda: vertical.lifted_statistics(
                table_by_columns(0)[2], np.ones(8), 0, b=0.0
            ),
            "b must be",
        ),
        (
            lambda: personalised.personalised_gd(
                builders.chain(2), blocks(0)[0], {"own": -1.0, "shared": 0.0}, 0.1
            ),
            r"alpha\['own'\]",
        ),
        (lambda: few_shot.one_vs_rest(np.ones((2, 1)), np.array([0, 2]), 2), "label"),
        (
            lambda: few_shot.one_vs_rest(np.ones((2, 1)), np.array([0, 0]), 2),
            "two categories",
        ),
        (lambda: online_gd.online_gd(np.ones((2, 1)), np.ones(3), 0.1), "shapes"),
        (lambda: online_gd.online_gd(np.ones((2, 1)), np.ones(2), 0.0), "eta"),
    ],
)
def test_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_masks_are_no_lists_of_nodes():
    graph = builders.chain(3)
    losses = quadratic(np.ones((3, 1, 1), np.float32), np.ones((3, 1), np.float32))
    words = "labelled must be bool"
    lists: list[Any] = [[0, 1, 2], [0, 2]]
    for wrong in lists:
        with pytest.raises(ValueError, match=words):
            semi_supervised.without_labels(losses, wrong)
        with pytest.raises(ValueError, match=words):
            semi_supervised.check_labels(graph, wrong)
        with pytest.raises(ValueError, match=words):
            semi_supervised.harmonic_residual(graph, jnp.ones((3, 1)), wrong)
    short = semi_supervised.without_labels(losses, np.array([True]))
    for call in (short.value, short.grad, lambda W: short.prox(W, 1.0)):
        with pytest.raises(ValueError, match=words):
            call(jnp.ones((3, 1)))


def test_owners_of_columns_are_ints():
    with pytest.raises(TypeError, match="owner must be ints"):
        vertical.split_columns(np.ones((2, 3)), np.array([0, 0.5, 1]), 2)


def test_detectors_refuse_features_that_are_not_finite():
    X = np.array([[1.0], [np.nan]])
    with pytest.raises(ValueError, match="X must be finite"):
        few_shot.one_vs_rest(X, np.array([0, 1]), 2)
