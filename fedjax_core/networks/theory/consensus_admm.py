r"""What is proved of linearised consensus ADMM: stability, gaps, the price of noise.

With :math:`L_- = D - A = 2 Q^2` and :math:`L_+ = D + A` of a connected graph, and the
sums :math:`r_n = \sum_{s \le n} Q w_s` of all messages, the state is measured by

.. math::

  \lVert q_n - q^* \rVert_G^2 = \rho \lVert r_n \rVert^2
    + \tfrac{\rho}{2} \lVert w_n - w^* \rVert_{L_+}^2 .

Gaps are of the sum f of the nodes' losses at the nodes' own parameters, which may be
below its minimum under consensus. They are those of `networks.admm` with its
`linearised` primal, in the order of its rounds: w_0 is where it starts, at consensus.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, (3.14)-(3.23), Lemma II and Theorem II. As printed these do not hold: the
  step size enters by D where :math:`D^2 = 1 / (2 \eta)` is meant, the start with
  :math:`L_-` where it is :math:`L_+ / 2`, the end is dropped, and (3.23) divides by K
  once too often.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_core import check
from fedjax_core.networks.graph import Graph, degree
from fedjax_core.networks.spectrum import check_connected


def stability_margin(
    graph: Graph, hessians: ArrayLike, rho: float, eta: ArrayLike
) -> float:
    r"""How far quadratic losses are from where linearised ADMM may diverge.

    The smallest eigenvalue of :math:`4 / \eta_k I + 2 \rho \deg_k I + 3 \rho L_+ - 2F`;
    where it is > 0 every run converges. It is for all rho if
    :math:`\eta_k < 2 / \lambda_{\max}(F_k)`.

    Args:
      graph: the network.
      hessians: F_k, ``[n, d, d]``.
      rho: the penalty, > 0.
      eta: constant step sizes, one number or ``[n]``.
    """
    check.positive(rho=rho)
    F = np.asarray(hessians, np.float64)
    n, d, _ = F.shape
    plus = _laplacians(graph)[1]
    own = 4 / np.broadcast_to(eta, n) + 2 * rho * np.asarray(degree(graph), np.float64)
    total = np.kron(np.diag(own) + 3 * rho * plus, np.eye(d))
    for k in range(n):
        total[k * d : (k + 1) * d, k * d : (k + 1) * d] -= 2 * F[k]
    return float(np.linalg.eigvalsh(total)[0])


def gap_bounds(
    graph: Graph,
    W: ArrayLike,
    optimum: ArrayLike,
    rho: float,
    eta: ArrayLike,
    noise: ArrayLike | None = None,
) -> np.ndarray:
    r"""Bounds of :math:`f(w_n) - f^*` for n = 1 .. T, along a run (Lemma II).

    With equality for linear losses that sum to 0. What noise adds is exact, of mean 0
    where w_n is given, and not the printed multiple of its square.

    Args:
      graph: connected.
      W: the messages w_0 .. w_{T+1}, ``[T + 2, n, d]``.
      optimum: w*, ``[d]``, any minimiser under consensus.
      rho: the penalty.
      eta: the step sizes of w_1 .. w_{T+1}, ``[T + 1]``, or one number.
      noise: that in W, ``[T + 2, n, d]``.

    Returns:
      ``[T]`` float64.
    """
    run = _Run(graph, W, optimum, rho, eta, noise)
    total = np.cumsum(run.w, 0) - run.w[0]  # r_n = Q total
    distance = (
        _inner(total, run.minus, total) + _inner(run.error, run.plus, run.error)
    ) * (rho / 2)
    now, error = run.w[1:-1], run.error[1:-1]
    inner = (
        run.common()
        - _inner(now, run.minus, now) / 2
        + _inner(error, run.plus, run.turn)
    )
    return distance[:-2] - distance[1:-1] + rho * inner


def ergodic_bound(
    graph: Graph,
    W: ArrayLike,
    optimum: ArrayLike,
    rho: float,
    eta: ArrayLike,
    noise: ArrayLike | None = None,
) -> float:
    r"""A bound of :math:`f(\hat w) - f^*` at the mean of w_1 .. w_T (Theorem II).

    Args:
      graph: as for `gap_bounds`, as all others are.
      W: see there.
      optimum: see there.
      rho: see there.
      eta: see there.
      noise: see there.
    """
    run = _Run(graph, W, optimum, rho, eta, noise)
    move = np.diff(run.w, axis=0)
    inner = (
        run.common()
        - _inner(run.w[0] - run.error[0], run.plus, run.turn)
        + _inner(move[1:], run.plus, move[1:])
    )
    ends = (
        _inner(run.w[1], run.plus, move[0])
        - _inner(run.w[-1], run.plus, move[-1])
        + _inner(run.error[0], run.plus, run.error[0]) / 2
    )
    return float(rho / len(inner) * (inner.sum() + ends))


def noise_bound(
    graph: Graph, dimension: int, rho: float, variance: ArrayLike, decay: float
) -> float:
    r"""What noise adds to T times the ergodic bound, at most, however long the run.

    :math:`4 \rho P (\Phi_{\max}(L_-)^2 + \Phi_{\max}(L_+)^2) / \Phi_{\min}(L_-)`
    times :math:`\sum_k \sigma_k^2(0) / (1 - \zeta)`, with the largest and the smallest
    positive singular values: (3.21), and with
    :math:`\sigma_k^2(0) = \Delta_k^2 / (2 \varphi)` the trade-off of accuracy and
    privacy (3.23).

    Args:
      graph: as for `gap_bounds`.
      dimension: P, entries of a message.
      rho: the penalty.
      variance: ``[n]``, of the noise on the entries of the first message.
      decay: zeta in (0, 1), by which the variance falls from message to message.
    """
    check.open_interval(0, 1, decay=decay)
    minus, plus = _laplacians(graph)
    values = np.linalg.eigvalsh(minus)
    largest = values[-1] ** 2 + np.linalg.eigvalsh(plus)[-1] ** 2
    factor = 4 * rho * dimension * largest / values[1]  # connected: one zero
    return float(factor * np.sum(variance) / (1 - decay))


class _Run:
    """A run in float64 and what both bounds share; times are those of n = 1 .. T."""

    def __init__(self, graph, W, optimum, rho, eta, noise):
        self.w = np.asarray(W, np.float64)
        self.error = self.w - np.asarray(optimum, np.float64)
        self.minus, self.plus = _laplacians(graph)
        self.rho = rho
        steps = np.broadcast_to(np.asarray(eta, np.float64), len(self.w) - 1)
        self.stiff = 1 / steps[1:, None, None]
        before, now, after = self.w[:-2], self.w[1:-1], self.w[2:]
        self.turn = 2 * now - before - after
        self.pushed = 0.0
        if noise is not None:
            curvature = self.stiff + 2 * rho * np.diag(self.minus)[:, None]
            self.pushed = curvature * np.asarray(noise, np.float64)[2:]

    def common(self) -> np.ndarray:
        before, now, after = self.w[:-2], self.w[1:-1], self.w[2:]
        along = self.stiff * (now - after) + self.pushed
        return (
            (self.error[1:-1] * along).sum((1, 2)) / self.rho
            - _inner(now, self.minus, after)
            - _inner(now - before, self.plus, now - before) / 2
        )


def _laplacians(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """L_- and L_+, ``[n, n]`` float64."""
    check_connected(graph)
    A = np.asarray(graph.dense(), np.float64)
    D = np.diag(A.sum(1))
    return D - A, D + A


def _inner(a: np.ndarray, L: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("...nd,nm,...md->...", a, L, b)
