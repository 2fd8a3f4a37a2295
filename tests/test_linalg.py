"""Systems with unknowns of any units and any alpha, mostly in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import linalg
from fedjax_core.algorithms.networks import (
    agnostic_fedrelax,
    fedgd,
    fedprox,
    fedrelax,
    single_model,
    vertical,
)
from fedjax_core.networks import builders, duality, gtvmin, operators, oracles
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.theory import erm, gtvmin_bounds, leakage

ALPHAS = [0.0, 1.0, 1e3, 3e4, 1e6, 1e9]


def f32(x):
    return np.asarray(x, np.float32)


def close(actual, wanted, tol=1e-5):
    np.testing.assert_allclose(actual, wanted, rtol=tol, atol=tol)


def two_units():
    """Noiseless data of 30 nodes whose parameters are (0.001, 2) at every alpha."""
    rng = np.random.default_rng(0)
    X = f32(rng.normal(size=(30, 6, 2)) * [1000, 0.5])
    return X, oracles.least_squares_statistics(X, X @ f32([0.001, 2]))


def test_no_alpha_drops_a_feature_of_small_units():
    X, (Q, q, _) = two_units()
    chain = builders.chain(30)
    over_alpha = jax.jit(jax.vmap(lambda a: gtvmin.closed_form(chain, Q, q, a)))
    traced = over_alpha(jnp.asarray(ALPHAS))
    for k, alpha in enumerate(ALPHAS):
        W = gtvmin.closed_form(chain, Q, q, alpha, require_unique=True)
        assert W.dtype == jnp.float32
        for found, tol in ((W, 1e-5), (traced[k], 2e-4)):
            close(found * np.array([[1000, 1]]), [[1, 2]] * 30, tol)
    for alpha in (1e3, 3e4, 1e6):
        leakage.check_regular(chain, X, alpha)
        fedrelax.check_converges(chain, Q, alpha)
        got = leakage.label_sensitivity(chain, X, alpha)
        with jax.enable_x64(True):
            exact = leakage.label_sensitivity(chain, np.float64(X), alpha)
        close(got, exact, 1e-4)


@pytest.mark.parametrize("alpha", [1.0, 1e2, 1e4, 1e6])
def test_traced_weights_of_a_long_chain(alpha):
    n = 120
    chain, y = builders.chain(n), 1 + np.sin(np.arange(n))
    Q, q = np.ones((n, 1, 1), np.float32), f32(-2 * y[:, None])
    A = np.asarray(chain.dense(), np.float64)
    whole = np.eye(n) + alpha * (np.diag(A.sum(1)) - A)
    wanted = np.linalg.solve(whole, y)[:, None]
    size = np.abs(wanted).max()
    got = jax.jit(gtvmin.closed_form)(chain, Q, q, alpha)
    close(got / size, wanted / size, 2e-4)
    close(gtvmin.closed_form(chain, Q, q, alpha) / size, wanted / size, 1e-6)


@pytest.mark.parametrize("scale", [1, 1e2, 1e3, 1e4])
def test_twins_next_to_a_feature_of_small_units(scale):
    """The least norm shares between the twins, and nothing spoils the fit."""
    rng = np.random.default_rng(1)
    a, c = rng.normal(size=(2, 200))
    X = f32(np.stack([a * scale, a * scale, c / scale], 1))
    y = f32(X @ np.array([0.5 / scale, 0.5 / scale, 2 * scale]))
    Q, b = X.T @ X / 200, X.T @ y / 200
    units = np.array([scale, scale, 1 / scale])
    for solve in (linalg.least_norm_solve, jax.jit(linalg.least_norm_solve)):
        close(solve(Q, b) * units, [0.5, 0.5, 2], 1e-4)
    for inverse in (linalg.pinv, jax.jit(linalg.pinv)):
        close(inverse(X) @ y * units, [0.5, 0.5, 2], 1e-4)


def test_pinv_is_the_moore_penrose_inverse():
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        for m, d, rank in ((5, 3, 3), (3, 5, 3), (6, 4, 2), (2, 4, 1), (3, 2, 0)):
            A = rng.normal(size=(2, m, rank)) @ rng.normal(size=(2, rank, d))
            close(linalg.pinv(A), np.linalg.pinv(A, rcond=1e-12), 1e-9)
            close(jax.jit(linalg.pinv)(A), np.linalg.pinv(A, rcond=1e-12), 1e-9)


@pytest.mark.parametrize("graph", [builders.star(6), builders.cycle(6)])
def test_derivatives_where_eigenvalues_repeat(graph):
    with jax.enable_x64(True):
        y = np.arange(6.0)[:, None]

        def cost(alpha, y):
            W = gtvmin.closed_form(graph, np.ones((6, 1, 1)), -2 * y, alpha)
            return (W**2).sum()

        slope, along = jax.grad(cost, (0, 1))(1.0, jnp.asarray(y))
        h = 1e-5
        close(slope, (cost(1 + h, y) - cost(1 - h, y)) / (2 * h), 1e-6)
        # What is known beside a tangent does not hide it, in a jit or out of it.
        for wrap in (lambda f: f, jax.jit):
            close(wrap(jax.grad(lambda a: cost(a, y)))(1.0), slope, 1e-9)

        def by_weight(w):
            return gtvmin.closed_form(
                graph.with_weight(w), np.ones((6, 1, 1)), -2 * y, 1.0
            )[0, 0]

        ones = jnp.ones(graph.num_edges)
        up, down = (by_weight(ones.at[0].add(e)) for e in (h, -h))
        close(jax.grad(by_weight)(ones)[0], (up - down) / (2 * h), 1e-6)
        unit = np.eye(6)[:, [2]]
        central = (cost(1.0, y + h * unit) - cost(1.0, y - h * unit)) / (2 * h)
        close(along[2, 0], central, 1e-6)

        def pooled(Q):
            return gtvmin.locally_weighted(Q, jnp.ones((3, 2)), jnp.ones(3)).sum()

        eyes = jnp.broadcast_to(jnp.eye(2), (3, 2, 2))
        close(jax.grad(pooled)(eyes), np.full((3, 2, 2), 1 / 6), 1e-9)


def test_uniqueness_does_not_depend_on_units():
    _, (Q, q, c) = two_units()
    chain = builders.chain(30)
    assert all(gtvmin.is_unique(chain, Q, alpha) for alpha in ALPHAS)
    assert not gtvmin.is_unique(chain, Q * np.array([[[1, 0], [0, 0]]]), 1.0)
    duality.quadratic_conjugate(Q, q, c)


def test_ridge_keeps_features_and_intercepts_of_small_units():
    rng = np.random.default_rng(3)
    X = f32(rng.normal(size=(10_000, 2)) * [1000, 0.5])
    close(erm.ridge(X, 2 * X[:, 1]), [0, 2])
    alpha = 0.001
    exact = np.linalg.solve(
        np.float64(X).T @ X / 1e4 + alpha * np.eye(2), X.T @ (2.0 * X[:, 1]) / 1e4
    )
    close(erm.ridge(X, 2 * X[:, 1], alpha), exact)
    close(jax.jit(erm.ridge)(X, 2 * X[:, 1], alpha), exact, 1e-4)
    pressure = f32(101_325 + 500 * rng.normal(size=1000))
    X = np.stack([pressure, np.ones_like(pressure), rng.normal(size=1000)], 1)
    X = f32(X * [1, 1, 0.5])
    close(erm.ridge(X, 3 + 2 * X[:, 2]), [0, 3, 2], 1e-4)
    noise = f32(rng.normal(size=1000))
    error = erm.ridge(X, X[:, 2] + noise) - f32([0, 0, 1])
    assert (error @ error) <= erm.estimation_error_bound(X, noise)


def test_vertical_parts_keep_features_of_small_units():
    rng = np.random.default_rng(4)
    table = f32(rng.normal(size=(20, 3)) * [1000, 0.05, 1])
    w = np.array([1e-3, 20, 1])
    columns = vertical.split_columns(table, np.array([0, 0, 1]), 2)
    y = f32(table @ w)
    local = vertical.lifted_statistics(columns, y, 0)
    Z = gtvmin.closed_form(builders.chain(2), *local[:2], 1.0)
    close(vertical.read_out(columns, Z), [[1e-3, 20], [1, 0]], 1e-3)


def test_predictions_of_few_rows_at_large_alpha():
    """What the test set does not see is left to the node's own loss."""
    Q, q = np.eye(2, dtype=np.float32)[None].repeat(3, 0), -2 * np.ones((3, 2))
    test = np.ones((1, 2), np.float32)
    q = f32(q * np.array([[1, 0]]))  # w = (1, 0) alone
    for alpha in (1.0, 1e6, 1e9):
        method = agnostic_fedrelax.make_linear(
            builders.chain(3), Q, q, test, alpha=alpha
        )
        W, _ = operators.run(method, jnp.asarray(-q / 2), 20)
        close(W, -q / 2, 1e-4)


