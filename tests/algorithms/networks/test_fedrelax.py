"""FedRelax with parameters and with predictions, against closed forms in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import agnostic_fedrelax, fedgd, fedrelax
from fedjax_core.networks import asynchronous, builders, gtvmin, operators
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.iterate import block_max_norm
from fedjax_core.networks.oracles import least_squares_statistics, quadratic, zero

CHAIN = np.array([(0, 1), (1, 2)])
PAIR = np.array([(0, 1)])

pytestmark = pytest.mark.usefixtures("x64")


def problem(seed=0, n=7, d=3, edges=None):
    rng = np.random.default_rng(seed)
    if edges is None:
        edges = np.array(
            [(i, j) for i in range(n) for j in range(i) if j == i - 1 or i + j == n]
        )
    graph = Graph.from_edges(edges, rng.uniform(0.3, 2, len(edges)), n, np.float64)
    X = rng.normal(size=(n, 6, d))
    Q = jnp.asarray(np.einsum("nmd,nme->nde", X, X) / 6)
    return graph, Q, jnp.asarray(rng.normal(size=(n, d)))


# T-F7
def test_chain_of_three_nodes():
    """The iterates and the factor of G-CHAIN3."""
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    Q, q = jnp.ones((3, 1, 1)), -2 * jnp.array([[0.0], [0.0], [3.0]])
    expected = [(0, 0, 1.5), (0, 0.5, 1.5), (0.25, 0.5, 1.75), (0.25, 2 / 3, 1.75)]
    for operator in (
        fedrelax.make_quadratic(graph, Q, q, alpha=1.0),
        fedrelax.make(graph, quadratic(Q, q), alpha=1.0),
    ):
        _, got = operators.run(operator, jnp.zeros((3, 1)), 4, record=lambda W: W)
        np.testing.assert_allclose(got[..., 0], expected, atol=1e-14)
    convexity = asynchronous.quadratic_convexity(Q)
    kappa = asynchronous.fedrelax_contraction(graph, convexity, 1.0)
    np.testing.assert_allclose(kappa, 2 / 3)
    W, _ = operators.run(operator, jnp.zeros((3, 1)), 100)
    np.testing.assert_allclose(W[:, 0], [3 / 8, 3 / 4, 15 / 8], atol=1e-12)


# T-F7
@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_fixed_point_and_contraction(alpha):
    graph, Q, q = problem()
    solution = gtvmin.closed_form(graph, Q, q, alpha)
    operator = fedrelax.make_quadratic(graph, Q, q, alpha=alpha)
    step = jax.jit(jax.vmap(lambda W: operators.step(operator)(W, 0)))
    np.testing.assert_allclose(step(solution[None])[0], solution, atol=1e-10)

    convexity = asynchronous.quadratic_convexity(Q)
    kappa = float(asynchronous.fedrelax_contraction(graph, convexity, alpha))
    by_formula = np.max(
        alpha * degree(graph) / (alpha * degree(graph) + np.linalg.eigvalsh(Q)[:, 0])
    )
    np.testing.assert_allclose(kappa, by_formula)
    V, W = np.random.default_rng(1).normal(size=(2, 300, 7, 3))
    norm = jax.vmap(block_max_norm)
    assert (norm(step(V) - step(W)) <= kappa * norm(V - W) + 1e-12).all()


def test_contraction_is_tight_for_two_equal_nodes():
    graph = Graph.from_edges(PAIR, dtype=np.float64)
    Q, q = jnp.ones((2, 1, 1)), jnp.zeros((2, 1))
    operator = fedrelax.make_quadratic(graph, Q, q, alpha=1.0)
    got, _ = operators.run(operator, jnp.ones((2, 1)), 3)
    np.testing.assert_allclose(got, np.full((2, 1), 1 / 8), rtol=1e-14)


# T-F8
def test_two_nodes_without_losses_swap_for_ever():
    graph = Graph.from_edges(PAIR, dtype=np.float64)
    start = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    for operator in (
        fedrelax.make(graph, zero(), alpha=0.7),
        fedrelax.make_quadratic(
            graph, jnp.zeros((2, 2, 2)), jnp.zeros((2, 2)), alpha=0.5
        ),
    ):
        _, got = operators.run(operator, start, 4, record=lambda W: W)
        np.testing.assert_allclose(got[::2], np.stack([start[::-1]] * 2), rtol=1e-15)
        np.testing.assert_allclose(got[1::2], np.stack([start] * 2), rtol=1e-15)
    with pytest.raises(ValueError, match="Q must be positive definite"):
        fedrelax.check_converges(graph, jnp.zeros((2, 2, 2)), 0.5)


# T-F8
def test_convergence_if_and_only_if_both_matrices_are_definite():
    """Against the spectral radius of the iteration, where losses are singular."""
    verdicts = []
    square = np.array([(0, 1), (1, 2), (2, 3), (0, 3)])
    triangle = np.array([(0, 1), (1, 2), (0, 2), (2, 3)])
    for seed in range(24):
        rng = np.random.default_rng(seed)
        graph = Graph.from_edges(
            (square, triangle)[seed % 2], rng.uniform(0.3, 2, 4), 4, np.float64
        )
        x = rng.normal(size=(4, 2)) * (rng.random((4, 1)) < rng.random())
        Q = x[:, :, None] * x[:, None]
        alpha = rng.uniform(0.1, 3)
        A, D = np.asarray(graph.dense()), np.zeros((8, 8))
        for i in range(4):
            D[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = Q[i] + alpha * A[
                i
            ].sum() * np.eye(2)
        move = np.linalg.solve(D, alpha * np.kron(A, np.eye(2)))
        converges = np.abs(np.linalg.eigvals(move)).max() < 1 - 1e-9
        verdicts.append(converges)
        if converges:
            fedrelax.check_converges(graph, Q, alpha)
        else:
            with pytest.raises(ValueError, match="must be positive definite"):
                fedrelax.check_converges(graph, Q, alpha)
    assert 4 < sum(verdicts) < 20


# T-F9
def test_linearised_fedrelax_is_fedgd_at_smaller_rates():
    graph, Q, q = problem(1)
    alpha, eta = 0.6, 0.2
    W = np.random.default_rng(0).normal(size=(7, 3))
    # The minimiser of the surrogate, where its gradient vanishes.
    slope = 2 * np.einsum("nde,ne->nd", Q, W) + q
    A, by_node = np.asarray(graph.dense()), np.asarray(degree(graph))[:, None]
    surrogate = (W / eta - slope + 2 * alpha * A @ W) / (1 / eta + 2 * alpha * by_node)

    def gd(eta):
        operator = fedgd.make(graph, quadratic(Q, q), alpha=alpha, eta=eta)
        return jax.jit(operators.step(operator))(jnp.asarray(W), 0)

    rates = eta / (1 + 2 * alpha * eta * degree(graph))
    np.testing.assert_allclose(gd(rates), surrogate, rtol=1e-10)
    assert np.abs(gd(eta) - surrogate).max() > 1e-3  # what the book says


# T-F10
def test_predictions_on_the_exact_test_set_are_parameters():
    graph, Q, q = problem(2)
    exact = np.sqrt(3) * np.eye(3)
    every = np.broadcast_to(exact, (graph.num_edges, 3, 3))
    start = jnp.asarray(np.random.default_rng(0).normal(size=(7, 3)))

    def run(operator):
        return operators.run(operator, start, 5)[0]

    expected = run(fedrelax.make_quadratic(graph, Q, q, alpha=0.4))
    for test in (exact, every):
        got = run(agnostic_fedrelax.make_linear(graph, Q, q, test, alpha=0.4))
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)


# T-F10
def test_linear_closed_form_on_test_sets_by_edge():
    """The update against weighted least squares on pseudo-labels, in NumPy."""
    rng = np.random.default_rng(3)
    graph, _, _ = problem(3)
    X, y = rng.normal(size=(7, 6, 3)), rng.normal(size=(7, 6))
    test = rng.normal(size=(graph.num_edges, 2, 3))
    W, alpha = rng.normal(size=(7, 3)), 0.8
    expected = []
    for i in range(7):
        rows, labels, weight = [X[i]], [y[i]], [np.full(6, 1 / 6)]
        for a, b, e, w in zip(
            graph.head, graph.tail, test, np.asarray(graph.weight), strict=True
        ):
            if i in (a, b):
                j = int(b) if i == a else int(a)
                rows.append(e)
                labels.append(e @ W[j])
                weight.append(np.full(2, alpha * w / 2))
        root = np.sqrt(np.concatenate(weight))
        rows, labels = np.concatenate(rows), np.concatenate(labels)
        expected.append(np.linalg.lstsq(root[:, None] * rows, root * labels)[0])

    Q, q = np.einsum("nmd,nme->nde", X, X) / 6, -np.einsum("nmd,nm->nd", X, y) / 3
    linear = agnostic_fedrelax.make_linear(graph, Q, q, test, alpha=alpha)
    got = jax.jit(operators.step(linear))(jnp.asarray(W), 0)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    family = agnostic_fedrelax.least_squares(np.arange(7))
    by_points = agnostic_fedrelax.make(graph, [family], X, y, test, alpha=alpha)
    (got,) = jax.jit(operators.step(by_points))((jnp.asarray(W),), 0)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


# T-F10
def test_heterogeneous_models_learn_from_each_other():
    """Linear models, cubic models and small networks; the node without data learns."""
    rng = np.random.default_rng(0)
    n, m = 6, 20
    graph = Graph.from_edges(
        np.array([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5), (1, 4)]),
        dtype=np.float64,
    )
    X = rng.uniform(-1, 1, size=(n, m, 1))
    y = np.sin(2 * X[..., 0]) + 0.05 * rng.normal(size=(n, m))
    mask = np.ones((n, m), bool)
    mask[3] = False

    def cubic(X):
        return jnp.concatenate([jnp.ones_like(X), X, X**2, X**3], 1)

    def neural(params, X):
        return jnp.tanh(X @ params["in"] + params["bias"][None]) @ params["out"]

    families = [
        agnostic_fedrelax.least_squares([1]),
        agnostic_fedrelax.least_squares([4, 0, 3], cubic, ridge=1e-6),
        agnostic_fedrelax.gradient_descent([2, 5], neural, eta=0.1, steps=20),
    ]
    start = (
        jnp.zeros((1, 1)),
        jnp.zeros((3, 4)),
        {
            "in": jnp.asarray(rng.normal(size=(2, 1, 8))),
            "bias": jnp.asarray(rng.normal(size=(2, 8))),
            "out": jnp.zeros((2, 8)),
        },
    )
    test = rng.uniform(-1, 1, size=(graph.num_edges, 8, 1))
    operator = agnostic_fedrelax.make(graph, families, X, y, test, alpha=0.2, mask=mask)
    W, _ = operators.run(operator, start, 40)
    x = jnp.linspace(-1, 1, 50)[:, None]
    truth = np.sin(2 * x[:, 0])
    np.testing.assert_allclose(cubic(x) @ W[1][2], truth, atol=0.3)  # node 3
    for row in range(2):
        params = jax.tree.map(lambda p, row=row: p[row], W[2])
        assert np.mean((neural(params, x) - truth) ** 2) < 0.02
    assert np.mean((x @ W[0][0] - truth) ** 2) < 0.1

    # Asynchronously, an inactive node keeps its model exactly.
    schedule = asynchronous.partially_asynchronous(graph, 3, 2, jax.random.key(0))
    active = np.array(schedule.active)
    active[:, 0] = False
    schedule = asynchronous.Schedule(active, schedule.delay, 2)
    got, _ = asynchronous.run(operator, schedule, W)
    np.testing.assert_array_equal(got[1][1], W[1][1])
    assert (np.asarray(got[1][0]) != np.asarray(W[1][0])).any()


def test_families_of_isolated_nodes_fit_their_own_data():
    rng = np.random.default_rng(0)
    graph = Graph.from_edges(PAIR, num_nodes=4, dtype=np.float64)
    X, y = rng.normal(size=(4, 6, 2)), rng.normal(size=(4, 6))
    families = [agnostic_fedrelax.least_squares(ids) for ids in ([0, 1], [2, 3])]
    operator = agnostic_fedrelax.make(graph, families, X, y, X[0], alpha=1.0)
    got = jax.jit(operators.step(operator))((jnp.ones((2, 2)), jnp.ones((2, 2))), 0)
    expected = [np.linalg.lstsq(X[i], y[i])[0] for i in (2, 3)]
    np.testing.assert_allclose(got[1], expected, rtol=1e-9)


def test_asynchronous_predictions_by_edge():
    graph, Q, q = problem(2)
    test = np.random.default_rng(0).normal(size=(graph.num_edges, 5, 3))
    operator = agnostic_fedrelax.make_linear(graph, Q, q, test, alpha=0.4)
    start = jnp.ones((7, 3))
    schedule = asynchronous.partially_asynchronous(graph, 600, 3, jax.random.key(0))
    got, _ = asynchronous.run(operator, schedule, start)
    expected, _ = operators.run(operator, start, 600)
    np.testing.assert_allclose(got, expected, atol=1e-8)


def test_isolated_nodes_go_to_their_minimiser_of_least_norm():
    graph = Graph.from_edges(PAIR, num_nodes=4, dtype=np.float64)
    Q = jnp.stack([jnp.eye(2)] * 3 + [jnp.diag(jnp.array([2.0, 0.0]))])
    q = jnp.array([[1.0, 0], [0, 1], [2, 4], [-4, 0]])
    operator = fedrelax.make_quadratic(graph, Q, q, alpha=1.0)
    got = jax.jit(operators.step(operator))(jnp.ones((4, 2)), 0)
    np.testing.assert_allclose(got[2:], [[-1, -2], [1, 0]], atol=1e-15)
    with pytest.raises(ValueError, match="isolated nodes, has node 2"):
        fedrelax.make(graph, quadratic(Q, q), alpha=1.0)
    alone = fedrelax.make_quadratic(graph, Q, q, alpha=0.0)
    got = jax.jit(operators.step(alone))(jnp.ones((4, 2)), 0)
    np.testing.assert_allclose(got[:2], -q[:2] / 2, atol=1e-15)


def test_bad_arguments_are_refused():
    graph, Q, q = problem()
    X, y = np.zeros((7, 2, 3)), np.zeros((7, 2))
    test = np.eye(3)
    family = agnostic_fedrelax.least_squares(np.arange(7))

    def agnostic(families=(family,), y=y, test: np.ndarray = test, mask=None):
        return agnostic_fedrelax.make(graph, families, X, y, test, alpha=1.0, mask=mask)

    half = agnostic_fedrelax.least_squares([0, 1])
    for make, match in (
        (
            lambda: fedrelax.make_quadratic(graph, Q, q, alpha=-1.0),
            "alpha must be >= 0",
        ),
        (lambda: fedrelax.make(graph, quadratic(Q, q), alpha=0.0), "alpha must be > 0"),
        (lambda: fedrelax.make_quadratic(graph, Q, q[:3], alpha=1.0), "shapes"),
        (lambda: agnostic(test=np.zeros((3, 4, 3))), "test must have shape"),
        (lambda: agnostic(test=np.zeros((0, 3))), "test must have shape"),
        (lambda: agnostic(test=np.zeros((4, 2))), "test must have shape"),
        (lambda: agnostic(families=(half,)), "every node of 0..6 once"),
        (lambda: agnostic(families=(family, half)), "every node of 0..6 once"),
        (lambda: agnostic(y=y[:, :1]), "X and y must have shapes"),
        (lambda: agnostic(mask=np.ones((7, 3), bool)), "mask must be bool of shape"),
        (
            lambda: agnostic_fedrelax.least_squares([0], ridge=-1.0),
            "ridge must be >= 0",
        ),
        (
            lambda: agnostic_fedrelax.make_linear(graph, Q, q, test[:, :2], alpha=1.0),
            "test must have shape",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            make()


@pytest.mark.parametrize("alpha", [1e4, 1e6, 1e9])
def test_convergence_at_large_alpha_in_float32(alpha):
    with jax.enable_x64(False):
        graph = builders.chain(10)
        fedrelax.check_converges(graph, np.ones((10, 1, 1), np.float32), alpha)
        Q = np.diag(np.array([1, 0], np.float32))[None].repeat(10, 0)
        with pytest.raises(ValueError, match="Q must be positive definite"):
            fedrelax.check_converges(graph, Q, alpha)


def test_whole_numbers_are_numbers():
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    Q, q = np.ones((3, 1, 1), int), np.array([[-2], [-4], [-7]])
    X, y, test = np.ones((3, 1, 1), int), np.array([[1], [2], [3]]), np.array([[1]])
    family = agnostic_fedrelax.least_squares(np.arange(3))

    def builds(real):
        return (
            fedrelax.make_quadratic(graph, real(Q), real(q), alpha=0.5),
            agnostic_fedrelax.make_linear(
                graph, real(Q), real(q), real(test), alpha=0.5
            ),
            agnostic_fedrelax.make(
                graph, [family], real(X), real(y), real(test), alpha=0.5
            ),
        )

    for ours, floats, W in zip(
        builds(np.asarray),
        builds(np.float64),
        (jnp.ones((3, 1)), jnp.ones((3, 1)), (jnp.full((3, 1), 0.3),)),
        strict=True,
    ):
        for got, wanted in zip(
            jax.tree.leaves(jax.jit(operators.step(ours))(W, 0)),
            jax.tree.leaves(jax.jit(operators.step(floats))(W, 0)),
            strict=True,
        ):
            np.testing.assert_array_equal(got, wanted)


def test_units_of_features_do_not_matter():
    rng = np.random.default_rng(0)
    with jax.enable_x64(False):
        X = rng.normal(size=(2, 50, 2)).astype(np.float32) * np.array(
            [1000, 0.5], np.float32
        )
        y = 2 * X[..., 1]
        alone = Graph.from_edges(np.zeros((0, 2), int), num_nodes=2)
        Q, q, _ = least_squares_statistics(X, y)
        family = agnostic_fedrelax.least_squares([0, 1])
        test = np.eye(2, dtype=np.float32)
        for operator, W in (
            (fedrelax.make_quadratic(alone, Q, q, alpha=1.0), jnp.zeros((2, 2))),
            (
                agnostic_fedrelax.make_linear(alone, Q, q, test, alpha=1.0),
                jnp.zeros((2, 2)),
            ),
            (
                agnostic_fedrelax.make(alone, [family], X, y, test, alpha=1.0),
                (jnp.zeros((2, 2)),),
            ),
        ):
            for got in jax.tree.leaves(jax.jit(operators.step(operator))(W, 0)):
                np.testing.assert_allclose(got, [[0, 2]] * 2, atol=1e-3)


def test_masked_rows_may_hold_anything():
    graph = Graph.from_edges(PAIR, dtype=np.float64)
    X, y = np.ones((2, 2, 1)), np.ones((2, 2))
    X[0, 1], y[0, 1] = np.nan, np.inf
    family = agnostic_fedrelax.least_squares([0, 1])
    operator = agnostic_fedrelax.make(
        graph, [family], X, y, np.ones((1, 1)), alpha=1.0, mask=np.isfinite(y)
    )
    (got,) = jax.jit(operators.step(operator))((jnp.zeros((2, 1)),), 0)
    np.testing.assert_allclose(got, 0.5)
