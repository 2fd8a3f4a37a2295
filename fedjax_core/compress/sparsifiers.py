"""Compression of a client's update, with the bits that sending it takes."""

import math

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_core import check
from fedjax_core.metrics import Bits
from fedjax_core.transform import Message, Transform


def top_k(rate: float, *, residual: bool = True) -> Transform:
    r"""Sends the coordinates of largest magnitude, over all leaves together.

    With a residual, what was not sent is added to the client's next update:

    .. math::

      v = u + r, \qquad u' = \mathrm{top}_k(v), \qquad r \leftarrow v - u' .

    One message is :math:`k (32 + \lceil \log_2 d \rceil)` bits: a float32 value and an
    index for each of the :math:`k = \max(1, \lceil \mathrm{rate} \cdot d \rceil)`
    coordinates. A tie goes to the coordinate that comes first. Without a residual the
    norm can't grow; with one nothing bounds it.

    Args:
      rate: share of coordinates sent, in (0, 1].
      residual: keep an error-feedback residual, float32, shaped like the update.

    References:
      Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
      Algorithm 1.
    """
    check.positive(rate=rate)
    check.in_range(0.0, 1.0, rate=rate)

    def init(update):
        if not residual:
            return ()
        return jax.tree.map(lambda u: jnp.zeros(u.shape, jnp.float32), update)

    def apply(message, state, key):
        del key
        update = message.update
        if residual:
            update = jax.tree.map(lambda u, r: u.astype(jnp.float32) + r, update, state)
        flat, unravel = ravel_pytree(update)
        d = flat.size
        # The factor keeps 0.07 * 100 at 7 where floating point would give 8.
        k = max(1, math.ceil(rate * d * (1 - 1e-12)))
        _, index = jax.lax.top_k(jnp.abs(flat), k)
        sent = unravel(jnp.zeros_like(flat).at[index].set(flat[index]))
        sent = jax.tree.map(lambda s, u: s.astype(u.dtype), sent, message.update)
        if residual:
            # In float32, so that what the update's dtype rounds off is kept too.
            state = jax.tree.map(lambda v, s: v - s.astype(v.dtype), update, sent)
        bits = k * (32 + (d - 1).bit_length())
        return Message(sent, Bits.of(bits)), state

    return Transform(
        init,
        apply,
        lambda bound: math.inf if residual else bound,
        f"top_k({rate}, residual={residual})",
        statistics=True,
    )
