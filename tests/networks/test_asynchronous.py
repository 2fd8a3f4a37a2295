"""Asynchronous runs: schedules, their regimes, and the bounds on convergence."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import fedavg, fedgd, fedrelax
from fedjax_core.networks import asynchronous, operators
from fedjax_core.networks.asynchronous import Schedule
from fedjax_core.networks.defences import noisy_messages
from fedjax_core.networks.graph import Graph, laplacian
from fedjax_core.networks.iterate import block_max_norm
from fedjax_core.networks.oracles import quadratic

EDGES = np.array([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5), (1, 4), (0, 3)])
ALPHA = 0.4

pytestmark = pytest.mark.usefixtures("x64")


def problem(seed=0, d=2):
    """A network of six nodes, definite quadratics, and the solution of GTVMin."""
    rng = np.random.default_rng(seed)
    weight = rng.uniform(0.3, 1.5, len(EDGES))
    graph = Graph.from_edges(EDGES, weight, dtype=np.float64)
    X = rng.normal(size=(6, 5, d))
    Q = np.einsum("nmd,nme->nde", X, X) / 5 + 0.3 * np.eye(d)
    q = rng.normal(size=(6, d))
    L = np.asarray(laplacian(graph, jnp.eye(6)))
    whole = np.kron(ALPHA * L, np.eye(d))
    for i in range(6):
        whole[i * d : (i + 1) * d, i * d : (i + 1) * d] += Q[i]
    solution = np.linalg.solve(whole, -q.reshape(-1) / 2).reshape(6, d)
    return graph, jnp.asarray(Q), jnp.asarray(q), jnp.asarray(solution)


GRAPH = Graph.from_edges(EDGES)  # for schedules, which weights do not matter to
PAIR = Graph.from_edges(np.array([(0, 1)]))


def both_methods(graph, Q, q):
    eta = float(asynchronous.fedgd_rate_bound(graph, Q, ALPHA))
    return {
        "fedgd": fedgd.make(graph, quadratic(Q, q), alpha=ALPHA, eta=eta),
        "fedrelax": fedrelax.make_quadratic(graph, Q, q, alpha=ALPHA),
    }


def contraction(name, graph, Q):
    if name == "fedgd":
        eta = asynchronous.fedgd_rate_bound(graph, Q, ALPHA)
        return float(asynchronous.fedgd_contraction(Q, eta))
    convexity = asynchronous.quadratic_convexity(Q)
    return float(asynchronous.fedrelax_contraction(graph, convexity, ALPHA))


def stacked(schedules):
    most = max(s.max_delay for s in schedules)
    return Schedule(
        np.stack([s.active for s in schedules]),
        np.stack([s.delay for s in schedules]),
        most,
    )


# T-A1
@pytest.mark.parametrize("name", ["fedgd", "fedrelax"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_delay_and_all_active_is_the_synchronous_run(name, dtype):
    graph, Q, q, _ = problem()
    Q, q = Q.astype(dtype), q.astype(dtype)
    operator = both_methods(graph.with_weight(graph.weight.astype(dtype)), Q, q)[name]
    W = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), dtype)
    # The ring may be larger than needed: the same messages come out.
    for rounds, max_delay in ((1, 0), (12, 0), (12, 2)):
        schedule = asynchronous.synchronous(graph, rounds)
        schedule = dataclasses.replace(schedule, max_delay=max_delay)
        got, _ = asynchronous.run(operator, schedule, W)
        expected, _ = operators.run(operator, W, rounds)
        # How XLA fuses the two programs decides what is rounded.
        eps = float(np.finfo(dtype).eps)
        np.testing.assert_allclose(got, expected, rtol=16 * eps, atol=4 * eps)


def test_run_is_equation_129():
    """FedGD on a random schedule against the formula, node by node."""
    graph, Q, q, _ = problem()
    schedule = asynchronous.partially_asynchronous(graph, 15, 3, jax.random.key(4))
    eta = 0.05
    operator = fedgd.make(graph, quadratic(Q, q), alpha=ALPHA, eta=eta)
    _, got = asynchronous.run(operator, schedule, jnp.ones((6, 2)), record=lambda W: W)

    past = [np.ones((6, 2))]
    active, delay = np.asarray(schedule.active), np.asarray(schedule.delay)
    source, target = np.asarray(graph.source), np.asarray(graph.target)
    weight = np.asarray(graph.weight)[np.asarray(graph.edge)]
    for t in range(15):
        W = past[t].copy()
        for i in np.flatnonzero(active[t]):
            own = past[t][i]
            move = 2 * np.asarray(Q)[i] @ own + np.asarray(q)[i]
            for e in np.flatnonzero(target == i):
                old = past[t - delay[t, e]][source[e]]
                move = move + 2 * ALPHA * weight[e] * (own - old)
            W[i] = own - eta * move
        past.append(W)
    np.testing.assert_allclose(got, past[1:], rtol=1e-12)
    assert delay.max() == 3
    assert not active.all()


# T-A2
def test_partial_asynchrony_is_recognised():
    for bound in (1, 2, 5):
        schedule = asynchronous.partially_asynchronous(
            GRAPH, 60, bound, jax.random.key(bound), activity=0.2
        )
        asynchronous.check_partially_asynchronous(schedule, bound)
        if bound > 1:
            with pytest.raises(ValueError, match=f"bound={bound - 1}"):
                asynchronous.check_partially_asynchronous(schedule, bound - 1)


def test_a_missed_window_and_an_old_copy_are_refused():
    active = np.array([[1, 1], [0, 1], [1, 0], [0, 1], [0, 1], [1, 1]], bool)
    delay = np.zeros((6, 2), int)
    asynchronous.check_partially_asynchronous(Schedule(active, delay, 0), 3)
    with pytest.raises(ValueError, match=r"has node 0 in none of 3\.\.4"):
        asynchronous.check_partially_asynchronous(Schedule(active, delay, 0), 2)
    delay[4, 1] = 4
    old = Schedule(active, delay, 4)
    with pytest.raises(ValueError, match="got 4 at event 4 on directed edge 1"):
        asynchronous.check_partially_asynchronous(old, 3)
    asynchronous.check_partially_asynchronous(old, 4)
    with pytest.raises(ValueError, match="bound must be >= 1"):
        asynchronous.check_partially_asynchronous(old, 0)


def test_total_asynchrony():
    growing = asynchronous.growing_delays(GRAPH, 100, jax.random.key(0))
    asynchronous.check_totally_asynchronous(growing, GRAPH)
    active = np.asarray(growing.active).copy()
    active[50:, 2] = False
    with pytest.raises(ValueError, match="stops from event 50 at node 2"):
        asynchronous.check_totally_asynchronous(
            Schedule(active, growing.delay, growing.max_delay), GRAPH
        )
    active[:, 2] = False
    with pytest.raises(ValueError, match="stops from event 0 at node 2"):
        asynchronous.check_totally_asynchronous(
            Schedule(active, growing.delay, growing.max_delay), GRAPH
        )
    frozen = asynchronous.growing_delays(
        GRAPH, 100, jax.random.key(0), growth=lambda t: t
    )
    with pytest.raises(ValueError, match="stays with event 0 on directed edge 0"):
        asynchronous.check_totally_asynchronous(frozen, GRAPH)


@pytest.mark.parametrize(
    ("active", "delay", "error", "match"),
    [
        (np.ones((3, 2), bool), [[0, 0], [0, -1], [0, 0]], ValueError, ">= 0, got -1"),
        (np.ones((3, 2), bool), [[0, 0], [0, 2], [0, 0]], ValueError, "before event 0"),
        (np.ones((3, 2), bool), [[0, 0], [1, 0], [2, 0]], ValueError, "max_delay=1"),
        (np.ones((2, 2), bool), [[0, 0], [1, 0], [1, 0]], ValueError, "shapes"),
        (np.ones(2, bool), [[0, 0], [1, 0]], ValueError, "shapes"),
        (np.ones((3, 2), int), [[0, 0], [1, 0], [1, 0]], TypeError, "must be bool"),
        (np.ones((3, 2), bool), [[0.0, 0], [1, 0], [1, 0]], TypeError, "must be ints"),
    ],
)
def test_bad_schedules_are_refused(active, delay, error, match):
    with pytest.raises(error, match=match):
        Schedule(active, np.array(delay), 1)


def test_schedules_of_other_networks_and_methods_are_refused():
    graph, Q, q, _ = problem()
    operator = both_methods(graph, Q, q)["fedgd"]
    W = jnp.zeros((6, 2))
    with pytest.raises(ValueError, match="6 nodes and 16 directed edges, got 2 and 2"):
        asynchronous.run(operator, asynchronous.synchronous(PAIR, 3), W)
    schedule = asynchronous.synchronous(graph, 3)
    with pytest.raises(ValueError, match="must have a graph"):
        asynchronous.run(operator._replace(graph=None), schedule, W)
    with pytest.raises(ValueError, match="must not select"):
        asynchronous.run(operator._replace(select=fedavg.subset(6, [1])), schedule, W)


def errors(operator, schedules, start, solution):
    """max_i ||w_i - w^_i|| before every event and at the end; ``[S, T + 1]``."""

    def one(schedule):
        _, left = asynchronous.run(
            operator, schedule, start, record=lambda W: block_max_norm(W - solution)
        )
        return jnp.r_[block_max_norm(start - solution), left]

    return np.asarray(jax.jit(jax.vmap(one))(stacked(schedules)))


def lazy(graph, num_events, bound, **late):
    """Everybody waits as long as the bound allows and reads the oldest copies."""
    event = np.arange(num_events)
    active = np.tile((event % bound == bound - 1)[:, None], (1, graph.num_nodes))
    for node, offset in late.items():
        active[:, int(node[1:])] = event % bound == offset
    delay = np.minimum(bound, event)[:, None]
    return Schedule(active, np.tile(delay, (1, 2 * graph.num_edges)), bound)


# T-A3
@pytest.mark.parametrize("name", ["fedgd", "fedrelax"])
@pytest.mark.parametrize("bound", [1, 2, 3, 4])
def test_corrected_bound_holds_always(name, bound):
    graph, Q, q, solution = problem(bound)
    start = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
    schedules = [lazy(graph, 40, bound), lazy(graph, 40, bound, n3=0)] + [
        asynchronous.partially_asynchronous(
            graph, 40, bound, jax.random.key(k), activity=0.3
        )
        for k in range(30)
    ]
    left = errors(both_methods(graph, Q, q)[name], schedules, start, solution)
    kappa = contraction(name, graph, Q)
    assert kappa < 1
    limit = asynchronous.contraction_bound(kappa, bound, np.arange(41))
    assert (left <= left[:, :1] * np.asarray(limit) + 1e-9).all()


def pair():
    """Two nodes with f_i(w) = w^2, for which FedRelax's factor 1/2 is attained."""
    Q, q = jnp.ones((2, 1, 1)), jnp.zeros((2, 1))
    return fedrelax.make_quadratic(PAIR, Q, q, alpha=1.0), Q


