"""Rounds as one compiled loop that keeps what each of them reports."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_core.types import PyTree


def loop(
    step: Callable[[jax.Array, Any], tuple[Any, PyTree]],
    state: Any,
    count: jax.Array,
    capacity: int,
) -> tuple[Any, PyTree]:
    """Takes some steps; how many is data, so that one program serves all chunks.

    Args:
      step: ``(k, state) -> (state, metrics)`` for k = 0..count-1; keeps the state's
        shapes and dtypes.
      state: where to start.
      count: ``[]`` int32, at most `capacity`.
      capacity: length of the metrics that come back beside the last state, leaves
        ``[capacity, ...]``: zeros from `count` on.
    """
    # Its shapes are asked for and it is run, but traced once.
    step = jax.jit(step, inline=True)

    def body(k, carry):
        state, metrics = step(k, carry[0])
        return state, jax.tree.map(lambda b, m: b.at[k].set(m), carry[1], metrics)

    kept = jax.tree.map(
        lambda s: jnp.zeros((capacity, *s.shape), s.dtype),
        jax.eval_shape(lambda: step(jnp.int32(0), state)[1]),
    )
    return lax.fori_loop(jnp.int32(0), count, body, (state, kept))
