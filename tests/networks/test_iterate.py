"""Fixed and open numbers of steps, histories, keys and stop rules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks.iterate import (
    block_max_norm,
    block_norms,
    iterate,
    iterate_until,
    small_change,
    small_decrease,
)

HALF: Any = 0.5
TWO: Any = 2.0


def halve(w, t, key):
    return jax.tree.map(lambda x: x / 2, w)


def test_the_history_holds_the_state_after_every_step():
    last, history = iterate(
        lambda w, t, key: w + t, jnp.float32(1), 4, record=lambda w: {"w": w}
    )
    assert last == 7
    np.testing.assert_array_equal(history["w"], [1, 2, 4, 7])


def test_every_thins_the_history_and_changes_nothing_else():
    def step(w, t, key):
        return w + t * jax.random.normal(key, w.shape)

    start, key = jnp.zeros(3), jax.random.key(1)
    last, all_of_it = iterate(step, start, 6, key=key, record=lambda w: w)
    thin_last, some = iterate(step, start, 6, key=key, record=lambda w: w, every=3)
    np.testing.assert_array_equal(last, thin_last)
    np.testing.assert_array_equal(all_of_it[2::3], some)


def test_steps_get_fresh_keys_or_none():
    draws = iterate(
        lambda w, t, key: jax.random.uniform(key),
        jnp.float32(0),
        20,
        key=jax.random.key(0),
        record=lambda w: w,
    )[1]
    assert len(set(draws.tolist())) == 20

    def step(w, t, key):
        assert key is None
        return w

    iterate(step, jnp.float32(0), 2)


def test_no_rounds_leave_the_state_as_it_is():
    last, history = iterate(halve, jnp.ones(2), 0, record=lambda w: w)
    np.testing.assert_array_equal(last, 1)
    assert history.shape == (0, 2)
    stopped = iterate_until(halve, jnp.ones((1, 2)), small_change(1.0), 0)
    assert stopped.rounds == 0
    assert not stopped.converged


def test_stops_after_the_first_small_change():
    # From 1 the change of step t = 1, 2, ... is 2^-t.
    stopped = iterate_until(halve, {"w": jnp.ones((2, 1))}, small_change(2**-5), 99)
    assert stopped.rounds == 5
    assert stopped.converged
    np.testing.assert_array_equal(stopped.state["w"], 2.0**-5)


def test_stops_after_the_first_small_decrease():
    stopped = iterate_until(
        halve, jnp.ones(1), small_decrease(lambda w: w.sum() ** 2, 3 / 4**3), 99
    )
    assert stopped.rounds == 3
    assert stopped.converged


def test_says_when_the_budget_ran_out():
    stopped = iterate_until(halve, jnp.ones((2, 1)), small_change(1e-9), 4)
    assert stopped.rounds == 4
    assert not stopped.converged


def test_mapped_instances_stop_on_their_own():
    stopped = jax.vmap(lambda w: iterate_until(halve, w, small_change(1 / 16), 99))(
        jnp.array([[[1.0]], [[4.0]]])
    )
    np.testing.assert_array_equal(stopped.rounds, [4, 6])
    np.testing.assert_array_equal(stopped.state.ravel(), [1 / 16, 1 / 16])


def test_keeps_float64():
    with jax.enable_x64(True):
        last, _ = iterate(halve, jnp.ones(2, jnp.float64), 60)
        assert last.dtype == jnp.float64
        np.testing.assert_array_equal(last, 2.0**-60)


def test_block_norms_go_over_all_leaves_of_a_node():
    W = {"a": jnp.array([[3.0], [0.0]]), "b": jnp.array([[[4.0]], [[1.0]]])}
    np.testing.assert_allclose(block_norms(W), [5, 1])
    assert block_max_norm(W) == 5


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: iterate(halve, jnp.ones(1), -1), ValueError, "rounds"),
        (
            lambda: iterate(halve, jnp.ones(1), HALF),
            TypeError,
            "rounds must be an int, got 0.5",
        ),
        (lambda: iterate(halve, jnp.ones(1), TWO), TypeError, "rounds must be an int"),
        (lambda: iterate(halve, jnp.ones(1), True), TypeError, "rounds must be an int"),
        (
            lambda: iterate_until(halve, jnp.ones(1), small_change(1), TWO),
            TypeError,
            "max_rounds must be an int, got 2.0",
        ),
        (lambda: iterate(halve, jnp.ones(1), 3, every=2), ValueError, "every=2"),
        (lambda: iterate(halve, jnp.ones(1), 3, every=0), ValueError, "every"),
        (
            lambda: iterate_until(halve, jnp.ones(1), small_change(1), -1),
            ValueError,
            "max_rounds",
        ),
        (lambda: small_change(0.0), ValueError, "tol"),
        (lambda: small_decrease(jnp.sum, float("nan")), ValueError, "tol"),
    ],
)
def test_refuses(call, error, words):
    with pytest.raises(error, match=words):
        call()
