"""GTVMin with the squared penalty: solutions, bounds and certificates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import linalg
from fedjax_core.networks import builders, duality, gtvmin, oracles, projections
from fedjax_core.networks.graph import Graph, edge_scatter
from fedjax_core.networks.spectrum import components, eigenvalues, extremes
from fedjax_core.networks.theory import gtvmin_bounds
from fedjax_core.networks.variation import Penalty, discrepancy, exact_test_set, gtv

RNG = np.random.default_rng(0)
ALPHAS = np.array([0.0, 0.1, 1.0, 10.0, 1e3])

pytestmark = pytest.mark.usefixtures("x64")


def close(actual, wanted, tol=1e-9):
    np.testing.assert_allclose(actual, wanted, rtol=tol, atol=tol)


def batch(f):
    return jax.jit(jax.vmap(f))


def graph64(edges, weight: Any = 1.0, num_nodes=None):
    return Graph.from_edges(edges, np.asarray(weight), num_nodes, dtype=np.float64)


def averaging(y):
    """f_i(w) = (w - y_i)^2."""
    y = np.asarray(y, np.float64)[:, None]
    return np.ones((len(y), 1, 1)), -2 * y, (y**2)[:, 0]


def chain3():
    """The running example: three nodes in a chain, y = (0, 0, 3)."""
    return graph64([[0, 1], [1, 2]]), averaging([0, 0, 3])


def complete(n):
    return graph64(np.argwhere(np.triu(np.ones((n, n)), 1)))


def random_networks(count, n=6, d=2, m=4, density=0.6):
    """Weights on the edges of a complete graph, 0 for no edge, and local data."""
    edges = n * (n - 1) // 2
    weight = RNG.uniform(0.1, 2, (count, edges)) * (
        RNG.uniform(size=(count, edges)) < density
    )
    X = RNG.normal(size=(count, n, m, d))
    return complete(n), weight, X, RNG.normal(size=(count, n, m))


def two_parts():
    """Two components and an isolated node."""
    return graph64([[0, 2], [2, 4], [1, 3], [0, 4]], [1.0, 2.0, 0.5, 0.0], 6)


def local_data(n=6, d=2, m=4):
    X, y = RNG.normal(size=(n, m, d)), RNG.normal(size=(n, m))
    Q = np.swapaxes(X, 1, 2) @ X / m
    q = -2 * np.einsum("nmd,nm->nd", X, y) / m
    return oracles.Quadratic(*map(jnp.asarray, (Q, q, (y**2).mean(1))))


def test_running_example():
    """G-CHAIN3: the numbers of the specification, all exact."""
    graph, (Q, q, c) = chain3()
    W = jax.jit(gtvmin.closed_form)(graph, Q, q, 1.0)
    close(W[:, 0], [0.375, 0.75, 1.875])

    @jax.jit
    def at_solution(W):
        U = duality.edge_duals(graph, W, 1.0)
        value = oracles.quadratic(Q, q, c).value(W).sum()
        duals = U[:, 0], duality.node_duals(graph, U)[:, 0]
        return gtvmin.system(graph, Q, q, 1.0), value, gtv(graph, W), duals

    (matrix, vector), value, variation, duals = at_solution(W)
    close(matrix, [[2, -1, 0], [-1, 3, -1], [0, -1, 2]])
    close(np.linalg.eigvalsh(matrix), [1, 2, 4])
    close(vector, [0, 0, -6])
    close(value, 1.96875)
    close(variation, 1.40625)
    found = jax.jit(duality.certificate)(graph, W, Q, q, c, 1.0)
    close(found, [3.375, 3.375, 0])
    close(duals[0], [0.75, 2.25])
    close(duals[1], [0.75, 1.5, -2.25])
    bounds = gtvmin_bounds.eigenvalue_bounds(graph, Q, 1.0)
    close(bounds, [1 / 17, 4, 5])
    noise, W = np.array([[-1.0], [-1.0], [2.0]]), np.asarray(W)
    close(((W - W.mean()) ** 2).sum(), 1.21875)
    close(gtvmin_bounds.deviation_bound(graph, noise, 1.0), 6)
    close(gtvmin.default_rate(graph, Q, 1.0), 0.1)
    close(gtvmin.consensus_limit(graph, Q, q), np.ones((3, 1)))


def test_closed_form_has_no_gradient():
    """T-M1."""
    graph, weight, X, y = random_networks(100)

    def one(w, x, labels, alpha):
        net = graph.with_weight(w)
        Q, q, c = oracles.least_squares_statistics(x, labels)
        W = gtvmin.closed_form(net, Q, q, alpha)
        losses = oracles.quadratic(Q, q, c)
        by_autodiff = jax.grad(lambda V: gtvmin.objective(losses, net, V, alpha))(W)
        return gtvmin.gradient(losses, net, W, alpha), by_autodiff

    explicit, by_autodiff = batch(one)(weight, X, y, RNG.uniform(0, 5, len(X)))
    close(explicit, np.zeros_like(explicit))
    close(by_autodiff, np.zeros_like(explicit))


def test_without_coupling_nodes_learn_alone():
    """T-M1."""
    X, y = RNG.normal(size=(6, 4, 2)), RNG.normal(size=(6, 4))
    Q, q, _ = jax.jit(oracles.least_squares_statistics)(X, y)
    alone = [np.linalg.lstsq(a, b)[0] for a, b in zip(X, y, strict=True)]
    solve = jax.jit(gtvmin.closed_form)
    close(solve(two_parts(), Q, q, 0.0), alone)
    close(solve(graph64([], num_nodes=6), Q, q, 3.0), alone)


def test_matrix_free_and_dense_forms_agree():
    graph = two_parts()
    Q, q, c = local_data()
    losses = oracles.quadratic(Q, q, c)
    W = RNG.normal(size=(6, 2))

    @jax.jit
    def both(W):
        free = (
            gtvmin.apply_system(graph, Q, W, 0.7),
            gtvmin.objective(losses, graph, W, 0.7),
            gtvmin.gradient(losses, graph, W, 0.7),
        )
        return gtvmin.system(graph, Q, q, 0.7), free

    (matrix, vector), (applied, value, gradient) = jax.tree.map(np.asarray, both(W))
    w = W.reshape(-1)
    close(applied.reshape(-1), matrix @ w)
    close(value, w @ matrix @ w + vector @ w + np.sum(c))
    close(gradient.reshape(-1), 2 * matrix @ w + vector)


def test_the_solution_is_unique_iff_every_component_pools_to_full_rank():
    """T-M2, on 100 random networks with local data of rank 0 to 2."""
    n, d = 6, 2
    graph, weight, X, _ = random_networks(100, n, d, m=2, density=0.25)
    X = X * (RNG.uniform(size=(100, n, 2, 1)) < 0.4)
    q = np.zeros((n, d))
    Q = np.einsum("knmd,knme->knde", X, X)
    matrix = batch(lambda w, Qi: gtvmin.system(graph.with_weight(w), Qi, q, 0.5)[0])(
        weight, Q
    )
    wanted = np.linalg.eigvalsh(matrix)[:, 0] > 1e-9
    got = [
        gtvmin.is_unique(graph.with_weight(jnp.asarray(w)), Qi, 0.5)
        for w, Qi in zip(weight, Q, strict=True)
    ]
    np.testing.assert_array_equal(got, wanted)
    assert 20 < wanted.sum() < 80
    assert not gtvmin.is_unique(two_parts(), local_data(m=1).Q, 0.0)
    assert gtvmin.is_unique(two_parts(), local_data(m=2).Q, 0.0)


def test_of_several_solutions_both_solvers_take_the_least():
    """T-M2 and X20: isolated nodes with a singular loss included."""
    graph = two_parts()
    Q, q, _ = local_data(m=1)
    keep = np.array([1, 0, 0, 0, 0, 1.0])
    Q, q = Q * keep[:, None, None], q * keep[:, None]
    matrix, vector = gtvmin.system(graph, Q, q, 0.5)
    wanted = (np.linalg.pinv(matrix, hermitian=True) @ (-vector / 2)).reshape(6, 2)
    close(gtvmin.closed_form(graph, Q, q, 0.5), wanted)
    solved = gtvmin.conjugate_gradients(graph, Q, q, 0.5)
    close(solved.W, wanted)
    assert solved.residual < 1e-12
    with pytest.raises(ValueError, match="unique"):
        gtvmin.closed_form(graph, Q, q, 0.5, require_unique=True)


@pytest.mark.parametrize("penalty", [None, Penalty(lambda u: jnp.cosh(u).sum(1))])
def test_gradients_balance_in_every_component(penalty):
    """T-M3, for the squared and another symmetric penalty."""
    graph = two_parts()
    losses = oracles.quadratic(*local_data())

    def total(w):
        return gtvmin.objective(losses, graph, w.reshape(6, 2), 0.5, penalty)

    def newton(_, w):
        return w - jnp.linalg.solve(jax.hessian(total)(w), jax.grad(total)(w))

    w = jax.jit(lambda w: jax.lax.fori_loop(0, 20, newton, w))(jnp.zeros(12))
    slope, gradients = jax.jit(
        lambda w: (jax.grad(total)(w), losses.grad(w.reshape(6, 2)))
    )(w)
    close(slope, np.zeros(12))
    sums = np.eye(3)[np.asarray(components(graph))].T @ np.asarray(gradients)
    close(sums, np.zeros((3, 2)))


def test_more_coupling_means_less_variation_and_consensus_in_the_limit():
    """T-M4: monotone, and alpha times the distance tends to a constant."""
    graph = two_parts()
    Q, q, c = local_data()
    losses = oracles.quadratic(Q, q, c)
    alphas = np.array([0.0, 0.1, 1.0, 10.0, 100.0, 1e4, 1e5])
    W = batch(lambda a: gtvmin.closed_form(graph, Q, q, a))(alphas)
    local = batch(lambda w: losses.value(w).sum())(W)
    variation = batch(lambda w: gtv(graph, w))(W)
    assert (np.diff(variation) <= 1e-9).all()
    assert (np.diff(local) >= -1e-9).all()
    assert (variation > 0).all()
    limit = gtvmin.consensus_limit(graph, Q, q)
    label = components(graph)
    for k in range(3):
        inside = label == k
        pooled = np.linalg.solve(Q[inside].sum(0), -q[inside].sum(0) / 2)
        close(limit[inside], np.broadcast_to(pooled, (inside.sum(), 2)))
        weighted = gtvmin.locally_weighted(Q, q, inside.astype(np.float64))
        close(weighted, pooled)
    scaled = alphas[-2:] * jnp.abs(W[-2:] - limit[None]).max((1, 2))
    close(scaled[0], scaled[1], 1e-3)
    assert scaled[0] > 1e-3


def test_deviation_bound():
    """T-M5: Prop. 3.1 with its two ingredients, on 100 random networks."""
    graph, weight, X, noise = random_networks(100)
    weight[:, [0, 5, 9, 12, 14]] += 0.2  # the chain, to connect them
    w_true = RNG.normal(size=(100, 2))
    y = np.einsum("knmd,kd->knm", X, w_true) + noise

    def one(w, x, labels, e, truth, alpha):
        net = graph.with_weight(w)
        Q, q, c = oracles.least_squares_statistics(x, labels)
        losses = oracles.quadratic(Q, q, c)
        W = gtvmin.closed_form(net, Q, q, alpha)
        V = jnp.broadcast_to(truth, W.shape)
        return (
            ((W - W.mean(0, keepdims=True)) ** 2).sum(),
            gtvmin_bounds.deviation_bound(net, e, alpha),
            gtvmin.objective(losses, net, V, alpha),
            gtvmin.objective(losses, net, W, alpha),
            alpha * eigenvalues(net)[1],
        )

    alpha = RNG.uniform(0.01, 5, 100)
    deviation, bound, at_truth, at_solution, strength = jax.jit(batch(one))(
        weight, X, y, noise, w_true[:, None], alpha
    )
    assert (deviation <= bound + 1e-9).all()
    close(at_truth, (noise**2).mean(2).sum(1))
    assert (at_solution >= strength * deviation - 1e-9).all()


@pytest.mark.parametrize("wide", [True, False])
def test_traced_bounds_see_what_is_disconnected_or_nearly(wide):
    noise = np.ones((12, 3), np.float32)
    Q = np.broadcast_to(np.eye(2, dtype=np.float32), (12, 2, 2))
    with jax.enable_x64(wide):
        network = builders.complete(12)

        @jax.jit
        @jax.vmap
        def bounds(weight):
            net = network.with_weight(weight)
            lower = gtvmin_bounds.eigenvalue_bounds(net, Q, 1.0).lower
            return gtvmin_bounds.deviation_bound(net, noise, 1.0), lower

        weight = np.random.default_rng(0).uniform(0.1, 2, (40, 66))
        weight[:20, np.asarray(network.head) == 0] = 0
        weight[20:, np.asarray(network.head) == 0] *= (
            10.0 ** np.arange(-1, -21, -1)[:, None]
        )
        deviation, lower = bounds(jnp.asarray(weight))
        assert np.isinf(deviation[:20]).all()
        assert (np.asarray(lower)[:20] == 0).all()
        # Connected, however weakly: nothing below the bound of exact eigenvalues.
        for k in range(20, 40):
            net = network.with_weight(weight[k])
            proven = 12 / extremes(net).second
            assert deviation[k] >= proven * (1 - 1e-6)
            known = gtvmin_bounds.deviation_bound(net, noise, 1.0)
            close(known, proven, 1e-6)
        with pytest.raises(ValueError, match="2 components"):
            gtvmin_bounds.deviation_bound(network.with_weight(weight[0]), noise, 1.0)


def test_deviation_bound_counts_existing_rows_only():
    graph, _ = chain3()
    mask = np.array([[True, True], [True, False], [False, True]])
    noise = np.array([[1.0, 3.0], [2.0, np.nan], [np.nan, 1.0]])
    close(gtvmin_bounds.deviation_bound(graph, noise, 2.0, mask), (5 + 4 + 1) / 2)


def test_error_splits_into_average_and_deviation():
    """T-M6, of solutions of GTVMin and in the limit of consensus."""
    graph, truth = complete(6), RNG.normal(size=2)
    Q, q, _ = local_data()
    limit = gtvmin.consensus_limit(graph, Q, q)
    for W in (gtvmin.closed_form(graph, Q, q, 0.3), limit):
        mean, rest = projections.consensus(W), projections.deviation(W)
        error = ((W - truth[None]) ** 2).sum()
        average = np.asarray(W).mean(0)
        close(((mean - truth[None]) ** 2).sum(), 6 * ((average - truth) ** 2).sum())
        close(error, ((mean - truth[None]) ** 2).sum() + (rest**2).sum())
        assert ((rest**2).sum() > 1e-3) == (W is not limit)
    close(projections.deviation(limit), np.zeros((6, 2)))


def test_averaging():
    """T-M7: Exercises 3.11 and 4.5."""
    graph = graph64([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]], [1, 2, 0.5, 1, 3.0])
    y = RNG.normal(size=4)
    Q, q, _ = averaging(y)
    L = np.asarray(np.diag(graph.dense().sum(1)) - graph.dense())
    W = batch(lambda a: gtvmin.closed_form(graph, Q, q, a))(ALPHAS)[..., 0]
    lam2 = extremes(graph).second
    for alpha, w in zip(ALPHAS, W, strict=True):
        close(w, np.linalg.solve(np.eye(4) + alpha * L, y))
        close(w.mean(), y.mean())
        far = np.linalg.norm(y - y.mean()) / (1 + alpha * lam2)
        assert np.linalg.norm(w - y.mean()) <= far + 1e-9


def test_averaging_on_a_star_and_a_pair():
    """T-M7: Exercise 3.12, where the centre has the mean at every alpha > 0."""
    star = graph64([[0, i] for i in range(1, 6)], 0.7)
    y = RNG.normal(size=5)
    Q, q, _ = averaging(np.r_[0, y])
    Q[0], q[0] = 0, 0
    W = batch(lambda a: gtvmin.closed_form(star, Q, q, a))(ALPHAS[1:])
    close(W[:, 0, 0], np.full(4, y.mean()))
    pair = graph64([[0, 1]])
    Q, q, _ = averaging([0, 1])
    W = gtvmin.closed_form(pair, Q, q, 1.0, require_unique=True)
    close(W[:, 0], [1 / 3, 2 / 3])


def test_dual_of_the_squared_penalty():
    """T-M8 on 100 random networks: the flow constraint, and primal = dual."""
    graph, weight, X, y = random_networks(100)

    def one(w, x, labels, alpha, off):
        net = graph.with_weight(w)
        Q, q, c = oracles.least_squares_statistics(x, labels)
        losses = oracles.quadratic(Q, q, c)
        W = gtvmin.closed_form(net, Q, q, alpha)
        U = duality.edge_duals(net, W, alpha)
        balance = losses.grad(W) + edge_scatter(net, U)
        # Any other point has a gap that bounds how far it is from optimal.
        excess = gtvmin.objective(losses, net, W + off, alpha) - gtvmin.objective(
            losses, net, W, alpha
        )
        at_solution = duality.certificate(net, W, Q, q, c, alpha)
        return (
            balance,
            at_solution,
            duality.certificate(net, W + off, Q, q, c, alpha),
            excess,
        )

    off = 0.1 * RNG.normal(size=(100, 6, 2))
    balance, best, other, excess = batch(one)(
        weight, X, y, RNG.uniform(0.1, 5, 100), off
    )
    close(balance, np.zeros_like(balance))
    close(best.primal, best.dual)
    assert (other.gap >= excess - 1e-9).all()


def test_nothing_flows_along_edges_of_weight_0():
    graph = graph64([[0, 1], [1, 2], [0, 2]], [1.0, 1.0, 0.0])
    Q, q, c = averaging([0, 0, 3])
    conjugate = duality.quadratic_conjugate(Q, q, c)
    U = jnp.array([[0.75], [2.25], [0.0]])
    close(duality.dual_value(graph, U, 1.0, conjugate), 3.375)
    assert duality.dual_value(graph, U.at[2].set(1), 1.0, conjugate) == -jnp.inf


def test_quadratic_conjugate():
    """Against its definition: z'w - f(w) at the w where grad f(w) = z."""
    Q, q, c = local_data()
    losses = oracles.quadratic(Q, q, c)
    W = jnp.asarray(RNG.normal(size=(6, 2)))
    Z = losses.grad(W)
    close(duality.quadratic_conjugate(Q, q, c)(Z), (Z * W).sum(1) - losses.value(W))


