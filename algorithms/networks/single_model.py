r"""One model for all: local gradient steps by everybody, then the mean.

It minimises the sum of the f_i subject to all parameters being equal, by gradient steps
that are projected onto the consensus subspace ("almost FedAvg"):

.. math::

  v_i^0 = w, \quad v_i^r = v_i^{r-1} - \eta_{t,i} \nabla f_i(v_i^{r-1}), \quad
  w \leftarrow \frac{1}{n} \sum_i v_i^R .

With one step and a common rate it is gradient descent on the mean of the f_i. With
R > 1 and different losses the limit is another point, for quadratics `fixed_point`.
(The book's Alg. 8 sends one iterate and starts its clients at another; they start at
what the server sends.)

References:
  Jung, "Federated Learning: From Theory to Practice", Section 5.4, Alg. 8.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.algorithms.networks.fedgd import Oracle
from fedjax_core.arrays import as_float, by_row, wide_if_known
from fedjax_core.linalg import solve_in_range
from fedjax_core.networks.descent import Rate, check_positive_rate, rate_at
from fedjax_core.networks.operators import Operator, average
from fedjax_core.networks.oracles import Losses


def make(losses: Losses, *, eta: Rate, local_steps: int = 1) -> Operator:
    """Builds projected gradient descent; states are ``[n, ...]`` with equal rows.

    Args:
      losses: differentiable local losses.
      eta: learning rate > 0: a number, one per node, or a schedule of t.
      local_steps: R >= 1.

    Raises:
      ValueError: eta or local_steps is out of range.
    """
    return from_oracle(lambda W, t, key: losses.grad(W), eta=eta, steps=local_steps)


def from_oracle(
    oracle: Oracle, *, eta: Rate, steps: int, weight: ArrayLike | None = None
) -> Operator:
    """The same with any estimate of the gradients and a weighted mean."""
    check_positive_rate(eta)
    check.positive_int(local_steps=steps)

    def update(W, S, t, key):
        del S
        rate = rate_at(eta, t)

        def local(r, V):
            step_key = None if key is None else jax.random.fold_in(key, r)
            return jax.tree.map(
                lambda v, g: v - by_row(rate, v) * g, V, oracle(V, t, step_key)
            )

        return jax.lax.fori_loop(0, steps, local, W)

    return Operator(None, update, project=average(weight))


def fixed_point(Q: ArrayLike, q: ArrayLike, eta: ArrayLike, steps: int) -> jax.Array:
    r"""Where R local steps on quadratic losses lead, all nodes taking part; ``[d]``.

    With :math:`M_i = (I - 2 \eta Q_i)^R` and local minimisers a_i it is
    :math:`(\sum_i (I - M_i))^{-1} \sum_i (I - M_i) a_i`: for R = 1 the minimiser of the
    sum, for R to infinity the mean of the a_i.

    Args:
      Q: ``[n, d, d]``, semi-definite; of several fixed points that of least norm.
      q: ``[n, d]``.
      eta: the rate, below 1 / ld(Q_i).
      steps: R >= 1.

    Raises:
      ValueError: steps < 1.
    """
    check.positive_int(steps=steps)
    Q, q = as_float(Q), as_float(q)
    with wide_if_known(Q, q, eta) as wide:
        eye = jnp.eye(q.shape[1], dtype=wide)[None]
        M = eye - 2 * eta * Q.astype(wide)
        # 1 + M + ... + M^(R - 1), so that Q_i need not be inverted.
        powers = jax.lax.fori_loop(
            0, steps, lambda _, S: eye + M @ S, jnp.zeros_like(M)
        )
        left = (powers @ Q).sum(0)
        right = (powers @ (-q[..., None] / 2)).sum(0)[:, 0]
        total = Q.sum(0)
    return solve_in_range(total, left, right)
