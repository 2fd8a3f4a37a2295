"""FedProx: fixed points and limits."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import fedprox
from fedjax_core.networks import operators
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import least_squares_statistics, quadratic

pytestmark = pytest.mark.usefixtures("x64")


def clients(Q, minimiser):
    """Scalar quadratics Q_i (w - a_i)^2."""
    Q, a = np.array(Q, float), np.array(minimiser, float)
    return jnp.asarray(Q[:, None, None]), jnp.asarray(-2 * (Q * a)[:, None])


TWO = [1, 3], [0, 1]  # the two clients of the printed fixed points


def regression(seed=0, n=6, m=5, d=2):
    """A ring with random weights, and least-squares data."""
    rng = np.random.default_rng(seed)
    edges = np.array([(i, (i + 1) % n) for i in range(n)])
    graph = Graph.from_edges(edges, rng.uniform(0.3, 2, n), n, np.float64)
    X = rng.normal(size=(n, m, d))
    y = X @ rng.normal(size=d) + 0.3 * rng.normal(size=(n, m))
    return graph, X, y


CHAIN = np.array([(0, 1), (1, 2)])


# T-F6
def test_fedprox_fixed_points_and_limits():
    Q, q = clients(*TWO)
    golden = {1.0: 0.6, 0.01: 0.74631, 100.0: 0.50166, 1e-7: 0.75, 1e9: 0.5}
    for eta, expected in golden.items():
        at = fedprox.fixed_point(Q, q, eta)
        np.testing.assert_allclose(at, [expected], atol=5e-6)
        operator = fedprox.make(quadratic(Q, q), 2, eta=eta)
        fixed = jnp.full((2, 1), at)
        moved, _ = operators.run(operator, fixed, 1)
        np.testing.assert_allclose(moved, fixed, rtol=1e-9)
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


@pytest.mark.parametrize(
    ("make", "match"),
    [
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
