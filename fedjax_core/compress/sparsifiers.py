r"""Sparse messages: a few coordinates of an update, with the bits that they take.

Where the values go is sent by one of three accounts of bits:

* "golomb": the exact length of the code in `fedjax_core.compress.golomb`.
* "index": :math:`\lceil \log_2 d \rceil` bits for each.
* "seed_table": Golomb's and the surplus bits of each value, see `KINDS`.

The messages keep exactly :math:`k = \max(1, \lfloor p\,d \rfloor)` coordinates, those
of largest magnitude; a tie goes to what comes first. The count of bits is that of k
values even where some of them are 0. With k = d no positions are sent.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, chapters 3 and 4.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.compress import golomb
from fedjax_core.compress.residual import with_residual
from fedjax_core.compress.select import largest
from fedjax_core.metrics import Bits
from fedjax_core.transform import Transform, of_vectors

Granularity = Literal["global", "per_tensor"]
Accounting = Literal["golomb", "index", "seed_table"]
Sparsify = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]
"""``(v [d], k) -> (positions [k] ascending, values [k])``."""


class _Kind(NamedTuple):
    sparsify: Sparsify
    value: int  # bits of each value
    vector: int  # and once for each vector
    surplus: int  # more of each value in the tables of Sattler's thesis
    norm_bound: Callable[[float], float] = lambda bound: math.inf


def kept(rate: float, d: int) -> int:
    """How many of d coordinates a message keeps."""
    # The factor keeps 0.29 * 100 at 29 where floating point would give 28.
    return max(1, math.floor(rate * d * (1 + 1e-12)))


def largest_magnitudes(v: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k coordinates of largest magnitude as they are."""
    positions = largest(jnp.abs(v), k)
    return positions, v[positions]


def ternary(v: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """STC: their signs times their mean magnitude."""
    positions, values = largest_magnitudes(v, k)
    return positions, jnp.abs(values).mean() * jnp.sign(values)


def binary(v: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    r"""SBC: the k largest or the k smallest coordinates, as their mean.

    Whichever mean has the larger magnitude; a tie is positive.
    """
    high, low = largest(v, k), largest(-v, k)
    up, down = v[high].mean(), -v[low].mean()
    positions = jnp.where(up >= down, high, low)
    return positions, jnp.full(k, jnp.where(up >= down, up, -down))


KINDS: Mapping[str, _Kind] = {
    "top_k": _Kind(largest_magnitudes, 32, 0, 1, lambda bound: bound),
    "stc": _Kind(ternary, 1, 32, 1),
    "sbc": _Kind(binary, 0, 32, 2),
}


def top_k(
    rate: float,
    *,
    residual: bool = True,
    granularity: Granularity = "global",
    accounting: Accounting = "index",
) -> Transform:
    """Sends the coordinates of largest magnitude, 32 bits each and their positions.

    Without a residual the norm can't grow.

    Args:
      rate: p, the share of coordinates sent, in (0, 1].
      residual: keep what was not sent, see `with_residual`.
      granularity: "global" takes all leaves together, "per_tensor" each by itself.
      accounting: how positions are counted, see above.

    References:
      Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP
      2017; Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """
    return _sparse("top_k", rate, residual, granularity, accounting)


def stc(
    rate: float,
    *,
    residual: bool = True,
    granularity: Granularity = "global",
    accounting: Accounting = "golomb",
) -> Transform:
    r"""Sparse ternary compression: signs of the largest coordinates, and one mean.

    With :math:`\mu` the mean magnitude of the k coordinates that are sent, the error
    is :math:`\lVert v \rVert^2 - k \mu^2`. Arguments as in `top_k`. Sattler 2021,
    Algorithm 6; Sattler et al., "Robust and Communication-Efficient Federated Learning
    from Non-IID Data", IEEE TNNLS 31, 2020.
    """
    return _sparse("stc", rate, residual, granularity, accounting)


def sbc(
    rate: float,
    *,
    residual: bool = True,
    granularity: Granularity = "global",
    accounting: Accounting = "golomb",
) -> Transform:
    """Sparse binary compression: the largest or the smallest coordinates' mean.

    Arguments as in `top_k`; beyond a rate of 1/2 both may cancel, so it is refused.
    Sattler 2021, Algorithm 5; Sattler et al., "Sparse Binary Compression", IJCNN 2019.
    """
    check.in_range(0.0, 0.5, rate=rate)
    return _sparse("sbc", rate, residual, granularity, accounting)


def threshold(limit: float, *, residual: bool = True) -> Transform:
    """Sends what is larger than a limit in magnitude; how much that is varies.

    Bits are the 32 of the number of values, and those of values and Golomb positions,
    whose parameter follows from that number. Strom, "Scalable Distributed DNN Training
    Using Commodity GPU Cloud Computing", Interspeech 2015.
    """
    check.positive(limit=limit)

    def compress(v, key):
        del key
        there = jnp.abs(v) > limit
        bits = Bits.of(there.sum(dtype=jnp.int32)) * 32 + golomb.mask_bits(there)
        return jnp.where(there, v, 0), bits + 32

    name = f"threshold({limit})"
    plain = of_vectors(compress, norm_bound=lambda bound: bound, name=name)
    return with_residual(plain) if residual else plain


def _sparse(
    name: str, rate: float, residual: bool, granularity: Granularity, accounting: str
) -> Transform:
    check.positive(rate=rate)
    check.in_range(0.0, 1.0, rate=rate)
    check.one_of(get_args(Accounting), accounting=accounting)
    kind = KINDS[name]
    surplus = kind.surplus if accounting == "seed_table" else 0

    def compress(v, key):
        del key
        d, k = v.size, kept(rate, v.size)
        positions, values = kind.sparsify(v, k)
        placed = k if k < d else 0  # values that need their positions
        if accounting == "index":
            bits = Bits.of(placed * (d - 1).bit_length())
        else:
            bits = golomb.position_bits(positions, d) + placed * surplus
        bits = bits + (k * kind.value + kind.vector)
        return jnp.zeros_like(v).at[positions].set(values), bits

    plain = of_vectors(
        compress,
        granularity=granularity,
        norm_bound=kind.norm_bound,
        name=f"{name}({rate}, {granularity}, {accounting})",
    )
    return with_residual(plain) if residual else plain
