r"""NPFL: every cluster of a network learns a model, and a little from the others.

A node's ridge risk gets a pull towards what it hears from other clusters,

.. math::

  f_k(w) + \tau_k \lVert w - \bar m_k \rVert^2, \qquad
  f_k(w) = \tfrac{1}{D_k} \lVert y_k - X_k w \rVert^2
    + \tfrac{\lambda}{|C_{q(k)}|} \lVert w \rVert^2 ,

with the mean of `networks.labelled`, and `networks.admm` finds a consensus over the
edges inside clusters. NPFL-RL is the same with a policy of `networks.policies`: at the
end of a round every node changes its tau_k by what its validation data say of the
models w_k(a) that other weights a would have given it in that round. One cluster is
NFL, a model for all.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, (6.2), (6.11) and Algorithm 6. The primal it prints counts neighbours of all
  clusters and squares tau, and its dual has another sign: those diverge or stall.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_core.networks import admm, labelled
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import least_squares_statistics
from fedjax_core.networks.policies import Policy
from fedjax_core.networks.run import System
from fedjax_core.types import (
    Checked,
    Metrics,
    NonNegative,
    Positive,
    PositiveInt,
    Share,
)


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """How nodes learn.

    Attributes:
      num_clusters: Q >= 1.
      rho: the penalty of ADMM, > 0.
      strength: lambda >= 0, of the ridge penalty of a cluster.
      tau: of all nodes at first, in [0, 1].
      policy: changes it round by round, see `networks.policies`; None keeps it.

    Raises:
      ValueError: an attribute out of range, or one cluster with a tau or a policy.
    """

    num_clusters: PositiveInt = 1
    rho: Positive = 1.0
    strength: NonNegative = 0.0
    tau: Share = 0.0
    policy: Policy | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.num_clusters == 1 and (self.tau or self.policy):
            raise ValueError(
                "num_clusters must be >= 2 to learn from other clusters, got 1 with "
                f"tau={self.tau} and policy={self.policy}."
            )


class World(NamedTuple):
    """What a run reads.

    Attributes:
      nodes: the data.
      ridge: ``[n]``, lambda / |C_q|.
      risks: f_k in the eigenvectors of X'X.
      inside: ``[E]``, the edges' weights, 0 between clusters.
    """

    nodes: labelled.Nodes
    ridge: jax.Array
    risks: admm.Spectral
    inside: jax.Array


class State(NamedTuple):
    """Of a run: parameters, messages and duals ``[n, d]``, and tau ``[n]``."""

    admm: admm.State
    tau: jax.Array


def make(config: Config, graph: Graph, draw: labelled.Draw) -> System:
    """Builds the system for `networks.run`.

    Args:
      config: of the method.
      graph: the network, inside and between clusters.
      draw: a seed's clusters and data. A node without neighbours in its cluster and
        without a strength, pull or enough rows takes the nearest of its many minima.

    Raises:
      ValueError: what is drawn is refused by `labelled.checked`.
    """
    Q = config.num_clusters

    def world(key):
        nodes = labelled.checked(Q, draw(key))
        own, slope, _ = least_squares_statistics(*nodes.train)
        ridge = labelled.shares(config.strength, Q, nodes.cluster).astype(own.dtype)
        eye = jnp.eye(own.shape[1], dtype=own.dtype)
        risks = admm.spectral(own + ridge[:, None, None] * eye[None], slope)
        return World(nodes, ridge, risks, labelled.inside(graph, nodes.cluster).weight)

    def init(world, key):
        del key
        start = admm.init(graph, jnp.zeros_like(world.nodes.truth))
        return State(start, jnp.full_like(world.ridge, config.tau))

    def step(world, state, t, key):
        nodes, inside = world.nodes, graph.with_weight(world.inside)
        mean, heard = labelled.others(graph, nodes.cluster, Q, state.admm.sent)

        def respond(tau):
            """The round's parameters with these weights; elementwise in tau."""
            toward = admm.Toward(jnp.where(heard, tau, 0), mean)
            primal = admm.quadratic(world.risks)
            return admm.minimise(inside, config.rho, primal, state.admm, t, toward)

        def value(tau):
            W = respond(tau)
            penalty = world.ridge * (W**2).sum(1)
            return labelled.squared_error(nodes.valid, W) + penalty

        params, tau = respond(state.tau), state.tau
        if config.policy is not None:
            tau = config.policy(key, tau, value)
        new = admm.exchange(inside, config.rho, state.admm, params, params)
        sent = 2 * (graph.weight > 0).sum(dtype=jnp.int32)
        return State(new, tau), {"messages": sent} | _by_size(nodes, tau)

    def evaluate(world, state) -> Metrics:
        return labelled.errors(world.nodes, state.admm.params)

    return System("npfl", config, world, init, step, evaluate)


def _by_size(nodes: labelled.Nodes, tau: jax.Array) -> Metrics:
    """Mean tau: of all nodes, and of the thirds with few, some and many rows.

    And those of the nodes with the fewest rows, the median and the most.
    """
    sorted_tau = tau[jnp.argsort(nodes.train[2].sum(1))]
    thirds = zip(("few", "some", "many"), jnp.array_split(sorted_tau, 3), strict=True)
    return {
        "tau": tau.mean(),
        "tau_fewest": sorted_tau[0],
        "tau_median": sorted_tau[len(tau) // 2],
        "tau_most": sorted_tau[-1],
    } | {f"tau_{name}": third.mean() for name, third in thirds}
