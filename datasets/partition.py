r"""Splits a pooled data set among clients.

Every example goes to exactly one client, and train and test follow one map, so that a
client is tested on the kind of data it trains on. How many examples of which class a
client gets depends on the seed and the class totals only, not on the order of the rows.
NumPy's global generator is neither read nor changed.

References:
  Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks",
  ICML 2019, section 4 (Dirichlet over clients, class by class).

  Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study",
  ICDE 2022 (the same, as "distribution-based label imbalance").

  Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated
  Visual Classification", arXiv:1909.06335 (Dirichlet over classes, client by client).
"""

import heapq
import operator

import numpy as np

from fedjax_core import check
from fedjax_core.data import Dataset, FederatedData, Packed


def iid(dataset: Dataset, num_clients: int, seed: int = 0) -> FederatedData:
    """Deals shuffled examples evenly: sizes of a split differ by one at most.

    With fewer examples than clients some clients get none.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      seed: int >= 0.

    Returns:
      Train and test of N clients.

    Raises:
      ValueError: num_clients < 1, seed negative, or arrays of unequal length.
      TypeError: num_clients is not an int.
    """
    check.positive_int(num_clients=num_clients)
    rng = np.random.default_rng([seed, 1])  # apart from other users of the same seed
    splits = []
    for pool in map(_pool, dataset.splits.values()):
        n = pool.num_examples
        counts = np.diff(np.arange(num_clients + 1) * n // num_clients)[None]
        splits.append(_deal(pool, np.zeros(n, np.int64), counts, rng))
    return FederatedData(*splits)


def dirichlet(
    dataset: Dataset,
    num_clients: int,
    alpha: float,
    seed: int = 0,
    min_size: int = 0,
    label: str = "y",
) -> FederatedData:
    r"""Splits each class among the clients by Dirichlet proportions.

    For every class :math:`c`, once for train and test together,

    .. math::

      p_c \sim \mathrm{Dir}(\alpha \mathbf{1}_N), \qquad
      n_{ci} = p_{ci} n_c \text{ rounded up or down, with mean } p_{ci} n_c .

    Small alpha gives a class to few clients, large alpha spreads it evenly. This is the
    convention of Yurochkin et al. and Li et al.: proportions **over clients, per
    class**, so client sizes vary too. The alpha of Hsu et al. is another one, over
    classes, per client of a fixed size. Li et al.'s code also gives no more to clients
    that have reached n / N examples; not so here, as it changes the distribution.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      alpha: concentration, > 0.
      seed: int >= 0.
      min_size: train examples every client has at least. Where the draw gives fewer,
        examples move one by one from the client that is largest at that moment, from
        its most frequent class. Test is left as drawn.
      label: name of the class labels, [n] ints, bools or strings in both splits. A
        class may be missing from either.

    Returns:
      Train and test of N clients. Without `min_size`, a client may have no examples.

    Raises:
      ValueError: num_clients < 1, alpha <= 0, seed or min_size negative, no array
        called `label`, arrays of unequal length, labels not [n], or fewer than
        num_clients * min_size train examples.
      TypeError: num_clients or min_size not an int, labels of another dtype or of one
        kind in train and another in test.
    """
    check.positive_int(num_clients=num_clients)
    check.positive(alpha=alpha)
    check.non_negative(min_size=min_size)
    min_size = operator.index(min_size)
    train, test = _pool(dataset.train), _pool(dataset.test)
    if num_clients * min_size > train.num_examples:
        raise ValueError(
            f"min_size must leave num_clients * min_size within the "
            f"{train.num_examples} train examples, got {num_clients} * {min_size}."
        )
    classes, num_classes = _classes(train, test, label)
    totals = [np.bincount(of_split, minlength=num_classes) for of_split in classes]

    rng = np.random.default_rng([seed, 2])  # apart from other users of the same seed
    counts = np.empty((2, num_classes, num_clients), np.int64)
    for c in range(num_classes):
        edges = np.cumsum(_draw_dirichlet(rng, alpha, num_clients))
        for split, phase in enumerate(rng.random(2)):
            n = totals[split][c]
            # Rounding the edges, not the shares, keeps the sum. The common random phase
            # gives every share its mean; without it, nearly equal shares (large alpha)
            # would be rounded up for the same clients in every class.
            cuts = np.floor(edges / edges[-1] * n + phase).astype(np.int64)
            counts[split, c] = np.diff(np.minimum(cuts, n), prepend=0)
    _fill_small(counts[0], min_size)
    return FederatedData(
        _deal(train, classes[0], counts[0], rng),
        _deal(test, classes[1], counts[1], rng),
    )


def _pool(split: dict[str, np.ndarray]) -> Packed:
    """The split as one client: checked, and its arrays untouched."""
    shape = np.shape(next(iter(split.values()), ()))
    return Packed(split, np.array([0, *shape[:1]]))


def _classes(
    train: Packed, test: Packed, label: str
) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """Class index of every row, [n] int64 per split, and the number of classes."""
    for split in (train, test):
        check.one_of(split.examples, label=label)
    y_train, y_test = train.examples[label], test.examples[label]
    for y in (y_train, y_test):
        if y.ndim != 1:
            raise ValueError(f"{label} must be one label per row, got shape {y.shape}.")
        # Comparing 1 with "1", or 1 with 1.0, would make or merge classes unseen.
        if y.dtype.kind not in "iubSU" or y.dtype.kind != y_train.dtype.kind:
            raise TypeError(
                f"{label} must be ints, bools or strings, of the same kind in train "
                f"and test, got {y_train.dtype} and {y_test.dtype}."
            )
    names, index = np.unique(np.concatenate([y_train, y_test]), return_inverse=True)
    return (index[: len(y_train)], index[len(y_train) :]), len(names)


def _draw_dirichlet(rng: np.random.Generator, alpha: float, n: int) -> np.ndarray:
    """One draw of Dir(alpha 1_n), [n] float64, of sum 1 for small alpha too."""
    # Normalised gammas, but of their logarithms: for alpha = 1e-3 most gammas are below
    # the smallest float, and 0 / 0 is no distribution. Gamma(alpha) is distributed as
    # Gamma(alpha + 1) U^(1 / alpha), and -log U is exponential.
    log_gamma = np.log(rng.standard_gamma(alpha + 1, n))
    log_gamma -= rng.standard_exponential(n) / alpha
    shares = np.exp(log_gamma - log_gamma.max())
    return shares / shares.sum()


def _fill_small(counts: np.ndarray, min_size: int) -> None:
    """Moves examples in counts [K, N], in place, until columns sum to min_size or more.

    Needs N * min_size examples in all. Then, as long as a client is too small, the
    largest has more than min_size: clients being filled are never taken from, and the
    number of moves is the number of missing examples.
    """
    sizes = counts.sum(axis=0)
    largest = [(-size, i) for i, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    for i in np.flatnonzero(sizes < min_size):
        for _ in range(min_size - sizes[i]):
            minus_size, donor = largest[0]
            c = counts[:, donor].argmax()
            counts[c, donor] -= 1
            counts[c, i] += 1
            heapq.heapreplace(largest, (minus_size + 1, donor))


def _deal(
    pool: Packed, classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> Packed:
    """Gives client i counts[c, i] random rows of class c, and packs the clients.

    Args:
      pool: n examples.
      classes: [n] ints in 0..K-1.
      counts: [K, N] ints, row c sums to the size of class c.
      rng: shuffles.
    """
    num_classes, num_clients = counts.shape
    rows = rng.permutation(pool.num_examples)
    rows = rows[np.argsort(classes[rows], kind="stable")]
    clients = np.repeat(np.tile(np.arange(num_clients), num_classes), counts.ravel())
    # Shuffled again, or every client would hold its examples sorted by class.
    again = rng.permutation(pool.num_examples)
    rows = rows[again][np.argsort(clients[again], kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(counts.sum(axis=0))])
    return Packed({name: a[rows] for name, a in pool.examples.items()}, offsets)
