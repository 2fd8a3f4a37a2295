"""Clients in clusters that differ in their inputs, or in what they call the classes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.data.splits import merge
from fedjax_core.datasets.partition import _common as common


class Clustered(NamedTuple):
    """Data of clients that belong to clusters.

    Attributes:
      data: the clients, those of a cluster next to each other.
      cluster: [N] int64, the cluster of each client, from 0 on.
    """

    data: FederatedData
    cluster: np.ndarray


def domains(
    datasets: Mapping[str, Dataset], clients_per_domain: int, seed: int = 0
) -> Clustered:
    """Deals every data set, a domain of inputs, evenly among clients of its own.

    Photographs and drawings, say, or MNIST and SVHN: labels mean the same everywhere,
    inputs look different. No client has examples of two domains.

    Args:
      datasets: domain -> pooled arrays [n, ...] per split, with the same names, dtypes
        and shapes of arrays in every domain. The result holds a shuffled copy.
      clients_per_domain: M >= 1.
      seed: int >= 0.

    Returns:
      The splits of M clients per domain, called ``"domain/0"`` to ``"domain/M-1"``, and
      the domain of each by its position in `datasets`. In a split that only other
      domains have, a client has no examples. Errors: `partition`.
    """
    check.positive_int(clients_per_domain=clients_per_domain)
    if not datasets:
        raise ValueError("datasets must hold at least one domain, got none.")
    dealt = []
    for k, dataset in enumerate(datasets.values()):
        # A stream for each: with one, parallel domains would be shuffled alike.
        rng = common.generator(seed, 11, k)
        pools = common.pools(dataset, None)
        dealt.append(common.deal_evenly(pools, clients_per_domain, rng))
    data = merge(*dealt, prefixes=[f"{domain}/" for domain in datasets])
    return Clustered(data, np.repeat(np.arange(len(dealt)), clients_per_domain))


def label_swap(
    dataset: Dataset,
    num_clients: int,
    num_clusters: int,
    seed: int = 0,
    pairs: Sequence[tuple[Any, Any]] | None = None,
    label: common.Label = "y",
) -> Clustered:
    """Splits evenly at random, then exchanges two labels in every cluster.

    Clients hold alike inputs and alike numbers of every label, but clusters disagree on
    what two classes are called. Labels of all splits are exchanged, so that a client is
    tested on what it trains for; every client has the same rows as by `iid` with the
    same seed.
    Arguments beside those of `partition`, which says the errors too:

    - num_clusters: C in 1..N, at most as many as there are pairs of labels. Clusters
      are of equal size, up to one client.
    - pairs: [C] the two labels that each cluster exchanges; if None, distinct random
      pairs.

    References:
      Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed
      Multitask Optimization under Privacy Constraints", IEEE TNNLS 2021 (20 clients, 4
      clusters).
    """
    pools = _pools_for(dataset, num_clients, num_clusters, seed, label)
    names = pools.names.tolist()
    if pairs is None:
        every = list(itertools.combinations(names, 2))
        if num_clusters > len(every):
            wanted = f"at most the {len(every)} pairs of labels"
            raise ValueError(f"num_clusters must be {wanted}, got {num_clusters}.")
        rng = common.generator(seed, 9)
        pairs = [every[i] for i in rng.choice(len(every), num_clusters, replace=False)]
    if len(pairs) != num_clusters:
        wanted = f"one per cluster, {num_clusters}"
        raise ValueError(f"pairs must be {wanted}, got {len(pairs)}.")
    permutations = np.tile(np.arange(len(names)), (num_clusters, 1))
    for k, pair in enumerate(pairs):
        if len(pair) != 2 or len(set(pair) & set(names)) != 2:
            wanted = f"two different labels of {names}"
            raise ValueError(f"pairs must hold {wanted}, got {pair!r}.")
        u, v = map(names.index, pair)
        permutations[k, [u, v]] = v, u
    return _relabelled(pools, num_clients, permutations, seed, label)


def label_permutation(
    dataset: Dataset,
    num_clients: int,
    num_clusters: int,
    seed: int = 0,
    permutations: ArrayLike | None = None,
    label: common.Label = "y",
) -> Clustered:
    """Splits evenly at random, then permutes the labels of every cluster.

    As `label_swap`, with all classes instead of two. Arguments that differ:

    - num_clusters: C in 1..N, at most K!.
    - permutations: [C, K] ints: cluster k calls the c-th of the K labels, in ascending
      order, the ``permutations[k, c]``-th. If None, distinct random permutations.
      Rotations by one label per cluster are
      ``np.add.outer(np.arange(C), np.arange(K)) % K``.
    """
    pools = _pools_for(dataset, num_clients, num_clusters, seed, label)
    num_classes = len(pools.names)
    if permutations is None:
        permutations = _distinct(num_clusters, num_classes, common.generator(seed, 10))
    table = np.asarray(permutations)
    identity = np.tile(np.arange(num_classes), (num_clusters, 1))
    fits = table.dtype.kind in "iu" and table.shape == identity.shape
    if not fits or np.any(np.sort(table, axis=1) != identity):
        order = f"each of the ints 0 to {num_classes - 1} in some order"
        wanted, found = f"{num_clusters} rows, {order}", table.tolist()
        raise ValueError(f"permutations must be {wanted}, got {found}.")
    return _relabelled(pools, num_clients, table, seed, label)


def _pools_for(
    dataset: Dataset,
    num_clients: int,
    num_clusters: int,
    seed: int,
    label: common.Label,
) -> common.Pools:
    check.positive_int(num_clusters=num_clusters)
    pools, _ = common.prepare(dataset, num_clients, seed, 0, label)
    check.in_range(1, num_clients, num_clusters=num_clusters)
    return pools


def _relabelled(
    pools: common.Pools,
    num_clients: int,
    permutations: np.ndarray,
    seed: int,
    label: common.Label,
) -> Clustered:
    """As `iid`, but cluster k calls class c ``permutations[k, c]``, [C, K]."""
    num_clusters = len(permutations)
    cluster = np.arange(num_clients) * num_clusters // num_clients
    rng = common.generator(seed, 1)
    data = common.deal_evenly(common.all_alike(pools.splits), num_clients, rng)
    splits = {}
    for name, split in data.splits.items():
        classes = np.searchsorted(pools.names, common.labels_of(split, label))
        of_row = np.repeat(cluster, split.sizes)
        renamed = pools.names[permutations[of_row, classes]]
        splits[name] = common.with_labels(split, label, renamed)
    return Clustered(FederatedData(**splits), cluster)


def _distinct(num: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct random permutations, [num, size] ints."""
    if num > math.factorial(size):
        wanted = f"at most the {math.factorial(size)} permutations of {size} labels"
        raise ValueError(f"num_clusters must be {wanted}, got {num}.")
    found: dict[tuple[int, ...], None] = {}  # in the order drawn
    while len(found) < num:
        found.setdefault(tuple(rng.permutation(size).tolist()))
    return np.reshape(np.array(list(found), np.int64), (num, size))
