r"""zCDP-grad-NFL: gossip and sub-gradient steps, with noise on every message.

.. math::

  w_k = \sum_l a_{kl} \tilde w_l - \eta_n f_k'(\tilde w_k), \qquad
  \tilde w_k = w_k + \mathcal N\bigl(0, \sigma_k(n)^2 I\bigr)

with the doubly stochastic :math:`a_{kl} = 1 / (1 + \max(\deg_k, \deg_l))` of
Metropolis. One example moves w_k by at most :math:`2 C \eta_n / D_k`. Constant steps
leave a distance from the optimum even without noise, as nodes pull apart.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, Section 3.6, which names it; the weights are those of Xiao, Boyd and Lall.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core.networks import private, risks
from fedjax_core.networks.builders import metropolis
from fedjax_core.networks.graph import Graph, laplacian
from fedjax_core.networks.run import System
from fedjax_core.networks.schedules import power_decay
from fedjax_core.networks.spectrum import check_connected
from fedjax_core.privacy import Budget
from fedjax_core.types import Checked, Metrics, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    r"""How nodes learn and what they may give away.

    Attributes:
      step_size: :math:`\eta_1 > 0`.
      decay: p >= 0 of :math:`\eta_n = \eta_1 n^{-p}`.
      budget: of every node's messages; None sends them without noise.
      gradient_bound: as for `zcdp_nfl.Config`.
    """

    step_size: Positive = 1.0
    decay: NonNegative = 0.5
    budget: Budget | None = None
    gradient_bound: float | None = None

    def __post_init__(self):
        super().__post_init__()
        private.check_bound(self.budget, self.gradient_bound)

    @property
    def eta(self) -> optax.Schedule:
        """The steps of rounds t = 0, 1, ..., where n = t + 1."""
        return power_decay(self.step_size, self.decay)


class State(NamedTuple):
    """Of a run: parameters and last messages ``[n, d]``, and what these have cost."""

    params: jax.Array
    sent: jax.Array
    ledger: private.Ledger


def make(config: Config, graph: Graph, risk: risks.Risk, draw: risks.Draw) -> System:
    """Builds the system for `networks.run`; arguments are those of `zcdp_nfl.make`."""
    check_connected(graph)
    mixing = metropolis(graph)

    def init(world, key):
        del key
        n, _, d = world.data.X.shape
        W = jnp.zeros((n, d), world.data.X.dtype)
        return State(W, W, private.ledger(graph))

    def step(world, state, t, key):
        eta = config.eta
        slope = risks.losses(risk, world.data).grad(state.sent)
        params = state.sent - laplacian(mixing, state.sent) - eta(t) * slope
        count, stiff = world.data.num_examples, lambda t: 1 / jnp.asarray(eta(t))
        send = private.sender(graph, config.budget, config.gradient_bound, count, stiff)
        sent, ledger = send(state.ledger, params, t, key)
        return State(params, sent, ledger), private.metrics(state.ledger, ledger)

    def evaluate(world, state) -> Metrics:
        error = risks.normalised_error(state.params, world.optimum)
        return private.report(state.ledger) | error

    of_seed, horizon = risks.world(risk, draw), private.horizon(config.budget)
    both = config, risk
    return System("zcdp_grad_nfl", both, of_seed, init, step, evaluate, horizon)
