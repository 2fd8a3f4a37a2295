"""MimeLite against the paper in NumPy, and where it is a centralised optimiser."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tests.algorithms.softmax_rounds import (
    EVERYONE,
    MODEL_BYTES,
    PARAMS,
    SIZES,
    START,
    ZEROS,
    X,
    Y,
    assert_close,
    combined,
    last,
    moved,
    own_rows,
    rounds,
    shares,
    with_and_without,
)
from tests.reference import softmax_gradient, softmax_loss, visits

from fedjax_core import LocalWork
from fedjax_core.algorithms import fedavg, mimelite

WORK = LocalWork(batch_size=3, epochs=2)


def full_gradients(params, ids):
    return {i: softmax_gradient(params, X[own_rows(i)], Y[own_rows(i)])[1] for i in ids}


@pytest.mark.parametrize(
    ("beta1", "beta2"), [(0.9, None), (0.9, 0.8), (0.0, 0.8)],
    ids=["momentum", "adam", "rmsprop"],
)  # fmt: skip
def test_rounds_match_the_paper(beta1, beta2):
    config = mimelite.Config(
        client_lr=0.05, server_lr=0.7, beta1=beta1, beta2=beta2, tau=0.3, work=WORK
    )
    x, m = START, ZEROS
    v = {name: np.full_like(p, 0.09) for name, p in START.items()}

    def scale(v):
        return 1.0 if beta2 is None else np.sqrt(v) + 0.3

    for state, metrics, cohort in rounds(mimelite.make(config, softmax_loss)):
        moves, orders = {}, visits(cohort)
        for i, batches in orders.items():
            y = x
            for batch in batches:
                _, g = softmax_gradient(y, X[batch], Y[batch])
                y = {
                    k: y[k] - 0.05 * ((1 - beta1) * g[k] + beta1 * m[k]) / scale(v[k])
                    for k in y
                }
            moves[i] = {k: y[k] - x[k] for k in y}
        uniform = shares(moves, "uniform")
        g = combined(uniform, full_gradients(x, moves))
        x = moved(x, combined(uniform, moves), 0.7)
        m = {k: beta1 * m[k] + (1 - beta1) * g[k] for k in m}
        assert_close(state.params, x, rtol=1e-4)
        assert_close(state.statistics[0], m)
        if beta2 is not None:
            v = {k: beta2 * v[k] + (1 - beta2) * g[k] ** 2 for k in v}
            assert_close(state.statistics[1], v)
        # Delta and gradient up; model and statistics down, once.
        clients, down = len(moves), 2 if beta2 is None else 3
        assert metrics["uplink_bytes"] == 2 * MODEL_BYTES * clients
        assert metrics["downlink_bytes"] == down * MODEL_BYTES * clients
        first_epoch = sum(-(-SIZES[i] // 3) for i in moves)
        assert metrics["local_steps"] == 3 * first_epoch


def test_one_full_step_of_everyone_is_sgd_with_momentum():
    # The mean of the clients' steps is along the new mean of gradients.
    config = mimelite.Config(client_lr=0.5, work=LocalWork(batch_size=16))
    x, m = START, ZEROS
    algorithm = mimelite.make(config, softmax_loss)
    for state, _, _ in rounds(algorithm, [EVERYONE] * 6):
        g = combined(shares(EVERYONE, "uniform"), full_gradients(x, EVERYONE))
        m = {k: 0.9 * m[k] + 0.1 * g[k] for k in m}
        x = moved(x, m, -0.5)
        assert_close(state.params, x)


def test_without_statistics_it_is_fedavg():
    work = LocalWork(batch_size=4, epochs=2)
    got = mimelite.make(mimelite.Config(beta1=0.0, work=work), softmax_loss)
    same = fedavg.make(fedavg.Config(work=work, weights="uniform"), softmax_loss)
    assert_close(last(got).params, last(same).params, rtol=1e-6)


def test_statistics_are_kept_in_float32():
    algorithm = mimelite.make(mimelite.Config(beta2=0.99), softmax_loss)
    halves = {name: jnp.asarray(p, jnp.bfloat16) for name, p in PARAMS.items()}
    mean, square = algorithm.init(halves, 3).statistics
    assert mean["w"].dtype == square["w"].dtype == jnp.float32


def test_an_excluded_client_gives_neither_delta_nor_gradient():
    algorithm = mimelite.make(mimelite.Config(work=WORK), softmax_loss)
    (got, metrics), (others, _) = with_and_without(algorithm)
    assert metrics["excluded_clients"] == 1
    assert metrics["valid_clients"] == 2
    assert_close(got.params, others.params)
    assert_close(got.statistics[0], others.statistics[0])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("beta1", 1.0, r"beta1 must be in \[0, 1\), got 1.0"),
        ("beta2", 1.5, r"beta2 must be in \[0, 1\), got 1.5"),
        ("tau", 0.0, r"tau must be > 0 and finite, got 0.0"),
        ("work", LocalWork(steps=3), r"work must count epochs .* steps=3"),
        ("work", LocalWork(drop_remainder=True), r"keep their short batches"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(mimelite.Config(), **{field: value})
