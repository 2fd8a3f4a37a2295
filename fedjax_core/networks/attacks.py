"""Attacks that need a network: poisoned links, spies, and how far an attack reaches.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 10.1 and 10.2, Exercise
  10.1.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_mask
from fedjax_core.attacks.messages import Attack, poison
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.operators import Channel
from fedjax_core.networks.spectrum import hops


def poison_channel(
    graph: Graph,
    attack: Attack,
    *,
    nodes: ArrayLike | None = None,
    links: ArrayLike | None = None,
) -> Channel:
    """A channel that poisons messages in every round, see `networks.network`.

    Args:
      graph: the network.
      attack: see the module.
      nodes: ``[n]`` bool, whose messages are poisoned on all their links.
      links: ``[2E]`` bool, directed edges on which messages are; may come with `nodes`.

    Raises:
      ValueError: neither is given, or one of another shape.
    """
    if nodes is None and links is None:
        raise ValueError("poison_channel needs nodes or links to attack.")
    attacked = jnp.zeros(graph.source.shape, bool)
    if nodes is not None:
        attacked |= as_mask("nodes", nodes, (graph.num_nodes,))[graph.source]
    if links is not None:
        attacked |= as_mask("links", links, attacked.shape)
    return lambda messages, t, key: poison(messages, attacked, attack, key)


def arrival(graph: Graph, attacked: jax.Array) -> jax.Array:
    """When an attack can first be seen at a node, in rounds after the attacked update.

    That is the node's distance in hops from the attacked set ``[n]`` bool, along edges
    of positive weight: ``[n]`` int32, n for a node that it never reaches. In the chain
    1-2-3 with node 1 attacked before update t, node 2 changes in update t + 1 and node
    3 in t + 2. Jung, Fig. 10.3.
    """
    return hops(graph, as_mask("attacked", attacked, (graph.num_nodes,)))


def attach_spy(graph: Graph, target: int, weight: float = 1.0) -> Graph:
    """Adds node n, whose only neighbour is `target`; give it the zero loss.

    FedRelax then makes it copy the target exactly, one round late. FedGD does so with
    the learning rate `copying_rate` only. Raises ValueError for a target that is not in
    0..n-1, or a weight that is not positive.
    """
    check.one_of(range(graph.num_nodes), target=target)
    check.positive(weight=weight)
    edges = np.stack([graph.head, graph.tail], 1)
    return Graph.from_edges(
        np.r_[edges, [[target, graph.num_nodes]]],
        np.r_[np.asarray(graph.weight), np.asarray(weight, graph.weight.dtype)],
        graph.num_nodes + 1,
        graph.weight.dtype,
    )


def copying_rate(alpha: float, weight: float = 1.0) -> float:
    """The learning rate at which one step of FedGD copies, 1 / (2 alpha A)."""
    check.positive(alpha=alpha, weight=weight)
    return 1 / (2 * alpha * weight)
