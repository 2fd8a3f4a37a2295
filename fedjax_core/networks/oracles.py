r"""Local losses of all nodes: value, gradient and proximal operator.

Everything that methods on networks ask of a loss. Row i of each result belongs to the
loss :math:`f_i` of node i, and

.. math::

  \mathrm{prox}_{f_i, \rho_i}(v_i) = \arg\min_w f_i(w) + \frac{\rho_i}{2} \|w-v_i\|^2 .

The book scales its proximal steps in three ways; here they are one, with rho = 2 / eta
for FedProx, 1 / eta for the extended gradient step and 2 alpha deg_i for FedRelax.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 3.3 and 4.6, (57).
"""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import (
    along_rows,
    as_float,
    as_mask,
    check_finite,
    flat_rows,
    is_known,
)
from fedjax_core.linalg import pulled_inverse
from fedjax_core.networks.graph import check_shapes
from fedjax_core.types import PyTree

# A full Newton step may overshoot far from the minimiser.
_DAMPING = np.r_[0.5 ** np.arange(12), 0]


class Losses(NamedTuple):
    """The local losses of n nodes.

    Attributes:
      value: ``W -> [n]``, f_i(w_i).
      grad: ``W -> W``, the gradients of f_i at w_i.
      prox: ``(V, rho) -> W``, see the module; rho > 0 is one number or ``[n]``.
      prepare: ``rho -> (V -> W)``, the same where rho stays, with whatever depends on
        rho alone computed once; None if there is nothing of the kind.
    """

    value: Callable[[PyTree], jax.Array]
    grad: Callable[[PyTree], PyTree]
    prox: Callable[[PyTree, ArrayLike], PyTree]
    prepare: Callable[[ArrayLike], Callable[[PyTree], PyTree]] | None = None

    def prox_at(self, rho: ArrayLike) -> Callable[[PyTree], PyTree]:
        """The map ``V -> prox(V, rho)`` for a loop over V; call it before the loop."""
        return self.prepare(rho) if self.prepare else lambda V: self.prox(V, rho)


class Quadratic(NamedTuple):
    """f_i(w) = w' Q_i w + q_i' w + c_i; all that linear methods need of the data.

    Attributes:
      Q: ``[n, d, d]``, symmetric and positive semi-definite.
      q: ``[n, d]``.
      c: ``[n]``.
    """

    Q: jax.Array
    q: jax.Array
    c: jax.Array


def least_squares_statistics(
    X: ArrayLike,
    y: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    allow_empty: bool = False,
) -> Quadratic:
    """The average squared errors of linear models, ||y_i - X_i w||^2 / m_i.

    Q_i = X_i' X_i / m_i, q_i = -2 X_i' y_i / m_i and c_i = y_i' y_i / m_i (Jung, (6)
    and (53)). Every node counts the same, however many rows it has.

    Args:
      X: ``[n, m, d]`` features.
      y: ``[n, m]`` labels.
      mask: ``[n, m]`` bool, the rows that exist; by default all. m_i counts them.
      allow_empty: whether a node without rows is meant to have the zero loss.

    Raises:
      ValueError: other shapes, a row that is not finite, or a node without rows.
    """
    X, y, rows = node_rows(X, y, mask, allow_empty=allow_empty)
    count = rows.sum(1)
    scale = 1 / jnp.maximum(count, 1).astype(X.dtype)
    Q = jnp.einsum("nmd,nme,n->nde", X, X, scale)
    q = -2 * jnp.einsum("nmd,nm,n->nd", X, y, scale)
    return Quadratic(Q, q, jnp.einsum("nm,nm,n->n", y, y, scale))


