"""The same number of classes for every client."""

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def classes_per_client(
    dataset: Dataset,
    num_clients: int,
    num_classes: int,
    seed: int = 0,
    equal_sizes: bool = False,
    label: str = "y",
) -> FederatedData:
    """Gives every client exactly A classes, each cut equally among its clients.

    Clients, in random order, take the next A classes of a circle of all K in random
    order: classes have N * A / K clients each, up or down to a whole one. With classes
    of equal size and N * A a multiple of K, clients are of equal size too. A = K is
    nearly IID.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      num_classes: A, in 1..K for the K classes of train, and N * A >= K.
      seed: int >= 0.
      equal_sizes: cut all classes into parts of the same size, the largest that every
        class can give, and discard the rest, in other splits too. Otherwise every
        example is used.
      label: name of the class labels, [n] ints, bools or strings in every split. A
        class may be missing from some; what train lacks is spread evenly.

    Returns:
      The splits of N clients. In splits other than train a client has its train share
      of every class, up or down to a whole example.

    Raises:
      ValueError: num_clients < 1, num_classes outside its range or too small to use all
        classes, a class of fewer examples than clients, seed negative, no array called
        `label`, arrays of unequal length, or labels not [n].
      TypeError: num_clients, num_classes or seed not an int, labels of another dtype or
        of different kinds in different splits.

    References:
      Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from
      Distributed Data", dissertation, TU Berlin, 2021
      ("sharding").
    """
    check.positive_int(num_clients=num_clients, num_classes=num_classes)
    pools = common.pools(dataset, label)
    totals = pools.totals
    present = np.flatnonzero(totals["train"])
    check.in_range(1, len(present), num_classes=num_classes)
    if num_clients * num_classes < len(present):
        raise ValueError(
            f"num_clients * num_classes must be at least the {len(present)} classes of "
            f"train, got {num_clients} * {num_classes}."
        )
    rng = common.generator(seed, 6)
    circle, clients = rng.permutation(present), rng.permutation(num_clients)
    slots = np.arange(num_clients * num_classes)
    holders = np.zeros((len(pools.names), num_clients), bool)
    holders[circle[slots % len(circle)], clients[slots // num_classes]] = True

    num_holders = holders.sum(axis=1)[present]
    parts = totals["train"][present] // num_holders
    if parts.min() < 1:
        i = parts.argmin()
        raise ValueError(
            f"{label} must have an example of every class for every client of the "
            f"class, got {totals['train'][present][i]} of {pools.names[present][i]!r} "
            f"for {num_holders[i]} clients."
        )
    counts = np.zeros(holders.shape, np.int64)
    for c, k in zip(present, num_holders, strict=True):
        parts_of_class = common.even(totals["train"][c], k)
        counts[c, holders[c]] = rng.permutation(parts_of_class)
    if equal_sizes:
        counts[holders] = parts.min()
    return common.deal(pools, common.follow(counts, totals, rng), rng)
