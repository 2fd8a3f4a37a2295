"""Private messages over a network: noise from a budget, and what was given away.

`networks.admm` and gossip differ in how far one example moves what a node sends; what
follows from that is the same and stands here.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.networks.graph import Graph, num_neighbours
from fedjax_core.networks.operators import Round
from fedjax_core.privacy import Budget, SplitBudget, minimiser_sensitivity, spend
from fedjax_core.privacy.mechanisms import noise_by_leaf
from fedjax_core.types import Metrics


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
    return ledger_of(graph.num_nodes)


def ledger_of(n: int) -> Ledger:
    """Nothing was said yet by n nodes."""
    return Ledger(jnp.zeros(n), jnp.zeros(n, jnp.int32))


def sender(
    graph: Graph,
    budget: Budget | None,
    gradient_bound: float | None,
    num_examples: jax.Array,
    curvature: Callable[[Round], jax.Array],
) -> Callable[..., tuple[jax.Array, Ledger]]:
    r"""How all nodes send their parameters, with the noise that their budget asks for.

    One example moves a row by at most :math:`2 C / (D_k \mu_k(t))`.

    Args:
      graph: who hears whom. A node without neighbours says nothing.
      budget: of every node, or None for messages without noise.
      gradient_bound: C, see `check_bound`.
      num_examples: D_k, ``[n]``.
      curvature: ``t -> [n]`` or one number, mu_k: how strongly convex what node k
        minimises is.

    Returns:
      ``(ledger, W, t, key) -> (sent, ledger)`` with W and what is sent ``[n, d]``, and
      the ledgers before and after round t.
    """
    heard = num_neighbours(graph).astype(jnp.int32)
    return sender_to(heard, budget, gradient_bound, num_examples, curvature)


def sender_to(
    heard: jax.Array,
    budget: Budget | None,
    gradient_bound: float | None,
    num_examples: jax.Array,
    curvature: Callable[[Round], ArrayLike],
) -> Callable[..., tuple[jax.Array, Ledger]]:
    """`sender` for messages to any number of others, ``heard [n]`` int32 of them.

    Who sends to nobody spends nothing and gets his row back as it is.

    Raises:
      TypeError: a budget and W of another dtype than float32 and float64.
    """

    def most(t):
        assert gradient_bound is not None  # `check_bound`
        # Nodes that nobody hears may have no curvature, and need no noise.
        mu = jnp.where(heard > 0, curvature(t), 1)
        by_node = minimiser_sensitivity(gradient_bound, num_examples, mu)
        return jnp.broadcast_to(by_node, num_examples.shape)

    def send(ledger, W, t, key):
        spent, sent = ledger.spent, W
        if budget is not None:
            sigma, cost = budget.message(t, most(t), most(0))
            sigma = jnp.where(heard > 0, sigma, 0)[:, None]
            sent = noise_by_leaf(key, W, sigma, jax.random.normal)
            spent = spend(spent, cost, heard > 0)
        return sent, Ledger(spent, ledger.messages + heard)

    return send


def check_bound(budget: Budget | None, gradient_bound: float | None) -> None:
    """Raises ValueError for a budget without a gradient_bound > 0."""
    if gradient_bound is not None:
        check.positive(gradient_bound=gradient_bound)
    elif budget is not None:
        raise ValueError(
            "gradient_bound must be given with a budget: without a bound on the "
            "gradient of one example no noise hides it, got None."
        )


def horizon(budget: Budget | None) -> int | None:
    """The most rounds of a message each that a budget is for, None of any number."""
    return budget.messages if isinstance(budget, SplitBudget) else None


def metrics(old: Ledger, new: Ledger) -> Metrics:
    """Of a round: messages of all nodes, and the most that a node has spent so far."""
    sent = new.messages.sum() - old.messages.sum()
    return {"messages": sent, "budget": new.spent.max()}


def report(ledger: Ledger) -> Metrics:
    """Of a run, node by node: budget spent and messages sent."""
    return {"budget_of_node": ledger.spent, "messages_of_node": ledger.messages}
