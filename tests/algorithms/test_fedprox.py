"""FedProx against the paper in NumPy, and where it is FedAvg."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    START,
    X,
    Y,
    assert_close,
    combined,
    deltas,
    last,
    moved,
    rounds,
    shares,
)
from tests.reference import local_sgd, softmax_loss, visits

from fedjax_core import LocalWork
from fedjax_core.algorithms import fedavg, fedprox

WORK = LocalWork(batch_size=4, epochs=2)


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_rounds_match_the_paper(weights):
    config = fedprox.Config(
        client_lr=0.3, server_lr=0.7, mu=0.5, work=WORK, weights=weights
    )
    params = START
    for state, metrics, cohort in rounds(fedprox.make(config, softmax_loss)):
        moves = deltas(params, cohort, 0.3, proximal=0.5)
        orders = visits(cohort)
        losses = [
            local_sgd(params, X, Y, batches, 0.3, proximal=0.5)[1]
            for batches in orders.values()
        ]
        params = moved(params, combined(shares(moves, weights), moves), 0.7)
        assert_close(state.params, params)
        # Of the clients' own loss, without the term.
        np.testing.assert_allclose(
            metrics["train_loss"], np.mean(np.concatenate(losses)), rtol=1e-5
        )


def test_without_the_term_it_is_fedavg_to_the_bit():
    same = fedavg.make(fedavg.Config(work=WORK), softmax_loss)
    got = last(fedprox.make(fedprox.Config(mu=0.0, work=WORK), softmax_loss))
    jax.tree.map(np.testing.assert_array_equal, got.params, last(same).params)


def test_a_first_step_does_not_feel_the_term():
    work = LocalWork(batch_size=4, steps=1)
    same = fedavg.make(fedavg.Config(work=work), softmax_loss)
    got = last(fedprox.make(fedprox.Config(mu=9.0, work=work), softmax_loss))
    assert_close(got.params, last(same).params, rtol=1e-6, atol=1e-7)


def test_a_strong_term_holds_clients_at_the_first_step():
    # mu = 1 / lr: a step lands at w_t minus the gradient there times lr.
    config = fedprox.Config(client_lr=0.1, mu=10.0, work=WORK)
    params = START
    for state, _, cohort in rounds(fedprox.make(config, softmax_loss)):
        moves = {}
        for i, batches in visits(cohort).items():
            here = params
            for batch in batches:
                step, _ = local_sgd(here, X, Y, [batch], 0.1)
                pull = {k: step[k] - here[k] for k in here}
                here = {k: params[k] + pull[k] for k in params}
            moves[i] = {k: here[k] - params[k] for k in params}
        params = moved(params, combined(shares(moves), moves))
        assert_close(state.params, params)


def test_the_solver_may_be_another():
    config = fedprox.Config(client_lr=9.0, mu=0.5, work=WORK)
    algorithm = fedprox.make(
        config, softmax_loss, client_optimizer=optax.sgd(0.1, momentum=0.9)
    )
    state, _, cohort = next(rounds(algorithm))
    moves = deltas(START, cohort, 0.1, proximal=0.5, momentum=0.9)
    assert_close(state.params, moved(START, combined(shares(moves), moves)))


def test_a_config_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"mu must be >= 0 and finite, got -0.1"):
        dataclasses.replace(fedprox.Config(), mu=-0.1)
