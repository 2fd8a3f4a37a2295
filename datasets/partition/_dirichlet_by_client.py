"""Dirichlet over classes, client by client."""

from typing import Literal

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def dirichlet_by_client(
    dataset: Dataset,
    num_clients: int,
    alpha: float,
    seed: int = 0,
    label: str = "y",
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

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      alpha: concentration, > 0. Small: one class per client; large: the prior.
      seed: int >= 0.
      label: name of the class labels, [n] ints, bools or strings in every split. A
        class may be missing from some; what train lacks is spread evenly.
      prior: :math:`\pi` above.

    Returns:
      The splits of N clients. Train sizes differ by one at most. In other splits a
      client has its train share of every class, up or down to a whole example.

    Raises:
      ValueError: num_clients < 1, alpha <= 0, seed negative, another prior, no array
        called `label`, arrays of unequal length, or labels not [n].
      TypeError: num_clients or seed not an int, labels of another dtype or of different
        kinds in different splits.

    References:
      Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for
      Federated Visual Classification", arXiv:1909.06335, section 3.

      Hahn, "Algorithms for Collaborative Machine Learning under Statistical
      Heterogeneity", dissertation, UNIST, 2024. Its code gives some examples to several
      clients and others to none; here, as in its text, it is a partition.
    """
    check.positive_int(num_clients=num_clients)
    check.positive(alpha=alpha)
    check.one_of(("uniform", "pooled"), prior=prior)
    pools = common.pools(dataset, label)
    left = pools.totals["train"].copy()
    present = np.flatnonzero(left)
    concentration = np.full(len(present), float(alpha))
    if prior == "pooled":
        concentration *= left[present] / left.sum()

    rng = common.generator(seed, 3)
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
