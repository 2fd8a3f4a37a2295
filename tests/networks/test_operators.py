"""The round of a method on a network, part by part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_core import robust
from fedjax_core.algorithms.networks import fedavg, fedgd, fedrelax
from fedjax_core.networks import operators
from fedjax_core.networks.graph import Graph, neighbour_sum
from fedjax_core.networks.oracles import quadratic
from fedjax_core.networks.theory.resilience import without_nodes


def random_network(seed, n=40, d=3, hub=False, dtype=np.float32):
    """A connected graph with random weights, and random definite quadratics."""
    rng = np.random.default_rng(seed)
    pairs = {(i, i + 1) for i in range(n - 1)}
    pairs |= {(i, j) for i in range(n) for j in range(i + 2, n) if rng.random() < 0.15}
    if hub:
        pairs |= {(0, j) for j in range(1, n)}
    pairs = np.array(sorted(pairs))
    graph = Graph.from_edges(pairs, rng.uniform(0.2, 2, len(pairs)), n, dtype)
    X = rng.normal(size=(n, 6, d))
    Q = np.einsum("nmd,nme->nde", X, X) / 6 + 0.1 * np.eye(d)
    q = rng.normal(size=(n, d))
    return graph, jnp.asarray(Q, dtype), jnp.asarray(q, dtype)


def test_sums_over_edges_equal_sums_over_nodes():
    graph, _, W = random_network(0, hub=True)
    W = {"a": W, "b": W[:, 0]}

    def both(W):
        copies = operators.copies(graph, W)
        return operators.message_sum(graph, copies), neighbour_sum(graph, W)

    got, expected = jax.jit(both)(W)
    # To the bit in so small a network only; the compiler may fuse larger ones apart.
    jax.tree.map(np.testing.assert_array_equal, got, expected)

    graph, _, W = random_network(0, n=150)
    got, expected = jax.jit(both)(W)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_message_sum_takes_every_directed_edge_for_itself():
    graph, _, _ = random_network(1, hub=True)
    rng = np.random.default_rng(0)
    messages = rng.normal(size=(2 * graph.num_edges, 2)).astype(np.float32)
    expected = np.zeros((graph.num_nodes, 2))
    weight = np.asarray(graph.weight)[np.asarray(graph.edge)]
    np.add.at(expected, np.asarray(graph.target), weight[:, None] * messages)
    got = jax.jit(operators.message_sum)(graph, messages)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_message_sum_without_edges():
    graph = Graph.from_edges(np.zeros((0, 2), int), num_nodes=3)
    np.testing.assert_array_equal(
        operators.message_sum(graph, jnp.ones((0, 2))), np.zeros((3, 2))
    )


def test_rule_that_is_the_mean_changes_nothing():
    graph, _, W = random_network(2)

    def mean(values, weights):
        return jnp.tensordot(weights, values, 1) / weights.sum()

    @jax.jit
    def both(W):
        by_rule = operators.aggregate_by(mean)(graph, operators.copies(graph, W))
        return by_rule, neighbour_sum(graph, W)

    np.testing.assert_allclose(*both(W), rtol=2e-5, atol=1e-5)


def test_rule_leaves_isolated_nodes_at_zero():
    graph = Graph.from_edges(np.array([(0, 1)]), num_nodes=3)

    def mean(values, weights):
        return (weights[:, None] * values).sum(0) / weights.sum()

    messages = operators.copies(graph, jnp.array([[1.0], [2.0], [3.0]]))
    got = operators.aggregate_by(mean)(graph, messages)
    np.testing.assert_array_equal(got, [[2], [1], [0]])


def test_channel_sees_messages_of_directed_edges():
    """One link delivers nonsense, and only its receiver notices."""
    graph = Graph.from_edges(np.array([(0, 1), (1, 2)]))
    operator = fedrelax.make_quadratic(
        graph, jnp.ones((3, 1, 1)), jnp.zeros((3, 1)), alpha=1.0
    )
    W = jnp.array([[1.0], [2.0], [3.0]])
    bad = (graph.source == 1) & (graph.target == 0)

    def poison(messages, t, key):
        return jnp.where(bad[:, None], 100.0, messages)

    clean = jax.jit(operators.step(operator))(W, 0)
    attacked = operators.step(operator, poison)(W, 0)
    np.testing.assert_array_equal(clean[1:], attacked[1:])
    assert attacked[0, 0] > clean[0, 0] + 10


def test_average_counts_the_active_rows_only():
    W = {"a": jnp.arange(6.0).reshape(3, 2), "b": jnp.array([1.0, 2.0, 9.0])}
    active = jnp.array([True, False, True])
    got = operators.average()(W, active)
    np.testing.assert_allclose(got["a"], [[2, 3]] * 3)
    np.testing.assert_allclose(got["b"], [5] * 3)
    got = operators.average(np.array([3.0, 1, 1]))(W, active)
    np.testing.assert_allclose(got["b"], [3] * 3)
    np.testing.assert_allclose(operators.average()(W, None)["b"], [4] * 3)


def test_select_leaves_the_others_exactly_as_they_are():
    graph, Q, q = random_network(3)
    operator = fedgd.make(graph, quadratic(Q, q), alpha=0.3, eta=0.01)
    operator = operator._replace(select=fedavg.subset(40, 5))
    W = jnp.asarray(np.random.default_rng(0).normal(size=(40, 3)), jnp.float32)
    new, _ = operators.run(operator, W, 1, key=jax.random.key(0))
    assert (np.asarray(new != W).any(1)).sum() == 5


def test_channel_needs_a_graph():
    operator = operators.Operator(None, lambda W, S, t, key: W)
    with pytest.raises(ValueError, match="channel must be None"):
        operators.step(operator, operators.relay)


def test_sweeps_are_one_vmapped_program():
    """Over alpha, rates, edge weights and starts at once, as the runs one by one."""
    graph, Q, q = random_network(4)
    losses = quadratic(Q, q)

    def final(alpha, eta, scale, W):
        weighted = graph.with_weight(scale * graph.weight)
        operator = fedgd.make(weighted, losses, alpha=alpha, eta=eta)
        relax = fedrelax.make_quadratic(weighted, Q, q, alpha=alpha)
        return operators.run(operator, W, 20)[0], operators.run(relax, W, 20)[0]

    rng = np.random.default_rng(0)
    alpha = jnp.array([0.0, 0.1, 1.0])
    eta = jnp.array([0.1, 0.05, 0.01])
    scale = jnp.array([1.0, 0.5, 0.3])
    W = jnp.asarray(rng.normal(size=(3, 40, 3)), jnp.float32)
    together = jax.jit(jax.vmap(final))(alpha, eta, scale, W)
    one = jax.jit(final)
    for k in range(3):
        alone = one(alpha[k], eta[k], scale[k], W[k])
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_allclose(a, b[k], rtol=1e-4, atol=1e-5)


def test_random_methods_sweep_over_seeds():
    graph, Q, q = random_network(5)
    operator = fedgd.make(graph, quadratic(Q, q), alpha=0.1, eta=0.05)
    operator = operator._replace(select=fedavg.subset(40, 8))

    def final(key):
        return operators.run(operator, jnp.zeros((40, 3)), 10, key=key)[0]

    keys = jax.random.split(jax.random.key(1), 4)
    together = jax.jit(jax.vmap(final))(keys)
    alone = jax.jit(final)(keys[2])
    np.testing.assert_allclose(alone, together[2], rtol=1e-4, atol=1e-6)
    assert not np.allclose(together[0], together[1])


def test_nodes_sharded_over_eight_devices():
    """Rows of W and Q live on different devices; the iterates agree to rounding."""
    graph, Q, q = random_network(6, n=64)
    mesh = jax.make_mesh((8,), ("nodes",), axis_types=(jax.sharding.AxisType.Auto,))
    by_node = NamedSharding(mesh, PartitionSpec("nodes"))

    @jax.jit
    def final(Q, q, W):
        gd = fedgd.make(graph, quadratic(Q, q), alpha=0.1, eta=0.02)
        relax = fedrelax.make_quadratic(graph, Q, q, alpha=0.1)
        return operators.run(gd, W, 30)[0], operators.run(relax, W, 30)[0]

    arrays = Q, q, jnp.zeros((64, 3))
    expected = final(*arrays)
    got = final(*(jax.device_put(x, by_node) for x in arrays))
    for a, b in zip(got, expected, strict=True):
        assert len(a.sharding.device_set) == 8
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_arrays_of_numpy_are_parameters_too():
    graph, Q, q = random_network(0)
    W = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    copies = operators.copies(graph, W)
    got = operators.message_sum(graph, np.asarray(copies))
    np.testing.assert_allclose(got, neighbour_sum(graph, W), rtol=1e-4, atol=1e-5)
    by_rule = operators.aggregate_by(robust.average)(graph, np.asarray(copies))
    np.testing.assert_allclose(by_rule, got, rtol=1e-4, atol=1e-5)
    operator = fedgd.make(graph, quadratic(Q, q), alpha=0.1, eta=0.02)
    operators.step(operator, operators.relay)(W, 0)


def test_a_failed_node_that_diverges_infects_nobody():
    graph, Q, q = random_network(1)
    alive = jnp.arange(40) != 7
    operator = fedgd.make(
        without_nodes(graph, alive), quadratic(Q, q), alpha=0.1, eta=0.02
    )
    W = jnp.zeros((40, 3)).at[7].set(jnp.nan)
    found, _ = operators.run(operator, W, 5, channel=operators.relay)
    np.testing.assert_array_equal(np.isfinite(found).all(1), alive)
