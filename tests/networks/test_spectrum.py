"""Laplacian spectra against closed forms; components, projections and walks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csgraph

from fedjax_core import robust
from fedjax_core.algorithms.networks import fedrelax
from fedjax_core.networks import (
    builders,
    graph,
    gtvmin,
    projections,
    spectrum,
    variation,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import aggregate_by, copies, run

pytestmark = pytest.mark.usefixtures("x64")


def random_weights(network, seed=0):
    weight = np.random.default_rng(seed).random(network.num_edges)
    return network.with_weight(jnp.asarray(weight))


def laplacian_matrix(network):
    """Edge by edge in NumPy, apart from `Graph.dense`."""
    L = np.zeros((network.num_nodes,) * 2)
    for i, j, a in zip(
        *(np.asarray(x) for x in (network.head, network.tail, network.weight)),
        strict=True,
    ):
        L[[i, j, i, j], [i, j, j, i]] += [a, a, -a, -a]
    return L


def values(network):
    return np.linalg.eigvalsh(laplacian_matrix(network))


def test_TG2_known_spectra():
    n = 8
    chain = 2 - 2 * np.cos(np.pi * np.arange(n) / n)
    cases = [
        (builders.complete(n), np.r_[0, np.full(n - 1, n)]),
        (builders.star(n), np.r_[0, np.ones(n - 2), n]),
        (builders.chain(n), chain),
        (Graph.from_edges([(0, 1), (0, 2)]), np.r_[0, 1, 3]),
    ]
    for network, expected in cases:
        np.testing.assert_allclose(spectrum.eigenvalues(network), expected, atol=1e-12)
        second, largest = spectrum.extremes(network)
        np.testing.assert_allclose([second, largest], expected[[1, -1]], atol=1e-12)
    # Footnote 23: a pendant node keeps lambda_2 at 1.
    for c in (2, 3, 7):
        second = spectrum.extremes(builders.clique_plus_pendant(c)).second
        np.testing.assert_allclose(second, 1, atol=1e-12)


def test_lanczos_finds_the_same_eigenvalues():
    n = 520
    for network, second, largest in (
        (builders.star(n), 1, n),
        (builders.complete(n), n, n),
        (builders.cycle(n), 2 - 2 * np.cos(2 * np.pi / n), 4),
        (builders.stochastic_block([260, 260], 0.0, 0.0), 0, 0),
    ):
        np.testing.assert_allclose(
            spectrum.extremes(network), (second, largest), rtol=1e-8, atol=1e-10
        )
    network = random_weights(builders.stochastic_block([300, 300], 0.05, 0.002))
    np.testing.assert_allclose(
        spectrum.extremes(network), values(network)[[1, -1]], rtol=1e-8
    )


def test_connectivity_of_long_chains():
    n = 6_000
    second, largest = spectrum.extremes(builders.chain(n))
    np.testing.assert_allclose(second, 4 * np.sin(np.pi / n / 2) ** 2, rtol=1e-8)
    np.testing.assert_allclose(largest, 4 * np.cos(np.pi / n / 2) ** 2, rtol=1e-12)


def test_connectivity_of_weights_of_any_range():
    for a, b in ((1e-8, 1e8), (1e8, 1e-8), (1.0, 1e-30), (1e30, 3.0)):
        network = builders.chain(3).with_weight(np.array([a, b]))
        exact = 3 * a * b / (a + b + np.sqrt(a**2 + b**2 - a * b))
        np.testing.assert_allclose(spectrum.extremes(network).second, exact, rtol=1e-12)
    # Two tight groups of m and one loose link: w (1/m + 1/m) up to w / 1e8.
    for m in (4, 40):
        tight = builders.stochastic_block([m, m], 1.0, 0.0)
        edges = np.r_[np.stack([tight.head, tight.tail], 1), [[0, m]]]
        weight = np.r_[np.full(tight.num_edges, 1e8), 1e-8]
        network = Graph.from_edges(edges, weight)
        second = spectrum.extremes(network).second
        np.testing.assert_allclose(second, 2e-8 / m, rtol=1e-10)


def test_hops_are_shortest_paths():
    hops = jax.jit(lambda weight, start: spectrum.hops(full.with_weight(weight), start))
    full = builders.complete(12)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        weight = (rng.random(full.num_edges) < 0.15).astype(float)
        A = np.asarray(full.with_weight(weight).dense())
        start = rng.random(12) < 0.2
        far = csgraph.shortest_path(A, unweighted=True)[start].min(0, initial=np.inf)
        np.testing.assert_array_equal(hops(weight, start), np.minimum(far, 12))
    with pytest.raises(ValueError, match="start must be bool"):
        spectrum.hops(full, np.arange(12))


def test_TG3_inequalities_on_random_networks():
    """T-G3, T-L2: 100 networks; the bounds of Prop. 7.1 and of the largest degree."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        n = (2, 3, 5, 11)[seed % 4]  # few sizes, as every one compiles
        A = np.triu(rng.random((n, n)) * (rng.random((n, n)) < rng.random()), 1)
        L = np.diag((A + A.T).sum(1)) - A - A.T
        second, largest = np.linalg.eigvalsh(L)[[1, -1]]
        network = Graph.from_dense(A + A.T)
        np.testing.assert_allclose(
            spectrum.extremes(network), (max(second, 0), largest), atol=1e-9
        )
        deg = np.diagonal(L)
        assert second <= n / (n - 1) * deg.min() + 1e-9
        assert largest <= 2 * deg.max() + 1e-9
        W = rng.standard_normal((n, 2))
        apart = ((W - W.mean(0)) ** 2).sum()
        gtv = (W * (L @ W)).sum()
        assert second * apart - 1e-9 <= gtv <= largest * apart + 1e-9


