"""FedAvg on networks and in the server world."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import LocalWork, Packed, plan_round
from fedjax_core.algorithms import fedavg as server_fedavg
from fedjax_core.algorithms.networks import fedavg, fedsgd, single_model
from fedjax_core.networks import operators
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import quadratic

pytestmark = pytest.mark.usefixtures("x64")


def clients(Q, minimiser):
    """Scalar quadratics Q_i (w - a_i)^2."""
    Q, a = np.array(Q, float), np.array(minimiser, float)
    return jnp.asarray(Q[:, None, None]), jnp.asarray(-2 * (Q * a)[:, None])


TWO = [1, 3], [0, 1]  # the two clients of the printed fixed points


def oracle(Q, q):
    losses = quadratic(Q, q)
    return lambda W, t, key: losses.grad(W)


CHAIN = np.array([(0, 1), (1, 2)])


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
            work=LocalWork(batch_size=6),
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


@pytest.mark.parametrize(
    ("make", "match"),
    [
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
    ],
)
def test_bad_arguments_are_refused(make, match):
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    losses = quadratic(*clients([1, 1, 1], [0, 0, 3]))
    data = np.zeros((3, 5, 2)), np.zeros((3, 5))
    with pytest.raises(ValueError, match=match):
        make(graph, losses, data)


def test_clients_of_equal_losses_are_one_and_their_order_does_not_matter():
    start = jnp.tile(jnp.array([[0.3]]), (2, 1))

    def end(Q, minimiser, rounds=4):
        operator = fedavg.make(oracle(*clients(Q, minimiser)), 2, eta=0.1)
        return operators.run(operator, start, rounds)[0]

    np.testing.assert_array_equal(end([0, 0], [1, 1]), start)
    w = 0.3
    for _ in range(4 * 5):
        w -= 0.1 * 2 * 3 * (w - 1)
    np.testing.assert_allclose(end([3, 3], [1, 1]), [[w], [w]], rtol=1e-12)
    np.testing.assert_allclose(end([1, 3], [0, 1]), end([3, 1], [1, 0]), rtol=1e-14)
