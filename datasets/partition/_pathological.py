"""Shards of sorted labels, some to each client."""

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def pathological(
    dataset: Dataset,
    num_clients: int,
    shards_per_client: int = 2,
    seed: int = 0,
    drop_remainder: bool = False,
    label: str = "y",
) -> FederatedData:
    """Sorts train by label, cuts it into equal shards and deals each client some.

    With two shards most clients see two classes, some one, and up to four where shards
    straddle classes. `classes_per_client` fixes the number of classes instead.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      shards_per_client: S >= 1, drawn at random from the N * S.
      seed: int >= 0.
      drop_remainder: if n is not a multiple of N * S, discard the last n mod (N * S)
        train examples in order of labels, and the same share of their classes in other
        splits, so that shards are equal. Otherwise every example is used and shards
        differ by one.
      label: name of the class labels, [n] ints, bools or strings in every split. A
        class may be missing from some; what train lacks is spread evenly.

    Returns:
      The splits of N clients. In splits other than train a client has its train share
      of every class, up or down to a whole example.

    Raises:
      ValueError: num_clients or shards_per_client < 1, more shards than train examples,
        seed negative, no array called `label`, arrays of unequal length, or labels not
        [n].
      TypeError: num_clients, shards_per_client or seed not an int, labels of another
        dtype or of different kinds in different splits.

    References:
      McMahan et al., "Communication-Efficient Learning of Deep Networks from
      Decentralized Data", AISTATS 2017, section 3.
    """
    check.positive_int(num_clients=num_clients, shards_per_client=shards_per_client)
    pools = common.pools(dataset, label)
    totals = pools.totals
    n, num_shards = totals["train"].sum(), num_clients * shards_per_client
    if num_shards > n:
        raise ValueError(
            f"num_clients * shards_per_client must be at most the {n} train examples, "
            f"got {num_clients} * {shards_per_client}."
        )
    rng = common.generator(seed, 5)
    used = n - n % num_shards if drop_remainder else n
    owners = rng.permutation(np.arange(num_shards) % num_clients)
    clients = np.repeat(owners, common.even(used, num_shards))
    classes = np.repeat(np.arange(len(pools.names)), totals["train"])[:used]
    counts = np.zeros((len(pools.names), num_clients), np.int64)
    np.add.at(counts, (classes, clients), 1)
    return common.deal(pools, common.follow(counts, totals, rng), rng)