def test_bounds_are_those_of_the_degrees_and_tight():
    """T-L2 equality for complete networks; Exercise 3.1 equality for even cycles."""
    complete, cycle = builders.complete(6), builders.cycle(6)
    np.testing.assert_allclose(spectrum.connectivity_bound(complete), 6)
    np.testing.assert_allclose(spectrum.extremes(complete).second, 6)
    np.testing.assert_allclose(spectrum.largest_bound(cycle), 4)
    np.testing.assert_allclose(spectrum.extremes(cycle).largest, 4)
    # Exercise 3.1: a chain comes close to 2 d_max = 4.
    for n, expected in ((10, 3.902), (100, 3.99901)):
        largest = spectrum.extremes(builders.chain(n)).largest
        np.testing.assert_allclose(largest, expected, atol=5e-4 if n == 10 else 5e-6)
    network = random_weights(builders.erdos_renyi(9, 0.6))
    deg = graph.degree(network)
    np.testing.assert_allclose(
        spectrum.connectivity_bound(network), 9 / 8 * deg.min(), rtol=1e-12
    )
    for bound in (spectrum.connectivity_bound, spectrum.extremes):
        with pytest.raises(ValueError, match="at least 2 nodes"):
            bound(builders.chain(1))


def test_TG4_an_edge_never_lowers_the_second_eigenvalue():
    for n in (3, 5, 8):
        full = builders.complete(n)
        rng = np.random.default_rng(n)
        # Row k of every network has its first k + 1 edges, in random order.
        place = rng.permuted(np.tile(np.arange(full.num_edges), (20, 1)), axis=1)
        added = place[:, None] <= np.arange(full.num_edges)[:, None]
        weight = added * rng.random((20, 1, full.num_edges))
        second = jax.jit(
            jax.vmap(lambda w, n=full: spectrum.eigenvalues(n.with_weight(w))[1])
        )(jnp.asarray(weight.reshape(-1, full.num_edges))).reshape(20, -1)
        assert (np.diff(second) >= -1e-9).all()
        # Fewer than n - 1 edges connect nothing, all of them do.
        np.testing.assert_allclose(second[:, : n - 2], 0, atol=1e-9)
        assert (second[:, -1] > 1e-3).all()
        for k, row in ((0, n - 1), (1, full.num_edges - 1)):
            net = full.with_weight(jnp.asarray(weight[k, row]))
            expected = values(net)[1]
            np.testing.assert_allclose(second[k, row], expected, atol=1e-9)
            np.testing.assert_allclose(
                spectrum.extremes(net).second, expected, atol=1e-9
            )


def propagate_labels(A):
    label = np.arange(len(A))
    while True:
        reach = np.where((A > 0) | np.eye(len(A), dtype=bool), label[None], len(A))
        if (reach.min(1) == label).all():
            return label
        label = reach.min(1)


def test_TG5_null_space_dimension_is_the_number_of_components():
    for seed in range(30):
        network = random_weights(builders.erdos_renyi(14, 0.1, seed), seed)
        L = laplacian_matrix(network)
        expected = propagate_labels(-L + np.diag(np.diagonal(L)))
        found = spectrum.components(network)
        assert len(set(zip(expected, found, strict=True))) == len(set(expected))
        count = len(set(found.tolist()))
        assert count == len(set(expected.tolist()))
        assert (np.linalg.eigvalsh(L) < 1e-9).sum() == count
        basis = np.asarray(spectrum.null_space(network))
        assert basis.shape == (14, count)
        np.testing.assert_allclose(L @ basis, 0, atol=1e-12)
        np.testing.assert_allclose(basis.T @ basis, np.eye(count), atol=1e-12)
    with pytest.raises(ValueError, match="2 components"):
        spectrum.check_connected(builders.stochastic_block([2, 2], 1.0, 0.0))
    spectrum.check_connected(builders.chain(3))


