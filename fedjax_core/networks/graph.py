r"""Networks of devices: an undirected weighted graph and what flows along its edges.

Node i holds row i of every array in a pytree `W` of leaves ``[n, ...]``. All methods on
networks are made of the few operations here: differences along edges and their
transpose, sums over neighbours, and messages by neighbour for rules that must look at
each. With the incidence operator :math:`(DW)_e = w_j - w_i` of edges i < j,

.. math::

  L_G = D^\top \mathrm{diag}(A) D, \qquad
  (L_G W)_i = \sum_j A_{ij} (w_i - w_j).

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 3.1 and 3.2.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import ArrayLike
from scipy import sparse

from fedjax_core import check
from fedjax_core.arrays import along_rows, by_row, from_host, is_known
from fedjax_core.types import PyTree

# How many neighbours one row of a table holds. Sums over neighbours gather slot by slot
# over all rows of a width, two to three times faster than adding along edges. A node
# takes the narrowest row that holds its neighbours, so few slots are empty (one in
# eight of a random graph), and a hub takes many rows: tables grow with the edges.
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

# Up to so many slots all rows are of one width: less to compile.
_SMALL = 2**14

# `messages` makes a table as wide as the largest node, empty slots and all.
_MAX_MESSAGES = 2**20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    """Rows of one width K for R nodes; a slot that is empty repeats the node itself.

    Attributes:
      node: ``[R]`` int32, whose neighbours the row holds.
      source: ``[K, R]`` int32, the neighbours.
      at: ``[K, R]`` int32, the directed edges from them; 2E in an empty slot.
    """

    node: jax.Array
    source: jax.Array
    at: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """An undirected graph, every edge once; make one with `from_edges`.

    Edges of weight 0 change nothing but for rows that are not finite, see
    `neighbour_sum`. Weights may be traced and mapped, to sweep over them; the edges
    themselves may not.

    Attributes:
      head: ``[E]`` int32, the smaller node of each edge.
      tail: ``[E]`` int32, the larger one.
      weight: ``[E]`` float, A_ij >= 0.
      source: ``[2E]`` int32, the sender of every directed edge, ordered by `target`.
      target: ``[2E]`` int32, the receiver of every directed edge, not decreasing.
      edge: ``[2E]`` int32, the undirected edge that it belongs to.
      start: ``[n + 1]`` int32: the directed edges into node i are those from start[i]
        to start[i + 1] - 1.
      tables: the same neighbours in rows of a few widths, to sum over.
      row: ``[n]`` int32, the first row of every node in all tables one after another.
      more: ``[2, M]`` int32, the further rows of nodes with more than 32 neighbours
        and these nodes.
      num_nodes: n.
      max_edges: the most edges that a node has, those of weight 0 included.
    """

    head: jax.Array
    tail: jax.Array
    weight: jax.Array
    source: jax.Array
    target: jax.Array
    edge: jax.Array
    start: jax.Array
    tables: tuple[_Table, ...]
    row: jax.Array
    more: jax.Array
    num_nodes: int = dataclasses.field(metadata={"static": True})
    max_edges: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_edges(
        cls,
        edges: ArrayLike,
        weight: ArrayLike = 1.0,
        num_nodes: int | None = None,
        dtype: Any = float,
    ) -> "Graph":
        """Builds a graph from its list of edges.

        Args:
          edges: ``[E, 2]`` ints, every undirected edge once, in either direction.
          weight: ``[E]`` or one number, >= 0 and finite.
          num_nodes: n; by default the largest node plus one.
          dtype: of the weights, a float; by default JAX's own, float32 unless x64 is
            enabled.

        Raises:
          ValueError: a self-loop, an edge given twice, a node that is not in 0..n-1, a
            weight that is negative, not finite or so small that `dtype` takes it for
            0, or arrays of other shapes; names the edge.
          TypeError: edges or num_nodes that are not ints, weights that are not real, or
            a dtype that is no float.
        """
        pairs = np.asarray(edges)
        if pairs.size == 0:
            pairs = np.zeros((0, 2), np.int64)
        check_ints(edges=pairs)
        check_shapes("(E, 2)", edges=pairs)
        if num_nodes is None:
            num_nodes = int(pairs.max()) + 1 if len(pairs) else 1
        check.positive_int(num_nodes=num_nodes)
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype must be a float, got {dtype}.")
        weight = np.asarray(weight)
        _require_real("weight", weight.dtype)
        if weight.shape not in ((), (len(pairs),)):
            raise ValueError(
                f"weight must be one number or one per edge, shape ({len(pairs)},), "
                f"got shape {weight.shape}."
            )
        weight = np.broadcast_to(weight, len(pairs))
        pairs = pairs.astype(np.int64)

        def refuse(wrong, rule):
            if wrong.any():
                e = int(wrong.argmax())
                edge = rule.format(tuple(pairs[e].tolist()))
                raise ValueError(f"edges must {edge} as edge {e}.")

        nodes = f"join nodes in 0..{num_nodes - 1}"
        refuse(((pairs < 0) | (pairs >= num_nodes)).any(1), nodes + ", got {}")
        loop = pairs[:, 0] == pairs[:, 1]
        refuse(loop, "join two nodes, got a self-loop of node {0[0]}")
        weight = _cast_weight(weight, dtype)
        head, tail = pairs.min(1), pairs.max(1)
        again = np.ones(len(pairs), bool)
        again[np.unique(head * num_nodes + tail, return_index=True)[1]] = False
        refuse(again, "name every undirected edge once, got {} again")

        source, target = np.r_[tail, head], np.r_[head, tail]
        edge = np.tile(np.arange(len(pairs)), 2)
        order = np.lexsort((source, target))
        source, target, edge = source[order], target[order], edge[order]
        count = np.bincount(target, minlength=num_nodes)
        start = np.r_[0, np.cumsum(count)]
        tables, row, more = _tables(source, start)

        ints = functools.partial(from_host, dtype=np.int32)
        return cls(
            ints(head),
            ints(tail),
            from_host(weight, dtype),
            ints(source),
            ints(target),
            ints(edge),
            ints(start),
            tuple(_Table(*map(ints, table)) for table in tables),
            ints(row),
            ints(more),
            int(num_nodes),
            int(count.max()),
        )

    @classmethod
    def from_dense(cls, adjacency: ArrayLike) -> "Graph":
        """Builds a graph from its symmetric weights ``[n, n]``, 0 for no edge.

        Raises:
          ValueError: not square, not symmetric, a non-zero diagonal, or a weight that
            is negative, not finite or too small, see `from_edges`.
          TypeError: weights that are not real.
        """
        a = np.asarray(adjacency)
        _require_real("adjacency", a.dtype)
        if a.ndim != 2 or a.shape[0] != a.shape[1]:
            raise ValueError(f"adjacency must be square, got shape {a.shape}.")
        floats = jnp.issubdtype(a.dtype, jnp.floating)
        # SciPy has no halves.
        entries = sparse.csr_array(a.astype(np.float64) if floats else a)
        return cls.from_entries("adjacency", entries, a.dtype if floats else float)

    @classmethod
    def from_entries(cls, name: str, matrix: Any, dtype: Any) -> "Graph":
        """`from_dense` for a square `csr_array` that errors call `name`."""
        _require_real(name, matrix.dtype)
        i, j = matrix.nonzero()
        for rule, wrong in (
            ("be finite", ~np.isfinite(matrix.data)),
            ("have a zero diagonal", i == j),
        ):
            if wrong.any():
                e = int(wrong.argmax())
                raise ValueError(
                    f"{name} must {rule}, got {matrix.data[e]} from {i[e]} to {j[e]}."
                )
        skew = (matrix != matrix.T).nonzero()
        if len(skew[0]):
            at, back = (skew[0][0], skew[1][0]), (skew[1][0], skew[0][0])
            raise ValueError(
                f"{name} must be symmetric, got {matrix[at]} from {at[0]} to {at[1]} "
                f"and {matrix[back]} back."
            )
        upper: Any = sparse.triu(matrix, format="coo")
        edges = np.stack([upper.row, upper.col], 1)
        return cls.from_edges(edges, upper.data, matrix.shape[0], dtype)

    @property
    def num_edges(self) -> int:
        """E, edges of weight 0 included."""
        return self.head.shape[0]

    @jax.jit
    def dense(self) -> jax.Array:
        """The weights as a symmetric matrix ``[n, n]``."""
        a = jnp.zeros((self.num_nodes, self.num_nodes), self.weight.dtype)
        a = a.at[self.head, self.tail].add(self.weight)
        return a + a.T

    def with_weight(self, weight: ArrayLike) -> "Graph":
        """The same edges with other weights ``[E]``, which may be traced.

        Floats keep their dtype; ints and bools get the one that the weights have.

        Raises:
          ValueError: another shape, or a known weight that is negative, not finite or
            too small, see `from_edges`.
          TypeError: weights that are not real.
        """
        if np.shape(weight) != self.head.shape:
            raise ValueError(
                f"weight must have one entry per edge, shape {self.head.shape}, got "
                f"shape {np.shape(weight)}."
            )
        if not isinstance(weight, Tracer):
            weight = np.asarray(weight)
        _require_real("weight", weight.dtype)
        floats = jnp.issubdtype(weight.dtype, jnp.floating)
        dtype = weight.dtype if floats else self.weight.dtype
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if isinstance(weight, np.ndarray):
            weight = _cast_weight(weight, dtype)
        return dataclasses.replace(self, weight=jnp.asarray(weight, dtype))

    def __repr__(self):
        return f"Graph({self.num_nodes} nodes, {self.num_edges} edges)"


@jax.jit
def degree(graph: Graph) -> jax.Array:
    """The weighted degrees, the sum of A_ij over j; ``[n]``."""
    return _by_node(graph, [w.sum(0) for w in _slot_weights(graph)])


@jax.jit
def num_neighbours(graph: Graph) -> jax.Array:
    """How many edges of positive weight a node has; ``[n]`` int32."""
    return _by_node(
        graph, [(w > 0).astype(jnp.int32).sum(0) for w in _slot_weights(graph)]
    )


def edge_diff(graph: Graph, W: PyTree) -> PyTree:
    """D W: for every edge, its tail's row minus its head's; leaves ``[E, ...]``.

    Raises:
      ValueError: a leaf that has not one row per node.
    """
    check_rows(graph, W)
    return jax.tree.map(lambda w: w[graph.tail] - w[graph.head], W)


@jax.jit
def edge_scatter(graph: Graph, U: PyTree) -> PyTree:
    """D' U, the transpose of `edge_diff`: ``[E, ...]`` to ``[n, ...]``."""

    def scatter(u):
        if not graph.num_edges:
            return jnp.zeros((graph.num_nodes, *u.shape[1:]), u.dtype)
        edges = jnp.append(graph.edge, graph.num_edges)

        def slot(table, k):
            sign = jnp.sign(table.node - table.source[k])
            edge = edges.at[table.at[k]].get(mode="promise_in_bounds")
            along = u.at[edge].get(mode="fill", fill_value=0)
            return along_rows(sign.astype(u.dtype), u) * along

        return _sum_slots(graph, slot)

    return jax.tree.map(scatter, U)


