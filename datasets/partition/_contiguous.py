"""Consecutive rows, equal sizes."""

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData, Packed
from fedjax_core.datasets.partition import _common as common


def contiguous(dataset: Dataset, num_clients: int) -> FederatedData:
    """Cuts every split into consecutive pieces: sizes differ by one at most.

    For text, where neighbours belong together: a stream of tokens becomes one passage
    per client. Order is kept and nothing is drawn.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds them, not a copy.
      num_clients: N >= 1.

    Returns:
      The splits of N clients.

    Raises:
      ValueError: num_clients < 1, or arrays of unequal length.
      TypeError: num_clients is not an int.

    References:
      Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from
      Distributed Data", dissertation, TU Berlin, 2021
      (language models on equal subsequences of one corpus).
    """
    check.positive_int(num_clients=num_clients)
    splits = {}
    for name, pool in common.pools(dataset, None).splits.items():
        edges = np.arange(num_clients + 1) * pool.num_examples // num_clients
        splits[name] = Packed(pool.examples, edges)
    return FederatedData(**splits)