def test_eigenvalue_bounds():
    """T-F3: Prop. 5.1 and 5.2 on 200 random networks, and the slip X5."""
    graph, weight, X, y = random_networks(200)
    X = X * RNG.uniform(0, 2, (200, 6, 1, 1))
    alpha = RNG.uniform(0.01, 5, 200)

    def one(w, x, labels, a):
        net = graph.with_weight(w)
        Q, q, _ = oracles.least_squares_statistics(x, labels)
        values = jnp.linalg.eigvalsh(gtvmin.system(net, Q, q, a)[0])
        bounds = gtvmin_bounds.eigenvalue_bounds(net, Q, a)
        lam_max = jnp.linalg.eigvalsh(Q).max()
        larger = jnp.maximum(lam_max, a * eigenvalues(net)[-1])
        return values, bounds, larger, gtvmin.default_rate(net, Q, a)

    values, bounds, larger, rate = batch(one)(weight, X, y, alpha)
    assert (values[:, 0] >= bounds.lower - 1e-9).all()
    assert (bounds.lower > 0).mean() > 0.8
    assert (values[:, -1] <= bounds.upper + 1e-9).all()
    assert (bounds.upper <= bounds.upper_by_degree + 1e-9).all()
    # The maximum of the two parts, as in the book's proof, is no bound.
    assert (values[:, -1] > larger + 1e-9).any()
    close(rate, 1 / (2 * bounds.upper_by_degree))