def test_corrected_bound_is_attained():
    operator, _ = pair()
    for bound in (1, 2, 3):
        left = errors(operator, [lazy(PAIR, 40, bound)], jnp.ones((2, 1)), 0.0)[0]
        limit = np.asarray(asynchronous.contraction_bound(0.5, bound, np.arange(41)))
        assert (left <= limit + 1e-12).all()
        if bound == 1:
            np.testing.assert_allclose(left[::2], limit[::2], rtol=1e-12)


# T-A4
def test_printed_bound_holds_when_all_act_at_event_0():
    graph, Q, q, solution = problem()
    start = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
    kappa = contraction("fedrelax", graph, Q)
    operator = both_methods(graph, Q, q)["fedrelax"]
    for bound in (1, 2, 4):
        schedules = [
            asynchronous.partially_asynchronous(
                graph, 40, bound, jax.random.key(k), activity=0.3, all_start=True
            )
            for k in range(30)
        ]
        left = errors(operator, schedules, start, solution)
        limit = asynchronous.contraction_bound(
            kappa, bound, np.arange(41), printed=True
        )
        assert (left <= left[:, :1] * np.asarray(limit) + 1e-9).all()


def test_printed_bound_fails_when_the_worst_node_starts_late():
    operator, _ = pair()
    start = jnp.array([[1.0], [0.0]])
    for bound in (2, 3, 4):
        left = errors(operator, [lazy(PAIR, 40, bound, n1=0)], start, 0.0)[0]
        event = np.arange(41)
        printed = asynchronous.contraction_bound(0.5, bound, event, printed=True)
        fails = np.flatnonzero(left > np.asarray(printed) + 1e-9)
        assert 1 in fails
        assert fails.max() < (bound - 1) * (2 * bound + 1)
        corrected = asynchronous.contraction_bound(0.5, bound, event)
        assert (left <= np.asarray(corrected) + 1e-12).all()


