"""FedPer against the paper in NumPy; what is left where nothing or all is shared."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from tests.algorithms.personal_rounds import (
    COHORTS,
    EXAMPLES,
    OFFSETS,
    PARAMS,
    START,
    N,
    X,
    Y,
    assert_close,
    assert_own_losses,
    last,
    own_model,
    partial_round,
    rounds,
)
from tests.reference import local_sgd, softmax_loss, visits

from fedjax_core import LocalWork, clip, mean, top_k
from fedjax_core.algorithms import fedavg, fedper

WORK = LocalWork(batch_size=3, epochs=2)


def config(personal, **kwargs):
    return fedper.Config(**({"personal": personal, "work": WORK} | kwargs))


@pytest.mark.parametrize(
    ("personal", "work"),
    [(("b",), WORK), (("w",), LocalWork(batch_size=2, steps=5))],
    ids=["head", "body"],
)
def test_rounds_match_the_paper(personal, work):
    algorithm = fedper.make(config(personal, client_lr=0.3, work=work), softmax_loss)
    own = [{k: v for k, v in START.items() if k in personal}] * N
    shared = {k: v for k, v in START.items() if k not in personal}
    state: Any = None
    for state, metrics, cohort in rounds(algorithm):
        orders = visits(cohort)
        shared, own = partial_round(shared, own, orders, 0.3)
        # Nobody sends what is personal: the server's stays as it was.
        fixed = {k: START[k] for k in personal}
        assert_close(state.params, shared | fixed)
        size = 4 * sum(v.size for v in shared.values())
        assert (
            metrics["uplink_bytes"] == metrics["downlink_bytes"] == size * len(orders)
        )
    assert_own_losses(algorithm, state, [shared | mine for mine in own])


def test_with_nothing_personal_it_is_fedavg():
    same = fedavg.make(fedavg.Config(work=WORK), softmax_loss)
    algorithm = fedper.make(config(()), softmax_loss)
    for (a, x, _), (b, y, _) in zip(rounds(algorithm), rounds(same), strict=True):
        assert_close(a.params, b.params, rtol=1e-6)
        np.testing.assert_allclose(x["train_loss"], y["train_loss"], rtol=1e-6)
        assert_close(own_model(algorithm, a, 3), b.params, rtol=1e-6)
        assert not jax.tree.leaves(a.clients[0].own)


def test_with_all_personal_clients_train_alone():
    algorithm = fedper.make(config(("w", "b")), softmax_loss)
    models = [START] * N
    state: Any = None
    for state, metrics, cohort in rounds(algorithm):
        for i, batches in visits(cohort).items():
            models[i], _ = local_sgd(models[i], X, Y, batches, 0.1)
        assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == 0
        assert_close(state.params, START)
    assert_own_losses(algorithm, state, models)


def test_the_mean_may_be_uniform_and_what_is_sent_transformed():
    def after(**parts):
        return last(fedper.make(config(("b",)), softmax_loss, **parts), COHORTS[:1])

    plain, sparse = after(), after(transform=top_k(0.5))
    assert_close(after(transform=clip(1e6)).params, plain.params, rtol=1e-6)
    uniform = after(reduce=mean("uniform"))
    assert np.abs(uniform.params["w"] - plain.params["w"]).max() > 1e-3
    # Residuals are of what is sent.
    assert sparse.clients[1].residual["b"] is None
    assert sparse.clients[1].residual["w"].shape == (N, 3, 3)


def test_an_excluded_client_keeps_its_head():
    x = EXAMPLES["x"].copy()
    x[OFFSETS[2]] = np.nan
    algorithm = fedper.make(config(("b",)), softmax_loss)
    got, metrics, _ = next(rounds(algorithm, [[2, 0, 5]], x))
    assert metrics["excluded_clients"] == 1
    np.testing.assert_array_equal(got.clients[0].own["b"][2], PARAMS["b"])
    others = last(algorithm, [[0, 5]])
    assert_close(got.params, others.params)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("personal", "b", TypeError, "personal must be a tuple of names, got 'b'"),
        ("personal", ("",), TypeError, r"personal must be a tuple of names, got \(''"),
        ("client_lr", 0.0, ValueError, "client_lr must be > 0 and finite, got 0.0"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(config(("b",)), **{field: value})


def test_a_layer_that_there_is_not_is_an_error():
    algorithm = fedper.make(config(("head",)), softmax_loss)
    with pytest.raises(ValueError, match="which are b, w; got 'head'"):
        algorithm.init(PARAMS, N)


def test_memory_of_a_client_counts_its_own_part():
    def extra(personal, transform=None):
        algorithm = fedper.make(config(personal), softmax_loss, transform=transform)
        return algorithm.client_bytes(PARAMS)

    assert extra(()) == 0
    assert extra(("b",)) == 2 * 4 * 3  # before and after
    assert extra(("b",), top_k(0.5)) == 2 * 4 * 3 + 4 * 9  # residuals of the body
