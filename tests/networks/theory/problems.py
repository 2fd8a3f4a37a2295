"""Networks and data that tests of several modules share."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core.networks.graph import Graph

N, M, D = 6, 5, 2
EDGES = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0], [1, 4]]
GRAPH = Graph.from_edges(EDGES)
KEY = jax.random.key(0)


def on(weight):
    return GRAPH.with_weight(weight)


def guesses_setting():
    rng = np.random.default_rng(5)
    X, y = rng.normal(size=(N, M, D)), rng.normal(size=(N, M))
    T, u = rng.normal(size=(N, 7, D)), rng.normal(size=(N, 7))
    return jnp.asarray(X), jnp.asarray(y), jnp.asarray(T), jnp.asarray(u)


def ragged_setting():
    X, y, T, u = (np.array(a) for a in guesses_setting())
    rows = np.arange(M) < np.array([5, 2, 3, 5, 4, 2])[:, None]
    tests = np.arange(7) < np.array([7, 1, 3, 2, 7, 5])[:, None]
    for known, there in ((X, rows), (y, rows), (T, tests), (u, tests)):
        known[~there] = np.nan
    return X, y, rows, T, u, tests


def by_node(function, rows, *arrays):
    return np.array(
        [function(i, *(a[i][rows[i]] for a in arrays)) for i in range(len(rows))]
    )
