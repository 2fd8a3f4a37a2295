"""Builders of networks, all with edges of weight 1; `Graph.with_weight` gives others.

Random builders take a seed and run on the host, in time and memory linear in the nodes
and edges that they make. Arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 3.1, 5.9, 6.2 and 7.1.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.spatial.distance import cdist

from fedjax_core import check
from fedjax_core.networks.graph import Graph, check_shapes, num_neighbours
from fedjax_core.networks.spectrum import adjacency, components

EARTH_RADIUS_KM = 6371.0088

# Distances between this many pairs are held at a time.
_BLOCK = 2**22


def star(num_nodes: int) -> Graph:
    """Node 0 joined to all others, as clients to a server."""
    check.positive_int(num_nodes=num_nodes)
    leaves = np.arange(1, num_nodes)
    return _graph((np.zeros_like(leaves), leaves), num_nodes)


def chain(num_nodes: int) -> Graph:
    """Every node joined to the next one."""
    check.positive_int(num_nodes=num_nodes)
    nodes = np.arange(num_nodes)
    return _graph((nodes[:-1], nodes[1:]), num_nodes)


def cycle(num_nodes: int) -> Graph:
    """A chain of at least three nodes whose ends are joined."""
    check.positive_int(num_nodes=num_nodes)
    if num_nodes < 3:
        raise ValueError(f"num_nodes of a cycle must be >= 3, got {num_nodes}.")
    nodes = np.arange(num_nodes)
    return _graph((nodes, np.roll(nodes, -1)), num_nodes)


def complete(num_nodes: int) -> Graph:
    """All pairs joined."""
    check.positive_int(num_nodes=num_nodes)
    return _graph(np.triu_indices(num_nodes, 1), num_nodes)


def clique_plus_pendant(clique: int) -> Graph:
    """`clique` nodes, all joined, and a last one that hangs on node 0.

    Its second eigenvalue is 1 whatever the size of the clique, at least 2 (Jung,
    footnote 23): one loose node keeps a cluster from being well connected.
    """
    check.positive_int(clique=clique)
    i, j = np.triu_indices(clique, 1)
    return _graph((np.append(i, 0), np.append(j, clique)), clique + 1)


def erdos_renyi(num_nodes: int, p: float, seed: int = 0) -> Graph:
    """Every pair joined with probability p in [0, 1], independently.

    The expected degree of every node is p (n - 1). Jung, Section 7.1.
    """
    check.positive_int(num_nodes=num_nodes)
    check.in_range(0, 1, p=p)
    return _graph(_random_pairs(num_nodes, p, _rng(seed, 101)), num_nodes)


def stochastic_block(
    sizes: Sequence[int], p_in: float, p_out: float, seed: int = 0
) -> Graph:
    """Clusters that are dense inside and loosely tied to each other.

    Jung, Section 6.2, for the structure; the probabilities are ours.

    Args:
      sizes: of the clusters, >= 1. Their nodes follow one another: `block_labels`.
      p_in: probability of an edge between two nodes of a cluster.
      p_out: probability of an edge between two nodes of different clusters.
      seed: int >= 0.
    """
    label = block_labels(sizes)
    check.in_range(0, 1, p_in=p_in, p_out=p_out)
    rng = _rng(seed, 102)
    i, j = _random_pairs(len(label), p_out, rng)
    apart = label[i] != label[j]
    pairs = [np.stack([i[apart], j[apart]])]
    for start, size in zip(np.cumsum(sizes) - np.asarray(sizes), sizes, strict=True):
        pairs.append(np.stack(_random_pairs(size, p_in, rng)) + start)
    return _graph(np.concatenate(pairs, 1), len(label))


def block_labels(sizes: Sequence[int]) -> np.ndarray:
    """The cluster of every node of `stochastic_block`, ``[n]`` int64."""
    for size in sizes:
        check.positive_int(sizes=size)
    if not len(sizes):
        raise ValueError("sizes must name at least one cluster.")
    return np.repeat(np.arange(len(sizes)), np.asarray(sizes))


def k_random_neighbours(num_nodes: int, k: int, seed: int = 0) -> Graph:
    """Every node joined to k in 1..n-1 others drawn uniformly (Jung, Exercise 5.2).

    Nodes that others draw have more than k neighbours.
    """
    return from_choices(_subsets(num_nodes, k, "k", _rng(seed, 103)))


def random_connected(num_nodes: int, mean_degree: float, seed: int = 0) -> Graph:
    """A random tree and random further edges, up to a mean degree; always connected.

    The tree joins every node, in random order, to one of those before it. The mean
    degree, 2 E / n to the nearest edge, is from 2 - 2 / n, a tree, to n - 1.
    """
    check.positive_int(num_nodes=num_nodes)
    check.in_range(2 - 2 / num_nodes, num_nodes - 1, mean_degree=mean_degree)
    rng = _rng(seed, 105)
    order = rng.permutation(num_nodes)
    # The place of node number k's partner among the k before it.
    before = rng.integers(0, np.arange(1, num_nodes))
    taken = np.zeros((num_nodes, num_nodes), bool)
    taken[order[1:], order[before]] = True
    free = np.argwhere(np.triu(~(taken | taken.T), 1))
    more = round(mean_degree * num_nodes / 2) - (num_nodes - 1)
    chosen = free[rng.choice(len(free), more, replace=False)]
    return _graph(np.concatenate([np.argwhere(taken), chosen]).T, num_nodes)


def knn(distance: ArrayLike, k: int) -> Graph:
    """Every node joined to the k nodes nearest to it, or that it is near to.

    Jung, Section 7.3. That a choice on either side makes an edge is ours. Of nodes at
    the same distance the first counts as nearer.

    Args:
      distance: ``[n, n]``, see `check_distance`; the diagonal is not looked at.
      k: in 1..n-1.
    """
    distance = check_distance(distance)
    return from_choices(_nearest(distance, np.arange(len(distance)), k))


def knn_points(points: ArrayLike, k: int, metric: str = "euclidean") -> Graph:
    """`knn` of points, in blocks: time n^2, memory linear in n.

    Points are ``[n, d]``, finite; for the metric ``geodesic``, along a great circle, as
    in `geodesic_distance`. The other metric is ``euclidean``.
    Jung, Section 3.3: nearest-neighbour graphs of weather stations.
    """
    check.one_of(("euclidean", "geodesic"), metric=metric)
    points = np.asarray(points, np.float64)
    if points.ndim != 2 or not np.isfinite(points).all():
        raise ValueError(
            f"points must be finite, of shape (n, d), got shape {points.shape}."
        )
    measure = cdist if metric == "euclidean" else geodesic_distance
    step = max(1, _BLOCK // max(1, len(points)))
    nodes = np.arange(len(points))
    choices = [
        _nearest(measure(points[rows], points), rows, k)
        for rows in np.split(nodes, nodes[step::step])
    ]
    return from_choices(np.concatenate(choices))


def geodesic_distance(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """Great-circle distances in km between n and m places, ``[n, m]``.

    `a` ``[n, 2]`` and `b` ``[m, 2]`` are latitudes, in [-90, 90], and longitudes in
    degrees; anything else is a ValueError.
    """
    places = []
    for name, x in (("a", a), ("b", b)):
        x = np.asarray(x, np.float64)
        check_shapes("(n, 2)", **{name: x})
        if not (np.abs(x[:, 0]) <= 90).all():
            raise ValueError(f"latitudes of {name} must be in [-90, 90].")
        places.append(np.radians(x))
    from sklearn.metrics.pairwise import haversine_distances  # slow to import

    return EARTH_RADIUS_KM * haversine_distances(*places)


def ranked_choices(
    values: ArrayLike, num_candidates: int = 10, k: int = 3, seed: int = 0
) -> np.ndarray:
    """The neighbourhoods of Jung, Exercise 7.1: the nearest of random candidates.

    Args:
      values: ``[n]``, what nodes are compared by, such as the mean of their data.
      num_candidates: how many other nodes a node looks at. The exercise's "10 percent"
        of 99 is not a whole number; 10 is our reading.
      k: how many it chooses, those of nearest value.
      seed: int >= 0.

    Returns:
      ``[n, k]`` ints, nearest first. `from_choices` makes a network of them.

    Raises:
      ValueError: num_candidates is not in 1..n-1, k not in 1..num_candidates, or a
        value is not finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"values must be finite, of shape (n,), got {values.shape}.")
    chosen = _subsets(len(values), num_candidates, "num_candidates", _rng(seed, 104))
    candidates = np.sort(chosen, 1)
    check.positive_int(k=k)
    check.in_range(1, num_candidates, k=k)
    gap = np.abs(values[candidates] - values[:, None])
    nearest = np.argsort(gap, 1, kind="stable")[:, :k]
    return np.take_along_axis(candidates, nearest, 1)


