"""FedRep against the paper in NumPy: the head first, then what is shared."""

import dataclasses
from typing import Any

import pytest
from tests.algorithms.personal_rounds import (
    SIZES,
    START,
    N,
    X,
    Y,
    assert_close,
    assert_own_losses,
    average,
    last,
    rounds,
)
from tests.reference import softmax_gradient, softmax_loss, visits

from fedjax_core import LocalWork, mean
from fedjax_core.algorithms import fedavg, fedrep

CONFIG = fedrep.Config(
    personal=("b",), client_lr=0.3, head=2, work=LocalWork(batch_size=3, epochs=3)
)
STEPS = dataclasses.replace(CONFIG, head=3, work=LocalWork(batch_size=2, steps=5))


def phases(params, batches, head_steps, lr):
    """The head's steps, then those of the representation."""
    params = dict(params)
    for t, batch in enumerate(batches):
        _, gradient = softmax_gradient(params, X[batch], Y[batch])
        name = "b" if t < head_steps else "w"
        params[name] = params[name] - lr * gradient[name]
    return params


@pytest.mark.parametrize("config", [CONFIG, STEPS], ids=["epochs", "steps"])
def test_rounds_match_the_paper(config):
    algorithm = fedrep.make(config, softmax_loss)
    w, heads = START["w"], [START["b"]] * N
    state: Any = None
    for state, _, cohort in rounds(algorithm):
        sent = []
        for i, batches in visits(cohort).items():
            per_epoch = -(-SIZES[i] // 3)
            head_steps = 3 if config is STEPS else 2 * per_epoch
            local = phases({"w": w, "b": heads[i]}, batches, head_steps, 0.3)
            heads[i] = local["b"]
            sent.append({"w": local["w"]})
        w = average(sent, [1] * len(sent))["w"]
        assert_close(state.params, {"w": w, "b": START["b"]})
    assert_own_losses(algorithm, state, [{"w": w, "b": b} for b in heads])


def test_without_a_head_it_is_fedavg_of_the_other_epochs():
    # In full batches every epoch is the same.
    config = fedrep.Config(personal=(), head=1, work=LocalWork(batch_size=9, epochs=3))
    same = fedavg.Config(work=LocalWork(batch_size=9, epochs=2))
    got = last(fedrep.make(config, softmax_loss, reduce=mean("examples")))
    assert_close(got.params, last(fedavg.make(same, softmax_loss)).params, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"personal": ("b", 1)}, TypeError, "personal must be a tuple of names"),
        ({"client_lr": 0}, ValueError, "client_lr must be > 0 and finite, got 0"),
        ({"head": 0}, ValueError, "head must be >= 1, got 0"),
        ({"head": 3}, ValueError, "head must leave some of the work .*got 3 of Local"),
        ({"work": LocalWork(steps=2)}, ValueError, "head must leave .*got 2 of Local"),
    ],
)
def test_a_config_names_what_is_wrong(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **change)