def test_TG6_walks_by_enumeration():
    network = builders.clique_plus_pendant(3).with_weight(jnp.asarray([0.5, 2, 1, 1]))
    A = np.asarray(network.dense()) > 0
    for steps in range(5):
        expected = np.zeros((4, 4), int)
        for walk in itertools.product(range(4), repeat=steps + 1):
            expected[walk[0], walk[-1]] += all(
                A[i, j] for i, j in itertools.pairwise(walk)
            )
        np.testing.assert_array_equal(spectrum.walk_counts(network, steps), expected)
    with pytest.raises(OverflowError):
        spectrum.walk_counts(builders.complete(10), 25)
    with pytest.raises(ValueError, match="steps must be >= 0"):
        spectrum.walk_counts(network, -1)


def test_TG8_missing_pairs_at_weight_zero_change_nothing():
    network = random_weights(builders.stochastic_block([4, 3], 0.8, 0.0, seed=1))
    i, j = np.triu_indices(7, 1)
    full = Graph.from_edges(np.stack([i, j], 1), np.asarray(network.dense())[i, j])
    assert full.num_edges == 21 > network.num_edges
    W = jnp.asarray(np.random.default_rng(0).standard_normal((7, 2)))
    # Nor do they change what a node makes of its sorted messages.
    rule = aggregate_by(functools.partial(robust.trim_extremes, b=1))
    operations = (
        graph.laplacian,
        graph.neighbour_sum,
        variation.gtv,
        lambda g, W: rule(g, copies(g, W)),
    )
    everything = jax.jit(lambda g: [f(g, W) for f in operations])
    dense, sparse = everything(full), everything(network)
    assert np.isfinite(sparse[-1][:4]).all()  # the others cannot leave out two
    for a, b in zip(dense, sparse, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    for of in (graph.num_neighbours, spectrum.components):
        np.testing.assert_array_equal(of(full), of(network))
    np.testing.assert_allclose(spectrum.extremes(full), spectrum.extremes(network))
    # Nor GTVMin, by its closed form and by FedRelax, which ends there.
    y = np.arange(7.0)[:, None]
    Q, q = np.ones((7, 1, 1)), -2 * y
    expected = np.linalg.solve(np.eye(7) + laplacian_matrix(network), y)
    for g in (network, full):
        np.testing.assert_allclose(
            gtvmin.closed_form(g, Q, q, 1.0), expected, rtol=1e-9
        )
        relax = fedrelax.make_quadratic(g, Q, q, alpha=1.0)
        found, _ = run(relax, jnp.zeros((7, 1)), 200)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_TG9_projections_split_every_network_of_models():
    rng = np.random.default_rng(0)
    W = {"a": rng.standard_normal((5, 3)), "b": rng.standard_normal(5)}
    mean, rest = projections.consensus(W), projections.deviation(W)
    for k, w in W.items():
        np.testing.assert_allclose(mean[k] + rest[k], w, atol=1e-12)
        np.testing.assert_allclose(mean[k], np.broadcast_to(w.mean(0), w.shape))
        np.testing.assert_allclose((mean[k] * rest[k]).sum(), 0, atol=1e-12)
        np.testing.assert_allclose(
            (w**2).sum(), (mean[k] ** 2).sum() + (rest[k] ** 2).sum(), rtol=1e-9
        )
    again = projections.consensus(mean)
    np.testing.assert_allclose(again["a"], mean["a"], atol=1e-12)


def test_TL1_expected_laplacian():
    n, p, draws = 6, 0.4, 4_000
    expected = np.asarray(spectrum.expected_laplacian(n, p))
    np.testing.assert_allclose(
        np.linalg.eigvalsh(expected), np.r_[0, np.full(n - 1, n * p)], atol=1e-12
    )
    rng, total = np.random.default_rng(0), np.zeros((n, n))
    for _ in range(draws):
        i, j = builders._random_pairs(n, p, rng)
        np.add.at(total, (i, j), -1)
    mean = (total + total.T) / draws
    np.fill_diagonal(mean, -mean.sum(1))
    # 15 frequencies and 6 degrees within 5 standard errors: false alarms below 2e-5.
    error = np.sqrt(p * (1 - p) / draws)
    off = ~np.eye(n, dtype=bool)
    assert (np.abs(mean - expected)[off] < 5 * error).all()
    assert (np.abs(np.diagonal(mean - expected)) < 5 * error * np.sqrt(n - 1)).all()


def test_a_network_in_pieces_has_no_connectivity_at_all():
    for n, m in ((3, 4), (300, 400)):  # dense and Lanczos
        pieces = builders.chain(n + m).with_weight(
            (np.arange(n + m - 1) != n - 1).astype(float)
        )
        assert spectrum.extremes(pieces, tol=1e-3).second == 0
    A = np.zeros((7, 7))
    A[:3, :3] = A[3:, 3:] = 1
    np.fill_diagonal(A, 0)
    assert spectrum.extremes(Graph.from_dense(A)).second == 0
