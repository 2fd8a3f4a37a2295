"""Clients with few classes, by count rather than by a distribution."""

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
    label: common.Label = "y",
) -> FederatedData:
    """Sorts train by label, cuts it into equal shards and deals each client some.

    With two shards most clients see two classes, some one, and up to four where shards
    straddle classes. `classes_per_client` fixes the number of classes instead. In
    splits other than train a client has its train share of every class, up or down to a
    whole example.
    Arguments beside those of `partition`, which says the errors too:

    - shards_per_client: S >= 1, drawn at random from the N * S, which are at most n.
    - drop_remainder: if n is not a multiple of N * S, discard the last n mod (N * S)
      train examples in order of labels, and the same share of their classes in other
      splits, so that shards are equal. Otherwise every example is used and shards
      differ by one.

    References:
      McMahan et al., "Communication-Efficient Learning of Deep Networks from
      Decentralized Data", AISTATS 2017, section 3.
    """
    check.positive_int(shards_per_client=shards_per_client)
    pools, rng = common.prepare(dataset, num_clients, seed, 5, label)
    totals = pools.totals
    n, num_shards = totals["train"].sum(), num_clients * shards_per_client
    if num_shards > n:
        found = f"the {n} train examples, got {num_clients} * {shards_per_client}"
        raise ValueError(f"num_clients * shards_per_client must be at most {found}.")
    used = n - n % num_shards if drop_remainder else n
    owners = rng.permutation(np.arange(num_shards) % num_clients)
    clients = np.repeat(owners, common.even(used, num_shards))
    classes = np.repeat(np.arange(len(pools.names)), totals["train"])[:used]
    counts = np.zeros((len(pools.names), num_clients), np.int64)
    np.add.at(counts, (classes, clients), 1)
    return common.deal(pools, common.follow(counts, totals, rng), rng)


def classes_per_client(
    dataset: Dataset,
    num_clients: int,
    num_classes: int,
    seed: int = 0,
    equal_sizes: bool = False,
    label: common.Label = "y",
) -> FederatedData:
    """Gives every client exactly A classes, each cut equally among its clients.

    Clients, in random order, take the next A classes of a circle of all K in random
    order: classes have N * A / K clients each, up or down to a whole one. With classes
    of equal size and N * A a multiple of K, clients are of equal size too. A = K is
    nearly IID. In splits other than train a client has its train share of every class,
    up or down to a whole example.
    Arguments beside those of `partition`, which says the errors too:

    - num_classes: A, in 1..K for the K classes of train, and N * A >= K. A class must
      have an example for each of its clients.
    - equal_sizes: cut all classes into parts of the same size, the largest that every
      class can give, and discard the rest, in other splits too. Otherwise every
      example is used.

    References:
      Sattler 2021 ("sharding").
    """
    check.positive_int(num_classes=num_classes)
    pools, rng = common.prepare(dataset, num_clients, seed, 6, label)
    totals = pools.totals
    present = np.flatnonzero(totals["train"])
    check.in_range(1, len(present), num_classes=num_classes)
    if num_clients * num_classes < len(present):
        wanted = f"at least the {len(present)} classes of train"
        found = f"{num_clients} * {num_classes}"
        raise ValueError(f"num_clients * num_classes must be {wanted}, got {found}.")
    circle, clients = rng.permutation(present), rng.permutation(num_clients)
    slots = np.arange(num_clients * num_classes)
    holders = np.zeros((len(pools.names), num_clients), bool)
    holders[circle[slots % len(circle)], clients[slots // num_classes]] = True

    num_holders = holders.sum(axis=1)[present]
    parts = totals["train"][present] // num_holders
    if parts.min() < 1:
        c, k = present[i := parts.argmin()], num_holders[i]
        found = f"{totals['train'][c]} of {pools.names[c]!r} for {k} clients"
        wanted = "an example of every class for every client of the class"
        raise ValueError(f"{label} must have {wanted}, got {found}.")
    counts = np.zeros(holders.shape, np.int64)
    for c, k in zip(present, num_holders, strict=True):
        parts_of_class = common.even(totals["train"][c], k)
        counts[c, holders[c]] = rng.permutation(parts_of_class)
    if equal_sizes:
        counts[holders] = parts.min()
    return common.deal(pools, common.follow(counts, totals, rng), rng)
