"""Client state in host memory: on CPU what devices share, else what they can't hold.

The rows of a round's clients travel with the cohort: each device gets those of its own
clients before the round, and hands them back after it. The algorithm sees rows by the
clients' place in the queue instead of ``[N, ...]`` and finds them by
`Cohort.state_row`, so nothing in it changes.
"""

import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_core.devices import Spec, ship
from fedjax_core.feed import Chunk
from fedjax_core.types import PyTree


class HostStore:
    """Client states of R runs, ``[R, N, ...]``, as NumPy arrays.

    Every client starts with a row of `one`, leaves ``[R, ...]``. Run r has the cohorts
    of seed r modulo S.
    """

    def __init__(self, one: PyTree, num_clients: int, mesh: jax.sharding.Mesh | None):
        self._mesh, self._shape = mesh, None
        self.rows = jax.tree.map(
            lambda x: np.repeat(np.asarray(x)[:, None], num_clients, axis=1), one
        )

    def gather(self, chunk: Chunk, runs: range) -> PyTree:
        """The states of the chunk's single round on the devices, ``[R', Q, ...]``."""
        size = chunk.cohorts.queue.slot[0, 0].size
        at = np.zeros((len(runs), size), np.int64)
        for k, ids, place in self._places(chunk, runs):
            at[k, place] = ids

        if at.shape != self._shape:
            self._shape = at.shape
            self._out = jax.tree.map(
                lambda x: _aligned((*at.shape, *x.shape[2:]), x.dtype), self.rows
            )

        def take(rows: np.ndarray, out: np.ndarray) -> np.ndarray:
            for k, run in enumerate(runs):
                np.take(rows[run], at[k], axis=0, out=out[k], mode="clip")
            return out

        spec = None if self._mesh is None else Spec(None, "clients")
        taken = jax.tree.map(take, self.rows, self._out)
        return ship(taken, self._mesh, spec)

    def scatter(self, chunk: Chunk, states: PyTree, runs: range) -> None:
        """Writes the round's states back; those of excluded clients are unchanged."""

        def put(rows: np.ndarray, new: jax.Array) -> None:
            for k, ids, place in self._places(chunk, runs):
                for first, part in _parts(new):
                    a, b = np.searchsorted(place, (first, first + part.shape[1]))
                    # A device's clients fill its places from the first one on.
                    rows[runs[k], ids[a:b]] = part[k, : b - a]

        jax.tree.map(put, self.rows, states)

    def _places(
        self, chunk: Chunk, runs: range
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Of each run, the clients that train and their places in the queue."""
        position = np.asarray(chunk.cohorts.position)[0]
        trains = np.asarray(chunk.cohorts.num_steps)[0] > 0
        for k, run in enumerate(runs):
            s = run % len(position)
            ids = chunk.client_ids[0][s]
            order = np.argsort(position[s, : len(ids)])
            order = order[trains[s, order]]
            yield k, ids[order], position[s, order]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that CPU devices use where it is: XLA wants multiples of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size].view(dtype).reshape(shape)


def _parts(x: jax.Array) -> list[tuple[int, np.ndarray]]:
    """The pieces of ``[R, Q, ...]`` along Q, each with the place of its first row."""
    if not x.is_fully_addressable:
        return [(0, multihost_utils.process_allgather(x, tiled=True))]
    return [(s.index[1].start or 0, np.asarray(s.data)) for s in x.addressable_shards]
