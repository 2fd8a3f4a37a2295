"""Splits populations, by example and by client, and merges them.

Who goes where depends on the seed and on client ids, not on the order of clients.
`split_examples` does not look at other clients either: so a population that is read
client by client is split the same. A seed is an int in 0..2**63-1, or else ValueError
or TypeError is raised.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_core import check
from fedjax_core.data import packed
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.random import hash64, mix64

_EXAMPLES, _CLIENTS, _PUBLIC = 0x5E91, 0xC11E, 0xA0C5  # streams: uses of the same seed


def split_public(
    arrays: Mapping[str, np.ndarray], fraction: float = 0.2, seed: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Splits data of the server at random in two, without overlap.

    For FedAUX: auxiliary data into negatives, by default a fifth, and what is distilled
    on.

    Args:
      arrays: name -> ``[n, ...]``.
      fraction: in (0, 1), share of the first part, rounded to whole examples.
      seed: int >= 0.

    Returns:
      The two parts, each in the original order.

    Raises:
      ValueError: a part would be empty, or arrays of unequal length.
    """
    check.open_interval(0, 1, fraction=fraction)
    check.seed(seed=seed)
    given = {name: packed.as_array(name, x) for name, x in arrays.items()}
    n = packed.check_examples(given)
    order = np.argsort(hash64(_PUBLIC, seed, np.arange(n)))
    chosen = np.isin(np.arange(n), order[: round(fraction * n)])
    if chosen.all() or not chosen.any():
        wanted = f"leave examples in both parts of {n}"
        raise ValueError(f"fraction must {wanted}, got {fraction}.")
    given = {name: np.asarray(x) for name, x in arrays.items()}
    other, one = packed.divided(given, chosen)
    return one, other


