"""All clients' examples side by side, as methods on networks take them."""

import numpy as np

from fedjax_core.data.packed import Packed


def pad(split: Packed) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pads every client to the largest one: node i of a network is client i.

    Args:
      split: of `FederatedData`, with examples ``x`` and ``y``, say.

    Returns:
      Arrays by name, ``[N, m, ...]`` for the m examples of the largest client, 0 behind
      a client's own; and which exist, ``[N, m]`` bool.
    """
    mask = np.arange(split.sizes.max()) < split.sizes[:, None]
    arrays = {}
    for name, values in split.examples.items():
        arrays[name] = np.zeros((*mask.shape, *values.shape[1:]), values.dtype)
        arrays[name][mask] = values
    return arrays, mask