def test_lower_bound_is_0_where_the_proposition_is_silent():
    Q = local_data().Q
    assert gtvmin_bounds.eigenvalue_bounds(two_parts(), Q, 1.0).lower == 0
    assert gtvmin_bounds.eigenvalue_bounds(two_parts(), 0 * Q, 1.0).lower == 0


def test_conjugate_gradients_on_a_larger_network():
    n, d = 600, 3
    edges = np.c_[np.arange(n - 1), np.arange(1, n)]
    jumps = np.c_[np.arange(n - 50), np.arange(50, n)]
    graph = graph64(np.r_[edges, jumps])
    Q, q, c = local_data(n, d, 2)
    solved = jax.jit(gtvmin.conjugate_gradients)(graph, Q, q, 1.0)
    assert solved.residual < 1e-12
    losses = oracles.quadratic(Q, q, c)
    gradient = jax.jit(lambda W: gtvmin.gradient(losses, graph, W, 1.0))(solved.W)
    assert jnp.abs(gradient).max() < 1e-10


def test_node_objectives_are_coupled_empirical_risks():
    """S12: in its own row, a node's gradient is that of the whole problem."""
    graph = two_parts()
    losses = oracles.quadratic(*local_data())
    W = RNG.normal(size=(6, 2))

    @jax.jit
    def everything(W):
        def each(W):
            return gtvmin.node_objectives(losses, graph, W, 0.7)

        gradient = gtvmin.gradient(losses, graph, W, 0.7)
        return jax.jacobian(each)(W), gradient, each(W), losses.value(W)

    jacobian, gradient, by_node, alone = everything(W)
    close(np.asarray(jacobian)[np.arange(6), np.arange(6)], gradient)
    A = np.asarray(graph.dense())
    distance = ((W[:, None] - W[None]) ** 2).sum(-1)
    close(by_node, alone + 0.7 * (A * distance).sum(1))


