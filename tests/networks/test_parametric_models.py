"""FedGD, FedSGD and FedRelax on losses that are not quadratic."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core.algorithms.networks import fedgd, fedrelax
from fedjax_core.networks import gtvmin, iterate, operators, oracles
from fedjax_core.networks.graph import Graph

ALPHA = 0.4


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


def start():
    return {"slope": jnp.zeros((6, 2)), "bias": jnp.zeros(6)}


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
