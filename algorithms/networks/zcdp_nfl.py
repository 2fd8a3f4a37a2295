r"""zCDP-NFL: networked ADMM whose every message hides the data behind noise.

A node minimises the tangent of its risk at its last message plus the terms of ADMM,

.. math::

  w_k = \tilde w_k - \frac{f_k'(\tilde w_k) + \gamma_k + \rho \sum_l
    (\tilde w_k - \tilde w_l)}{1 / \eta_n + 2 \rho \deg_k}, \qquad
  \tilde w_k = w_k + \mathcal N\bigl(0, \sigma_k(n)^2 I\bigr),

sends :math:`\tilde w_k` to its neighbours and moves its dual by it, see
`networks.admm`. One example moves w_k by at most
:math:`\Delta_k(n) = 2 C / (D_k (2 \rho \deg_k + 1 / \eta_n))`, from which a budget has
the noise.

Configurations are the methods it is compared with: a `SplitBudget` makes it
(epsilon, delta)DP-NFL, ``primal="exact"`` P-ADMM, no budget the linearised and, with
the exact primal, plain networked ADMM (NFL).

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, Algorithm 2 (its body is in P2, Algorithm 1), Lemma I, Theorem I.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
import optax

from fedjax_core.networks import admm, private, risks
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.run import System
from fedjax_core.networks.schedules import power_decay
from fedjax_core.networks.spectrum import check_connected
from fedjax_core.privacy import Budget
from fedjax_core.types import Checked, Metrics, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    r"""How nodes learn and what they may give away.

    Attributes:
      rho: the penalty of ADMM, > 0.
      step_size: :math:`\eta_1 > 0` of the linearised primal.
      decay: p >= 0 of :math:`\eta_n = \eta_1 n^{-p}`; constant steps leave a floor
        where the risk has kinks.
      primal: "linearised", or "exact" by factorisation or the risk's inner solver.
      budget: of every node's messages; None sends them without noise.
      gradient_bound: C > 0, of the gradient of the error of one example, needed with a
        budget. A promise: nothing bounds those of squared errors, and nobody looks
        whether it is the largest norm of a row, or more, with others.

    Raises:
      ValueError: an attribute out of range, or a budget without gradient_bound.
    """

    rho: Positive = 1.0
    step_size: Positive = 1.0
    decay: NonNegative = 0.0
    primal: Literal["linearised", "exact"] = "linearised"
    budget: Budget | None = None
    gradient_bound: float | None = None

    def __post_init__(self):
        super().__post_init__()
        private.check_bound(self.budget, self.gradient_bound)

    @property
    def eta(self) -> optax.Schedule:
        """The steps of rounds t = 0, 1, ..., where n = t + 1."""
        return power_decay(self.step_size, self.decay)


class World(NamedTuple):
    """What a run reads.

    Attributes:
      problem: the data of all nodes and the optimum.
      spectral: of the exact primal with squared errors, else ().
    """

    problem: risks.World
    spectral: admm.Spectral | tuple[()]


class State(NamedTuple):
    """Of a run.

    Attributes:
      admm: parameters ``[n, d]``, messages and duals.
      ledger: what the messages have cost.
    """

    admm: admm.State
    ledger: private.Ledger


def make(config: Config, graph: Graph, risk: risks.Risk, draw: risks.Draw) -> System:
    """Builds the system for `networks.run`.

    Args:
      config: of the method.
      graph: the network.
      risk: what the nodes minimise.
      draw: a seed's data.

    Raises:
      ValueError: the graph is not connected.
    """
    check_connected(graph)
    exact = config.primal == "exact"
    factored = exact and risk.error == "squared" and not risk.l1
    problem_of = risks.world(risk, draw)

    def world(key):
        problem = problem_of(key)
        stats = problem.data.stats[:2]
        return World(problem, admm.spectral(*stats) if factored else ())

    def init(world, key):
        del key
        n, _, d = world.problem.data.X.shape
        W = jnp.zeros((n, d), world.problem.data.X.dtype)
        return State(admm.init(graph, W), private.ledger(graph))

    def primal(world):
        losses = risks.losses(risk, world.problem.data)
        if factored:
            return admm.quadratic(world.spectral)
        if exact:
            return admm.proximal(losses)
        return admm.linearised(losses.grad, config.eta)

    def curvature(t):
        by_neighbours = 2 * config.rho * degree(graph)
        return by_neighbours if exact else by_neighbours + 1 / config.eta(t)

    def step(world, state, t, key):
        count = world.problem.data.num_examples
        send = private.sender(
            graph, config.budget, config.gradient_bound, count, curvature
        )
        params = admm.minimise(graph, config.rho, primal(world), state.admm, t)
        sent, ledger = send(state.ledger, params, t, key)
        new = admm.exchange(graph, config.rho, state.admm, params, sent)
        return State(new, ledger), private.metrics(state.ledger, ledger)

    def evaluate(world, state) -> Metrics:
        error = risks.normalised_error(state.admm.params, world.problem.optimum)
        return private.report(state.ledger) | error

    horizon = private.horizon(config.budget)
    return System("zcdp_nfl", (config, risk), world, init, step, evaluate, horizon)