@jax.jit
def neighbour_sum(graph: Graph, W: PyTree) -> PyTree:
    """For every node, the sum of A_ij w_j over its neighbours; leaves ``[n, ...]``.

    Rows must be finite: 0 times NaN is NaN, so that one that is not reaches its
    neighbours over edges of weight 0 too. To look would take half as long again.
    `operators.message_sum` and `variation.gtv` do.

    Raises:
      ValueError: a leaf that has not one row per node.
      TypeError: a leaf of ints, which the weights would be rounded to.
    """
    return _weighted_sum(graph, W, lambda w, table, k: _take(w, table.source[k]))


@jax.jit
def laplacian(graph: Graph, W: PyTree) -> PyTree:
    """L_G W: for every node, the sum of A_ij (w_i - w_j); leaves ``[n, ...]``.

    It adds differences, so that equal rows give exactly 0 in any precision. Rows must
    be finite, as for `neighbour_sum`.

    Raises:
      ValueError: a leaf that has not one row per node.
      TypeError: a leaf of ints, which the weights would be rounded to.
    """

    def difference(w, table, k):
        return _take(w, table.node) - _take(w, table.source[k])

    return _weighted_sum(graph, W, difference)


def message_sum(graph: Graph, messages: PyTree) -> PyTree:
    """The sum of A_ij m over the messages of every node, ``[2E, ...]`` to ``[n, ...]``.

    Adds in the order of `neighbour_sum`, so that copies of what all nodes sent give the
    same up to rounding; the compiler may fuse the two in different ways. A message that
    is not finite does not pass an edge of weight 0.
    """
    weights = _slot_weights(graph)

    def add_up(m):
        if not graph.num_edges:
            return jnp.zeros((graph.num_nodes, *m.shape[1:]), m.dtype)
        finite = jax.lax.cond(  # a look at every message takes as long as the sum
            (graph.weight > 0).all(),
            lambda: jnp.ones(len(m), bool),
            lambda: jnp.isfinite(m).all(tuple(range(1, m.ndim))),
        )

        def place(table, weight):
            # Skipped by its place, as a mask of what is added would round otherwise.
            passes = finite.at[table.at].get(mode="fill", fill_value=True)
            at = jnp.where((weight > 0) | passes, table.at, len(graph.edge))
            return jax.lax.optimization_barrier(at)

        def slot(table, k, weight, at):
            x = m.at[at[k]].get(mode="fill", fill_value=0)
            return by_row(weight[k], x) * x

        return _sum_slots(graph, slot, weights, map(place, graph.tables, weights))

    return jax.tree.map(add_up, jax.tree.map(jnp.asarray, messages))


