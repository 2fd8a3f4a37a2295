"""Random numbers by identity: (seed, stream, round, client id, step).

Nothing here depends on where a client sits in a cohort, on which device it runs or on
how often a run was interrupted, so neither do results.
"""

import zlib

import jax
import numpy as np

from fedjax_core.types import Key


def stream(key: Key, name: str) -> Key:
    """Returns an independent key for a named use of `key`."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def seed_key(seed: int | jax.Array) -> Key:
    """Returns the root key of a run."""
    # Whatever jax_default_prng_impl says: with other generators ("rbg") a draw depends
    # on how many clients run side by side.
    return jax.random.key(seed, impl="threefry2x32")


def round_key(key: Key, round: jax.Array | int) -> Key:
    """Returns the key of one round from the root key of the run."""
    return jax.random.fold_in(stream(key, "round"), round)


def mix64(x: np.ndarray) -> np.ndarray:
    """Hashes uint64 values of any shape: a bijection whose outputs look independent.

    It is the finaliser of SplitMix64 (Steele et al. 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash64(*parts: int | np.ndarray) -> np.ndarray:
    """Hashes integers, broadcast against each other, into one uint64 array."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix64((state ^ np.asarray(part).astype(np.uint64)) + golden)
    return state
