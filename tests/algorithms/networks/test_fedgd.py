"""FedGD against closed forms and printed numbers, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import fedgd, fedrelax
from fedjax_core.networks import gtvmin, iterate, operators, oracles
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.schedules import power_decay
from fedjax_core.networks.theory.contraction import contraction_factor, optimal_factor

pytestmark = pytest.mark.usefixtures("x64")


def regression(seed=0, n=6, m=5, d=2):
    """A ring with random weights, and least-squares data."""
    rng = np.random.default_rng(seed)
    edges = np.array([(i, (i + 1) % n) for i in range(n)])
    graph = Graph.from_edges(edges, rng.uniform(0.3, 2, n), n, np.float64)
    X = rng.normal(size=(n, m, d))
    y = X @ rng.normal(size=d) + 0.3 * rng.normal(size=(n, m))
    return graph, X, y


CHAIN = np.array([(0, 1), (1, 2)])


def clients(Q, minimiser):
    """Scalar quadratics Q_i (w - a_i)^2."""
    Q, a = np.array(Q, float), np.array(minimiser, float)
    return jnp.asarray(Q[:, None, None]), jnp.asarray(-2 * (Q * a)[:, None])


EXERCISE_5_1 = {  # alpha: contraction factors of the networks (a) and (b)
    0: (0.999000, 0),
    1: (0.998001, 0.002),
    10: (0.989100, 0.02),
    100: (0.908912, 0.2),
    250: (0.808070, 0.5),
    400: (0.739422, 0.8),
    499: (0.706546, 0.998),
    501: (0.708961, 1.002),
    600: (0.881205, 1.2),
}


PAIR = np.array([(0, 1)])


def start():
    return {"slope": jnp.zeros((6, 2)), "bias": jnp.zeros(6)}


def logistic(w, data):
    """Logistic regression with a bias, of one node."""
    X, y = data
    return jnp.logaddexp(0, -y * (X @ w["slope"] + w["bias"])).mean()


ALPHA = 0.4


def problem():
    rng = np.random.default_rng(2)
    edges = np.array([(i, (i + 1) % 6) for i in range(6)])
    graph = Graph.from_edges(edges, rng.uniform(0.5, 2, 6), dtype=np.float64)
    X = rng.normal(size=(6, 12, 2))
    y = np.sign(X @ [1.0, -0.5] + rng.normal(size=(6, 12)))
    return graph, (jnp.asarray(X), jnp.asarray(y))


# T-F1
def test_fedgd_is_the_matrix_step():
    graph, X, y = regression()
    Q, q, _ = least_squares_statistics(X, y)
    whole, vector = gtvmin.system(graph, Q, q, 0.7)
    W = np.random.default_rng(1).normal(size=(6, 2))
    w = W.reshape(-1)
    expected = w - 0.03 * (2 * whole @ w + vector)
    operator = fedgd.make(graph, quadratic(Q, q), alpha=0.7, eta=0.03)
    got = jax.jit(operators.step(operator))(jnp.asarray(W), 0)
    np.testing.assert_allclose(got.reshape(-1), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("eta", "expected"),
    [
        (0.1, [(0, 0, 0.6), (0, 0.12, 0.96), (0.024, 0.24, 1.2)]),
        (0.2, [(0, 0, 1.2), (0, 0.48, 1.44), (0.192, 0.48, 1.68)]),
    ],
)
def test_fedgd_on_the_chain_of_three_nodes(eta, expected):
    """The iterates of G-CHAIN3."""
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    Q, q = clients([1, 1, 1], [0, 0, 3])
    operator = fedgd.make(graph, quadratic(Q, q), alpha=1.0, eta=eta)
    _, W = operators.run(operator, jnp.zeros((3, 1)), 3, record=lambda W: W)
    np.testing.assert_allclose(W[..., 0], expected, atol=1e-14)
    if eta == 0.2:
        solution = np.array([3 / 8, 3 / 4, 15 / 8])
        left = np.linalg.norm(
            np.asarray(W)[..., 0] - solution, axis=1
        ) / np.linalg.norm(solution)
        np.testing.assert_allclose(left, [0.5241, 0.3090, 0.1850], atol=5e-5)
        assert (left < 0.6 ** np.arange(1, 4)).all()


# T-F2
@pytest.mark.parametrize("alpha", [0.0, 0.5, 4.0])
def test_fedgd_converges_at_its_factor(alpha):
    graph, X, y = regression()
    Q, q, _ = least_squares_statistics(X, y)
    solution = gtvmin.closed_form(graph, Q, q, alpha)
    values = np.linalg.eigvalsh(gtvmin.system(graph, Q, q, alpha)[0])
    safe = 0.9 * float(fedgd.rate_bound(graph, Q, alpha))
    fedgd.check_rate(graph, Q, alpha, safe)
    for eta in (1 / (values[0] + values[-1]), safe):
        kappa = float(contraction_factor(eta, values[0], values[-1]))
        operator = fedgd.make(graph, quadratic(Q, q), alpha=alpha, eta=eta)
        _, W = operators.run(operator, jnp.zeros((6, 2)), 200, record=lambda W: W)
        left = np.linalg.norm(np.asarray(W - solution[None]).reshape(200, -1), axis=1)
        start = np.linalg.norm(solution)
        assert (left <= start * kappa ** np.arange(1, 201) + 1e-12).all()
        # In the end only the slowest eigenvector is left.
        late = left > 1e-9 * start
        last = np.flatnonzero(late)[-1]
        if last > 150:
            np.testing.assert_allclose(left[last] / left[last - 1], kappa, rtol=0.01)


def test_rates_by_node_and_by_round():
    graph, X, y = regression()
    losses = quadratic(*least_squares_statistics(X, y))
    by_node = np.array([0.1, 0.0001, 0.05, 0.02, 0.03, 0.01])
    W = jnp.ones((6, 2))

    def moved(eta, t):
        operator = fedgd.make(graph, losses, alpha=0.5, eta=eta)
        return jax.jit(operators.step(operator))(W, t) - W

    unit = moved(1.0, 0)
    np.testing.assert_allclose(moved(by_node, 0), by_node[:, None] * unit, rtol=1e-9)
    decay = power_decay(0.3)
    np.testing.assert_allclose(moved(decay, 4), 0.3 / 5 * unit, rtol=1e-9)
    both = moved(lambda t: jnp.asarray(by_node) / (t + 1), 4)
    np.testing.assert_allclose(both, by_node[:, None] / 5 * unit, rtol=1e-9)


# T-F12
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_synchronisation_server_changes_nothing(dtype):
    graph, X, y = regression()
    Q, q, _ = least_squares_statistics(X.astype(dtype), y.astype(dtype))
    graph = graph.with_weight(graph.weight.astype(dtype))
    operator = fedgd.make(graph, quadratic(Q, q), alpha=0.5, eta=0.05)
    start = jnp.zeros((6, 2), dtype)
    direct, _ = operators.run(operator, start, 25)
    relayed, _ = operators.run(operator, start, 25, channel=operators.relay)
    # How XLA fuses the two programs decides what is rounded.
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(direct, relayed, rtol=16 * eps, atol=4 * eps)


def test_exercise_5_1():
    """How alpha changes the speed of FedGD, from the linear map that a round is."""
    graph = Graph.from_edges(PAIR, dtype=np.float64)
    alphas = jnp.array([float(a) for a in EXERCISE_5_1])
    for column, (scale, centre) in enumerate(
        (([1, 1000], [-5, -5]), ([1000, 1000], [-5, 5]))
    ):
        Q, q = clients(scale, centre)

        def round_of(alpha, W, Q=Q, q=q):
            operator = fedgd.make(graph, quadratic(Q, q), alpha=alpha, eta=0.0005)
            return jax.jit(operators.step(operator))(W, 0)

        at = jnp.concatenate([jnp.zeros((1, 2, 1)), jnp.eye(2)[..., None]])
        images = jax.vmap(jax.vmap(round_of, (None, 0)), (0, None))(alphas, at)
        maps = np.asarray(images[:, 1:] - images[:, :1])[..., 0]
        factor = np.abs(np.linalg.eigvalsh(maps)).max(1)
        expected = [row[column] for row in EXERCISE_5_1.values()]
        np.testing.assert_allclose(factor, expected, atol=5e-7)
        for alpha in (1.0, 499.0, 1000.0):
            solution = gtvmin.closed_form(graph, Q, q, alpha)
            far = 5.0 if column == 0 else 5000 / (1000 + 2 * alpha)
            signs = -np.ones(2) if column == 0 else np.array([-1, 1])
            np.testing.assert_allclose(solution[:, 0], far * signs, rtol=1e-9)
            np.testing.assert_allclose(round_of(alpha, solution), solution, rtol=1e-9)
    limit = 1999000 / 2999  # (a) diverges beyond
    Q, q = clients([1, 1000], [-5, -5])
    for alpha, diverges in ((limit - 0.01, False), (limit + 0.01, True)):
        values = np.linalg.eigvalsh(gtvmin.system(graph, Q, q, alpha)[0])
        assert (contraction_factor(0.0005, values[0], values[-1]) > 1) == diverges


def test_exercise_5_2():
    """Averaging on a graph where every node picked four others."""
    rng = np.random.default_rng(0)
    n, alpha = 30, 0.8
    pairs = {
        (min(i, int(j)), max(i, int(j)))
        for i in range(n)
        for j in rng.choice(np.delete(np.arange(n), i), 4, replace=False)
    }
    graph = Graph.from_edges(np.array(sorted(pairs)), num_nodes=n, dtype=np.float64)
    A = np.asarray(graph.dense())
    values = np.linalg.eigvalsh(np.diag(A.sum(1)) - A)
    low, high = values[1], values[-1]
    y = rng.normal(size=n)
    Q, q = clients(np.ones(n), y)
    solution = gtvmin.closed_form(graph, Q, q, alpha)

    general = optimal_factor(1.0, 1 + alpha * high)
    np.testing.assert_allclose(general, alpha * high / (2 + alpha * high))
    # From w_i = y_i the error has mean zero and never meets the eigenvalue 1.
    eta = 1 / (2 + alpha * (low + high))
    kappa = alpha * (high - low) / (2 + alpha * (low + high))
    assert kappa < general
    operator = fedgd.make(graph, quadratic(Q, q), alpha=alpha, eta=eta)
    start = jnp.asarray(y)[:, None]
    _, W = operators.run(operator, start, 60, record=lambda W: W)
    left = np.linalg.norm(np.asarray(W - solution[None])[..., 0], axis=1)
    initial = np.linalg.norm(start - solution)
    assert (left <= initial * kappa ** np.arange(1, 61) + 1e-13).all()
    # Close to the rate at which the two extreme eigenvectors die out.
    assert (left[39] / left[19]) ** (1 / 20) > 0.97 * kappa


def test_rate_bound_is_strict():
    """Prop. 5.1: rates below it converge; a check refuses the others."""
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    Q, _ = clients([1, 1, 1], [0, 0, 3])
    assert fedgd.rate_bound(graph, Q, 1.0) == 1 / 5
    np.testing.assert_allclose(gtvmin.default_rate(graph, Q, 1.0), 1 / 10)
    fedgd.check_rate(graph, Q, 1.0, 0.1999)
    for eta in (0.2, 0.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="eta must be"):
            fedgd.check_rate(graph, Q, 1.0, eta)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda g, f, x: fedgd.make(g, f, alpha=1.0, eta=0.0), "eta must be > 0"),
        (lambda g, f, x: fedgd.make(g, f, alpha=1.0, eta=np.nan), "eta must be > 0"),
        (lambda g, f, x: fedgd.make(g, f, alpha=-1.0, eta=0.1), "alpha must be >= 0"),
        (
            lambda g, f, x: fedgd.make(g, f, alpha=1.0, eta=np.array([1, 0, 1.0])),
            "eta must be > 0 and finite, got 0.0 for node 1",
        ),
    ],
)
def test_bad_arguments_are_refused(make, match):
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    losses = quadratic(*clients([1, 1, 1], [0, 0, 3]))
    data = np.zeros((3, 5, 2)), np.zeros((3, 5))
    with pytest.raises(ValueError, match=match):
        make(graph, losses, data)


def test_fedgd_on_logistic_regression():
    """Alg. 5: both methods end where the gradient of GTVMin is zero."""
    with jax.enable_x64(True):
        graph, data = problem()
        losses = oracles.smooth(logistic, data, steps=3)
        descent = fedgd.make(graph, losses, alpha=ALPHA, eta=0.1)
        W, values = operators.run(
            descent,
            start(),
            3000,
            record=lambda W: gtvmin.objective(losses, graph, W, ALPHA),
        )
        assert (np.diff(values) <= 1e-12).all()
        slope = gtvmin.gradient(losses, graph, W, ALPHA)
        assert iterate.block_max_norm(slope) < 1e-9
        relaxed, _ = operators.run(
            fedrelax.make(graph, losses, alpha=ALPHA), start(), 900
        )
        for leaf, other in zip(
            jax.tree.leaves(W), jax.tree.leaves(relaxed), strict=True
        ):
            np.testing.assert_allclose(leaf, other, atol=1e-8)
