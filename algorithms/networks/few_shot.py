r"""Few-shot learning: one node per category, its model the detector of that category.

Edges say which categories are related. GTVMin then lends the detectors of categories
with few examples, or none, the parameters of related ones.

References:
  Jung, "Federated Learning: From Theory to Practice", Section 6.6, which leaves the
  detector open; here it is linear, fitted to +1 and -1 by least squares.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, check_finite
from fedjax_core.networks.graph import check_labels, check_shapes
from fedjax_core.networks.oracles import Quadratic


def one_vs_rest(X: ArrayLike, label: ArrayLike, num_categories: int) -> Quadratic:
    """The losses of all detectors: category c against all others.

    The examples of c weigh one half in all, the others the other half, so that a rare
    category is not drowned. A category without examples has the zero loss: what it
    learns comes from its neighbours.

    X ``[N, d]`` are features, with a column of ones for an intercept; labels, ``[N]``
    ints in 0..num_categories-1, are the nodes of the network.

    Raises:
      ValueError: other shapes, features that are not finite, a label out of range, or
        fewer than two categories with examples.
    """
    check.positive_int(num_categories=num_categories)
    X, label = as_float(X), np.asarray(label)
    check_shapes("(N, d) and (N,)", X=X, label=label)
    check_finite(X=X)
    check_labels("example", num_categories, label=label)
    count = np.bincount(label, minlength=num_categories)
    if (count > 0).sum() < 2:
        raise ValueError("label must name at least two categories.")
    own = label == np.arange(num_categories)[:, None]
    share = np.where(own, count[:, None], len(label) - count[:, None])
    weight = jnp.asarray(np.where(count[:, None] > 0, 0.5 / share, 0), X.dtype)
    target = jnp.where(own, 1, -1).astype(X.dtype)
    Q = jnp.einsum("cr,rd,re->cde", weight, X, X, precision="highest")
    q = -2 * jnp.einsum("cr,cr,rd->cd", weight, target, X, precision="highest")
    return Quadratic(Q, q, weight.sum(1))


def classify(W: ArrayLike, X: ArrayLike) -> jax.Array:
    """The category whose detector answers loudest; ``[N]`` int32."""
    score = jnp.matmul(jnp.asarray(X), jnp.asarray(W).T, precision="highest")
    return jnp.argmax(score, axis=1).astype(jnp.int32)
