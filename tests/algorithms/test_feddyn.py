"""FedDyn against Algorithm 1 of Acar et al. in NumPy, and what its states must be."""

import dataclasses

import numpy as np
import pytest
from tests.algorithms.softmax_rounds import (
    EVERYONE,
    MODEL_BYTES,
    START,
    TRAIN,
    ZEROS,
    N,
    X,
    Y,
    assert_close,
    deltas,
    moved,
    own_rows,
    rounds,
    with_and_without,
)
from tests.reference import softmax_gradient, softmax_loss

from fedjax_core import LocalWork
from fedjax_core.algorithms import feddyn


def linear(gradient):
    """The gradient of the linear term of a client's problem."""
    return {name: -h for name, h in gradient.items()}


def row(state, i):
    return {name: np.asarray(h[i]) for name, h in state.clients[0].items()}


@pytest.mark.parametrize(
    "config",
    [
        feddyn.Config(client_lr=0.3, alpha=0.5, work=LocalWork(batch_size=4)),
        feddyn.Config(client_lr=0.1, alpha=2.0, work=LocalWork(batch_size=2, steps=5)),
    ],
    ids=["epoch", "steps"],
)
def test_rounds_match_the_paper(config):
    # With theta_k and h as they stand in the paper. Cohorts overlap and differ.
    params, h, gradients = START, ZEROS, [ZEROS] * N
    alpha = config.alpha
    for state, metrics, cohort in rounds(feddyn.make(config, softmax_loss)):
        models = {}
        for i in deltas(params, cohort, config.client_lr):
            move = deltas(
                params, cohort, config.client_lr,
                proximal=alpha, correction=linear(gradients[i]),
            )[i]  # fmt: skip
            models[i] = moved(params, move)
            gradients[i] = moved(gradients[i], move, -alpha)
        for name in START:
            apart = np.sum([m[name] - params[name] for m in models.values()], axis=0)
            h = h | {name: h[name] - alpha / N * apart}
        params = {
            name: np.mean([m[name] for m in models.values()], axis=0) - h[name] / alpha
            for name in START
        }
        assert_close(state.params, params)
        assert_close(state.gradient, h)
        for i in range(N):
            assert_close(row(state, i), gradients[i])
        sent = MODEL_BYTES * len(models)
        assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == sent


def test_states_are_gradients_at_the_optima_of_the_clients_problems():
    # (4) of the paper: solved exactly, each new h_i is the gradient of F_i at theta_i.
    # And the server's is their mean over all N, of whom client 3 has no example.
    config = feddyn.Config(
        client_lr=0.5, alpha=1.0, work=LocalWork(batch_size=16, epochs=60)
    )
    runs = rounds(feddyn.make(config, softmax_loss), [[2, 0, 5], [7, 2]])
    first, _, _ = next(runs)
    for i in (2, 0, 5):
        # h_i was 0, so that theta_i = w_t - h_i / alpha.
        model = moved(START, row(first, i), -1)
        _, exact = softmax_gradient(model, X[own_rows(i)], Y[own_rows(i)])
        assert_close(row(first, i), exact, rtol=1e-3, atol=1e-4)
    for state in (first, next(runs)[0]):
        mean = {name: h.mean(0) for name, h in state.clients[0].items()}
        assert_close(state.gradient, mean)


def test_drift_vanishes():
    # Clients of one class each pull apart; FedDyn stops where the mean of the losses
    # is stationary, however many local steps they take.
    train = TRAIN.take(EVERYONE)
    config = feddyn.Config(
        client_lr=0.5, alpha=0.5, work=LocalWork(batch_size=16, epochs=20)
    )
    *_, (state, _, _) = rounds(
        feddyn.make(config, softmax_loss), [range(7)] * 300, train
    )
    params = {name: np.asarray(p, np.float64) for name, p in state.params.items()}
    slopes = [
        softmax_gradient(params, X[own_rows(i)], Y[own_rows(i)])[1] for i in EVERYONE
    ]
    for name in START:
        at_clients = [g[name] for g in slopes]
        assert np.abs(np.mean(at_clients, axis=0)).max() < 0.01
        assert np.abs(at_clients).max() > 0.1


def test_an_excluded_client_keeps_its_state_and_is_not_counted():
    config = feddyn.Config(work=LocalWork(batch_size=4))
    algorithm = feddyn.make(config, softmax_loss)
    (got, metrics), (others, _) = with_and_without(algorithm)
    assert metrics["excluded_clients"] == 1
    assert not got.clients[0]["w"][2].any()
    assert_close(got.params, others.params)
    assert_close(got.gradient, others.gradient)


def test_a_config_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"alpha must be > 0 and finite, got 0"):
        dataclasses.replace(feddyn.Config(), alpha=0)
