"""FedBE in NumPy, and FedAvg where clients agree."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from tests.algorithms.distillation_rounds import (
    COMMON,
    DISTIL_LR,
    PUBLIC,
    clients,
    learn,
    says,
)
from tests.algorithms.softmax_rounds import (
    COHORTS,
    KEY,
    MODEL_BYTES,
    START,
    assert_close,
    combined,
    rounds,
    shares,
)
from tests.reference import softmax_loss

from fedjax_core import random
from fedjax_core.algorithms import fedbe


def make(**config: Any):
    full = fedbe.Config(**COMMON | config)
    sgd = optax.sgd(DISTIL_LR)
    return fedbe.make(full, softmax_loss, distil_optimizer=sgd)


def test_rounds_match_the_paper():
    models, expected = 4, START
    algorithm = make(num_models=models, average=2)
    for state, metrics, cohort in rounds(algorithm, COHORTS, public=PUBLIC):
        local = clients(expected, cohort)
        weights = shares(local)
        center = combined(weights, local)
        spread = {
            name: np.sqrt(
                sum(weights[i] * (local[i][name] - center[name]) ** 2 for i in local)
            )
            for name in START
        }
        labels = 0.0
        # The draws alone are the package's: leaf by leaf, b before w.
        for key in jax.random.split(random.stream(KEY, "teacher"), models):
            draws = zip(sorted(START), jax.random.split(key, 2), strict=True)
            z = {n: np.float64(jax.random.normal(k, START[n].shape)) for n, k in draws}
            labels += says({n: center[n] + spread[n] * z[n] for n in START}) / models
        # The mean over the last two of three steps.
        steps = [learn(center, labels, steps=k) for k in (2, 3)]
        expected = {name: (steps[0][name] + steps[1][name]) / 2 for name in START}
        assert_close(state.params, expected, rtol=1e-4, atol=1e-5)
        sent = MODEL_BYTES * len(local)
        assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == sent


def test_a_config_names_what_is_wrong():
    with pytest.raises(ValueError, match="num_models must be >= 1, got 0"):
        fedbe.Config(num_models=0)
