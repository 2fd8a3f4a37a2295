"""Dirichlet over clients, class by class."""

import operator

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
    label: str = "y",
    capped: bool = False,
) -> FederatedData:
    r"""Splits each class among the clients by Dirichlet proportions.

    For every class :math:`c`, once for all splits together,

    .. math::

      p_c \sim \mathrm{Dir}(\alpha \mathbf{1}_N), \qquad
      n_{ci} = p_{ci} n_c \text{ rounded up or down, with mean } p_{ci} n_c .

    Small alpha gives a class to few clients, large alpha spreads it evenly. This is the
    convention of Yurochkin et al. and Li et al.: proportions **over clients, per
    class**, so client sizes vary too. `dirichlet_by_client` has the other one, over
    classes, per client of a fixed size.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      alpha: concentration, > 0.
      seed: int >= 0.
      min_size: train examples every client has at least. Where the draw gives fewer,
        examples move one by one from the client that is largest at that moment, from
        its most frequent class. The other splits are left as drawn. Papers that leave
        small clients out instead (SuPerFed: those of 10 or fewer) are followed by
        ``data.subset(np.flatnonzero(data.train.sizes > 10))``.
      label: name of the class labels, [n] ints, bools or strings in every split. A
        class may be missing from some.
      capped: as in the code of Li et al. and SuPerFed, a client that holds n / N train
        examples or more gets nothing of the classes still to come, in ascending order
        of labels. Sizes vary less, but classes are no longer treated alike.

    Returns:
      The splits of N clients. Without `min_size`, a client may have no examples.

    Raises:
      ValueError: num_clients < 1, alpha <= 0, seed or min_size negative, no array
        called `label`, arrays of unequal length, labels not [n], or fewer than
        num_clients * min_size train examples.
      TypeError: num_clients, min_size or seed not an int, labels of another dtype or of
        different kinds in different splits.

    References:
      Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks",
      ICML 2019, section 4.

      Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study",
      ICDE 2022 (as "distribution-based label imbalance").
    """
    check.positive_int(num_clients=num_clients)
    check.positive(alpha=alpha)
    check.non_negative(min_size=min_size)
    min_size = operator.index(min_size)
    pools = common.pools(dataset, label)
    totals = pools.totals
    num_train = pools.splits["train"].num_examples

    rng = common.generator(seed, 2)
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
