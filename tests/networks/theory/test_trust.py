"""Bounds on disturbed solutions and updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.networks.theory.problems import (
    EDGES,
    GRAPH,
    D,
    M,
    N,
    by_node,
    on,
    ragged_setting,
)

from fedjax_core.networks import builders, gtvmin
from fedjax_core.networks.graph import degree, laplacian
from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.theory.trust import (
    average_error,
    estimation_bounds,
    label_change,
    robustness_bound,
    robustness_quotient,
    sensitivity_bounds,
)

pytestmark = pytest.mark.usefixtures("x64")


def random_problems(seed, count=200):
    """Weights of a connected graph, alpha, features, labels' true part and noise."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-1, 1, (count, N, 1, 1))
    return (
        10.0 ** rng.uniform(-1.5, 1, (count, len(EDGES))),
        10.0 ** rng.uniform(-2, 2, count),
        size * rng.normal(size=(count, N, M, D)),
        rng.normal(size=(count, D)),
        rng.normal(size=(count, N, M)) * 10.0 ** rng.uniform(-1, 1, (count, N, 1)),
    )


def moments(X):
    return jnp.einsum("nmd,nme->nde", X, X) / M


# T-T1: Prop. 8.1 and the sharper forms.


def test_sensitivity_bounds_and_the_exact_change():
    @jax.jit
    @jax.vmap
    def one(weight, alpha, X, truth, change):
        graph, y = on(weight), X @ truth
        local = least_squares_statistics(X, y)
        moved = least_squares_statistics(X, y + change)
        before = gtvmin.closed_form(graph, local.Q, local.q, alpha)
        after = gtvmin.closed_form(graph, moved.Q, moved.q, alpha)
        matrix, _ = gtvmin.system(graph, local.Q, local.q, alpha)
        smallest = jnp.linalg.eigvalsh(matrix)[0]
        bounds = sensitivity_bounds(graph, local.Q, alpha, change, smallest)
        exact = label_change(graph, alpha, X, change)
        return after - before, exact, bounds

    difference, exact, bounds = one(*random_problems(0))
    np.testing.assert_allclose(difference, exact, rtol=1e-6, atol=1e-8)
    moved = (exact**2).sum((1, 2))
    assert (moved <= bounds.spectral + 1e-9).all()
    assert (bounds.spectral <= bounds.scaled * (1 + 1e-9)).all()
    np.testing.assert_allclose(bounds.scaled * M, bounds.printed, rtol=1e-9)


def test_nothing_is_promised_without_curvature_or_connection():
    flat = jnp.diag(jnp.array([1.0, 0]))[None].repeat(N, 0)
    got = sensitivity_bounds(GRAPH, flat, 1.0, jnp.ones((N, M)))
    assert np.isinf(got.printed)
    assert got.spectral is None
    cut = on(jnp.asarray(np.array([0.0, 1, 1, 1, 1, 0, 1])))
    full = jnp.eye(2)[None].repeat(N, 0)
    assert np.isfinite(sensitivity_bounds(GRAPH, full, 1.0, jnp.ones((N, M))).printed)
    # Node 0 is cut off.
    assert sensitivity_bounds(cut, full, 1.0, jnp.ones((N, M))).printed > 1e12
    with pytest.raises(ValueError, match="connected"):
        estimation_bounds(cut, full, 1.0, jnp.ones((N, M)))


# T-T2: estimation error.


def test_average_error_is_exact_and_bounded():
    @jax.jit
    @jax.vmap
    def one(weight, alpha, X, truth, noise):
        graph = on(weight)
        local = least_squares_statistics(X, X @ truth + noise)
        W = gtvmin.closed_form(graph, local.Q, local.q, alpha)
        exact = average_error(X, noise, W)
        return (
            W,
            W.mean(0) - truth,
            exact,
            estimation_bounds(graph, moments(X), alpha, noise),
        )

    weight, alpha, X, truth, noise = random_problems(1)
    W, error, exact, bounds = one(weight, alpha, X, truth, noise)
    np.testing.assert_allclose(error, exact, rtol=1e-6, atol=1e-8)
    assert ((error**2).sum(1) <= bounds.average + 1e-9).all()
    away = W - W.mean(1, keepdims=True)
    assert ((away**2).sum((1, 2)) <= bounds.deviation + 1e-9).all()
    # Eq. (167) as printed, with a plus, is not the error.
    plus = noise + np.einsum("bnmd,bnd->bnm", X, away)
    total = np.einsum("bnmd,bnme->bde", X, X)
    printed = np.linalg.solve(total, np.einsum("bnmd,bnm->bd", X, plus)[..., None])
    assert (np.abs(printed[..., 0] - error).max(1) > 1e-6).mean() > 0.9


# T-T3: the robustness quotient.


