r"""Horizontal learning: the nodes hold different rows of one table.

With a loss per node that is a sum of squared errors,
:math:`f_i(w) = \lVert y_i - X_i w \rVert^2`, GTVMin on a connected graph tends to least
squares on the whole table as alpha grows, with an error of order 1 / alpha. With the
average errors of the other methods it tends to another vector, unless all nodes hold
equally many rows.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 6.3 and Exercise 6.1.
"""

import numpy as np
from jax.typing import ArrayLike

from fedjax_core.arrays import as_mask
from fedjax_core.networks.oracles import Quadratic, least_squares_statistics


def sum_of_squares(
    X: ArrayLike, y: ArrayLike, mask: ArrayLike | None = None
) -> Quadratic:
    """The losses ||y_i - X_i w||^2 without the usual 1 / m_i.

    Arguments are those of `oracles.least_squares_statistics`, but a node may be empty.
    """
    stats = least_squares_statistics(X, y, mask, allow_empty=True)
    size = as_mask("mask", mask, np.shape(y)).sum(1).astype(stats.c.dtype)
    return Quadratic(
        size[:, None, None] * stats.Q, size[:, None] * stats.q, size * stats.c
    )
