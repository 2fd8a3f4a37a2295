r"""What a network is worth when links and nodes fail.

A step on the pruned network is a perturbed step on the whole one, so failures either
degrade gracefully (`failure_perturbation`) or show in the second eigenvalue of the
Laplacian of what is left (`failures`).

Masks of other shapes or dtypes and arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 8.2.4.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_mask, is_known
from fedjax_core.networks.graph import Graph, laplacian
from fedjax_core.networks.spectrum import hops, laplacian_matrix
from fedjax_core.types import Key, PyTree


def prune(graph: Graph, links: jax.Array) -> Graph:
    """The network with only the links ``[E]`` bool; lost ones keep the weight 0."""
    links = as_mask("links", links, graph.weight.shape)
    return graph.with_weight(jnp.where(links, graph.weight, 0))


def without_nodes(graph: Graph, alive: jax.Array) -> Graph:
    """The network without the links of failed nodes; `alive` is ``[n]`` bool.

    A failed node still has its row of W. Should that diverge, run the method with a
    channel, such as `operators.relay`: then NaN does not pass lost links, see
    `graph.neighbour_sum`.
    """
    alive = as_mask("alive", alive, (graph.num_nodes,))
    return prune(graph, alive[graph.head] & alive[graph.tail])


def failure_perturbation(
    graph: Graph, links: jax.Array, W: PyTree, alpha: ArrayLike, eta: ArrayLike
) -> PyTree:
    r"""What failed links do to a step of FedGD: the e_t of perturbed gradient descent.

    A step on the pruned network is one on the whole network plus
    :math:`2 \eta \alpha (L_G - L_{\tilde G}) W`.

    Args:
      graph: the whole network.
      links: ``[E]`` bool, those that work.
      W: leaves ``[n, ...]``.
      alpha: GTVMin strength.
      eta: learning rate.
    """
    failed = ~as_mask("links", links, graph.weight.shape)
    lost = laplacian(prune(graph, failed), W)
    return jax.tree.map(lambda x: (2 * eta * alpha * x).astype(x.dtype), lost)


def is_connected(graph: Graph, alive: jax.Array | None = None) -> jax.Array:
    """Whether links of positive weight join all nodes (that are alive); ``[]`` bool.

    Exact, in time linear in edges times the diameter; weights and `alive` may be
    traced. One node is connected, none is not.
    """
    n = graph.num_nodes
    alive = as_mask("alive", alive, (n,))
    first = (jnp.arange(n) == jnp.argmax(alive)) & alive
    seen = hops(without_nodes(graph, alive), first) < n
    return (seen == alive).all() & alive.any()


def algebraic_connectivity(graph: Graph, alive: jax.Array | None = None) -> jax.Array:
    """The second smallest Laplacian eigenvalue, of the nodes alive if given; ``[]``.

    Dense, for up to some thousand nodes. Zero where fewer than two are alive or these
    are not connected; otherwise rounded by about n times the rounding of the largest.
    """
    n = graph.num_nodes
    if n < 2:
        return jnp.zeros((), graph.weight.dtype)
    alive = as_mask("alive", alive, (n,))
    L = laplacian_matrix(without_nodes(graph, alive))
    # Failed nodes go past the end of the spectrum, which is at most twice its trace.
    beyond = 1 + 2 * jnp.trace(L)
    lam = jnp.linalg.eigvalsh(L + jnp.diag(jnp.where(alive, 0, beyond)))
    some = is_connected(graph, alive) & (alive.sum() > 1)
    return jnp.where(some, jnp.maximum(lam[1], 0), 0)


def critical_nodes(graph: Graph) -> jax.Array:
    """Single points of failure: nodes without which the rest falls apart; ``[n]`` bool.

    The centre of a star is one, and the server of every method that has one.
    """
    others = ~jnp.eye(graph.num_nodes, dtype=bool)
    return ~lax.map(lambda alive: is_connected(graph, alive), others)


class Failures(NamedTuple):
    """Random failures, one row per sample.

    Attributes:
      lam2: ``[S]``, the second Laplacian eigenvalue of what is left.
      connected: ``[S]`` bool; their mean is the probability of staying connected.
    """

    lam2: jax.Array
    connected: jax.Array


def failures(
    key: Key,
    graph: Graph,
    *,
    link_failure: ArrayLike = 0.0,
    node_failure: ArrayLike = 0.0,
    samples: int = 100,
) -> Failures:
    """Samples what is left of a network when links and nodes fail independently.

    Args:
      key: PRNG key.
      graph: the network, of up to some thousand nodes.
      link_failure: probability that a link fails, one or ``[E]``, in [0, 1].
      node_failure: probability that a node fails, one or ``[n]``, in [0, 1].
      samples: S.
    """
    check.positive_int(samples=samples)
    rates = {"link_failure": link_failure, "node_failure": node_failure}
    known = {name: p for name, p in rates.items() if is_known(p)}
    check.each_in_range(0, 1, **known)

    def sample(key):
        link_key, node_key = jax.random.split(key)
        links = ~jax.random.bernoulli(link_key, link_failure, graph.weight.shape)
        alive = ~jax.random.bernoulli(node_key, node_failure, (graph.num_nodes,))
        left = prune(graph, links)
        return Failures(algebraic_connectivity(left, alive), is_connected(left, alive))

    return lax.map(sample, jax.random.split(key, samples))