def from_choices(choices: ArrayLike) -> Graph:
    """Joins every node to those that it chose, ``[n, k]`` ints in 0..n-1.

    A pair that chose each other is joined once.

    Raises:
      ValueError: a node chose itself or one that does not exist, or another shape.
      TypeError: choices that are not ints.
    """
    choices = np.asarray(choices)
    check_shapes("(n, k)", choices=choices)
    n, k = choices.shape
    pairs = np.stack([np.repeat(np.arange(n), k), choices.ravel()])
    return _graph(np.unique(np.sort(pairs, 0), axis=1), n)


def from_scipy(matrix: Any) -> Graph:
    """Builds a graph from symmetric weights ``[n, n]`` in any format of `scipy.sparse`.

    In time and memory linear in the entries. A stored 0 is no edge, as in
    `Graph.from_dense`.

    Raises:
      ValueError: not square, not symmetric, a non-zero diagonal, or a weight that is
        negative, not finite or too small, see `Graph.from_edges`.
      TypeError: no sparse matrix, or weights that are not real.
    """
    if not sparse.issparse(matrix):
        raise TypeError(f"matrix must be of scipy.sparse, got {type(matrix).__name__}.")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"matrix must be square, got shape {matrix.shape}.")
    a: Any = sparse.csr_array(matrix, copy=True)
    a.sum_duplicates()
    a.eliminate_zeros()
    return Graph.from_entries("matrix", a, a.dtype if a.dtype.kind == "f" else float)