# T-A5
@pytest.mark.parametrize("name", ["fedgd", "fedrelax"])
def test_asynchronous_runs_reach_the_closed_form(name):
    graph, Q, q, solution = problem()
    schedule = asynchronous.partially_asynchronous(graph, 1500, 4, jax.random.key(0))
    operator = both_methods(graph, Q, q)[name]
    W, _ = asynchronous.run(operator, schedule, jnp.zeros((6, 2)))
    np.testing.assert_allclose(W, solution, atol=1e-9)


# T-A6
@pytest.mark.parametrize("name", ["fedgd", "fedrelax"])
def test_growing_delays_converge(name):
    graph, Q, q, solution = problem()
    schedule = asynchronous.growing_delays(graph, 2500, jax.random.key(0))
    assert schedule.max_delay == 49
    operator = both_methods(graph, Q, q)[name]
    W, _ = asynchronous.run(operator, schedule, jnp.zeros((6, 2)))
    np.testing.assert_allclose(W, solution, atol=1e-6)


def test_lossy_links_keep_the_old_copy():
    schedule = asynchronous.lossy_links(GRAPH, 2000, 0.3, jax.random.key(0))
    delay = np.asarray(schedule.delay)
    assert (delay[0] == 0).all()
    grown = delay[1:] == delay[:-1] + 1
    assert (grown | (delay[1:] == 0)).all()
    # 16 * 1999 links at 0.3: five standard errors are 0.0128, false alarms below 1e-6.
    assert abs(grown.mean() - 0.3) < 0.0128
    graph, Q, q, solution = problem()
    operator = both_methods(graph, Q, q)["fedrelax"]
    W, _ = asynchronous.run(operator, schedule, jnp.zeros((6, 2)))
    np.testing.assert_allclose(W, solution, atol=1e-9)


