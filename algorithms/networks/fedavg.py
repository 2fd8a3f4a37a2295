r"""FedAvg as projected descent: a random subset takes R oracle steps, then the mean.

.. math::

  v_i^0 = w, \quad v_i^r = v_i^{r-1} - \eta_{t,i}\, g_i(v_i^{r-1}), \quad
  w \leftarrow \frac{\sum_{i \in C_t} c_i v_i^R}{\sum_{i \in C_t} c_i} .

It is GTVMin with the projection onto consensus in place of the penalty. The book counts
every client once, c_i = 1; the paper counts its examples, c_i = m_i.
`fedjax_core.algorithms.fedavg` is the same method in the server world, where only the
clients of a round cost anything.

References:
  Jung, "Federated Learning: From Theory to Practice", Alg. 9.
  McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
  Data", AISTATS 2017, Algorithm 1.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.algorithms.networks.fedgd import Oracle
from fedjax_core.algorithms.networks.single_model import from_oracle
from fedjax_core.networks.descent import Rate
from fedjax_core.networks.operators import Operator


def make(
    oracle: Oracle,
    num_nodes: int,
    *,
    eta: Rate,
    local_steps: int = 5,
    clients: int | Sequence[int] | None = None,
    weights: Literal["uniform", "samples"] = "uniform",
    num_samples: ArrayLike | Sequence[int] | None = None,
) -> Operator:
    """Builds FedAvg; states are ``[n, ...]`` with equal rows.

    Args:
      oracle: ``(W, t, key) -> G``, gradient estimates, as `fedsgd.least_squares`.
      num_nodes: n.
      eta: learning rate > 0: a number, one per node, or a schedule of t.
      local_steps: R >= 1.
      clients: how many nodes take part in a round, drawn uniformly without
        replacement; or which ones, in every round; None is all.
      weights: "uniform" counts every client once, "samples" by `num_samples`.
      num_samples: m_i ``[n]``, > 0.

    Raises:
      ValueError: an argument is out of range, or weights and num_samples disagree.
    """
    check.one_of(("uniform", "samples"), weights=weights)
    if (weights == "samples") != (num_samples is not None):
        raise ValueError('num_samples must be given with weights="samples" only.')
    count = None if num_samples is None else np.asarray(num_samples)
    if count is not None and (count.shape != (num_nodes,) or not (count > 0).all()):
        raise ValueError(
            f"num_samples must be > 0 for {num_nodes} nodes, got {num_samples!r}."
        )
    operator = from_oracle(oracle, eta=eta, steps=local_steps, weight=count)
    return operator._replace(select=subset(num_nodes, clients))


def subset(num_nodes: int, clients: int | Sequence[int] | None):
    """An `Operator.select` of `clients` of the nodes, see `make`.

    Raises:
      ValueError: no client, more than there are, one twice or one that does not exist.
    """
    check.positive_int(num_nodes=num_nodes)
    if clients is None:
        return None
    if isinstance(clients, int | np.integer):
        check.in_range(1, num_nodes, clients=clients)

        def select(t, key):
            del t
            if key is None:
                raise ValueError("key must be given to a run that draws clients.")
            return jax.random.permutation(key, num_nodes) < clients

        return select
    ids = np.asarray(clients)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError(f"clients must name at least one node, got {clients!r}.")
    if ids.min() < 0 or ids.max() >= num_nodes or len(np.unique(ids)) < len(ids):
        raise ValueError(
            f"clients must be different nodes in 0..{num_nodes - 1}, got {clients!r}."
        )
    mask = jnp.asarray(np.isin(np.arange(num_nodes), ids), bool)
    return lambda t, key: mask
