"""Local SGD: schedules over rounds, optimisers that are kept, optimisers that ask."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core import LocalWork, Packed, local_sgd, map_clients, mean, plan_round
from fedjax_core.arrays import repeat_rows
from fedjax_core.local import (
    by_round,
    check_whole_epochs,
    full_gradient,
    full_loss,
    init_bytes,
)
from fedjax_core.map import two_passes

# Loss (w - x)^2 / 2 of one example each: the gradient is w - x.
TRAIN = Packed({"x": np.array([1, 5], np.float32)}, np.arange(3))
WORK = LocalWork(batch_size=1, epochs=3)


def loss(w, batch, key):
    del key
    return jnp.square(w - batch["x"]) / 2


def run(program, w, round, state=()):
    cohort = plan_round([0, 1], TRAIN, WORK, seed=0, round=round)
    return map_clients(
        program,
        jnp.float32(w),
        cohort,
        jax.random.key(0),
        reduce=mean(),
        client_state=state,
    )


def descend(w, x, rate, momentum=0.0, velocity=0.0):
    for _ in range(WORK.epochs):
        velocity = momentum * velocity + w - x
        w = w - rate * velocity
    return w, velocity


@pytest.mark.parametrize("round", [0, 1, 4])
def test_a_schedule_follows_the_rounds(round):
    program = local_sgd(loss, optax.chain(optax.sgd(0.4), by_round(lambda t: 0.5**t)))
    got = run(program, 2.0, round).update
    expected = np.mean([descend(2.0, x, 0.4 * 0.5**round)[0] - 2 for x in (1, 5)])
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_schedule_inside_the_optimiser_starts_anew_in_every_round():
    inside = local_sgd(loss, optax.sgd(optax.exponential_decay(0.4, 1, 0.5)))
    first, later = (run(inside, 2.0, round).update for round in (0, 4))
    np.testing.assert_array_equal(first, later)


def test_a_kept_optimiser_goes_on_where_the_client_left_it():
    optimizer = optax.sgd(0.1, momentum=0.9)
    program = local_sgd(loss, optimizer, keep_optimizer=True)
    state = repeat_rows(optimizer.init(jnp.float32(0)), 2)
    w, velocity = 2.0, {1: 0.0, 5: 0.0}
    for round in range(3):
        got = run(program, w, round, state)
        moved = []
        for x in velocity:
            end, velocity[x] = descend(w, x, 0.1, 0.9, velocity[x])
            moved.append(end - w)
        np.testing.assert_allclose(got.update, np.mean(moved), rtol=1e-5)
        np.testing.assert_allclose(
            jax.tree.leaves(got.client_state)[0], list(velocity.values()), rtol=1e-5
        )
        state, w = got.client_state, w + float(got.update)


def test_an_optimiser_that_searches_along_a_line_gets_the_loss():
    got = run(local_sgd(loss, optax.lbfgs(memory_size=2)), 2.0, 0)
    # Each client's quadratic is minimised; the mean of 1 and 5 is 3.
    np.testing.assert_allclose(got.update, 1.0, atol=1e-3)


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_a_proximal_term_pulls_towards_the_start(mu):
    got = run(local_sgd(loss, optax.sgd(0.4), proximal=mu), 2.0, 0)
    moved = []
    for x in (1, 5):
        w = 2.0
        for _ in range(WORK.epochs):
            w -= 0.4 * (w - x + mu * (w - 2))
        moved.append(w - 2)
    np.testing.assert_allclose(got.update, np.mean(moved), rtol=1e-6)


def test_a_correction_in_the_carry_is_added_to_every_gradient():
    program = local_sgd(loss, optax.sgd(0.4), proximal=0.7)

    def init(params, client_state, turn):
        carry = program.init(params, client_state, turn)
        return carry._replace(correction=jnp.float32(-0.3))

    got = run(program._replace(init=init), 2.0, 0)
    moved = []
    for x in (1, 5):
        w = 2.0
        for _ in range(WORK.epochs):
            w -= 0.4 * (w - x + 0.7 * (w - 2) - 0.3)
        moved.append(w - 2)
    np.testing.assert_allclose(got.update, np.mean(moved), rtol=1e-6)


# Clients of 3 and 2 examples and batches of 2: short batches of 1, and none.
UNEVEN = Packed({"x": np.array([1, 5, 9, 4, 6], np.float32)}, np.array([0, 3, 5]))


def two_epochs():
    return plan_round(
        [0, 1], UNEVEN, LocalWork(batch_size=2, epochs=2), seed=0, round=0
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loss_and_the_gradient_of_all_examples_weigh_them_the_same(dtype):
    w, key, cohort = jnp.asarray(2, dtype), jax.random.key(0), two_epochs()
    cohort = cohort.first_epochs()
    losses = map_clients(full_loss(loss), w, cohort, key, reduce=())
    by_client = [(1 + 9 + 49) / 6, (4 + 16) / 4]
    np.testing.assert_allclose(losses.client_metrics["loss"], by_client, rtol=1e-6)
    assert losses.metrics["uplink_bytes"] == 2 * 4
    got = map_clients(full_gradient(loss), w, cohort, key, reduce=mean("uniform"))
    np.testing.assert_allclose(got.update, (-3 - 3) / 2, rtol=1e-6)
    mean_loss = (1 + 9 + 49 + 4 + 16) / 10
    np.testing.assert_allclose(got.metrics["train_loss"], mean_loss, rtol=1e-6)
    assert got.metrics["uplink_bytes"] == 2 * w.dtype.itemsize


def test_metrics_of_two_passes():
    cohort, key = two_epochs(), jax.random.key(0)
    program = full_loss(loss)
    first = map_clients(program, jnp.float32(2), cohort, key, reduce=())
    # In the other pass client 1 drops out.
    finish = program.finish

    def broken(shared, carry, client_state, turn):
        update, row, metrics = finish(shared, carry, client_state, turn)
        failure = jnp.where(turn.num_examples == 2, 1, 0)
        return update, row, {**metrics, "failure": failure}

    program = program._replace(finish=broken)
    cohort = cohort.first_epochs()
    second = map_clients(program, jnp.float32(0), cohort, key, reduce=())
    got = two_passes(first, second)
    assert got["failure"].tolist() == [0, 1]
    assert got["excluded_clients"] == got["valid_clients"] == 1
    assert got["local_steps"] == (4 + 2) + 2
    assert got["uplink_bytes"] == 3 * 4
    assert got["downlink_bytes"] == 2 * 4
    assert got["loss"] == second.metrics["loss"] != first.metrics["loss"]
    again = two_passes(second, first)
    assert again["failure"].tolist() == [0, 1]
    assert again["excluded_clients"] == 1


@pytest.mark.parametrize(
    "work", [LocalWork(steps=3), LocalWork(drop_remainder=True)], ids=["steps", "drop"]
)
def test_work_that_skips_examples_is_no_whole_epoch(work):
    with pytest.raises(ValueError, match="work must count epochs"):
        check_whole_epochs(work)


def test_bytes_of_what_optimisers_keep():
    params = {"w": jnp.zeros((3, 2), jnp.bfloat16)}
    adam, plain = optax.adam(0.1), optax.sgd(0.1)
    assert init_bytes(adam, plain)(params) == 2 * 12 + 4