def node_rows(
    X: ArrayLike,
    y: ArrayLike,
    mask: ArrayLike | None,
    n: int | str = "n",
    *,
    allow_empty: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The data of n nodes: X ``[n, m, d]``, y ``[n, m]`` and rows ``[n, m]`` bool.

    What stands in rows that do not exist may be NaN; it is replaced by 0.

    Raises:
      ValueError: other shapes, a row that is not finite, or a node without rows where
        that is not allowed.
    """
    X, y = as_float(X), as_float(y)
    check_shapes(f"({n}, m, d) and ({n}, m)", X=X, y=y)
    known = is_known(X, y, mask)
    # Inside jit what is known would become traced, and not be looked at.
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
        rows = as_mask("mask", mask, y.shape)
        if mask is not None:
            X, y = jnp.where(rows[..., None], X, 0), jnp.where(rows, y, 0)
        check_finite(X=X, y=y)
        if not allow_empty:
            check_no_empty(rows)
    return X, y, rows


def as_signs(y: ArrayLike, rows: ArrayLike) -> jax.Array:
    """Labels -1 and 1 of rows ``[..., m]``; others raise ValueError, traced are NaN."""
    if is_known(y, rows):
        wrong = np.asarray(y)[np.asarray(rows) & (np.abs(y) != 1)]
        if wrong.size:
            raise ValueError(f"y must be labels -1 and 1, got {wrong[0]}.")
    y = jnp.asarray(y)
    return jnp.where(jnp.asarray(rows) & (jnp.abs(y) != 1), jnp.nan, y)


def check_no_empty(rows: jax.Array) -> None:
    """Raises ValueError where a known mask ``[n, m]`` leaves a node no row."""
    if is_known(rows) and not (count := np.asarray(rows).sum(1)).all():
        raise ValueError(
            f"mask must leave every node a row, got none for node {count.argmin()}."
        )


def quadratic(Q: ArrayLike, q: ArrayLike, c: ArrayLike = 0.0) -> Losses:
    """Losses w' Q_i w + q_i' w + c_i on W ``[n, d]``.

    The gradient is 2 Q_i w + q_i and prox is (2 Q_i + rho_i I)^-1 (rho_i v_i - q_i)
    (Jung, Exercise 3.15). Q is ``[n, d, d]``, see `check_quadratic`, q ``[n, d]`` and c
    ``[n]`` or one number.

    Raises:
      ValueError: other shapes, of W too, known matrices that are not symmetric, or,
        when prox is called, rho <= 0 or, where known, below the rounding of a singular
        Q_i.
    """
    Q, q = quadratic_shapes(Q, q)
    if is_known(Q):
        _check_symmetric(Q)
    c = jnp.broadcast_to(jnp.asarray(c, q.dtype), q.shape[:1])

    def check(W: jax.Array) -> None:
        # One node's loss would broadcast to all.
        check_shapes(f"({len(q)}, {q.shape[1]})", W=W)

    def value(W: jax.Array) -> jax.Array:
        check(W)
        return jnp.einsum("nd,nde,ne->n", W, Q, W) + (q * W).sum(1) + c

    def grad(W: jax.Array) -> jax.Array:
        check(W)
        return 2 * jnp.einsum("nde,ne->nd", Q, W) + q

    def prepare(rho: ArrayLike) -> Callable[[jax.Array], jax.Array]:
        r = per_node("rho", rho, q)
        inverse = pulled_inverse(2 * Q, r)

        def prox(V: jax.Array) -> jax.Array:
            check(V)
            return jnp.einsum("nde,ne->nd", inverse, r[:, None] * V - q)

        return prox

    return Losses(value, grad, lambda V, rho: prepare(rho)(V), prepare)


def squared_distance(a: ArrayLike) -> Losses:
    """Losses ||w_i - a_i||^2 for W and a of one shape ``[n, ...]`` (Jung, (67))."""
    a = as_float(a)

    def prox(V: jax.Array, rho: ArrayLike) -> jax.Array:
        r = along_rows(per_node("rho", rho, a), a)
        return (2 * a + r * V) / (2 + r)

    return Losses(lambda W: _square_norm(W - a), lambda W: 2 * (W - a), prox)


def zero() -> Losses:
    """The losses of nodes without data, 0 everywhere; prox returns V itself."""

    def value(W: PyTree) -> jax.Array:
        leaf = jax.tree.leaves(W)[0]
        return jnp.zeros(leaf.shape[:1], leaf.dtype)

    def prox(V: PyTree, rho: ArrayLike) -> PyTree:
        per_node("rho", rho, V)
        return V

    return Losses(value, lambda W: jax.tree.map(jnp.zeros_like, W), prox)


def smooth(
    loss_fn: Callable[[PyTree, Any], jax.Array],
    data: PyTree,
    *,
    method: Literal["newton", "gradient"] = "newton",
    steps: int = 10,
    step_size: ArrayLike | None = None,
) -> Losses:
    """Losses of one node as a function, mapped over the nodes; convex and smooth.

    prox starts at V and takes a fixed number of inner steps, so it is approximate: call
    `prox_residual` to see how far it got.

    Args:
      loss_fn: ``(w_i, data_i) -> scalar``, for one node.
      data: leaves ``[n, ...]``.
      method: "newton", which forms the d x d Hessian of every node and shortens steps
        that would raise the gradient's norm; or "gradient".
      steps: inner steps of prox.
      step_size: of "gradient", one number or ``[n]``; at most 1 / (smoothness + rho)
        keeps it from diverging.

    Raises:
      ValueError: an unknown method, steps < 1, or a step_size that is missing, <= 0 or
        given to "newton".
    """
    check.one_of(("newton", "gradient"), method=method)
    check.positive_int(steps=steps)
    if (method == "gradient") != (step_size is not None):
        raise ValueError(
            'step_size must be given with method="gradient" and only there, got '
            f"{step_size!r} with {method!r}."
        )

    def one_prox(v, example, rho, step_length):
        start, unravel = ravel_pytree(v)

        def target(w):
            return loss_fn(unravel(w), example) + rho / 2 * ((w - start) ** 2).sum()

        slope = jax.grad(target)

        def newton(_, w):
            move = jnp.linalg.solve(jax.hessian(target)(w), slope(w))
            length = jnp.asarray(_DAMPING, w.dtype)
            tried = w[None] - jnp.outer(length, move)
            # By the gradient, as the target itself is flat to rounding near the end.
            return tried[jnp.nanargmin(_square_norm(jax.vmap(slope)(tried)))]

        def gradient(_, w):
            return w - step_length * slope(w)

        step = newton if method == "newton" else gradient
        return unravel(jax.lax.fori_loop(0, steps, step, start))

    def prox(V: PyTree, rho: ArrayLike) -> PyTree:
        length = 1.0 if step_size is None else step_size
        length, rho = per_node("step_size", length, V), per_node("rho", rho, V)
        return jax.vmap(one_prox)(V, data, rho, length)

    return Losses(
        lambda W: jax.vmap(loss_fn)(W, data),
        lambda W: jax.vmap(jax.grad(loss_fn))(W, data),
        prox,
    )


def prox_residual(losses: Losses, V: PyTree, W: PyTree, rho: ArrayLike) -> jax.Array:
    """How far W is from prox(V, rho): ||grad f_i(w_i) + rho_i (w_i - v_i)||; ``[n]``.

    The distance from w_i to the exact point is at most this number over rho_i.
    """
    rho = per_node("rho", rho, W)
    parts = jax.tree.map(
        lambda g, w, v: _square_norm(g + along_rows(rho, w) * (w - v)),
        losses.grad(W),
        W,
        V,
    )
    return jnp.sqrt(sum(jax.tree.leaves(parts)))


def check_quadratic(Q: ArrayLike, *, definite: bool = False) -> None:
    """Raises ValueError unless every Q_i is finite, symmetric and semi-definite.

    Traced ones are not looked at. `definite` asks for positive definite matrices, as
    the conjugates of the losses do.
    """
    Q = as_float(Q)
    if not is_known(Q):
        return
    slack = _check_symmetric(Q)
    finite = np.isfinite(np.asarray(Q)).all((1, 2))
    if not finite.all():
        raise ValueError(f"Q must be finite, is not for node {np.argmin(finite)}.")
    # Scaled: the units of the unknowns must not matter.
    x = np.array(Q, np.float64)
    own = np.einsum("naa->na", x)  # a view
    own[(own < 0) & (own > -slack[:, None])] = 0
    room = np.where(slack > 0, slack, 1)[:, None]
    s = 1 / np.sqrt(np.where(own > 0, own, room))
    smallest = np.linalg.eigvalsh(x * s[:, :, None] * s[:, None])[:, 0]
    rounding = 8 * Q.shape[1] * float(jnp.finfo(Q.dtype).eps)
    wrong = smallest <= rounding if definite else smallest < -rounding
    if wrong.any():
        i = int(np.argmax(wrong))
        rule = "definite" if definite else "semi-definite"
        raise ValueError(
            f"Q must be positive {rule}, got the eigenvalue {smallest[i]:.3g} for node "
            f"{i}."
        )


def _check_symmetric(Q: jax.Array) -> np.ndarray:
    """Checks shape and symmetry; returns what is rounding, ``[n]``."""
    x = np.asarray(Q)
    if x.ndim != 3 or x.shape[1] != x.shape[2]:
        raise ValueError(f"Q must have shape (n, d, d), got {x.shape}.")
    size = np.abs(x).max((1, 2), initial=0)
    slack = 8 * x.shape[1] * float(jnp.finfo(x.dtype).eps) * size
    skew = np.abs(x - np.swapaxes(x, 1, 2)).max((1, 2), initial=0)
    if (skew > slack).any():
        i = int(np.argmax(skew - slack))
        raise ValueError(f"Q must be symmetric, is not for node {i}.")
    return slack


def per_node(name: str, value: ArrayLike, like: PyTree) -> jax.Array:
    """A number > 0 for every row of `like` ``[n, ...]``, from one or ``[n]``.

    A known one that is not, or another shape, raises ValueError.
    """
    leaf = jax.tree.leaves(like)[0]
    n = leaf.shape[0]
    if not isinstance(value, Tracer):
        known = np.asarray(value)
        if known.shape not in ((), (n,)):
            raise ValueError(
                f"{name} must be one number or have shape ({n},), got {known.shape}."
            )
        wrong = ~((known > 0) & np.isfinite(known))
        if wrong.any():
            raise ValueError(f"{name} must be > 0 and finite, got {known[wrong][0]}.")
    return jnp.broadcast_to(jnp.asarray(value, leaf.dtype), (n,))


def quadratic_shapes(
    Q: ArrayLike, q: ArrayLike, n: int | str = "n"
) -> tuple[jax.Array, jax.Array]:
    """Q ``[n, d, d]`` and q ``[n, d]`` as floats; ValueError for other shapes."""
    Q, q = as_float(Q), as_float(q)
    check_shapes(f"({n}, d, d) and ({n}, d)", Q=Q, q=q)
    return Q, q


def _square_norm(x: jax.Array) -> jax.Array:
    return (flat_rows(x) ** 2).sum(1)
