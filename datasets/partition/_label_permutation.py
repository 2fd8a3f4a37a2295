"""Clusters that permute all labels."""

import math

import numpy as np
from numpy.typing import ArrayLike

from fedjax_core.data.packed import Dataset
from fedjax_core.datasets.partition import _common as common
from fedjax_core.datasets.partition._clusters import (
    Clustered,
    check_clusters,
    iid_relabelled,
)


def label_permutation(
    dataset: Dataset,
    num_clients: int,
    num_clusters: int,
    seed: int = 0,
    permutations: ArrayLike | None = None,
    label: str = "y",
) -> Clustered:
    """Splits evenly at random, then permutes the labels of every cluster.

    Clients hold alike inputs, but clusters disagree on what the classes are called.
    Labels of all splits are permuted, so that a client is tested on what it trains for.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy, of
        the same rows for every client as `iid` with the same seed.
      num_clients: N >= 1.
      num_clusters: C in 1..N. Clusters are of equal size, up to one client.
      seed: int >= 0.
      permutations: [C, K] ints: cluster k calls the c-th of the K labels, in ascending
        order, the ``permutations[k, c]``-th. If None, distinct random permutations.
        Rotations by one label per cluster are
        ``np.add.outer(np.arange(C), np.arange(K)) % K``.
      label: name of the class labels, [n] ints, bools or strings in every split.

    Returns:
      The splits of N clients, and their clusters.

    Raises:
      ValueError: num_clusters outside its range, or more than K!; permutations not
        [C, K] or with a row that is none; seed negative; no array called `label`,
        arrays of unequal length, or labels not [n].
      TypeError: num_clients, num_clusters or seed not an int, labels of another dtype
        or of different kinds in different splits.

    References:
      Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed
      Multitask Optimization under Privacy Constraints", IEEE TNNLS 2021 (20 clients, 4
      clusters).
    """
    check_clusters(num_clients, num_clusters)
    num_classes = len(common.pools(dataset, label).names)
    shape = num_clusters, num_classes
    if permutations is None:
        table = _distinct(*shape, common.generator(seed, 10))
    else:
        table = np.asarray(permutations)
        identity = np.broadcast_to(np.arange(num_classes), shape)
        if (
            table.dtype.kind not in "iu"
            or table.shape != shape
            or np.any(np.sort(table, axis=1) != identity)
        ):
            raise ValueError(
                f"permutations must be {num_clusters} rows, each of the ints 0 to "
                f"{num_classes - 1} in some order, got {table.tolist()}."
            )
    return iid_relabelled(dataset, num_clients, table, seed, label)


def _distinct(num: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct random permutations, [num, size] ints."""
    if num > math.factorial(size):
        raise ValueError(
            f"num_clusters must be at most the {math.factorial(size)} permutations of "
            f"{size} labels, got {num}."
        )
    found: dict[tuple[int, ...], None] = {}  # in the order drawn
    while len(found) < num:
        found.setdefault(tuple(rng.permutation(size).tolist()))
    return np.reshape(np.array(list(found), np.int64), (num, size))
