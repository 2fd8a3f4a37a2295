"""The k largest of d numbers, exactly k, without sorting all of them.

What is fastest depends on d and the share k / d, see `benchmarks/compressed.py`: a
partial sort, a search for the k-th largest number digit by digit of its bits, which
costs the same for every k, or that search in the blocks with the largest maxima alone.
"""

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 32
_DIGITS = (11, 11, 10)  # bits of a float32, from the highest
_FEW = 2**14  # numbers up to which a partial sort is as fast as anything
_SMALL_SHARE = 100


def largest(x: jax.Array, k: int) -> jax.Array:
    """Positions of the k largest of `x` ``[d]``, ``[k]`` int32, ascending.

    A tie goes to the position that comes first. NaN is not expected.
    """
    d = x.size
    if k == d:
        return jnp.arange(d, dtype=jnp.int32)
    known = jax.default_backend() == "cpu" and x.dtype == jnp.float32
    if not known or d <= _FEW:
        return partial_sort(x, k)
    return by_blocks(x, k) if k <= d // _SMALL_SHARE else by_digits(x, k)


def partial_sort(x: jax.Array, k: int) -> jax.Array:
    """`largest` by `lax.top_k`, whose time grows with k and to which -0 is below 0."""
    return jnp.sort(lax.top_k(jnp.where(x == 0, 0, x), k)[1])


def by_blocks(x: jax.Array, k: int) -> jax.Array:
    """`largest` among the k blocks with the largest maxima: it can be in no other."""
    blocks = -(-x.size // _BLOCK)
    rows = jnp.pad(x, (0, blocks * _BLOCK - x.size), constant_values=-jnp.inf)
    rows = rows.reshape(blocks, _BLOCK)
    # Ascending blocks, so that ties still go to what comes first.
    kept = by_digits(rows.max(1), min(k, blocks))
    among = by_digits(rows[kept].ravel(), k)
    return kept[among // _BLOCK] * _BLOCK + among % _BLOCK


def by_digits(x: jax.Array, k: int) -> jax.Array:
    """`largest` of float32 by the k-th largest number, found digit by digit."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.where(bits == jnp.int32(-(2**31)), 0, bits)  # -0 is 0
    # In the order of the floats: below 0 a larger magnitude is a smaller number.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = ordered.astype(jnp.uint32) ^ jnp.uint32(2**31)
    prefix, missing, tied, low = jnp.uint32(0), jnp.int32(k), jnp.int32(0), 32
    there = jnp.bool_(True)  # numbers that begin as the k-th largest does
    for width in _DIGITS:
        low -= width
        digit = (keys >> low) & jnp.uint32(2**width - 1)
        place = jnp.where(there, digit, 2**width).astype(jnp.int32)
        counts = jnp.zeros(2**width + 1, jnp.int32).at[place].add(1)[:-1]
        at_least = jnp.cumsum(counts[::-1])[::-1]
        found = (at_least >= missing).sum(dtype=jnp.int32) - 1
        tied = counts[found]
        missing = missing - at_least[found] + tied
        prefix = (prefix << width) | found.astype(jnp.uint32)
        there = (keys >> low) == prefix
    # `there` are now the numbers equal to the k-th largest: the first `missing` count.
    place = jnp.arange(x.size, dtype=jnp.int32)

    def halve(ends):
        low, high = ends
        middle = low + (high - low) // 2
        enough = (there & (place < middle)).sum(dtype=jnp.int32) >= missing
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    # Without a tie there is nothing to search.
    first = jnp.where(tied > missing, 0, x.size - 1).astype(jnp.int32)
    ends = (first, jnp.int32(x.size))
    _, end = lax.while_loop(lambda e: e[1] - e[0] > 1, halve, ends)
    return _positions((keys > prefix) | (there & (place < end)), k)


def _positions(mask: jax.Array, k: int) -> jax.Array:
    """Where the k entries of `mask` ``[d]`` are that are True, ascending."""
    rows = -(-mask.size // _BLOCK)
    table = jnp.pad(mask, (0, rows * _BLOCK - mask.size)).reshape(rows, _BLOCK)
    ends = jnp.cumsum(table.sum(1, dtype=jnp.int32))
    rank = jnp.arange(k, dtype=jnp.int32)
    row = jnp.searchsorted(ends, rank, side="right").astype(jnp.int32)
    before = jnp.where(row > 0, ends[row - 1], 0)
    # Sums along a row as a matrix product, which XLA's CPU backend does faster.
    seen = table[row].astype(jnp.float32) @ jnp.triu(jnp.ones((_BLOCK, _BLOCK)))
    column = (seen <= (rank - before)[:, None]).sum(1, dtype=jnp.int32)
    return row * _BLOCK + column
