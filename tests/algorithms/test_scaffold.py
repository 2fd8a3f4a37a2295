"""SCAFFOLD against the paper in NumPy, and what its control variates must satisfy."""

import dataclasses

import jax
import numpy as np
import pytest
from tests.algorithms.softmax_rounds import (
    COHORTS,
    EVERYONE,
    EXAMPLES,
    KEY,
    OFFSETS,
    PARAMS,
    SIZES,
    START,
    TRAIN,
    ZEROS,
    N,
    X,
    Y,
    assert_close,
    rounds,
)
from tests.reference import (
    scaffold_round,
    softmax_gradient,
    softmax_loss,
    visits,
)

from fedjax_core import LocalWork, Packed, clip, gaussian_mean, mean, plan_round
from fedjax_core.algorithms import fedavg, scaffold


@pytest.mark.parametrize(
    "config",
    [
        scaffold.Config(client_lr=0.3, work=LocalWork(batch_size=4)),
        scaffold.Config(
            client_lr=0.1, work=LocalWork(batch_size=3, epochs=3), server_lr=0.5
        ),
        scaffold.Config(
            client_lr=0.2, work=LocalWork(batch_size=2, steps=5), server_lr=1.5
        ),
    ],
    ids=["one epoch", "epochs", "steps"],
)
def test_rounds_match_the_paper(config):
    algorithm = scaffold.make(config, softmax_loss)
    params, control, controls = START, ZEROS, [ZEROS] * N
    for state, metrics, cohort in rounds(algorithm, COHORTS):
        orders = visits(cohort)
        params, control, controls = scaffold_round(
            params, control, controls, X, Y, orders, config.client_lr, config.server_lr
        )
        assert_close(state.params, params)
        assert_close(state.control, control)
        for i in range(N):
            assert_close({k: v[i] for k, v in state.clients[0].items()}, controls[i])
        size = 2 * 4 * 12  # the model and the control variate, float32
        assert (
            metrics["uplink_bytes"] == metrics["downlink_bytes"] == size * len(orders)
        )


def test_full_batches_match_without_reading_the_plan():
    config = scaffold.Config(client_lr=0.3, work=LocalWork(batch_size=16, epochs=3))
    params, control, controls = START, ZEROS, [ZEROS] * N
    for (state, _, _), ids in zip(
        rounds(scaffold.make(config, softmax_loss), COHORTS), COHORTS, strict=True
    ):
        orders = {
            i: 3 * [np.arange(OFFSETS[i], OFFSETS[i + 1])] for i in ids if SIZES[i]
        }
        params, control, controls = scaffold_round(
            params, control, controls, X, Y, orders, 0.3, 1.0
        )
        assert_close(state.params, params)
        assert_close(state.control, control)


def test_the_first_round_is_uniform_fedavg():
    # All control variates start at zero.
    first = scaffold.make(
        scaffold.Config(work=LocalWork(batch_size=4, epochs=2)), softmax_loss
    )
    same = fedavg.make(
        fedavg.Config(work=LocalWork(batch_size=4, epochs=2), weights="uniform"),
        softmax_loss,
    )
    (a, x, _), (b, y, _) = (next(rounds(m, COHORTS)) for m in (first, same))
    assert_close(a.params, b.params, rtol=1e-6)
    np.testing.assert_allclose(x["train_loss"], y["train_loss"], rtol=1e-6)


def test_the_server_control_is_the_mean_of_the_clients():
    # Of everyone who ever had a control variate and those who never did, by (5) of the
    # paper: the server adds the cohort's changes over N, whoever takes part.
    algorithm = scaffold.make(
        scaffold.Config(client_lr=0.3, work=LocalWork(batch_size=4)), softmax_loss
    )
    for cohorts in ([EVERYONE] * 4, COHORTS):
        for state, _, _ in rounds(algorithm, cohorts):
            for name in PARAMS:
                np.testing.assert_allclose(
                    state.control[name],
                    np.mean(np.float64(state.clients[0][name]), axis=0),
                    atol=1e-6,
                )
            assert not state.clients[0]["w"][3].any()


def test_after_one_full_step_a_control_is_the_client_s_gradient():
    algorithm = scaffold.make(
        scaffold.Config(client_lr=0.3, work=LocalWork(batch_size=16)), softmax_loss
    )
    before = START
    for state, _, _ in rounds(algorithm, [EVERYONE] * 3):
        for i in EVERYONE:
            own = slice(OFFSETS[i], OFFSETS[i + 1])
            _, gradient = softmax_gradient(before, X[own], Y[own])
            got = {k: v[i] for k, v in state.clients[0].items()}
            assert_close(got, gradient, rtol=1e-4)
        before = {k: np.asarray(v, np.float64) for k, v in state.params.items()}


def test_one_full_step_of_everyone_is_gradient_descent():
    # The corrections cancel in the mean when all of N take part.
    train = TRAIN.take(EVERYONE)
    algorithm = scaffold.make(
        scaffold.Config(client_lr=0.5, work=LocalWork(batch_size=16)), softmax_loss
    )
    params = START
    for state, _, _ in rounds(algorithm, [range(7)] * 20, train):
        steps = [
            softmax_gradient(params, client["x"].astype(np.float64), client["y"])[1]
            for client in map(train.client, range(7))
        ]
        params = {
            name: p - 0.5 * np.mean([g[name] for g in steps], axis=0)
            for name, p in params.items()
        }
        assert_close(state.params, params)


