"""signSGD against the vote of float64 gradients, and the bits of missed votes."""

import math

import numpy as np
import pytest
from tests.algorithms.softmax_rounds import COHORTS, START, N, X, Y, rounds
from tests.reference import softmax_gradient, softmax_loss, visits

from fedjax_core import LocalWork
from fedjax_core.algorithms import signsgd


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_rounds_match_the_paper(momentum):
    work = LocalWork(batch_size=4, steps=1)
    config = signsgd.Config(step_size=0.05, momentum=momentum, tau_max=2, work=work)
    params = dict(START)
    zeros = {name: np.zeros_like(p) for name, p in START.items()}
    velocity, synced = [dict(zeros) for _ in range(N)], np.zeros(N, int)
    cohorts = [*COHORTS, [0, 7, 4, 1], [2, 5, 6, 0]]
    algorithm = signsgd.make(config, softmax_loss)
    for t, (state, metrics, cohort) in enumerate(rounds(algorithm, cohorts)):
        votes, down = dict(zeros), 0
        for i, (batch,) in visits(cohort).items():
            _, gradient = softmax_gradient(params, X[batch], Y[batch])
            for name, g in gradient.items():
                velocity[i][name] = (momentum or 0) * velocity[i][name] + g
                votes[name] = votes[name] + np.sign(velocity[i][name])
            missed, synced[i] = t - synced[i], t
            size = 32 * 12 if missed > 2 else math.ceil(12 * math.log2(2 * missed + 1))
            down += size
        params = {name: p - 0.05 * np.sign(votes[name]) for name, p in params.items()}
        for name, p in params.items():
            np.testing.assert_allclose(state.params[name], p, rtol=1e-5, atol=1e-6)
        assert metrics["uplink_bytes"] == len(visits(cohort)) * 12 / 8
        assert metrics["downlink_bytes"] == down / 8


def test_configs_that_make_no_sense_are_refused():
    for how, rule in [
        ({"step_size": 0.0}, "step_size must be > 0"),
        ({"tau_max": 0}, "tau_max must be >= 1"),
        ({"momentum": -0.1}, "momentum must be in"),
    ]:
        with pytest.raises(ValueError, match=rule):
            signsgd.Config(**how)
