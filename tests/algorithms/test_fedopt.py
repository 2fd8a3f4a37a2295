"""Server optimisers against Algorithm 2 of Reddi et al. in NumPy."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.algorithms.softmax_rounds import (
    START,
    ZEROS,
    assert_close,
    combined,
    deltas,
    last,
    moved,
    rounds,
    shares,
)
from tests.reference import softmax_loss

from fedjax_core import LocalWork
from fedjax_core.algorithms import fedavg, fedopt

WORK = LocalWork(batch_size=4)


def squares(rule, v, d, beta2):
    if rule == "adagrad":
        return v + d**2
    if rule == "adam":
        return beta2 * v + (1 - beta2) * d**2
    return v - (1 - beta2) * d**2 * np.sign(v - d**2)


@pytest.mark.parametrize(
    ("rule", "beta1"),
    [("adagrad", 0.0), ("adagrad", 0.5), ("adam", 0.9), ("yogi", 0.9)],
)
def test_rounds_match_the_paper(rule, beta1):
    # With a large tau the sign of Yogi is met both ways.
    config = fedopt.Config(
        rule=rule, client_lr=0.3, server_lr=0.5, beta1=beta1, beta2=0.8, tau=0.1,
        work=WORK,
    )  # fmt: skip
    algorithm = fedopt.make(config, softmax_loss)
    assert algorithm.name == f"fed{rule}"
    params, m = START, ZEROS
    v = {name: np.full_like(p, 0.01) for name, p in START.items()}
    signs = set()
    for state, _, cohort in rounds(algorithm):
        moves = deltas(params, cohort, 0.3)
        delta = combined(shares(moves), moves)
        for name, d in delta.items():
            signs |= set(np.sign(v[name] - d**2).ravel())
        m = {k: beta1 * m[k] + (1 - beta1) * delta[k] for k in m}
        v = {k: squares(rule, v[k], delta[k], 0.8) for k in v}
        params = {k: p + 0.5 * m[k] / (np.sqrt(v[k]) + 0.1) for k, p in params.items()}
        assert_close(state.params, params)
    assert signs == {-1.0, 1.0}


def test_fedavgm_accumulates_deltas():
    config = fedopt.Config(
        rule="avgm", client_lr=0.3, server_lr=0.5, beta1=0.7, work=WORK
    )
    algorithm = fedopt.make(config, softmax_loss)
    assert algorithm.name == "fedavgm"
    params, m = START, ZEROS
    for state, _, cohort in rounds(algorithm):
        moves = deltas(params, cohort, 0.3)
        delta = combined(shares(moves), moves)
        m = {name: 0.7 * m[name] + delta[name] for name in m}
        params = moved(params, m, 0.5)
        assert_close(state.params, params)


def test_without_decay_fedavgm_is_fedavg():
    config = fedopt.Config(rule="avgm", server_lr=0.5, beta1=0.0, work=WORK)
    same = fedavg.Config(server_lr=0.5, work=WORK)
    got, expected = fedopt.make(config, softmax_loss), fedavg.make(same, softmax_loss)
    assert_close(last(got).params, last(expected).params, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_squares_start_at_tau_squared_and_no_bias_is_corrected(rule):
    config = fedopt.Config(rule=rule, server_lr=0.5, beta1=0.9, beta2=0.8, tau=2.0)
    optimizer = fedopt.server_optimizer(config)
    delta = jnp.array([3.0, 0.0])
    step: Any = optimizer.update(-delta, optimizer.init(delta))[0]
    v = {"adagrad": 4 + 9, "adam": 0.8 * 4 + 0.2 * 9, "yogi": 4 + 0.2 * 9}[rule]
    expected = [0.5 * 0.1 * 3 / (np.sqrt(v) + 2), 0]
    np.testing.assert_allclose(step, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rule", "sgd", "rule must be one of 'avgm', 'adagrad', 'adam', 'yogi'"),
        ("beta1", 1.0, r"beta1 must be in \[0, 1\), got 1.0"),
        ("beta2", -0.1, r"beta2 must be in \[0, 1\), got -0.1"),
        ("tau", 0.0, "tau must be > 0 and finite, got 0.0"),
        ("client_lr", 0.0, "client_lr must be > 0 and finite, got 0.0"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(fedopt.Config(), **{field: value})
