"""APFL against the paper in NumPy, with fixed and with adaptive weights."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.algorithms.personal_rounds import (
    START,
    N,
    X,
    Y,
    assert_close,
    assert_own_losses,
    average,
    own_model,
    rounds,
)
from tests.reference import local_sgd, softmax_gradient, softmax_loss, visits

from fedjax_core import LocalWork
from fedjax_core.algorithms import apfl, fedavg

WORK = LocalWork(batch_size=3, epochs=2)
CONFIG = apfl.Config(client_lr=0.3, alpha=0.3, work=WORK)


def mix(alpha, v, w):
    return {k: alpha * v[k] + (1 - alpha) * w[k] for k in v}


def client(w, v, alpha, batches, lr, adaptive):
    """A client's steps; all of a step is taken from where the last one ended."""
    for t, batch in enumerate(batches):
        _, at_w = softmax_gradient(w, X[batch], Y[batch])
        _, at_mix = softmax_gradient(mix(alpha, v, w), X[batch], Y[batch])
        slope = sum(np.sum((v[k] - w[k]) * at_mix[k]) for k in v)
        w, v = (
            {k: w[k] - lr * at_w[k] for k in w},
            {k: v[k] - lr * alpha * at_mix[k] for k in v},
        )
        if adaptive and t == 0:
            alpha = np.clip(alpha - lr * slope, 0, 1)
    return w, v, alpha


@pytest.mark.parametrize("lr", [0.3, 3.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_rounds_match_the_paper(adaptive, lr):
    config = dataclasses.replace(CONFIG, adaptive=adaptive, client_lr=lr)
    algorithm = apfl.make(config, softmax_loss)
    w, own, alphas = START, [START] * N, [0.3] * N
    state: Any = None
    for state, metrics, cohort in rounds(algorithm, [[2, 0, 5, 7]] * 4):
        orders, sent = visits(cohort), []
        for i, batches in orders.items():
            local, own[i], alphas[i] = client(
                w, own[i], alphas[i], batches, lr, adaptive
            )
            sent.append(local)
        w = average(sent, [1] * len(sent))
        assert_close(state.params, w, rtol=1e-4)
        assert metrics["uplink_bytes"] == 4 * 12 * len(orders)
        if adaptive:
            got = state.clients[0].own["alpha"]
            np.testing.assert_allclose(got, alphas, rtol=1e-3, atol=1e-5)
    mixed = {i: mix(alphas[i], own[i], w) for i in (2, 0, 5, 7)}
    # Others never took part, and use the server's model.
    assert_own_losses(algorithm, state, [mixed.get(i, w) for i in range(N)])
    if adaptive:
        spread = np.array(alphas)[list(mixed)]
        assert np.unique(spread).size > 1
        assert (lr < 1) == bool(np.all((spread > 0) & (spread < 1))), "clipping is seen"


def test_weight_0_is_fedavg():
    algorithm = apfl.make(dataclasses.replace(CONFIG, alpha=0), softmax_loss)
    same = fedavg.Config(client_lr=0.3, work=WORK, weights="uniform")
    for (a, _, _), (b, _, _) in zip(
        rounds(algorithm), rounds(fedavg.make(same, softmax_loss)), strict=True
    ):
        assert_close(a.params, b.params, rtol=1e-6)
        assert_close(own_model(algorithm, a, 2), b.params, rtol=1e-6)
        assert_close({k: v[2] for k, v in a.clients[0].own["v"].items()}, START)


def test_weight_1_trains_clients_alone():
    algorithm = apfl.make(dataclasses.replace(CONFIG, alpha=1), softmax_loss)
    models = [START] * N
    for state, _, cohort in rounds(algorithm):
        for i, batches in visits(cohort).items():
            models[i], _ = local_sgd(models[i], X, Y, batches, 0.3)
            assert_close(own_model(algorithm, state, i), models[i])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client_lr": 0}, "client_lr must be > 0 and finite, got 0"),
        ({"alpha": 1.1}, r"alpha must be in \[0, 1\], got 1.1"),
    ],
)
def test_a_config_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
