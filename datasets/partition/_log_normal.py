"""Random examples, log-normal sizes."""

import operator

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets.partition import _common as common


def log_normal(
    dataset: Dataset, num_clients: int, sigma: float, seed: int = 0, min_size: int = 0
) -> FederatedData:
    r"""Deals random examples to clients of log-normal sizes.

    Client :math:`i` gets a share of every split in proportion to
    :math:`\exp(\sigma z_i)` with :math:`z_i \sim \mathcal{N}(0, 1)`. The scale of the
    distribution is not free, since sizes sum to n.

    Args:
      dataset: pooled arrays [n, ...] per split. The result holds a shuffled copy.
      num_clients: N >= 1.
      sigma: standard deviation of the logarithm of sizes, >= 0; 0 gives equal sizes.
      seed: int >= 0.
      min_size: train examples every client has at least, taken one by one from the
        client that is largest at that moment. Other splits are left as drawn.

    Returns:
      The splits of N clients. Sizes are shares of n, up or down to a whole example.

    Raises:
      ValueError: num_clients < 1, sigma, seed or min_size negative, fewer than
        num_clients * min_size train examples, or arrays of unequal length.
      TypeError: num_clients, min_size or seed not an int.

    References:
      Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021
      (unbalanced data of log-normal amounts).
    """
    check.positive_int(num_clients=num_clients)
    check.non_negative(sigma=sigma, min_size=min_size)
    rng = common.generator(seed, 7)
    # With 1e6 one client has everything already, and products do not overflow.
    shares = common.softmax(min(sigma, 1e6) * rng.standard_normal(num_clients))
    return common.deal_sizes(dataset, shares, rng, operator.index(min_size))
