"""Transforms of one client's update: pure pairs that chain, in the style of optax.

A transform sees a `Message`, the update on its way to the server together with what
sending it costs. It runs where the client finishes, inside the same compiled program.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from fedjax_core import check
from fedjax_core.arrays import is_known, num_bytes, wide
from fedjax_core.map import all_finite
from fedjax_core.metrics import Bits
from fedjax_core.types import ClientProgram, Key, PyTree, Stateful


class Message(NamedTuple):
    """An update and its size.

    Attributes:
      update: the pytree the server will receive.
      bits: what one client sends, side information included; exact.
    """

    update: PyTree
    bits: Bits


class Transform(NamedTuple):
    """A transform of a client's message.

    Attributes:
      init: ``(update) -> state``, what ONE client keeps between rounds (a residual,
        say), or ``()``.
      apply: ``(message, state, key) -> (message, state)``. It sets ``message.bits``
        when it changes what is sent.
      norm_bound: given a bound on the L2 norm of what comes in, the bound on what goes
        out: the sensitivity of the cohort's sum to one client.
      name: what it is and its arguments, recorded with a run.
      statistics: whether running statistics of a `Stateful` update may be sent beside
        what this transforms. Compression lets them; what hides or bounds what a client
        sends must not, for they would escape it.
    """

    init: Callable[[PyTree], PyTree]
    apply: Callable[[Message, PyTree, Key], tuple[Message, PyTree]]
    norm_bound: Callable[[float], float]
    name: str = "custom"
    statistics: bool = False


def stateless(
    apply: Callable[[Message, Key], Message],
    norm_bound: Callable[[float], float] = lambda bound: float("inf"),
    name: str = "custom",
    statistics: bool = False,
) -> Transform:
    """A transform that keeps nothing between rounds; unbounded unless it says so."""
    return Transform(
        lambda update: (),
        lambda message, state, key: (apply(message, key), state),
        norm_bound,
        name,
        statistics,
    )


def of_vectors(
    compress: Callable[[jax.Array, Key], tuple[jax.Array, Bits]],
    *,
    granularity: Literal["global", "per_tensor"] = "global",
    norm_bound: Callable[[float], float] = lambda bound: float("inf"),
    name: str = "custom",
) -> Transform:
    """A stateless transform of the update as vectors, in float32 or wider.

    Of an update that is not finite it makes NaN: what is chosen might not show it.

    Args:
      compress: ``(v, key) -> (what is sent of it, bits)``, both vectors ``[d]``.
      granularity: "global" takes all leaves as one vector, "per_tensor" each by itself.
      norm_bound: as in `Transform`.
      name: as in `Transform`.
    """
    check.one_of(("global", "per_tensor"), granularity=granularity)

    def apply(message, key):
        vectors = jax.tree.map(wide, message.update)
        if granularity == "global":
            flat, unravel = ravel_pytree(vectors)
            flat, bits = compress(flat, key)
            sent = unravel(flat)
        else:
            leaves, form = jax.tree.flatten(vectors)
            bits = Bits.of(0)
            for i, leaf in enumerate(leaves):
                part, more = compress(leaf.ravel(), jax.random.fold_in(key, i))
                leaves[i], bits = part.reshape(leaf.shape), bits + more
            sent = jax.tree.unflatten(form, leaves)
        fine = all_finite(vectors)
        sent = jax.tree.map(lambda s: jnp.where(fine, s, jnp.nan), sent)
        sent = jax.tree.map(lambda s, u: s.astype(u.dtype), sent, message.update)
        return Message(sent, bits)

    return stateless(apply, norm_bound, name, statistics=True)


def identity() -> Transform:
    """Sends the update as it is."""
    return stateless(lambda message, _: message, lambda bound: bound, "identity", True)


def chain(*transforms: Transform) -> Transform:
    """Applies transforms from left to right; sensitivities compose in that order."""

    def init(update):
        return tuple(t.init(update) for t in transforms)

    def apply(message, state, key):
        new = []
        for i, (t, s) in enumerate(zip(transforms, state, strict=True)):
            message, s = t.apply(message, s, jax.random.fold_in(key, i))
            new.append(s)
        return message, tuple(new)

    def norm_bound(bound):
        for t in transforms:
            bound = t.norm_bound(bound)
        return bound

    name = f"chain({', '.join(t.name for t in transforms)})"
    statistics = all(t.statistics for t in transforms)
    return Transform(init, apply, norm_bound, name, statistics)


def dense_bits(update: PyTree) -> Bits:
    """Bits of an update sent as it is: every coordinate in its own dtype."""
    return Bits.of(8 * num_bytes(update))


def with_transform(program: ClientProgram, transform: Transform) -> ClientProgram:
    """The program with its update transformed before it leaves the client.

    The client state becomes the pair (state of `program`, state of `transform`).
    Metrics gain "uplink_bytes", the bytes that the cohort's valid clients send. Running
    statistics of a `Stateful` update are sent beside it, as they are.

    Raises:
      ValueError: when tracing, a `Stateful` update and a transform that does not let
        statistics pass.
    """

    def init(shared, client_state, turn):
        return program.init(shared, client_state[0], turn)

    def finish(shared, carry, client_state, turn):
        inner, kept = client_state
        update, inner, metrics = program.finish(shared, carry, inner, turn)
        stats = None
        if isinstance(update, Stateful):
            update, stats = update
            if not transform.statistics:
                raise ValueError(
                    f"transform must let running statistics pass, got "
                    f"{transform.name}, which they would escape; use a model without "
                    f"them (group or layer normalisation)."
                )
        message = Message(update, dense_bits(update))
        sent, kept = transform.apply(message, kept, jax.random.fold_in(turn.key, 1))
        if "failure" not in metrics:
            metrics["failure"] = jnp.where(all_finite((update, inner)), 0, 1)
        if sent.update is not update:
            early, fine = metrics["failure"], all_finite((sent.update, kept))
            metrics["failure"] = jnp.where((early == 0) & ~fine, 2, early)
        bits, update = sent.bits, sent.update
        if stats is not None:
            bits = bits + dense_bits(stats.total)
            update = Stateful(update, stats)
        metrics["uplink_bytes"] = bits.as_bytes()
        return update, (inner, kept), metrics

    bound = transform.norm_bound(program.norm_bound)
    return ClientProgram(init, program.step, finish, bound)


def flat_norm(update: PyTree) -> jax.Array:
    """The L2 norm over all coordinates of all leaves, in float32 or wider; ``[]``."""
    leaves = jax.tree.leaves(update)
    wide = any(x.dtype == jnp.float64 for x in leaves)
    dtype = jnp.float64 if wide else jnp.float32
    leaves = [x.astype(dtype) for x in leaves]
    # Relative to the largest coordinate, squares neither overflow nor vanish.
    largest = jnp.zeros((), dtype)
    for x in leaves:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(x), initial=0))
    largest = lax.stop_gradient(largest)
    unit = jnp.where(largest > 0, largest, 1)
    total = sum((_tree_sum(jnp.square(x / unit)) for x in leaves), jnp.zeros((), dtype))
    # The square root has no slope at 0; the norm's is taken to be 0 there.
    return unit * jnp.where(total > 0, jnp.sqrt(jnp.where(total > 0, total, 1)), 0)


def _tree_sum(x: jax.Array) -> jax.Array:
    """The sum by groups of 64, whose rounding hardly grows with the size."""
    x = x.ravel()
    while x.size > 64:
        x = jnp.pad(x, (0, -x.size % 64)).reshape(-1, 64).sum(1)
    return x.sum()


def clip(clip_norm: float) -> Transform:
    r"""Flat clipping: :math:`u \min(1, C / \lVert u \rVert_2)`.

    Guarantees :math:`\lVert u \rVert_2 \le C` over all leaves together, in every dtype:
    an update that is clipped is shortened by what the norm may be rounded off, about
    1e-5 of it in float32, and its coordinates are rounded towards zero.

    References:
      McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR
      2018, section 2.
    """
    check.positive(clip_norm=clip_norm)

    def apply(message: Message, key: Key) -> Message:
        norm = flat_norm(message.update)
        leaves = jax.tree.leaves(message.update)
        # 63 additions for each level of a sum, one for each leaf, and what little the
        # rest rounds; the square root halves it.
        levels = max((1 + int(math.log(x.size or 1, 64)) for x in leaves), default=1)
        error = (16 * levels + len(leaves) + 8) * float(jnp.finfo(norm.dtype).eps)
        scale = (1 - error) * clip_norm / jnp.maximum(norm, clip_norm)

        def one(u: jax.Array) -> jax.Array:
            limits = jnp.finfo(u.dtype)
            eps, least = float(limits.eps), float(limits.smallest_subnormal)
            wide = u.astype(norm.dtype) * scale
            size = jnp.abs(wide)
            up = jnp.abs(wide.astype(u.dtype)).astype(norm.dtype) > size
            # One unit in the last place; subnormal numbers are equally far apart.
            place = jnp.maximum(size * eps, least)
            shorter = jnp.sign(wide) * jnp.maximum(size - place, 0)
            out = jnp.where(up, shorter, wide).astype(u.dtype)
            return jnp.where(norm > clip_norm * (1 - error), out, u)

        return message._replace(update=jax.tree.map(one, message.update))

    def smaller(bound: float) -> Any:
        known = is_known(bound, clip_norm)  # a sweep's numbers are traced
        return min(bound, clip_norm) if known else jnp.minimum(bound, clip_norm)

    return stateless(apply, smaller, f"clip({clip_norm})")