# T-A7
def test_inactive_rows_keep_their_bits():
    graph, Q, q, _ = problem()
    schedule = asynchronous.partially_asynchronous(graph, 30, 4, jax.random.key(2))
    start = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
    for operator in both_methods(graph, Q, q).values():
        _, W = asynchronous.run(operator, schedule, start, record=lambda W: W)
        W = np.concatenate([start[None], W])
        same = (W[1:] == W[:-1]).all(-1)
        assert same[~np.asarray(schedule.active)].all()
        assert not same[:3][np.asarray(schedule.active)[:3]].any()


def test_pytrees_and_maps_over_schedules():
    graph, Q, q, _ = problem()
    one = asynchronous.partially_asynchronous(graph, 10, 2, jax.random.key(2))
    operator = both_methods(graph, Q, q)["fedgd"]

    def split_rows(losses):
        def grad(W):
            g = losses.grad(jnp.stack([W["a"], W["b"]], 1))
            return {"a": g[:, 0], "b": g[:, 1]}

        return losses._replace(grad=grad)

    eta = float(asynchronous.fedgd_rate_bound(graph, Q, ALPHA))
    in_parts = fedgd.make(graph, split_rows(quadratic(Q, q)), alpha=ALPHA, eta=eta)
    expected, _ = asynchronous.run(operator, one, jnp.ones((6, 2)))
    got, _ = asynchronous.run(in_parts, one, {"a": jnp.ones(6), "b": jnp.ones(6)})
    np.testing.assert_allclose(np.stack([got["a"], got["b"]], 1), expected, rtol=1e-12)


