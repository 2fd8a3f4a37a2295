"""FedSGD: batches and other oracles of gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import fedavg, fedgd, fedsgd
from fedjax_core.networks import gtvmin, operators, oracles
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.schedules import power_decay

pytestmark = pytest.mark.usefixtures("x64")


def regression(seed=0, n=6, m=5, d=2):
    """A ring with random weights, and least-squares data."""
    rng = np.random.default_rng(seed)
    edges = np.array([(i, (i + 1) % n) for i in range(n)])
    graph = Graph.from_edges(edges, rng.uniform(0.3, 2, n), n, np.float64)
    X = rng.normal(size=(n, m, d))
    y = X @ rng.normal(size=d) + 0.3 * rng.normal(size=(n, m))
    return graph, X, y


def squared(w, batch):
    x, y = batch
    return ((x @ w - y) ** 2).mean()


CHAIN = np.array([(0, 1), (1, 2)])


def clients(Q, minimiser):
    """Scalar quadratics Q_i (w - a_i)^2."""
    Q, a = np.array(Q, float), np.array(minimiser, float)
    return jnp.asarray(Q[:, None, None]), jnp.asarray(-2 * (Q * a)[:, None])


TWO = [1, 3], [0, 1]  # the two clients of the printed fixed points


def oracle(Q, q):
    losses = quadratic(Q, q)
    return lambda W, t, key: losses.grad(W)


ALPHA = 0.4


def start():
    return {"slope": jnp.zeros((6, 2)), "bias": jnp.zeros(6)}


def logistic(w, data):
    """Logistic regression with a bias, of one node."""
    X, y = data
    return jnp.logaddexp(0, -y * (X @ w["slope"] + w["bias"])).mean()


def problem():
    rng = np.random.default_rng(2)
    edges = np.array([(i, (i + 1) % 6) for i in range(6)])
    graph = Graph.from_edges(edges, rng.uniform(0.5, 2, 6), dtype=np.float64)
    X = rng.normal(size=(6, 12, 2))
    y = np.sign(X @ [1.0, -0.5] + rng.normal(size=(6, 12)))
    return graph, (jnp.asarray(X), jnp.asarray(y))


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


# T-F4
def test_batches_of_any_model_are_those_of_least_squares():
    _, X, y = regression()
    W = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
    mask = np.ones(y.shape, bool)
    mask[2, 3:] = mask[4, :2] = False
    X[~mask], y[~mask] = np.nan, np.nan
    for b in (1, 2, 3):
        key = jax.random.key(b)
        expected = jax.jit(fedsgd.least_squares(X, y, b, mask))(W, 0, key)
        got = jax.jit(fedsgd.batches(squared, (X, y), b, mask))(W, 0, key)
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
    slope = jax.jit(jax.grad(loss))
    for i, m in enumerate((6, 4, 3)):
        own = {k: jnp.asarray(v[i, :m]) for k, v in data.items()}
        exact = slope(jax.tree.map(lambda w, i=i: w[i], W), own)
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


@pytest.mark.parametrize(
    ("make", "match"),
    [
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
            "none for node 1",
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


def test_fedsgd_with_any_oracle():
    """Alg. 7: zero-mean noise on gradients averages out, and keys decide all."""
    with jax.enable_x64(True):
        graph, data = problem()
        losses = oracles.smooth(logistic, data)

        def noisy(W, t, key):
            leaves, structure = jax.tree.flatten(losses.grad(W))
            keys = jax.random.split(key, len(leaves))
            return structure.unflatten(
                [
                    g + 0.1 * jax.random.normal(k, g.shape)
                    for g, k in zip(leaves, keys, strict=True)
                ]
            )

        def step(oracle):
            operator = fedgd.from_oracle(graph, oracle, alpha=ALPHA, eta=0.2)
            return jax.jit(lambda key: operators.step(operator)(start(), 0, key))

        one_step = step(noisy)
        keys = jax.random.split(jax.random.key(3), 2000)
        mean = jax.tree.map(lambda w: w.mean(0), jax.jit(jax.vmap(one_step))(keys))
        exact = step(lambda W, t, key: losses.grad(W))(keys[0])
        # 18 means of 2,000 steps of deviation 0.02, 5 standard errors: one false alarm
        # in a hundred thousand keys.
        for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(exact), strict=True):
            np.testing.assert_allclose(a, b, atol=5 * 0.02 / np.sqrt(2000))
        first = one_step(keys[0])["bias"]
        assert (first == one_step(keys[0])["bias"]).all()
        assert (first != one_step(keys[1])["bias"]).all()