def from_networkx(network: Any) -> Graph:
    """Takes over an undirected networkx graph, nodes in its order.

    Node i is ``list(network.nodes)[i]``, whatever its name. The edge attribute
    ``weight`` is the weight, 1 where there is none.

    Raises:
      ValueError: a directed graph or a multigraph; and as `Graph.from_edges`.
    """
    if network.is_directed() or network.is_multigraph():
        raise ValueError("network must be undirected, with one edge per pair.")
    place = {node: i for i, node in enumerate(network.nodes)}
    edges = list(network.edges(data="weight", default=1.0))
    return Graph.from_edges(
        np.array([(place[u], place[v]) for u, v, _ in edges], np.int64).reshape(-1, 2),
        np.array([weight for *_, weight in edges], np.float64),
        len(place),
    )


def to_networkx(graph: Graph) -> Any:
    """A networkx graph with nodes 0..n-1 and the edge attribute ``weight``.

    Raises:
      ImportError: networkx is not installed.
    """
    try:
        import networkx  # pyright: ignore[reportMissingModuleSource]
    except ImportError as error:
        raise ImportError(
            "to_networkx needs networkx: pip install 'fedjax_core[networkx]'"
        ) from error
    network = networkx.empty_graph(graph.num_nodes)
    arrays = (np.asarray(x).tolist() for x in (graph.head, graph.tail, graph.weight))
    network.add_weighted_edges_from(zip(*arrays, strict=True))
    return network


def metropolis(graph: Graph) -> Graph:
    r"""The same edges with weights :math:`1 / (1 + \max(\deg_i, \deg_j))`.

    With what is left to 1 for the node itself, W - laplacian(graph, W) is a doubly
    stochastic average. Degrees count edges of positive weight, and others stay at 0.

    References:
      Xiao, Boyd and Lall, "A scheme for robust distributed sensor fusion based on
      average consensus", IPSN 2005.
    """
    count = num_neighbours(graph)
    most = jnp.maximum(count[graph.head], count[graph.tail])
    weight = jnp.where(graph.weight > 0, 1 / (1 + most), 0)
    return graph.with_weight(weight.astype(graph.weight.dtype))


def check_distance(distance: ArrayLike) -> np.ndarray:
    """Returns dissimilarities ``[n, n]`` as float64, if that is what they are.

    Raises:
      ValueError: not square, or off the diagonal negative, not finite or asymmetric.
    """
    d = np.asarray(distance, np.float64)
    if d.ndim != 2 or d.shape[0] != d.shape[1] or not len(d):
        raise ValueError(f"distance must have shape (n, n), got {d.shape}.")
    for rule, wrong in (
        (">= 0 and finite", ~(np.isfinite(d) & (d >= 0))),
        ("symmetric", d != d.T),
    ):
        wrong &= ~np.eye(len(d), dtype=bool)
        if wrong.any():
            i, j = np.argwhere(wrong)[0]
            raise ValueError(
                f"distance must be {rule}, got {d[i, j]} from {i} to {j} and "
                f"{d[j, i]} back."
            )
    return d


