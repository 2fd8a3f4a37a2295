r"""PAO-Fed as a random linear system: when it is stable, where its error settles.

All models, of the server, of the K clients and of the past that messages still carry,
make one vector of :math:`1 + K (l_{max} + 1)` blocks of d: :math:`w`, the clients'
:math:`w_k`, and what they were l iterations before, for l = 1 .. l_max. Its error obeys

.. math::

  \tilde w \leftarrow B (I - \mu Z Z^\top) A \tilde w - \mu B Z \eta ,

A merges what clients receive, B averages what arrives. Moments follow from those of A,
B and Z if these are independent of each other and over time, as the text assumes; in
the algorithm they are not quite. All is float64 and dense, for small systems.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024, Section 4.3, Theorems 4.1 and 4.2. It prints a block of zeros in B that shifts
  delays by one, and leaves out the rule that the latest entry wins, without which B has
  negative entries.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedjax_core import check
from fedjax_core.networks.graph import check_shapes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """A small system with Gaussian features and masks drawn afresh.

    Attributes:
      num_shared: m, in [1, d].
      availability: ``[K]`` probabilities to take part.
      delays: ``[l_max + 1]`` probabilities of delays; the rest is dropped.
      late_weight: a message that is l late weighs late_weight^l.
      covariances: ``[K, d, d]``, R_k of the features.
      noise: ``[K]`` variances of the observations' noise.
    """

    num_shared: int
    availability: npt.ArrayLike
    delays: npt.ArrayLike
    late_weight: float
    covariances: npt.ArrayLike
    noise: npt.ArrayLike

    def __post_init__(self):
        for name in ("availability", "delays", "covariances", "noise"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        K, d = np.shape(self.covariances)[:2]
        check.positive_int(num_shared=self.num_shared)
        check.in_range(1, d, num_shared=self.num_shared)
        check.in_range(0, 1, late_weight=self.late_weight)
        entries = {x: getattr(self, x) for x in ("availability", "delays", "noise")}
        check.each_non_negative("entry", **entries)
        for name, most in (("availability", np.max), ("delays", np.sum)):
            if most(entries[name]) > 1 + 1e-9:
                raise ValueError(f"{name} must be probabilities, got {entries[name]}.")
        for name in ("availability", "noise"):
            check_shapes(f"({K},)", **{name: entries[name]})

    @functools.cached_property
    def moments(self) -> "Moments":
        """See `Moments`; enumerates all masks."""
        p, delays, d = np.asarray(self.availability), np.asarray(self.delays), _d(self)
        arriving, shape = np.outer(delays, p).ravel(), (len(delays), len(p), d)
        A, AA = _mean(
            (chance, merge_matrix(masks, len(delays) - 1))
            for chance, masks in _masks(p, d, self.num_shared)
        )
        B, BB = _mean(
            (chance, aggregation_matrix(masks.reshape(shape), self.late_weight))
            for chance, masks in _masks(arriving, d, self.num_shared)
        )
        return Moments(A, B, AA, BB)


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """Means of A and B, ``[N, N]``, and of their Kronecker squares, ``[N^2, N^2]``.

    N = d (1 + K (l_max + 1)).
    """

    A: np.ndarray
    B: np.ndarray
    AA: np.ndarray
    BB: np.ndarray


def merge_matrix(received: npt.ArrayLike, max_delay: int) -> np.ndarray:
    """A, ``[N, N]``, of the entries that clients receive, ``[K, d]`` bool."""
    received = np.asarray(received, np.float64)
    num_clients, d = received.shape
    A = np.eye(d * (1 + num_clients * (max_delay + 1)))
    for k, mask in enumerate(received):
        rows = slice(d * (k + 1), d * (k + 2))
        A[rows, :d] = np.diag(mask)
        A[rows, rows] = np.diag(1 - mask)
    return A


def aggregation_matrix(
    arriving: npt.ArrayLike, late_weight: float, latest_wins: bool = True
) -> np.ndarray:
    """B, ``[N, N]``, of the messages that arrive.

    Args:
      arriving: ``[l_max + 1, K, d]`` bool, the entries of the message of client k that
        is l late; all False where none arrives.
      late_weight: see `Setting`.
      latest_wins: an entry of a message is left alone where a less late one has it.
    """
    masks = np.asarray(arriving, np.float64)
    slots, num_clients, d = masks.shape
    B = np.zeros(2 * (d * (1 + num_clients * slots),))
    B[:d, :d] = np.eye(d)
    taken = np.zeros(d, bool)
    for late, mask in enumerate(masks):
        count = max(mask.any(1).sum(), 1)
        for k in range(num_clients):
            share = late_weight**late / count * mask[k]
            if latest_wins:
                share = share * ~taken
            start = d * (1 + late * num_clients + k)
            B[:d, start : start + d] = np.diag(share)
            B[:d, :d] -= np.diag(share)
        taken |= mask.any(0)
    size = d * num_clients
    for late in range(slots):  # the past moves on by one, now is kept twice
        to, of = d + late * size, d + max(late - 1, 0) * size
        B[to : to + size, of : of + size] = np.eye(size)
    return B


def largest_step_sizes(covariances: npt.ArrayLike) -> tuple[float, float]:
    """Below which mean and mean square are stable: 2 and 1 over the top eigenvalue.

    Both are sufficient in the mean alone; the second leaves out terms of mu^2, which
    Gaussian features feel (`radius` with second_order=True), bounded ones less.
    """
    top = float(np.linalg.eigvalsh(np.asarray(covariances)).max())
    return 2 / top, 1 / top


def mean_radius(setting: Setting, step_size: float) -> float:
    """The spectral radius of the mean error's recursion."""
    N = len(setting.moments.A)
    inner = np.eye(N) - step_size * _covariance(setting)
    return _radius(setting.moments.B @ inner @ setting.moments.A)


