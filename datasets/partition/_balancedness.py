"""Geometrically falling sizes, with or without a number of classes per client."""

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def balancedness(
    dataset: Dataset,
    num_clients: int,
    gamma: float,
    classes_per_client: int | None = None,
    seed: int = 0,
    label: str = "y",
) -> FederatedData:
    r"""Sizes that fall geometrically from client to client.

    Client :math:`i = 1, \dots, N` has the share

    .. math::

      \rho_i = \frac{0.1}{N} + 0.9 \, \frac{G^i}{\sum_{j=1}^N G^j}

    of every split: :math:`G = 1` gives equal sizes, a smaller one concentrates the data
    on the first clients, and a tenth is always spread evenly. Every example is used;
    the paper rounds sizes down and so discards up to N.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      gamma: the balancedness G, in (0, 1].
      classes_per_client: A, in 1..K for the K classes of train. Clients, the largest
        first, take equal parts of the A classes with most examples left; a further
        class is begun only when these are used up. If None, examples are random.
      seed: int >= 0.
      label: name of the class labels, [n] ints, bools or strings in every split; not
        read without `classes_per_client`.

    Returns:
      The splits of N clients. Train sizes are shares of n, up or down to a whole
      example. With `classes_per_client`, in other splits a client has its train share
      of every class, and classes that train lacks are spread evenly.

    Raises:
      ValueError: num_clients < 1, gamma or classes_per_client outside its range, seed
        negative, no array called `label`, arrays of unequal length, or labels not [n].
      TypeError: num_clients, classes_per_client or seed not an int, labels of another
        dtype or of different kinds in different splits.

    References:
      Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from
      Distributed Data", dissertation, TU Berlin, 2021,
      with the 0.1 / N of its code; with the printed 0.1, shares do not sum to 1.
    """
    check.positive_int(num_clients=num_clients)
    check.positive(gamma=gamma)
    check.in_range(0, 1, gamma=gamma)
    rng = common.generator(seed, 8)
    rho = shares(num_clients, gamma)
    if classes_per_client is None:
        return common.deal_sizes(dataset, rho, rng)

    check.positive_int(classes_per_client=classes_per_client)
    pools = common.pools(dataset, label)
    left = pools.totals["train"].copy()
    check.in_range(
        1, int(np.count_nonzero(left)), classes_per_client=classes_per_client
    )
    sizes = common.round_shares(rho, left.sum(), rng.random())
    ties = rng.permutation(len(left))  # or equal classes would go in order of labels
    counts = np.zeros((len(left), num_clients), np.int64)
    for i in np.argsort(-sizes, kind="stable"):
        fullest = np.lexsort([ties, -left])
        parts = np.zeros(len(left), np.int64)
        # What does not divide goes to the fullest, or a class would end before others.
        equal = np.sort(common.even(int(sizes[i]), classes_per_client))[::-1]
        parts[fullest[:classes_per_client]] = equal
        taken = np.minimum(parts, left)
        for c in fullest:
            taken[c] += min(left[c] - taken[c], sizes[i] - taken.sum())
        counts[:, i] = taken
        left -= taken
    return common.deal(pools, common.follow(counts, pools.totals, rng), rng)


def shares(num_clients: int, gamma: float) -> np.ndarray:
    """The shares rho, [N] float64 of sum 1."""
    falling = float(gamma) ** np.arange(num_clients)  # G^1 cancels, and might underflow
    return 0.1 / num_clients + 0.9 * falling / falling.sum()
