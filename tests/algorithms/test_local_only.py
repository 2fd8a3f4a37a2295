"""Local training: each client's own SGD, and nothing else."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    PARAMS,
    START,
    TRAIN,
    N,
    X,
    Y,
    assert_close,
    rounds,
    with_and_without,
)
from tests.reference import local_sgd, softmax_loss, visits

from fedjax_core import FederatedData, LocalWork, Model, simulate
from fedjax_core.algorithms import local_only

WORK = LocalWork(batch_size=3, epochs=2)


def model_of(algorithm, state, i):
    row = jax.tree.map(lambda x: x[i], state.clients)
    return algorithm.own_models(state, row)["local"]


def test_everyone_goes_on_where_it_stands():
    algorithm = local_only.make(
        local_only.Config(client_lr=0.3, work=WORK), softmax_loss
    )
    models = [START] * N
    for state, metrics, cohort in rounds(algorithm):
        for i, batches in visits(cohort).items():
            models[i], _ = local_sgd(models[i], X, Y, batches, 0.3)
        for i in range(N):
            assert_close(model_of(algorithm, state, i), models[i])
        assert_close(state.params, PARAMS, rtol=0, atol=0)
        assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == 0
        assert 0 < metrics["train_loss"] < 10


def test_an_optimizer_goes_on_too():
    algorithm = local_only.make(
        local_only.Config(work=WORK),
        softmax_loss,
        client_optimizer=optax.sgd(0.1, momentum=0.9),
    )
    batches = []
    for state, _, cohort in rounds(algorithm, [[7, 0]] * 3):
        batches += visits(cohort)[7]
        expected, _ = local_sgd(START, X, Y, batches, 0.1, momentum=0.9)
        assert_close(model_of(algorithm, state, 7), expected)


def test_an_excluded_client_keeps_its_model():
    algorithm = local_only.make(local_only.Config(work=WORK), softmax_loss)
    (got, metrics), (others, _) = with_and_without(algorithm)
    assert metrics["excluded_clients"] == 1
    for i in range(N):
        own = model_of(algorithm, got, i)
        assert_close(own, model_of(algorithm, others, i), rtol=0, atol=0)


def test_clients_are_evaluated_under_their_own_models():
    data = FederatedData(TRAIN)
    algorithm = local_only.make(
        local_only.Config(client_lr=0.3, work=WORK), softmax_loss
    )
    model = Model(
        init=lambda key: PARAMS,
        loss=softmax_loss,
        metrics=lambda params, batch: {"loss": softmax_loss(params, batch, None)},
    )
    result = simulate(
        algorithm, data, model, rounds=3, cohort_size=4, eval_splits=("train",),
        progress=False,
    )  # fmt: skip
    state = jax.tree.map(lambda x: x[0], result.state)
    losses = [
        np.sum(softmax_loss(model_of(algorithm, state, i), TRAIN.client(i), None))
        for i in range(N)
        if len(TRAIN.client(i)["y"])
    ]
    got = result.final("train_local_loss")[0]
    np.testing.assert_allclose(got, np.sum(losses) / TRAIN.num_examples, rtol=1e-5)


def test_a_config_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"client_lr must be > 0 and finite, got 0"):
        dataclasses.replace(local_only.Config(), client_lr=0)
