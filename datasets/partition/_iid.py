"""Random examples, equal sizes."""

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def iid(dataset: Dataset, num_clients: int, seed: int = 0) -> FederatedData:
    """Deals shuffled examples evenly: sizes of a split differ by one at most.

    With fewer examples than clients some clients get none.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      seed: int >= 0.

    Returns:
      The splits of N clients.

    Raises:
      ValueError: num_clients < 1, seed negative, or arrays of unequal length.
      TypeError: num_clients or seed is not an int.
    """
    check.positive_int(num_clients=num_clients)
    return common.deal_evenly(dataset, num_clients, common.generator(seed, 1))
