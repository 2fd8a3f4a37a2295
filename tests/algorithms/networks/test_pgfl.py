"""PGFL by hand in double precision: whole rounds, golden runs, limits, privacy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_core.algorithms.networks import pgfl
from fedjax_core.datasets.servers import related_lines
from fedjax_core.experiments.report import decibels
from fedjax_core.networks import builders, served
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.run import run
from fedjax_core.privacy import DynamicBudget, minimiser_sensitivity

S, Q, K, D, M = 4, 3, 24, 3, 5
GRAPH = builders.random_connected(S, 2.0, seed=3)
A = np.asarray(GRAPH.dense(), np.float64)
ONE = Graph.from_edges(np.zeros((0, 2), int), num_nodes=1)
SERVER: Any = np.arange(K) // 6
CLUSTER: Any = np.arange(K) % 6 // 2
SIZES = np.array([2, 3, 4, 5] * 6)
RNG = np.random.default_rng(5)
X: Any = RNG.normal(size=(K, M, D))
TRUTH: Any = RNG.normal(size=(Q, D))[CLUSTER]
Y: Any = np.einsum("kmd,kd->km", X, TRUTH) + RNG.normal(size=(K, M))
MASK: Any = np.arange(M) < SIZES[:, None]
CLIENTS = served.Clients(SERVER, CLUSTER, X, Y, MASK, TRUTH)
BUDGET = DynamicBudget(0.02, 0.95)
RIDGE = pgfl.Config(Q, 2.0, 0.3)
PRIVATE = dataclasses.replace(
    RIDGE, tau=0.3, tau_decay=0.9, per_server=3, budget=BUDGET, gradient_bound=0.5
)


def follow(config, rounds, graph=GRAPH, clients=CLIENTS):
    """The world and all states of a run in double precision, from the start on."""
    with jax.enable_x64(True):
        system = pgfl.make(config, graph, lambda key: clients)
        world = system.world(jax.random.key(3))
        start = system.init(world, jax.random.key(3))

        @jax.jit
        def whole(world, start, key):
            states = iterate(
                lambda state, t, key: system.step(world, state, t, key)[0],
                start,
                rounds,
                key=key,
                record=lambda state: state,
            )[1]
            return jax.tree.map(
                lambda a, b: jnp.concatenate([a[None], b]), start, states
            )

        states = whole(world, start, jax.random.key(3))
        return world, jax.tree.map(np.asarray, states)


def slopes(W, k, strength=0.3):
    """Gradient of f_k at a model: mean squared error and lambda / |C_s|."""
    x, y = X[k, : SIZES[k]], Y[k, : SIZES[k]]
    return 2 * x.T @ (x @ W - y) / SIZES[k] + 2 * strength / 6 * W


def mixers(tau):
    near = (A + np.eye(S)) / (A.sum(1, keepdims=True) + 1)
    return near, (1 - tau) * np.eye(Q) + tau / (Q - 1) * (1 - np.eye(Q))


@pytest.mark.parametrize("reply", ["model", "aggregate"])
def test_private_scheduled_rounds_by_hand(reply):
    # What servers answer is told from what they send by undoing the clusters' mix.
    mixing = "neighbours" if reply == "model" else "none"
    config = dataclasses.replace(PRIVATE, reply=reply, mixing=mixing)
    _, states = follow(config, 12)
    rho, dual, models = 2.0, np.zeros((K, D)), np.zeros((S, Q, D))
    params, variances, total = np.zeros((K, D)), [], 0.0
    for n in range(12):
        who = np.diff(states.ledger.messages[n : n + 2], axis=0)[0] == 1
        np.testing.assert_array_equal(np.bincount(SERVER[who], minlength=S), 3)
        theirs = models[SERVER, CLUSTER]
        for k in np.flatnonzero(who):
            x, y = X[k, : SIZES[k]], Y[k, : SIZES[k]]
            H = 2 * x.T @ x / SIZES[k] + (2 * 0.3 / 6 + rho) * np.eye(D)
            right = 2 * x.T @ y / SIZES[k] + dual[k] + rho * theirs[k]
            params[k] = np.linalg.solve(H, right)
        np.testing.assert_allclose(states.params[n + 1], params, atol=1e-11)
        # The noise is what moves the duals, which are checked against it below.
        new = states.models[n + 1]
        change = states.dual[n + 1] - dual
        assert (change[~who] == 0).all()
        own, tau = np.zeros((S, Q, D)), 0.3 * 0.9**n
        near, apart = mixers(tau)
        answer = new
        if reply == "aggregate":
            near = np.eye(S)
            answer = np.einsum("qr,srd->sqd", np.linalg.inv(apart), new)
        sent = answer[SERVER, CLUSTER] - change / rho
        for s in range(S):
            for q in range(Q):
                here = who & (s == SERVER) & (q == CLUSTER)
                own[s, q] = models[s, q]
                if here.any():
                    own[s, q] = (sent[here] - dual[here] / rho).mean(0)
        expected = np.einsum("sp,qr,prd->sqd", near, apart, own)
        np.testing.assert_allclose(new, expected, atol=1e-9)
        xi = (sent - params)[who]
        sigma2 = (2 * 0.5 / (rho * SIZES[who])) ** 2 / (2 * 0.02) * 0.95**n
        variances.append((xi**2).sum(1) / sigma2)
        total = total + np.where(who, 0.02 * 0.95**-n, 0)
        np.testing.assert_allclose(states.ledger.spent[n + 1], total, rtol=1e-6)
        dual, models = states.dual[n + 1], new
    # Two-sided at 1e-4: 432 squares of normals.
    square = np.concatenate(variances)
    assert 5e-5 < stats.chi2.cdf(square.sum(), D * square.size) < 1 - 5e-5


def test_G1_clusters_mix_by_a_symmetric_matrix_of_known_eigenvalues(x64):
    for tau, factor in ((0.4, 0.4), (2 / 3, 0.0), (0.3, 0.55), (0.9, -0.35)):
        T = np.asarray(served.cluster_mix(tau, 3))
        np.testing.assert_allclose(T, T.T)
        np.testing.assert_allclose(T.sum(1), 1)
        np.testing.assert_allclose(
            np.linalg.eigvalsh(T), sorted([factor, factor, 1]), atol=1e-12
        )
    np.testing.assert_allclose(served.cluster_mix(2 / 3, 3), np.full((3, 3), 1 / 3))


def test_G2_without_tau_clusters_do_not_read_each_other():
    other = CLIENTS._replace(y=np.where(CLUSTER[:, None] == 2, Y + 1, Y))
    config = dataclasses.replace(PRIVATE, tau=0.0)
    ours, theirs = (follow(config, 6, clients=c)[1].models for c in (CLIENTS, other))
    np.testing.assert_array_equal(ours[:, :, :2], theirs[:, :, :2])
    assert (ours[-1, :, 2] != theirs[-1, :, 2]).any()


def test_G3_duals_cancel_in_the_means_of_servers_nearby():
    _, states = follow(RIDGE, 8)
    near, _ = mixers(0)
    for n in range(2, 9):
        W, old = states.params[n], states.models[n - 1]
        step = np.stack(
            [old[SERVER[k], CLUSTER[k]] - slopes(W[k], k) / 2 for k in range(K)]
        )
        mean = step.reshape(S, Q, 2, D).mean(2)
        expected = np.einsum("sp,pqd->sqd", near, mean)
        np.testing.assert_allclose(states.models[n], expected, atol=1e-10)


def test_G4_the_golden_run_of_two_clients_halves_the_error_with_every_round():
    ones: Any = np.ones((2, 1, 1))
    two = served.Clients(
        jnp.zeros(2, int),
        jnp.zeros(2, int),
        ones,
        jnp.array([[0.0], [2.0]]),
        ones[:, 0] > 0,
    )
    _, states = follow(pgfl.Config(1, 2.0), 10, ONE, two)
    half = 2.0 ** -np.arange(1, 11)
    np.testing.assert_allclose(
        states.params[1:, :, 0], np.stack([1 - 2 * half, np.ones(10)], 1), atol=1e-12
    )
    np.testing.assert_allclose(states.models[1:, 0, 0, 0], 1 - half, atol=1e-12)
    dual = 2 - 2 * half
    np.testing.assert_allclose(
        states.dual[1:, :, 0], np.stack([dual, -dual], 1), atol=1e-12
    )


def optimum(weight, q, strength=0.3, y=Y):
    """The w where the weighted sum of the gradients of a cluster is 0."""
    H, right = np.zeros((D, D)), np.zeros(D)
    for k in np.flatnonzero(q == CLUSTER):
        x, labels = X[k, : SIZES[k]], y[k, : SIZES[k]]
        H += weight[k] * (2 * x.T @ x / SIZES[k] + 2 * strength / 6 * np.eye(D))
        right += weight[k] * (2 * x.T @ labels / SIZES[k])
    return np.linalg.solve(H, right)


def test_G5_one_server_finds_the_minimum_of_every_cluster():
    alone = CLIENTS._replace(server=np.zeros(K, int))
    _, states = follow(dataclasses.replace(RIDGE, strength=1.2), 800, ONE, alone)
    for q in range(Q):
        best = optimum(np.ones(K), q)  # 1.2 over 24 clients is 0.3 over 6
        np.testing.assert_allclose(states.models[-1, 0, q], best, atol=1e-13)
        own = q == CLUSTER
        np.testing.assert_allclose(states.params[-1, own] - best, 0, atol=1e-12)
        np.testing.assert_allclose(states.dual[-1, own].mean(0), 0, atol=1e-12)


def test_G6_servers_that_all_meet_end_where_servers_count_the_same():
    server = np.array([0] * 12 + [1] * 6 + [2] * 3 + [3] * 3)
    cluster = np.arange(K) % 3
    uneven = CLIENTS._replace(server=server, cluster=cluster)
    config = dataclasses.replace(RIDGE, strength=0.0)
    everyone = Graph.from_dense(1 - np.eye(S))
    _, states = follow(config, 2500, everyone, uneven)
    for q in range(Q):
        own = cluster == q
        count = np.bincount(server[own], minlength=S)[server]
        errors = []
        for weight in (1 / count, np.ones(K)):
            H, right = np.zeros((D, D)), np.zeros(D)
            for k in np.flatnonzero(own):
                x, y = X[k, : SIZES[k]], Y[k, : SIZES[k]]
                H += weight[k] * x.T @ x / SIZES[k]
                right += weight[k] * x.T @ y / SIZES[k]
            best = np.linalg.solve(H, right)
            errors.append(np.abs(states.models[-1, :, q] - best).max())
        assert errors[0] < 1e-9
        assert errors[1] > 1e-2


@pytest.mark.parametrize("tau", [0.0, 0.3])
def test_G7_rounds_end_at_the_solution_of_the_fixed_point(tau):
    world, states = follow(dataclasses.replace(RIDGE, tau=tau), 1500)
    end = served.fixed_point(world, mixers(0)[0], tau, 2.0)
    np.testing.assert_allclose(states.models[-1], end, atol=1e-11)
    own = end[SERVER, CLUSTER]
    np.testing.assert_allclose(states.params[-1], own, atol=1e-10)
    slope = np.stack([slopes(own[k], k) for k in range(K)])
    np.testing.assert_allclose(states.dual[-1], slope, atol=1e-9)


def test_G8_a_large_penalty_makes_servers_agree_by_degree_and_metropolis_alike():
    with jax.enable_x64(True):
        world = pgfl.make(RIDGE, GRAPH, lambda key: CLIENTS).world(jax.random.key(0))
        plain, fair = (
            np.asarray(builders.mixing(GRAPH, kind), np.float64)
            for kind in ("neighbours", "metropolis")
        )
    np.testing.assert_allclose(plain, mixers(0)[0], atol=1e-12)
    np.testing.assert_allclose(fair.sum(0), 1, atol=1e-6)
    for near, weight in ((plain, A.sum(1) + 1), (fair, np.ones(S))):
        best = np.stack([optimum(weight[SERVER], q) for q in range(Q)])
        errors = [
            np.abs(served.fixed_point(world, near, 0.0, rho) - best).max()
            for rho in (1e2, 1e3, 1e4)
        ]
        # Ten times the penalty, a tenth of the error.
        np.testing.assert_allclose(errors[:2], np.multiply(errors[1:], 10), rtol=0.2)


def test_G9_G10_the_drift_by_other_clusters_is_bounded(x64):
    fixed, falling = np.full(10, 0.4), 0.4 * 0.98 ** np.arange(1, 301)
    np.testing.assert_allclose(served.drift_bound(fixed)[-1], 0.9939533824, rtol=1e-10)
    np.testing.assert_allclose(served.drift_bound(falling)[-1], 0.9999999997, rtol=1e-9)
    b = 0.0
    for tau, bound in zip(falling, served.drift_bound(falling), strict=True):
        b = (1 - tau) * b + tau
        np.testing.assert_allclose(bound, b, rtol=1e-12)
    hat: Any = RNG.normal(size=(S, Q, D))
    eta = max(
        ((hat[:, q] - hat[:, r]) ** 2).sum(-1).max() for q in range(Q) for r in range(Q)
    )
    moved = np.asarray(served.mix(jnp.eye(S), 0.4, hat)) - hat
    apart = (hat.sum(1, keepdims=True) - hat) / (Q - 1) - hat
    np.testing.assert_allclose(moved, 0.4 * apart, atol=1e-5)
    assert ((moved**2).sum(-1) <= 0.4**2 * eta).all()


def test_G11_one_example_moves_a_client_by_at_most_its_sensitivity():
    config = dataclasses.replace(RIDGE, error="logistic", solver_steps=200)
    labels = np.sign(Y)
    flipped = labels.copy()
    flipped[0, 0] *= -1
    for scale in (1e-4, 1.0):
        ours, theirs = (
            follow(config, 1, clients=CLIENTS._replace(X=scale * X, y=y))[1].params[
                1, 0
            ]
            for y in (labels, flipped)
        )
        bound = scale * np.linalg.norm(X[0, 0])
        most = float(minimiser_sensitivity(bound, SIZES[0], 2.0))
        moved = np.linalg.norm(ours - theirs)
        # Near 0 the error is linear with slopes of C / 2 each way, without a penalty.
        assert moved <= most
        if scale == 1e-4:
            expected = 2.0 / (2.0 + 2 * 0.3 / 6) / 2
            np.testing.assert_allclose(moved / most, expected, rtol=1e-3)


def test_G11_errors_that_are_linear_attain_the_sensitivity(x64):
    # Far on the wrong side a logistic error is linear, with a slope of -x.
    rows, far = np.full((1, 4, 2), [1.0, 1e-3]), jnp.array([[0.0, -1e6]])
    other = rows.copy()
    other[0, 2, 0] = -1.0  # one example, of the same norm and label
    ones = jnp.ones((1, 4), bool)

    def client(X):
        who = jnp.zeros(1, int)
        clients = served.Clients(who, who, X, jnp.ones((1, 4)), ones)
        world = served.prepared(clients, 1, 1, 0.0, "logistic", by_cluster=False)
        return served.primal(world, 200)(far, 0 * far, jnp.full(1, 2.0), 0)

    moved = np.linalg.norm(client(rows) - client(other))
    most = minimiser_sensitivity(np.linalg.norm(rows[0, 0]), 4, 2.0)
    np.testing.assert_allclose(moved, most, rtol=1e-6)


@pytest.mark.parametrize(("norm", "rho"), [(28.0, 1.0), (1.0, 0.1), (1.0, 2.0)])
def test_G11_holds_with_long_duals_and_rows_of_unlike_lengths(norm, rho):
    # Forces as long as the dual of a private run gets; one row of three is replaced.
    rng, who = np.random.default_rng(0), jnp.zeros(20, int)
    X = rng.normal(size=(20, 3, 100))
    X *= norm / np.linalg.norm(X, axis=2, keepdims=True)
    X[:, 1:] *= 1e-3
    force = rng.normal(size=(20, 100))
    force *= 150 * norm / np.linalg.norm(force, axis=1, keepdims=True)
    labels = jnp.sign(rng.normal(size=(20, 3)))

    @jax.jit
    def minimum(X):
        mask = jnp.ones((20, 3), bool)
        clients = served.Clients(who, who, X, labels, mask)
        world = served.prepared(clients, 1, 1, 0.0, "logistic", by_cluster=False)
        primal = served.primal(world, pgfl.Config().solver_steps)
        return primal(jnp.zeros((20, 100)), force, jnp.full(20, rho), 0)

    other = X.copy()
    other[:, 0] *= 1e-3
    moved = jnp.linalg.norm(minimum(X) - minimum(other), axis=1)
    assert (moved <= minimiser_sensitivity(norm, 3, rho)).all()


def test_T62_the_drift_is_below_its_bound_in_the_mean_over_both_noises():
    # The theorem is of means over the noise of labels and that of messages. It leaves
    # out what models differ by through noise alone: tasks that are one, eta = 0, drift.
    clean = np.einsum("kmd,kd->km", X, TRUTH)

    def drift(key, size):
        def draw(key):
            noise = jax.random.normal(key, clean.shape)
            return CLIENTS._replace(y=size * (clean + noise))

        def models(tau):
            config = dataclasses.replace(PRIVATE, tau=tau)
            system = pgfl.make(config, GRAPH, draw)
            world = system.world(key)
            return iterate(
                lambda state, t, key: system.step(world, state, t, key)[0],
                system.init(world, key),
                12,
                key=key,
                record=lambda state: state.models,
            )[1]

        without, others = jax.vmap(models)(jnp.array([0.0, PRIVATE.tau]))
        return ((without - others) ** 2).sum(-1)

    keys = jax.random.split(jax.random.key(1), 40)
    by_seed = jax.jit(jax.vmap(drift, (0, None)))
    apart, alike = (np.asarray(by_seed(keys, size)) for size in (1.0, 0.0))
    best = [optimum(np.ones(K), q, y=clean) for q in range(Q)]
    eta = max(((a - b) ** 2).sum() for a in best for b in best)
    bound = served.drift_bound(0.3 * 0.9 ** np.arange(12))[:, None, None] * eta
    # Of 144 means each, at eight standard errors.
    error = apart.std(0, ddof=1) / np.sqrt(len(keys))
    assert (apart.mean(0) + 8 * error <= bound).all()
    assert (alike.mean(0) > 0).all()


def test_the_inner_solver_reaches_the_logistic_minimum():
    labels = np.sign(Y)
    config = dataclasses.replace(RIDGE, error="logistic", tau=0.2)
    _, states = follow(config, 3, clients=CLIENTS._replace(y=labels))
    for n in (1, 2):
        W, dual = states.params[n + 1], states.dual[n]
        theirs = states.models[n][SERVER, CLUSTER]
        for k in range(K):
            x, y = X[k, : SIZES[k]], labels[k, : SIZES[k]]
            fit = -x.T @ (y / (1 + np.exp(y * (x @ W[k])))) / SIZES[k]
            slope = fit + 2 * 0.3 / 6 * W[k] - dual[k] + 2 * (W[k] - theirs[k])
            assert np.abs(slope).max() < 1e-6


def test_G12_duals_of_a_servers_cluster_sum_to_zero_by_its_aggregate():
    config = dataclasses.replace(PRIVATE, reply="aggregate", per_server=None)
    _, states = follow(config, 6)
    total = states.dual.reshape(7, S, Q, 2, D).sum(3)
    np.testing.assert_allclose(total, 0, atol=1e-12)
    assert np.abs(states.dual[-1]).max() > 0.1


def test_G13_without_a_budget_there_is_no_noise():
    silent = dataclasses.replace(PRIVATE, budget=None, gradient_bound=None)
    huge = dataclasses.replace(PRIVATE, budget=DynamicBudget(1e300))
    _, states = follow(silent, 6)
    _, private = follow(huge, 6)
    # Two programs, each with rounding of its own.
    np.testing.assert_allclose(states.models, private.models, rtol=1e-12, atol=1e-14)
    assert (states.ledger.spent == 0).all()


def test_G14_one_model_for_all_has_a_known_floor():
    g, c = np.array([0.1, -0.15, 0.05]), 0.02
    base = RNG.normal(size=D)
    truth = ((1 + g)[:, None] * base)[CLUSTER]
    with jax.enable_x64(True):
        clients = CLIENTS._replace(truth=truth)
        world = pgfl.make(RIDGE, GRAPH, lambda key: clients).world(jax.random.key(0))
        W = jnp.tile((1 + c) * base, (K, 1))
        found = served.quality(world, W, jnp.zeros((S, Q, D)))
    expected = (((c - g) / (1 + g)) ** 2).mean()
    np.testing.assert_allclose(found["nmsd"], expected, rtol=1e-12)
    np.testing.assert_allclose(decibels(0.01), -20)


def test_accuracy_is_that_of_the_servers_model_on_the_clients_task():
    exam = RNG.normal(size=(Q, 7, D)), np.sign(RNG.normal(size=(Q, 7)))
    models = RNG.normal(size=(S, Q, D))
    for num_clusters in (Q, 1):
        config = dataclasses.replace(RIDGE, num_clusters=num_clusters)
        draw = CLIENTS._replace(test=tuple(map(jnp.asarray, exam)), truth=None)
        world = pgfl.make(config, GRAPH, lambda key, c=draw: c).world(jax.random.key(0))
        ours = models[:, :num_clusters]
        found = served.quality(world, jnp.zeros((K, D)), jnp.asarray(ours, "f4"))
        expected = [
            (np.sign(exam[0][q] @ ours[s, q % num_clusters]) == exam[1][q]).mean()
            for s, q in zip(SERVER, CLUSTER, strict=True)
        ]
        np.testing.assert_allclose(found["accuracy_of_client"], expected, atol=1e-6)
        assert "nmsd" not in found


def test_the_printed_total_is_that_of_budgets_that_shrink():
    budget = DynamicBudget(1e-3, 0.99)
    np.testing.assert_allclose(budget.total(300), 1.919723391463734, rtol=1e-12)
    grown = 1e-3 * 0.99 ** -np.arange(1.0, 301)
    np.testing.assert_allclose(grown.sum(), 1.9391, rtol=1e-4)
    printed = (1e-3 * 0.99 ** np.arange(300)).sum()
    np.testing.assert_allclose(printed, 0.0951, rtol=1e-3)


def test_single_steps_by_hand_keep_servers_that_agree(x64):
    config = dataclasses.replace(RIDGE, update="single", tau=0.2)
    _, states = follow(config, 6)
    near, _ = mixers(0)
    for n in range(6):
        own, old = np.zeros((S, Q, D)), states.models[n]
        for s in range(S):
            for q in range(Q):
                here = (s == SERVER) & (q == CLUSTER)
                mean = states.params[n + 1, here] - states.dual[n, here] / 2
                own[s, q] = mean.mean(0)
        for s in range(S):
            for q in range(Q):
                pull = sum(A[s, p] * (old[s, q] + old[p, q]) for p in range(S))
                mine = np.einsum("p,pqd->qd", near[s], old)
                foreign = (mine.sum(0) - mine[q]) / (Q - 1)
                top = own[s, q] - states.between[n, s, q] / 2 + pull + 0.2 * foreign
                expected = top / (1 + 0.2 + 2.0 * A[s].sum())
                np.testing.assert_allclose(
                    states.models[n + 1, s, q], expected, atol=1e-6
                )
        new = states.models[n + 1]
        dual = states.between[n] + 2 * np.einsum(
            "sp,spqd->sqd", A, new[:, None] - new[None]
        )
        np.testing.assert_allclose(states.between[n + 1], dual, atol=1e-10)
    same: Any = np.tile(RNG.normal(size=(1, Q, D)), (S, 1, 1))
    alike: Any = np.tile(same[:, :1], (1, Q, 1))
    for tau, models in ((0.0, same), (0.4, alike)):
        kept, dual = served.single_step(
            GRAPH, jnp.asarray(near), 2.0, tau, models, models, 0 * models
        )
        np.testing.assert_allclose(kept, models, atol=1e-5)
        np.testing.assert_allclose(dual, 0, atol=1e-5)


def test_GFL_ClusterFL_and_one_server_are_configurations():
    common = dataclasses.replace(RIDGE, num_clusters=1)
    _, gfl = follow(common, 5)
    pooled = CLIENTS._replace(cluster=np.zeros(K, int))
    _, relabelled = follow(common, 5, clients=pooled)
    np.testing.assert_array_equal(gfl.models, relabelled.models)
    _, alone = follow(dataclasses.replace(RIDGE, mixing="none", tau=0.3), 5)
    for s in range(S):
        own = s == SERVER
        part = served.Clients(0 * SERVER[own], CLUSTER[own], X[own], Y[own], MASK[own])
        _, single = follow(dataclasses.replace(RIDGE, tau=0.3), 5, ONE, part)
        np.testing.assert_allclose(single.models[:, 0], alone.models[:, s], atol=1e-12)


def test_seeds_are_one_program_and_idle_clients_pay_nothing():
    system = pgfl.make(PRIVATE, GRAPH, lambda key: jax.tree.map(jnp.asarray, CLIENTS))
    result = run(system, rounds=8, seeds=(0, 1), eval_every=4, progress=False)
    assert result.compilations == 1
    np.testing.assert_array_equal(result.train["messages"], 3 * S)
    spent = result.client_metrics["budget_of_node"]
    assert (spent <= BUDGET.total(8) * (1 + 1e-5)).all()
    assert (spent.max(1) > spent.min(1)).all()
    assert result.evaluations["nmsd"].shape == (2, 2)


def test_data_of_other_servers_clusters_or_classes_do_not_pass_unnoticed():
    def draw(key):
        return related_lines(key, S, 3, Q, D)

    key = jax.random.key(0)
    for servers, match in ((3, "server must be in 0..2, got 3"), (5, "no client of 4")):
        system = pgfl.make(RIDGE, builders.complete(servers), draw)
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(system.world, key)  # as within a run
    fewer = dataclasses.replace(RIDGE, num_clusters=2)
    for shared_by in ("server", "cluster"):
        config = dataclasses.replace(fewer, penalty_shared_by=shared_by)
        world = jax.jit(pgfl.make(config, GRAPH, draw).world)(key)
        np.testing.assert_array_equal(np.isnan(world.ridge), world.task == 2)
    classes = dataclasses.replace(RIDGE, error="logistic")
    zero_one = CLIENTS._replace(y=(Y > 0).astype(float))
    with pytest.raises(ValueError, match="y must be labels -1 and 1"):
        run(pgfl.make(classes, GRAPH, lambda key: zero_one), rounds=1, progress=False)
    # What is drawn inside a program becomes NaN, which ends a run.
    drawn = pgfl.make(classes, GRAPH, lambda key: jax.tree.map(jnp.array, zero_one))
    world = jax.jit(drawn.world)(key)
    np.testing.assert_array_equal(np.isnan(world.y), MASK & (Y <= 0))
    empty = CLIENTS._replace(mask=MASK & (np.arange(K) != 2)[:, None])
    with pytest.raises(ValueError, match="every node a row, got none for node 2"):
        run(pgfl.make(RIDGE, GRAPH, lambda key: empty), rounds=1, progress=False)
    drawn = pgfl.make(RIDGE, GRAPH, lambda key: jax.tree.map(jnp.array, empty))
    np.testing.assert_array_equal(
        np.isnan(jax.jit(drawn.world)(key).ridge), np.arange(K) == 2
    )


def test_what_is_out_of_range_is_refused():
    apart = Graph.from_edges(np.array([[0, 1], [2, 3]]))

    def world(**changes):
        clients = CLIENTS._replace(**changes)
        pgfl.make(RIDGE, GRAPH, lambda key: clients).world(jax.random.key(0))

    for wrong, match in (
        (lambda: pgfl.Config(1, tau=0.1), "tau must be 0 with one cluster"),
        (lambda: pgfl.Config(3, tau=1.0), "tau must be"),
        (lambda: pgfl.Config(3, tau=-0.1), "tau must be"),
        (lambda: pgfl.Config(3, rho=0.0), "rho must be > 0"),
        (lambda: pgfl.Config(3, tau_decay=0.0), "tau_decay must be > 0"),
        (lambda: pgfl.Config(3, budget=BUDGET), "gradient_bound must be given"),
        (lambda: pgfl.Config(3, gradient_bound=0.0), "gradient_bound must be > 0"),
        (lambda: pgfl.Config(3, update="single", mixing="none"), "mixing must be"),
        (lambda: pgfl.make(RIDGE, apart, lambda key: CLIENTS), "connected"),
        (lambda: world(cluster=CLUSTER + 1), "cluster must be in 0..2, got 3"),
        (lambda: world(server=SERVER - 1), "server must be in 0..3, got -1"),
        (lambda: world(server=np.minimum(SERVER, 2)), "got no client of 3"),
        (lambda: world(mask=MASK & (np.arange(K) > 0)[:, None]), "node 0|row"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
