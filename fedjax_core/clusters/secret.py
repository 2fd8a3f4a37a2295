r"""Orthonormal maps that clients share and the server does not know.

Lengths and angles stay, so the server clusters, averages and adds up what it is sent as
if nothing were hidden: :math:`\cos(Pu, Pv) = \cos(u, v)` and
:math:`P^{-1} \sum_i a_i P u_i = \sum_i a_i u_i`. That hides coordinates only; it is not
differential privacy.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, (6.40) and (6.41).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_core import check, random
from fedjax_core.types import Params, PyTree


class SharedMap(NamedTuple):
    """An orthonormal map P of all coordinates of a model together.

    Attributes:
      init: ``params -> secret``, arrays that clients share.
      apply: ``(secret, tree) -> P tree``, of the same shapes and dtypes.
      invert: ``(secret, tree) -> P^-1 tree``.
      name: what it is and its arguments, recorded with a run.
    """

    init: Callable[[Params], PyTree]
    apply: Callable[[PyTree, Params], Params]
    invert: Callable[[PyTree, Params], Params]
    name: str


def no_map() -> SharedMap:
    """Hides nothing."""
    return SharedMap(lambda p: (), lambda s, tree: tree, lambda s, tree: tree, "none")


def permutation(seed: int) -> SharedMap:
    """Shuffles the coordinates by a seed, also from one array to another.

    Numbers stay as they are, to the bit; the secret is one int for each.
    """
    check.seed(seed=seed)

    def init(params):
        size = ravel_pytree(params)[0].size
        return jax.random.permutation(random.seed_key(seed), size)

    def apply(order, tree):
        return _on_coordinates(lambda x: x[order], tree)

    def invert(order, tree):
        return _on_coordinates(lambda x: jnp.zeros_like(x).at[order].set(x), tree)

    return SharedMap(init, apply, invert, f"permutation({seed})")


def reflection(seed: int) -> SharedMap:
    r"""Householder's :math:`P u = u - 2 v v^\top u` for a direction v drawn by a seed.

    It mixes all coordinates and is its own inverse, up to rounding.
    """
    check.seed(seed=seed)

    def init(params):
        flat = ravel_pytree(params)[0]
        v = jax.random.normal(random.seed_key(seed), flat.shape, flat.dtype)
        return v / jnp.linalg.norm(v)

    def apply(v, tree):
        return _on_coordinates(
            lambda x: x - 2 * jnp.dot(v, x, precision="highest") * v, tree
        )

    return SharedMap(init, apply, apply, f"reflection({seed})")


def _on_coordinates(f: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    flat, restore = ravel_pytree(tree)
    return restore(f(flat))
