"""Mean logits of labels in NumPy, and local training without the regulariser."""

import numpy as np
import pytest
from tests.algorithms.distillation_rounds import K, logits, says, softmax
from tests.algorithms.softmax_rounds import (
    COHORTS,
    START,
    N,
    X,
    Y,
    assert_close,
    rounds,
)
from tests.reference import softmax_gradient, softmax_loss, visits

from fedjax_core import LocalWork
from fedjax_core.algorithms import label_logits


def log_p(params, x):
    z = logits(params, x)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def train(params, batches, targets, gamma, lr=0.3):
    """Local steps towards own labels and the mean logits of those that are known."""
    total, count = np.zeros((K, K)), np.zeros((K, 1))
    for batch in batches:
        x, y = X[batch], Y[batch]
        np.add.at(total, y, log_p(params, x))
        np.add.at(count, y, 1)
        _, gradient = softmax_gradient(params, x, y)
        known = np.array([targets.get(k) is not None for k in y])
        labels = softmax(np.array([targets.get(k, np.zeros(K)) for k in y]))
        error = gamma * known[:, None] * (says(params, x) - labels) / len(y)
        gradient = {"w": gradient["w"] + x.T @ error, "b": gradient["b"] + error.sum(0)}
        params = {name: params[name] - lr * gradient[name] for name in params}
    return params, {k: total[k] / count[k] for k in range(K) if count[k] > 0}


@pytest.mark.parametrize("gamma", [0.7])
def test_rounds_match_the_paper(gamma):
    config = label_logits.Config(
        num_classes=K, client_lr=0.3, gamma=gamma, work=LocalWork(batch_size=4)
    )
    models, targets = [START] * N, {}
    algorithm = label_logits.make(config, softmax_loss)
    # The first cohort is one client with a single example, and so with a single label.
    cohorts = [[1], *COHORTS[:3]]
    for t, (state, metrics, cohort) in enumerate(rounds(algorithm, cohorts)):
        sent = []
        for i, batches in visits(cohort).items():
            models[i], means = train(models[i], batches, targets, gamma)
            sent.append(means)
        for k in range(K):
            held = [means[k] for means in sent if k in means]
            if held:
                targets[k] = np.mean(held, 0)
        np.testing.assert_array_equal(
            np.flatnonzero(state.known), sorted(targets), "labels that somebody held"
        )
        for k in targets:
            np.testing.assert_allclose(state.logits[k], targets[k], rtol=1e-4)
        for i, model in enumerate(models):
            assert_close({name: x[i] for name, x in state.clients.items()}, model)
        # Means, and which of them there are: a number and a flag each way.
        assert metrics["uplink_bytes"] == len(sent) * 4 * (K * K + K)
        assert metrics["downlink_bytes"] == (t > 0) * len(sent) * (4 * K * K + K)


def test_a_config_names_what_is_wrong():
    with pytest.raises(ValueError, match="gamma must be >= 0 and finite, got -1"):
        label_logits.Config(gamma=-1)
