"""Clients as the data names them."""

from fedjax_core.data import sources
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def natural(dataset: Dataset, key: str) -> FederatedData:
    """Groups the examples by an array that says whose they are.

    Writers, speakers, hospitals; or any array that is computed: with ``key = y // 5``
    two clients hold five of ten classes each. Nothing is drawn.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a sorted copy.
      key: name of the array, [n] ints or text in every split.

    Returns:
      The splits of N clients in ascending order of their keys, which are the client
      ids. A key that a split lacks has no examples there. Examples of a client stay in
      order, and `key` is no longer among their arrays.

    Raises:
      ValueError: no array called `key` or no other array, no examples, arrays of
        unequal length, or keys not [n].
      TypeError: keys of another dtype or of different kinds in different splits.
    """
    common.check_dataset(dataset)
    return sources.from_arrays(*dataset, client=key)
