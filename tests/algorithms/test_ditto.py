"""Ditto against the paper in NumPy, and its limits."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from tests.algorithms.personal_rounds import (
    EXAMPLES,
    OFFSETS,
    PARAMS,
    START,
    N,
    X,
    Y,
    assert_close,
    assert_own_losses,
    last,
    own_model,
    rounds,
)
from tests.reference import (
    fedavg_round,
    local_sgd,
    softmax_gradient,
    softmax_loss,
    visits,
)

from fedjax_core import LocalWork
from fedjax_core.algorithms import ditto, fedavg

WORK = LocalWork(batch_size=3, epochs=2)
CONFIG = ditto.Config(client_lr=0.2, personal_lr=0.3, prox=0.7, work=WORK)


def personal(v, w, batches, lr, prox):
    """Steps of the personal model; the pull is to the model as it was received."""
    for batch in batches:
        _, gradient = softmax_gradient(v, X[batch], Y[batch])
        v = {k: v[k] - lr * (gradient[k] + prox * (v[k] - w[k])) for k in v}
    return v


def test_rounds_match_the_paper():
    algorithm = ditto.make(CONFIG, softmax_loss)
    w, own = START, [START] * N
    state: Any = None
    for state, metrics, cohort in rounds(algorithm):
        orders = visits(cohort)
        for i, batches in orders.items():
            own[i] = personal(own[i], w, batches, 0.3, 0.7)
        w = fedavg_round(w, X, Y, orders, dict.fromkeys(orders, 1.0), 0.2, 1.0)
        assert_close(state.params, w)
        assert metrics["uplink_bytes"] == 4 * 12 * len(orders)
    # Clients 3, without examples, and 6 never took part, and use the server's model.
    own[3] = own[6] = w
    assert_own_losses(algorithm, state, own)


def test_the_global_model_is_fedavg_s_and_without_pull_clients_train_alone():
    algorithm = ditto.make(dataclasses.replace(CONFIG, prox=0.0), softmax_loss)
    same = fedavg.Config(client_lr=0.2, work=WORK, weights="uniform")
    models = [START] * N
    for (a, x, cohort), (b, y, _) in zip(
        rounds(algorithm), rounds(fedavg.make(same, softmax_loss)), strict=True
    ):
        assert_close(a.params, b.params, rtol=1e-6)
        np.testing.assert_allclose(x["train_loss"], y["train_loss"], rtol=1e-6)
        for i, batches in visits(cohort).items():
            models[i], _ = local_sgd(models[i], X, Y, batches, 0.3)
            assert_close(own_model(algorithm, a, i), models[i])


def test_a_strong_pull_makes_personal_models_the_received_one():
    # One step of rate 1 / prox ends at w - gradient / prox.
    config = ditto.Config(
        prox=1e4, personal_lr=1e-4, work=LocalWork(batch_size=9, steps=3)
    )
    algorithm = ditto.make(config, softmax_loss)
    (first, _, _), (second, _, _) = rounds(algorithm, [[0, 2], [0, 2]])
    for i in (0, 2):
        for k, w in first.params.items():
            np.testing.assert_allclose(own_model(algorithm, second, i)[k], w, atol=1e-3)


def test_a_client_whose_personal_model_breaks_is_excluded():
    # In the second round its step overflows, while update and losses are finite.
    config = ditto.Config(
        personal_lr=1e30, prox=1e30, work=LocalWork(batch_size=9, steps=1)
    )
    algorithm = ditto.make(config, softmax_loss)
    (first, good, _), (second, broken, _) = rounds(algorithm, [[2, 0], [2, 0]])
    assert (good["excluded_clients"], broken["excluded_clients"]) == (0, 2)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_an_excluded_client_keeps_its_model():
    x = EXAMPLES["x"].copy()
    x[OFFSETS[2]] = np.nan
    algorithm = ditto.make(CONFIG, softmax_loss)
    got, metrics, _ = next(rounds(algorithm, [[2, 0, 5]], x))
    assert metrics["excluded_clients"] == 1
    assert_close({k: v[2] for k, v in got.clients[0].own.items()}, PARAMS)
    assert_close(got.params, last(algorithm, [[0, 5]]).params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client_lr": 0}, "client_lr must be > 0 and finite, got 0"),
        ({"personal_lr": -1}, "personal_lr must be > 0 and finite, got -1"),
        ({"prox": -0.1}, "prox must be >= 0 and finite, got -0.1"),
    ],
)
def test_a_config_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
