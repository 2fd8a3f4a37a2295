r"""Model-agnostic FedRelax: nodes with any models, coupled by predictions on test sets.

Every edge has a test set D_e, and only predictions on it cross the edge:

.. math::

  h_i \leftarrow \arg\min_h f_i(h) + \alpha \sum_j A_{ij} \frac{1}{m'}
      \sum_{x \in D_e} (h(x) - h_j(x))^2 .

For the squared loss that is a weighted fit: the local points with weight 1/m_i each,
and for every neighbour the points of D_e, labelled by its predictions, with weight
:math:`\alpha A_{ij} / m'`. `make` runs any models that can be fitted so; `make_linear`
has the closed form.

References:
  Jung, "Federated Learning: From Theory to Practice", Alg. 12, Exercise 5.3.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, by_row, keep_rows, wide_if_known
from fedjax_core.linalg import inverse_of_sum, least_norm_solve
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.operators import Operator, message_sum
from fedjax_core.networks.oracles import node_rows, quadratic_shapes
from fedjax_core.types import PyTree


class Family(NamedTuple):
    """Nodes that share a kind of model; parameters have leaves ``[k, ...]``.

    Attributes:
      nodes: ``[k]`` ints, the nodes, in the order of the parameters' rows.
      predict: ``(params_i, X [rows, d]) -> [rows]``, for one node.
      fit: ``(params_i, X, y, weight) -> params_i``, which minimises the weighted sum of
        squared errors, from the old parameters on if it is iterative; for one node.
    """

    nodes: ArrayLike | Sequence[int]
    predict: Callable[[PyTree, jax.Array], jax.Array]
    fit: Callable[[PyTree, jax.Array, jax.Array, jax.Array], PyTree]


def least_squares(
    nodes: ArrayLike | Sequence[int],
    features: Callable[[jax.Array], jax.Array] = lambda X: X,
    ridge: float = 0.0,
) -> Family:
    """Models linear in features; parameters ``[k, p]``.

    `features` maps ``[rows, d]`` to ``[rows, p]``, and `ridge` >= 0 is the strength of
    a penalty ||w||^2; of several minimisers the one of least norm is taken.
    """
    check.non_negative(ridge=ridge)

    def fit(w, X, y, weight):
        rows = features(X)
        eye = jnp.eye(rows.shape[1], dtype=rows.dtype)
        matrix = rows.T @ (weight[:, None] * rows) + ridge * eye
        right = rows.T @ (weight * y)
        return least_norm_solve(matrix, right).astype(w.dtype)

    return Family(nodes, lambda w, X: features(X) @ w, fit)


def gradient_descent(
    nodes: ArrayLike | Sequence[int],
    predict: Callable[[PyTree, jax.Array], jax.Array],
    *,
    eta: float,
    steps: int = 10,
) -> Family:
    """Differentiable models, fitted by some gradient steps from where they are.

    Args:
      nodes: ``[k]``.
      predict: as in `Family`.
      eta: learning rate on the weighted sum of squared errors, > 0.
      steps: per round, >= 1.
    """
    check.positive(eta=eta)
    check.positive_int(steps=steps)

    def fit(params, X, y, weight):
        grad = jax.grad(lambda p: (weight * jnp.square(predict(p, X) - y)).sum())

        def one(_, params):
            return jax.tree.map(lambda p, g: p - eta * g, params, grad(params))

        return jax.lax.fori_loop(0, steps, one, params)

    return Family(nodes, predict, fit)


def make(
    graph: Graph,
    families: Sequence[Family],
    X: ArrayLike,
    y: ArrayLike,
    test: ArrayLike,
    *,
    alpha: ArrayLike,
    mask: ArrayLike | None = None,
) -> Operator:
    """Builds FedRelax for models of several kinds and the squared loss.

    The state is a tuple with the parameters of every family. A family's tables have as
    many slots as the most neighbours among its nodes.

    Args:
      graph: the network.
      families: every node belongs to one.
      X: ``[n, m, d]`` local features.
      y: ``[n, m]`` local labels.
      test: ``[E, m', d]``, the test set of every edge, or ``[m', d]`` for all.
      alpha: strength of GTVMin, >= 0.
      mask: ``[n, m]`` bool, the rows that exist; a node may have none.

    Raises:
      ValueError: alpha is out of range, a node is in no family or in two, or arrays
        have other shapes: an edge without a test set, say.
    """
    check.non_negative(alpha=alpha)
    n = graph.num_nodes
    X, y, real = node_rows(X, y, mask, n, allow_empty=True)
    test = _test_sets(graph, test, X.shape[2])
    own = real / jnp.maximum(real.sum(1, keepdims=True), 1).astype(X.dtype)
    nodes = [np.asarray(family.nodes) for family in families]
    if not np.array_equal(np.sort(np.concatenate(nodes)), np.arange(n)):
        raise ValueError(
            f"families must hold every node of 0..{n - 1} once, got "
            f"{[ids.tolist() for ids in nodes]}."
        )
    size = test.shape[1]
    source, target = np.asarray(graph.source), np.asarray(graph.target)
    senders, inboxes = [], []
    for ids in nodes:
        row = np.full(n, -1)
        row[ids] = np.arange(len(ids))
        sent = np.flatnonzero(row[source] >= 0)
        senders.append((sent, row[source[sent]]))
        inboxes.append(_inbox(target, ids, n))

    def emit(W, t, key):
        del t, key
        messages = jnp.zeros((len(source), size), y.dtype)
        for family, params, (sent, row) in zip(families, W, senders, strict=True):
            theirs = jax.tree.map(lambda p, row=row: p[row], params)
            heard = jax.vmap(family.predict)(theirs, test[graph.edge[sent]])
            messages = messages.at[sent].set(heard.astype(y.dtype))
        return messages

    def update(W, S, t, key):
        del t, key
        parts = zip(families, W, nodes, inboxes, strict=True)
        return tuple(
            jax.vmap(family.fit)(params, *_points(S, ids, inbox))
            for family, params, ids, inbox in parts
        )

    def _points(S, ids, inbox):
        """The rows, labels and weights of the weighted fits, one fit per node."""
        edge = graph.edge.at[inbox].get(mode="fill", fill_value=0)
        weight = graph.weight[graph.edge].at[inbox].get(mode="fill", fill_value=0)
        weight = jnp.asarray(alpha, X.dtype) * weight.astype(X.dtype) / size
        shape = len(ids), -1
        theirs = S.at[inbox].get(mode="fill", fill_value=0).reshape(shape)
        return (
            jnp.concatenate([X[ids], test[edge].reshape(*shape, X.shape[2])], 1),
            jnp.concatenate([y[ids], theirs], 1),
            jnp.concatenate([own[ids], jnp.repeat(weight, size, 1)], 1),
        )

    def keep(active, new, old):
        return tuple(
            keep_rows(active[ids], a, b)
            for ids, a, b in zip(nodes, new, old, strict=True)
        )

    return Operator(
        graph,
        update,
        emit=emit,
        aggregate=lambda graph, messages: messages,
        by_edge=True,
        keep=keep,
    )


def make_linear(
    graph: Graph, Q: ArrayLike, q: ArrayLike, test: ArrayLike, *, alpha: ArrayLike
) -> Operator:
    r"""Builds FedRelax on predictions for the losses w'Q_i w + q_i'w, W ``[n, d]``.

    The update is :math:`(Q_i + \alpha \sum_j A_{ij} T_e^\top T_e / m')^{-1} (-q_i/2 +
    \alpha \sum_j A_{ij} T_e^\top (T_e w_j) / m')`; with the rows sqrt(d) e_1 .. sqrt(d)
    e_d as test set it is `fedrelax.make_quadratic`. Where the matrix is singular the
    minimiser of least norm is taken.

    Args:
      graph: the network.
      Q: ``[n, d, d]``.
      q: ``[n, d]``.
      test: ``[E, m', d]``, the test set of every edge, or ``[m', d]`` for all.
      alpha: >= 0.

    Raises:
      ValueError: alpha is out of range, or arrays have other shapes.
    """
    check.non_negative(alpha=alpha)
    Q, q = quadratic_shapes(Q, q, graph.num_nodes)
    test, (n, d) = as_float(test), q.shape
    shared = test.ndim == 2  # the same predictions go to all neighbours
    sets = _test_sets(graph, test, d)
    # A large alpha cancels in here, with all digits, instead of in the rounds.
    with wide_if_known(graph.weight, Q, q, test, alpha) as wide:
        T, pull = test.astype(wide), jnp.broadcast_to(jnp.asarray(alpha, wide), (n,))
        pull /= test.shape[-2]
        if shared:
            gram = by_row(degree(graph).astype(wide), Q) * (T.T @ T)[None]
        else:
            squares = jnp.einsum("emd,emk->edk", T, T)
            gram = message_sum(graph, squares[graph.edge])
        inverse = inverse_of_sum(Q, gram, by_row(pull, Q))
        alone = jnp.einsum("nde,ne->nd", inverse, -q / 2).astype(q.dtype)
        # What a neighbour's predictions add to the parameters.
        if shared:
            gain = jnp.einsum("n,nde,me->ndm", pull, inverse, T)
        else:
            at, e = graph.target, graph.edge
            gain = jnp.einsum("l,lde,lme->ldm", pull[at], inverse[at], T[e])
        gain = gain.astype(q.dtype)

    def emit(W, t, key):
        del t, key
        if shared:
            return W @ test.T
        return jnp.einsum("emd,ed->em", sets[graph.edge], W[graph.source])

    def update(W, S, t, key):
        del W, t, key
        return alone + (jnp.einsum("ndm,nm->nd", gain, S) if shared else S)

    if shared:
        return Operator(graph, update, emit=emit)

    def back(graph, messages):
        return message_sum(graph, jnp.einsum("ldm,lm->ld", gain, messages))

    return Operator(graph, update, emit=emit, aggregate=back, by_edge=True)


def _test_sets(graph: Graph, test: ArrayLike, d: int) -> jax.Array:
    test = as_float(test)
    if test.ndim == 2:
        test = jnp.broadcast_to(test, (graph.num_edges, *test.shape))
    if test.ndim != 3 or test.shape[::2] != (graph.num_edges, d) or not test.shape[1]:
        raise ValueError(
            f"test must have shape ({graph.num_edges}, m', {d}), a test set for every "
            f"edge, or (m', {d}), got {test.shape}."
        )
    return test


def _inbox(target: np.ndarray, ids: np.ndarray, n: int) -> np.ndarray:
    """The directed edges into every node of a family, ``[k, K]``, 2E where none is."""
    count = np.bincount(target, minlength=n)
    slot = np.arange(count[ids].max(initial=0))
    first = (np.cumsum(count) - count)[ids, None]
    return np.where(slot < count[ids, None], first + slot, len(target))
