"""Local SGD: schedules over rounds, optimisers that are kept, optimisers that ask."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core import LocalWork, Packed, local_sgd, map_clients, mean, plan_round
from fedjax_core.arrays import repeat_rows

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
    program = local_sgd(loss, optax.sgd(0.4), schedule=lambda t: 0.5**t)
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
