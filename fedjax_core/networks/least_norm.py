"""Symmetric semi-definite systems, solved so that no scale of the unknowns matters.

A pseudo-inverse that cuts small eigenvalues off drops whatever is small only because of
its units, or next to a large alpha. Here rows and columns are first scaled to a unit
diagonal, and the rank is read off there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core.networks.graph import Graph


class Inverse(NamedTuple):
    """A pseudo-inverse and how it came about.

    Attributes:
      matrix: ``[..., d, d]``.
      singular: ``[...]`` bool, whether directions were left out.
      log_det: ``[...]``, <= 0, log-determinant of the scaled matrix, relative to its
        largest eigenvalue; the larger, the better conditioned.
    """

    matrix: jax.Array
    singular: jax.Array
    log_det: jax.Array


def pseudo_inverse(Q: jax.Array) -> Inverse:
    """The Moore-Penrose inverse of matrices ``[..., d, d]``, semi-definite, floats."""
    with jax.default_matmul_precision("highest"):
        d = Q.shape[-1]
        own = jnp.diagonal(Q, axis1=-2, axis2=-1)
        s = 1 / jnp.sqrt(jnp.where(own > 0, own, 1))
        e, U = jnp.linalg.eigh(Q * s[..., :, None] * s[..., None, :])
        small = 20 * jnp.finfo(Q.dtype).eps
        largest = jnp.where(e[..., -1:] > 0, e[..., -1:], 1)
        used = e > small * largest
        inverse = U * jnp.where(used, 1 / jnp.where(used, e, 1), 0)[..., None, :]
        inverse = s[..., :, None] * (inverse @ _transpose(U)) * s[..., None, :]
        # Vectors left out come first, so these columns are an orthonormal basis of the
        # null space of Q itself; without it the norm is least only after scaling.
        null = jnp.linalg.qr(s[..., :, None] * U)[0] * ~used[..., None, :]
        eye = jnp.broadcast_to(jnp.eye(d, dtype=Q.dtype), Q.shape)
        kept = eye - null @ _transpose(null)
        log_det = jnp.log(jnp.maximum(e / largest, small)).sum(-1)
        return Inverse(kept @ inverse @ kept, ~used.all(-1), log_det)


def least_norm_solve(Q: jax.Array, b: jax.Array) -> jax.Array:
    """Solves Q x = b for x ``[..., d]``; of several the one of least norm."""
    matrix = pseudo_inverse(Q).matrix
    return jnp.einsum("...de,...e->...d", matrix, b, precision="highest")


def adjacency(graph: Graph) -> np.ndarray | jax.Array:
    """The weights ``[n, n]``, in float64 on the host unless they are traced."""
    if isinstance(graph.weight, Tracer):
        return graph.dense()
    A = np.zeros((graph.num_nodes, graph.num_nodes))
    np.add.at(A, (np.asarray(graph.head), np.asarray(graph.tail)), graph.weight)
    return A + A.T


def coupled_inverse(
    Q: jax.Array, A: np.ndarray | jax.Array, alpha: ArrayLike, sign: int = -1
) -> Inverse:
    """The pseudo-inverse of blockdiag(Q_i) + alpha (D + sign A) (x) I.

    Set up twice, for the nodes and for the eigenvectors of the coupling, and read off
    where it is conditioned better: the first suits small alpha, the second large ones,
    next to which the losses would drown where all nodes agree.

    Args:
      Q: ``[n, d, d]``, semi-definite, floats.
      A: from `adjacency`; D has its row sums.
      alpha: >= 0.
      sign: -1 for the Laplacian, 1 for the signless one.

    Returns:
      A matrix ``[n d, n d]``.
    """
    n, d = Q.shape[:2]
    xp = jnp if isinstance(A, Tracer) else np
    coupling = xp.diag(A.sum(1)) + sign * A
    values, vectors = xp.linalg.eigh(coupling)
    null = n * xp.finfo(coupling.dtype).eps * values[-1]
    values = xp.diag(xp.where(values > null, values, 0))
    V = jnp.stack([jnp.eye(n), vectors]).astype(Q.dtype)
    K = jnp.stack([coupling, values]).astype(Q.dtype) * jnp.asarray(alpha, Q.dtype)
    eye = jnp.eye(d, dtype=Q.dtype)
    with jax.default_matmul_precision("highest"):
        whole = jnp.einsum("kia,ide,kib->kadbe", V, Q, V)
        whole += jnp.einsum("kab,de->kadbe", K, eye)
        both = pseudo_inverse(whole.reshape(2, n * d, n * d))
        best = jnp.argmax(both.log_det)
        inverse, singular, log_det = jax.tree.map(lambda x: x[best], both)
        back = jnp.einsum(
            "ia,adbe,jb->idje", V[best], inverse.reshape(n, d, n, d), V[best]
        )
    return Inverse(back.reshape(n * d, n * d), singular, log_det)


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)
