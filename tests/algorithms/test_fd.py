"""Federated distillation in NumPy, and what it asks of data and models."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from tests.algorithms.distillation_rounds import (
    COMMON,
    DISTIL_LR,
    N_PUBLIC,
    PUBLIC,
    X_PUBLIC,
    K,
    clients,
    learn,
    says,
)
from tests.algorithms.softmax_rounds import (
    COHORTS,
    EVERYONE,
    MODEL_BYTES,
    PARAMS,
    START,
    assert_close,
    broken,
    rounds,
)
from tests.reference import softmax_loss

from fedjax_core.algorithms import fd
from fedjax_core.types import Stateful


def make(**config: Any):
    config = {"num_public": N_PUBLIC, **COMMON, **config}
    sgd = optax.sgd(DISTIL_LR)
    return fd.make(fd.Config(**config), softmax_loss, distil_optimizer=sgd)


def most_uncertain(params, n):
    """The inputs with the largest entropy of what the model says."""
    p = says(params)
    return np.argsort((p * np.log(p)).sum(1), kind="stable")[:n]


@pytest.mark.parametrize(
    ("distil_on", "start", "cohorts"),
    [("clients", "initial", COHORTS), ("server", "previous", [EVERYONE] * 3)],
)
def test_rounds_match_the_paper(distil_on, start, cohorts):
    algorithm, expected = make(distil_on=distil_on, start=start), START
    steps = rounds(algorithm, cohorts, public=PUBLIC)
    for t, (state, metrics, cohort) in enumerate(steps):
        local = clients(expected, cohort)
        labels = np.mean([says(p) for p in local.values()], 0)
        expected = learn(START if start == "initial" else expected, labels)
        assert_close(state.params, expected)
        size = 4 * N_PUBLIC * K
        assert metrics["uplink_bytes"] == size * len(local)
        if distil_on == "server":
            assert metrics["downlink_bytes"] == MODEL_BYTES * len(local)
        else:
            assert metrics["downlink_bytes"] == (t > 0) * size * len(local)


def test_inputs_are_selected_by_the_model_before():
    algorithm, expected = make(num_public=5, select="entropy"), START
    for state, metrics, cohort in rounds(algorithm, COHORTS[:3], public=PUBLIC):
        x = X_PUBLIC[most_uncertain(expected, 5)]
        local = clients(expected, cohort)
        labels = np.mean([says(p, x) for p in local.values()], 0)
        expected = learn(START, labels, x)
        assert_close(state.params, expected)
        assert metrics["uplink_bytes"] == 4 * 5 * K * len(local)


def test_a_broken_client_has_no_say():
    algorithm = make(charge_first_download=True)
    got, metrics, _ = next(rounds(algorithm, [[2, 0, 5]], broken(2), public=PUBLIC))
    expected, _, _ = next(rounds(algorithm, [[3, 0, 5]], public=PUBLIC))
    assert_close(got.params, expected.params)
    assert metrics["excluded_clients"] == 1
    # Whoever was sent the labels has received them.
    assert metrics["downlink_bytes"] == 3 * 4 * N_PUBLIC * K


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"data must have 12 public inputs, .* got 0"):
        next(rounds(make(), COHORTS))
    short = {"x": PUBLIC["x"][:5]}
    with pytest.raises(ValueError, match=r"data must have 12 public inputs, .* got 5"):
        next(rounds(make(), COHORTS, public=short))

    def loss(params, batch, key):
        return softmax_loss(params.params, batch, key), params.stats

    algorithm = fd.make(fd.Config(num_public=N_PUBLIC, **COMMON), loss)
    params = Stateful(PARAMS, jax.numpy.zeros(2))
    with pytest.raises(ValueError, match="logits must be given for a model with runn"):
        next(rounds(algorithm, COHORTS, public=PUBLIC, params=params))
    with pytest.raises(TypeError, match=r"logits must be a function, as .* got 3"):
        fd.make(fd.Config(), loss, logits=3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_public", 0, "num_public must be >= 1, got 0"),
        ("distil_lr", -1.0, "distil_lr must be > 0 and finite, got -1.0"),
        ("distil_on", "phone", "distil_on must be one of 'clients', 'server', got"),
        ("start", "anew", "start must be one of 'previous', 'initial', got 'anew'"),
        ("select", "best", "select must be one of 'first', 'random', .* got 'best'"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        make(**{field: value})
