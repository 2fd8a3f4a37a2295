"""One data set per group of clients."""

from collections.abc import Mapping

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset
from fedjax_core.data.splits import merge
from fedjax_core.datasets.partition import _common as common
from fedjax_core.datasets.partition._clusters import Clustered


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
      domains have, a client has no examples.

    Raises:
      ValueError: no domain, domains whose arrays differ, clients_per_domain < 1, seed
        negative, or arrays of unequal length.
      TypeError: clients_per_domain or seed is not an int.
    """
    check.positive_int(clients_per_domain=clients_per_domain)
    if not datasets:
        raise ValueError("datasets must hold at least one domain, got none.")
    # A stream for each: with one, parallel domains would be shuffled alike.
    dealt = [
        common.deal_evenly(dataset, clients_per_domain, common.generator(seed, 11, k))
        for k, dataset in enumerate(datasets.values())
    ]
    data = merge(*dealt, prefixes=[f"{domain}/" for domain in datasets])
    return Clustered(data, np.repeat(np.arange(len(dealt)), clients_per_domain))
