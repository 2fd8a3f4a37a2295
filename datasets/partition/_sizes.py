"""Clients whose sizes are chosen, or as the data has them, whatever their labels."""

import dataclasses
import operator
from collections.abc import Callable

import numpy as np

from fedjax_core import check
from fedjax_core.data import sources
from fedjax_core.data.packed import Dataset, FederatedData, Packed, divided
from fedjax_core.datasets.partition import _common as common


def iid(dataset: Dataset, num_clients: int, seed: int = 0) -> FederatedData:
    """Deals shuffled examples evenly: sizes of a split differ by one at most.

    With fewer examples than clients some clients get none. Arguments and errors:
    `partition`.
    """
    pools, rng = common.prepare(dataset, num_clients, seed, 1)
    return common.deal_evenly(pools, num_clients, rng)


def contiguous(dataset: Dataset, num_clients: int) -> FederatedData:
    """Cuts every split into consecutive pieces: sizes differ by one at most.

    For text, where neighbours belong together: a stream of tokens becomes one passage
    per client. Order is kept and nothing is drawn; the result holds the arrays of
    `dataset`, not a copy. Arguments and errors: `partition`.

    References:
      Sattler 2021 (language models on equal subsequences of one corpus).
    """
    pools, _ = common.prepare(dataset, num_clients, 0, 0)
    splits = {}
    for name, pool in pools.splits.items():
        edges = np.arange(num_clients + 1) * pool.num_examples // num_clients
        splits[name] = Packed(pool.examples, edges)
    return FederatedData(**splits)


def shared(
    dataset: Dataset,
    split: Callable[[Dataset], FederatedData],
    fraction: float,
    seed: int = 0,
) -> FederatedData:
    """Gives random train examples to all clients, beside those of their own.

    It makes unlike clients more alike, at the price of data that are public. Arguments
    beside those of `partition`, which says the errors too:

    - split: deals the rest and the other splits, as other functions here do.
    - fraction: in (0, 1), share of the train examples that everyone gets a copy of, up
      or down to a whole example, behind its own.

    References:
      Zhao et al., "Federated Learning with Non-IID Data", 2018, section 4.
    """
    check.open_interval(0, 1, fraction=fraction)
    common.check_dataset(dataset)
    n = len(next(iter(dataset.train.values())))
    chosen = np.zeros(n, bool)
    chosen[common.generator(seed, 12).permutation(n)[: round(fraction * n)]] = True
    rest, common_part = divided(dataset.train, chosen)
    data = split(dataset._replace(train=rest))
    own, public = data.train, np.arange(chosen.sum()) + data.train.num_examples
    pieces = np.split(np.arange(own.num_examples), own.offsets[1:-1])
    rows = np.concatenate([np.append(piece, public) for piece in pieces])
    joined = {k: [v, common_part[k]] for k, v in own.examples.items()}
    examples = {k: np.concatenate(pair)[rows] for k, pair in joined.items()}
    offsets = own.offsets + len(public) * np.arange(len(own.offsets))
    return dataclasses.replace(data, train=Packed(examples, offsets))


def natural(dataset: Dataset, key: str) -> FederatedData:
    """Groups the examples by an array that says whose they are.

    Writers, speakers, hospitals; or any array that is computed: with ``key = y // 5``
    two clients hold five of ten classes each. Nothing is drawn.

    `key` is the name of the array, [n] ints or text in every split, and no longer among
    the arrays of the result. Clients are in ascending order of their keys, which are
    the client ids; one that a split lacks has no examples there. Examples of a client
    stay in order. Errors: `partition`, of keys as of labels.
    """
    common.check_dataset(dataset)
    return sources.from_arrays(*dataset, client=key)


def log_normal(
    dataset: Dataset, num_clients: int, sigma: float, seed: int = 0, min_size: int = 0
) -> FederatedData:
    r"""Deals random examples to clients of log-normal sizes.

    Client :math:`i` gets a share of every split in proportion to
    :math:`\exp(\sigma z_i)` with :math:`z_i \sim \mathcal{N}(0, 1)`, up or down to a
    whole example. The scale of the distribution is not free, since sizes sum to n.
    Arguments beside those of `partition`, which says the errors too:

    - sigma: standard deviation of the logarithm of sizes, >= 0; 0 gives equal sizes.
    - min_size: train examples every client has at least, >= 0 and <= n / N, taken one
      by one from the client that is largest at that moment. Other splits are left as
      drawn.

    References:
      Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021
      (unbalanced data of log-normal amounts).
    """
    check.non_negative(sigma=sigma, min_size=min_size)
    pools, rng = common.prepare(dataset, num_clients, seed, 7)
    # With 1e6 one client has everything already, and products do not overflow.
    shares = common.softmax(min(sigma, 1e6) * rng.standard_normal(num_clients))
    return common.deal_sizes(pools, shares, rng, operator.index(min_size))


def balancedness(
    dataset: Dataset,
    num_clients: int,
    gamma: float,
    classes_per_client: int | None = None,
    seed: int = 0,
    label: common.Label = "y",
) -> FederatedData:
    r"""Sizes that fall geometrically from client to client.

    Client :math:`i = 1, \dots, N` has the share

    .. math::

      \rho_i = \frac{0.1}{N} + 0.9 \, \frac{G^i}{\sum_{j=1}^N G^j}

    of every split, up or down to a whole example: :math:`G = 1` gives equal sizes, a
    smaller one concentrates the data on the first clients, and a tenth is always spread
    evenly. Every example is used; the paper rounds sizes down and so discards up to N.
    Arguments beside those of `partition`, which says the errors too:

    - gamma: the balancedness G, in (0, 1].
    - classes_per_client: A, in 1..K for the K classes of train. Clients, the largest
      first, take equal parts of the A classes with most examples left; a further
      class is begun only when these are used up. In other splits a client has its
      train share of every class. If None, examples are random, and `label` is not
      read.

    References:
      Sattler 2021, with the 0.1 / N of its code; with the printed 0.1, shares do not
      sum to 1.
    """
    check.positive(gamma=gamma)
    check.in_range(0, 1, gamma=gamma)
    by_class = classes_per_client is not None
    pools, rng = common.prepare(
        dataset, num_clients, seed, 8, label if by_class else None
    )
    rho = geometric_shares(num_clients, gamma)
    if not by_class:
        return common.deal_sizes(pools, rho, rng)

    check.positive_int(classes_per_client=classes_per_client)
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


def geometric_shares(num_clients: int, gamma: float) -> np.ndarray:
    """The shares rho of `balancedness`, [N] float64 of sum 1."""
    falling = float(gamma) ** np.arange(num_clients)  # G^1 cancels, and might underflow
    return 0.1 / num_clients + 0.9 * falling / falling.sum()