def test_non_parametric_objective_on_an_exact_test_set():
    graph = two_parts()
    losses = oracles.quadratic(*local_data())
    W = jnp.asarray(RNG.normal(size=(6, 2)))
    points = exact_test_set(2)
    apart = discrepancy(graph, lambda w, x: x @ w, W, points, shared=True)
    close(
        gtvmin.discrepancy_objective(losses.value(W), graph, apart, 0.7),
        gtvmin.objective(losses, graph, W, 0.7),
    )


def test_parameters_may_be_pytrees():
    graph = two_parts()
    W = {"a": RNG.normal(size=(6, 2, 3)), "b": np.arange(6.0)}
    flat = np.concatenate([W["a"].reshape(6, 6), W["b"][:, None]], 1)
    cost = jax.jit(lambda W: gtvmin.objective(oracles.zero(), graph, W, 2.0))
    close(cost(W), cost(flat))


def test_bad_arguments_are_refused():
    graph, (Q, q, c) = chain3()
    W = jnp.zeros((3, 1))
    losses = oracles.quadratic(Q, q, c)
    calls = [
        lambda a: gtvmin.objective(losses, graph, W, a),
        lambda a: gtvmin.gradient(losses, graph, W, a),
        lambda a: gtvmin.node_objectives(losses, graph, W, a),
        lambda a: gtvmin.closed_form(graph, Q, q, a),
        lambda a: gtvmin.conjugate_gradients(graph, Q, q, a),
        lambda a: gtvmin.is_unique(graph, Q, a),
        lambda a: gtvmin_bounds.eigenvalue_bounds(graph, Q, a),
        lambda a: gtvmin.default_rate(graph, Q, a),
        lambda a: gtvmin_bounds.deviation_bound(graph, W, a),
        lambda a: duality.edge_duals(graph, W, a),
    ]
    for call in calls:
        for alpha in (-1.0, np.nan):
            with pytest.raises(ValueError, match="alpha"):
                call(alpha)
    with pytest.raises(ValueError, match="alpha must be > 0"):
        gtvmin_bounds.deviation_bound(graph, W, 0.0)
    with pytest.raises(ValueError, match="shapes"):
        gtvmin.closed_form(graph, Q[:2], q[:2], 1.0)
    with pytest.raises(ValueError, match="connected"):
        gtvmin_bounds.deviation_bound(two_parts(), np.ones((6, 1)), 1.0)
    with pytest.raises(ValueError, match="noise and mask"):
        gtvmin_bounds.deviation_bound(graph, np.ones((4, 1)), 1.0)
    with pytest.raises(ValueError, match=r"definite.*node 1"):
        duality.quadratic_conjugate(Q * np.array([1, 0, 1])[:, None, None], q, c)
    with pytest.raises(ValueError, match="tol"):
        gtvmin.conjugate_gradients(graph, Q, q, 1.0, tol=0.0)


