r"""Regularised risks of nodes with linear models, for learning over a network.

.. math::

  f_k(w) = \frac{1}{D_k} \sum_{j=1}^{D_k} \ell(x_{kj}^\top w, y_{kj})
    + \frac{\lambda}{K} \bigl(\lambda_1 \lVert w \rVert_1
    + \lambda_2 \lVert w \rVert^2\bigr)

with squared, absolute or logistic errors: ridge regression, the elastic net, least
absolute deviations and logistic regression. `losses` gives all that methods on networks
ask of them, and `minimum` the one w that minimises their sum.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, (3.2) and Section 3.6.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core.networks.oracles import (
    Losses,
    Quadratic,
    as_signs,
    node_rows,
    per_node,
    quadratic,
    smooth,
)
from fedjax_core.networks.robust_loss import absolute
from fedjax_core.types import Checked, Key, NonNegative

Error = Literal["squared", "absolute", "logistic"]


@dataclasses.dataclass(frozen=True)
class Risk(Checked):
    r"""What every node minimises on its own rows.

    Attributes:
      error: "squared", (p - y)^2; "absolute", |p - y|; or "logistic",
        log(1 + exp(-y p)) with labels y of -1 and 1.
      strength: :math:`\lambda \ge 0`, of the penalty that all nodes share.
      l2: :math:`\lambda_2 \ge 0`.
      l1: :math:`\lambda_1 \ge 0`; with "squared" only. The text's is a multiple of
        :math:`\lVert X^\top y \rVert_\infty` over the rows of all nodes, for which no
        privacy budget would account.

    Raises:
      ValueError: an attribute out of range, or a penalty that the error does not go
        with here: none with "absolute".
    """

    error: Error = "squared"
    strength: NonNegative = 0.0
    l2: NonNegative = 1.0
    l1: NonNegative = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.l1 and self.error != "squared":
            raise ValueError(f"l1 must be 0 with {self.error} errors, got {self.l1}.")
        if self.strength and self.error == "absolute":
            raise ValueError(
                f"strength must be 0 with absolute errors, got {self.strength}."
            )


Draw = Callable[[Key], tuple[ArrayLike, ArrayLike, ArrayLike | None]]
"""``key -> (X [n, m, d], y [n, m], mask [n, m] or None)``, the data of a seed."""


class Nodes(NamedTuple):
    """The data of n nodes as their risks need it.

    Attributes:
      X: ``[n, m, d]``, 0 in rows that do not exist.
      y: ``[n, m]``.
      share: ``[n, m]``, 1 / D_k in rows that exist and 0 elsewhere.
      stats: the smooth part with squared errors, Q_i, q_i and c_i; else ().
      l1: ``[]``, the factor of every node's sum of absolute parameters.
    """

    X: jax.Array
    y: jax.Array
    share: jax.Array
    stats: Quadratic | tuple[()]
    l1: jax.Array

    @property
    def num_examples(self) -> jax.Array:
        """D_k, ``[n]``."""
        return (self.share > 0).sum(1)


class World(NamedTuple):
    """What a run reads: the nodes, and ``[d]`` what they would learn in one place."""

    data: Nodes
    optimum: jax.Array


def world(risk: Risk, draw: Draw) -> Callable[[Key], World]:
    """The world of every seed, for a `networks.run.System`."""

    def of_seed(key):
        data = nodes(risk, *draw(key))
        return World(data, minimum(risk, data))

    return of_seed


def nodes(
    risk: Risk, X: ArrayLike, y: ArrayLike, mask: ArrayLike | None = None
) -> Nodes:
    """Prepares the data once.

    Args:
      risk: what the nodes minimise.
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      mask: ``[n, m]`` bool, the rows that exist; by default all. D_k counts them.

    Raises:
      ValueError: other shapes, a row that is not finite, a node without rows, or
        labels of a logistic error other than -1 and 1. What is drawn inside a program
        can't be refused: it makes NaN, which ends a run.
    """
    X, y, rows = node_rows(X, y, mask)
    if risk.error == "logistic":
        y = as_signs(y, rows)
    y = y.astype(X.dtype)
    share = rows.astype(X.dtype) / rows.sum(1, keepdims=True).astype(X.dtype)
    each = risk.strength / len(X)
    l1 = jnp.asarray(each * risk.l1, X.dtype)
    stats = ()
    if risk.error == "squared":
        Q = jnp.einsum("nmd,nme,nm->nde", X, X, share)
        q = -2 * jnp.einsum("nmd,nm,nm->nd", X, y, share)
        ridge = each * risk.l2 * jnp.eye(X.shape[2], dtype=X.dtype)
        stats = Quadratic(Q + ridge[None], q, jnp.einsum("nm,nm,nm->n", y, y, share))
    return Nodes(X, y, share, stats, l1)


def losses(risk: Risk, data: Nodes, *, steps: int = 30) -> Losses:
    """The risks as local losses; sub-gradients take the sign of 0 for 0.

    `steps` are those of the inner solver behind prox: proximal gradient steps with an
    l1 penalty, Newton's with absolute and logistic errors. Without one the squared
    error has it in closed form.
    """
    if risk.error == "absolute":
        # A mean with weights is one of scaled rows without.
        m = data.X.shape[1]
        scale = m * data.share
        return absolute(scale[..., None] * data.X, scale * data.y, steps=steps)
    if risk.error == "logistic":
        ridge = risk.strength * risk.l2

        def one(w, node):
            X, y, share, each = node
            return share @ jax.nn.softplus(-y * (X @ w)) + each * (w @ w)

        each = jnp.full(len(data.X), ridge / len(data.X), data.X.dtype)
        return smooth(one, (data.X, data.y, data.share, each), steps=steps)
    assert data.stats
    return _with_l1(data.stats, data.l1, steps) if risk.l1 else quadratic(*data.stats)


def minimum(risk: Risk, data: Nodes) -> jax.Array:
    """The w ``[d]`` that minimises the sum of all risks: the centralised solution.

    By proximal steps on the mean of the risks, which end at its minimum.
    """
    n, m, d = data.X.shape
    stats = ()
    if data.stats:
        stats = Quadratic(*(x.mean(0, keepdims=True) for x in data.stats))
    X, y = data.X.reshape(1, n * m, d), data.y.reshape(1, n * m)
    pooled = Nodes(X, y, data.share.reshape(1, n * m) / n, stats, data.l1)
    one = dataclasses.replace(risk, strength=risk.strength / n)
    of_all = losses(one, pooled, steps=300 if risk.l1 else 30)
    start = jnp.zeros((1, d), X.dtype)
    # Where a minimum has kinks a few steps end there exactly.
    count = 3 if risk.error == "absolute" else 10
    return jax.lax.fori_loop(0, count, lambda _, w: of_all.prox(w, 1e-3), start)[0]


def _with_l1(stats: Quadratic, l1: jax.Array, steps: int) -> Losses:
    """Quadratic losses on W ``[n, d]`` plus l1 times the sum of absolute parameters."""
    plain = quadratic(*stats)

    def value(W):
        return plain.value(W) + l1 * jnp.abs(W).sum(1)

    def prox(V, rho):
        rho = per_node("rho", rho, V)[:, None]
        highest = jnp.linalg.eigvalsh(2 * stats.Q)[:, -1:]
        length = 1 / (highest + rho)
        # Nesterov's momentum for strongly convex objectives.
        lowest = jnp.maximum(jnp.linalg.eigvalsh(2 * stats.Q)[:, :1], 0) + rho
        root = jnp.sqrt(lowest * length)
        momentum = (1 - root) / (1 + root)

        def step(_, both):
            old, ahead = both
            moved = ahead - length * (plain.grad(ahead) + rho * (ahead - V))
            new = jnp.sign(moved) * jnp.maximum(jnp.abs(moved) - length * l1, 0)
            return new, new + momentum * (new - old)

        return jax.lax.fori_loop(0, steps, step, (V, V))[0]

    return Losses(value, lambda W: plain.grad(W) + l1 * jnp.sign(W), prox)


def normalised_error(W: jax.Array, w: jax.Array) -> dict[str, jax.Array]:
    """The squared distances ``[n]`` of rows of W ``[n, d]`` to w, over ||w||^2.

    Returns:
      "normalised_error", their sum over the nodes as in the text, and
      "normalised_error_of_node". The sum at W = 0 is n.
    """
    error = ((W - w[None]) ** 2).sum(1) / (w @ w)
    return {"normalised_error": error.sum(), "normalised_error_of_node": error}
