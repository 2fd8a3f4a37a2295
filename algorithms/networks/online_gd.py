r"""Online gradient descent for least squares: one step per data point, as it arrives.

.. math::

  w_{t+1} = w_t + 2 \eta_t x_t (y_t - w_t^\top x_t), \qquad w_1 = 0

References:
  Jung, "Federated Learning: From Theory to Practice", Exercise 4.3, which prints y
  without its index t.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core.arrays import as_float
from fedjax_core.networks.descent import Rate, check_positive_rate, rate_at
from fedjax_core.networks.graph import check_shapes
from fedjax_core.networks.iterate import iterate


def online_gd(X: ArrayLike, y: ArrayLike, eta: Rate) -> jax.Array:
    """The parameters ``[M, d]`` after every data point X ``[M, d]`` and y ``[M]``.

    eta is a number > 0, or a schedule that gets 0 for the first point. The text's rates
    are ``power_decay(shift=6)`` and ``power_decay(power=0.5, shift=6)``, 1/(t+5) and
    1/sqrt(t+5) of t = 1, 2, .... Others raise ValueError.
    """
    X, y = as_float(X), as_float(y)
    check_shapes("(M, d) and (M,)", X=X, y=y)
    check_positive_rate(eta)

    def step(w, t, key):
        del key
        rate = jnp.asarray(rate_at(eta, t), X.dtype)
        return w + 2 * rate * X[t] * (y[t] - X[t] @ w)

    start = jnp.zeros(X.shape[1], X.dtype)
    return iterate(step, start, len(X), record=lambda w: w)[1]
