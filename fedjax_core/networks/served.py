r"""Clients of several servers: their data, schedules, and means by server and cluster.

Client k belongs to one server s and one cluster q of its S servers and Q clusters;
models of servers are arrays ``[S, Q, d]``.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, Chapter 5.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core.arrays import is_known
from fedjax_core.networks import admm
from fedjax_core.networks.graph import Graph, check_labels, degree, laplacian
from fedjax_core.networks.labelled import shares
from fedjax_core.networks.oracles import (
    as_signs,
    least_squares_statistics,
    node_rows,
    smooth,
)
from fedjax_core.types import Key, Metrics


class Clients(NamedTuple):
    """What clients hold and should learn; every server needs one.

    Attributes:
      server: ``[K]`` ints from 0 on.
      cluster: ``[K]`` ints from 0 on, of the task.
      X: ``[K, m, d]``.
      y: ``[K, m]``.
      mask: ``[K, m]`` bool, the rows that exist.
      truth: ``[K, d]``, each client's true model, or None.
      test: X ``[C, n, d]`` and labels -1 and 1 ``[C, n]`` of every task, or None.
    """

    server: jax.Array
    cluster: jax.Array
    X: jax.Array
    y: jax.Array
    mask: jax.Array
    truth: jax.Array | None = None
    test: tuple[jax.Array, jax.Array] | None = None


Draw = Callable[[Key], Clients]
"""The clients of a seed."""


class World(NamedTuple):
    """Clients as their rounds need them.

    Attributes:
      server: ``[K]``.
      cluster: ``[K]``, whose model they share.
      task: ``[K]``, which they are tested on.
      X: ``[K, m, d]``, 0 in rows that do not exist.
      y: ``[K, m]``.
      share: ``[K, m]``, 1 / D_k in rows that exist, else 0.
      ridge: ``[K]``, the factor of their squared norm.
      spectral: of squared errors with the penalty, else ().
      span: of logistic errors an orthonormal basis of a client's rows, ``[K, d, r]``,
        and the rows in it, ``[K, m, r]``, else ().
      truth: see `Clients`, as for test.
      test: see there.
    """

    server: jax.Array
    cluster: jax.Array
    task: jax.Array
    X: jax.Array
    y: jax.Array
    share: jax.Array
    ridge: jax.Array
    spectral: admm.Spectral | tuple[()]
    span: tuple[jax.Array, jax.Array] | tuple[()]
    truth: jax.Array | None
    test: tuple[jax.Array, jax.Array] | None

    @property
    def num_examples(self) -> jax.Array:
        """D_k, ``[K]``."""
        return (self.share > 0).sum(1)


def prepared(
    clients: Clients,
    num_servers: int,
    num_clusters: int,
    strength: float,
    error: str,
    *,
    by_cluster: bool,
) -> World:
    """Prepares the data once: f_k is the mean error plus a share of the penalty.

    Args:
      clients: of a seed.
      num_servers: S.
      num_clusters: Q; with 1 all share a model.
      strength: lambda, divided by the clients that share it.
      error: "squared" or "logistic".
      by_cluster: whether those are of one server and cluster, not of one server.

    Raises:
      ValueError: other shapes, rows that are not finite, a client without rows, a
        known server, cluster or label out of range, or a server without clients. Those
        drawn inside a program make NaN, which ends a run.
    """
    X, y, mask = node_rows(clients.X, clients.y, clients.mask, len(clients.server))
    check_labels("client", num_servers, server=clients.server)
    if num_clusters > 1:
        check_labels("client", num_clusters, cluster=clients.cluster)
    if clients.test is not None:
        check_labels("client", len(clients.test[0]), cluster=clients.cluster)
    if is_known(clients.server):
        size = np.bincount(clients.server, minlength=num_servers)
        for s in np.flatnonzero(size == 0):
            raise ValueError(
                f"server must name each of {num_servers} servers, got no client of {s}."
            )
    server, task = jnp.asarray(clients.server), jnp.asarray(clients.cluster)
    cluster = task if num_clusters > 1 else jnp.zeros_like(task)
    groups, group = num_servers, server
    if by_cluster:
        groups, group = groups * num_clusters, server * num_clusters + cluster
    ridge = shares(strength, groups, group)
    ridge = jnp.where((cluster >= 0) & (cluster < num_clusters), ridge, jnp.nan)
    ridge = ridge.astype(X.dtype)
    # A traced client without rows, which could not be refused.
    ridge = jnp.where(mask.any(1), ridge, jnp.nan)
    test, span = clients.test, ()
    if error == "logistic":
        y = as_signs(y, mask)
        basis, rows = jnp.linalg.qr(X.swapaxes(1, 2))
        span = basis, rows.swapaxes(1, 2)
        if test is not None:
            test = test[0], as_signs(test[1], np.ones(test[1].shape, bool))
    share = mask.astype(X.dtype) / mask.sum(1, keepdims=True).astype(X.dtype)
    spectral = ()
    if error == "squared":
        own, slope, _ = least_squares_statistics(X, y, mask)
        eye = jnp.eye(X.shape[2], dtype=X.dtype)
        spectral = admm.spectral(own + ridge[:, None, None] * eye[None], slope)
    y, truth = y.astype(X.dtype), clients.truth
    return World(server, cluster, task, X, y, share, ridge, spectral, span, truth, test)


def primal(world: World, steps: int) -> admm.Primal:
    """How clients minimise: in closed form, or by at most `steps` of Newton's.

    A logistic error is minimised around the point that its penalties alone would end
    at. Gradient steps would not do for private messages: what they leave undone differs
    from one neighbour's data to the other's by more than the noise hides.
    """
    return admm.quadratic(world.spectral) if world.spectral else _newton(world, steps)


def _newton(world: World, steps: int) -> admm.Primal:
    assert world.span
    basis, rows = world.span

    def error(v, client):
        rows, y, share, ahead = client
        return share @ jax.nn.softplus(-y * (ahead + rows @ v))

    def minimise(sent, force, curvature, t):
        del t
        stiff = 2 * world.ridge + curvature
        centre = (curvature[:, None] * sent - force) / stiff[:, None]
        # From it the minimum is within the span of the rows, which often are few.
        ahead = jnp.einsum("kmd,kd->km", world.X, centre)
        data = rows, world.y, world.share, ahead
        still = jnp.zeros(basis.shape[::2], basis.dtype)
        v = smooth(error, data, steps=steps).prox(still, stiff)
        return centre + jnp.einsum("kdr,kr->kd", basis, v)

    return minimise


def scheduled(key: Key, server: jax.Array, per_server: int | None) -> jax.Array:
    """Who takes part: so many random clients of every server, or all; ``[K]`` bool."""
    if per_server is None:
        return jnp.ones(len(server), bool)
    # Places within a server, by comparing all pairs: sorts take long to compile.
    draw = jax.random.bits(key, server.shape)
    before = (server[:, None] == server[None]) & (draw[None] < draw[:, None])
    return before.sum(1) < per_server


def cluster_means(
    messages: jax.Array,
    present: jax.Array,
    server: jax.Array,
    cluster: jax.Array,
    otherwise: jax.Array,
) -> jax.Array:
    """Means ``[S, Q, d]`` of messages ``[K, d]`` over those `present`, ``[K]`` bool.

    `otherwise` ``[S, Q, d]`` stands where nobody is.
    """
    S, Q, d = otherwise.shape
    weight = present.astype(messages.dtype)
    group = server * Q + cluster
    total = jax.ops.segment_sum(weight[:, None] * messages, group, S * Q)
    count = jax.ops.segment_sum(weight, group, S * Q)
    mean = (total / jnp.maximum(count, 1)[:, None]).reshape(S, Q, d)
    return jnp.where((count > 0).reshape(S, Q, 1), mean, otherwise)


def cluster_mix(tau: ArrayLike, num_clusters: int) -> jax.Array:
    """T(tau) ``[Q, Q]``: 1 - tau of the own cluster, tau / (Q - 1) of each other one.

    Its eigenvalues are 1 and, Q - 1 times, 1 - tau Q / (Q - 1).
    """
    if num_clusters == 1:
        return jnp.ones((1, 1))
    eye, tau = jnp.eye(num_clusters), jnp.asarray(tau)
    return (1 - tau) * eye + tau / (num_clusters - 1) * (1 - eye)


def mix(near: ArrayLike, tau: ArrayLike, models: jax.Array) -> jax.Array:
    """The multi-step update, (5.9) and (5.10): over servers, then over clusters."""
    apart = cluster_mix(tau, models.shape[1]).astype(models.dtype)
    near = jnp.asarray(near, models.dtype)
    return jnp.einsum("sp,qr,prd->sqd", near, apart, models)


def single_step(
    graph: Graph,
    near: ArrayLike,
    rho: float,
    tau: ArrayLike,
    own: jax.Array,
    models: jax.Array,
    dual: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    r"""The single-step update, (5.6) and (5.7) with the signs of consensus ADMM.

    .. math::

      w_{s,q} = \frac{a_{s,q} - \psi / 2 + \frac{\rho}{2} \sum_p (w_{s,q} + w_{p,q})
        + \tau m_{s,q}}{1 + \tau + \rho |N_s|}, \qquad
      \psi \leftarrow \psi + \rho \sum_p (w_{s,q} - w_{p,q})

    with m the mean of the other clusters' models nearby. As printed, servers that
    agree move on and the dual pushes them apart.

    Args:
      graph: the servers'.
      near: ``[S, S]``, how servers average with their neighbours, for m.
      rho: of ADMM.
      tau: of this round.
      own: a, ``[S, Q, d]``, the means of the clients.
      models: of the round before.
      dual: psi.

    Returns:
      The new models and dual.
    """
    Q, dtype = models.shape[1], models.dtype
    count = degree(graph).astype(dtype)[:, None, None]
    total = 2 * count * models - laplacian(graph, models)
    foreign = mix(near, 1.0, models) if Q > 1 else 0.0
    top = own - dual / 2 + rho / 2 * total + tau * foreign
    new = (top / (1 + tau + rho * count)).astype(dtype)
    return new, dual + rho * laplacian(graph, new)


def quality(world: World, W: jax.Array, models: jax.Array) -> Metrics:
    """How good clients' models W ``[K, d]`` and servers' `models` ``[S, Q, d]`` are.

    Returns:
      "nmsd", the mean of ||w_k - w_k*||^2 / ||w_k*||^2 (5.35), and "nmsd_of_client"
      ``[K]``; "accuracy", the mean over clients of that of their server's model on
      their task. Each where the world's truth and test can tell it.
    """
    out = {}
    if world.truth is not None:
        error = ((W - world.truth) ** 2).sum(1) / (world.truth**2).sum(1)
        out |= {"nmsd": error.mean(), "nmsd_of_client": error}
    if world.test is not None:
        X, y = world.test
        scores = jnp.einsum("cnd,sqd->sqcn", X, models)
        right = (scores * y[None, None] > 0).mean(-1)
        of_client = right[world.server, world.cluster, world.task]
        out |= {"accuracy": of_client.mean(), "accuracy_of_client": of_client}
    return out


def drift_bound(tau: ArrayLike) -> np.ndarray:
    r"""How far learning from others may have moved models, as a share of eta.

    :math:`1 - \prod_{j \le n} (1 - \tau_j)`, eta being the largest squared distance of
    two clusters' models (Gauthier, Theorem 5.2). For tau ``[n]`` in [0, 1] of all
    rounds so far, ``[n]`` float64 after each.
    """
    return 1 - np.cumprod(1 - np.asarray(tau, np.float64))


def fixed_point(world: World, near: ArrayLike, tau: float, rho: float) -> np.ndarray:
    r"""Where models end without noise, squared errors and all clients taking part.

    The solution of :math:`W = (A \otimes T)(W - \bar G(W) / \rho)` with the mean
    gradients of servers and clusters, which every pair needs a client for.

    Args:
      world: with squared errors; known.
      near: A, ``[S, S]``.
      tau: of every round.
      rho: of ADMM.

    Returns:
      ``[S, Q, d]`` float64.

    Raises:
      ValueError: a server without a client of some cluster, or logistic errors.
    """
    if not world.spectral:
        raise ValueError("world must be of squared errors, got logistic ones.")
    values, vectors, slope = (np.asarray(x, np.float64) for x in world.spectral)
    H = np.einsum("kde,ke,kfe->kdf", vectors, values, vectors)
    server, cluster = np.asarray(world.server), np.asarray(world.cluster)
    S, Q, d = server.max() + 1, cluster.max() + 1, H.shape[1]
    group = np.eye(S * Q)[server * Q + cluster]
    count = group.sum(0)
    if not count.all():
        raise ValueError(f"every server needs a client of every cluster, got {count}.")
    H, slope = (np.tensordot(group.T / count[:, None], x, 1) for x in (H, slope))
    with jax.enable_x64(True):
        apart = np.asarray(cluster_mix(tau, Q))
    M = np.kron(np.asarray(near, np.float64), apart)
    left = np.eye(S * Q * d) - np.kron(M, np.eye(d))
    left += np.einsum("ij,jab->iajb", M / rho, H).reshape(left.shape)
    right = -(M @ slope).reshape(-1) / rho
    return np.linalg.solve(left, right).reshape(S, Q, d)
