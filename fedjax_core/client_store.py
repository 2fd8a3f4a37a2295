"""Client state in host memory, for populations whose state does not fit the device.

The rows of a round's clients travel with the cohort: gathered before the round,
scattered back after it. The algorithm sees ``[C, ...]`` instead of ``[N, ...]`` and
finds its rows by `Cohort.state_row`, so nothing in it changes.
"""

from typing import Any

import jax
import numpy as np

from fedjax_core.feed import Chunk
from fedjax_core.types import PyTree


class HostStore:
    """Client states ``[S, N, ...]`` as NumPy arrays.

    Args:
      one: a client's initial state, leaves ``[S, ...]``.
      num_clients: N.
    """

    def __init__(self, one: PyTree, num_clients: int):
        self.rows = jax.tree.map(
            lambda x: np.repeat(np.asarray(x)[:, None], num_clients, axis=1), one
        )

    def gather(self, chunk: Chunk, seeds: slice) -> PyTree:
        """The states of the chunk's single round by slot, ``[seeds, C, ...]``."""
        slots = chunk.cohorts.client_id.shape[-1]

        def take(rows: np.ndarray) -> np.ndarray:
            rows = rows[seeds]
            out = np.zeros((rows.shape[0], slots, *rows.shape[2:]), rows.dtype)
            for s, ids in enumerate(chunk.client_ids[0][seeds]):
                out[s, : len(ids)] = rows[s, ids]
            return out

        return jax.tree.map(take, self.rows)

    def scatter(self, chunk: Chunk, states: PyTree, first: int) -> None:
        """Writes the round's states back, of seeds from `first` on.

        Those of excluded clients are unchanged.
        """

        def put(rows: np.ndarray, new: Any) -> None:
            new = np.asarray(new)
            for s in range(len(new)):
                ids = chunk.client_ids[0][first + s]
                rows[first + s, ids] = new[s, : len(ids)]

        jax.tree.map(put, self.rows, states)
