r"""Wrong labels in the train split, drawn as the transition matrices of the papers say.

With K classes and noise rate :math:`\epsilon`, an example keeps its label with
probability :math:`1 - \epsilon`, independently of all others; otherwise

- `symmetric`: it gets one of the K - 1 other labels, each with probability
  :math:`\epsilon / (K - 1)`;
- `pair`: it gets the next label, :math:`c + 1 \bmod K`.

A flipped label is never the true one, so :math:`\epsilon` is the share of wrong labels
that is expected. The number drawn varies around it. (Some authors draw the symmetric
label from all K classes; their rate r is :math:`\epsilon = r (K - 1) / K` here.)

Test and validation stay clean, unless `noisy_test` asks for the same noise in them:
SuPerFed's text tests on clean labels, its code corrupts examples before it holds some
out.

References:
  Han et al., "Co-teaching: Robust Training of Deep Neural Networks with Extremely Noisy
  Labels", NeurIPS 2018, section 4 (pair and symmetry flipping).

  Hahn et al., "Connecting Low-Loss Subspace for Personalized Federated Learning", KDD
  2022 (SuPerFed: noisy labels at the clients).
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData, Packed, labels_of

Data = TypeVar("Data", Dataset, FederatedData)


def symmetric(
    data: Data,
    rate: ArrayLike,
    num_classes: int,
    seed: int = 0,
    label: str = "y",
    noisy_test: bool = False,
) -> tuple[Data, np.ndarray]:
    """Turns train labels into any other label, all equally likely.

    For one seed, a higher rate keeps the flips of the lower one and adds to them, and
    what a client gets does not depend on the rates of the others.

    Args:
      data: pooled or by client. Not changed: the result has labels of its own and
        shares all other arrays.
      rate: probability of a wrong label, in [0, 1). With `FederatedData` also [N],
        one per client. At (K - 1) / K the labels say nothing about the truth.
      num_classes: K >= 2. Labels are 0..K-1.
      seed: int >= 0.
      label: name of the class labels, [n] ints of a dtype that holds K-1.
      noisy_test: whether labels of the other splits are turned as well.

    Returns:
      The data with noisy train labels, of the dtype they had, and which ones were
      flipped: [n] bool, row by row of train. ValueError or TypeError if an argument is
      not as above.
    """
    key = (seed, 111)  # apart from other users of the seed
    return _noisy(data, rate, num_classes, key, label, noisy_test, num_classes)


def pair(
    data: Data,
    rate: ArrayLike,
    num_classes: int,
    seed: int = 0,
    label: str = "y",
    noisy_test: bool = False,
    keep_majority: bool = True,
) -> tuple[Data, np.ndarray]:
    """Turns train labels c into c + 1, and the last class into 0.

    Arguments, results and errors are those of `symmetric`, and one more: rates of 0.5
    and above, where most labels of a class are wrong in the same way and nothing tells
    truth from noise, raise ValueError unless `keep_majority` is False.
    """
    if keep_majority and np.any(_rates(data, rate) >= 0.5):
        because = "from there most labels of a class are wrong"
        allow = "If that is meant, pass keep_majority=False"
        raise ValueError(f"rate must be below 0.5, got {rate!r}; {because}. {allow}.")
    key = (seed, 112)
    return _noisy(data, rate, num_classes, key, label, noisy_test, 2)


def _noisy(
    data: Data,
    rate: ArrayLike,
    num_classes: int,
    key: tuple[int, int],
    label: str,
    noisy_test: bool,
    below: int,
) -> tuple[Data, np.ndarray]:
    """The data with labels 1 to below - 1 further in a circle; which ones of train."""
    check.positive_int(num_classes=num_classes)
    check.seed(seed=key[0])
    if num_classes < 2:
        raise ValueError(f"num_classes must be >= 2, got {num_classes}.")
    rates = _rates(data, rate)
    changed, flips = {}, []
    for name, split in data.splits.items():
        examples = split.examples if isinstance(split, Packed) else split
        y = _labels(examples, label, num_classes)
        rng = np.random.default_rng((*key, len(flips)) if flips else key)
        each = rates
        if rates.ndim and isinstance(split, Packed):
            each = np.repeat(rates, split.sizes)
        flips.append(rng.random(len(y)) < each)
        moved = y.astype(np.int64) + flips[-1] * rng.integers(1, below, len(y))
        new = {**examples, label: (moved % num_classes).astype(y.dtype)}
        changed[name] = Packed(new, split.offsets) if isinstance(split, Packed) else new
        if not noisy_test:
            break  # train comes first
    if isinstance(data, FederatedData):
        return dataclasses.replace(data, **changed), flips[0]
    return data._replace(**changed), flips[0]


def _labels(
    examples: Mapping[str, np.ndarray], label: str, num_classes: int
) -> np.ndarray:
    """The labels of a split, [n]."""
    y = labels_of(examples, label, "iu")
    last = num_classes - 1
    because = f"(num_classes is {num_classes})"
    if last > np.iinfo(y.dtype).max:
        wanted = f"a dtype that holds {last} {because}"
        raise ValueError(f"{label} must have {wanted}, got {y.dtype}.")
    outside = y[(y < 0) | (y > last)]
    if outside.size:
        raise ValueError(f"{label} must be in 0..{last} {because}, got {outside[0]}.")
    return y


def _rates(data: Dataset | FederatedData, rate: ArrayLike) -> np.ndarray:
    """One rate, [], or one per client, [N]."""
    rates = np.asarray(rate, np.float64)
    if not np.all((rates >= 0) & (rates < 1)):
        raise ValueError(f"rate must be in [0, 1), got {rate!r}.")
    if rates.ndim == 0:
        return rates
    if isinstance(data, Dataset):
        raise ValueError(f"rate must be one number for pooled data, got {rate!r}.")
    if rates.shape != (data.num_clients,):
        wanted = f"one number or one per client, [{data.num_clients}]"
        raise ValueError(f"rate must be {wanted}, got {rate!r}.")
    return rates
