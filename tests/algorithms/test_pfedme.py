"""pFedMe against the paper in NumPy, closed forms of proximal points, its limits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
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
    last,
    own_model,
    rounds,
)
from tests.reference import softmax_gradient, softmax_loss, visits

from fedjax_core import LocalWork, Packed, plan_round
from fedjax_core.algorithms import fedavg, pfedme

CONFIG = pfedme.Config(
    client_lr=0.1, personal_lr=0.2, personal_steps=3, prox=2.0, server_lr=1.5,
    work=LocalWork(batch_size=3, epochs=2),
)  # fmt: skip


def client(start, batches, config):
    """Local model and personal model after a client's round."""
    w, theta = start, start
    for batch in batches:
        for _ in range(config.personal_steps):
            _, g = softmax_gradient(theta, X[batch], Y[batch])
            theta = {
                k: theta[k]
                - config.personal_lr * (g[k] + config.prox * (theta[k] - w[k]))
                for k in w
            }
        rate = config.client_lr * config.prox
        w = {k: w[k] - rate * (w[k] - theta[k]) for k in w}
    return w, theta


def test_rounds_match_the_paper():
    algorithm = pfedme.make(CONFIG, softmax_loss)
    w, own = START, [START] * N
    state: Any = None
    for state, metrics, cohort in rounds(algorithm):
        orders, sent = visits(cohort), []
        for i, batches in orders.items():
            local, own[i] = client(w, batches, CONFIG)
            sent.append(local)
        mean = average(sent, [1] * len(sent))
        w = {k: (1 - 1.5) * w[k] + 1.5 * mean[k] for k in w}
        assert_close(state.params, w)
        assert metrics["uplink_bytes"] == 4 * 12 * len(orders)
        assert 0 < metrics["train_loss"] < 10
    # Clients 3, without examples, and 6 never took part, and use the server's model.
    own[3] = own[6] = w
    assert_own_losses(algorithm, state, own)


def test_proximal_points_of_quadratics_are_exact():
    # (theta - x)^2 / 2 + prox / 2 (theta - w)^2 is least at (x + prox w) / (1 + prox).
    def loss(params, batch, key):
        del key
        return jnp.square(params - batch["x"]) / 2

    x, w, own = np.array([1.0, 5.0]), 2.0, np.zeros(2)
    train = Packed({"x": x.astype(np.float32)}, np.arange(3))
    config = pfedme.Config(
        client_lr=0.1, personal_lr=0.25, personal_steps=80, prox=3.0,
        server_lr=0.5, work=LocalWork(batch_size=1, epochs=4),
    )  # fmt: skip
    algorithm = pfedme.make(config, loss)
    state = algorithm.init(jnp.float32(w), 2)
    for t in range(3):
        cohort = plan_round([0, 1], train, config.work, seed=0, round=t)
        state, _ = algorithm.round(state, cohort, jax.random.key(0))
        local = np.full(2, w)
        for _ in range(4):
            own = (x + 3 * local) / 4
            local = local - 0.3 * (local - own)
        w = w + 0.5 * (local.mean() - w)
        np.testing.assert_allclose(state.params, w, rtol=1e-5)
        np.testing.assert_allclose(state.clients[0].own, own, rtol=1e-5)


def test_a_strong_pull_keeps_personal_models_where_local_ones_are():
    config = pfedme.Config(prox=1e4, personal_lr=1e-4, client_lr=1e-4)
    algorithm = pfedme.make(config, softmax_loss)
    state = last(algorithm, [[0, 2]])
    for k in START:
        np.testing.assert_allclose(
            own_model(algorithm, state, 2)[k], START[k], atol=1e-3
        )


def test_one_step_of_the_solver_on_one_batch_is_fedavg():
    # theta = w - gradient / prox, so that w moves by client_lr * gradient.
    work = LocalWork(batch_size=9)
    config = pfedme.Config(
        client_lr=0.2, personal_lr=0.5, personal_steps=1, prox=2.0, work=work
    )
    same = fedavg.Config(client_lr=0.2, weights="uniform", work=work)
    got, expected = (
        last(algorithm)
        for algorithm in (
            pfedme.make(config, softmax_loss),
            fedavg.make(same, softmax_loss),
        )
    )
    assert_close(got.params, expected.params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client_lr": 0}, "client_lr must be > 0 and finite, got 0"),
        ({"personal_lr": -1}, "personal_lr must be > 0 and finite, got -1"),
        ({"prox": 0}, "prox must be > 0 and finite, got 0"),
        ({"server_lr": 0}, "server_lr must be > 0 and finite, got 0"),
        ({"personal_steps": 0}, "personal_steps must be >= 1, got 0"),
    ],
)
def test_a_config_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
