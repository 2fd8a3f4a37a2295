"""The operations on networks against dense matrices, and what `Graph` refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import client_mesh, robust
from fedjax_core.algorithms.networks import personalised
from fedjax_core.networks import (
    asynchronous,
    builders,
    defences,
    graph,
    norm_ball,
    oracles,
    primal_dual,
    variation,
)
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.iterate import block_max_norm, block_norms
from fedjax_core.networks.operators import Operator, aggregate_by, copies, message_sum

pytestmark = pytest.mark.usefixtures("x64")


def dense_random(n, p, seed=0):
    rng = np.random.default_rng(seed)
    A = np.triu(rng.random((n, n)) * (rng.random((n, n)) < p), 1)
    return A + A.T


# No edge at all; one width; several widths and nodes of more neighbours than a row.
@pytest.mark.parametrize(
    ("n", "p", "small"), [(1, 0.0, 2**14), (6, 0.5, 2**14), (20, 0.3, 0)]
)
def test_TG7_operations_equal_dense_matrices(n, p, small, monkeypatch):
    monkeypatch.setattr(graph, "_SMALL", small)
    monkeypatch.setattr(graph, "_WIDTHS", (1, 2, 4))
    A = dense_random(n, p)
    L = np.diag(A.sum(1)) - A
    network = Graph.from_dense(A)
    rng = np.random.default_rng(1)
    W = {"a": rng.standard_normal((n, 3)), "b": rng.standard_normal(n)}
    edge = (np.asarray(network.head), np.asarray(network.tail))
    D = np.zeros((network.num_edges, n))
    D[np.arange(len(D)), edge[1]], D[np.arange(len(D)), edge[0]] = 1, -1

    @jax.jit
    def everything(network, W):
        U = graph.edge_diff(network, W)
        by_node = {
            "laplacian": graph.laplacian(network, W),
            "neighbours": graph.neighbour_sum(network, W),
            "scattered": graph.edge_scatter(network, U),
        }
        counts = (graph.degree(network), graph.num_neighbours(network))
        return U, by_node, counts, network.dense(), graph.messages(network, W)

    U, by_node, counts, dense, (received, weight) = everything(network, W)
    np.testing.assert_allclose(dense, A)
    np.testing.assert_allclose(counts[0], A.sum(1))
    np.testing.assert_array_equal(counts[1], (A > 0).sum(1))
    for name, w in W.items():
        np.testing.assert_allclose(U[name], D @ w, atol=1e-12)
        for of, M in (("laplacian", L), ("neighbours", A), ("scattered", D.T @ D)):
            np.testing.assert_allclose(by_node[of][name], M @ w, atol=1e-12)
    np.testing.assert_allclose(
        (weight[..., None] * received["a"]).sum(1), A @ W["a"], atol=1e-12
    )


def test_TG1_quadratic_form_is_the_total_variation():
    A = dense_random(30, 0.3)
    network = Graph.from_dense(A)
    for d in (1, 4):
        W = np.random.default_rng(d).standard_normal((30, d))
        apart = ((W[:, None] - W[None]) ** 2).sum(-1)
        expected = (A * apart).sum() / 2
        form = (W * graph.laplacian(network, jnp.asarray(W))).sum()
        np.testing.assert_allclose(form, expected, rtol=1e-9)


def test_laplacian_of_equal_rows_is_exactly_zero_in_float32():
    network = builders.erdos_renyi(50, 0.9)
    network = network.with_weight(network.weight.astype(jnp.float32) * 0.1)
    W = jnp.full((50, 2), 1 / 3, jnp.float32)
    assert not np.asarray(graph.laplacian(network, W)).any()


def test_transforms_reach_weights_and_rows():
    A = dense_random(20, 0.5)
    L = np.diag(A.sum(1)) - A
    network = Graph.from_dense(A)
    W = jnp.asarray(np.random.default_rng(0).standard_normal((20, 2)))

    def energy(weight, W):
        return (W * graph.laplacian(network.with_weight(weight), W)).sum()

    np.testing.assert_allclose(
        jax.jit(jax.grad(energy, 1))(network.weight, W), 2 * L @ W, atol=1e-10
    )
    np.testing.assert_allclose(
        jax.jit(jax.grad(energy))(network.weight, W),
        (graph.edge_diff(network, W) ** 2).sum(1),
        atol=1e-10,
    )
    scales = jnp.asarray([0.0, 1.0, 3.0])
    swept = jax.jit(jax.vmap(lambda s: energy(s * network.weight, W)))(scales)
    np.testing.assert_allclose(swept, scales * (W * (L @ W)).sum(), rtol=1e-10)


def test_directed_edges_are_sorted_by_receiver():
    network = Graph.from_edges([(3, 1), (0, 2), (2, 1)], [1.0, 2.0, 3.0], 5)
    assert network.target.tolist() == [0, 1, 1, 2, 2, 3]
    assert network.source.tolist() == [2, 2, 3, 0, 1, 1]
    assert network.edge.tolist() == [1, 2, 0, 1, 2, 0]
    assert network.start.tolist() == [0, 1, 3, 5, 6, 6]
    assert network.head.tolist() == [1, 0, 1]
    assert network.tail.tolist() == [3, 2, 2]


def test_a_node_never_reads_one_that_it_does_not_know():
    # Nodes 0 to 4 form a chain; 5 has diverged and knows 4 only.
    network = builders.chain(6)
    W = jnp.ones((6, 1)).at[5].set(jnp.nan)
    for operation in (graph.laplacian, graph.neighbour_sum):
        assert np.isfinite(operation(network, W)).ravel().tolist()[:4] == [True] * 4
    received, _ = graph.messages(network, W)
    assert np.isfinite(received[:4]).all()


def test_a_hub_costs_what_its_edges_cost():
    network = builders.star(5_000)
    slots = sum(table.source.size for table in network.tables)
    assert slots <= 2.1 * network.num_edges
    W = jnp.arange(5_000.0)[:, None]
    np.testing.assert_allclose(
        graph.neighbour_sum(network, W)[:, 0], np.r_[4_999 * 2_500, np.zeros(4_999)]
    )
    with pytest.raises(ValueError, match="5000 nodes x 4999 slots"):
        graph.messages(network, W)


def test_features_split_over_devices_give_the_same():
    mesh = client_mesh()
    assert mesh is not None
    network = builders.erdos_renyi(64, 0.1)
    W = jnp.asarray(np.random.default_rng(0).standard_normal((64, 16)))
    nodes = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("clients"))
    step = jax.jit(graph.over_features(graph.laplacian, mesh))
    result = step(network, jax.device_put(W, nodes))
    np.testing.assert_array_equal(result, graph.laplacian(network, W))
    assert result.sharding.is_equivalent_to(nodes, 2)
    text = step.lower(network, jax.device_put(W, nodes)).compile().as_text()
    assert text is not None
    assert "all-to-all" in text
    assert "all-gather" not in text
    assert graph.over_features(graph.laplacian, None) is graph.laplacian


def test_float32_by_default():
    with jax.enable_x64(False):
        network = builders.chain(3)
        assert network.weight.dtype == jnp.float32
        assert graph.laplacian(network, jnp.ones(3)).dtype == jnp.float32
    assert builders.chain(3).weight.dtype == jnp.float64
    W = jnp.ones(3, jnp.float32)
    assert graph.laplacian(builders.chain(3), W).dtype == jnp.float32


@pytest.mark.parametrize(
    ("edges", "weight", "n", "message"),
    [
        ([(0, 1), (2, 2)], 1.0, None, "self-loop of node 2 as edge 1"),
        ([(0, 1), (1, 0)], 1.0, None, r"once, got \(1, 0\) again as edge 1"),
        ([(0, 3)], 1.0, 3, r"nodes in 0\.\.2, got \(0, 3\)"),
        ([(-1, 0)], 1.0, None, r"got \(-1, 0\)"),
        ([(0, 1)], -1.0, None, "finite and >= 0, got -1.0 for edge 0"),
        ([(0, 1)], np.nan, None, "got nan"),
        ([(0, 1)], np.inf, None, "got inf"),
        ([(0, 1)], [1.0, 2.0], None, "one number or one per edge"),
        ([(0, 1)], 1.0, 0, "num_nodes must be >= 1, got 0"),
        (
            [(0, 1), (1, 2)],
            [1, 1e-320],
            3,
            r"0 or at least .* float64, got 1e-320 .* 1",
        ),
        ([(0, 1, 2)], 1.0, None, r"shape \(E, 2\)"),
    ],
)
def test_bad_edges(edges, weight, n, message):
    with pytest.raises(ValueError, match=message):
        Graph.from_edges(edges, weight, n)


def test_weights_that_overflow_float32_are_refused():
    with jax.enable_x64(False), pytest.raises(ValueError, match="got inf"):
        Graph.from_edges([(0, 1)], 1e300)


@pytest.mark.parametrize(
    ("adjacency", "message"),
    [
        ([[0, 1]], "square"),
        ([[0, 1], [2, 0]], "symmetric, got 1 from 0 to 1 and 2 back"),
        ([[1, 0], [0, 0]], "zero diagonal, got 1 from 0 to 0"),
        ([[0.0, np.nan], [np.nan, 0.0]], "finite, got nan from 0 to 1"),
        ([[0, -1], [-1, 0]], ">= 0, got -1"),
    ],
)
def test_bad_adjacency(adjacency, message):
    with pytest.raises(ValueError, match=message):
        Graph.from_dense(adjacency)


def test_floats_are_no_nodes_and_ints_no_parameters():
    with pytest.raises(TypeError, match="edges must be ints"):
        Graph.from_edges([(0.0, 1.0)])
    for operation in (graph.laplacian, graph.neighbour_sum):
        with pytest.raises(TypeError, match="W must be floats"):
            operation(builders.chain(3), jnp.arange(3))


def test_weights_of_another_graph_are_refused():
    network = builders.chain(3)
    for weight in (2.0, jnp.ones(1), jnp.ones(5), jnp.ones((2, 1))):
        with pytest.raises(ValueError, match=r"weight must have .* shape \(2,\)"):
            network.with_weight(weight)
        with pytest.raises(ValueError, match="weight must have one entry per edge"):
            jax.jit(lambda w: graph.degree(network.with_weight(w)))(weight)
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=r"finite and >= 0, got .* for edge 1"):
            network.with_weight(jnp.array([1.0, bad]))
    mapped = jax.vmap(lambda w: graph.degree(network.with_weight(w)))
    np.testing.assert_array_equal(mapped(np.ones((4, 2))), [[1, 2, 1]] * 4)


@pytest.mark.parametrize(
    "operation",
    [
        graph.laplacian,
        graph.neighbour_sum,
        graph.edge_diff,
        graph.messages,
        variation.gtv,
        copies,
    ],
)
@pytest.mark.parametrize("shape", [(1,), (2, 2), (4, 2), ()])
def test_rows_of_another_network_are_refused(operation, shape):
    with pytest.raises(ValueError, match="W must have one row per node, 3, got shape"):
        operation(builders.chain(3), {"a": jnp.ones((3, 2)), "b": jnp.ones(shape)})


@pytest.mark.parametrize(
    ("weight", "n", "dtype", "message"),
    [
        ("x", None, float, "weight must be real numbers, got dtype <U1"),
        (1j, None, float, "weight must be real numbers, got dtype complex128"),
        (1.0, 3.0, float, "num_nodes must be an int, got 3.0"),
        (1.0, True, float, "num_nodes must be an int, got True"),
        (1.0, None, int, "dtype must be a float, got int64"),
        (1.0, None, complex, "dtype must be a float, got complex128"),
    ],
)
def test_what_is_no_weight_nor_number_of_nodes(weight, n, dtype, message):
    with pytest.raises(TypeError, match=message):
        Graph.from_edges([(0, 1)], weight, n, dtype)


def test_other_weights_are_cast_before_they_are_looked_at():
    network = Graph.from_edges([(0, 1), (1, 2)], dtype=jnp.float32)
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="finite and >= 0, got inf for edge 0"):
            network.with_weight(np.array([1e39, 1]))
        with pytest.raises(
            ValueError, match=r"0 or at least .* float32, got 1e-50 .* 1"
        ):
            network.with_weight([1, 1e-50])
    for weight in ([True, False], [2, 0], np.ones(2, np.float32)):
        changed = network.with_weight(weight)
        assert changed.weight.dtype == jnp.float32
        np.testing.assert_array_equal(changed.weight, np.asarray(weight, float))
    assert network.with_weight(np.ones(2)).weight.dtype == jnp.float64
    for change in (network.with_weight, jax.jit(network.with_weight)):
        with pytest.raises(TypeError, match="weight must be real numbers, got"):
            change(jnp.ones(2, complex))
    assert jax.jit(network.with_weight)(jnp.arange(2)).weight.dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_nothing_passes_an_edge_of_weight_zero(bad):
    """What 1e200 is squared overflows."""
    network = Graph.from_edges([(0, 1), (1, 2)], [1.0, 0.0])
    W = jnp.asarray([[1.0], [3.0], [bad]])

    def penalty(weight, W):
        return variation.gtv(network.with_weight(weight), W)

    value, (by_weight, by_row) = jax.value_and_grad(penalty, (0, 1))(network.weight, W)
    assert value == 4
    np.testing.assert_array_equal(by_row, [[-4], [4], [0]])
    assert np.isfinite(by_weight).all()
    arrived = message_sum(network, copies(network, W))
    np.testing.assert_array_equal(arrived, [[3], [1], [0]])


def test_weights_of_zero_keep_their_slope():
    network = Graph.from_edges([(0, 1), (1, 2)], [1.0, 0.0])
    W = jnp.asarray([[1.0], [3.0], [8.0]])

    def total(weight):
        changed = network.with_weight(weight)
        received = message_sum(changed, copies(changed, W))
        return variation.gtv(changed, W), received[:, 0]

    by_gtv, by_sum = jax.jacobian(total)(network.weight)
    np.testing.assert_array_equal(by_gtv, [4, 25])
    np.testing.assert_array_equal(by_sum, [[3, 0], [1, 8], [0, 3]])


ALONE = builders.erdos_renyi(3, 0.0)
ROWS = jnp.arange(6.0).reshape(3, 2)
NO_ROWS = jnp.zeros((0, 2))
LOSSES = oracles.squared_distance(ROWS)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: graph.laplacian(ALONE, ROWS), np.zeros((3, 2))),
        (lambda: graph.neighbour_sum(ALONE, ROWS), np.zeros((3, 2))),
        (lambda: graph.edge_diff(ALONE, ROWS), NO_ROWS),
        (lambda: graph.edge_scatter(ALONE, NO_ROWS), np.zeros((3, 2))),
        (lambda: message_sum(ALONE, copies(ALONE, ROWS)), np.zeros((3, 2))),
        (
            lambda: aggregate_by(functools.partial(robust.trim_extremes, b=1))(
                ALONE, NO_ROWS
            ),
            np.zeros((3, 2)),
        ),
        (lambda: variation.gtv(ALONE, ROWS), 0),
        (lambda: variation.gtv(ALONE, ROWS, variation.lp(1.5)), 0),
        (lambda: variation.gtv(ALONE, {"a": ROWS, "b": ROWS[:, 0]}), 0),
        (lambda: norm_ball.project(NO_ROWS, jnp.zeros(0), 1), NO_ROWS),
        (lambda: norm_ball.project(NO_ROWS, jnp.zeros(0), 3), NO_ROWS),
        (lambda: block_norms(NO_ROWS), np.zeros(0)),
        (lambda: block_max_norm(NO_ROWS), 0),
        (lambda: robust.weiszfeld(NO_ROWS, jnp.zeros(0)), np.zeros(2)),
        (
            lambda: robust.subgradient_residual(NO_ROWS, jnp.zeros(0), ROWS[0]),
            0,
        ),
        (lambda: personalised.objective(ALONE, LOSSES, 1.0, ROWS), 0),
        (
            lambda: defences.relax_by_norm(ALONE, 0 * ROWS, NO_ROWS, LOSSES, 1.0),
            ROWS,
        ),
        (
            lambda: defences.norm_residual(ALONE, ROWS, NO_ROWS, LOSSES, 1.0),
            np.zeros(3),
        ),
        (lambda: primal_dual.solve(LOSSES, ALONE, 0 * ROWS, 1.0).W, ROWS),
        (
            lambda: asynchronous.run(
                Operator(
                    ALONE,
                    lambda W, S, t, key: W + S,
                    emit=lambda W, t, key: NO_ROWS,
                    by_edge=True,
                ),
                asynchronous.synchronous(ALONE, 2),
                ROWS,
            )[0],
            ROWS,
        ),
    ],
)
def test_a_network_without_edges_is_nodes_on_their_own(call, expected):
    np.testing.assert_allclose(call(), expected, rtol=1e-5, atol=1e-3)
