"""NPFL and NPFL-RL: rounds by hand, golden runs, limits, what the text gets wrong."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import NonFiniteUpdateError
from fedjax_core.algorithms.networks import npfl, zcdp_nfl
from fedjax_core.datasets.networks import related_tasks
from fedjax_core.networks import builders, labelled, policies, risks, spectrum
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.run import run

N, Q, D = 12, 3, 4
GRAPH = builders.random_connected(N, 3, seed=1)
A = np.asarray(GRAPH.dense(), np.float64)
KEY = jax.random.key(3)
BASE = npfl.Config(Q, 0.8, 0.3, 0.2)


def draw(key, n=N, d=D, sizes=(2, 7)):
    tasks = related_tasks(key, n, Q, d, sizes)
    splits = (tasks.train[:3], tasks.valid[:3], tasks.test[:3])
    return labelled.Nodes(tasks.cluster, *splits, tasks.train.w_true)


@functools.cache
def nodes_of(draw):
    """The data of a key in double precision, of one program."""
    with jax.enable_x64(True):
        return jax.jit(draw)(KEY)


@functools.cache
def follow(config, rounds, every=1, graph=GRAPH, draw=draw):
    """The world and the states of a run in double precision."""
    with jax.enable_x64(True):
        system = npfl.make(config, graph, lambda key: nodes_of(draw))
        world = system.world(KEY)  # not compiled anew for every config

        @jax.jit
        def states(world, start):
            return iterate(
                lambda state, t, key: system.step(world, state, t, key)[0],
                start,
                rounds,
                key=KEY,
                record=lambda state: state,
                every=every,
            )[1]

        start = system.init(world, KEY)
        return jax.tree.map(np.asarray, (world, states(world, start)))


@dataclasses.dataclass
class Node:
    """A node in NumPy, by the formulas of the text, corrected."""

    nodes: labelled.Nodes
    config: npfl.Config
    k: int
    adjacency: np.ndarray

    def __post_init__(self):
        k, cluster = self.k, self.nodes.cluster
        near = self.adjacency[k] > 0
        self.own = np.flatnonzero(near & (cluster == cluster[k]))
        self.other = [
            np.flatnonzero(near & (cluster == r))
            for r in range(self.config.num_clusters)
            if r != cluster[k] and (near & (cluster == r)).any()
        ]
        self.ridge = self.config.strength / (cluster == cluster[k]).sum()
        X, y = self.rows(self.nodes.train)
        self.risk = X.T @ X / len(y), X.T @ y / len(y)

    def rows(self, split):
        X, y, mask = split
        return X[self.k, mask[self.k]], y[self.k, mask[self.k]]

    def mean(self, W):
        return (
            np.mean([W[r].mean(0) for r in self.other], 0) if self.other else 0 * W[0]
        )

    def system(self, tau, W, dual):
        """H and b of (6.11)."""
        (Q, q), tau = self.risk, tau * bool(self.other)
        stiff = self.ridge + tau + self.config.rho * len(self.own)
        near = self.config.rho / 2 * (W[self.k] + W[self.own]).sum(0)
        b = q + tau * self.mean(W) - dual[self.k] / 2 + near
        return Q + stiff * np.eye(len(q)), b

    def model(self, tau, W, dual):
        return np.linalg.solve(*self.system(tau, W, dual))

    def value(self, tau, W, dual):
        X, y = self.rows(self.nodes.valid)
        w = self.model(tau, W, dual)
        return ((y - X @ w) ** 2).mean() + self.ridge * w @ w

    def slope(self, tau, W, dual):
        """Slope of the value in tau, in closed form."""
        if not self.other:
            return 0.0
        X, y = self.rows(self.nodes.valid)
        w, H = self.model(tau, W, dual), self.system(tau, W, dual)[0]
        by_model = -2 / len(y) * X.T @ (y - X @ w) + 2 * self.ridge * w
        return by_model @ np.linalg.solve(H, self.mean(W) - w)


def chosen(policy, key, tau, net, W, dual):
    """The weights after a step of a policy."""

    def values(a):
        return np.array([net[k].value(a[k], W, dual) for k in range(len(net))])

    if isinstance(policy, policies.Batch):
        for epoch in range(policy.epochs):
            own = jax.random.fold_in(key, epoch)
            tau = chosen(policy.policy, own, tau, net, W, dual)
        return tau
    if isinstance(policy, policies.PolicyGradient):
        slope = [net[k].slope(tau[k], W, dual) for k in range(len(net))]
        return np.clip(tau - policy.step_size * np.array(slope), 0, 1)
    if isinstance(policy, policies.ActorCritic):
        uniform = np.asarray(jax.random.uniform(key, tau.shape, float))
        action = np.clip(tau + policy.width * (uniform - 0.5), 0, 1)
        worse = np.sign(values(action) - values(tau))
        return np.clip(tau - policy.step_size * worse * (action - tau), 0, 1)
    if isinstance(policy, policies.Greedy):
        grid = np.linspace(0, 1, policy.num_actions)
        best = np.argmin([values(np.full(len(net), a)) for a in grid], 0)
        return grid[best]
    return tau


def loop(config, nodes, rounds, key):
    """Whole rounds in NumPy; yields W, duals and tau."""
    net = [Node(nodes, config, k, A) for k in range(N)]
    W, dual, tau = np.zeros((N, D)), np.zeros((N, D)), np.full(N, config.tau)
    for t in range(rounds):
        new = np.array([net[k].model(tau[k], W, dual) for k in range(N)])
        tau = chosen(config.policy, jax.random.fold_in(key, t), tau, net, W, dual)
        W, dual = new, dual.copy()
        for k in range(N):
            dual[k] += config.rho * (W[k] - W[net[k].own]).sum(0)
        yield W, dual, tau


POLICIES = {
    "none": None,
    "greedy": policies.Greedy(6),
    "sac": policies.ActorCritic(0.4, 0.5),
    "batch dpg": policies.Batch(policies.PolicyGradient(0.02), 3),
}


@pytest.mark.parametrize("name", POLICIES)
def test_F6_whole_rounds_by_hand(name, x64):
    config = dataclasses.replace(BASE, policy=POLICIES[name])
    world, states = follow(config, 12)
    W: Any = None
    dual: Any = None
    for n, (W, dual, tau) in enumerate(loop(config, world.nodes, 12, KEY)):
        np.testing.assert_allclose(states.admm.params[n], W, atol=1e-10)
        np.testing.assert_allclose(states.admm.dual[n], dual, atol=1e-10)
        np.testing.assert_allclose(states.tau[n], tau, atol=1e-10)
    if config.policy:
        assert np.ptp(states.tau[-1]) > 0.01
    # The closed form that the policy gradient is held against is a derivative.
    net = [Node(world.nodes, config, k, A) for k in range(N)]
    for k in (0, 5, 9):
        up, down = (net[k].value(0.2 + h, W, dual) for h in (1e-5, -1e-5))
        np.testing.assert_allclose(
            net[k].slope(0.2, W, dual), (up - down) / 2e-5, rtol=1e-5, atol=1e-9
        )


def test_F1_the_golden_run_of_two_nodes():
    one: Any = np.ones((2, 1))
    rows: Any = (one[..., None], np.array([[0.0], [2.0]]), one > 0)
    nodes = labelled.Nodes(jnp.zeros(2, int), rows, rows, rows, one)
    _, states = follow(
        npfl.Config(), 8, graph=builders.chain(2), draw=lambda key: nodes
    )
    n = np.arange(1, 9)
    first, dual = 1 - 2.0 ** (1 - n), 2 - 2.0 ** (1 - n)
    np.testing.assert_allclose(
        states.admm.params[..., 0], np.c_[first, 0 * n + 1], atol=1e-15
    )
    np.testing.assert_allclose(states.admm.dual[..., 0], np.c_[-dual, dual], atol=1e-15)


def test_F2_the_printed_dual_diverges_and_the_printed_primal_stalls():
    n, d, rho = 30, 60, 3.0
    graph = builders.random_connected(n, 6, seed=1)
    a = np.asarray(graph.dense(), np.float64)
    with jax.enable_x64(True):
        nodes = jax.tree.map(np.asarray, draw(jax.random.key(0), n, d, (5, 35)))
    config = npfl.Config(Q, rho, 0.1)
    net = [Node(nodes, config, k, a) for k in range(n)]

    def error(rounds, sign, all_neighbours):
        W, dual = np.zeros((n, d)), np.zeros((n, d))
        for _ in range(rounds):
            new = np.zeros((n, d))
            for k in range(n):
                H, b = net[k].system(0.0, W, dual)
                more = a[k].sum() - len(net[k].own)
                new[k] = np.linalg.solve(H + all_neighbours * rho * more * np.eye(d), b)
            W = new
            for k in range(n):
                dual[k] += sign * rho * (W[k] - W[net[k].own]).sum(0)
        square = (nodes.truth**2).sum(1)
        return 10 * np.log10((((W - nodes.truth) ** 2).sum(1) / square).mean())

    right = error(40, 1, 0)
    assert right < -7.5
    assert error(24, -1, 0) > 100  # dB
    assert error(40, 1, 1) > -1


def components_of(world):
    kept = GRAPH.with_weight(world.inside)
    return spectrum.components(kept)


@pytest.mark.parametrize("name", ["none", "sac"])
def test_F3_duals_of_a_component_sum_to_zero(name):
    world, states = follow(dataclasses.replace(BASE, policy=POLICIES[name]), 12)
    part = components_of(world)
    assert part.max() + 1 > Q  # clusters that are not connected inside
    for c in range(part.max() + 1):
        np.testing.assert_allclose(states.admm.dual[:, part == c].sum(1), 0, atol=1e-12)


@pytest.mark.parametrize("tau", [0.0, 0.2])
def test_F4_F5_every_component_reaches_its_optimum(tau):
    config = dataclasses.replace(BASE, tau=tau)
    world, states = follow(config, 3000, 3000)
    part = components_of(world)
    C = part.max() + 1
    net = [Node(world.nodes, config, k, A) for k in range(N)]
    H, b = np.zeros((C, D, C, D)), np.zeros((C, D))
    for k, c in enumerate(part):
        pull = net[k].ridge + tau * bool(net[k].other)
        H[c, :, c] += net[k].risk[0] + pull * np.eye(D)
        b[c] += net[k].risk[1]
        for group in net[k].other:
            for j in group:
                H[c, :, part[j]] -= tau / len(net[k].other) / len(group) * np.eye(D)
    best = np.linalg.solve(H.reshape(C * D, C * D), b.ravel()).reshape(C, D)
    np.testing.assert_allclose(states.admm.params[-1], best[part], atol=3e-8)


def test_F8_policies_that_do_not_move_are_fixed_weights():
    _, fixed = follow(BASE, 12)
    for still in (
        policies.PolicyGradient(0.0),
        policies.Batch(policies.ActorCritic(step_size=0.0)),
    ):
        _, same = follow(dataclasses.replace(BASE, policy=still), 12)
        np.testing.assert_array_equal(same.tau, fixed.tau)
        np.testing.assert_allclose(same.admm.params, fixed.admm.params, rtol=1e-13)


def test_F8_one_cluster_is_nfl():
    def single(key):
        nodes = draw(key)
        return nodes._replace(cluster=0 * nodes.cluster)

    config = npfl.Config(1, 0.8, 0.3)
    world, states = follow(config, 12, draw=single)
    with jax.enable_x64(True):
        system = zcdp_nfl.make(
            zcdp_nfl.Config(0.8, primal="exact"),
            GRAPH,
            risks.Risk(strength=0.3),
            lambda key: world.nodes.train,
        )
        other = system.world(jax.random.key(0))
        start = system.init(other, jax.random.key(0))
        last = jax.jit(
            lambda state: iterate(
                lambda state, t, key: system.step(other, state, t, key)[0],
                state,
                12,
                key=jax.random.key(0),
            )[0]
        )(start)
    np.testing.assert_allclose(states.admm.params[-1], last.admm.params, atol=1e-12)


def test_F9_the_norm_of_the_weighted_sum_acts_as_tau_squared(x64):
    m = jnp.array([[1.0, -2.0], [0.5, 3.0]])  # of two other clusters
    w, tau = jnp.array([0.3, 0.1]), 0.2

    def printed(w):
        return ((tau / 2 * (m - w[None]).sum(0)) ** 2).sum()

    def constraint(w):
        return tau / 2 * ((m - w[None]) ** 2).sum()

    slopes = jax.grad(printed)(w), jax.grad(constraint)(w)
    np.testing.assert_allclose(slopes[1], 2 * tau * (w - m.mean(0)), rtol=1e-12)
    np.testing.assert_allclose(slopes[0], tau * slopes[1], rtol=1e-12)


def test_F10_the_weights_keep_every_system_positive_definite():
    policy = policies.Batch(policies.ActorCritic(2.0, 1.0), 3)
    world, states = follow(dataclasses.replace(BASE, policy=policy), 12)
    assert states.tau.min() >= 0
    assert states.tau.max() <= 1
    assert np.ptp(states.tau) > 0.5
    net = [Node(world.nodes, BASE, k, A) for k in range(N)]
    W = states.admm.params[-1]
    for k in range(N):
        H, _ = net[k].system(states.tau[-1, k], W, W)
        lowest = net[k].ridge + BASE.rho * len(net[k].own)
        assert np.linalg.eigvalsh(H)[0] >= lowest - 1e-9


def test_seeds_are_one_program_and_report_weights_and_errors():
    config = dataclasses.replace(BASE, policy=policies.ActorCritic(0.4, 0.5))
    result = run(
        npfl.make(config, GRAPH, draw),
        rounds=20,
        seeds=(0, 1),
        eval_every=10,
        progress=False,
    )
    assert result.compilations == 1
    np.testing.assert_array_equal(result.train["messages"], 2 * GRAPH.num_edges)
    parts = [result.train[f"tau_{name}"] for name in ("few", "some", "many")]
    np.testing.assert_allclose(np.mean(parts, 0), result.train["tau"], rtol=1e-5)
    assert not np.array_equal(result.train["tau_fewest"], result.train["tau_most"])
    deviation = result.evaluations["deviation"]
    assert (deviation[:, -1] < 1).all()  # where it starts
    np.testing.assert_allclose(
        result.client_metrics["deviation_of_node"].mean(1), deviation[:, -1], rtol=1e-5
    )


def test_a_node_on_its_own_with_few_rows_takes_the_minimum_nearest_to_where_it_was():
    config = npfl.Config(Q)  # neither strength nor pull
    alone = Graph.from_edges(np.zeros((0, 2), int), num_nodes=N)
    world, states = follow(config, 3, graph=alone)
    X, y, mask = world.nodes.train
    for k in range(N):
        best = np.linalg.lstsq(X[k, mask[k]], y[k, mask[k]], rcond=None)[0]
        np.testing.assert_allclose(states.admm.params[-1, k], best, atol=1e-8)


def test_a_cluster_that_there_is_not_makes_a_run_end_with_an_error():
    with pytest.raises(NonFiniteUpdateError):
        run(npfl.make(npfl.Config(2), GRAPH, draw), rounds=1, progress=False)


def test_what_can_not_be_is_refused():
    for wrong, match in (
        (lambda: npfl.Config(tau=0.1), "num_clusters must be >= 2"),
        (lambda: npfl.Config(policy=policies.Greedy()), "num_clusters must be >= 2"),
        (lambda: npfl.Config(0), "num_clusters must be >= 1"),
        (lambda: npfl.Config(2, 0.0), "rho must be > 0"),
        (lambda: npfl.Config(2, tau=1.5), r"tau must be in \[0, 1\]"),
        (lambda: npfl.Config(2, strength=-1.0), "strength must be >= 0"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
