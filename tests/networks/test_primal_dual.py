"""GTVMin with norms: certificates, exact consensus and convex clustering."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import duality, norm_ball, oracles, primal_dual
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.spectrum import components
from fedjax_core.networks.variation import dual_exponent, lp

RNG = np.random.default_rng(0)
NORMS = (1.0, 1.5, 2.0, 3.0, math.inf)

pytestmark = pytest.mark.usefixtures("x64")


def close(actual, wanted, tol=1e-9):
    np.testing.assert_allclose(actual, wanted, rtol=tol, atol=tol)


def graph64(edges, weight: Any = 1.0, num_nodes=None):
    return Graph.from_edges(edges, np.asarray(weight), num_nodes, dtype=np.float64)


def local_data(n=6, d=2, m=4):
    X, y = RNG.normal(size=(n, m, d)), RNG.normal(size=(n, m))
    Q = np.swapaxes(X, 1, 2) @ X / m
    q = -2 * np.einsum("nmd,nm->nd", X, y) / m
    return oracles.Quadratic(*map(jnp.asarray, (Q, q, (y**2).mean(1))))


def sweep(graph, stats, alphas, p, **options):
    """Solutions at several alphas, one compiled program."""
    Q, q, c = stats
    losses = oracles.quadratic(Q, q, c)
    conjugate = duality.quadratic_conjugate(Q, q, c)

    def one(alpha):
        return primal_dual.solve(
            losses, graph, jnp.zeros_like(q), alpha, p, conjugate=conjugate, **options
        )

    return jax.jit(jax.vmap(one))(np.asarray(alphas))


@pytest.mark.parametrize("p", NORMS)
def test_projection_on_balls(p):
    """In the ball, and u - P(u) is normal to it at P(u)."""
    U, radius = 3 * RNG.normal(size=(200, 4)), RNG.uniform(0, 4, 200)
    radius[0] = U[1] = 0
    U[2] *= 1e-3
    inside = norm_ball.project(U, radius, p)
    assert (lp(p)(inside) <= radius * (1 + 1e-12)).all()
    rest = U - inside
    largest = radius * lp(dual_exponent(p))(rest)
    close((rest * inside).sum(1), largest)
    close(inside[2], U[2])


def test_the_gap_closes():
    """T-M9, for every norm, with cycles, an isolated node and an edge of weight 0."""
    edges = [[0, 1], [1, 2], [2, 0], [2, 3], [3, 4], [0, 4]]
    graph = graph64(edges, [1, 2, 0.5, 1, 1, 0], 6)
    Q, q, c = stats = local_data()
    losses = oracles.quadratic(Q, q, c)
    D = np.zeros((6, 6))
    D[np.arange(6), graph.tail] += 1
    D[np.arange(6), graph.head] -= 1
    for p in (1.0, 1.5, 2.0, math.inf):
        found = sweep(graph, stats, [0.0, 0.05, 5.0], p, tol=1e-10)
        assert found.converged.all()
        assert (np.abs(found.gap) <= 1e-9).all()
        for alpha, W, U, primal in zip(
            (0, 0.05, 5), found.W, found.U, found.primal, strict=True
        ):
            apart = lp(p)(jnp.asarray(D @ W))
            close(primal, losses.value(W).sum() + alpha * graph.weight @ apart)
            flow = lp(dual_exponent(p))(U)
            assert (flow <= alpha * graph.weight + 1e-12).all()
        # T-M3: gradients balance in every component.
        sums = jax.ops.segment_sum(losses.grad(found.W[1]), components(graph), 2)
        close(sums, np.zeros((2, 2)), 1e-4)
        alone = jnp.linalg.solve(Q, -q[..., None] / 2)[..., 0]
        close(found.W[0], alone, 1e-4)


def test_running_example_agrees_from_alpha_4_on():
    """T-M9, G-CHAIN3: exact consensus at 1 if and only if alpha >= 4."""
    graph = graph64([[0, 1], [1, 2]])
    y = np.array([[0.0], [0.0], [3.0]])
    stats = (np.ones((3, 1, 1)), jnp.asarray(-2 * y), (y**2)[:, 0])
    assert primal_dual.critical_alpha(graph, 2 * (1 - y)) == 4
    found = sweep(graph, stats, [0.98 * 4, 1.02 * 4], 1.0, tol=1e-14)
    close(found.W[0, :, 0], [0.98, 0.98, 1.04])
    close(found.W[1, :, 0], [1, 1, 1], 1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_critical_alpha_of_a_tree(p):
    """T-M9: consensus fails at 0.98 times it and is exact at 1.02 times it."""
    n, d = 9, 2
    parent = [int(RNG.integers(i)) for i in range(1, n)]
    graph = graph64(np.c_[parent, np.arange(1, n)], RNG.uniform(0.5, 2, n - 1))
    Q, q, _ = stats = local_data(n, d)
    centre = np.linalg.solve(Q.sum(0), -q.sum(0) / 2)
    gradients = oracles.quadratic(Q, q).grad(jnp.tile(centre, (n, 1)))
    critical = primal_dual.critical_alpha(graph, gradients, p)

    # By definition: cut every edge and add up one side.
    worst = 0.0
    head, tail = np.asarray(graph.head), np.asarray(graph.tail)
    for e in range(n - 1):
        side = {int(tail[e])}
        for _ in range(n):
            for k in set(range(n - 1)) - {e}:
                if side & {int(head[k]), int(tail[k])}:
                    side |= {int(head[k]), int(tail[k])}
        flow = gradients[np.array(sorted(side))].sum(0)
        norm = np.linalg.norm(flow, ord=dual_exponent(p))
        worst = max(worst, norm / graph.weight[e])
    close(critical, worst)

    found = sweep(graph, stats, [0.98 * critical, 1.02 * critical], p, tol=1e-12)
    assert np.abs(found.W[0] - centre[None]).max() > 1e-4
    close(found.W[1], np.tile(centre, (n, 1)), 1e-7)
    assert found.converged.all()


def test_two_points_merge_where_convex_clustering_says():
    """S26: w_1 = a_1 + min(alpha A / 2, gap / 2), so they merge at alpha = gap / A."""
    graph, a = graph64([[0, 1]], 0.5), jnp.array([[-1.0], [2.0]])
    alphas = np.array([0.0, 1.0, 3.0, 5.9, 6.1, 20.0])
    W = jax.jit(
        jax.vmap(lambda x: primal_dual.convex_clustering(graph, a, x, tol=1e-14).W)
    )(alphas)
    step = np.minimum(alphas / 4, 1.5)
    close(W[..., 0], np.stack([-1 + step, 2 - step], 1), 1e-7)


def test_without_a_conjugate_the_residual_stops():
    """A node without data has no finite conjugate."""
    graph = graph64([[0, 1], [1, 2]])
    Q, q, _ = local_data(3)
    Q, q = Q.at[1].set(0), q.at[1].set(0)
    losses = oracles.quadratic(Q, q)
    start = jnp.zeros((3, 2))
    found = primal_dual.solve(losses, graph, start, 0.1, tol=1e-12)
    assert found.converged
    assert found.residual <= 1e-12 * max(1, abs(found.primal))
    assert found.dual == -jnp.inf
    # The node between two others lies on the line that joins them, and moving it
    # along that line changes nothing; so the ends feel each other directly.
    ends = oracles.quadratic(Q[::2], q[::2])
    direct = primal_dual.solve(ends, graph64([[0, 1]]), start[:2], 0.1, tol=1e-12)
    close(found.W[::2], direct.W, 1e-8)


def test_an_exhausted_budget_is_reported():
    graph = graph64([[0, 1], [1, 2]])
    a = jnp.asarray(RNG.normal(size=(3, 2)))
    found = primal_dual.convex_clustering(graph, a, 0.1, tol=1e-15, max_rounds=15)
    assert not found.converged
    assert found.rounds == 20
    assert found.gap > 0


def test_float32_and_step_size():
    with jax.enable_x64(False):
        graph = Graph.from_edges(np.array([[0, 1], [1, 2]]))
        a = jnp.array([[0.0], [0.0], [3.0]])
        found = primal_dual.convex_clustering(graph, a, 1.0, tau=0.2, tol=1e-5)
        assert found.W.dtype == jnp.float32
        assert found.converged
        np.testing.assert_allclose(found.W[:, 0], [0.25, 0.25, 2.5], atol=1e-2)


def test_bad_arguments_are_refused():
    graph, a = graph64([[0, 1], [1, 2]]), jnp.zeros((3, 2))
    for p in (0.5, -1, math.nan):
        with pytest.raises(ValueError, match="p must be >= 1"):
            primal_dual.convex_clustering(graph, a, 1.0, p)
        with pytest.raises(ValueError, match="p must be >= 1"):
            primal_dual.critical_alpha(graph, a, p)
    for alpha in (-1.0, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            primal_dual.convex_clustering(graph, a, alpha)
    for name in ("tol", "tau"):
        with pytest.raises(ValueError, match=name):
            primal_dual.convex_clustering(graph, a, 1.0, **{name: 0.0})
    circle = graph64([[0, 1], [1, 2], [0, 2]])
    apart = graph64([[0, 1], [1, 2]], [1.0, 0.0])
    for net in (circle, apart):
        with pytest.raises(ValueError, match="tree"):
            primal_dual.critical_alpha(net, a)
    with pytest.raises(ValueError, match="rows"):
        primal_dual.critical_alpha(graph, a[:2])
    for wrong in (np.ones((3, 1)), np.full((3, 1), np.nan)):
        with pytest.raises(ValueError, match="add up to 0"):
            primal_dual.critical_alpha(graph, wrong)


def test_whole_numbers_are_numbers():
    graph = graph64([[0, 1], [1, 2]])
    gradients = np.array([[2], [2], [-4]])
    assert primal_dual.critical_alpha(graph, gradients) == 4
    a = np.array([[0.0], [0.0], [3.0]])
    start: Any = np.zeros((3, 1), int)
    found = primal_dual.solve(oracles.squared_distance(a), graph, start, 1.0)
    close(found.W[:, 0], [0.25, 0.25, 2.5], 1e-3)


def test_float32_data_where_float64_is_the_default():
    points = jnp.asarray([[0.0], [1.0], [5.0]], jnp.float32)
    result = primal_dual.convex_clustering(graph64([(0, 1), (1, 2)]), points, 0.1)
    assert result.W.dtype == result.gap.dtype == jnp.float32
    close(result.W, [[0.05], [1.0], [4.95]], 1e-3)
