r"""Iterations :math:`w^{t+1} = F_t(w^t)`, for some rounds or until a rule holds.

References:
  Jung, "Federated Learning: From Theory to Practice", Alg. 2 and Section 4.3 (when to
  stop).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_core import check
from fedjax_core.arrays import flat_rows
from fedjax_core.types import Key, PyTree

Step = Callable[[Any, Any, Any], Any]
Stop = Callable[[Any, Any], jax.Array]


class Stopped(NamedTuple):
    """What `iterate_until` returns.

    Attributes:
      state: the last one.
      rounds: ``[]`` int32, steps taken.
      converged: ``[]`` bool, False where the budget ran out before the rule held.
    """

    state: Any
    rounds: jax.Array
    converged: jax.Array


def iterate(
    step: Step,
    state: Any,
    rounds: int,
    *,
    key: Key | None = None,
    record: Callable[[Any], PyTree] | None = None,
    every: int = 1,
) -> tuple[Any, Any]:
    """Takes a fixed number of steps in one `lax.scan`.

    Every call compiles anew; call it inside `jax.jit` to compile once for many runs.

    Args:
      step: ``(state, t, key) -> state`` for t = 0..rounds-1; keeps shapes and dtypes.
        `t` is an int32 scalar, `key` is fresh for every t, or None without a key.
      state: where to start.
      rounds: >= 0.
      key: source of the steps' keys.
      record: ``(state) -> pytree``, what to keep of a state.
      every: record after every so many steps; `rounds` must be a multiple.

    Returns:
      The last state and the history, ``[rounds / every, ...]`` of what `record` gives,
      the state after the first `every` steps first; None without `record`.

    Raises:
      ValueError: `rounds` is negative or no multiple of `every`.
      TypeError: one of them is no int.
    """
    check.non_negative_int(rounds=rounds)
    check.positive_int(every=every)
    if rounds % every:
        raise ValueError(f"rounds must be a multiple of every={every}, got {rounds}.")

    def some(state, first):
        def one(k, state):
            t = jnp.asarray(first + k, jnp.int32)
            return step(state, t, _key_of(key, t))

        state = one(0, state) if every == 1 else lax.fori_loop(0, every, one, state)
        return state, None if record is None else record(state)

    state = jax.tree.map(jnp.asarray, state)
    return lax.scan(some, state, jnp.arange(0, rounds, every, dtype=jnp.int32))


def iterate_until(
    step: Step,
    state: Any,
    stop: Stop,
    max_rounds: int,
    *,
    key: Key | None = None,
) -> Stopped:
    """Steps until a rule holds, in one `lax.while_loop`.

    Under `vmap` every instance keeps its state from its own stop on.

    Args:
      step: as for `iterate`.
      state: where to start.
      stop: ``(old, new) -> bool`` scalar, asked after every step; `small_change`,
        `small_decrease` or your own.
      max_rounds: the most steps to take, >= 0.
      key: source of the steps' keys.

    Raises:
      ValueError: `max_rounds` is negative.
      TypeError: it is no int.
    """
    check.non_negative_int(max_rounds=max_rounds)

    def more(carry):
        return (carry.rounds < max_rounds) & ~carry.converged

    def one(carry):
        new = step(carry.state, carry.rounds, _key_of(key, carry.rounds))
        return Stopped(new, carry.rounds + 1, stop(carry.state, new))

    state = jax.tree.map(jnp.asarray, state)
    return lax.while_loop(more, one, Stopped(state, jnp.int32(0), jnp.bool_(False)))


def small_change(tol: float) -> Stop:
    """Stops when no node of W ``[n, ...]`` moved by more than `tol` > 0.

    That is the `block_max_norm` of the change.
    """
    check.positive(tol=tol)
    return lambda old, new: block_max_norm(jax.tree.map(jnp.subtract, new, old)) <= tol


def small_decrease(objective: Callable[[Any], jax.Array], tol: float) -> Stop:
    r"""Stops when the objective hardly changed: :math:`|f(w^t) - f(w^{t+1})| \le tol`.

    It is ``(state) -> []``, tol > 0.
    """
    check.positive(tol=tol)
    return lambda old, new: jnp.abs(objective(old) - objective(new)) <= tol


def block_norms(W: PyTree) -> jax.Array:
    r"""The norm of every node's parameters, :math:`\lVert w_i \rVert_2`; ``[n]``."""
    squares = [jnp.sum(jnp.square(flat_rows(w)), axis=1) for w in jax.tree.leaves(W)]
    return jnp.sqrt(sum(squares[1:], squares[0]))


def block_max_norm(W: PyTree) -> jax.Array:
    r"""The largest norm of a node's parameters, :math:`\max_i \lVert w_i \rVert_2`."""
    return jnp.max(block_norms(W), initial=0)


def _key_of(key: Key | None, t: jax.Array) -> Key | None:
    return None if key is None else jax.random.fold_in(key, t)