def test_predictions_inside_jit_are_those_outside():
    """Test sets that leave directions free, by all and by edge; constants in a jit."""
    rng = np.random.default_rng(6)
    x, graph = f32(rng.normal(size=(5, 3))), builders.cycle(5)
    Q, q = x[:, :, None] * x[:, None], f32(rng.normal(size=(5, 1))) * x
    for shape, alpha in (((1, 3), 0.0), ((1, 3), 0.5), ((5, 1, 3), 0.5)):
        test = f32(rng.normal(size=shape))

        def final(zero, test=test, alpha=alpha):
            method = agnostic_fedrelax.make_linear(graph, Q, q, test, alpha=alpha)
            return operators.run(method, jnp.zeros_like(q) + zero, 20)[0]

        close(jax.jit(final)(0.0), final(0.0), 1e-3)


def test_a_weak_edge_joins_what_has_no_loss():
    edges = np.array([[0, 1], [1, 2], [2, 3]])
    Q = f32(np.array([1, 0, 0, 1e-6]))[:, None, None]
    q = f32(np.array([-2, 0, 0, -1e-5]))[:, None]
    for weak in (1e-6, 1e-8):
        graph = Graph.from_edges(edges, np.array([1, weak, 1]))
        W = gtvmin.closed_form(graph, Q, q, 1.0, require_unique=True)
        with jax.enable_x64(True):
            A = np.array([1, weak, 1]) * np.eye(3)
            D = np.diff(np.eye(4), axis=0)
            exact = np.linalg.solve(
                np.diag(Q[:, 0, 0]) + D.T @ A @ D, -q.astype(float) / 2
            )
        close(W, exact, 1e-4)