def mixing(
    graph: Graph, rule: Literal["metropolis", "neighbours"] = "metropolis"
) -> np.ndarray:
    """Weights W of averages with neighbours, ``[N, N]``, rows summing to 1.

    Those of `graph` do not matter. If it falls apart, there is a warning, as its parts
    never agree. The result is of JAX's own float type, float32 unless x64 is enabled.

    Args:
      graph: who is joined to whom.
      rule: "metropolis", see `metropolis`, which keeps the mean of all models;
        "neighbours", the mean of a node and its neighbours, which does so only where
        all have equally many.
    """
    check.one_of(("metropolis", "neighbours"), rule=rule)
    if components(graph).max(initial=0) > 0:
        warnings.warn("graph is not connected: its parts never agree.", stacklevel=2)
    joined, dtype = adjacency(graph).toarray() > 0, jnp.result_type(float)
    most = count = joined.sum(1)[:, None]
    if rule == "metropolis":
        most = np.maximum(count, count.T)
    weights = joined / (1 + most)
    if rule == "metropolis":  # those of its graph, digit by digit
        weights = weights.astype(dtype).astype(graph.weight.dtype).astype(float)
    np.fill_diagonal(weights, 1 - weights.sum(1))
    return weights.astype(dtype)


def _graph(pairs: Any, num_nodes: int) -> Graph:
    return Graph.from_edges(np.stack(pairs, 1), num_nodes=num_nodes)


def _rng(seed: int, use: int) -> np.random.Generator:
    check.seed(seed=seed)
    return np.random.default_rng([seed, use])  # apart from other users of the same seed


def _random_pairs(
    num_nodes: int, p: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs i < j of an Erdős-Rényi graph, found by skipping over those left out."""
    total = num_nodes * (num_nodes - 1) // 2
    last, found = -1, [np.zeros(0, np.int64)]
    while p > 0 and last < total:
        expected = p * (total - last)
        # Gaps beyond the end mean the end; a sum of them must not overflow.
        gaps = rng.geometric(p, int(expected + 4 * expected**0.5) + 8)
        found.append(last + np.cumsum(np.minimum(gaps, total + 1)))
        last = int(found[-1][-1])
    place = np.concatenate(found)
    place = place[place < total]
    # Pair number j (j - 1) / 2 + i; the square root may be off by one.
    j = ((1 + np.sqrt(1 + 8.0 * place)) / 2).astype(np.int64)
    j -= j * (j - 1) // 2 > place
    j += j * (j + 1) // 2 <= place
    return place - j * (j - 1) // 2, j


def _subsets(n: int, k: int, name: str, rng: np.random.Generator) -> np.ndarray:
    """For every node k of the others, ``[n, k]``, by Floyd's method."""
    _check_number(n, **{name: k})
    chosen = np.zeros((n, k), np.int64)
    for drawn, most in enumerate(range(n - 1 - k, n - 1)):
        pick = rng.integers(0, most + 1, n)
        again = (chosen[:, :drawn] == pick[:, None]).any(1)
        chosen[:, drawn] = np.where(again, most, pick)
    return chosen + (chosen >= np.arange(n)[:, None])  # step over the node itself


def _check_number(n: int, **of_neighbours: int) -> None:
    """Raises ValueError unless n nodes can have so many neighbours."""
    check.positive_int(num_nodes=n, **of_neighbours)
    if n == 1:
        raise ValueError("there must be at least 2 nodes to be neighbours, got 1.")
    check.in_range(1, n - 1, **of_neighbours)


def _nearest(distance: np.ndarray, nodes: np.ndarray, k: int) -> np.ndarray:
    """The k nearest others of some nodes, from their rows of distances."""
    _check_number(distance.shape[1], k=k)
    distance = distance.copy()
    distance[np.arange(len(nodes)), nodes] = np.inf
    # Only those at most as far as the k-th can be chosen; the first of equals are.
    kth = np.partition(distance, k - 1, 1)[:, k - 1 : k]
    nearer, equal = distance < kth, distance == kth
    room = k - nearer.sum(1, keepdims=True)
    chosen = nearer | (equal & (np.cumsum(equal, 1) <= room))
    return np.nonzero(chosen)[1].reshape(len(nodes), k)
