"""Dirichlet proportions, rescaled until clients are of equal size."""

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def alternating_dirichlet(
    dataset: Dataset, num_clients: int, alpha: float, seed: int = 0, label: str = "y"
) -> FederatedData:
    r"""Dirichlet proportions over clients, rescaled until clients are of equal size.

    As in `dirichlet`, :math:`p_c \sim \mathrm{Dir}(\alpha \mathbf{1}_N)` for every
    class. The matrix of shares is then scaled in turn by client, to
    :math:`\sum_c p_{ci} n_c = n / N` for the train examples, and by class, to
    :math:`\sum_i p_{ci} = 1`, until both hold or 1,000 times. Classes come last, so all
    examples are used even where equal sizes are out of reach.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      alpha: concentration, > 0. Small: few classes per client; large: all alike.
      seed: int >= 0.
      label: name of the class labels, [n] ints, bools or strings in every split. A
        class may be missing from some; what train lacks is spread evenly.

    Returns:
      The splits of N clients. In each a client has its share of every class, up or down
      to a whole example; where the sweeps converge, train sizes are equal up to that
      rounding.

    Raises:
      ValueError: num_clients < 1, alpha <= 0, seed negative, no array called `label`,
        arrays of unequal length, or labels not [n].
      TypeError: num_clients or seed not an int, labels of another dtype or of different
        kinds in different splits.

    References:
      Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from
      Distributed Data", dissertation, TU Berlin, 2021.
      Its targets of 1 for clients and classes alike contradict each other unless there
      are as many clients as classes; those above are the ones of its code.
    """
    check.positive_int(num_clients=num_clients)
    check.positive(alpha=alpha)
    pools = common.pools(dataset, label)
    totals = pools.totals
    rng = common.generator(seed, 4)
    p = np.full((num_clients, len(pools.names)), 1 / num_clients)
    present = totals["train"] > 0
    p[:, present] = shares(rng, num_clients, alpha, totals["train"][present])
    counts = {}
    for split, of_class in totals.items():
        phases = rng.random(len(of_class))
        counts[split] = np.zeros(p.T.shape, np.int64)
        for c, (n, phase) in enumerate(zip(of_class, phases, strict=True)):
            counts[split][c] = common.round_shares(p[:, c], n, phase)
    return common.deal(pools, counts, rng)


def shares(
    rng: np.random.Generator, num_clients: int, alpha: float, totals: np.ndarray
) -> np.ndarray:
    """Shares [N, K] of the classes: columns sum to 1, weighted rows to n / N.

    Args:
      rng: the source.
      num_clients: N.
      alpha: concentration.
      totals: [K] ints > 0, examples of every class.
    """
    log_p = common.log_gamma(rng, alpha, (num_clients, len(totals)))
    if not len(totals):
        return log_p
    log_totals = np.log(totals)
    log_size = np.log(totals.sum() / num_clients)
    # In logarithms: for small alpha whole rows are below the smallest float.
    log_p -= _log_sum(log_p, axis=0)
    for _ in range(1000):
        log_sizes = _log_sum(log_p + log_totals, axis=1)
        if np.abs(log_sizes - log_size).max() < 1e-13:
            break
        log_p += log_size - log_sizes
        log_p -= _log_sum(log_p, axis=0)
    return np.exp(log_p)


def _log_sum(logs: np.ndarray, axis: int) -> np.ndarray:
    """Logarithms of the sums of exp(logs) along an axis, which is kept."""
    top = logs.max(axis, keepdims=True)
    return top + np.log(np.exp(logs - top).sum(axis, keepdims=True))