def dense(graph, Q, alpha):
    n, d = Q.shape[:2]
    A = np.asarray(graph.dense(), np.float64)
    whole = alpha * np.kron(np.diag(A.sum(1)) - A, np.eye(d))
    for i in range(n):
        whole[i * d : (i + 1) * d, i * d : (i + 1) * d] += Q[i]
    return whole


@pytest.mark.parametrize("alpha", [1e-2, 1.0, 1e4, 1e6, 1e9])
def test_large_alpha_does_not_drown_the_losses_in_float32(alpha):
    rng, n = np.random.default_rng(0), 40
    x = rng.normal(size=(n, 3, 2))
    Q, q = np.einsum("nmd,nme->nde", x, x), rng.normal(size=(n, 2))
    wanted = np.linalg.solve(dense(builders.chain(n), Q, alpha), -q.ravel() / 2)
    with jax.enable_x64(False):
        graph, y = builders.chain(n), np.arange(n, dtype=np.float32)[:, None]
        got = gtvmin.closed_form(
            graph, np.float32(Q), np.float32(q), alpha, require_unique=True
        )
        assert got.dtype == jnp.float32
        mean = gtvmin.closed_form(graph, np.ones((n, 1, 1), np.float32), -2 * y, alpha)
        assert float(mean.mean()) == pytest.approx(y.mean(), rel=1e-5)
        # The same with weights that are traced.
        traced = jax.jit(
            lambda w: gtvmin.closed_form(graph.with_weight(w), Q, q, alpha)
        )(graph.weight)
    close(got, wanted.reshape(n, 2), 1e-4)
    close(traced, wanted.reshape(n, 2), 1e-3)


