"""Clients in clusters, and labels renamed cluster by cluster."""

from typing import NamedTuple

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData, Packed
from fedjax_core.datasets.partition import _common as common
from fedjax_core.datasets.partition._iid import iid


class Clustered(NamedTuple):
    """Data of clients that belong to clusters.

    Attributes:
      data: the clients, those of a cluster next to each other.
      cluster: [N] int64, the cluster of each client, from 0 on.
    """

    data: FederatedData
    cluster: np.ndarray


def check_clusters(num_clients: int, num_clusters: int) -> None:
    """Raises unless 1 <= num_clusters <= num_clients."""
    check.positive_int(num_clients=num_clients, num_clusters=num_clusters)
    check.in_range(1, num_clients, num_clusters=num_clusters)


def iid_relabelled(
    dataset: Dataset,
    num_clients: int,
    permutations: np.ndarray,
    seed: int,
    label: str,
) -> Clustered:
    """Splits evenly at random, then renames the labels of every cluster.

    Args:
      dataset: pooled arrays.
      num_clients: N.
      permutations: [C, K] ints; cluster k calls class c ``permutations[k, c]``.
      seed: of `iid`.
      label: the array to rename, in every split.
    """
    num_clusters = len(permutations)
    cluster = np.arange(num_clients) * num_clusters // num_clients
    names = common.pools(dataset, label).names
    splits = {}
    for name, split in iid(dataset, num_clients, seed).splits.items():
        classes = np.searchsorted(names, split.examples[label])
        of_row = np.repeat(cluster, split.sizes)
        renamed = names[permutations[of_row, classes]]
        splits[name] = Packed({**split.examples, label: renamed}, split.offsets)
    return Clustered(FederatedData(**splits), cluster)