def test_float64_rounds_match_the_paper_to_float64():
    config = scaffold.Config(client_lr=0.3, work=LocalWork(batch_size=4))
    with jax.enable_x64(True):
        algorithm = scaffold.make(config, softmax_loss)
        train = Packed(EXAMPLES | {"x": X}, OFFSETS)
        state = algorithm.init(START, N)
        params, control, controls = START, ZEROS, [ZEROS] * N
        for t, ids in enumerate(COHORTS):
            cohort = plan_round(ids, train, algorithm.work, seed=3, round=t)
            state, _ = jax.jit(algorithm.round)(state, cohort, KEY)
            params, control, controls = scaffold_round(
                params, control, controls, X, Y, visits(cohort), 0.3, 1.0
            )
            for name in PARAMS:
                np.testing.assert_allclose(state.params[name], params[name], rtol=1e-12)
                np.testing.assert_allclose(
                    state.control[name], control[name], rtol=1e-11, atol=1e-14
                )


def test_a_transform_acts_on_delta_and_control_together():
    # Clipped to a norm it never reaches it is SCAFFOLD; else the pair has that norm.
    config = scaffold.Config(client_lr=0.3, work=LocalWork(batch_size=4))
    plain, wide, narrow = (
        next(rounds(scaffold.make(config, softmax_loss, transform=t), [[2]]))[0]
        for t in (None, clip(1e6), clip(1e-2))
    )
    assert_close(wide.params, plain.params, rtol=1e-6)
    moved = jax.tree.map(
        lambda a, b: a - b,
        (narrow.params, jax.tree.map(lambda c: N * c, narrow.control)),
        (PARAMS, ZEROS),
    )
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(moved)))
    np.testing.assert_allclose(norm, 1e-2, rtol=1e-4)


def test_drift_is_corrected():
    # Two clients, each of one class, pull apart in many local steps. Corrected, they
    # stop at the stationary point of the mean loss; FedAvg is biased and does not.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)).astype(np.float32)
    y = np.repeat(np.array([0, 1], np.int32), 10)
    y[[0, 11]] = 2, 0
    train = Packed({"x": x, "y": y}, np.array([0, 10, 20]))

    def slope(algorithm):
        *_, (state, _, _) = rounds(algorithm, [[0, 1]] * 150, train)
        params = {k: np.asarray(v, np.float64) for k, v in state.params.items()}
        gradient = softmax_gradient(params, x.astype(np.float64), y)[1]
        return np.linalg.norm([np.linalg.norm(g) for g in gradient.values()])

    options = {"client_lr": 0.5, "work": LocalWork(batch_size=10, epochs=20)}
    corrected = slope(scaffold.make(scaffold.Config(**options), softmax_loss))
    plain = slope(fedavg.make(fedavg.Config(**options), softmax_loss))
    assert corrected < plain / 10


def test_an_excluded_client_keeps_its_control():
    x = EXAMPLES["x"].copy()
    x[OFFSETS[2]] = np.nan
    train = Packed(EXAMPLES | {"x": x}, OFFSETS)
    algorithm = scaffold.make(
        scaffold.Config(work=LocalWork(batch_size=4)), softmax_loss
    )
    (got, metrics, _), (others, _, _) = (
        next(rounds(algorithm, [ids], t))
        for ids, t in (([2, 0, 5], train), ([0, 5], TRAIN))
    )
    assert metrics["excluded_clients"] == 1
    assert not got.clients[0]["w"][2].any()
    assert_close(got.params, others.params)
    assert_close(got.control, others.control)


def test_a_round_of_nobody_keeps_everything(run):
    algorithm = scaffold.make(scaffold.Config(), softmax_loss)
    state = algorithm.init(PARAMS, N)
    cohort = plan_round([3], TRAIN, algorithm.work, seed=0, round=0)
    new, metrics = run(algorithm.round)(state, cohort, KEY)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics["valid_clients"] == 0


def test_a_noisy_control_is_the_mean_over_everyone_with_noise_of_a_constant_scale():
    config = scaffold.Config(client_lr=0.3, work=LocalWork(batch_size=4))
    # Without noise the constant that gaussian_mean divides by cancels in the control.
    plain = next(rounds(scaffold.make(config, softmax_loss), [[2, 0, 5, 7]]))[0]
    for size in (1.0, 5.5):
        exact = scaffold.make(
            config, softmax_loss, transform=clip(1e6), reduce=gaussian_mean(0, size)
        )
        got = next(rounds(exact, [[2, 0, 5, 7]]))[0]
        assert_close(got.control, plain.control, rtol=1e-4)

    # In a round of nobody it moves by N(0, (z C / N)^2). Of 15,000 draws the sample's
    # deviation is off by 3 % with probability 2e-7.
    noise = scaffold.make(
        config, softmax_loss, transform=clip(0.7), reduce=gaussian_mean(3.0, 2.0)
    )
    state = noise.init({"w": np.zeros((3, 5000)), "b": np.zeros(5000)}, N)
    cohort = plan_round([3], TRAIN, config.work, seed=0, round=0)
    new, _ = noise.round(state, cohort, KEY)
    np.testing.assert_allclose(np.std(new.control["w"]), 3 * 0.7 / N, rtol=0.03)
    np.testing.assert_allclose(np.std(new.params["w"]), 3 * 0.7 / 2, rtol=0.03)


def test_noise_without_a_constant_cohort_size_is_refused():
    algorithm = scaffold.make(
        scaffold.Config(), softmax_loss, reduce=mean()._replace(noisy=True)
    )
    with pytest.raises(ValueError, match="must have an expected_cohort_size"):
        next(rounds(algorithm))


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("client_lr", 0.0, ValueError, "client_lr must be > 0 and finite, got 0.0"),
        ("client_lr", None, TypeError, "client_lr must be a number, got None"),
        ("server_lr", -1, ValueError, "server_lr must be > 0 and finite, got -1"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(scaffold.Config(), **{field: value})
