"""LG-FedAvg against the paper in NumPy, and as FedPer of the other layers."""

import dataclasses
from typing import Any

import pytest
from tests.algorithms.personal_rounds import (
    START,
    N,
    assert_close,
    assert_own_losses,
    last,
    partial_round,
    rounds,
)
from tests.reference import softmax_loss, visits

from fedjax_core import LocalWork
from fedjax_core.algorithms import fedavg, fedper, lg_fedavg

WORK = LocalWork(batch_size=3, epochs=2)
CONFIG = lg_fedavg.Config(shared=("b",), client_lr=0.3, work=WORK)


def test_rounds_match_the_paper():
    algorithm = lg_fedavg.make(CONFIG, softmax_loss)
    shared, own = {"b": START["b"]}, [{"w": START["w"]}] * N
    state: Any = None
    for state, metrics, cohort in rounds(algorithm):
        shared, own = partial_round(shared, own, visits(cohort), 0.3)
        assert_close(state.params, shared | {"w": START["w"]})
        assert metrics["uplink_bytes"] == 4 * 3 * len(visits(cohort))
    assert_own_losses(algorithm, state, [shared | mine for mine in own])


def test_it_is_fedper_of_the_other_layers():
    config = fedper.Config(personal=("w",), client_lr=0.3, work=WORK)
    other = last(fedper.make(config, softmax_loss))
    assert_close(last(lg_fedavg.make(CONFIG, softmax_loss)).params, other.params, 1e-7)


def test_with_all_shared_it_is_fedavg():
    config = dataclasses.replace(CONFIG, shared=("w", "b"))
    same = fedavg.make(fedavg.Config(client_lr=0.3, work=WORK), softmax_loss)
    got = last(lg_fedavg.make(config, softmax_loss))
    assert_close(got.params, last(same).params, rtol=1e-6)


def test_a_config_names_what_is_wrong():
    with pytest.raises(TypeError, match=r"shared must be a tuple of names, got \['b'"):
        lg_fedavg.Config(shared=["b"])  # type: ignore
    with pytest.raises(ValueError, match="client_lr must be > 0 and finite, got -1"):
        lg_fedavg.Config(shared=("b",), client_lr=-1)
