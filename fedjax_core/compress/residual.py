"""Error feedback: what a message leaves out is added to the next one."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_core.arrays import wide
from fedjax_core.transform import Transform
from fedjax_core.types import PyTree


class Feedback(NamedTuple):
    """What the sender keeps."""

    residual: PyTree  # float32 or wider, shaped like the update
    inner: PyTree  # of the transform


def with_residual(transform: Transform) -> Transform:
    r"""A transform whose errors are kept and added to what is sent next.

    .. math::

      v = R + u, \qquad u' = \mathrm{comp}(v), \qquad R \leftarrow v - u' .

    So all that was sent and the residual add up to the sum of all updates. Nothing
    bounds the norm of a message. Sattler 2021, equation 3.8; Stich, Cordonnier and
    Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, Algorithm 1.
    """

    def init(update):
        return Feedback(
            jax.tree.map(lambda u: jnp.zeros_like(wide(u)), update),
            transform.init(update),
        )

    def apply(message, state, key):
        whole = jax.tree.map(lambda u, r: wide(u) + r, message.update, state.residual)
        sent, inner = transform.apply(message._replace(update=whole), state.inner, key)
        update = jax.tree.map(
            lambda s, u: s.astype(u.dtype), sent.update, message.update
        )
        # What the update's dtype rounds off is kept too.
        rest = jax.tree.map(lambda v, s: v - s.astype(v.dtype), whole, update)
        return sent._replace(update=update), Feedback(rest, inner)

    return Transform(
        init,
        apply,
        lambda bound: math.inf,
        f"with_residual({transform.name})",
        transform.statistics,
    )
