"""FedAvg against the paper in NumPy, and where it becomes something else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    COHORTS,
    EXAMPLES,
    KEY,
    OFFSETS,
    PARAMS,
    SIZES,
    START,
    TRAIN,
    X,
    Y,
    assert_close,
    rounds,
)
from tests.reference import (
    fedavg_delta,
    fedavg_round,
    softmax_gradient,
    softmax_loss,
    visits,
)

from fedjax_core import LocalWork, plan_round
from fedjax_core.algorithms import fedavg


@pytest.mark.parametrize(
    "config",
    [
        fedavg.Config(client_lr=0.3, work=LocalWork(batch_size=4)),
        fedavg.Config(
            client_lr=0.3,
            work=LocalWork(batch_size=4),
            weights="uniform",
            server_lr=0.5,
        ),
        fedavg.Config(
            client_lr=0.1, work=LocalWork(batch_size=3, epochs=4), server_lr=1.5
        ),
        fedavg.Config(client_lr=0.2, work=LocalWork(batch_size=2, steps=5)),
        fedavg.Config(client_lr=0.2, work=LocalWork(batch_size=2, drop_remainder=True)),
    ],
    ids=["examples", "uniform", "epochs", "steps", "whole batches"],
)
def test_rounds_match_the_paper(config):
    algorithm = fedavg.make(config, softmax_loss)
    weights = {
        i: float(n) if config.weights == "examples" else 1.0
        for i, n in enumerate(SIZES)
    }
    expected = START
    for state, metrics, cohort in rounds(algorithm, COHORTS):
        orders = visits(cohort)
        _, losses = fedavg_delta(expected, X, Y, orders, weights, config.client_lr)
        expected = fedavg_round(
            expected, X, Y, orders, weights, config.client_lr, config.server_lr
        )
        assert_close(state.params, expected)
        steps = {i: len(batches) for i, batches in orders.items()}
        train_loss = sum(losses[i] * steps[i] for i in orders) / sum(steps.values())
        np.testing.assert_allclose(metrics["train_loss"], train_loss, rtol=1e-5)
        assert metrics["valid_clients"] == len(orders)
        assert metrics["num_examples"] == sum(SIZES[i] for i in orders)
        size = 4 * 12  # float32
        assert (
            metrics["uplink_bytes"] == metrics["downlink_bytes"] == size * len(orders)
        )


def test_full_batches_match_without_reading_the_plan():
    # With one full batch per step the order of examples is of no account.
    config = fedavg.Config(
        client_lr=0.3, work=LocalWork(batch_size=16, epochs=3), server_lr=0.7
    )
    expected = START
    for (state, _, _), ids in zip(
        rounds(fedavg.make(config, softmax_loss), COHORTS), COHORTS, strict=True
    ):
        orders = {
            i: 3 * [np.arange(OFFSETS[i], OFFSETS[i + 1])] for i in ids if SIZES[i]
        }
        sizes = dict(enumerate(SIZES))
        expected = fedavg_round(expected, X, Y, orders, sizes, 0.3, 0.7)
        assert_close(state.params, expected)


def test_row_32_one_full_step_of_everyone_is_gradient_descent():
    config = fedavg.Config(client_lr=0.5, work=LocalWork(batch_size=16))
    expected = START
    for state, metrics, _ in rounds(
        fedavg.make(config, softmax_loss), [range(len(SIZES))] * 20
    ):
        loss, gradient = softmax_gradient(expected, X, Y)
        # Weighted by examples, the clients' gradients are the pooled one; the training
        # loss counts steps, so each client once.
        expected = {name: p - 0.5 * gradient[name] for name, p in expected.items()}
        assert_close(state.params, expected)
        assert metrics["valid_clients"] == 7
        assert metrics["train_loss"] != pytest.approx(loss)


def test_one_client_is_plain_sgd():
    config = fedavg.Config(client_lr=0.2, work=LocalWork(batch_size=3, epochs=2))
    params = PARAMS
    for state, _, cohort in rounds(fedavg.make(config, softmax_loss), [[7]] * 3):
        for batch in visits(cohort)[7]:
            data = {k: jnp.asarray(v[batch]) for k, v in EXAMPLES.items()}
            gradient = jax.grad(lambda p, d=data: softmax_loss(p, d, KEY).mean())(
                params
            )
            params = jax.tree.map(lambda p, g: p - 0.2 * g, params, gradient)
        assert_close(state.params, params)


class Adam:
    """Kingma and Ba (2015), Algorithm 1, in float64."""

    def __init__(self, lr, b1=0.9, b2=0.99, eps=1e-3):
        self.lr, self.b1, self.b2, self.eps = lr, b1, b2, eps
        self.m, self.v, self.t = 0.0, 0.0, 0

    def __call__(self, p, g):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        m, v = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        return p - self.lr * m / (np.sqrt(v) + self.eps)


def test_a_server_optimizer_sees_minus_the_mean_delta():
    config = fedavg.Config(client_lr=0.3, work=LocalWork(batch_size=4))
    algorithm = fedavg.make(
        config,
        softmax_loss,
        server_optimizer=optax.adam(0.05, b1=0.9, b2=0.99, eps=1e-3),
    )
    expected, sizes = START, dict(enumerate(SIZES))
    adam = {name: Adam(0.05) for name in START}
    for state, _, cohort in rounds(algorithm, COHORTS):
        delta, _ = fedavg_delta(expected, X, Y, visits(cohort), sizes, 0.3)
        expected = {name: adam[name](p, -delta[name]) for name, p in expected.items()}
        assert_close(state.params, expected, rtol=1e-4)


def test_a_client_optimizer_starts_anew_every_round():
    config = fedavg.Config(client_lr=9.0, work=LocalWork(batch_size=4, epochs=2))
    algorithm = fedavg.make(
        config, softmax_loss, client_optimizer=optax.sgd(0.1, momentum=0.9)
    )
    expected = START
    for state, _, cohort in rounds(algorithm, [[0], [7]]):
        momentum = dict.fromkeys(START, 0.0)
        (batches,) = visits(cohort).values()
        for batch in batches:
            _, gradient = softmax_gradient(expected, X[batch], Y[batch])
            momentum = {name: 0.9 * momentum[name] + gradient[name] for name in START}
            expected = {name: p - 0.1 * momentum[name] for name, p in expected.items()}
        assert_close(state.params, expected)


def test_a_round_of_nobody_keeps_the_model(run):
    algorithm = fedavg.make(fedavg.Config(), softmax_loss)
    state = algorithm.init(PARAMS, len(SIZES))
    cohort = plan_round([3], TRAIN, algorithm.work, seed=0, round=0)
    new, metrics = run(algorithm.round)(state, cohort, KEY)
    for name in PARAMS:
        np.testing.assert_array_equal(new.params[name], PARAMS[name])
    assert metrics["valid_clients"] == 0
    assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == 0


def test_step_sizes_can_be_swept_in_one_program():
    cohort = plan_round(
        [0, 2], TRAIN, fedavg.Config(work=LocalWork(batch_size=4)).work, seed=0, round=0
    )

    def one(client_lr, server_lr):
        config = fedavg.Config(
            client_lr=client_lr, server_lr=server_lr, work=LocalWork(batch_size=4)
        )
        algorithm = fedavg.make(config, softmax_loss)
        return algorithm.round(algorithm.init(PARAMS, 8), cohort, KEY)[0].params

    swept = jax.jit(jax.vmap(one))(jnp.float32([0.1, 0.3]), jnp.float32([1.0, 0.5]))
    orders, sizes = visits(cohort), dict(enumerate(SIZES))
    for k, (client_lr, server_lr) in enumerate([(0.1, 1.0), (0.3, 0.5)]):
        expected = fedavg_round(START, X, Y, orders, sizes, client_lr, server_lr)
        assert_close({name: p[k] for name, p in swept.items()}, expected)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("client_lr", 0, ValueError, "client_lr must be > 0 and finite, got 0"),
        ("client_lr", -0.1, ValueError, "client_lr must be > 0 and finite, got -0.1"),
        ("client_lr", float("nan"), ValueError, "client_lr must be > 0 .* got nan"),
        ("client_lr", "fast", TypeError, "client_lr must be a number, got 'fast'"),
        ("server_lr", float("inf"), ValueError, "server_lr must be > 0 .* got inf"),
        ("weights", "size", ValueError, "one of 'examples', 'uniform', got 'size'"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, error, message):
    with pytest.raises(error, match=message):
        fedavg.Config(**{field: value})
    with pytest.raises(error, match=message):
        dataclasses.replace(fedavg.Config(), **{field: value})
