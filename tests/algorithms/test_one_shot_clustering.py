"""One-shot clustering against k-means by brute force and FedAvg in NumPy."""

import itertools
from typing import Any

import chex
import jax
import numpy as np
import pytest
from tests.algorithms.clustered_clients import (
    EVERYONE,
    EXAMPLES,
    KEY,
    LR,
    PARAMS,
    SIZES,
    WORK,
    N,
    flat,
    orders_of,
    plans,
)
from tests.reference import Tree, local_sgd, softmax_loss

from fedjax_core.algorithms import one_shot_clustering

CONFIG = one_shot_clustering.Config(num_clusters=3, client_lr=LR, work=WORK)
START = {name: p.astype(np.float64) for name, p in PARAMS.items()}
X, Y = EXAMPLES["x"].astype(np.float64), EXAMPLES["y"]


def best_clusters(points: np.ndarray, k: int) -> np.ndarray:
    """The k-means partition by trying all, numbered by first members."""

    def cost(label):
        groups = (points[label == c] for c in set(label))
        return sum(((g - g.mean(0)) ** 2).sum() for g in groups)

    every = (np.array(c) for c in itertools.product(range(k), repeat=len(points)))
    canonical = (c for c in every if list(dict.fromkeys(c)) == sorted(set(c)))
    return min(canonical, key=cost)


def delta(model: Tree, order) -> Tree:
    local, _ = local_sgd(model, X, Y, order, LR)
    return {name: local[name] - model[name] for name in model}


def test_rounds_match_the_paper_and_latecomers_join_the_nearest():
    late = np.array([1, 8])
    cohorts = plans([range(N)] * 3)
    cohorts[0] = cohorts[0].only(~np.isin(np.arange(N), late))
    algorithm: Any = one_shot_clustering.make(CONFIG, softmax_loss)
    state, step, metrics = algorithm.init(PARAMS, N), jax.jit(algorithm.round), {}
    for cohort in cohorts:
        state, metrics = step(state, cohort, KEY)
    orders = orders_of(cohorts[1:])
    first = [i for i in EVERYONE if i not in late]
    moves = {i: delta(START, orders_of(plans([range(N)]))[0][i]) for i in first}
    points = np.stack([flat(moves[i]) for i in first])
    label = dict(zip(first, best_clusters(points, 3), strict=True))
    centres = [
        np.average(
            points[[label[i] == k for i in first]], 0,
            weights=[SIZES[i] for i in first if label[i] == k],
        )
        for k in range(3)
    ]  # fmt: skip

    def step_of(moves, model, k):
        mine = [i for i in moves if label[i] == k]
        w = np.array([SIZES[i] for i in mine], float)
        return {
            name: model[name]
            + np.tensordot(w / w.sum(), [moves[i][name] for i in mine], 1)
            for name in model
        }

    models = [step_of(moves, START, k) for k in range(3)]
    moves = {i: delta(models[label[i]], orders[0][i]) for i in first}
    for i in late:
        away = flat(delta(START, orders[0][i])) - np.stack(centres)
        label[i] = int((away**2).sum(1).argmin())
    models = [step_of(moves, models[k], k) for k in range(3)]
    moves = {i: delta(models[label[i]], orders[1][i]) for i in EVERYONE}
    models = [step_of(moves, models[k], k) for k in range(3)]

    np.testing.assert_array_equal(state.label[3], -1)
    mean: Any = dict.fromkeys(START, 0.0)
    for i in EVERYONE:
        assert int(state.label[i]) == label[i]
        row = jax.tree.map(lambda x, i=i: x[i], state.clients)
        own = algorithm.own_models(state, row)["cluster"]
        chex.assert_trees_all_close(own, models[label[i]], rtol=1e-4, atol=1e-5)
        mean = {name: mean[name] + models[label[i]][name] / 8 for name in mean}
    chex.assert_trees_all_close(state.params, mean, rtol=1e-4, atol=1e-5)
    assert metrics["downlink_bytes"] == metrics["uplink_bytes"] == 48 * len(EVERYONE)
    nobody = jax.tree.map(lambda x: x[3], state.clients)
    chex.assert_trees_all_equal(
        algorithm.own_models(state, nobody)["cluster"], state.params
    )


def test_a_config_names_what_is_wrong():
    with pytest.raises(ValueError, match="num_clusters must be >= 1, got 0"):
        one_shot_clustering.Config(num_clusters=0)
