r"""Small problems on which clients agree, or cannot.

- `two_groups`: two groups of clients in the plane; one linear model fits both, or each
  group alone.
- `random_gradients`: gradients at a stationary point of K distributions, without data.

Client key: the client's number; the first half is one group. NumPy's global generator
is neither read nor changed.

Licence: none needed, the data is generated.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, Figures 6.1 and 6.3.
"""

from typing import Literal

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.datasets.partition import _common as common
from fedjax_core.datasets.partition._clusters import Clustered

_SIGNS = np.array([-1, 1])


def two_groups(
    kind: Literal["congruent", "xor", "conflicting"],
    num_clients: int = 4,
    size: int = 50,
    seed: int = 0,
) -> Clustered:
    r"""Binary classification in the plane, with train and test of the same size.

    Inputs lie in the four corners :math:`(\pm 2, \pm 2)`, with standard normal noise
    of 0.3; the first group's on the left, the second's on the right.

    - "congruent": y says whether x is above; one linear model fits all.
    - "xor": the second group's labels are the other way round. One linear model cannot
      fit both groups, a larger one can.
    - "conflicting": as "xor", but both groups have inputs on both sides: no model of
      x fits both.

    Args:
      kind: one of them.
      num_clients: N, even.
      size: examples of a client in each split.
      seed: int >= 0.

    Returns:
      Data of ``x`` [n, 2] float32 and ``y`` [n] int32, and the group of each client.

    Raises:
      ValueError: an unknown kind, or an odd number of clients.
    """
    check.one_of(("congruent", "xor", "conflicting"), kind=kind)
    check.positive_int(num_clients=num_clients, size=size)
    if num_clients % 2:
        raise ValueError(f"num_clients must be even, got {num_clients}.")
    group = np.arange(num_clients) // (num_clients // 2)
    rng = common.generator(seed, 21)

    def client(k):
        up = rng.choice(_SIGNS, size)
        side = rng.choice(_SIGNS, size)
        if kind != "conflicting":
            side = np.full(size, _SIGNS[group[k]])
        x = 2 * np.stack([side, up], 1) + 0.3 * rng.standard_normal((size, 2))
        above = up > 0
        flipped = kind != "congruent" and group[k] == 1
        return {"x": x.astype(np.float32), "y": (above ^ flipped).astype(np.int32)}

    train, test = ([client(k) for k in range(num_clients)] for _ in range(2))
    return Clustered(FederatedData.from_lists(train, test), group)


def random_gradients(
    num_distributions: int,
    gamma: float,
    *,
    clients_each: int = 3,
    dim: int = 100,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    r"""Clients' gradients at a stationary point of K distributions, and whose each is.

    Gradients of the risks are standard normal, less their mean, so that they balance.
    A client's differs from its distribution's by noise in a uniform direction, of norm
    `gamma` times that of the gradient.

    Args:
      num_distributions: K >= 2.
      gamma: relative noise, >= 0.
      clients_each: clients of each distribution.
      dim: of the gradients.
      seed: int >= 0.

    Returns:
      ``[M, dim]`` float64, M = K `clients_each`, and ``[M]`` ints in 0..K-1.
    """
    check.positive_int(clients_each=clients_each, dim=dim)
    check.in_range(2, np.inf, num_distributions=num_distributions)
    check.non_negative(gamma=gamma)
    rng = common.generator(seed, 22)
    risk = rng.standard_normal((num_distributions, dim))
    risk -= risk.mean(0)
    truth = np.repeat(np.arange(num_distributions), clients_each)
    noise = rng.standard_normal((len(truth), dim))
    size = np.linalg.norm(risk[truth], axis=1) / np.linalg.norm(noise, axis=1)
    return risk[truth] + gamma * size[:, None] * noise, truth
