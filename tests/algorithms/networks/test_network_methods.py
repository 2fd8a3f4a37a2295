"""Gradient methods on networks against closed forms and printed numbers, in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import Packed, plan_round
from fedjax_core.algorithms import fedavg as server_fedavg
from fedjax_core.algorithms.networks import fedavg, fedgd, fedprox, fedsgd, single_model
from fedjax_core.networks import gtvmin, operators
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.schedules import power_decay
from fedjax_core.networks.theory.contraction import contraction_factor, optimal_factor

CHAIN = np.array([(0, 1), (1, 2)])
PAIR = np.array([(0, 1)])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def regression(seed=0, n=6, m=5, d=2):
    """A ring with random weights, and least-squares data."""
    rng = np.random.default_rng(seed)
    edges = np.array([(i, (i + 1) % n) for i in range(n)])
    graph = Graph.from_edges(edges, rng.uniform(0.3, 2, n), n, np.float64)
    X = rng.normal(size=(n, m, d))
    y = X @ rng.normal(size=d) + 0.3 * rng.normal(size=(n, m))
    return graph, X, y


def clients(Q, minimiser):
    """Scalar quadratics Q_i (w - a_i)^2."""
    Q, a = np.array(Q, float), np.array(minimiser, float)
    return jnp.asarray(Q[:, None, None]), jnp.asarray(-2 * (Q * a)[:, None])


TWO = [1, 3], [0, 1]  # the two clients of the printed fixed points


def oracle(Q, q):
    losses = quadratic(Q, q)
    return lambda W, t, key: losses.grad(W)


# T-F1
def test_fedgd_is_the_matrix_step():
    graph, X, y = regression()
    Q, q, _ = least_squares_statistics(X, y)
    whole, vector = gtvmin.system(graph, Q, q, 0.7)
    W = np.random.default_rng(1).normal(size=(6, 2))
    w = W.reshape(-1)
    expected = w - 0.03 * (2 * whole @ w + vector)
    operator = fedgd.make(graph, quadratic(Q, q), alpha=0.7, eta=0.03)
    got = operators.step(operator)(jnp.asarray(W), 0)
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
        return operators.step(operator)(W, t) - W

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
    # To the bit in so small a network only; in larger ones to rounding.
    np.testing.assert_array_equal(direct, relayed)


# T-F4
def test_fedsgd_on_full_batches_is_fedgd():
    graph, X, y = regression()
    mask = np.ones(y.shape, bool)
    losses = quadratic(*least_squares_statistics(X, y))
    start = jnp.zeros((6, 2))
    expected, _ = operators.run(
        fedgd.make(graph, losses, alpha=0.5, eta=0.05), start, 10
    )
    for batch in (5, None):
        sgd = fedsgd.make(graph, fedsgd.least_squares(X, y, batch), alpha=0.5, eta=0.05)
        got, _ = operators.run(sgd, start, 10, key=jax.random.key(0))
        np.testing.assert_allclose(got, expected, rtol=1e-10)
    mask[2, 3:] = mask[4, :1] = False
    losses = quadratic(*least_squares_statistics(X, y, mask))
    gradient = fedsgd.least_squares(X, y, None, mask)(jnp.ones((6, 2)), 0, None)
    np.testing.assert_allclose(gradient, losses.grad(jnp.ones((6, 2))), rtol=1e-10)


# T-F4
def test_batches_average_to_the_gradient():
    """Over all C(5, 2) batches exactly; drawn rows exist and do not repeat."""
    _, X, y = regression()
    W = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
    rows = jnp.asarray(list(itertools.combinations(range(5), 2)))
    rows = jnp.broadcast_to(rows[:, None], (len(rows), 6, 2))
    each = jax.vmap(fedsgd.batch_gradient, (None, None, None, 0))(
        jnp.asarray(X), jnp.asarray(y), W, rows
    )
    expected = quadratic(*least_squares_statistics(X, y)).grad(W)
    np.testing.assert_allclose(each.mean(0), expected, rtol=1e-10)

    mask = np.ones(y.shape, bool)
    mask[:, 4] = False
    draw = fedsgd.least_squares(X, y, 2, mask)
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = jax.jit(jax.vmap(lambda key: draw(W, 0, key)))(keys)
    possible = np.asarray(each)[
        [4 not in c for c in itertools.combinations(range(5), 2)]
    ]
    for i in range(6):
        near = np.abs(drawn[:, None, i] - possible[None, :, i]).max(-1) < 1e-9
        assert near.any(1).all()
        assert near.any(0).all()  # all six batches occur: missing one has p < 1e-30
    # Nodes draw for themselves.
    pick = [
        np.abs(drawn[:, None, i] - possible[None, :, i]).sum(-1).argmin(1)
        for i in (0, 1)
    ]
    assert 0 < (pick[0] == pick[1]).mean() < 0.5


def squared(w, batch):
    x, y = batch
    return ((x @ w - y) ** 2).mean()


# T-F4
def test_batches_of_any_model_are_those_of_least_squares():
    _, X, y = regression()
    W = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
    mask = np.ones(y.shape, bool)
    mask[2, 3:] = mask[4, :2] = False
    X[~mask], y[~mask] = np.nan, np.nan
    for b in (1, 2, 3):
        key = jax.random.key(b)
        expected = fedsgd.least_squares(X, y, b, mask)(W, 0, key)
        got = fedsgd.batches(squared, (X, y), b, mask)(W, 0, key)
        np.testing.assert_allclose(got, expected, rtol=1e-9)
    # Rows that do not exist do not count, whatever they hold.
    full = fedsgd.least_squares(X, y, None, mask)(W, 0, None)
    losses = quadratic(*least_squares_statistics(X, y, mask))
    np.testing.assert_allclose(full, losses.grad(W), rtol=1e-9)


def test_batches_of_a_logistic_model_are_unbiased():
    """Parameters and data are pytrees, the last two nodes have fewer rows."""
    rng = np.random.default_rng(5)
    data = {"x": rng.normal(size=(3, 6, 2)), "y": np.sign(rng.normal(size=(3, 6)))}
    mask = np.arange(6) < np.array([[6], [4], [3]])
    data["x"][~mask] = np.nan
    W = {"slope": jnp.asarray(rng.normal(size=(3, 2))), "bias": jnp.ones(3)}

    def loss(w, batch):
        score = batch["x"] @ w["slope"] + w["bias"]
        return jnp.logaddexp(0, -batch["y"] * score).mean()

    draw = fedsgd.batches(loss, data, 3, mask)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.jit(jax.vmap(lambda key: draw(W, 0, key)))(keys)
    for i, m in enumerate((6, 4, 3)):
        own = {k: jnp.asarray(v[i, :m]) for k, v in data.items()}
        exact = jax.grad(loss)(jax.tree.map(lambda w, i=i: w[i], W), own)
        for name, g in exact.items():
            got = np.asarray(drawn[name][:, i])
            # 9 means within 5 standard errors: 1 key in 200,000 fails.
            error = 5 * got.std(0) / np.sqrt(len(keys)) + 1e-12
            assert (np.abs(got.mean(0) - g) < error).all()
    assert np.asarray(drawn["bias"]).std(0)[:2].min() > 0.01
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    operator = fedsgd.make(graph, draw, alpha=0.5, eta=0.1)
    end, _ = operators.run(operator, W, 3, key=jax.random.key(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(end))


def test_fedsgd_converges_with_decaying_rates():
    graph, X, y = regression()
    Q, q, _ = least_squares_statistics(X, y)
    solution = gtvmin.closed_form(graph, Q, q, 0.5)

    def left(eta):
        operator = fedsgd.make(graph, fedsgd.least_squares(X, y, 1), alpha=0.5, eta=eta)
        W, _ = operators.run(operator, jnp.zeros((6, 2)), 4000, key=jax.random.key(1))
        return float(jnp.linalg.norm(W - solution) / jnp.linalg.norm(solution))

    # Every step is noisy: 1/t takes the noise away, a constant rate does not.
    decayed = left(power_decay(4.0, shift=80.0))
    assert decayed < 0.03
    assert left(0.05) > 2 * decayed


# T-F5
def test_fedavg_fixed_points():
    Q, q = clients(*TWO)
    golden = {1: 0.75, 2: 0.7, 5: 0.5954948016942626, 50: 0.5000035681}
    for steps, expected in golden.items():
        at = single_model.fixed_point(Q, q, 0.1, steps)
        tolerance = 5e-11 if steps == 50 else 1e-14
        np.testing.assert_allclose(at, [expected], rtol=0, atol=tolerance)
        for operator in (
            single_model.make(quadratic(Q, q), eta=0.1, local_steps=steps),
            fedavg.make(oracle(Q, q), 2, eta=0.1, local_steps=steps),
        ):
            W, _ = operators.run(operator, jnp.zeros((2, 1)), 150)
            np.testing.assert_allclose(W, np.full((2, 1), at), atol=1e-12)


# T-F5
def test_one_local_step_is_centralised_gradient_descent():
    _, X, y = regression(n=4)
    Q, q, _ = least_squares_statistics(X, y)
    operator = single_model.make(quadratic(Q, q), eta=0.1)
    W, _ = operators.run(operator, jnp.zeros((4, 2)), 12)
    w = np.zeros(2)
    for _ in range(12):
        w -= 0.1 * (2 * np.mean(Q, 0) @ w + np.mean(q, 0))
    np.testing.assert_allclose(W, np.tile(w, (4, 1)), rtol=1e-11)


def test_fedavg_takes_a_fresh_subset_every_round():
    Q, q = clients([0.5] * 6, [1, 10, 100, 1000, 10000, 100000])
    operator = fedavg.make(oracle(Q, q), 6, eta=1.0, local_steps=1, clients=2)
    _, W = operators.run(
        operator, jnp.zeros((6, 1)), 60, key=jax.random.key(0), record=lambda W: W[:, 0]
    )
    np.testing.assert_array_equal(W, np.tile(W[:, :1], 6))
    digits = np.round(2 * np.asarray(W[:, 0])).astype(int)
    counts = np.array([[d // 10**k % 10 for k in range(6)] for d in digits])
    assert (counts.sum(1) == 2).all()
    assert (counts.max(1) == 1).all()
    # 60 draws of 2 in 6: mean 20, standard deviation 3.7; five of them are 18.3.
    assert (np.abs(counts.sum(0) - 20) < 18.3).all()
    fixed = fedavg.make(oracle(Q, q), 6, eta=1.0, local_steps=1, clients=[0, 2])
    W, _ = operators.run(fixed, jnp.zeros((6, 1)), 1)
    np.testing.assert_allclose(W, np.full((6, 1), 50.5))


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_fedavg_is_the_method_of_the_server_world(weights):
    """Full batches, one step, all clients; clients hold different numbers of rows."""
    rng = np.random.default_rng(0)
    sizes = np.array([3, 6, 1, 4])
    X, y = rng.normal(size=(4, 6, 2)), rng.normal(size=(4, 6))
    mask = np.arange(6) < sizes[:, None]
    X, y = X * mask[..., None], y * mask
    operator = fedavg.make(
        fedsgd.least_squares(X, y, None, mask),
        4,
        eta=0.1,
        local_steps=1,
        weights=weights,
        num_samples=sizes if weights == "samples" else None,
    )
    _, W = operators.run(operator, jnp.zeros((4, 2)), 6, record=lambda W: W[0])

    def loss(params, batch, key):
        return (batch["x"] @ params - batch["y"]) ** 2

    algorithm = server_fedavg.make(
        server_fedavg.Config(
            client_lr=0.1,
            batch_size=6,
            weights="examples" if weights == "samples" else "uniform",
        ),
        loss,
    )
    rows = {"x": X[mask].astype(np.float32), "y": y[mask].astype(np.float32)}
    train = Packed(rows, np.r_[0, np.cumsum(sizes)])
    with jax.enable_x64(False):  # the engine adds up in float32
        state = algorithm.init(jnp.zeros(2), 4)
        step = jax.jit(algorithm.round)
        for t in range(6):
            cohort = plan_round(np.arange(4), train, algorithm.work, seed=0, round=t)
            state, _ = step(state, cohort, jax.random.key(0))
            np.testing.assert_allclose(state.params, W[t], rtol=1e-5, atol=1e-6)


# T-F6
def test_fedprox_fixed_points_and_limits():
    Q, q = clients(*TWO)
    golden = {1.0: 0.6, 0.01: 0.74631, 100.0: 0.50166, 1e-7: 0.75, 1e9: 0.5}
    for eta, expected in golden.items():
        at = fedprox.fixed_point(Q, q, eta)
        np.testing.assert_allclose(at, [expected], atol=5e-6)
        operator = fedprox.make(quadratic(Q, q), 2, eta=eta)
        fixed = jnp.full((2, 1), at)
        np.testing.assert_allclose(operators.step(operator)(fixed, 0), fixed, rtol=1e-9)
    W, _ = operators.run(fedprox.make(quadratic(Q, q), 2), jnp.zeros((2, 1)), 60)
    np.testing.assert_allclose(W, np.full((2, 1), 0.6), atol=1e-12)


# T-F6
def test_fedprox_with_a_large_eta_averages_local_minimisers():
    _, X, y = regression(n=4)
    Q, q, _ = least_squares_statistics(X, y)
    local = np.linalg.solve(Q, -np.asarray(q)[..., None] / 2)[..., 0]
    operator = fedprox.make(quadratic(Q, q), 4, eta=1e9, clients=[1, 3])
    W, _ = operators.run(operator, jnp.zeros((4, 2)), 1)
    np.testing.assert_allclose(W, np.tile(local[[1, 3]].mean(0), (4, 1)), rtol=1e-6)


# T-F11
def test_a_star_with_growing_alpha_approaches_the_single_model():
    """The error falls as 1/alpha; the centre has no data."""
    _, X, y = regression(n=5)
    edges = np.array([(0, i) for i in range(1, 5)])
    star = Graph.from_edges(edges, dtype=np.float64)
    Q, q, _ = least_squares_statistics(X, y)
    Q, q = Q.at[0].set(0), q.at[0].set(0)
    operator = single_model.make(quadratic(Q, q), eta=0.3)
    common, _ = operators.run(operator, jnp.zeros((5, 2)), 600)
    alphas = 10.0 ** np.arange(1, 6)
    error = np.array(
        [
            np.abs(gtvmin.closed_form(star, Q, q, alpha) - common).max()
            for alpha in alphas
        ]
    )
    np.testing.assert_allclose(error[2:] * alphas[2:], error[3] * alphas[3], rtol=0.02)
    assert error[-1] < 1e-4


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
            return operators.step(operator)(W, 0)

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
        (lambda g, f, x: single_model.make(f, eta=0.1, local_steps=0), "local_steps"),
        (
            lambda g, f, x: fedsgd.least_squares(x[0], x[1], 0),
            "batch_size must be >= 1",
        ),
        (lambda g, f, x: fedsgd.least_squares(x[0], x[1], 6), r"in \[1, m_i\], got 6"),
        (
            lambda g, f, x: fedsgd.least_squares(
                x[0], x[1], 3, np.arange(5) < [[5], [2], [5]]
            ),
            "got 3 where node 1 has 2 rows",
        ),
        (
            lambda g, f, x: fedsgd.least_squares(
                x[0], x[1], 1, np.arange(5) < [[5], [0], [5]]
            ),
            "not node 1",
        ),
        (lambda g, f, x: fedsgd.least_squares(x[0], x[1][:2], 1), "shapes"),
        (
            lambda g, f, x: fedsgd.least_squares(
                x[0], x[1], 1, np.ones((3, 5), np.int32)
            ),
            "mask must be bool",
        ),
        (lambda g, f, x: fedsgd.batches(squared, x, 6), r"in \[1, m_i\], got 6"),
        (lambda g, f, x: fedsgd.batches(squared, x, 0), "batch_size must be >= 1"),
        (lambda g, f, x: fedsgd.batches(squared, (x[0], x[1][:2]), 1), "one shape"),
        (lambda g, f, x: fedsgd.batches(squared, np.zeros(3), 1), "one shape"),
        (lambda g, f, x: fedsgd.batches(squared, (), 1), "one shape"),
        (lambda g, f, x: fedavg.make(f.grad, 3, eta=0.1, clients=0), r"in \[1, 3\]"),
        (lambda g, f, x: fedavg.make(f.grad, 3, eta=0.1, clients=4), r"in \[1, 3\]"),
        (lambda g, f, x: fedavg.make(f.grad, 3, eta=0.1, clients=[]), "at least one"),
        (lambda g, f, x: fedavg.make(f.grad, 3, eta=0.1, clients=[0, 3]), r"0\.\.2"),
        (lambda g, f, x: fedavg.make(f.grad, 3, eta=0.1, clients=[-1]), r"0\.\.2"),
        (lambda g, f, x: fedavg.make(f.grad, 3, eta=0.1, clients=[1, 1]), "different"),
        (
            lambda g, f, x: fedavg.make(f.grad, 3, eta=0.1, weights="samples"),
            "num_samples",
        ),
        (
            lambda g, f, x: fedavg.make(
                f.grad, 3, eta=0.1, weights="samples", num_samples=[1, 0, 2]
            ),
            "num_samples must be > 0",
        ),
        (lambda g, f, x: fedprox.make(f, 3, eta=0.0), "eta must be > 0"),
        (lambda g, f, x: fedprox.make(f, 3, clients=[5]), r"0\.\.2"),
    ],
)
def test_bad_arguments_are_refused(make, match):
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    losses = quadratic(*clients([1, 1, 1], [0, 0, 3]))
    data = np.zeros((3, 5, 2)), np.zeros((3, 5))
    with pytest.raises(ValueError, match=match):
        make(graph, losses, data)


def test_methods_that_draw_ask_for_a_key():
    Q, q = clients(*TWO)
    operator = fedavg.make(oracle(Q, q), 2, eta=0.1, clients=1)
    with pytest.raises(ValueError, match="key must be given"):
        operators.run(operator, jnp.zeros((2, 1)), 1)
    draw = fedsgd.least_squares(np.zeros((2, 3, 1)), np.zeros((2, 3)), 1)
    with pytest.raises(ValueError, match="key must be given"):
        draw(jnp.zeros((2, 1)), 0, None)
    draw = fedsgd.batches(squared, (np.zeros((2, 3, 1)), np.zeros((2, 3))), 1)
    with pytest.raises(ValueError, match="key must be given"):
        draw(jnp.zeros((2, 1)), 0, None)


def test_batches_of_ints_are_floats():
    X, y = np.array([[[1], [2]]]), np.array([[3, 4]])
    gradient = fedsgd.least_squares(X, y, None)(jnp.ones((1, 1)), 0, None)
    np.testing.assert_allclose(gradient, [[-6.0]])  # (2 / 2) (1 (1 - 3) + 2 (2 - 4))
