"""zCDP-NFL and its kin: rounds by hand, limits, sensitivities, what is accounted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_core.algorithms.networks import zcdp_grad_nfl, zcdp_nfl
from fedjax_core.networks import admm, builders, private, risks
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.run import run
from fedjax_core.privacy import (
    DynamicBudget,
    SplitBudget,
    gaussian_budget,
    minimiser_sensitivity,
)

GRAPH = builders.random_connected(6, 3, seed=1)
N, M, D = 6, 7, 3
A = np.asarray(GRAPH.dense(), np.float64)
DEG = A.sum(1)
SIZES = np.array([7, 4, 5, 7, 6, 7])
MASK = np.arange(M) < SIZES[:, None]
RIDGE, ABSOLUTE = risks.Risk(strength=0.6), risks.Risk("absolute")
BUDGET = DynamicBudget(0.05, 0.95)
PRIVATE = zcdp_nfl.Config(0.4, 0.5, 0.5, budget=BUDGET, gradient_bound=2.0)


def draw(key):
    """Ragged data of one linear model."""
    features, noise = jax.random.split(key)
    X = jax.random.normal(features, (N, M, D))
    y = X @ jnp.array([1.0, -2.0, 0.5]) + 0.3 * jax.random.normal(noise, (N, M))
    return X, y, MASK


@functools.cache
def follow(make, config, risk, rounds):
    """The world and all states of a run in double precision, from w_0 on."""
    with jax.enable_x64(True):
        system = make(config, GRAPH, risk, draw)

        def whole(key):
            world = system.world(key)
            start = system.init(world, key)
            states = iterate(
                lambda state, t, key: system.step(world, state, t, key)[0],
                start,
                rounds,
                key=key,
                record=lambda state: state,
            )[1]
            return world, jax.tree.map(
                lambda a, b: jnp.concatenate([a[None], b]), start, states
            )

        return jax.tree.map(np.asarray, jax.jit(whole)(jax.random.key(3)))


def gradient(risk, data, W):
    """(1 / D_k) sum of l' + lambda / K R', node by node."""
    out = np.zeros_like(W)
    for k in range(N):
        x, y = data.X[k, : SIZES[k]], data.y[k, : SIZES[k]]
        e = x @ W[k] - y
        slope = np.sign(e) if risk.error == "absolute" else 2 * e
        out[k] = x.T @ slope / SIZES[k] + risk.strength / N * 2 * risk.l2 * W[k]
    return out


@pytest.mark.parametrize("risk", [RIDGE, ABSOLUTE])
def test_rounds_of_zcdp_nfl_by_hand(risk):
    world, states = follow(zcdp_nfl.make, PRIVATE, risk, 12)
    rho, data = PRIVATE.rho, world.problem.data
    sent, dual = np.zeros((N, D)), np.zeros((N, D))
    for n in range(1, 13):
        eta = 0.5 / np.sqrt(n)
        s = DEG[:, None] * sent + A @ sent
        g = gradient(risk, data, sent)
        W = (sent / eta + rho * s - dual - g) / (1 / eta + 2 * rho * DEG)[:, None]
        np.testing.assert_allclose(states.admm.params[n], W, atol=1e-12)
        sent = states.admm.sent[n]  # with its noise
        dual = dual + rho * (DEG[:, None] * sent - A @ sent)
        np.testing.assert_allclose(states.admm.dual[n], dual, atol=1e-12)
    assert (states.admm.sent[1:] != states.admm.params[1:]).all()


def test_C5_the_matrix_form_holds_with_noise():
    world, states = follow(zcdp_nfl.make, PRIVATE, RIDGE, 12)
    rho, minus, plus = PRIVATE.rho, np.diag(DEG) - A, np.diag(DEG) + A
    # C1, C2: M is the degrees; L_- has consensus as its null space.
    np.testing.assert_allclose((minus + plus) / 2, np.diag(DEG), atol=1e-12)
    assert (np.linalg.eigvalsh(minus)[1:] > 1e-9).all()
    w, sent = states.admm.params, states.admm.sent
    for n in range(1, 12):
        eta, xi = 0.5 / np.sqrt(n + 1), sent[n + 1] - w[n + 1]
        slope = gradient(RIDGE, world.problem.data, sent[n])
        slope = slope + (w[n + 1] - sent[n]) / eta
        total = minus @ sent[1 : n + 2].sum(0)  # 2 Q r
        left = slope / rho + total + plus @ (w[n + 1] - sent[n])
        np.testing.assert_allclose(left, minus @ xi, atol=1e-11)
        left = slope / rho + total + plus @ (sent[n + 1] - sent[n])
        np.testing.assert_allclose(left, 2 * DEG[:, None] * xi, atol=1e-11)


def test_rounds_of_zcdp_grad_nfl_by_hand():
    config = zcdp_grad_nfl.Config(0.5, 0.5, BUDGET, 2.0)
    world, states = follow(zcdp_grad_nfl.make, config, ABSOLUTE, 8)
    mix = A / (1 + np.maximum(DEG[:, None], DEG[None]))
    mix += np.diag(1 - mix.sum(1))
    np.testing.assert_allclose(mix.sum(0), 1, atol=1e-12)
    for n in range(1, 9):
        sent = states.sent[n - 1]
        slope = gradient(ABSOLUTE, world.data, sent)
        W = mix @ sent - 0.5 / np.sqrt(n) * slope
        np.testing.assert_allclose(states.params[n], W, atol=1e-7)  # weights in single


def test_p_admm_takes_the_exact_minimum_with_noise_on_what_it_hears():
    config = dataclasses.replace(PRIVATE, primal="exact")
    world, states = follow(zcdp_nfl.make, config, RIDGE, 5)
    data, rho = world.problem.data, config.rho
    for n in range(5):
        sent, dual = states.admm.sent[n], states.admm.dual[n]
        for k in range(N):
            x, y = data.X[k, : SIZES[k]], data.y[k, : SIZES[k]]
            pull = 2 * RIDGE.strength / N + 2 * rho * DEG[k]
            H = 2 * x.T @ x / SIZES[k] + pull * np.eye(D)
            s = DEG[k] * sent[k] + A[k] @ sent
            w = np.linalg.solve(H, 2 * x.T @ y / SIZES[k] + rho * s - dual[k])
            np.testing.assert_allclose(states.admm.params[n + 1, k], w, atol=1e-11)


@pytest.mark.parametrize("schedule", ["budget", "variance"])
def test_noise_has_its_variance_and_the_ledger_its_sum(schedule):
    budget = dataclasses.replace(BUDGET, schedule=schedule)
    config = dataclasses.replace(PRIVATE, budget=budget)
    _, states = follow(zcdp_nfl.make, config, RIDGE, 150)
    n = np.arange(1, 151)[:, None]
    curvature = 2 * config.rho * DEG + np.sqrt(n) / 0.5
    most = 2 * 2.0 / (SIZES * curvature)
    falls = 0.95 ** (n - 1.0)
    variance = (most if schedule == "budget" else most[0]) ** 2 / (2 * 0.05) * falls
    xi = (states.admm.sent - states.admm.params)[1:]
    # Two-sided at 1e-4, twice: 2700 squares of normals and their mean.
    z = xi / np.sqrt(variance)[..., None]
    assert 5e-5 < stats.chi2.cdf((z**2).sum(), z.size) < 1 - 5e-5
    assert abs(z.sum()) / np.sqrt(z.size) < stats.norm.isf(5e-5)
    spent = (most**2 / (2 * variance)).cumsum(0)
    np.testing.assert_allclose(states.ledger.spent[1:], spent, rtol=1e-6)
    if schedule == "budget":
        np.testing.assert_allclose(spent[-1], budget.total(150), rtol=1e-12)
    np.testing.assert_array_equal(states.ledger.messages[-1], 150 * DEG)


def test_equal_parts_of_epsilon_and_delta_have_their_noise():
    split = SplitBudget.matching(BUDGET, 1e-5, 60)
    config = dataclasses.replace(PRIVATE, budget=split)
    _, states = follow(zcdp_nfl.make, config, RIDGE, 60)
    n = np.arange(1, 61)[:, None]
    most = 2 * 2.0 / (SIZES * (2 * config.rho * DEG + np.sqrt(n) / 0.5))
    sigma = most * np.sqrt(2 * np.log(1.25 / (1e-5 / 60))) / (split.epsilon / 60)
    z = (states.admm.sent - states.admm.params)[1:] / sigma[..., None]
    # Two-sided at 1e-4.
    assert 5e-5 < stats.chi2.cdf((z**2).sum(), z.size) < 1 - 5e-5
    spent = gaussian_budget(sigma, most).sum(0)
    np.testing.assert_allclose(states.ledger.spent[-1], spent, rtol=1e-6)


def test_a_budget_of_so_many_messages_is_not_overrun():
    budget = {"budget": SplitBudget(1.0, 1e-5, 3), "gradient_bound": 1.0}
    for method in (zcdp_nfl, zcdp_grad_nfl):
        system = method.make(method.Config(**budget), GRAPH, RIDGE, draw)
        with pytest.raises(ValueError, match="rounds must be at most 3"):
            run(system, rounds=4, progress=False)


def test_C7_C15_without_noise_all_reach_the_centralised_solution():
    for config, rounds in (
        (zcdp_nfl.Config(1.0, 0.15), 2000),
        (zcdp_nfl.Config(1.0, primal="exact"), 2000),
    ):
        world, states = follow(zcdp_nfl.make, config, RIDGE, rounds)
        best = world.problem.optimum
        last = jax.tree.map(lambda x: x[-1], states.admm)
        np.testing.assert_allclose(last.params, np.tile(best, (N, 1)), atol=1e-9)
        slope = gradient(RIDGE, world.problem.data, last.params)
        np.testing.assert_allclose(last.dual, -slope, atol=1e-8)
        assert (states.ledger.spent == 0).all()


def test_C7_fifty_nodes_are_at_the_optimum_after_200_rounds(x64):
    graph = builders.random_connected(50, 3, seed=0)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 50, 8))
    y = X @ rng.normal(size=8) + 0.1 * rng.normal(size=(50, 50))
    config = zcdp_nfl.Config(1.0, 0.2)
    system = zcdp_nfl.make(
        config, graph, risks.Risk(strength=1.0), lambda _: (X, y, None)
    )
    result = run(system, rounds=200, progress=False)
    assert result.final("normalised_error")[0] < 1e-18


def test_C9_constant_steps_leave_a_floor_at_kinks_and_falling_ones_do_not():
    def error(config):
        world, states = follow(zcdp_nfl.make, config, ABSOLUTE, 1000)
        last, best = states.admm.params[-1], world.problem.optimum
        return ((last - best) ** 2).sum() / (best @ best)

    floor = error(zcdp_nfl.Config(1.0, 0.2))
    assert error(zcdp_nfl.Config(1.0, 0.5, 0.5)) < floor / 20


def test_the_inner_solver_reaches_the_minimum_of_the_elastic_net():
    elastic = risks.Risk(strength=0.6, l1=1.4)
    config = zcdp_nfl.Config(1.0, primal="exact")
    world, states = follow(zcdp_nfl.make, config, elastic, 400)
    best = world.problem.optimum
    np.testing.assert_allclose(states.admm.params[-1], np.tile(best, (N, 1)), atol=1e-5)


def test_C10_one_example_moves_a_step_by_at_most_its_sensitivity(x64):
    rng = np.random.default_rng(4)
    X, y = rng.normal(size=(2, M, D)), rng.normal(size=(2, M))
    sent, dual = rng.normal(size=(2, 2, D))
    graph = builders.chain(2)
    rho, eta = 0.7, 0.4
    state = admm.State(
        sent, sent, np.array([sent[0] - sent[1], sent[1] - sent[0]]), dual
    )

    def after(kind, labels):
        risk = risks.Risk("absolute")
        of = risks.losses(risk, risks.nodes(risk, X, labels), steps=60)
        linear = kind == "linearised"
        primal = admm.linearised(of.grad, eta) if linear else admm.proximal(of)
        return admm.minimise(graph, rho, primal, state, 0)[0]

    steps = {
        kind: jax.jit(functools.partial(after, kind))
        for kind in ("linearised", "exact")
    }

    def moved(kind, other):
        return np.linalg.norm(steps[kind](y) - steps[kind](other))

    flipped = y.copy()
    e = X[0, 0] @ sent[0] - y[0, 0]
    flipped[0, 0] = X[0, 0] @ sent[0] + e  # the residual changes sign
    norm = np.linalg.norm(X[0, 0])
    attained = float(minimiser_sensitivity(norm, M, 2 * rho + 1 / eta))
    np.testing.assert_allclose(moved("linearised", flipped), attained, rtol=1e-12)
    np.testing.assert_allclose(attained, 2 * norm / (M * (2 * rho + 1 / eta)))
    bound = minimiser_sensitivity(norm, M, 2 * rho)
    for label in (-30.0, 0.1, 30.0):
        other = y.copy()
        other[0, 0] = label
        assert moved("linearised", other) <= attained * (1 + 1e-9)
        assert moved("exact", other) <= bound * (1 + 1e-6)


def test_messages_are_sent_with_and_without_jit_and_never_as_halves():
    graph = Graph.from_edges(np.array([[0, 1]]), num_nodes=3)  # nobody hears node 2
    send = private.sender(graph, BUDGET, 1.0, jnp.full(3, 4), lambda t: degree(graph))
    W, empty = jnp.ones((3, 2)), private.ledger(graph)
    sent, ledger = send(empty, W, 3, jax.random.key(0))
    again, _ = jax.jit(send)(empty, W, 3, jax.random.key(0))
    np.testing.assert_allclose(sent, again, atol=1e-6)
    np.testing.assert_array_equal((sent != W).all(1), [True, True, False])
    cost = 0.05 * 0.95**-3
    np.testing.assert_allclose(ledger.spent, [cost, cost, 0], rtol=1e-6)
    with pytest.raises(TypeError, match="got dtype bfloat16"):
        send(empty, W.astype(jnp.bfloat16), 3, jax.random.key(0))


def test_seeds_are_one_program_and_report_budgets_and_messages():
    system = zcdp_nfl.make(PRIVATE, GRAPH, ABSOLUTE, draw)
    result = run(system, rounds=30, seeds=(0, 1), eval_every=10, progress=False)
    assert result.compilations == 1
    np.testing.assert_array_equal(result.train["messages"], 2 * GRAPH.num_edges)
    np.testing.assert_allclose(
        result.train["budget"][:, -1], BUDGET.total(30), rtol=1e-5
    )
    np.testing.assert_array_equal(
        result.client_metrics["messages_of_node"], np.tile(30 * DEG, (2, 1))
    )
    error = result.evaluations["normalised_error"]
    assert (error[:, -1] < error[:, 0]).all()


def test_what_gives_no_guarantee_is_refused():
    apart = Graph.from_edges(np.array([[0, 1], [2, 3]]))
    for wrong, match in (
        (lambda: zcdp_nfl.Config(budget=BUDGET), "gradient_bound must be given"),
        (lambda: zcdp_nfl.Config(gradient_bound=0.0), "gradient_bound must be > 0"),
        (lambda: zcdp_nfl.Config(rho=0.0), "rho must be > 0"),
        (lambda: zcdp_nfl.Config(step_size=-1.0), "step_size must be > 0"),
        (lambda: zcdp_nfl.Config(decay=-1.0), "decay must be >= 0"),
        (lambda: zcdp_grad_nfl.Config(budget=BUDGET), "gradient_bound must be given"),
        (lambda: zcdp_nfl.make(PRIVATE, apart, RIDGE, draw), "connected"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
