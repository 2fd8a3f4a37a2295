r"""Consensus ADMM over the edges of a graph: one step, with three ways to minimise.

It minimises :math:`\sum_k f_k(w_k)` subject to equal parameters at both ends of every
edge. With messages :math:`\tilde w`, duals :math:`\gamma` and a penalty
:math:`\rho > 0`, a round is

.. math::

  w_k &= \arg\min_w f_k(w) + w^\top \gamma_k
    + \rho \sum_l A_{kl} \lVert w - (\tilde w_k + \tilde w_l) / 2 \rVert^2 \\
  \tilde w_k &= w_k + \xi_k \\
  \gamma_k &\leftarrow \gamma_k
    + \rho \sum_l A_{kl} (\tilde w_k - \tilde w_l) .

What the neighbours and the dual add to :math:`f_k` is, up to a constant, a force and a
curvature around the node's last message,
:math:`\langle F_k, w \rangle + \frac{c_k}{2} \lVert w - \tilde w_k \rVert^2` with
:math:`F = \gamma + \rho L_G \tilde w` and :math:`c_k = 2 \rho \deg_k`. A `Primal`
minimises the sum: `linearised`, `quadratic` or `proximal`.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, (3.4)-(3.10); with pulls towards other models (6.3), (6.11). Its appendix
  prints the linearised minimum with other signs, and chapter 6 the dual, with which
  both diverge.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_core.arrays import by_row
from fedjax_core.networks.descent import Rate, rate_at
from fedjax_core.networks.graph import Graph, degree, laplacian
from fedjax_core.networks.operators import Round
from fedjax_core.networks.oracles import Losses, quadratic_shapes
from fedjax_core.types import Key, PyTree

Primal = Callable[[PyTree, PyTree, jax.Array, Round], PyTree]
"""``(sent, force, curvature, t) -> W``, see the module; curvature is ``[n]``."""


class State(NamedTuple):
    """Of a run; leaves ``[n, ...]`` alike in all four.

    Attributes:
      params: w, what every node keeps to itself.
      sent: its last message, w with what was done to it.
      difference: L_G of the messages, all that a node needs of what it received.
      dual: gamma. Their sum over a component stays 0.
    """

    params: PyTree
    sent: PyTree
    difference: PyTree
    dual: PyTree


class Toward(NamedTuple):
    """A pull tau_k ||w - mean_k||^2 in every node's objective.

    Attributes:
      tau: ``[n]`` or one number, >= 0.
      mean: leaves ``[n, ...]``.
    """

    tau: ArrayLike
    mean: PyTree


def init(graph: Graph, W: PyTree) -> State:
    """Starts at W, leaves ``[n, ...]``, which all neighbours know; the duals are 0."""
    W = jax.tree.map(jnp.asarray, W)
    return State(W, W, laplacian(graph, W), jax.tree.map(jnp.zeros_like, W))


def minimise(
    graph: Graph,
    rho: ArrayLike,
    primal: Primal,
    state: State,
    t: Round,
    toward: Toward | None = None,
) -> PyTree:
    """The first half of a round: what every node's parameters become.

    Args:
      graph: the network; weights multiply rho, and those of masked edges are 0.
      rho: the penalty, > 0.
      primal: how a node minimises.
      state: where all nodes are.
      t: the round, from 0.
      toward: a further pull, or None.
    """
    dtype = jnp.result_type(*jax.tree.leaves(state.sent))
    curvature = 2 * rho * degree(graph).astype(dtype)
    force = jax.tree.map(lambda gamma, d: gamma + rho * d, state.dual, state.difference)
    if toward is not None:
        curvature = curvature + 2 * jnp.asarray(toward.tau, dtype)
        force = jax.tree.map(
            lambda f, w, m: f + 2 * by_row(toward.tau, w) * (w - m),
            force,
            state.sent,
            toward.mean,
        )
    return primal(state.sent, force, curvature, t)


def exchange(
    graph: Graph, rho: ArrayLike, state: State, params: PyTree, sent: PyTree
) -> State:
    """The second half: messages `sent` reach the neighbours and change the duals."""
    difference = laplacian(graph, sent)
    dual = jax.tree.map(lambda gamma, d: gamma + rho * d, state.dual, difference)
    return State(params, sent, difference, dual)


def step(
    graph: Graph,
    rho: ArrayLike,
    primal: Primal,
    perturb: Callable[[PyTree, Round, Key | None], PyTree] | None = None,
) -> Callable[..., State]:
    """The round ``(state, t, key=None, toward=None) -> state``, for `iterate.iterate`.

    Args:
      graph: see `minimise`, as for rho and primal.
      rho: see there.
      primal: see there.
      perturb: ``(params, t, key) -> sent``, what a node does to its parameters before
        it sends them; None sends them as they are.
    """

    def one(state, t, key=None, toward=None):
        params = minimise(graph, rho, primal, state, t, toward)
        sent = params if perturb is None else perturb(params, t, key)
        return exchange(graph, rho, state, params, sent)

    return one


def linearised(grad: Callable[[PyTree], PyTree], eta: Rate) -> Primal:
    r"""Minimises the tangent of f at the last message plus ||w - sent||^2 / (2 eta).

    In closed form, :math:`w = \tilde w - (\nabla f(\tilde w) + F) / (1 / \eta + c)`.

    Args:
      grad: ``W -> W``, the (sub-)gradients of all nodes.
      eta: the step size > 0 or a schedule of it. For quadratic f any constant below
        2 / lambda_max of the Hessians is safe, whatever rho; kinks need it to decay.
    """

    def primal(sent, force, curvature, t):
        stiff = 1 / rate_at(eta, t) + curvature
        return jax.tree.map(
            lambda w, g, f: w - (g + f) / by_row(stiff, w), sent, grad(sent), force
        )

    return primal


class Spectral(NamedTuple):
    """Losses w'Q_i w + q_i'w in the eigenvectors of their Q_i, for `quadratic`.

    Attributes:
      values: ``[n, d]``, of 2 Q_i, the Hessians.
      vectors: ``[n, d, d]``, in columns.
      slope: ``[n, d]``, q_i.
    """

    values: jax.Array
    vectors: jax.Array
    slope: jax.Array


def spectral(Q: ArrayLike, q: ArrayLike) -> Spectral:
    """Diagonalises losses once for all curvatures; Q ``[n, d, d]``, q ``[n, d]``.

    In single precision at least.

    Raises:
      ValueError: other shapes.
    """
    Q, q = quadratic_shapes(Q, q)
    wide = jnp.promote_types(Q.dtype, jnp.float32)  # no others have eigenvectors
    values, vectors = jnp.linalg.eigh(2 * Q.astype(wide))
    return Spectral(values, vectors, q)


def quadratic(losses: Spectral) -> Primal:
    """The exact minimum of quadratic losses on W ``[n, d]``, from their eigenvectors.

    Any curvature costs two products, so pulls may change from round to round. Where
    2 Q_i + c_i I is singular but for rounding, the minimum nearest to the last message.
    """
    einsum = functools.partial(jnp.einsum, precision="highest")
    size = jnp.abs(losses.values).max(1, keepdims=True) * losses.values.shape[1]
    rounding = jnp.finfo(losses.values.dtype).eps * size

    def primal(sent, force, curvature, t):
        del t
        into = einsum("nde,nd->ne", losses.vectors, sent)
        right = einsum("nde,nd->ne", losses.vectors, losses.slope + force)
        # As a correction: its rounding is relative to the step, not to w.
        stiff = losses.values + curvature[:, None]
        flat = stiff <= rounding
        move = (losses.values * into + right) / jnp.where(flat, 1, stiff)
        move = jnp.where(flat, 0, move)
        new = sent - einsum("nde,ne->nd", losses.vectors, move)
        return new.astype(sent.dtype)

    return primal


def proximal(losses: Losses) -> Primal:
    """The minimum by the losses' proximal operator, which may be an inner solver.

    Nodes need a curvature > 0: a neighbour or a pull.
    """

    def primal(sent, force, curvature, t):
        del t
        centre = jax.tree.map(lambda w, f: w - f / by_row(curvature, w), sent, force)
        return losses.prox(centre, curvature)

    return primal