def test_robustness_quotient_and_where_it_is_attained():
    rng = np.random.default_rng(2)
    B = rng.normal(size=(N, D, D))
    Q = B @ B.transpose(0, 2, 1)
    losses = quadratic(Q, rng.normal(size=(N, D)))
    graph = on(jnp.asarray(rng.uniform(0.5, 2, len(EDGES))))
    alpha, by_node = 0.7, degree(graph)
    values, vectors = np.linalg.eigh(Q)
    bound = robustness_bound(2 * values[:, 0], alpha, by_node)
    V = jnp.asarray(rng.normal(size=(N, D)))
    for k in range(50):
        other = V + rng.normal(size=(N, D)) * 10.0 ** rng.uniform(-3, 3)
        if k == 0:
            other = V + 2.5 * vectors[:, :, 0]
        new = losses.prox(V, 2 * alpha * by_node)
        disturbed = losses.prox(other, 2 * alpha * by_node)
        quotient = robustness_quotient(new, disturbed, V, other)
        assert (quotient <= bound + 1e-9).all()
        if k == 0:
            np.testing.assert_allclose(quotient, bound, rtol=1e-9)
    np.testing.assert_allclose(robustness_bound(0.0, alpha, by_node), 1)
    assert robustness_bound(1.0, alpha, 0.0) == 0
    with pytest.raises(ValueError, match="alpha must be > 0"):
        robustness_bound(1.0, 0.0, 1.0)


# T-T6: subjective explainability.


def test_labels_of_all_nodes_count_at_large_alpha_in_float32():
    X, change = jnp.ones((10, 1, 1)), jnp.ones((10, 1))
    for alpha in (1e4, 1e6, 1e9):
        moved = label_change(builders.chain(10), alpha, X, change)
        np.testing.assert_allclose(moved, 1, rtol=1e-5)


# Nodes with different numbers of rows: what is not there holds NaN.


def test_changes_and_bounds_on_ragged_nodes():
    X, e, rows, *_ = ragged_setting()
    alpha, truth = 0.6, np.array([1.0, -2.0])
    graph = on(jnp.asarray(np.random.default_rng(10).uniform(0.5, 2, len(EDGES))))
    Q = by_node(lambda i, x: x.T @ x / len(x), rows, X)
    pull = by_node(lambda i, x, e: x.T @ e / len(x), rows, X, e)
    L = np.asarray(laplacian(graph, jnp.eye(N)))
    system = alpha * np.kron(L, np.eye(D))
    for i in range(N):
        system[i * D : (i + 1) * D, i * D : (i + 1) * D] += Q[i]
    moved = np.linalg.solve(system, pull.ravel()).reshape(N, D)
    np.testing.assert_allclose(
        label_change(graph, alpha, X, e, rows), moved, rtol=1e-9, atol=1e-12
    )

    energy = by_node(lambda i, e: (e**2).sum(), rows, e).sum()
    scaled = by_node(lambda i, e: (e**2).mean(), rows, e).sum()
    largest = np.linalg.eigvalsh(Q)[:, -1].max()
    smallest = np.linalg.eigvalsh(system)[0]
    bounds = sensitivity_bounds(graph, jnp.asarray(Q), alpha, e, smallest, rows)
    assert bounds.spectral is not None
    np.testing.assert_allclose(bounds.spectral, largest * scaled / smallest**2)
    np.testing.assert_allclose(bounds.printed / bounds.scaled, energy / scaled)
    assert (moved**2).sum() <= bounds.spectral <= bounds.scaled

    # With labels X w + e the solution is w away from what e alone would give.
    W = truth + moved
    np.testing.assert_allclose(
        average_error(X, e, jnp.asarray(W), rows), moved.mean(0), rtol=1e-9
    )
    lam2 = np.linalg.eigvalsh(L)[1]
    common = np.linalg.eigvalsh(Q.mean(0))[0]
    deviation, average = estimation_bounds(graph, jnp.asarray(Q), alpha, e, rows)
    np.testing.assert_allclose(deviation, scaled / (lam2 * alpha), rtol=1e-9)
    spread = 2 * (largest * scaled + largest**2 * deviation)
    np.testing.assert_allclose(average, spread / (N * common**2), rtol=1e-9)


def test_an_error_that_data_determine_in_part_only_is_its_least_norm():
    # Nobody looks at the second feature, so nothing is known of that parameter.
    rng = np.random.default_rng(20)
    X = np.concatenate([rng.normal(size=(N, M, 1)), np.zeros((N, M, 1))], -1)
    noise = rng.normal(size=(N, M))
    local = least_squares_statistics(X, X @ np.ones(D) + noise)
    W = np.asarray(gtvmin.closed_form(GRAPH, local.Q, local.q, 1.0))
    error = average_error(X, noise, jnp.asarray(W))
    np.testing.assert_allclose(error, [W[:, 0].mean() - 1, 0], atol=1e-9)
