"""Centralised training: one long SGD on all data."""

import dataclasses

import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    PARAMS,
    SIZES,
    START,
    TRAIN,
    X,
    Y,
    assert_close,
    rounds,
)
from tests.reference import local_sgd, softmax_gradient, softmax_loss, visits

from fedjax_core import FederatedData, LocalWork, plan_round
from fedjax_core.algorithms import centralised

DATA = FederatedData(TRAIN, test=TRAIN.take([1, 3, 2, 0, 4, 5, 6, 7]))


def test_pooling_keeps_every_example():
    pooled = centralised.pool(DATA)
    assert pooled.client_ids == ("pooled",)
    for name, split in DATA.splits.items():
        np.testing.assert_array_equal(pooled.splits[name].sizes, [sum(SIZES)])
        for k, array in split.examples.items():
            np.testing.assert_array_equal(pooled.splits[name].examples[k], array)


@pytest.mark.parametrize(
    "work",
    [
        LocalWork(batch_size=2, epochs=3),
        LocalWork(batch_size=4, steps=5),
        LocalWork(batch_size=4, epochs=2, drop_remainder=True),
    ],
    ids=["epochs", "steps", "whole batches"],
)
def test_as_many_examples_as_in_a_federated_round(work):
    everyone = plan_round(range(len(SIZES)), TRAIN, work, seed=0, round=0)
    seen = sum(len(batch) for steps in visits(everyone).values() for batch in steps)
    got = centralised.same_work(DATA, work, cohort_size=4)
    assert got.batch_size == work.batch_size
    assert abs(got.steps * work.batch_size - seen / 2) <= work.batch_size / 2


def test_rounds_are_one_run_of_sgd_with_momentum():
    algorithm = centralised.make(
        centralised.Config(work=LocalWork(batch_size=4, steps=7)),
        softmax_loss,
        client_optimizer=optax.sgd(0.1, momentum=0.9),
    )
    batches = []
    pooled = centralised.pool(DATA).train
    for state, metrics, cohort in rounds(algorithm, [[0]] * 4, pooled):
        batches += visits(cohort)[0]
        expected, _ = local_sgd(START, X, Y, batches, 0.1, momentum=0.9)
        assert_close(state.params, expected)
        assert metrics["local_steps"] == 7


def test_with_full_batches_it_is_gradient_descent():
    work = LocalWork(batch_size=len(Y))
    algorithm = centralised.make(
        centralised.Config(client_lr=0.5, work=work), softmax_loss
    )
    params = START
    pooled = centralised.pool(DATA).train
    for state, _, _ in rounds(algorithm, [[0]] * 5, pooled):
        _, gradient = softmax_gradient(params, X, Y)
        params = {name: params[name] - 0.5 * gradient[name] for name in params}
        assert_close(state.params, params)


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match=r"client_lr must be > 0 and finite, got 0"):
        dataclasses.replace(centralised.Config(), client_lr=0)
    with pytest.raises(ValueError, match=r"cohort_size must be >= 1, got 0"):
        centralised.same_work(DATA, LocalWork(), cohort_size=0)
    algorithm = centralised.make(centralised.Config(), softmax_loss)
    with pytest.raises(ValueError, match=r"one client, .* got 8 clients"):
        algorithm.init(PARAMS, 8)
