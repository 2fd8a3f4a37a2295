"""Clusters that exchange two labels each."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_core.data.packed import Dataset
from fedjax_core.datasets.partition import _common as common
from fedjax_core.datasets.partition._clusters import (
    Clustered,
    check_clusters,
    iid_relabelled,
)


def label_swap(
    dataset: Dataset,
    num_clients: int,
    num_clusters: int,
    seed: int = 0,
    pairs: Sequence[tuple[Any, Any]] | None = None,
    label: str = "y",
) -> Clustered:
    """Splits evenly at random, then exchanges two labels in every cluster.

    Clients hold alike inputs and alike numbers of every label, but clusters disagree on
    what two classes are called. Labels of all splits are exchanged, so that a client is
    tested on what it trains for.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy, of
        the same rows for every client as `iid` with the same seed.
      num_clients: N >= 1.
      num_clusters: C in 1..N. Clusters are of equal size, up to one client.
      seed: int >= 0.
      pairs: [C] the two labels that each cluster exchanges; if None, distinct random
        pairs.
      label: name of the class labels, [n] ints, bools or strings in every split.

    Returns:
      The splits of N clients, and their clusters.

    Raises:
      ValueError: num_clusters outside its range, or more than there are pairs of
        labels; not C pairs, a pair of one label twice or with an unknown one; seed
        negative; no array called `label`, arrays of unequal length, or labels not [n].
      TypeError: num_clients, num_clusters or seed not an int, labels of another dtype
        or of different kinds in different splits.

    References:
      Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed
      Multitask Optimization under Privacy Constraints", IEEE TNNLS 2021 (20 clients, 4
      clusters).
    """
    check_clusters(num_clients, num_clusters)
    names = common.pools(dataset, label).names.tolist()
    if pairs is None:
        every = list(itertools.combinations(range(len(names)), 2))
        if num_clusters > len(every):
            raise ValueError(
                f"num_clusters must be at most the {len(every)} pairs of labels, "
                f"got {num_clusters}."
            )
        rng = common.generator(seed, 9)
        swaps = [every[i] for i in rng.choice(len(every), num_clusters, replace=False)]
    else:
        if len(pairs) != num_clusters:
            raise ValueError(
                f"pairs must be one per cluster, {num_clusters}, got {len(pairs)}."
            )
        swaps = []
        for pair in pairs:
            if len(pair) != 2 or len(set(pair) & set(names)) != 2:
                raise ValueError(
                    f"pairs must hold two different labels of {names}, got {pair!r}."
                )
            swaps.append(tuple(map(names.index, pair)))
    permutations = np.tile(np.arange(len(names)), (num_clusters, 1))
    for k, (u, v) in enumerate(swaps):
        permutations[k, [u, v]] = v, u
    return iid_relabelled(dataset, num_clients, permutations, seed, label)
