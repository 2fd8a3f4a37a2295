r"""Networks from data: how unlike local data sets are, and whom to join.

A dissimilarity :math:`d^{(i,j)} \ge 0` of every pair comes from vectors that represent
the nodes. The networks that it gives, with weights in [0, 1] and small
:math:`\sum_{\{i,j\}} A_{ij} d^{(i,j)}`, differ in what they ask for: k neighbours
(`builders.knn`), one weighted degree for all, or a number of edges. Arguments out of
the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 7.2 and 7.3.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from scipy import sparse
from scipy.optimize import linprog

from fedjax_core import check
from fedjax_core.arrays import as_mask, is_known, repeat_rows
from fedjax_core.networks.builders import check_distance
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.oracles import Losses
from fedjax_core.types import PyTree


def representation_distance(Z: PyTree) -> jax.Array:
    """||z_i - z_j||_2 of the vectors that represent nodes, ``[n, n]``.

    The vectors may be estimates of parameters (for nodes with one number each, the
    number), `label_shares`, `gradient_representation` or `mean_code`.
    Jung, Section 7.2.
    """
    leaves = [z.reshape(z.shape[0], -1) for z in map(jnp.asarray, jax.tree.leaves(Z))]
    rows = jnp.concatenate(leaves, 1)
    return lax.map(lambda z: jnp.sqrt(((rows - z[None]) ** 2).sum(1)), rows)


def label_counts(
    labels: ArrayLike, num_classes: int, mask: ArrayLike | None = None
) -> jax.Array:
    """How often every label, ``[n, m]`` ints in 0..C-1, occurs; ``[n, C]`` int32.

    `mask` ``[n, m]`` bool says which exist; by default all.

    Raises:
      ValueError: a known label that exists and is not in 0..C-1.
      TypeError: labels that are not ints.
    """
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise TypeError(f"labels must be ints, got dtype {jnp.result_type(labels)}.")
    exists = as_mask("mask", mask, np.shape(labels))
    if is_known(labels, exists):
        known = np.asarray(labels)
        wrong = ((known < 0) | (known >= num_classes)) & np.asarray(exists)
        if wrong.any():
            i, r = np.argwhere(wrong)[0]
            raise ValueError(
                f"labels must be in 0..{num_classes - 1}, got {known[i, r]} as label "
                f"{r} of node {i}."
            )
    hits = jax.nn.one_hot(labels, num_classes, dtype=jnp.int32)
    return (hits * exists[..., None]).sum(1)


def label_shares(counts: ArrayLike) -> jax.Array:
    """The label histogram of every node, which sums to 1, ``[n, C]``.

    `representation_distance` of it compares nodes by their labels, such as ten digits.
    A node without data has the zero histogram.
    """
    counts = jnp.asarray(counts)
    return counts / jnp.maximum(counts.sum(1, keepdims=True), 1)


def label_overlap(counts: ArrayLike) -> jax.Array:
    """The share of two nodes' data whose label both know, a similarity, ``[n, n]``.

    Of all data points of both nodes, those whose label occurs at either, by `counts`
    ``[n, C]`` of `label_counts`; 0 where neither has data.
    ``1 - label_overlap(counts)`` is a dissimilarity. Jung, Section 7.2, second example.
    """
    counts = jnp.asarray(counts).astype(float)
    common = counts @ (counts > 0).astype(counts.dtype).T
    size = counts.sum(1)
    return (common + common.T) / jnp.maximum(size[:, None] + size[None], 1)


def gradient_representation(losses: Losses, v: PyTree, num_nodes: int) -> PyTree:
    """The gradients of all local losses at the same parameters, leaves ``[n, ...]``.

    For average squared errors 2 Q_i v + q_i; v has leaves ``[...]``. Jung, (157).
    """
    at_v = repeat_rows(v, num_nodes)
    return losses.grad(at_v)


def mean_code(
    encode: Callable[[Any], jax.Array], X: PyTree, mask: ArrayLike | None = None
) -> jax.Array:
    """The mean code of every node's data, ``[n, k]``.

    Jung, Section 7.2, "Feature learning".

    That is the encoder, ``[m, ...] -> [m, k]`` of an autoencoder, such as
    `linear_encoder`, on X ``[n, m, ...]`` where `mask` ``[n, m]`` bool says that there
    is a data point. A node without any has code 0.
    """
    codes = jax.vmap(encode)(X)
    exists = as_mask("mask", mask, codes.shape[:2])
    total = jnp.where(exists[..., None], codes, 0).sum(1)
    return total / jnp.maximum(exists.sum(1, keepdims=True), 1)


def linear_encoder(
    X: ArrayLike, size: int, mask: ArrayLike | None = None
) -> Callable[[jax.Array], jax.Array]:
    """The encoder of the linear autoencoder of least squared error on all data.

    The projection of the centred features ``[n, m, d]`` on their first `size` principal
    components, in 1..d. `mask` ``[n, m]`` bool says which data points exist.
    """
    X = np.asarray(X)
    check.positive_int(size=size)
    check.in_range(1, X.shape[2], size=size)
    rows = X[np.asarray(as_mask("mask", mask, X.shape[:2]))]
    centre = rows.mean(0)
    basis = np.linalg.eigh((rows - centre).T @ (rows - centre))[1][:, ::-1][:, :size]

    def encode(x: jax.Array) -> jax.Array:
        return (x - jnp.asarray(centre)[None]) @ jnp.asarray(basis)

    return encode


class LearnedWeights(NamedTuple):
    """Weights of a network that minimise the total dissimilarity.

    Attributes:
      weights: ``[n, n]`` in [0, 1], symmetric with a zero diagonal; for a network,
        ``Graph.from_dense(np.where(weights > tiny, weights, 0))``.
      objective: the sum of A_ij d_ij over unordered pairs, ``[]``; the book's sum runs
        over both orders and is twice as large.
      residual: the largest deviation of a node's degree, ``[]``.
    """

    weights: jax.Array
    objective: jax.Array
    residual: jax.Array


def degree_constrained(distance: ArrayLike, degree: float) -> LearnedWeights:
    """Least total dissimilarity with weighted degree `degree` at every node.

    A linear program in the weights in [0, 1] of all pairs, solved by HiGHS at a vertex
    (Jung, (158) to (160), projects gradient steps instead). It may have fractional
    weights: two far triangles at degree 1 get 1/2 on all their edges.

    For `distance` see `builders.check_distance`; `degree` is in [0, n - 1].
    """
    d = check_distance(distance)
    n = len(d)
    check.in_range(0, n - 1, degree=degree)
    i, j = np.triu_indices(n, 1)
    weights, off = np.zeros((n, n)), np.where(np.eye(n, dtype=bool), np.inf, d)
    if n > 1:
        # All degrees are given, so what all distances of a node have in common costs
        # every network the same and would only hide their differences, to which the
        # solver's tolerance must be small.
        own = off.min(1) / 2
        cost = off - own[:, None] - own
        near = np.sort(cost, 1)[:, : min(2 * max(1, int(np.ceil(degree))), n - 1)]
        unit = np.median(near) or near.max() or 1
        pair = np.arange(len(i))
        ends = (np.r_[i, j], np.r_[pair, pair])
        found = linprog(
            cost[i, j] / unit,
            A_eq=sparse.csr_array((np.ones(2 * len(i)), ends)),
            b_eq=np.full(n, degree),
            bounds=(0, 1),
            method="highs-ds",
        )
        if found.status != 0:
            raise RuntimeError(f"the linear program failed: {found.message}")
        weights[i, j] = weights[j, i] = found.x
    A = jnp.asarray(weights)
    objective = jnp.asarray((weights[i, j] * d[i, j]).sum())
    return LearnedWeights(A, objective, jnp.abs(A.sum(1) - degree).max())


def edge_budget(distance: ArrayLike, num_edges: float) -> Graph:
    """Least total dissimilarity with a total weight, each edge at most 1 (Jung, (161)).

    In closed form, the most similar pairs. The book's sum over ordered pairs counts
    every edge twice, so its E_max is twice `num_edges`, and it calls an upper bound
    what is an equality.

    For `distance` see `builders.check_distance`; of pairs at the same distance the
    first counts as nearer. `num_edges` is the total weight, in [0, n (n - 1) / 2]; a
    fraction goes to the last edge.
    """
    d = check_distance(distance)
    i, j = np.triu_indices(len(d), 1)
    check.in_range(0, len(i), num_edges=num_edges)
    whole = int(num_edges)
    nearest = np.argsort(d[i, j], kind="stable")[: int(np.ceil(num_edges))]
    weight = np.ones(len(nearest))
    weight[whole:] = num_edges - whole
    return Graph.from_edges(np.stack([i, j], 1)[nearest], weight, len(d))
