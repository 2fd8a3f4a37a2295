"""One model by projected gradient descent."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import single_model
from fedjax_core.networks import gtvmin, operators
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import least_squares_statistics, quadratic

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


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda g, f, x: single_model.make(f, eta=0.1, local_steps=0), "local_steps"),
    ],
)
def test_bad_arguments_are_refused(make, match):
    graph = Graph.from_edges(CHAIN, dtype=np.float64)
    losses = quadratic(*clients([1, 1, 1], [0, 0, 3]))
    data = np.zeros((3, 5, 2)), np.zeros((3, 5))
    with pytest.raises(ValueError, match=match):
        make(graph, losses, data)