def test_derivatives_of_ridge_and_pseudo_inverses():
    rng = np.random.default_rng(7)
    with jax.enable_x64(True):
        y = rng.normal(size=6)

        def cost(alpha, X):
            return (erm.ridge(X, y, alpha) ** 2).sum()

        slopes = jax.jit(jax.grad(cost, (0, 1)))
        h, unit = 1e-5, np.zeros((6, 3))
        unit[1, 2] = 1
        for X in (np.eye(6)[:, :3], rng.normal(size=(6, 3))):
            with_known_X = jax.jit(lambda alpha, X=X: jax.grad(cost)(alpha, X))
            for alpha in (0.0, 0.1, 1e3):
                slope, by_X = slopes(alpha, jnp.asarray(X))
                ahead = (cost(alpha + 2 * h, X) - cost(alpha, X)) / (2 * h)
                near = with_known_X(alpha + h)
                close(near, ahead, 1e-5)
                close(slope, near, 1e-3)
                up, down = cost(alpha, X + h * unit), cost(alpha, X - h * unit)
                close(by_X[1, 2], (up - down) / (2 * h), 1e-6)
        A, dA = rng.normal(size=(2, 2, 5, 3))
        tangent = jax.jit(lambda A, dA: jax.jvp(linalg.pinv, (A,), (dA,))[1])(A, dA)
        sides = [linalg.pinv(A + e * dA) for e in (1e-6, -1e-6)]
        close(tangent, (sides[0] - sides[1]) / 2e-6, 1e-5)


def test_slopes_in_mixed_units_are_those_in_one():
    rng = np.random.default_rng(9)
    X, y = f32(rng.normal(size=(5, 2))), f32(rng.normal(size=5))
    scale = f32([1, 1e6])

    ones = np.ones(2, np.float32)
    for f in (lambda X: erm.ridge(X, y), lambda X: linalg.pinv(X) @ y):
        # By units, so that the result is in those of X.
        slope = jax.jit(
            lambda units, f=f: jax.jacobian(lambda X: f(X * units[None]) * units)(X)
        )
        close(slope(scale), slope(ones), 1e-4)


def test_known_data_inside_jit():
    rng = np.random.default_rng(10)
    X, y = f32(rng.normal(size=(6, 2))), f32(rng.normal(size=6))
    X, y = jnp.asarray(X), jnp.asarray(y)
    swept = jax.jit(jax.vmap(lambda a: erm.ridge(X, y, a)))(jnp.array([0.0, 0.1]))
    close(swept, [erm.ridge(X, y), erm.ridge(X, y, 0.1)], 1e-4)
    Q, q = np.einsum("nd,ne->nde", X, X), -2 * X
    for fixed_point in (
        lambda q: fedprox.fixed_point(Q, q, 0.01),
        lambda q: single_model.fixed_point(Q, q, 0.01, 3),
    ):
        found = jax.jit(lambda zero, f=fixed_point: f(q) + zero)(0.0)
        close(found, fixed_point(q), 1e-5)
    by_Q = jax.jit(jax.grad(lambda Q: fedprox.fixed_point(Q, q, 0.1).sum()))
    assert np.isfinite(by_Q(np.tile(np.eye(2, dtype=np.float32), (6, 1, 1)))).all()


