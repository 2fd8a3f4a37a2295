"""FedMD and its kin in NumPy, with a model for every client."""

from typing import Any

import numpy as np
import optax
import pytest
from tests.algorithms.distillation_rounds import (
    COMMON,
    DISTIL_LR,
    N_PUBLIC,
    PUBLIC,
    RNG,
    X_PUBLIC,
    K,
    learn,
    logits,
    says,
    softmax,
)
from tests.algorithms.softmax_rounds import (
    COHORTS,
    START,
    N,
    X,
    Y,
    assert_close,
    rounds,
)
from tests.reference import local_sgd, softmax_gradient, softmax_loss, visits

from fedjax_core.algorithms import fedmd

OWN = RNG.integers(0, K, N_PUBLIC).astype(np.int32)
WITH_LABELS = PUBLIC | {"y": OWN}


def make(**config: Any):
    full = fedmd.Config(**{"num_public": N_PUBLIC, **COMMON, **config})
    return fedmd.make(full, softmax_loss, distil_optimizer=optax.sgd(DISTIL_LR))


def assert_rows(state, models):
    for i, model in enumerate(models):
        assert_close({name: x[i] for name, x in state.clients.items()}, model)


@pytest.mark.parametrize("pretrain", [True, False])
def test_rounds_match_the_paper(pretrain):
    average = "logits" if pretrain else "probabilities"
    algorithm = make(pretrain=pretrain, average=average)
    models, labels = [START] * N, np.eye(K)[OWN] if pretrain else None
    steps = rounds(algorithm, COHORTS, public=WITH_LABELS)
    for t, (state, metrics, cohort) in enumerate(steps):
        said = []
        for i, batches in visits(cohort).items():
            if labels is not None:
                models[i] = learn(models[i], labels)
            models[i], _ = local_sgd(models[i], X, Y, batches, 0.3)
            said.append(logits(models[i]) if pretrain else says(models[i]))
        labels = softmax(np.mean(said, 0)) if pretrain else np.mean(said, 0)
        np.testing.assert_allclose(state.labels, labels, rtol=1e-4, atol=1e-5)
        assert_rows(state, models)
        assert_close(state.params, START)
        size = 4 * N_PUBLIC * K * len(said)
        assert metrics["uplink_bytes"] == size
        assert metrics["downlink_bytes"] == (t > 0) * size


def test_joint_steps_see_a_batch_of_each():
    # One public input: whatever is drawn of it, it is that.
    x, models, labels = X_PUBLIC[:1], [START] * N, None
    config = {"num_public": 1, "average": "probabilities", "joint": True}
    public = {"x": PUBLIC["x"][:1]}
    for state, _, cohort in rounds(make(**config), COHORTS[:3], public=public):
        said = []
        for i, batches in visits(cohort).items():
            params = models[i]
            for batch in batches:
                _, gradient = softmax_gradient(params, X[batch], Y[batch])
                if labels is not None:
                    error = says(params, x) - labels
                    beside = {"w": x.T @ error, "b": error.sum(0)}
                    gradient = {k: gradient[k] + beside[k] for k in gradient}
                params = {k: params[k] - 0.3 * gradient[k] for k in params}
            models[i] = params
            said.append(says(params, x))
        labels = np.mean(said, 0)
        np.testing.assert_allclose(state.labels, labels, rtol=1e-4, atol=1e-5)
        assert_rows(state, models)


def test_a_config_names_what_is_wrong():
    with pytest.raises(ValueError, match="average must be one of 'logits', 'probab"):
        make(average="votes")
    with pytest.raises(ValueError, match="data must have 99 public inputs"):
        next(rounds(make(num_public=99), COHORTS, public=PUBLIC))