def test_fedgd_contracts_in_the_block_maximum_norm():
    graph, Q, q, _ = problem()
    eta = float(asynchronous.fedgd_rate_bound(graph, Q, ALPHA))
    kappa = float(asynchronous.fedgd_contraction(Q, eta))
    step = jax.jit(
        jax.vmap(
            lambda W: operators.step(
                fedgd.make(graph, quadratic(Q, q), alpha=ALPHA, eta=eta)
            )(W, 0)
        )
    )
    V, W = np.random.default_rng(0).normal(size=(2, 200, 6, 2))
    norm = jax.vmap(block_max_norm)
    assert (norm(step(V) - step(W)) <= kappa * norm(V - W) + 1e-12).all()


def test_contraction_factors():
    _, Q = pair()
    convexity = asynchronous.quadratic_convexity(Q)
    np.testing.assert_allclose(convexity, [2, 2])
    factor = asynchronous.fedrelax_contraction
    assert factor(PAIR, convexity, 1.0) == 0.5
    assert factor(PAIR, convexity, 0.0) == 0
    assert factor(PAIR, np.zeros(2), 1.0) == 1
    chain = Graph.from_edges(np.array([(0, 1), (1, 2)]), dtype=np.float64)
    np.testing.assert_allclose(factor(chain, np.full(3, 2.0), 1.0), 2 / 3)  # G-CHAIN3
    for kappa in (1.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="kappa must be in"):
            asynchronous.contraction_bound(kappa, 2, 3)
    with pytest.raises(ValueError, match="bound must be >= 1"):
        asynchronous.contraction_bound(0.5, 0, 3)


def test_lists_are_checked_like_arrays():
    lists: Any = [[True, True], [True, False]], [[0, 0], [1, 0]]
    schedule = Schedule(*lists, max_delay=1)
    assert schedule.num_events == 2
    assert np.asarray(schedule.active).dtype == bool
    lists = [[True, True]], [[0, -1]]
    with pytest.raises(ValueError, match="delay must be >= 0, got -1"):
        Schedule(*lists, max_delay=0)
    lists = [[1, 1]], [[0, 0]]
    with pytest.raises(TypeError, match="active must be bool"):
        Schedule(*lists, max_delay=0)


def test_a_node_that_never_acts_fits_no_bound():
    active = np.array([[1, 0], [1, 0]], bool)
    schedule = Schedule(active, np.zeros((2, 2), int), 0)
    for bound in (2, 3, 100):
        with pytest.raises(ValueError, match=r"has node 1 in none of 0\.\.1"):
            asynchronous.check_partially_asynchronous(schedule, bound)
    active[1, 1] = True
    asynchronous.check_partially_asynchronous(schedule, 100)


def test_a_copy_must_be_new_when_its_receiver_acts():
    """Fresh at every event at which node 1 sleeps, and of event 0 when it acts."""
    event = np.arange(20)
    active = np.stack([event >= 0, event % 2 == 1], 1)
    delay = np.zeros((20, 2), int)
    into_1 = int(np.flatnonzero(np.asarray(PAIR.target) == 1)[0])
    delay[:, into_1] = np.where(active[:, 1], event, 0)
    stale = Schedule(active, delay, 19)
    with pytest.raises(ValueError, match=f"event 0 on directed edge {into_1}"):
        asynchronous.check_totally_asynchronous(stale, PAIR)
    delay[-1] = 0
    asynchronous.check_totally_asynchronous(Schedule(active, delay, 19), PAIR)
    with pytest.raises(ValueError, match="schedule must be for 6 nodes"):
        asynchronous.check_totally_asynchronous(stale, GRAPH)


def test_a_channel_draws_what_it_draws_in_a_synchronous_run():
    graph, Q, q, _ = problem()
    operator = both_methods(graph, Q, q)["fedgd"]
    operator = operator._replace(emit=noisy_messages(0.1))
    W = jnp.asarray(np.random.default_rng(1).normal(size=q.shape))

    def disturb(messages, t, key):
        return messages + t * jax.random.normal(key, messages.shape)

    run = {"key": jax.random.key(3), "channel": disturb, "record": lambda W: W}
    schedule = asynchronous.synchronous(graph, 8)
    _, got = asynchronous.run(operator, schedule, W, **run)
    _, expected = operators.run(operator, W, 8, **run)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    clean, _ = operators.run(operator, W, 8, key=run["key"])
    assert np.abs(np.asarray(expected)[-1] - np.asarray(clean)).min() > 1e-3


