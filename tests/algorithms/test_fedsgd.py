"""FedSGD against exact gradients in NumPy."""

import dataclasses

import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    COHORTS,
    EVERYONE,
    MODEL_BYTES,
    SIZES,
    START,
    X,
    Y,
    assert_close,
    combined,
    last,
    moved,
    own_rows,
    rounds,
    shares,
)
from tests.reference import softmax_gradient, softmax_loss

from fedjax_core import LocalWork
from fedjax_core.algorithms import fedavg, fedsgd


@pytest.mark.parametrize(("batch_size", "weights"), [(3, "examples"), (16, "uniform")])
def test_rounds_are_steps_along_exact_gradients(batch_size, weights):
    config = fedsgd.Config(server_lr=0.5, batch_size=batch_size, weights=weights)
    params = START
    runs = rounds(fedsgd.make(config, softmax_loss))
    for (state, metrics, _), ids in zip(runs, COHORTS, strict=True):
        ids = [i for i in ids if SIZES[i]]
        exact = {
            i: softmax_gradient(params, X[own_rows(i)], Y[own_rows(i)]) for i in ids
        }
        step = combined(shares(ids, weights), {i: g for i, (_, g) in exact.items()})
        by_example = shares(ids)
        loss = sum(by_example[i] * value for i, (value, _) in exact.items())
        params = moved(params, step, -0.5)
        assert_close(state.params, params)
        np.testing.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)
        assert metrics["uplink_bytes"] == MODEL_BYTES * len(ids)


def test_with_everyone_it_is_gradient_descent():
    params = START
    config = fedsgd.Config(server_lr=0.5, batch_size=4)
    for state, metrics, _ in rounds(fedsgd.make(config, softmax_loss), [EVERYONE] * 5):
        loss, gradient = softmax_gradient(params, X, Y)
        params = moved(params, gradient, -0.5)
        assert_close(state.params, params)
        np.testing.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)


def test_one_full_batch_is_a_local_step_of_fedavg():
    got = fedsgd.make(fedsgd.Config(server_lr=0.3, batch_size=16), softmax_loss)
    work = LocalWork(batch_size=16)
    same = fedavg.make(fedavg.Config(client_lr=0.3, work=work), softmax_loss)
    assert_close(last(got).params, last(same).params, rtol=1e-6)


def test_the_server_may_use_another_optimizer():
    adam = optax.adam(0.1, eps=1e-3)
    algorithm = fedsgd.make(fedsgd.Config(), softmax_loss, server_optimizer=adam)
    state, _, _ = next(rounds(algorithm, [EVERYONE]))
    _, gradient = softmax_gradient(START, X, Y)
    first = {name: g / (np.abs(g) + 1e-3) for name, g in gradient.items()}
    assert_close(state.params, moved(START, first, -0.1))


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("server_lr", 0.0, ValueError, "server_lr must be > 0 and finite, got 0.0"),
        ("batch_size", 0, ValueError, "batch_size must be >= 1, got 0"),
        ("weights", "size", ValueError, "one of 'examples', 'uniform', got 'size'"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(fedsgd.Config(), **{field: value})