def test_one_node_with_data_decides_at_any_alpha_in_float32():
    with jax.enable_x64(False):
        Q = np.zeros((10, 1, 1), np.float32)
        Q[0] = 1
        for alpha in (1e-6, 1.0, 1e6, 1e9):
            close(
                gtvmin.closed_form(builders.chain(10), Q, -2 * Q[..., 0], alpha),
                1,
                1e-3,
            )


def test_scales_of_nodes_and_features_do_not_matter():
    with jax.enable_x64(False):
        size = np.array([1e-6, 1, 1e6], np.float32)
        W = gtvmin.closed_form(
            builders.chain(3), size[:, None, None], -2 * size[:, None], 0.0
        )
        close(W, 1, 1e-6)
        X = RNG.normal(size=(3, 50, 2)) * [1000, 0.5]
        Q, q, _ = oracles.least_squares_statistics(
            np.float32(X), np.float32(2 * X[..., 1])
        )
        close(gtvmin.consensus_limit(builders.chain(3), Q, q), [[0, 2]] * 3, 1e-4)
        close(gtvmin.locally_weighted(Q, q, np.ones(3)), [0, 2], 1e-4)


def test_least_norm_whatever_the_scale():
    """A pseudo-inverse in the original units, and of matrices of zeros."""
    B = RNG.normal(size=(20, 4, 2)) * np.array([1e3, 1, 1, 1e-3])[:, None]
    Q = B @ np.swapaxes(B, 1, 2)
    Q[0] = 0
    found = linalg.pseudo_inverse(jnp.asarray(Q))
    assert found.singular.all()
    b = (Q @ RNG.normal(size=(20, 4, 1)))[..., 0]
    wanted = np.stack(
        [np.linalg.lstsq(B[i].T, np.linalg.lstsq(B[i], b[i])[0])[0] for i in range(20)]
    )
    close(
        linalg.least_norm_solve(jnp.asarray(Q), jnp.asarray(b)),
        np.where(np.abs(Q).max((1, 2), keepdims=True)[:, 0] > 0, wanted, 0),
        1e-6,
    )


def test_losses_that_are_not_convex_are_refused():
    graph, (Q, q, _) = chain3()
    for call in (gtvmin.closed_form, gtvmin.conjugate_gradients):
        with pytest.raises(ValueError, match=r"semi-definite.*node 0"):
            call(graph, -Q, q, 1.0)
