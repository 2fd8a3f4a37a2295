"""Clustered federated learning against Algorithm 11 in NumPy."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.algorithms.clustered_clients import (
    EVERYONE,
    EXAMPLES,
    KEY,
    LR,
    OFFSETS,
    PARAMS,
    SIZES,
    TRAIN,
    TRUTH,
    WORK,
    N,
    flat,
    learn,
    orders_of,
    plans,
)
from tests.reference import softmax_gradient, softmax_loss

from fedjax_core import (
    Execution,
    FederatedData,
    Full,
    Packed,
    client_mesh,
    models,
    simulate,
)
from fedjax_core.algorithms import cfl, fedavg
from fedjax_core.clusters import assign, in_cluster, no_map, permutation, reflection
from fedjax_core.local import local_sgd
from fedjax_core.map import map_clients
from fedjax_core.models.model import Model
from fedjax_core.reduce import stack

CONFIG = cfl.Config(
    client_lr=LR, eps1=0.1, eps2=0.3, gamma_max=0.7, max_clusters=4, work=WORK
)
ROBUST = dataclasses.replace(CONFIG, eps1=None, eps2=0.0, robust=True)
START = {name: p.astype(np.float64) for name, p in PARAMS.items()}
ROUNDS = 12


class Compiled:
    """The method, compiled once for all tests that use a config."""

    def __init__(self, config, secret=None):
        self.algorithm = cfl.make(config, softmax_loss, secret=secret)
        self.traces = 0
        self._step = jax.jit(self._counted)

    def _counted(self, *args):
        self.traces += 1
        return self.algorithm.round(*args)

    def __call__(self, cohorts):
        """The states after all rounds and their metrics."""
        state, kept = self.algorithm.init(PARAMS, N), []
        for cohort in cohorts:
            state, metrics = self._step(state, cohort, KEY)
            kept.append((state, metrics))
        assert self.traces == 1, "neither splits nor removals compile anything"
        return kept


compiled = functools.cache(Compiled)


def own(algorithm, state, client):
    row = jax.tree.map(lambda x: x[client], state.clients)
    return algorithm.own_models(state, row)


@pytest.fixture(scope="module")
def cohorts():
    return plans([range(N)] * ROUNDS)


@pytest.fixture(scope="module")
def plain(cohorts):
    return compiled(CONFIG)(cohorts)


def test_rounds_are_the_recursion_of_the_thesis(plain, cohorts):
    algorithm, (state, _) = compiled(CONFIG).algorithm, plain[-1]
    expected = learn(START, EVERYONE, orders_of(cohorts), 0, CONFIG)
    assert [members for _, members, _ in expected] == [[0, 4, 8], [1, 5, 6], [2, 7]]
    born = [t for t, _, _ in expected]
    assert born == [2, 10, 10]
    for _, members, model in expected:
        assert len({int(state.tree.label[i]) for i in members}) == 1
        for i in members:
            chex.assert_trees_all_close(
                own(algorithm, state, i)["cluster"], model, rtol=1e-4, atol=1e-5
            )
    # What is cut stays as it was: FedAvg's model of rounds 0 and 1.
    same = fedavg.make(fedavg.Config(client_lr=LR, work=WORK), softmax_loss)
    average, _ = same.round(same.init(PARAMS, N), cohorts[0], KEY)
    chex.assert_trees_all_close(state.params, average.params, rtol=1e-5, atol=1e-6)
    above = own(algorithm, state, 1)["parent"]
    chex.assert_trees_all_equal(
        above,
        jax.tree.map(lambda m: m[state.tree.parent[state.tree.label[1]]], state.models),
    )
    assert state.tree.path(int(state.tree.label[2])) == [0, 2, 4]
    assert state.tree.path(int(state.tree.label[0])) == [0, 1]


def test_clusters_split_side_by_side_down_to_single_clients(cohorts):
    config = dataclasses.replace(
        CONFIG, eps1=0.25, eps2=0.1, gamma_max=0.5, max_clusters=9
    )
    expected = learn(START, EVERYONE, orders_of(cohorts), 0, config)
    method = Compiled(config)
    kept = method(cohorts)
    state, metrics = kept[-1]
    assert sorted(members for _, members, _ in expected) == [[i] for i in EVERYONE]
    assert metrics["clusters"] == len(EVERYONE)
    assert max(int(m["splits"]) for _, m in kept) > 1
    for _, (i,), model in expected:
        got = own(method.algorithm, state, i)["cluster"]
        chex.assert_trees_all_close(got, model, rtol=1e-4, atol=1e-5)


def test_metrics_tell_of_splits(plain):
    metrics = [m for _, m in plain]
    assert [int(m["splits"]) for m in metrics] == [t in (1, 9) for t in range(ROUNDS)]
    assert [int(m["clusters"]) for m in metrics][::3] == [1, 2, 2, 3]
    assert sum(int(m["refused_splits"] + m["removed_clients"]) for m in metrics) == 0
    gap = np.array([m["gap"] for m in metrics])
    assert (gap[:10] > 0).all()
    assert (gap[10:] <= 1e-6).all(), "clusters of one distribution"
    for m in metrics:
        assert m["mean_update_norm"] <= m["max_update_norm"]
        # As FedAvg: one model each way.
        assert m["downlink_bytes"] == m["uplink_bytes"] == 48 * len(EVERYONE)


@pytest.mark.parametrize("make", [permutation, reflection])
def test_the_server_learns_as_much_from_hidden_coordinates(plain, cohorts, make):
    hiding = Compiled(CONFIG, make(7))
    state, metrics = hiding(cohorts)[-1]
    algorithm, reference = hiding.algorithm, compiled(CONFIG).algorithm
    clear, same = plain[-1]
    np.testing.assert_array_equal(state.tree.label, clear.tree.label)
    hidden = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, clear.params)
    assert max(jax.tree.leaves(hidden)) > 0.01
    close = {"rtol": 1e-4, "atol": 1e-6 if make is permutation else 1e-5}
    shown = algorithm.model(state)
    chex.assert_trees_all_close(shown, clear.params, **close)
    for i in EVERYONE:
        chex.assert_trees_all_close(
            own(algorithm, state, i), own(reference, clear, i), **close
        )
    np.testing.assert_allclose(metrics["gap"], same["gap"], atol=1e-5)
    assert metrics["downlink_bytes"] == same["downlink_bytes"]


def test_a_full_tree_refuses_splits_and_says_so(cohorts):
    config = dataclasses.replace(
        CONFIG, eps1=0.15, gamma_max=0.5, max_clusters=2, weights="uniform"
    )
    full = Compiled(config)
    kept = full(cohorts)
    state, metrics = kept[-1]
    assert metrics["clusters"] == 2
    assert [int(m["refused_splits"]) for _, m in kept][-2:] == [1, 1]
    np.testing.assert_array_equal(state.tree.label[jnp.array([1, 2, 5, 6, 7])], 2)
    # Clusters go on as before, here by means in which clients count alike.
    early, late = kept[2][0], kept[-1][0]
    for _, members, model in learn(START, EVERYONE, orders_of(cohorts[:3]), 0, config):
        got = own(full.algorithm, early, members[0])["cluster"]
        chex.assert_trees_all_close(got, model, rtol=1e-4, atol=1e-5)
    assert np.abs(early.models["w"][2] - late.models["w"][2]).max() > 1e-3


def test_only_whole_clusters_are_cut(cohorts):
    everyone = np.arange(N)
    takes_part = [everyone != 8] * 3 + [everyone >= 0, TRUTH > 0, TRUTH == 0]
    method = compiled(CONFIG)
    kept = method([c.only(p) for c, p in zip(cohorts, takes_part, strict=False)])
    assert [int(m["splits"]) for _, m in kept] == [0, 0, 0, 1, 0, 0]
    assert np.isnan(kept[2][1]["alpha_cross"])
    # A cluster that does not take part keeps its model.
    before, between, after = (k[0].models["w"] for k in kept[-3:])
    np.testing.assert_array_equal(before[1], between[1])
    np.testing.assert_array_equal(between[2], after[2])
    assert (np.abs(between - before)[2] > 0).any()
    assert (np.abs(after - between)[1] > 0).any()
    # Who has not taken part yet uses the root's.
    state = kept[2][0]
    assert state.clients[0][8] == -1
    chex.assert_trees_all_equal(
        own(method.algorithm, state, 8)["cluster"], state.params
    )


def test_updates_are_gradients_to_first_order(cohorts):
    # || u + rate * n_b * mean gradient || / || u ||, of n_b steps, is O(rate).
    orders, rng = orders_of(cohorts)[0], np.random.default_rng(1)
    params = {k: rng.normal(size=p.shape).astype(np.float32) for k, p in PARAMS.items()}
    x, y = EXAMPLES["x"].astype(np.float64), EXAMPLES["y"]

    @jax.jit
    def updates(rate):
        program = local_sgd(softmax_loss, optax.sgd(rate))
        return map_clients(program, params, cohorts[0], KEY, reduce=stack()).update

    off = []
    for rate in (0.1, 0.01):
        got = updates(rate)
        for i in EVERYONE:
            gradients = [softmax_gradient(params, x[b], y[b])[1] for b in orders[i]]
            u = np.concatenate([got["b"][i].ravel(), got["w"][i].ravel()])
            g = sum(flat(gradient) for gradient in gradients)
            off.append(np.linalg.norm(u + rate * g) / np.linalg.norm(u))
    first, second = np.array(off).reshape(2, -1)
    assert (first < 0.2).all()
    np.testing.assert_allclose(second / first, 0.1, rtol=0.2)


def test_clients_that_agree_are_not_cut():
    # Two clients with different classes, as digits 0-4 and 5-9: both norms vanish.
    rng = np.random.default_rng(0)
    means = 3 * np.array([[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])
    y = rng.integers(0, 2, 200) + 2 * (np.arange(200) >= 100)
    x = means[y] + 0.3 * rng.normal(size=(200, 3))
    train = Packed(
        {"x": x.astype(np.float32), "y": y.astype(np.int32)}, np.array([0, 100, 200])
    )
    params = {"w": np.zeros((3, 4), np.float32), "b": np.zeros(4, np.float32)}
    config = dataclasses.replace(CONFIG, eps1=0.03, eps2=0.1)
    algorithm = cfl.make(config, softmax_loss)
    state, step, norms = algorithm.init(params, 2), jax.jit(algorithm.round), []
    for cohort in plans([range(2)] * 150, train):
        state, metrics = step(state, cohort, KEY)
        assert metrics["splits"] == 0
        norms.append([metrics["mean_update_norm"], metrics["max_update_norm"]])
    norms = np.array(norms)
    assert norms[-1, 0] < 0.03, "stationary"
    assert (norms[-1] < norms[0] / 10).all()


def test_robust_rounds_drop_the_smaller_part_for_good(cohorts):
    kept = compiled(ROBUST)(cohorts)
    removed = np.array([k.tree.removed for k, _ in kept])
    # In round 0 the cut is between {0, 4, 8} and the others.
    np.testing.assert_array_equal(removed[0], [0, -1, -1, -1, 0, -1, -1, -1, 0])
    assert (np.diff((removed >= 0).astype(int), axis=0) >= 0).all()
    for (_, m), gone in zip(kept[1:], removed[:-1] >= 0, strict=True):
        assert m["valid_clients"] == (~gone & (np.array(SIZES) > 0)).sum()
    total = sum(int(m["removed_clients"]) for _, m in kept)
    assert total == (removed[-1] >= 0).sum()
    assert all(m["clusters"] == 1 and m["refused_splits"] == 0 for _, m in kept)
    # The larger part learns as FedAvg of its members alone.
    state, alone = kept[0][0], plans([[1, 2, 5, 6, 7]])[0]
    same = fedavg.make(fedavg.Config(client_lr=LR, work=WORK), softmax_loss)
    average, _ = jax.jit(same.round)(same.init(PARAMS, N), alone, KEY)
    chex.assert_trees_all_close(state.params, average.params, rtol=1e-5, atol=1e-6)
    state = kept[-1][0]
    row_of_0 = own(compiled(ROBUST).algorithm, state, 0)
    chex.assert_trees_all_equal(row_of_0["cluster"], state.params)


def test_an_update_that_is_not_finite_prevents_a_cut_or_is_removed():
    x = EXAMPLES["x"].copy()
    x[OFFSETS[2]] = np.nan
    broken = plans([range(N)] * 4, Packed(EXAMPLES | {"x": x}, OFFSETS))
    kept = compiled(CONFIG)(broken)
    assert [int(m["excluded_clients"]) for _, m in kept] == [1] * 4
    assert sum(int(m["splits"]) for _, m in kept) == 0
    kept = compiled(ROBUST)(broken[:2])
    assert [int(m["excluded_clients"]) for _, m in kept] == [1, 0]
    np.testing.assert_array_equal(
        kept[0][0].tree.removed, [0, -1, 0, -1, 0, -1, -1, -1, 0]
    )
    chex.assert_tree_all_finite(kept[-1][0].models)


def test_new_clients_find_their_leaf(plain):
    # The same clients a second time, as strangers, and one whose batches are whole.
    state, _ = plain[-1]
    twice = {k: np.concatenate([v, v]) for k, v in EXAMPLES.items()}
    offsets = np.concatenate([OFFSETS, OFFSETS[-1] + OFFSETS[1:]])
    both = plans([range(2 * N)], Packed(twice, offsets))[0]
    shared = state.models, state.secret
    program = in_cluster(local_sgd(softmax_loss, optax.sgd(LR)), no_map())
    find = jax.jit(lambda tree, cohort: assign(program, shared, tree, cohort, KEY))
    leaf = np.asarray(find(state.tree, both))
    np.testing.assert_array_equal(
        leaf[:N][EVERYONE], state.tree.label[np.array(EVERYONE)]
    )
    np.testing.assert_array_equal(leaf[N:], leaf[:N])
    assert leaf[3] == leaf[N + 3] == -1, "without examples"
    assert len(set(leaf[EVERYONE])) == 3


def test_seeds_on_two_devices_resume_to_the_bits_with_rows_on_the_host(plain, tmp_path):
    train = FederatedData(TRAIN, test=TRAIN)

    def metrics(params, batch):
        chosen = (batch["x"] @ params["w"] + params["b"][None]).argmax(1)
        return {"accuracy": (chosen == batch["y"]).astype(jnp.float32)}

    model = Model(lambda key: PARAMS, softmax_loss, metrics)
    algorithm = cfl.make(CONFIG, softmax_loss)
    run = functools.partial(
        simulate, algorithm, train, model, rounds=ROUNDS, participation=Full(),
        seeds=[5, 3], eval_every=6, progress=False,
        execution=Execution(mesh=client_mesh(jax.devices()[:2])),
    )  # fmt: skip
    whole = run()
    host: Any = {"client_store": "host", "run_dir": tmp_path}
    assert run(callbacks=[lambda report: report.round >= 6], **host).rounds == 6
    resumed = run(resume=True, **host)
    assert resumed.timed_rounds == 6
    assert whole.compilations == 1
    # It splits before and after, of the seed of `plain` as one run on one device does.
    assert list(np.flatnonzero(whole.train["splits"][1])) == [1, 9]
    second = jax.tree.map(lambda x: x[1], whole.state)
    alone = plain[-1][0]
    chex.assert_trees_all_equal(second.tree, alone.tree)
    for got, expected in zip(*map(jax.tree.leaves, (second, alone)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(resumed.state, whole.state)
    for name in ("test_accuracy", "test_cluster_accuracy", "test_parent_accuracy"):
        np.testing.assert_array_equal(
            resumed.evaluations[name], whole.evaluations[name]
        )
    cluster, parent, root = (
        whole.final(f"test_{m}accuracy")[0] for m in ("cluster_", "parent_", "")
    )
    assert cluster > parent >= root - 1e-6


def test_nobody_has_a_cluster_alone():
    algorithm = compiled(CONFIG).algorithm
    data, model = FederatedData(TRAIN), models.logistic_regression(3, 3)
    with pytest.raises(ValueError, match=r"cohort_size must be in \[2, inf\], got 1"):
        simulate(algorithm, data, model, rounds=1, cohort_size=1, progress=False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("eps1", 0.0, "eps1 must be > 0 and finite, got 0.0"),
        ("eps2", -1.0, "eps2 must be >= 0"),
        ("gamma_max", 1.0, r"gamma_max must be in \[0, 1\), got 1.0"),
        ("max_clusters", 0, "max_clusters must be >= 1"),
        ("weights", "sizes", "weights must be one of 'examples', 'uniform'"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})
