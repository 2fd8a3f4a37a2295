r"""FedGD: gradient steps on GTVMin, from a node's own loss and its neighbours' vectors.

.. math::

  w_i \leftarrow w_i - \eta_{t,i} \Bigl[ \nabla f_i(w_i)
      + 2 \alpha \sum_{j} A_{ij} (w_i - w_j) \Bigr]

Through a synchronisation server it is the same: pass `operators.relay` as the
channel.

References:
  Jung, "Federated Learning: From Theory to Practice", Algs. 4 and 5, Props. 5.1, 5.2.
"""

from collections.abc import Callable

import jax
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import by_row
from fedjax_core.networks import gtvmin
from fedjax_core.networks.descent import Rate, check_positive_rate, rate_at
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.operators import Operator, Round
from fedjax_core.networks.oracles import Losses
from fedjax_core.networks.theory import contraction
from fedjax_core.types import Key, PyTree

Oracle = Callable[[PyTree, Round, Key | None], PyTree]
"""``(W, t, key) -> G``: for every node, an estimate of its gradient at its row."""


def make(graph: Graph, losses: Losses, *, alpha: ArrayLike, eta: Rate) -> Operator:
    """Builds FedGD.

    Args:
      graph: the network.
      losses: differentiable local losses.
      alpha: strength of GTVMin, >= 0.
      eta: learning rate > 0: a number, one per node ``[n]``, or a schedule of t giving
        either. `check_rate` says whether it is small enough.

    Raises:
      ValueError: alpha or eta is out of range.
    """
    return from_oracle(graph, lambda W, t, key: losses.grad(W), alpha=alpha, eta=eta)


def from_oracle(
    graph: Graph, oracle: Oracle, *, alpha: ArrayLike, eta: Rate
) -> Operator:
    """FedGD with any estimate of the gradients; Alg. 7 with a random one."""
    check.non_negative(alpha=alpha)
    check_positive_rate(eta)
    by_node = degree(graph)

    def update(W, S, t, key):
        rate = rate_at(eta, t)

        def one(w, g, s):
            pull = by_row(by_node, w) * w - s
            return w - by_row(rate, w) * (g + 2 * by_row(alpha, w) * pull)

        return jax.tree.map(one, W, oracle(W, t, key), S)

    return Operator(graph, update)


def rate_bound(graph: Graph, Q: ArrayLike, alpha: ArrayLike) -> jax.Array:
    """1 / (lam_max + 2 alpha d_max): every common rate below it converges (Prop. 5.1).

    `gtvmin.default_rate`, half of it, is one to start with.

    Arguments and errors are those of `gtvmin.smoothness`.
    """
    return 1 / gtvmin.smoothness(graph, Q, alpha)


def check_rate(graph: Graph, Q: ArrayLike, alpha: float, eta: ArrayLike) -> None:
    """Raises ValueError unless 0 < eta < `rate_bound`; call it once before a run."""
    contraction.check_rate(eta, 1 / float(rate_bound(graph, Q, alpha)))
