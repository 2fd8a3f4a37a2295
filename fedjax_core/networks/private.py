"""Private messages over a network: noise from a budget, and what was given away.

`networks.admm` and gossip differ in how far one example moves what a node sends; what
follows from that is the same and stands here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.networks.graph import Graph, num_neighbours
from fedjax_core.networks.operators import Round
from fedjax_core.privacy import Budget, add_gaussian, spend
from fedjax_core.types import Key, Metrics


class Ledger(NamedTuple):
    """What nodes have said so far.

    Attributes:
      spent: ``[n]``, the zCDP budget of all messages; stays 0 without noise.
      messages: ``[n]`` int32, one per neighbour and round.
    """

    spent: jax.Array
    messages: jax.Array


def ledger(graph: Graph) -> Ledger:
    """Nothing was said yet."""
    n = graph.num_nodes
    return Ledger(jnp.zeros(n), jnp.zeros(n, jnp.int32))


def send(
    graph: Graph,
    budget: Budget | None,
    ledger: Ledger,
    W: jax.Array,
    sensitivity: ArrayLike,
    first_sensitivity: ArrayLike,
    t: Round,
    key: Key | None,
) -> tuple[jax.Array, Ledger]:
    """All nodes send their parameters, with the noise that their budget asks for.

    Args:
      graph: who hears whom. A node without neighbours says nothing.
      budget: of every node, or None for messages without noise.
      ledger: before the round.
      W: ``[n, d]``.
      sensitivity: ``[n]``, most that one example moves a row of W in this round.
      first_sensitivity: the same in round 0.
      t: the round.
      key: of the round, for the noise.

    Returns:
      The messages ``[n, d]`` and the ledger after the round.
    """
    heard = num_neighbours(graph)
    messages = ledger.messages + heard
    if budget is None:
        return W, Ledger(ledger.spent, messages)
    sigma, spent = budget.message(t, sensitivity, first_sensitivity)
    sent = add_gaussian(key, W, sigma.astype(W.dtype)[:, None])
    return sent, Ledger(spend(ledger.spent, spent, heard > 0), messages)


def check_bound(budget: Budget | None, gradient_bound: float | None) -> None:
    """Refuses a budget where nothing bounds what one example changes.

    Raises:
      ValueError: a budget and no gradient_bound, or one that is not > 0.
    """
    if gradient_bound is not None:
        check.positive(gradient_bound=gradient_bound)
    elif budget is not None:
        raise ValueError(
            "gradient_bound must be given with a budget: without a bound on the "
            "gradient of one example no noise hides it, got None."
        )


def metrics(old: Ledger, new: Ledger) -> Metrics:
    """Of a round: messages of all nodes, and the most that a node has spent so far."""
    sent = new.messages.sum() - old.messages.sum()
    return {"messages": sent, "budget": new.spent.max()}


def report(ledger: Ledger) -> Metrics:
    """Of a run, node by node: budget spent and messages sent."""
    return {"budget_of_node": ledger.spent, "messages_of_node": ledger.messages}
