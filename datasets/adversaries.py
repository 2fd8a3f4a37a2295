"""Clients that do harm: wrong labels, noise on inputs, or a mark to attack by.

Train examples of the clients that `attacked` names change; test and validation stay
clean. All kinds leave the same arrays, so that one program runs them.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, chapter 6: 30 of 100 clients, and `KINDS`.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from fedjax_core import check
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.datasets.partition import _common as common

KINDS = ("clean", "label-flip", "noisy", "byzantine")
MARK = "attacker"


def adversaries(
    data: FederatedData,
    attacked: ArrayLike,
    kind: str,
    *,
    seed: int = 0,
) -> FederatedData:
    """Makes adversaries of some clients.

    - "label-flip": all their labels, ``y``, become the first class, 0.
    - "noisy": uniform noise in (-10, 10) is added to every number of their inputs,
      ``x``.
    - "byzantine": the array ``attacker``, bool, which all kinds add to all splits, is
      True in their train examples: `fedjax_core.attacks.by_mark` has these clients
      send what an attack makes of their updates.
    - "clean": nothing happens.

    Args:
      data: with ``x``, floats, and ``y``, ints. Not changed.
      attacked: [N] bool.
      kind: one of `KINDS`.
      seed: int >= 0, of the noise.

    Raises:
      ValueError: an unknown kind, or `attacked` is not [N] bool.
      TypeError: inputs to add noise to that are no floats.
    """
    check.one_of(KINDS, kind=kind)
    bad = np.asarray(attacked)
    if bad.dtype != bool or bad.shape != (data.num_clients,):
        wanted = f"bool of shape ({data.num_clients},)"
        raise ValueError(f"attacked must be {wanted}, got {bad.dtype} {bad.shape}.")
    rows = np.repeat(bad, data.train.sizes)
    changed = {MARK: rows & (kind == "byzantine")}
    if kind == "label-flip":
        y = data.train.examples["y"]
        changed["y"] = np.where(rows, 0, y).astype(y.dtype)
    if kind == "noisy":
        x = data.train.examples["x"]
        if x.dtype.kind != "f":
            raise TypeError(f"x must be floats to add noise to, got {x.dtype}.")
        noise = common.generator(seed, 23).uniform(-10, 10, (rows.sum(), *x.shape[1:]))
        changed["x"] = x.copy()
        changed["x"][rows] += noise.astype(x.dtype)
    splits = {}
    for name, split in data.splits.items():
        new = changed if name == "train" else {MARK: np.zeros(split.num_examples, bool)}
        splits[name] = Packed({**split.examples, **new}, split.offsets)
    return dataclasses.replace(data, **splits)
