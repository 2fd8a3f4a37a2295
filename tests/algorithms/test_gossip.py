"""Gossip averaging: NumPy rounds, what is sent, and when the mean is kept."""

import dataclasses

import jax
import numpy as np
import pytest
from tests.algorithms.softmax_rounds import (
    EVERYONE,
    MODEL_BYTES,
    START,
    N,
    assert_close,
    deltas,
    rounds,
)
from tests.reference import softmax_loss

from fedjax_core import LocalWork
from fedjax_core.algorithms import gossip
from fedjax_core.networks.builders import chain, complete, mixing, star
from fedjax_core.networks.graph import Graph

CONFIG = gossip.Config(client_lr=0.3, work=LocalWork(batch_size=3, steps=2))


@pytest.fixture(scope="module")
def algorithm():
    made = gossip.make(CONFIG, softmax_loss)
    return dataclasses.replace(made, round=jax.jit(made.round))


@pytest.mark.parametrize("rule", ["metropolis", "neighbours"])
def test_rounds_are_local_steps_and_averages_with_neighbours(algorithm, rule):
    W = mixing(star(N), rule)
    models = [START] * N
    cohorts = [EVERYONE, [2, 0, 5], EVERYONE]
    for state, metrics, cohort in rounds(algorithm, cohorts, public={"mixing": W}):
        moved = list(models)
        ids = [int(i) for i in cohort.client_id if i >= 0]
        for i in ids:
            mine = deltas(models[i], cohort, 0.3)
            if i in mine:
                moved[i] = {k: models[i][k] + mine[i][k] for k in START}
        models = [
            {k: sum(w * x[k] for w, x in zip(row, moved, strict=True)) for k in START}
            for row in W.astype(np.float64)
        ]
        for i in range(N):
            assert_close(jax.tree.map(lambda m: m[i], state.models), models[i])  # noqa: B023
        row = state.clients[2]
        assert_close(algorithm.own_models(state, row)["node"], models[2])
        mean = {k: np.mean([m[k] for m in models], 0) for k in START}
        assert_close(state.params, mean)
        # The centre sends a model to each of the others, and each of them one to it.
        sent = 2 * (N - 1) * MODEL_BYTES
        assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == sent


def test_on_a_complete_graph_nodes_are_the_clients_of_fedavg(algorithm):
    W = mixing(complete(N), "neighbours")
    state, _, cohort = next(rounds(algorithm, [EVERYONE], public={"mixing": W}))
    moved = deltas(START, cohort, 0.3).values()
    # The node without examples counts as one that did not move.
    mean = {k: START[k] + sum(d[k] for d in moved) / N for k in START}
    for i in (0, 3, 7):
        assert_close(jax.tree.map(lambda m: m[i], state.models), mean)  # noqa: B023


def test_metropolis_weights_alone_keep_the_mean():
    for graph in (star(6), chain(5)):
        W = mixing(graph)
        np.testing.assert_allclose(W.sum(0), 1, atol=1e-6)
        np.testing.assert_array_equal(W, W.T)
        plain = mixing(graph, "neighbours")
        np.testing.assert_allclose(plain.sum(1), 1, atol=1e-6)
        assert np.abs(plain.sum(0) - 1).max() > 0.1
    two = Graph.from_edges(np.array([[0, 1], [2, 3]]), np.ones(2), num_nodes=4)
    with pytest.warns(UserWarning, match="not connected"):
        mixing(two)
    with pytest.raises(ValueError, match="client_lr must be > 0"):
        gossip.Config(client_lr=0.0)
