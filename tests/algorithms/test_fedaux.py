"""FedAUX against the paper in NumPy, and where it is another method."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    COHORTS,
    KEY,
    MODEL_BYTES,
    PARAMS,
    SIZES,
    START,
    TRAIN,
    N,
    assert_close,
    combined,
    deltas,
    moved,
    shares,
)
from tests.reference import softmax_loss

from fedjax_core import LocalWork, plan_round
from fedjax_core.algorithms import fedaux, fedavg

RNG = np.random.default_rng(2)
K, N_PUBLIC = 3, 10
X = RNG.normal(size=(N_PUBLIC, 3)).astype(np.float32)
SCORES = RNG.uniform(0.01, 1, (N, N_PUBLIC)).astype(np.float32)
PROTOTYPE = np.array([0, 0, 1, 1, 0, 1, 0, 1], np.int32)
PUBLIC = {"x": X, "scores": SCORES, "prototype": PROTOTYPE}
CONFIG = fedaux.Config(
    num_classes=K,
    client_lr=0.3,
    work=LocalWork(batch_size=4, epochs=2),
    # One batch, whose order is of no account.
    public_work=LocalWork(batch_size=N_PUBLIC, epochs=3),
)
SGD = optax.sgd(0.5)


def rounds(algorithm, params=PARAMS, cohorts=COHORTS, **public):
    """State, metrics and plan of one round after the other."""
    state, step = algorithm.init(params, N), jax.jit(algorithm.round)
    for t, ids in enumerate(cohorts):
        cohort = plan_round(ids, TRAIN, algorithm.work, seed=3, round=t)
        cohort = dataclasses.replace(cohort, public=PUBLIC | public)
        state, metrics = step(state, cohort, KEY)
        yield state, metrics, cohort


def last(*args, **kwargs):
    *_, (state, _, _) = rounds(*args, **kwargs)
    return state.params


def logits(params):
    return X.astype(np.float64) @ params["w"] + params["b"]


def softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def distilled(params, teacher, lr=0.5, epochs=3):
    """Gradient descent on KL(teacher || student)."""
    for _ in range(epochs):
        error = (softmax(logits(params)) - teacher) / N_PUBLIC
        gradient = {"w": X.T @ error, "b": error.sum(0)}
        params = moved(params, gradient, -lr)
    return params


def federated(models, cohort, scores):
    """A round of Algorithm 15: models by prototype, of which a client has one."""
    of = PROTOTYPE if len(models) > 1 else np.zeros(N, int)
    moves = [deltas(params, cohort, 0.3) for params in models]
    clients = list(moves[0])
    F = {i: logits(moved(models[of[i]], moves[of[i]][i])) for i in clients}
    num = sum(scores[i][:, None] * F[i] for i in clients)
    teacher = softmax(num / sum(scores[i][:, None] for i in clients))
    new = []
    for p, params in enumerate(models):
        own = [i for i in clients if of[i] == p]
        if own:
            params = moved(params, combined(shares(own), {i: moves[p][i] for i in own}))
        new.append(distilled(params, teacher))
    return new


def test_rounds_match_the_paper():
    algorithm = fedaux.make(CONFIG, softmax_loss, distil_optimizer=SGD)
    models = [START]
    for state, metrics, cohort in rounds(algorithm):
        models = federated(models, cohort, SCORES)
        assert_close(state.params, models[0], rtol=1e-4, atol=5e-6)
        there = sum(SIZES[i] > 0 for i in cohort.client_id)
        # Models alone are sent: public data and scores are the server's.
        sent = MODEL_BYTES * there
        assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == sent
        assert 0 < metrics["distil_loss"] < 5


def test_rounds_of_two_prototypes_match_the_paper():
    algorithm = fedaux.make_mixed(
        CONFIG, [softmax_loss, softmax_loss], distil_optimizer=SGD
    )
    other = {name: -p for name, p in PARAMS.items()}
    models = [START, {name: -p for name, p in START.items()}]
    # In the last round nobody has the first prototype.
    for state, metrics, cohort in rounds(
        algorithm, (PARAMS, other), [*COHORTS[:2], [2, 5, 7]]
    ):
        models = federated(models, cohort, SCORES)
        for got, expected in zip(state.params, models, strict=True):
            assert_close(got, expected, rtol=1e-4, atol=5e-6)
        steps = np.asarray(cohort.num_steps)
        assert metrics["local_steps"] == steps.sum()
        assert metrics["valid_clients"] == (steps > 0).sum()
        assert metrics["downlink_bytes"] == MODEL_BYTES * (steps > 0).sum()
        assert 0 < metrics["train_loss"] < 5


def test_one_prototype_is_the_general_code_with_one_group():
    single = last(fedaux.make(CONFIG, softmax_loss))
    twice = fedaux.make_mixed(CONFIG, [softmax_loss] * 2)
    params = last(twice, (PARAMS, PARAMS), prototype=np.zeros(N, np.int32))
    assert_close(params[0], single)
    (alone,) = last(fedaux.make_mixed(CONFIG, [softmax_loss]), (PARAMS,))
    assert_same(alone, single)


def assert_same(a, b):
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_equal_scores_weigh_all_alike_and_their_scale_is_of_no_account():
    algorithm = fedaux.make(CONFIG, softmax_loss)
    expected = last(algorithm, scores=np.ones_like(SCORES))
    assert_close(last(algorithm, scores=np.full_like(SCORES, 0.3)), expected)
    assert_close(last(algorithm, scores=7 * SCORES), last(algorithm))
    assert np.abs(last(algorithm)["w"] - expected["w"]).max() > 1e-5


def test_certainty_of_one_client_alone_is_its_own_model():
    one = np.full_like(SCORES, 1e-30)
    one[5] = 1.0
    algorithm = fedaux.make(CONFIG, softmax_loss, distil_optimizer=SGD)
    ((state, _, cohort),) = rounds(algorithm, cohorts=[[2, 0, 5, 7]], scores=one)
    moves = deltas(START, cohort, 0.3)
    teacher = softmax(logits(moved(START, moves[5])))
    mean = moved(START, combined(shares(moves), moves))
    assert_close(state.params, distilled(mean, teacher), rtol=1e-4, atol=5e-6)


def test_without_distillation_it_is_fedavg():
    still = fedaux.make(CONFIG, softmax_loss, distil_optimizer=optax.sgd(0.0))
    same = fedavg.make(fedavg.Config(client_lr=0.3, work=CONFIG.work), softmax_loss)
    assert_close(last(still), last(same), rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("num_classes", 0, ValueError, "num_classes must be >= 1, got 0"),
        ("distil_lr", 0.0, ValueError, "distil_lr must be > 0"),
        ("public_work", None, TypeError, "public_work must be a LocalWork"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **{field: value})
