"""Reductions: how the updates of a cohort become one result.

A reduction takes updates in as clients finish, so a round holds one accumulator per
device whatever the cohort's size. `mean` and `total` are sums, `monoid` is any
associative and commutative combination, and `stack` keeps every update, for what has to
see them all.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_core import check
from fedjax_core.arrays import flat_rows, is_known
from fedjax_core.types import Cohort, Key, PyTree


class Arrivals(NamedTuple):
    """A block of clients that finished together; every field has a leading axis L."""

    slot: jax.Array  # int32, position in the cohort
    valid: jax.Array  # bool, False for padding and for excluded clients
    num_examples: jax.Array  # int32
    num_steps: jax.Array  # int32


class Cast(NamedTuple):
    """What is known once everyone has arrived.

    Attributes:
      key: the round's key for this reduction.
      valid: ``[C]`` bool, clients whose update counts.
      cohort: who they are; its queue and examples are left out.
      norm_bound: bound on the L2 norm of one client's update.
    """

    key: Key
    valid: jax.Array
    cohort: Cohort
    norm_bound: float


class Reduction(NamedTuple):
    """A streaming reduction of client updates.

    Attributes:
      identity: ``(update) -> accumulator``; `update` has shapes and dtypes only.
      add: ``(accumulator, updates, arrivals) -> accumulator``. Updates are ``[L, ...]``
        and exactly zero where ``arrivals.valid`` is False.
      merge: ``(accumulator, axis_name) -> accumulator``, across devices.
      finish: ``(accumulator, cast) -> result``.
      stacked: the engine keeps every update and `finish` gets them, ``[C, ...]`` in
        cohort order; the first three functions are not called.
      name: what it is and its arguments, recorded with a run.
      noisy: the result has noise that protects clients. Then a round in which nobody
        counts must go on like any other, or the model would tell.
      expected_cohort_size: the constant that a mean divides by in the place of the
        number of clients that count, or None.
    """

    identity: Callable[[PyTree], PyTree]
    add: Callable[[PyTree, PyTree, Arrivals], PyTree]
    merge: Callable[[PyTree, str], PyTree]
    finish: Callable[[PyTree, Cast], PyTree]
    stacked: bool = False
    name: str = "custom"
    noisy: bool = False
    expected_cohort_size: float | None = None


def _weights(by: Any, arrivals: Arrivals) -> jax.Array:
    if isinstance(by, str):
        w = arrivals.num_examples if by == "examples" else jnp.ones_like(arrivals.slot)
    else:
        # On a mesh, weights that an earlier pass returned belong to all devices: a copy
        # made here is the device's own.
        w = jnp.copy(by).at[arrivals.slot].get(mode="fill", fill_value=0)
    return jnp.where(arrivals.valid, w.astype(float), 0.0)


def _check_by(by: Any) -> None:
    if isinstance(by, str):
        check.one_of(("examples", "uniform"), by=by)
    elif getattr(by, "ndim", None) != 1:
        raise TypeError(
            "by must be 'examples', 'uniform' or an array of mixing weights [C], "
            f"got {by!r}."
        )


def _check_length(by: Any, cast: Cast) -> None:
    shape = cast.cohort.num_steps.shape
    if not isinstance(by, str) and by.shape != shape:
        raise ValueError(
            f"by must hold one mixing weight per client of the cohort, shape {shape}, "
            f"got shape {by.shape}."
        )


def total(by: Any = "uniform") -> Reduction:
    r"""The weighted sum :math:`\sum_i w_i u_i`, accumulated in float32; see `mean`."""

    def finish(acc, cast):
        _check_length(by, cast)
        return acc[0]

    return mean(by)._replace(finish=finish, name=f"total({_by_name(by)})")


def mean(by: Any = "examples") -> Reduction:
    r"""The weighted mean :math:`\sum_i w_i u_i / \sum_i w_i`.

    Accumulated and returned in float32 (or wider, when the update is); zero when no
    client counts.

    Args:
      by: mixing weights: "examples" (examples a client holds, whatever the batch size
        and epochs), "uniform", or an array ``[C]`` in cohort order.
    """
    _check_by(by)

    def identity(update):
        def zeros(u):
            return jnp.zeros(u.shape, jnp.promote_types(u.dtype, jnp.float32))

        return jax.tree.map(zeros, update), jnp.zeros((), float)

    def add(acc, updates, arrivals):
        w = _weights(by, arrivals)
        sums = jax.tree.map(functools.partial(_axpy, w), acc[0], updates)
        return sums, acc[1] + w.sum()

    def finish(acc, cast):
        _check_length(by, cast)
        weight = jnp.where(acc[1] > 0, acc[1], 1.0)
        return jax.tree.map(lambda s: s / weight.astype(s.dtype), acc[0])

    return Reduction(identity, add, lax.psum, finish, name=f"mean({_by_name(by)})")


def _by_name(by: Any) -> str:
    if isinstance(by, str):
        return by
    if not is_known(by):
        return "mixing weights"
    return f"mixing weights {zlib.crc32(np.asarray(by, np.float32).tobytes()):08x}"


def _axpy(w: jax.Array, total: jax.Array, updates: jax.Array) -> jax.Array:
    w = w.astype(total.dtype)
    if updates.shape[0] == 1:
        return total + w[0] * updates[0].astype(total.dtype)
    # The highest precision, or a TPU would round the updates to bfloat16.
    flat = flat_rows(updates).astype(total.dtype)
    return total + jnp.matmul(w, flat, precision="highest").reshape(total.shape)


def monoid(
    lift: Callable[[PyTree, Arrivals], PyTree],
    combine: Callable[[PyTree, PyTree], PyTree],
    identity: Callable[[PyTree], PyTree],
    finish: Callable[[PyTree, Cast], PyTree] = lambda acc, cast: acc,
) -> Reduction:
    """Any associative and commutative combination of clients.

    Args:
      lift: ``(update, arrival) -> element`` for ONE client (no leading axis).
      combine: ``(element, element) -> element``.
      identity: ``(update) -> element``, neutral for `combine`; `update` has shapes and
        dtypes only.
      finish: ``(element, cast) -> result``.
    """

    def add(acc, updates, arrivals):
        def one(acc, client):
            update, arrival = client
            new = combine(acc, lift(update, arrival))
            return select(arrival.valid, new, acc), None

        return lax.scan(one, acc, (updates, arrivals))[0]

    def merge(acc, axis_name):
        everyone = lax.all_gather(acc, axis_name)
        size = jax.tree.leaves(everyone)[0].shape[0]
        parts = [jax.tree.map(lambda x, d=d: x[d], everyone) for d in range(size)]
        return functools.reduce(combine, parts)

    return Reduction(identity, add, merge, finish)


def select(keep: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where `keep`, a scalar, is True, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, old)


def stack(
    finish: Callable[[PyTree, Cast], PyTree] = lambda updates, cast: updates,
) -> Reduction:
    """Keeps every update, in cohort order.

    Args:
      finish: ``(updates, cast) -> result`` with updates ``[C, ...]``, exactly zero
        where ``cast.valid`` is False; by default the stack itself.
    """

    def unused(*_):
        raise AssertionError("the engine stacks updates itself")

    return Reduction(unused, unused, unused, finish, stacked=True)