def test_an_attack_on_messages_that_come_late():
    """A link's messages are tripled: as if the operator did so with each it read."""
    graph, Q, q, _ = problem()
    schedule = asynchronous.partially_asynchronous(graph, 30, 3, jax.random.key(0))
    eta = float(asynchronous.fedgd_rate_bound(graph, Q, ALPHA))
    operator = fedgd.make(graph, quadratic(Q, q), alpha=ALPHA, eta=eta)
    bad = (graph.source == 1) & (graph.target == 0)

    def triple(messages, t=None, key=None):
        return jnp.where(bad[:, None], 3 * messages, messages)

    def attacked(graph, messages):
        return operators.message_sum(graph, triple(messages))

    start = jnp.ones((6, 2))
    got, _ = asynchronous.run(operator, schedule, start, channel=triple)
    by_hand = operator._replace(aggregate=attacked)
    expected, _ = asynchronous.run(by_hand, schedule, start)
    clean, _ = asynchronous.run(operator, schedule, start)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert np.abs(np.asarray(got - clean)).max() > 1e-3


def test_rows_of_another_network_and_odd_schedules_are_refused():
    graph, Q, q, _ = problem()
    operator = both_methods(graph, Q, q)["fedgd"]
    schedule = asynchronous.synchronous(graph, 2)
    with pytest.raises(ValueError, match=r"one row per node, 6, got shape \(1, 2\)"):
        asynchronous.run(operator, schedule, jnp.zeros((1, 2)))
    active, delay = np.ones((2, 2), bool), np.zeros((2, 2), int)
    odd: Any
    for odd in (1.0, True, None):
        with pytest.raises(TypeError, match="max_delay must be an int"):
            Schedule(active, delay, odd)
    with pytest.raises(ValueError, match="max_delay must be >= 0"):
        Schedule(active, delay, -1)
    with pytest.raises(ValueError, match="at least one event"):
        Schedule(active[:0], delay[:0], 0)


def test_convexity_is_not_negative():
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match=f"convexity must be .*{bad} for node 1"):
            asynchronous.fedrelax_contraction(PAIR, np.array([1.0, bad]), 1.0)


def test_every_node_has_its_convexity():
    for wrong in (2.0, np.ones(1), np.ones(3)):
        with pytest.raises(ValueError, match="convexity must have one row per node, 2"):
            asynchronous.fedrelax_contraction(PAIR, wrong, 1.0)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("printed", [True, False])
def test_the_bound_is_never_below_the_exact_value(wide, printed):
    kappas, t = [0.5, 0.9, 0.123456789, 1 - 1e-6], np.arange(0, 2000, 7)
    power = t / 7 if printed else np.maximum(0, t - 2) / 6
    with jax.enable_x64(wide):
        traced = jax.jit(
            lambda kappa: asynchronous.contraction_bound(kappa, 3, t, printed=printed)
        )
        for kappa in kappas:
            bound = asynchronous.contraction_bound(kappa, 3, t, printed=printed)
            # What the compiled function is given is the nearest float.
            given = float(jnp.asarray(kappa))
            for found, k in ((bound, kappa), (traced(kappa), given)):
                found = np.asarray(found, np.longdouble)
                exact = np.longdouble(k) ** np.longdouble(power)
                assert (found >= exact * (1 - np.longdouble(1e-16))).all()
                small = 1e-12 if wide else 1e-3
                least = np.finfo(np.float64 if wide else np.float32).tiny
                assert (found <= exact * (1 + small) + least).all()
    if wide:
        exact = 2.0**-160
        got = asynchronous.contraction_bound(0.5, 1, 320)
        np.testing.assert_allclose(got, exact, rtol=1e-12)
    assert asynchronous.contraction_bound(0.0, 3, 100) == 0
