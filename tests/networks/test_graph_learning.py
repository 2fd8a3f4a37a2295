"""Dissimilarities of data sets and the networks learned from them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from fedjax_core.networks import graph_learning, oracles

pytestmark = pytest.mark.usefixtures("x64")


def distances(n, seed):
    x = np.random.default_rng(seed).random((n, 2))
    return np.linalg.norm(x[:, None] - x[None], axis=-1)


def exact_optimum(d, degree):
    i, j = np.triu_indices(len(d), 1)
    incidence = np.zeros((len(d), len(i)))
    incidence[i, np.arange(len(i))] = incidence[j, np.arange(len(i))] = 1
    degrees = np.full(len(d), degree)
    return linprog(d[i, j], A_eq=incidence, b_eq=degrees, bounds=(0, 1)).fun


@pytest.mark.parametrize("degree", [1, 2, 2.5, 3])
def test_TL4_least_dissimilarity_with_given_degrees(degree):
    for seed in range(4):
        d = distances(6, seed)
        found = graph_learning.degree_constrained(d, degree)
        A = np.asarray(found.weights)
        assert abs(found.objective - exact_optimum(d, degree)) < 1e-6
        assert found.residual < 1e-9
        assert (A >= 0).all()
        assert (A <= 1).all()
        np.testing.assert_array_equal(A, A.T)
        np.testing.assert_array_equal(np.diagonal(A), 0)
        np.testing.assert_allclose(A.sum(1), degree, atol=1e-9)
        np.testing.assert_allclose(found.objective, (A * d).sum() / 2)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_TL4_nothing_half_integral_costs_less(degree):
    """Vertices of this polytope have weights 0, 1/2 and 1: all 3^10 of five nodes."""
    i, j = np.triu_indices(5, 1)
    ends = np.eye(5)[i] + np.eye(5)[j]
    all_weights = np.stack(np.meshgrid(*[[0, 0.5, 1]] * 10), -1).reshape(-1, 10)
    valid = all_weights[(all_weights @ ends == degree).all(1)]
    for seed in range(3):
        d = distances(5, seed)
        found = graph_learning.degree_constrained(d, degree)
        np.testing.assert_allclose(found.objective, (valid @ d[i, j]).min())


def test_TL4_half_integral_solution_and_extreme_degrees():
    d = np.full((6, 6), 10.0)
    d[:3, :3] = d[3:, 3:] = 1
    found = graph_learning.degree_constrained(d, 1)
    inside = np.kron(np.eye(2), np.ones((3, 3)) - np.eye(3))
    np.testing.assert_allclose(found.weights, inside / 2, atol=1e-9)
    # 6 over ordered pairs, as the book counts.
    np.testing.assert_allclose(2 * found.objective, 6, rtol=1e-9)
    for degree, expected in ((0, np.zeros((6, 6))), (5, 1 - np.eye(6))):
        found = graph_learning.degree_constrained(d, degree)
        np.testing.assert_allclose(found.weights, expected, atol=1e-9)
    pair = graph_learning.degree_constrained(2 - 2 * np.eye(2), 0.25)
    np.testing.assert_allclose(pair.weights, [[0, 0.25], [0.25, 0]])
    alone = graph_learning.degree_constrained(np.zeros((1, 1)), 0)
    assert alone.weights.tolist() == [[0.0]]


def test_TL5_edge_budget_equals_brute_force():
    i, j = np.triu_indices(5, 1)
    for seed in range(5):
        d = distances(5, seed)
        d = (d + d.T) / 2
        for budget in range(11):
            best = min(
                sum(chosen)
                for chosen in itertools.combinations(d[i, j].tolist(), budget)
            )
            network = graph_learning.edge_budget(d, budget)
            total = np.asarray(network.weight) @ d[network.head, network.tail]
            np.testing.assert_allclose(total, best, atol=1e-12)
            assert network.num_edges == budget
    d = distances(5, 0)
    d = (d + d.T) / 2
    network = graph_learning.edge_budget(d, 2.25)
    np.testing.assert_allclose(np.sort(network.weight), [0.25, 1, 1])
    assert d[network.head[-1], network.tail[-1]] == np.sort(d[i, j])[2]


def test_TL6_distances_of_representations():
    Z = {"a": jnp.asarray([[0.0, 3.0], [4.0, 0.0], [0.0, 3.0]]), "b": jnp.zeros(3)}
    d = graph_learning.representation_distance(Z)
    np.testing.assert_allclose(d, [[0, 5, 0], [5, 0, 5], [0, 5, 0]])
    y = jnp.asarray([1.0, -2.0, 4.0])
    np.testing.assert_array_equal(
        graph_learning.representation_distance(y), np.abs(y[:, None] - y[None])
    )


def test_TL6_label_histograms_and_overlap():
    labels = np.array([[0, 0, 1, 1], [1, 1, 1, 2], [0, 0, 1, 1], [2, 0, 0, 0]])
    mask = np.ones((4, 4), bool)
    mask[3, 1:] = False
    counts = graph_learning.label_counts(labels, 3, mask)
    assert counts.tolist() == [[2, 2, 0], [0, 3, 1], [2, 2, 0], [0, 0, 1]]
    shares = graph_learning.label_shares(counts)
    d = graph_learning.representation_distance(shares)
    np.testing.assert_array_equal(d, d.T)
    np.testing.assert_allclose(d[0], [0, np.sqrt(6) / 4, 0, np.sqrt(1.5)])
    overlap = np.asarray(graph_learning.label_overlap(counts))
    np.testing.assert_array_equal(overlap, overlap.T)
    # Nodes 0 and 1 share label 1: 2 + 3 of 8 points; 1 and 3 share 2: 1 + 1 of 5.
    np.testing.assert_allclose(overlap[0], [1, 5 / 8, 1, 0])
    np.testing.assert_allclose(overlap[1, 3], 2 / 5)
    assert np.isfinite(graph_learning.label_overlap(np.zeros((2, 3), int))).all()


def test_TL6_codes_of_data_sets():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((5, 5)))[0][:, :2]
    X = rng.standard_normal((4, 30, 2)) @ basis.T
    X[2] = X[1]
    mask = np.ones((4, 30), bool)
    mask[3, 10:] = False
    X[3, 10:] = np.nan
    encode = graph_learning.linear_encoder(X, 2, mask)
    codes = graph_learning.mean_code(encode, jnp.asarray(X), mask)
    assert codes.shape == (4, 2)
    d = np.asarray(graph_learning.representation_distance(codes))
    np.testing.assert_array_equal(d, d.T)
    assert d[1, 2] == 0
    # Data in a plane: two components keep all distances between means.
    means = np.array([x[m].mean(0) for x, m in zip(X, mask, strict=True)])
    np.testing.assert_allclose(
        d, np.linalg.norm(means[:, None] - means[None], axis=-1), atol=1e-12
    )
    np.testing.assert_allclose(
        graph_learning.mean_code(encode, jnp.asarray(X[:3])), codes[:3], atol=1e-12
    )
    with pytest.raises(ValueError, match="size must be"):
        graph_learning.linear_encoder(X, 6)


def test_TL7_gradient_representation_equals_autodiff():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((3, 6, 2)), rng.standard_normal((3, 6))
    losses = oracles.quadratic(*oracles.least_squares_statistics(X, y))
    v = jnp.asarray([0.5, -1.0])
    found = graph_learning.gradient_representation(losses, v, 3)
    for i in range(3):
        expected = jax.grad(lambda w, i=i: ((y[i] - X[i] @ w) ** 2).mean())(v)
        np.testing.assert_allclose(found[i], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("distance", "message"),
    [
        ([[0.0, -1.0], [-1.0, 0.0]], ">= 0 and finite"),
        ([[0.0, np.nan], [np.nan, 0.0]], ">= 0 and finite"),
        ([[0.0, 1.0], [2.0, 0.0]], "symmetric"),
    ],
)
def test_bad_distances(distance, message):
    for learn in (graph_learning.degree_constrained, graph_learning.edge_budget):
        with pytest.raises(ValueError, match=message):
            learn(np.array(distance), 1)


@pytest.mark.parametrize("amount", [-0.5, 3.5, np.nan])
def test_bad_degrees_and_budgets(amount):
    d = distances(3, 0)
    with pytest.raises(ValueError, match=r"degree must be in \[0, 2\]"):
        graph_learning.degree_constrained(d, amount)
    with pytest.raises(ValueError, match=r"num_edges must be in \[0, 3\]"):
        graph_learning.edge_budget(d, amount)


def test_offsets_and_outliers_do_not_hide_the_optimum():
    """Distances that hide their differences: an offset, one far pair, one far node."""
    for seed in range(3):
        d = distances(6, seed)
        far = d.copy()
        far[0, 1] = far[1, 0] = 1000
        alone = 100 * (np.arange(6) == 0)
        node = d + np.abs(alone[:, None] - alone)
        for hidden in (d + 100 * (1 - np.eye(6)), far, node):
            found = graph_learning.degree_constrained(hidden, 2)
            best = exact_optimum(hidden, 2)
            np.testing.assert_allclose(found.objective, best, rtol=1e-6)


def test_labels_that_are_no_classes_are_refused():
    labels = np.array([[0, 2], [1, 3]])
    for bad in (labels, labels - 1):
        with pytest.raises(ValueError, match=r"labels must be in 0\.\.2, got"):
            graph_learning.label_counts(bad, 3)
    with pytest.raises(TypeError, match="labels must be ints"):
        graph_learning.label_counts(labels / 2, 3)
    exist = np.array([[True, True], [True, False]])
    counts = graph_learning.label_counts(labels, 3, exist)
    np.testing.assert_array_equal(counts, [[1, 0, 1], [0, 1, 0]])


def tight_clusters(spread):
    rng = np.random.default_rng(0)
    x = np.eye(2)[np.repeat([0, 1], 10)] + spread * rng.standard_normal((20, 2))
    return np.linalg.norm(x[:, None] - x[None], axis=-1)


@pytest.mark.parametrize("spread", [1e-3, 1e-6])
def test_tight_clusters_are_told_apart(spread):
    d = tight_clusters(spread)
    found = graph_learning.degree_constrained(d, 1)
    # In units in which the solver's own tolerance of 1e-7 is small.
    best = exact_optimum(d / spread, 1)
    np.testing.assert_allclose(found.objective / spread, best, rtol=1e-6)
    assert found.residual < 1e-9