def split_examples(
    data: FederatedData,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> FederatedData:
    """Takes test and validation examples from each client's train examples.

    Of n examples ``test_fraction * n`` are tested on, rounded to whole examples, and so
    for both fractions together; a client with any example keeps at least one to train
    on. Every example goes to exactly one split, and the order within is kept.

    Args:
      data: the population.
      test_fraction: share of test; with 0, test stays what it is.
      validation_fraction: share of validation; with 0, validation stays what it is.
      seed: int in 0..2**63-1.

    Returns:
      The same clients; arrays are copies in memory.

    Raises:
      ValueError: a fraction is not in [0, 1], both together are not below 1, the data
        already has a split that is asked for, or seed is out of range.
      TypeError: seed is not an int.
    """
    wanted = {"test": test_fraction, "validation": validation_fraction}
    check.in_range(0, 1, **{f"{name}_fraction": x for name, x in wanted.items()})
    if not 0 < test_fraction + validation_fraction < 1:
        given = f"{test_fraction} + {validation_fraction}"
        sums = "test_fraction + validation_fraction"
        raise ValueError(f"{sums} must be above 0 and below 1, got {given}.")
    for name, fraction in wanted.items():
        if fraction and name in data.splits:
            rule = f"0 for data that has a {name} split"
            raise ValueError(f"{name}_fraction must be {rule}, got {fraction}.")
    train, sizes = data.train, data.train.sizes
    keys = _keys(_EXAMPLES, seed, data.client_ids)
    client = np.repeat(np.arange(data.num_clients), sizes)
    rank = np.arange(train.num_examples) - train.offsets[client]
    order = np.lexsort((mix64(keys[client] ^ mix64(rank.astype(np.uint64))), client))

    # In an order as good as shuffled: first test, then validation, the rest trains.
    most = np.maximum(sizes - 1, 0)
    tested = np.minimum(_share(test_fraction, sizes), most)
    held = np.minimum(_share(test_fraction + validation_fraction, sizes), most)
    held = np.maximum(held, tested)
    parts = {
        "train": rank >= held[client],
        "test": rank < tested[client],
        "validation": (rank >= tested[client]) & (rank < held[client]),
    }
    splits = data.splits
    for name, chosen in parts.items():
        if name == "train" or wanted[name]:
            rows = np.sort(order[chosen])
            counts = np.bincount(client[chosen], minlength=data.num_clients)
            examples = {k: a[rows] for k, a in train.examples.items()}
            splits[name] = Packed(examples, np.concatenate([[0], np.cumsum(counts)]))
    return dataclasses.replace(data, **splits)


def hold_out_clients(
    data: FederatedData, fraction: float = 0.2, seed: int = 0
) -> tuple[FederatedData, FederatedData]:
    """Sets clients aside that take no part in training.

    Args:
      data: the population.
      fraction: share of clients to hold out, rounded to whole clients.
      seed: int in 0..2**63-1.

    Returns:
      The clients that stay and those held out, with all their splits, both in the order
      of `data`.

    Raises:
      ValueError: fraction is not in [0, 1], one side would be empty, or seed is out of
        range.
      TypeError: seed is not an int.
    """
    check.in_range(0, 1, fraction=fraction)
    count = int(_share(fraction, np.asarray(data.num_clients)))
    if not 0 < count < data.num_clients:
        found = f"{fraction} of {data.num_clients} clients, which holds out {count}"
        raise ValueError(f"fraction must leave clients on both sides, got {found}.")
    order = np.argsort(_keys(_CLIENTS, seed, data.client_ids), kind="stable")
    return data.subset(np.sort(order[count:])), data.subset(np.sort(order[:count]))


def merge(
    *populations: FederatedData, prefixes: Sequence[str] | None = None
) -> FederatedData:
    """Puts populations together as one, client after client.

    Args:
      populations: at least one. Each split must have the same arrays wherever it has
        examples; where a population lacks a split that another has, its clients have
        no examples in it.
      prefixes: one string per population, put in front of its client ids.

    Returns:
      All clients of all populations; arrays are copies in memory.

    Raises:
      ValueError: no population, another number of prefixes, an id that is there twice,
        or arrays that differ in name, dtype or shape.
    """
    if not populations:
        raise ValueError("populations must be at least one, got none.")
    if prefixes is None:
        prefixes = [""] * len(populations)
    if isinstance(prefixes, str) or len(prefixes) != len(populations):
        found = f"{len(populations)}, got {prefixes!r}"
        raise ValueError(f"prefixes must be one string per population, {found}.")
    owner: dict[str, int] = {}
    for p, (data, prefix) in enumerate(zip(populations, prefixes, strict=True)):
        for client_id in data.client_ids:
            first = owner.setdefault(prefix + client_id, p)
            if first != p:
                found = f"{prefix + client_id!r} in populations {first} and {p}"
                found = f"{found}; give prefixes to tell them apart"
                raise ValueError(f"client ids must be unique, got {found}.")
    splits, given = {}, [data.splits for data in populations]
    for name in ("train", "test", "validation"):
        there = {p: of[name] for p, of in enumerate(given) if name in of}
        if not there:
            continue
        filled = [p for p in there if there[p].num_examples] or list(there)[:1]
        like, who = there[filled[0]].examples, f"{name} of population"
        for p in filled:
            this, that = f"{who} {filled[0]}", f"{who} {p}"
            packed.check_alike(this, like, that, there[p].examples)
        sizes = [
            there[p].sizes if p in there else np.zeros(data.num_clients, np.int64)
            for p, data in enumerate(populations)
        ]
        splits[name] = Packed(
            {k: np.concatenate([there[p].examples[k] for p in filled]) for k in like},
            np.concatenate([[0], np.cumsum(np.concatenate(sizes))]),
        )
    return FederatedData(**splits, client_ids=tuple(owner))


def _keys(stream: int, seed: int, client_ids: Sequence[str]) -> np.ndarray:
    """One number per client, [N] uint64, a function of seed, stream and client id."""
    check.seed(seed=seed)
    names = (i.encode("utf-8", "surrogatepass") for i in client_ids)
    hashes = [hashlib.blake2b(name, digest_size=8).digest() for name in names]
    return hash64(seed, stream, np.frombuffer(b"".join(hashes), "<u8"))


def _share(fraction: float, sizes: np.ndarray) -> np.ndarray:
    """The fraction of sizes, to the nearest whole number, halves up."""
    return np.floor(fraction * sizes + 0.5).astype(np.int64)