def over_features(
    operation: Callable[[Graph, PyTree], PyTree],
    mesh: jax.sharding.Mesh | None,
    axis: str = "clients",
) -> Callable[[Graph, PyTree], PyTree]:
    """An operation of this module with the features of W split over devices.

    The features pass through a network apart from each other, so a device that holds a
    few features of all nodes needs nothing from another one. W and the result lie with
    their nodes, as local updates want them; each changes places once.

    Args:
      operation: `laplacian`, `neighbour_sum`, `edge_diff` or `edge_scatter`.
      mesh: devices; None for one, which changes nothing.
      axis: the mesh's axis that both nodes and features are split over.

    Returns:
      The operation for use under jit, on leaves ``[n, d, ...]`` (results
      ``[n or E, d, ...]``) whose first two sizes are multiples of the number of
      devices. The graph is copied to all of them.
    """
    if mesh is None:
        return operation

    def place(tree, *spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(tree, sharding)

    def run(graph, W):
        result = operation(graph, place(W, None, axis))
        return place(place(result, None, axis), axis)

    return run


@jax.jit
def messages(graph: Graph, W: PyTree) -> tuple[PyTree, jax.Array]:
    """What every node receives from W ``[n, ...]``, neighbour by neighbour.

    Leaves ``[n, K, ...]`` for K the most edges that a node has, and weights A_ij
    ``[n, K]``, 0 for an empty slot, which repeats what the node itself sends.

    Raises:
      ValueError: a hub would blow the table up: n K is above a million and above four
        times the directed edges; or a leaf has not one row per node.
    """
    check_rows(graph, W)
    size = graph.num_nodes * graph.max_edges
    if size > max(_MAX_MESSAGES, 8 * graph.num_edges):
        raise ValueError(
            f"messages needs a table of {graph.num_nodes} nodes x {graph.max_edges} "
            f"slots for {2 * graph.num_edges} messages; it must be at most "
            f"{_MAX_MESSAGES} or four times the messages."
        )
    slot = graph.start[:-1, None] + jnp.arange(graph.max_edges)[None]
    full = slot < graph.start[1:, None]
    myself = jnp.arange(graph.num_nodes)[:, None]
    source = jnp.where(full, _zero_last(graph.source)[slot], myself)
    weight = jnp.where(full, _zero_last(graph.weight[graph.edge])[slot], 0)
    return jax.tree.map(lambda w: w[source], W), weight


def check_rows(graph: Graph, W: PyTree, name: str = "W") -> None:
    """Raises ValueError unless every leaf of W has one row per node.

    Gathers and broadcasts would take any other number without a word.
    """
    for leaf in jax.tree.leaves(W):
        if np.shape(leaf)[:1] != (graph.num_nodes,):
            raise ValueError(
                f"{name} must have one row per node, {graph.num_nodes}, got shape "
                f"{np.shape(leaf)}."
            )


def check_shapes(shapes: str, **arrays: Any) -> None:
    """Raises ValueError unless arrays have shapes such as "(n, d) and (n,)".

    The same letter stands for the same size.
    """
    forms = [re.findall(r"[^, ]+", form) for form in re.findall(r"\((.*?)\)", shapes)]
    got, sizes = [np.shape(x) for x in arrays.values()], {}
    if [*map(len, forms)] == [*map(len, got)] and all(
        sizes.setdefault(name, int(name) if name.isdigit() else size) == size
        for name, size in zip(chain(*forms), chain(*got), strict=True)
    ):
        return

    def listed(x):
        return ", ".join(x[:-1]) + " and " * (len(x) > 1) + x[-1]

    raise ValueError(
        f"{listed([*arrays])} must have shape{'s' * (len(got) > 1)} {shapes}, got "
        f"{listed([*map(str, got)])}."
    )


def check_ints(**arrays: np.ndarray) -> None:
    """Raises TypeError unless arrays are of ints."""
    for name, x in arrays.items():
        if x.dtype.kind not in "iu":
            raise TypeError(f"{name} must be ints, got dtype {x.dtype}.")


def check_labels(of: str, count: int, **labels: ArrayLike) -> None:
    """Raises ValueError for a known label that is not in 0..count - 1, and says whose.

    Those drawn inside a program are not known.
    """
    for name, values in labels.items():
        if is_known(values):
            entries = np.asarray(values)
            for k in np.flatnonzero((entries < 0) | (entries >= count)):
                raise ValueError(
                    f"{name} must be in 0..{count - 1}, got {entries[k]} for {of} {k}."
                )


def unless_cut(weight: jax.Array, x: jax.Array) -> jax.Array:
    """What passes along edges, ``[E, ...]``: 0 for NaN or infinity at weight 0.

    All else stays as it is, so that slopes in weights that are 0 are right.
    """
    return jnp.where((along_rows(weight, x) > 0) | jnp.isfinite(x), x, 0)


def _tables(
    source: np.ndarray, start: np.ndarray
) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray, np.ndarray]:
    """Deals every node's directed edges out to rows, see `Graph`."""
    count = np.diff(start)
    most = _WIDTHS[-1]
    rows = np.maximum(1, -(-count // most))
    first_row = np.cumsum(rows) - rows
    node = np.repeat(np.arange(len(count)), rows)
    skipped = most * (np.arange(len(node)) - first_row[node])
    begin = start[node] + skipped
    length = np.minimum(count[node] - skipped, most)
    longest = max(1, int(length.max()))
    widths = (longest,) if longest * len(node) <= _SMALL else _WIDTHS
    width = np.asarray(widths)[np.searchsorted(widths, length)]
    order = np.argsort(width, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))

    tables = []
    for k in widths:
        of = order[width[order] == k]
        if not len(of):
            continue
        full = np.arange(k)[:, None] < length[of]
        slot = np.where(full, begin[of] + np.arange(k)[:, None], len(source))
        neighbour = np.where(full, np.append(source, 0)[slot], node[of])
        tables.append((node[of], neighbour, slot))
    further = np.flatnonzero(np.arange(len(node)) != first_row[node])
    return tables, place[first_row], np.stack([place[further], node[further]])


def _slot_weights(graph: Graph) -> list[jax.Array]:
    """The weights as the tables hold them, ``[K, R]`` each, 0 in empty slots."""
    weight = _zero_last(graph.weight[graph.edge])
    # Kept apart from the sum over slots, where every feature would look them up again.
    return [
        jax.lax.optimization_barrier(_take(weight, table.at)) for table in graph.tables
    ]


def _sum_slots(graph: Graph, slot: Callable[..., jax.Array], *tables: Any) -> jax.Array:
    """Adds ``slot(table, k, ...)`` over the slots of every row, then by node."""
    sums = []
    for table, *rest in zip(graph.tables, *tables, strict=True):
        total = slot(table, 0, *rest)
        for k in range(1, table.source.shape[0]):
            total += slot(table, k, *rest)
        sums.append(total)
    return _by_node(graph, sums)


def _by_node(graph: Graph, sums: list[jax.Array]) -> jax.Array:
    """Brings sums over rows, ``[R, ...]`` by table, to ``[n, ...]``."""
    rows = jnp.concatenate(sums)
    total = _take(rows, graph.row)
    if graph.more.shape[1]:
        total = total.at[graph.more[1]].add(_take(rows, graph.more[0]))
    return total


def _weighted_sum(graph: Graph, W: PyTree, term: Callable[..., jax.Array]) -> PyTree:
    """Sums over neighbours of A_ij times ``term(w, table, k)``, leaf by leaf."""
    check_rows(graph, W)
    weights = _slot_weights(graph)

    def add_up(w):
        if not jnp.issubdtype(w.dtype, jnp.inexact):
            raise TypeError(f"W must be floats, got dtype {w.dtype}.")

        def slot(table, k, weight):
            return along_rows(weight[k], w).astype(w.dtype) * term(w, table, k)

        return _sum_slots(graph, slot, weights)

    return jax.tree.map(add_up, W)


def _zero_last(x: jax.Array) -> jax.Array:
    return jnp.append(x, jnp.zeros(1, x.dtype))


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="promise_in_bounds")


def _require_real(name: str, dtype: Any) -> None:
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise TypeError(f"{name} must be real numbers, got dtype {dtype}.")


def _cast_weight(given: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):  # refused below
        weight = given.astype(dtype)
    check.each_non_negative("edge", weight=weight)
    tiny = jnp.finfo(dtype).tiny  # compiled code takes what is smaller for 0
    small = np.flatnonzero((given > 0) & (weight < tiny))
    if small.size:
        raise ValueError(
            f"weight must be 0 or at least {tiny} in {np.dtype(dtype)}, got "
            f"{given[small[0]]} for edge {small[0]}."
        )
    return weight
