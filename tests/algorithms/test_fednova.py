"""FedNova against the paper in NumPy, and where it is FedAvg."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.algorithms.softmax_rounds import (
    START,
    assert_close,
    combined,
    deltas,
    last,
    moved,
    rounds,
    shares,
    with_and_without,
)
from tests.reference import softmax_loss, visits

from fedjax_core import LocalWork, Packed
from fedjax_core.algorithms import fedavg, fednova, fedprox

WORK = LocalWork(batch_size=2, epochs=2)


def vector(steps, lr, mu, momentum):
    """The a_i of section 4 of the paper, for one of momentum and proximal term."""
    if momentum:
        return np.array([1 - momentum**k for k in range(steps, 0, -1)]) / (1 - momentum)
    return np.array([(1 - lr * mu) ** k for k in range(steps - 1, -1, -1)])


SOLVERS = {"plain": (0.0, None), "proximal": (0.5, None), "momentum": (0.0, 0.9)}


@pytest.mark.parametrize(("mu", "momentum"), SOLVERS.values(), ids=SOLVERS)
def test_rounds_match_the_paper(mu, momentum):
    weights = "uniform" if mu else "examples"
    config = fednova.Config(
        client_lr=0.1, server_lr=0.7, mu=mu, momentum=momentum, work=WORK,
        weights=weights,
    )  # fmt: skip
    params = START
    for state, _, cohort in rounds(fednova.make(config, softmax_loss)):
        moves = deltas(params, cohort, 0.1, proximal=mu, momentum=momentum or 0.0)
        size = {
            i: vector(len(batches), 0.1, mu, momentum).sum()
            for i, batches in visits(cohort).items()
        }
        assert len(set(size.values())) > 1
        p = shares(moves, weights)
        effective = sum(p[i] * size[i] for i in moves)
        step = combined({i: effective * p[i] / size[i] for i in moves}, moves)
        params = moved(params, step, 0.7)
        assert_close(state.params, params)


@pytest.mark.parametrize(("mu", "momentum"), [*SOLVERS.values(), (0.5, 0.9)])
def test_the_weight_of_gradients_is_what_they_move(mu, momentum):
    config = fednova.Config(client_lr=0.1, mu=mu, momentum=momentum)
    steps = np.array([1, 2, 7, 30], np.int32)
    got = fednova.gradient_weight(config, jnp.asarray(steps))
    for k, n in enumerate(steps):
        # The answer to a gradient of 1 in one of the steps alone, over all steps.
        answer = 0.0
        for j in range(n):
            w, v = 0.0, 0.0
            for t in range(n):
                v = (momentum or 0.0) * v + (t == j) + mu * w
                w -= 0.1 * v
            answer -= w / 0.1
        np.testing.assert_allclose(got[k], answer, rtol=1e-5)
        if not (mu and momentum):
            np.testing.assert_allclose(got[k], vector(n, 0.1, mu, momentum).sum(), 1e-5)


def test_the_weight_has_the_precision_of_the_model():
    with jax.enable_x64(True):
        reduction = fednova.normalised_mean(fednova.Config())
        kept = reduction.identity({"w": jax.ShapeDtypeStruct((3,), np.float64)})
    assert {x.dtype for x in jax.tree.leaves(kept)} == {np.dtype(np.float64)}


def test_with_equally_many_steps_it_is_fedprox():
    options = {"mu": 0.5, "work": LocalWork(batch_size=2, steps=5)}
    got = fednova.make(fednova.Config(**options), softmax_loss)
    same = fedprox.make(fedprox.Config(**options), softmax_loss)
    assert_close(last(got).params, last(same).params, rtol=1e-5)


def quadratic(params, batch, key):
    del key
    return jnp.square(params["w"] - batch["x"]) / 2


def test_it_minimises_the_objective_that_fedavg_misses():
    # One client with 1 example at 0, one with 4 at 1: the mean over examples is 0.8.
    # Taking as many steps as it has examples, the second counts 16 times in FedAvg.
    x = np.array([0, 1, 1, 1, 1], np.float32)
    train = Packed({"x": x}, np.array([0, 1, 5]))
    options = {"client_lr": 0.01, "work": LocalWork(batch_size=1)}
    nova = fednova.make(fednova.Config(**options), quadratic)
    avg = fedavg.make(fedavg.Config(**options), quadratic)
    start = {"w": np.float32(0.5)}
    for algorithm, expected in ((nova, 0.8), (avg, 16 / 17)):
        *_, (state, _, _) = rounds(algorithm, [[0, 1]] * 400, train, start)
        np.testing.assert_allclose(state.params["w"], expected, atol=0.01)


def test_excluded_clients_do_not_count():
    algorithm = fednova.make(fednova.Config(work=WORK), softmax_loss)
    (got, metrics), (others, _) = with_and_without(algorithm)
    assert metrics["excluded_clients"] == 1
    assert_close(got.params, others.params)


def test_a_round_of_nobody_keeps_the_model():
    state, metrics, _ = next(
        rounds(fednova.make(fednova.Config(), softmax_loss), [[3]])
    )
    assert_close(state.params, START, rtol=0, atol=0)
    assert metrics["valid_clients"] == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mu", -1.0, "mu must be >= 0 and finite, got -1.0"),
        ("momentum", 1.0, r"momentum must be in \[0, 1\), got 1.0"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(fednova.Config(), **{field: value})
