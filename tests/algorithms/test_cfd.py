"""CFD in NumPy, with tables of labels on both sides, and where it becomes FD."""

from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from tests.algorithms.distillation_rounds import (
    COMMON,
    DISTIL_LR,
    N_PUBLIC,
    PUBLIC,
    K,
    clients,
    entropy,
    learn,
    says,
)
from tests.algorithms.softmax_rounds import (
    COHORTS,
    KEY,
    PARAMS,
    START,
    TRAIN,
    N,
    assert_close,
    rounds,
)
from tests.reference import softmax_loss

from fedjax_core import LocalWork, plan_round
from fedjax_core.algorithms import cfd, fd

ONE_HOT = np.eye(K)
SGD = optax.sgd(DISTIL_LR)


def make(distil_optimizer: Any = SGD, **config: Any):
    full = cfd.Config(**{"num_public": N_PUBLIC, **COMMON, **config})
    return cfd.make(full, softmax_loss, distil_optimizer=distil_optimizer)


@pytest.mark.parametrize("delta", [True, False])
def test_rounds_of_one_bit_match_the_paper(delta):
    # Clients miss rounds: each has a history of its own, in both directions.
    nothing = np.zeros(N_PUBLIC, int)
    sent, received = {}, {}
    server, student, down, tables = START, START, None, None
    algorithm = make(delta=delta)
    for state, metrics, cohort in rounds(algorithm, COHORTS, public=PUBLIC):
        local = clients(student, cohort)
        votes, up_bits, down_bits = [], 0, 0
        for i, params in local.items():
            label = 1 + says(params).argmax(1)
            history = sent.get(i, nothing) if delta else nothing
            message = np.where(label != history, label, 0)
            up_bits += entropy(message)
            sent[i] = np.where(message > 0, message, history)
            votes.append(ONE_HOT[sent[i] - 1])
            if down is not None:
                history = received.get(i, nothing) if delta else nothing
                message = np.where(down != history, down, 0)
                down_bits += entropy(message)
                received[i] = np.where(message > 0, message, history)
                np.testing.assert_array_equal(received[i], down)
        server = learn(server, np.mean(votes, 0))
        down = 1 + says(server).argmax(1)
        student = learn(START, ONE_HOT[down - 1])
        assert_close(state.params, server)
        assert_close(state.student, student)
        np.testing.assert_array_equal(state.labels, ONE_HOT[down - 1])
        assert metrics["uplink_bytes"] == up_bits / 8
        assert metrics["downlink_bytes"] == down_bits / 8
        tables = state.clients
    if delta:
        table = [np.asarray(x) for x in jax.tree.leaves(tables)]
        assert [x.dtype for x in table] == [np.int8, np.int8]
        for i in sent:
            np.testing.assert_array_equal(table[1][i], sent[i])
            np.testing.assert_array_equal(table[0][i], received.get(i, nothing))


def test_all_bits_without_dual_distillation_are_federated_distillation():
    ours = make(up_bits=32, down_bits=32, start="previous")
    config = fd.Config(num_public=N_PUBLIC, start="previous", **COMMON)
    theirs = fd.make(config, softmax_loss, distil_optimizer=SGD)
    for (a, m, _), (b, n, _) in zip(
        rounds(ours, COHORTS[:2], public=PUBLIC),
        rounds(theirs, COHORTS[:2], public=PUBLIC),
        strict=True,
    ):
        chex.assert_trees_all_close(a.params, b.params, rtol=1e-6, atol=1e-7)
        for name in ("uplink_bytes", "downlink_bytes"):
            assert m[name] == n[name]


def test_a_server_that_learns_exactly_sends_the_labels_of_federated_distillation():
    # Three inputs, which a softmax regression can say anything of.
    public = {"x": np.eye(3, dtype=np.float32)}
    common = COMMON | {"public_work": LocalWork(batch_size=3, epochs=300)}
    state = {}
    for start in ("dual", "initial"):
        config = common | {"num_public": 3, "up_bits": 32, "down_bits": 32}
        algorithm = make(optax.sgd(3.0), start=start, **config)
        state[start], _, _ = next(rounds(algorithm, COHORTS, public=public))
    labels = state["dual"].labels
    np.testing.assert_allclose(labels, state["initial"].labels, atol=1e-4)
    assert_close(state["dual"].student, state["initial"].params, atol=1e-2)


def test_one_bit_makes_votes_and_messages_are_within_their_bounds():
    for bits in (1, 2):
        down = {"down_bits": 32} if bits == 1 else {"charge_first_download": True}
        algorithm = make(up_bits=bits, start="initial", **down)
        cohort = [0, 2, 5]
        # Of rounds in which nobody was the state is that before the first.
        plan = plan_round(cohort, TRAIN, algorithm.work, seed=3, round=1, public=PUBLIC)
        state, metrics = jax.jit(algorithm.round)(algorithm.init(PARAMS, N), plan, KEY)
        np.testing.assert_allclose(state.labels.sum(1), 1, atol=1e-6)
        if bits == 1:
            shares = len(cohort) * np.asarray(state.labels)
            np.testing.assert_allclose(shares, np.round(shares), atol=1e-5)
        vectors = {1: 3, 2: 10}[bits]
        most = len(cohort) * np.ceil(N_PUBLIC * np.log2(vectors)) / 8
        assert 0 < float(metrics["uplink_bytes"]) <= most
        # There is nothing to receive yet, whatever is charged for it.
        charged = len(cohort) * np.ceil(N_PUBLIC * np.log2(K)) / 8
        assert metrics["downlink_bytes"] == (0 if bits == 1 else charged)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("up_bits", 17, "up_bits must be one of 1, .* 16, 32, got 17"),
        ("down_bits", 0, "down_bits must be one of 1, .* 16, 32, got 0"),
        ("start", "anew", "start must be one of 'dual', 'previous', .* got 'anew'"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        make(**{field: value})
    with pytest.raises(ValueError, match="data must have 99 public inputs"):
        next(rounds(make(num_public=99), COHORTS, public=PUBLIC))
