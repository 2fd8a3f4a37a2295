r"""Downloads under partial participation: clients fetch the messages that they missed.

The server keeps its last :math:`\tau_\max` messages. A client that missed s of them
downloads them, or their sum, or the model where that is smaller or s is larger, and
has the server's model then, so that nothing but the count of bits depends on it.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, section 4.4 and Algorithm 7.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_core import check
from fedjax_core.arrays import num_bytes
from fedjax_core.metrics import Bits
from fedjax_core.types import Algorithm, Params, trained


class Downloads(NamedTuple):
    """What the server knows of who has which messages."""

    recent: Bits  # [tau_max], sizes of the last messages, the newest first
    sent: jax.Array  # [] int32, messages so far
    last_sync: jax.Array  # [N] int32, how many of them a client's model includes


class State(NamedTuple):
    """What survives a round."""

    params: Params
    clients: Any  # [N, ...], as in the method
    rest: Any  # the method's state without these two
    downloads: Downloads


def with_cache(
    algorithm: Algorithm,
    tau_max: int,
    message: Callable[[Any], Bits],
    catching_up: Callable[[Bits, int], Bits],
) -> Algorithm:
    """A method whose "downlink_bytes" are those of what clients have missed.

    Clients have the first model: before the first message they download nothing.

    Args:
      algorithm: a method whose server sends one message in a round.
      tau_max: how many messages the server keeps.
      message: state of the method after a round -> bits of what the server sent.
      catching_up: ``(recent [tau_max], coordinates of a step) -> [tau_max]``, bits of
        the last 1, 2, ... messages. Running statistics come beside them, the newest
        alone. A download is never larger than the model.
    """
    check.positive_int(tau_max=tau_max)

    def init(params, num_clients):
        none, never = jnp.zeros(tau_max, jnp.uint32), jnp.zeros(num_clients, jnp.int32)
        downloads = Downloads(Bits(none, none), jnp.int32(0), never)
        return _outer(algorithm.init(params, num_clients), downloads)

    def round(state, cohort, key):
        inner = state.rest._replace(params=state.params, clients=state.clients)
        inner, metrics = algorithm.round(inner, cohort, key)
        recent, sent, last_sync = state.downloads
        there = cohort.client_mask
        missed = jnp.where(there, sent - last_sync[cohort.client_id], 0)
        weights = trained(state.params)
        costs = catching_up(recent, sum(x.size for x in jax.tree.leaves(weights)))
        cost = jax.tree.map(lambda x: x[jnp.clip(missed - 1, 0, tau_max - 1)], costs)
        dense = Bits.of(8 * num_bytes(state.params))
        cost = cost + 8 * (num_bytes(state.params) - num_bytes(weights))
        cost = cost.minimum(dense) * (missed <= tau_max) + dense * (missed > tau_max)
        metrics["downlink_bytes"] = (cost * (missed > 0)).sum().as_bytes()
        last_sync = last_sync.at[jnp.where(there, cohort.client_id, len(last_sync))]
        recent = jax.tree.map(
            lambda new, old: jnp.roll(old, 1).at[0].set(new), message(inner), recent
        )
        downloads = Downloads(recent, sent + 1, last_sync.set(sent, mode="drop"))
        return _outer(inner, downloads), metrics

    return dataclasses.replace(algorithm, init=init, round=round)


def _outer(inner: Any, downloads: Downloads) -> State:
    rest = inner._replace(params=(), clients=())
    return State(inner.params, inner.clients, rest, downloads)


def every_message(recent: Bits, size: int) -> Bits:
    """Catching up on messages that do not combine: the bits of all of them."""
    del size
    return lax.associative_scan(lambda a, b: a + b, recent)
