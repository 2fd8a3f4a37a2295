r"""FedProx: every client takes one exact proximal step, then the mean.

.. math::

  w_i = \arg\min_v f_i(v) + \frac{1}{\eta} \lVert v - w \rVert^2
      = \mathrm{prox}_{f_i, 2/\eta}(w), \qquad
  w \leftarrow \frac{1}{|C_t|} \sum_{i \in C_t} w_i .

A small eta is a short move, a large one gives the mean of the local minimisers.

References:
  Jung, "Federated Learning: From Theory to Practice", Alg. 10.
  Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.algorithms.networks.fedavg import subset
from fedjax_core.arrays import as_float, wide_if_known
from fedjax_core.linalg import solve_in_range
from fedjax_core.networks.operators import Operator, average
from fedjax_core.networks.oracles import Losses


def make(
    losses: Losses,
    num_nodes: int,
    *,
    eta: ArrayLike = 1.0,
    clients: int | Sequence[int] | None = None,
) -> Operator:
    """Builds FedProx; states are ``[n, ...]`` with equal rows.

    Args:
      losses: local losses with a proximal operator.
      num_nodes: n.
      eta: > 0.
      clients: as in `fedavg.make`.

    Raises:
      ValueError: eta or clients is out of range.
    """
    check.positive(eta=eta)

    def update(W, S, t, key):
        del S, t, key
        return losses.prox(W, 2 / eta)

    return Operator(None, update, project=average(), select=subset(num_nodes, clients))


def fixed_point(Q: ArrayLike, q: ArrayLike, eta: ArrayLike) -> jnp.ndarray:
    r"""Where FedProx with all clients leads on quadratic losses; ``[d]``.

    :math:`(\sum_i P_i Q_i)^{-1} \sum_i P_i Q_i a_i` with
    :math:`P_i = (Q_i + I / \eta)^{-1}` and the local minimisers a_i, Q_i a_i = -q_i / 2
    for Q ``[n, d, d]`` and q ``[n, d]``; of several fixed points the one of least norm.
    """
    Q, q = as_float(Q), as_float(q)
    with wide_if_known(Q, q, eta) as wide:
        near = Q.astype(wide) + jnp.eye(q.shape[1], dtype=wide)[None] / eta
        left = jnp.linalg.solve(near, Q.astype(wide)).sum(0)
        right = jnp.linalg.solve(near, -q[..., None].astype(wide) / 2).sum(0)[:, 0]
        total = Q.sum(0)
    return solve_in_range(total, left, right)
