r"""How much models differ along the edges of a network.

A penalty :math:`\phi(w_i - w_j)` compares parameters, a discrepancy compares what two
models predict on a test set that both ends of an edge know. The generalised total
variation is :math:`\sum_{\{i,j\}} A_{ij} \phi(w_i - w_j)`.
Strengths that are negative or not finite raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 3.1, 3.3 and 6.5.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import flat_rows
from fedjax_core.networks.graph import Graph, check_rows, edge_diff, unless_cut
from fedjax_core.types import PyTree


class Penalty(NamedTuple):
    """A penalty phi(u) = phi(-u) of the differences along edges; call it.

    Attributes:
      value: ``leaves [E, ...] -> [E]``.
      dual_norm: the same for the dual of the norm that phi is; None if phi is none.
    """

    value: Callable[[PyTree], jax.Array]
    dual_norm: Callable[[PyTree], jax.Array] | None = None

    def __call__(self, difference: PyTree) -> jax.Array:
        """Evaluates phi on every edge."""
        return self.value(difference)


def squared(strengths: PyTree = 1.0) -> Penalty:
    """The sum over leaves of a times ||u||^2, what the book means by default.

    Jung, (33) and, for several strengths, (149).

    Strengths are one number for all leaves or a prefix of W's tree, of numbers or
    arrays that broadcast to one node's parameters; strength 0 is personal.
    """
    check_strengths("strengths", strengths)

    def value(u):
        squares = scaled(strengths, jax.tree.map(jnp.square, u))
        return _total(jax.tree.map(lambda x: flat_rows(x).sum(1), squares))

    return Penalty(value)


def check_strengths(name: str, alpha: PyTree) -> None:
    """Raises ValueError unless all known strengths are finite and >= 0; names where."""
    for path, leaf in jax.tree.leaves_with_path(alpha):
        known = np.zeros(()) if isinstance(leaf, Tracer) else np.asarray(leaf)
        wrong = ~(np.isfinite(known) & (known >= 0))
        if wrong.any():
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must be >= 0 and finite, got "
                f"{known[wrong].flat[0]}."
            )


def scaled(strengths: PyTree, W: PyTree) -> PyTree:
    """Leaves of W ``[n or E, ...]`` times the strength that stands for them.

    Strengths are a prefix of W's tree; a leaf broadcasts to one node's parameters.
    """

    def one(a, w):
        a = jnp.asarray(a, w.dtype)
        return a.reshape((1,) * (w.ndim - a.ndim) + a.shape) * w

    def below(a, part):
        return jax.tree.map(lambda w: one(a, w), part)

    return jax.tree.map(below, strengths, W)


def l2() -> Penalty:
    """||u||_2 over all leaves together; its gradient at 0 is taken as 0."""
    return lp(2.0)


def dual_exponent(p: float) -> float:
    """The q of the dual norm, 1 / p + 1 / q = 1, for p >= 1, else a ValueError."""
    if not p >= 1:
        raise ValueError(f"p must be >= 1, got {p!r}.")
    return math.inf if p == 1 else 1.0 if math.isinf(p) else p / (p - 1)


def lp(p: float) -> Penalty:
    """||u||_p of all leaves together, p in [1, inf]; its gradient at 0 is 0."""
    q = dual_exponent(p)
    return Penalty(lambda u: _norm(u, p), lambda u: _norm(u, q))


def blocks(parts: Mapping[str, tuple[ArrayLike, Penalty]]) -> Penalty:
    """The sum over blocks of parameters of a times a penalty of that block alone.

    Jung, (149).

    `parts` has for every key of W, a mapping, the block's strength a >= 0, which may be
    traced, and its penalty. Strength 0 keeps a block personal.

    Raises:
      ValueError: a negative or non-finite strength and, when called, other keys.
    """
    for a, _ in parts.values():
        check.non_negative(strength=a)

    def value(u):
        if set(u) != set(parts):
            raise ValueError(
                f"the blocks of W must be {sorted(parts)}, got {sorted(u)}."
            )
        return _total([a * penalty(u[key]) for key, (a, penalty) in parts.items()])

    return Penalty(value)


def gtv(graph: Graph, W: PyTree, penalty: Callable | None = None) -> jax.Array:
    """The generalised total variation, every undirected edge once; a scalar.

    What is not finite does not count at an edge of weight 0. W has leaves ``[n, ...]``,
    and the penalty is by default `squared`. Jung, (34).
    """
    U = edge_diff(graph, jax.tree.map(jnp.asarray, W))
    U = jax.tree.map(lambda u: unless_cut(graph.weight, u), U)
    value = (penalty or squared())(U)
    weight = graph.weight.astype(value.dtype)
    return (weight * unless_cut(weight, value)).sum()


Loss = Callable[[jax.Array, jax.Array], jax.Array]
"""``(predictions, labels) -> losses``, example by example, ``[..., m]``."""


def squared_error(prediction: jax.Array, label: jax.Array) -> jax.Array:
    """(prediction - label)^2."""
    return (prediction - label) ** 2


def prediction_discrepancy(
    ours: jax.Array,
    theirs: jax.Array,
    loss: Loss = squared_error,
    mask: jax.Array | None = None,
) -> jax.Array:
    """How far two models' predictions on the same test sets are apart, ``[...]``.

    Each model's predictions are labels for the other, and the two mean losses are
    averaged, so that the value is the same from both ends. It needs nothing but the
    predictions, which is all that has to cross a link (Jung, Exercise 3.8).
    Jung, (31) and (64).

    Args:
      ours: ``[..., m]`` predictions of a model.
      theirs: the same of the other.
      loss: of predictions against labels.
      mask: bool ``[..., m]``, the test points that exist; an edge without any has
        discrepancy 0.
    """
    apart = (loss(ours, theirs) + loss(theirs, ours)) / 2
    if mask is None:
        return apart.mean(-1)
    mask = jnp.broadcast_to(mask, apart.shape)
    return jnp.where(mask, apart, 0).sum(-1) / jnp.maximum(mask.sum(-1), 1)


def discrepancy(
    graph: Graph,
    predict: Callable[[PyTree, Any], jax.Array],
    W: PyTree,
    test_sets: PyTree,
    loss: Loss = squared_error,
    mask: jax.Array | None = None,
    shared: bool = False,
) -> jax.Array:
    """How far the predictions at the ends of every edge are apart, ``[E]``.

    Jung, (31) and (64).

    Args:
      graph: E edges.
      predict: ``(w, x) -> [m]``, predictions of one model for a test set.
      W: leaves ``[n, ...]``.
      test_sets: leaves ``[E, m, ...]``, those of the edges in the order of the graph.
        With `shared`, ``[m, ...]``, one for all edges, which every node predicts once.
      loss: of predictions against labels.
      mask: bool ``[E, m]``, the test points that exist; ``[m]`` with `shared`.
      shared: whether all edges use the same test set.

    Raises:
      ValueError: test sets of another number than the edges, or rows of W than nodes.
    """
    check_rows(graph, W)
    if shared:
        predicted = jax.vmap(predict, (0, None))(W, test_sets)
        ours, theirs = predicted[graph.head], predicted[graph.tail]
    else:
        for leaf in jax.tree.leaves(test_sets):
            if leaf.shape[0] != graph.num_edges:
                raise ValueError(
                    f"test_sets must have one row per edge, {graph.num_edges}, got "
                    f"shape {leaf.shape}."
                )
        ours, theirs = (
            jax.vmap(predict)(jax.tree.map(lambda w: w[end], W), test_sets)  # noqa: B023
            for end in (graph.head, graph.tail)
        )
    return prediction_discrepancy(ours, theirs, loss, mask)


def exact_test_set(num_features: int) -> np.ndarray:
    """A test set on which the discrepancy of linear models is ||w_i - w_j||^2.

    The d points sqrt(d) e_1, ..., sqrt(d) e_d, ``[d, d]`` float64; a Gaussian sample
    comes to the same only as it grows (Jung, Exercise 3.7).
    """
    check.positive_int(num_features=num_features)
    return np.sqrt(num_features) * np.eye(num_features)


def _total(tree: PyTree) -> jax.Array:
    return functools.reduce(jnp.add, jax.tree.leaves(tree))


def _norm(u: PyTree, p: float) -> jax.Array:
    """The norm of p of every row over all leaves together."""
    rows = jnp.concatenate([flat_rows(x) for x in jax.tree.leaves(u)], 1)
    size = rows * jnp.sign(rows)  # like abs, but with slope 0 at 0
    if p == math.inf:
        return size.max(1)
    if p == 1:
        return size.sum(1)
    # Powers of ratios neither overflow nor lose the small; the root of 0 has no slope.
    scale = jax.lax.stop_gradient(size.max(1))
    scale = jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1)
    power = ((size / scale[:, None]) ** p).sum(1)
    root = jnp.where(power > 0, power, 1) ** (1 / p)
    return jnp.where(power > 0, scale * root, 0 * power)
