"""FedDF in NumPy, and FedAvg where nothing is distilled."""

from typing import Any

import numpy as np
import optax
import pytest
from tests.algorithms.distillation_rounds import (
    COMMON,
    DISTIL_LR,
    PUBLIC,
    clients,
    learn,
    logits,
    says,
    softmax,
)
from tests.algorithms.softmax_rounds import (
    COHORTS,
    MODEL_BYTES,
    START,
    assert_close,
    combined,
    rounds,
    shares,
)
from tests.reference import softmax_loss

from fedjax_core import LocalWork
from fedjax_core.algorithms import fedavg, feddf

SGD = optax.sgd(DISTIL_LR)


def make(distil_optimizer: Any = SGD, **config: Any):
    full = feddf.Config(**COMMON | config)
    return feddf.make(full, softmax_loss, distil_optimizer=distil_optimizer)


def test_rounds_match_the_paper():
    expected = START
    for state, metrics, cohort in rounds(make(), COHORTS, public=PUBLIC):
        local = clients(expected, cohort)
        center = combined(shares(local), local)
        # Logits are averaged: probabilities would teach something else.
        labels = softmax(np.mean([logits(p) for p in local.values()], 0))
        assert np.abs(labels - np.mean([says(p) for p in local.values()], 0)).max() > 0
        expected = learn(center, labels)
        assert_close(state.params, expected)
        sent = MODEL_BYTES * len(local)
        assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == sent


def test_without_distillation_it_is_fedavg():
    none = make(optax.set_to_zero(), weights="uniform")
    config = fedavg.Config(
        client_lr=0.3, work=LocalWork(batch_size=4), weights="uniform"
    )
    average = fedavg.make(config, softmax_loss)
    for (a, m, _), (b, n, _) in zip(
        rounds(none, COHORTS[:2], public=PUBLIC),
        rounds(average, COHORTS[:2]),
        strict=True,
    ):
        assert_close(a.params, b.params, rtol=1e-6, atol=1e-7)
        assert m["uplink_bytes"] == n["uplink_bytes"]
        assert m["downlink_bytes"] == n["downlink_bytes"]


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"data must have 1 public inputs, .* got 0"):
        next(rounds(make(), COHORTS))
    with pytest.raises(ValueError, match="weights must be one of 'examples', 'unif"):
        make(weights="size")