def error_map(
    setting: Setting, step_size: float, second_order: bool = True
) -> np.ndarray:
    """F transposed: the map of the errors' second moments, ``[N^2, N^2]``.

    `second_order` is with the term of mu^2, which the text leaves out.
    """
    check.positive(step_size=step_size)
    R = _covariance(setting)
    eye = np.eye(len(R))
    inner = np.eye(len(R) ** 2) - step_size * (np.kron(eye, R) + np.kron(R, eye))
    if second_order:
        inner += step_size**2 * _fourth_moment(setting)
    return setting.moments.BB @ inner @ setting.moments.AA


def radius(setting: Setting, step_size: float, second_order: bool = True) -> float:
    """The spectral radius of `error_map`."""
    return _radius(error_map(setting, step_size, second_order))


def mean_square_deviation(
    setting: Setting, step_size: float, second_order: bool = True
) -> float:
    """The steady mean square deviation of the server's model, (4.34).

    Raises:
      ValueError: the recursion is not stable for this step size.
    """
    F = error_map(setting, step_size, second_order)
    if _radius(F) >= 1:
        raise ValueError(
            f"step_size must be so small that the recursion is stable, got {step_size}."
        )
    P = np.linalg.solve(np.eye(len(F)) - F, _driven(setting, step_size))
    return _of_server(setting, P)


def transient(
    setting: Setting,
    step_size: float,
    target: npt.ArrayLike,
    iterations: int,
    second_order: bool = True,
) -> np.ndarray:
    """Mean square deviations after 0 .. iterations steps from 0, (4.32).

    Args:
      setting: what they are of.
      step_size: mu > 0.
      target: ``[d]``, the parameters to be found.
      iterations: steps.
      second_order: see `error_map`.
    """
    F, driven = error_map(setting, step_size, second_order), _driven(setting, step_size)
    copies = len(setting.moments.A) // _d(setting)
    error = np.tile(np.asarray(target, np.float64), copies)
    P, found = np.kron(error, error), []
    for _ in range(iterations + 1):
        found.append(_of_server(setting, P))
        P = F @ P + driven
    return np.array(found)


def ideal_mean_square_deviation(
    step_size: float,
    noise: float,
    eigenvalue: float,
    num_clients: int,
    d: int,
    second_order: bool = True,
) -> float:
    r"""The same where all take part with whole models and without delay.

    .. math::

      \frac{\mu \sigma^2 d}{2 K - \mu \lambda (d + K + 1)}

    of Gaussian features of covariance :math:`\lambda I`; without the terms of mu^2
    :math:`\mu \sigma^2 d / 2K`.
    """
    rest = step_size * eigenvalue * (d + num_clients + 1) if second_order else 0
    if rest >= 2 * num_clients:
        most = 2 * num_clients / rest * step_size
        raise ValueError(
            f"step_size must be < {most:.6g}, or the error grows, got {step_size}."
        )
    return step_size * noise * d / (2 * num_clients - rest)


def _d(setting: Setting) -> int:
    return np.shape(setting.covariances)[1]


def _radius(matrix: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def _covariance(setting: Setting) -> np.ndarray:
    """R, ``[N, N]``: zero but for the clients' models of now."""
    R, d = np.zeros_like(setting.moments.A), _d(setting)
    for k, of_client in enumerate(np.asarray(setting.covariances)):
        rows = slice(d * (k + 1), d * (k + 2))
        R[rows, rows] = of_client
    return R


def _fourth_moment(setting: Setting) -> np.ndarray:
    """E[ZZ' kron ZZ'] of Gaussian features, by Isserlis' theorem; ``[N^2, N^2]``."""
    R, d = _covariance(setting), _d(setting)
    N = len(R)
    both = np.einsum("ij,pq->ipjq", R, R)
    for k, C in enumerate(np.asarray(setting.covariances)):
        own = np.ix_(*4 * [range(d * (k + 1), d * (k + 2))])
        both[own] += np.einsum("ip,jq->ipjq", C, C) + np.einsum("iq,jp->ipjq", C, C)
    return both.reshape(N * N, N * N)


def _driven(setting: Setting, step_size: float) -> np.ndarray:
    """What noise adds to the second moments in a step, ``[N^2]``."""
    R, d = _covariance(setting), _d(setting)
    clients = np.repeat(np.asarray(setting.noise), d)
    noise = np.zeros(len(R))
    noise[d : d + len(clients)] = clients
    return step_size**2 * setting.moments.BB @ (noise[:, None] * R).ravel()


def _of_server(setting: Setting, P: np.ndarray) -> float:
    N, d = len(setting.moments.A), _d(setting)
    return float(np.trace(P.reshape(N, N)[:d, :d]))


def _mean(draws: Iterator[tuple[float, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Means of a matrix and of its Kronecker square."""
    first, second = 0.0, 0.0
    for chance, matrix in draws:
        first = first + chance * matrix
        second = second + chance * np.kron(matrix, matrix)
    return np.asarray(first), np.asarray(second)


def _masks(
    probability: np.ndarray, d: int, m: int
) -> Iterator[tuple[float, np.ndarray]]:
    """All masks ``[n, d]`` and their chances: m entries with a probability, or none."""
    some = [np.isin(np.arange(d), c) for c in itertools.combinations(range(d), m)]
    options = [
        [(1 - p, np.zeros(d, bool)), *((p / len(some), mask) for mask in some)]
        for p in probability
    ]
    for draw in itertools.product(*options):
        yield float(np.prod([c for c, _ in draw])), np.stack([mask for _, mask in draw])
