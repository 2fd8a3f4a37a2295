"""The server's step: optimisers, what clients receive, and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.reference import softmax_loss, softmax_problem

from fedjax_core import LocalWork, Packed, plan_round, server, top_k
from fedjax_core.algorithms import fedavg, scaffold

EXAMPLES, OFFSETS, PARAMS = softmax_problem([5, 1, 8, 3])
TRAIN = Packed(EXAMPLES, OFFSETS)
WORK = LocalWork(batch_size=4)
COHORTS = [
    plan_round(ids, TRAIN, WORK, seed=0, round=t, cohort_size=3)
    for t, ids in enumerate([[0, 2, 3], [1, 2], [0, 1, 3]])
]


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("method", [fedavg, scaffold])
def test_what_clients_receive_and_what_is_kept_back_is_the_servers_step(method):
    # From every state on the way, beside the same round of a server that sends all.
    config = method.Config(client_lr=0.3, work=WORK)
    part, whole = (
        method.make(config, softmax_loss, downlink=downlink)
        for downlink in (top_k(0.25), None)
    )
    part_round, whole_round = jax.jit(part.round), jax.jit(whole.round)
    state = part.init(PARAMS, 4)
    for t, cohort in enumerate(COHORTS):
        key = jax.random.key(t)
        after, metrics = part_round(state, cohort, key)
        meant, _ = whole_round(state._replace(downlink=()), cohort, key)
        sent = flat(after._replace(downlink=(), clients=()))
        sent -= flat(state._replace(downlink=(), clients=()))
        step = flat(meant._replace(clients=()))
        step -= flat(state._replace(downlink=(), clients=()))
        kept = flat(after.downlink) - flat(state.downlink)
        # Residuals are in the order of a dict, delta behind control.
        order = np.r_[len(step) // 2 : len(step), : len(step) // 2]
        if method is scaffold:
            sent, step = sent[order], step[order]
        np.testing.assert_allclose(sent + kept, step, atol=1e-6)
        assert np.count_nonzero(sent) == len(step) // 4
        assert metrics["downlink_bytes"] < metrics["uplink_bytes"]
        state = after


def test_sending_every_entry_is_sending_the_model():
    config = fedavg.Config(client_lr=0.3, work=WORK)
    for cohort in COHORTS:
        a, b = (
            jax.jit(m.round)(m.init(PARAMS, 4), cohort, jax.random.key(0))[0].params
            for m in (
                fedavg.make(config, softmax_loss, downlink=top_k(1.0)),
                fedavg.make(config, softmax_loss),
            )
        )
        np.testing.assert_allclose(flat(a), flat(b), rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [optax.lbfgs(), optax.contrib.reduce_on_plateau()],
    ids=["lbfgs", "plateau"],
)
def test_a_server_optimiser_that_asks_for_the_loss_is_refused(optimizer):
    message = "server_optimizer must work from the mean delta"
    with pytest.raises(TypeError, match=message):
        server.init(optax.chain(optimizer, optax.sgd(0.1)), {"w": jnp.zeros(3)})
