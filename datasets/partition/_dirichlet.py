"""Clients whose class proportions are drawn from a Dirichlet distribution."""

import operator
from typing import Literal

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def dirichlet(
    dataset: Dataset,
    num_clients: int,
    alpha: float,
    seed: int = 0,
    min_size: int = 0,
    label: common.Label = "y",
    capped: bool = False,
) -> FederatedData:
    r"""Splits each class among the clients by Dirichlet proportions.

    For every class :math:`c`, once for all splits together,

    .. math::

      p_c \sim \mathrm{Dir}(\alpha \mathbf{1}_N), \qquad
      n_{ci} = p_{ci} n_c \text{ rounded up or down, with mean } p_{ci} n_c .

    Small alpha gives a class to few clients, large alpha spreads it evenly. This is the
    convention of Yurochkin et al. and Li et al.: proportions **over clients, per
    class**, so client sizes vary too, and without `min_size` a client may have no
    examples. `dirichlet_by_client` has the other one, over classes, per client of a
    fixed size.
    Arguments beside those of `partition`, which says the errors too:

    - alpha: concentration, > 0.
    - min_size: train examples every client has at least, >= 0 and <= n / N. Where the
      draw gives fewer, examples move one by one from the client that is largest at
      that moment, from its most frequent class. The other splits are left as drawn.
      Papers that leave small clients out instead (SuPerFed: those of 10 or fewer) are
      followed by ``data.subset(np.flatnonzero(data.train.sizes > 10))``.
    - capped: as in the code of Li et al. and SuPerFed, a client that holds n / N train
      examples or more gets nothing of the classes still to come, in ascending order
      of labels. Sizes vary less, but classes are no longer treated alike.

    References:
      Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks",
      ICML 2019, section 4.

      Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study",
      ICDE 2022 (as "distribution-based label imbalance").
    """
    check.positive(alpha=alpha)
    check.non_negative(min_size=min_size)
    min_size = operator.index(min_size)
    pools, rng = common.prepare(dataset, num_clients, seed, 2, label)
    totals = pools.totals
    num_train = pools.splits["train"].num_examples
    shape = len(pools.names), num_clients
    counts = {split: np.zeros(shape, np.int64) for split in totals}
    for c in range(len(pools.names)):
        draw = common.log_gamma(rng, alpha, num_clients)
        full = counts["train"].sum(axis=0) * num_clients >= num_train
        if capped and not full.all():
            draw[full] = -np.inf
        shares = common.softmax(draw)
        for split, phase in zip(totals, rng.random(len(totals)), strict=True):
            counts[split][c] = common.round_shares(shares, totals[split][c], phase)
    common.fill_small(counts["train"], min_size)
    return common.deal(pools, counts, rng)


def dirichlet_by_client(
    dataset: Dataset,
    num_clients: int,
    alpha: float,
    seed: int = 0,
    label: common.Label = "y",
    prior: Literal["uniform", "pooled"] = "uniform",
) -> FederatedData:
    r"""Clients of equal size draw classes from Dirichlet proportions of their own.

    Client :math:`i` draws :math:`q_i \sim \mathrm{Dir}(\alpha \pi)` over the K classes,
    then n / N train examples without replacement: a class from :math:`q_i`, a random
    example of it. A class that is used up leaves :math:`q_i`, the rest renormalised.
    Clients are served in order, so that every example is used and the last clients take
    what is left, whatever they drew. :math:`\pi` is 1 for every class ("uniform": Hahn)
    or the share of the class in train ("pooled": Hsu et al., whose alpha is thus
    the sum of the parameters). `dirichlet` has the other convention.

    Train sizes differ by one at most. In other splits a client has its train share of
    every class, up or down to a whole example.
    Arguments beside those of `partition`, which says the errors too:

    - alpha: concentration, > 0. Small: one class per client; large: the prior.
    - prior: :math:`\pi` above.

    References:
      Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for
      Federated Visual Classification", arXiv:1909.06335, section 3.

      Hahn, "Algorithms for Collaborative Machine Learning under Statistical
      Heterogeneity", dissertation, UNIST, 2024. Its code gives some examples to several
      clients and others to none; here, as in its text, it is a partition.
    """
    check.positive(alpha=alpha)
    check.one_of(("uniform", "pooled"), prior=prior)
    pools, rng = common.prepare(dataset, num_clients, seed, 3, label)
    left = pools.totals["train"].copy()
    present = np.flatnonzero(left)
    concentration = np.full(len(present), float(alpha))
    if prior == "pooled":
        concentration *= left[present] / left.sum()
    counts = np.zeros((len(left), num_clients), np.int64)
    for i, size in enumerate(common.even(left.sum(), num_clients)):
        draw = np.full(len(left), -np.inf)
        draw[present] = common.log_gamma(rng, concentration, len(present))
        # Drawing anew what found its class used up is the same as drawing one by one
        # from what there is. Each pass finishes or uses up a class.
        missing = size
        while missing:
            draw[left == 0] = -np.inf
            taken = np.minimum(rng.multinomial(missing, common.softmax(draw)), left)
            counts[:, i] += taken
            left -= taken
            missing -= taken.sum()
    return common.deal(pools, common.follow(counts, pools.totals, rng), rng)


def alternating_dirichlet(
    dataset: Dataset,
    num_clients: int,
    alpha: float,
    seed: int = 0,
    label: common.Label = "y",
) -> FederatedData:
    r"""Dirichlet proportions over clients, rescaled until clients are of equal size.

    As in `dirichlet`, :math:`p_c \sim \mathrm{Dir}(\alpha \mathbf{1}_N)` for every
    class. The matrix of shares is then scaled in turn by client, to
    :math:`\sum_c p_{ci} n_c = n / N` for the train examples, and by class, to
    :math:`\sum_i p_{ci} = 1`, until both hold or 1,000 times. Classes come last, so all
    examples are used even where equal sizes are out of reach.

    In every split a client has its share of every class, up or down to a whole example;
    where the sweeps converge, train sizes are equal up to that rounding.
    Arguments beside those of `partition`, which says the errors too:

    - alpha: concentration, > 0. Small: few classes per client; large: all alike.

    References:
      Sattler 2021. Its targets of 1 for clients and classes alike contradict each other
      unless there are as many clients as classes; those above are those of its code.
    """
    check.positive(alpha=alpha)
    pools, rng = common.prepare(dataset, num_clients, seed, 4, label)
    totals = pools.totals
    p = np.full((num_clients, len(pools.names)), 1 / num_clients)
    present = totals["train"] > 0
    p[:, present] = equal_shares(rng, num_clients, alpha, totals["train"][present])
    counts = {k: common.round_classes(p.T, n, rng) for k, n in totals.items()}
    return common.deal(pools, counts, rng)


def equal_shares(
    rng: np.random.Generator, num_clients: int, alpha: float, totals: np.ndarray
) -> np.ndarray:
    """Shares [N, K] of classes with `totals` [K]: columns sum to 1, rows to n / N."""
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
