"""Defences inside a round: a robust relaxation step and noisy messages.

Robust means of messages are `fedjax_core.robust`.

Arrays of other shapes and arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 8.2.3 and 10.3.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import along_rows, flat_rows, is_known, norms
from fedjax_core.networks.graph import Graph, degree, num_neighbours
from fedjax_core.networks.operators import Operator, Round
from fedjax_core.networks.oracles import Losses
from fedjax_core.privacy.gaussian import Law, add_noise
from fedjax_core.robust.rules import require_int
from fedjax_core.types import Key, PyTree


def relax_by_norm(
    graph: Graph,
    W: jax.Array,
    received: jax.Array,
    losses: Losses,
    alpha: ArrayLike,
    inner_steps: int = 100,
) -> jax.Array:
    r"""The robust local update of all nodes in parallel (Jung, eq. (170) and (175)).

    .. math::

      w_i^+ = \arg\min_w f_i(w) + \alpha \sum_j A_{ij} \lVert w - w_j \rVert_2

    Every neighbour pulls with a force of :math:`\alpha A_{ij}`, wherever it claims to
    be. The norms are majorised by squares, which makes an inner step a proximal step of
    :math:`f_i`; with a zero loss this is Weiszfeld's iteration. Costs in proportion to
    the edges, hubs included. `norm_residual` says how good the result is.

    Eq. (170) lacks alpha and has the penalty at the old w_i, where it is a constant;
    what is minimised over stands in it here. Its fixed points are not all solutions of
    GTVMin with the norm: nodes in one place can hold each other there.

    Args:
      graph: the network.
      W: ``[n, ...]``, where the nodes are.
      received: ``[2E, ...]``, the messages by directed edge. One that is not finite
        is ignored.
      losses: of the nodes; a node without neighbours, or messages to use, moves to its
        minimiser, which must be unique.
      alpha: > 0.
      inner_steps: proximal steps per call.

    Returns:
      ``[n, ...]``.

    Raises:
      ValueError: alpha is not positive, or inner_steps < 1.
    """
    check.positive(alpha=alpha)
    check.positive_int(inner_steps=inner_steps)
    received, weight = _usable(graph, received, W.dtype)
    floor = _floor(received)

    def pull(_, V):
        distance = jnp.maximum(_norm(V[graph.target] - received), floor)
        force = weight / distance
        stiffness = _add_up(force, graph)
        goal = _add_up(along_rows(force, W) * received, graph)
        goal = goal / along_rows(jnp.where(stiffness > 0, stiffness, 1), W)
        return losses.prox(goal, alpha * stiffness)

    # From its own parameters, as the mean of the others may be anywhere. The step is
    # traced with the rest, as rho is 0 at nodes without neighbours.
    start = jax.jit(losses.prox)(W, 2 * alpha * degree(graph).astype(W.dtype))
    return lax.fori_loop(0, inner_steps, pull, start)


def fedrelax_by_norm(
    graph: Graph, losses: Losses, *, alpha: ArrayLike, inner_steps: int = 100
) -> Operator:
    """FedRelax with the norm instead of its square; see `relax_by_norm`."""
    check.positive(alpha=alpha)
    check.positive_int(inner_steps=inner_steps)

    def update(W, received, t, key):
        del t, key
        return relax_by_norm(graph, W, received, losses, alpha, inner_steps)

    return Operator(graph, update, aggregate=lambda graph, messages: messages)


def norm_residual(
    graph: Graph,
    W: jax.Array,
    received: jax.Array,
    losses: Losses,
    alpha: ArrayLike,
) -> jax.Array:
    """How far W is from solving `relax_by_norm`: the smallest sub-gradients; ``[n]``.

    Zero exactly at the solution. A neighbour that w_i coincides with, to rounding,
    contributes any vector of length up to alpha A; a message that is not finite none.
    """
    received, weight = _usable(graph, received, W.dtype)
    weight = alpha * weight
    away = W[graph.target] - received
    distance = _norm(away)
    here = distance <= 2 * _floor(received)
    unit = away / along_rows(jnp.where(here, 1, distance), away)
    force = losses.grad(W) + _add_up(
        along_rows(jnp.where(here, 0, weight), away) * unit, graph
    )
    return jnp.maximum(_norm(force) - _add_up(jnp.where(here, weight, 0), graph), 0)


def noisy_messages(
    sigma: jax.Array | float, law: Law = "normal"
) -> Callable[[PyTree, Round, Key | None], PyTree]:
    r"""An `emit` for networks: every node shares :math:`w_i + \sigma n_t`.

    Fresh noise of mean 0 and standard deviation `sigma` >= 0, which may be traced, for
    every entry and round, from the round's key; the node keeps its own w_i exact. See
    `operators.Operator`. What it costs in privacy adds up over rounds. The same on the
    way to a server is `privacy.noisy`. Jung, (190).
    """
    check.non_negative(sigma=sigma)
    check.one_of(("normal", "laplace"), law=law)

    def emit(W, t, key):
        del t
        if key is None:
            if is_known(sigma) and sigma == 0:
                return W
            raise ValueError("noisy_messages needs a run with a key.")
        return add_noise(key, W, sigma, law)

    return emit


def _usable(
    graph: Graph, received: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The messages and their weights, both 0 for a message that is not finite."""
    finite = jnp.isfinite(flat_rows(received)).all(1)
    weight = jnp.where(finite, graph.weight[graph.edge].astype(dtype), 0)
    return jnp.where(along_rows(finite, received), received, 0), weight


def _floor(received: jax.Array) -> jax.Array:
    # Closer than this to what it received, a node counts as being there.
    size = jnp.maximum(_norm(received), 1)
    return 16 * jnp.finfo(received.dtype).eps * size


def _norm(x: jax.Array) -> jax.Array:
    return norms(flat_rows(x))


def _add_up(x: jax.Array, graph: Graph) -> jax.Array:
    return jax.ops.segment_sum(
        x, graph.target, graph.num_nodes, indices_are_sorted=True
    )


def check_suspects(graph: Graph, b: Any) -> None:
    """Refuses a network where some node has too few neighbours for b suspected ones.

    b is an int, or ``[n]`` ints; edges of weight 0 do not count.

    Raises:
      ValueError: b < 0 or 2b >= K at a node with K neighbours (which a node without
        any always is); names the node.
      TypeError: b is not of ints.
    """
    count = np.asarray(num_neighbours(graph))
    require_int(b)
    b = np.broadcast_to(np.asarray(b), count.shape)
    wrong = np.flatnonzero((b < 0) | (b >= count - b))
    if wrong.size:
        i = wrong[0]
        raise ValueError(
            f"b must be >= 0 and 2b less than the number of neighbours, got b = {b[i]} "
            f"for node {i} with {count[i]}."
        )
