r"""One round of a method on a network: what nodes send, receive and do with it.

A method is its tuple of operators :math:`w_i^{t+1} = F_i(w_1^t, \dots, w_n^t)`. Every
one is put together from the same parts,

  emit -> channel -> aggregate -> local update -> activity mask -> project

and all nodes read iterate t and write iterate t + 1. `step` is that round, for
`iterate`; `asynchronous` runs the same operator with outdated copies.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 5.7, Eq. (125)-(127).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core.arrays import by_row, keep_rows
from fedjax_core.networks.graph import (
    Graph,
    check_rows,
    degree,
    message_sum,
    neighbour_sum,
)
from fedjax_core.networks.graph import messages as neighbour_messages
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.projections import consensus
from fedjax_core.types import Key, PyTree

Round = jax.Array | int
Channel = Callable[[PyTree, Round, Key | None], PyTree]
"""``(messages, t, key) -> messages``, leaves ``[2E, ...]`` by directed edge."""


def _parameters(W: PyTree, t: Round, key: Key | None) -> PyTree:
    del t, key
    return W


class Operator(NamedTuple):
    """A method on a network, part by part; W has leaves ``[n, ...]``.

    Attributes:
      graph: who hears whom, or None where only a server speaks to the nodes.
      update: ``(W, S, t, key) -> W``, every node's next parameters from its own and
        what it received; row i depends on row i of `W` and `S` only. S is None without
        a graph.
      emit: ``(W, t, key) -> M``, what every node sends to all its neighbours, leaves
        ``[n, ...]``; by default its parameters.
      aggregate: ``(graph, messages) -> S`` with messages ``[2E, ...]`` in the order of
        the graph's directed edges. None is the sum of A_ij m_j over the neighbours,
        which needs no copy per edge as long as all are fresh.
      project: ``(W, active) -> W``, the last thing in a round. `active` is None when
        everybody is.
      select: ``(t, key) -> [n]`` bool, who takes part in round t; None is everybody.
      by_edge: `emit` returns a message of its own for every directed edge, leaves
        ``[2E, ...]``.
      keep: ``(active, new, old) -> W``, for states with other leaves than ``[n, ...]``.
    """

    graph: Graph | None
    update: Callable[[PyTree, PyTree, Round, Key | None], PyTree]
    emit: Callable[[PyTree, Round, Key | None], PyTree] = _parameters
    aggregate: Callable[[Graph, PyTree], PyTree] | None = None
    project: Callable[[PyTree, jax.Array | None], PyTree] | None = None
    select: Callable[[Round, Key | None], jax.Array] | None = None
    by_edge: bool = False
    keep: Callable[[jax.Array, PyTree, PyTree], PyTree] = keep_rows


def step(operator: Operator, channel: Channel | None = None) -> Callable[..., Any]:
    """The synchronous round ``(W, t, key) -> W``, for `iterate.iterate`.

    The channel is what happens to messages on their way: poisoning, a relay; where
    there is no graph it raises ValueError.
    """
    graph = operator.graph
    if graph is None and channel is not None:
        raise ValueError("channel must be None for a method without a graph.")

    def one_round(W, t, key=None):
        select_key, emit_key, channel_key, update_key = split(key, 4)
        received = None
        if graph is not None:
            sent = operator.emit(W, t, emit_key)
            if channel is None and operator.aggregate is None and not operator.by_edge:
                received = neighbour_sum(graph, sent)
            else:
                messages = sent if operator.by_edge else copies(graph, sent)
                if channel is not None:
                    messages = channel(messages, t, channel_key)
                received = collect(operator, messages)
        active = None if operator.select is None else operator.select(t, select_key)
        return finish(operator, W, received, t, update_key, active)

    return one_round


def run(
    operator: Operator,
    W: PyTree,
    rounds: int,
    *,
    key: Key | None = None,
    record: Callable[[PyTree], Any] | None = None,
    channel: Channel | None = None,
) -> tuple[PyTree, Any]:
    """Runs `rounds` synchronous rounds from `W`; see `iterate.iterate`."""
    return iterate(step(operator, channel), W, rounds, key=key, record=record)


def num_messages(operator: Operator, W: PyTree, t: Round, key: Key | None) -> jax.Array:
    """Messages of round t, ``[]`` int32: one per directed edge of positive weight.

    Without a graph, one to and one from the server per node that takes part.
    """
    if operator.graph is not None:
        return 2 * jnp.sum(operator.graph.weight > 0, dtype=jnp.int32)
    if operator.select is None:
        return jnp.int32(2 * len(jax.tree.leaves(W)[0]))
    return 2 * jnp.sum(operator.select(t, split(key, 4)[0]), dtype=jnp.int32)


def finish(
    operator: Operator,
    W: PyTree,
    received: PyTree,
    t: Round,
    key: Key | None,
    active: jax.Array | None,
) -> PyTree:
    """The second half of a round: local update, activity mask, projection."""
    new = operator.update(W, received, t, key)
    if active is not None:
        new = operator.keep(active, new, W)
    return new if operator.project is None else operator.project(new, active)


def collect(operator: Operator, messages: PyTree) -> PyTree:
    """What every node makes of its messages, leaves ``[2E, ...]`` by directed edge."""
    assert operator.graph is not None
    return (operator.aggregate or message_sum)(operator.graph, messages)


def relay(messages: PyTree, t: Round, key: Key | None) -> PyTree:
    """A synchronisation server as a channel: it hands on every message as it came."""
    del t, key
    return messages


def copies(graph: Graph, M: PyTree) -> PyTree:
    """What travels along every directed edge, ``[n, ...]`` to ``[2E, ...]``."""
    check_rows(graph, M)
    return jax.tree.map(lambda m: jnp.asarray(m)[graph.source], M)


def aggregate_by(
    rule: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[[Graph, PyTree], PyTree]:
    """Makes an `Operator.aggregate` of a rule that replaces the weighted mean.

    The rule is ``(values [K, ...], weights [K]) -> [...]``; weight 0 marks an empty
    slot. Every node gets its degree times what the rule makes of its messages, so that
    the weighted mean gives back the sum of A_ij m_j; zero for a node without
    neighbours. Raises ValueError where `graph.messages` does: on a graph with a large
    hub.
    """

    def aggregate(graph, messages):
        if not graph.num_edges:
            return message_sum(graph, messages)  # zero, whatever the rule
        by_node = degree(graph)
        _, weight = neighbour_messages(graph, by_node)
        slot = graph.start[:-1, None] + jnp.arange(weight.shape[1])[None]
        slot = jnp.where(slot < graph.start[1:, None], slot, len(graph.edge))

        def one(m):
            values = jnp.asarray(m).at[slot].get(mode="fill", fill_value=0)
            value = jax.vmap(rule)(values, weight.astype(m.dtype))
            scale = by_row(by_node, value)
            return jnp.where(scale > 0, scale * value, 0)

        return jax.tree.map(one, messages)

    return aggregate


def average(weight: ArrayLike | None = None) -> Callable[..., PyTree]:
    """An `Operator.project`: every row becomes the mean of the active rows.

    Nodes count their weight ``[n]``, >= 0 and not all zero, or once each.
    """

    def project(W, active):
        share = weight
        if active is not None:
            share = active if weight is None else jnp.where(active, weight, 0)
        return consensus(W, share)

    return project


def split(key: Key | None, num: int) -> Any:
    """Keys for `num` uses, or as many Nones for a method that draws nothing."""
    return [None] * num if key is None else jax.random.split(key, num)
