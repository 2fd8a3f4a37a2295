r"""PGFL: servers on a graph learn a model for every cluster of their clients.

A client k of server s and cluster q minimises, by ADMM with its server,

.. math::

  w_k = \arg\min_w f_k(w) - \langle \varphi_k, w \rangle
    + \tfrac{\rho}{2} \lVert w - w_{s,q} \rVert^2, \qquad
  \tilde w_k = w_k + \mathcal N(0, \sigma_k(n)^2 I) .

The server averages :math:`\tilde w_k - \varphi_k / \rho` over those that took part,
then over servers nearby, and every cluster learns a little from the others,

.. math::

  w_{s,q} = (1 - \tau_n) \hat w_{s,q} + \frac{\tau_n}{Q - 1} \sum_{r \ne q}
    \hat w_{s,r}, \qquad \varphi_k \leftarrow \varphi_k + \rho (w_{s,q} - \tilde w_k) .

One cluster is GFL, servers that do not cooperate ClusterFL, one server and one cluster
conventional federated learning.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, (5.4)-(5.12), Algorithms 4 and 5. The single-step update that it prints moves
  servers apart; its signs are corrected here.
"""

import dataclasses
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core import check, random
from fedjax_core.arrays import keep_rows
from fedjax_core.networks import builders, private, served
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.run import System
from fedjax_core.networks.spectrum import check_connected
from fedjax_core.privacy import Budget
from fedjax_core.types import (
    Checked,
    Fraction,
    Metrics,
    NonNegative,
    Positive,
    PositiveInt,
    Share,
)


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    r"""How clients and servers learn.

    Attributes:
      num_clusters: Q >= 1; with 1 all clients share a model whatever they are.
      rho: the penalty of ADMM, > 0.
      strength: lambda >= 0 of the ridge penalty.
      error: "squared", solved in closed form, or "logistic" of labels -1 and 1.
      tau: :math:`\tau_0` in [0, 1), what a cluster learns from the others.
      tau_decay: in (0, 1], by which it falls from round to round.
      mixing: of neighbouring servers, a rule of `builders.mixing` or "none".
      update: "multi", or "single", which mixes the models of the round before.
      reply: what moves the dual: the "model" that a client is sent, or its server's
        own "aggregate" as in the text, which sends it nowhere.
      per_server: clients that take part, of every server; None is all.
      penalty_shared_by: the "server"'s clients, as printed, or those of its "cluster".
      solver_steps: of Newton's for the logistic error, enough to find the minimum.
      budget: of every client's messages; None sends them without noise.
      gradient_bound: C > 0, of the gradient of the error of one example, needed with a
        budget. A promise: for logistic errors the largest norm of a row will do.

    Raises:
      ValueError: an attribute out of range, tau with one cluster, single steps with
        another mixing than "neighbours", or a budget without gradient_bound.
    """

    num_clusters: PositiveInt = 1
    rho: Positive = 1.0
    strength: NonNegative = 0.0
    error: Literal["squared", "logistic"] = "squared"
    tau: Fraction = 0.0
    tau_decay: Annotated[Share, check.positive] = 1.0
    mixing: Literal["neighbours", "metropolis", "none"] = "neighbours"
    update: Literal["multi", "single"] = "multi"
    reply: Literal["model", "aggregate"] = "model"
    per_server: PositiveInt | None = None
    penalty_shared_by: Literal["server", "cluster"] = "server"
    solver_steps: PositiveInt = 30
    budget: Budget | None = None
    gradient_bound: float | None = None

    def __post_init__(self):
        super().__post_init__()
        private.check_bound(self.budget, self.gradient_bound)
        if self.update == "single" and self.mixing != "neighbours":
            raise ValueError(
                f"mixing must be 'neighbours' with single steps, got {self.mixing!r}."
            )
        if self.num_clusters == 1 and self.tau:
            raise ValueError(
                f"tau must be 0 with one cluster, got {self.tau}: there are no others."
            )


class State(NamedTuple):
    """Of a run.

    Attributes:
      models: ``[S, Q, d]``, of every server and cluster.
      params: ``[K, d]``, what clients keep to themselves.
      dual: ``[K, d]``, phi.
      between: ``[S, Q, d]``, the servers' dual of the single-step update; else 0.
      ledger: what clients have said.
    """

    models: jax.Array
    params: jax.Array
    dual: jax.Array
    between: jax.Array
    ledger: private.Ledger


def make(config: Config, graph: Graph, draw: served.Draw) -> System:
    """Builds the system for `networks.run`.

    Args:
      config: of the method.
      graph: the servers'.
      draw: a seed's clients.

    Raises:
      ValueError: servers that mix are not connected, or `served.prepared` refuses
        what is drawn.
    """
    c, Q = config, config.num_clusters
    near = np.eye(graph.num_nodes)
    if c.mixing != "none":
        check_connected(graph)
        near = builders.mixing(graph, c.mixing)

    def world(key):
        shared = c.penalty_shared_by == "cluster"
        return served.prepared(
            draw(key), graph.num_nodes, Q, c.strength, c.error, by_cluster=shared
        )

    def init(world, key):
        del key
        K, d = world.X.shape[0], world.X.shape[2]
        models = jnp.zeros((graph.num_nodes, Q, d), world.X.dtype)
        W = jnp.zeros((K, d), world.X.dtype)
        return State(models, W, W, models, private.ledger_of(K))

    def step(world, state, t, key):
        mine = world.server
        tau = c.tau * c.tau_decay ** jnp.asarray(t, float)
        who = served.scheduled(random.stream(key, "schedule"), mine, c.per_server)
        theirs = state.models[mine, world.cluster]
        primal = served.primal(world, c.solver_steps)
        W = primal(theirs, -state.dual, jnp.full(len(mine), c.rho, theirs.dtype), t)
        params = keep_rows(who, W, state.params)
        heard, count = who.astype(jnp.int32), world.num_examples
        send = private.sender_to(
            heard, c.budget, c.gradient_bound, count, lambda t: c.rho
        )
        sent, ledger = send(state.ledger, params, t, random.stream(key, "noise"))
        own = served.cluster_means(
            sent - state.dual / c.rho, who, mine, world.cluster, state.models
        )
        if c.update == "multi":
            models, between = served.mix(near, tau, own), state.between
        else:
            models, between = served.single_step(
                graph, near, c.rho, tau, own, state.models, state.between
            )
        reply = models if c.reply == "model" else own
        dual = state.dual + c.rho * (reply[mine, world.cluster] - sent)
        new = State(models, params, keep_rows(who, dual, state.dual), between, ledger)
        return new, private.metrics(state.ledger, ledger)

    def evaluate(world, state) -> Metrics:
        found = served.quality(world, state.params, state.models)
        return private.report(state.ledger) | found

    horizon = private.horizon(config.budget)
    return System("pgfl", config, world, init, step, evaluate, horizon)