def test_a_pull_below_the_rounding_of_a_singular_loss_is_refused():
    rng = np.random.default_rng(5)
    X, chain = f32(rng.normal(size=(3, 1, 4))), builders.chain(3)
    Q, q, _ = oracles.least_squares_statistics(X, np.ones((3, 1), np.float32))
    for make in (
        lambda alpha: fedrelax.make_quadratic(chain, Q, q, alpha=alpha),
        lambda alpha: oracles.quadratic(Q, q).prox(q, alpha),
    ):
        make(1e-2)
        with pytest.raises(ValueError, match=r"alpha must pull.*at node"):
            make(1e-8)
    method = fedrelax.make_quadratic(chain, Q, q, alpha=1e-3)
    W, _ = operators.run(method, jnp.zeros_like(q), 1000)
    close(W, gtvmin.closed_form(chain, Q, q, 1e-3), 1e-2)
    # Regular losses may be pulled as little as one likes, whatever their units.
    _, (Q, q, _) = two_units()
    fedrelax.make_quadratic(builders.chain(30), Q, q, alpha=1e-9)


def test_fixed_points_where_nodes_leave_directions_free():
    with jax.enable_x64(True):
        Q = np.stack([np.diag([1.0, 0]), np.diag([0, 1.0])])
        q = -2 * np.array([[1.0, 0], [0, 2]])
        close(single_model.fixed_point(Q, q, 0.1, 5), [1, 2], 1e-9)
        close(fedprox.fixed_point(Q, q, 0.5), [1, 2], 1e-9)
        Q[1], q[1] = 0, 0  # nobody holds the second one
        close(single_model.fixed_point(Q, q, 0.1, 5), [1, 0], 1e-9)
        close(fedprox.fixed_point(Q, q, 0.5), [1, 0], 1e-9)
    x = f32(np.array([1, 2, -1]))
    Q, q = np.outer(x, x)[None], -2 * x[None]
    for steps in (5, 1000):
        for wrap in (lambda f: f, jax.jit):
            found = wrap(lambda Q, k=steps: single_model.fixed_point(Q, q, 0.05, k))(Q)
            close(found, x / 6, 1e-3)
    close(fedprox.fixed_point(Q, q, 100.0), x / 6, 1e-4)
    with pytest.raises(ValueError, match="steps must be >= 1"):
        single_model.fixed_point(Q, q, 0.05, 0)


def test_what_is_no_convex_problem_is_refused():
    chain, eye = builders.chain(2), np.broadcast_to(np.eye(2), (2, 2, 2))
    oracles.check_quadratic(f32(np.diag([1e6, 1e-6])[None]), definite=True)
    for Q in (np.diag([1.0, -1]), -np.eye(2) / 2):
        losses = oracles.quadratic(np.stack([np.eye(2), Q]), np.ones((2, 2)))
        with pytest.raises(ValueError, match="semi-definite, is not for node 1"):
            losses.prox(jnp.zeros((2, 2)), 0.9)
    skew = eye + np.array([[0, 5], [0, 0]])
    with pytest.raises(ValueError, match="Q must be symmetric, is not for node 0"):
        oracles.quadratic(skew, np.ones((2, 2)))
    for call in (
        lambda Q: fedgd.rate_bound(chain, Q, 1.0),
        lambda Q: fedgd.check_rate(chain, Q, 1.0, 0.1),
        lambda Q: gtvmin.default_rate(chain, Q, 1.0),
        lambda Q: gtvmin_bounds.eigenvalue_bounds(chain, Q, 1.0),
        lambda Q: fedrelax.make_quadratic(chain, Q, np.ones((2, 2)), alpha=1.0),
    ):
        with pytest.raises(ValueError, match="semi-definite"):
            call(-eye)
    with pytest.raises(ValueError, match="one row per node, 2, got shape"):
        gtvmin.default_rate(chain, np.ones((3, 1, 1)), 1.0)
    alone = Graph.from_edges([], num_nodes=2)
    with pytest.raises(ValueError, match="must not both be zero"):
        gtvmin.default_rate(alone, 0 * eye, 1.0)
    with pytest.raises(ValueError, match=r"weight must have shape \(2,\)"):
        gtvmin.locally_weighted(eye, np.ones((2, 2)), np.ones(1))
    with pytest.raises(ValueError, match=r"weight must be .* got -1.0 for node 1"):
        gtvmin.locally_weighted(eye, np.ones((2, 2)), np.array([1.0, -1.0]))
