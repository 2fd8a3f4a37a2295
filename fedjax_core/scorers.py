"""Other ways to say how much a public example is like a client's own data.

Scores that FedAUX compares its certainties with. They look at features of one client
after the other, with scikit-learn, and protect nothing.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin, 2021, appendix C.1; his densities are of the client's own points,
  which says nothing of public ones, here they are of those.
"""

from collections.abc import Callable

import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import check_finite
from fedjax_core.random import hash64

Scorer = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
"""``(own [m, H], negatives [n, H], queries [q, H], seed) -> [q]`` in [0, 1], as are all
of `SCORERS`."""


def two_class_svm(
    own: np.ndarray, negatives: np.ndarray, queries: np.ndarray, seed: int
) -> np.ndarray:
    """An RBF machine, own against negatives, calibrated by Platt's method in 5 folds.

    The kernel's scale is one over the width times the variance of all features.
    """
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.model_selection import StratifiedKFold
    from sklearn.svm import SVC

    both = np.concatenate([own, negatives])
    t = np.repeat([1, 0], [len(own), len(negatives)])
    folds = min(5, len(own), len(negatives))
    if folds < 2:
        return equal(own, negatives, queries, seed)
    machine = CalibratedClassifierCV(
        SVC(C=1.0, gamma="scale"),
        cv=StratifiedKFold(folds, shuffle=True, random_state=seed),
    ).fit(both, t)
    return machine.predict_proba(queries)[:, 1]


def one_class_svm(
    own: np.ndarray, negatives: np.ndarray, queries: np.ndarray, seed: int
) -> np.ndarray:
    """A sigmoid of the decision function of an RBF machine around own features.

    These have mean 0 and variance 1, so that the kernel's scale is one over the width.
    """
    from sklearn.svm import OneClassSVM

    mean, std = own.mean(0), own.std(0)
    std = np.where(std > 0, std, 1)
    machine = OneClassSVM(gamma=1 / own.shape[1], nu=0.5).fit((own - mean) / std)
    return 1 / (1 + np.exp(-machine.decision_function((queries - mean) / std)))


def isolation_forest(
    own: np.ndarray, negatives: np.ndarray, queries: np.ndarray, seed: int
) -> np.ndarray:
    """How deep 100 random trees on own features bury a query, from 0 to 1."""
    from sklearn.ensemble import IsolationForest

    forest = IsolationForest(n_estimators=100, random_state=seed).fit(own)
    return _from_0_to_1(forest.score_samples(queries))


def density(
    own: np.ndarray, negatives: np.ndarray, queries: np.ndarray, seed: int
) -> np.ndarray:
    """The density of own features around a query, normal of bandwidth 1/2, 0 to 1."""
    from sklearn.neighbors import KernelDensity

    log = KernelDensity(bandwidth=0.5).fit(own).score_samples(queries)
    return _from_0_to_1(np.exp(log - log.max()))


def at_random(
    own: np.ndarray, negatives: np.ndarray, queries: np.ndarray, seed: int
) -> np.ndarray:
    """Uniform in [0, 1]."""
    return np.random.default_rng(seed).uniform(size=len(queries))


def equal(
    own: np.ndarray, negatives: np.ndarray, queries: np.ndarray, seed: int
) -> np.ndarray:
    """One half for all."""
    return np.full(len(queries), 0.5)


SCORERS: dict[str, Scorer] = {
    "two-class SVM": two_class_svm,
    "one-class SVM": one_class_svm,
    "isolation forest": isolation_forest,
    "density": density,
    "random": at_random,
    "equal": equal,
}


def check_features(
    own: ArrayLike, mask: ArrayLike, negatives: ArrayLike, queries: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features ``[N, m, H]``, which there are ``[N, m]``, ``[n, H]`` and ``[q, H]``.

    Raises:
      ValueError: shapes that do not fit, no negatives, features that are not finite.
    """
    own, mask = np.asarray(own), np.asarray(mask, bool)
    negatives, queries = np.asarray(negatives), np.asarray(queries)
    shapes = [own.shape[:2], own.shape[2:], own.shape[2:]]
    if [mask.shape, negatives.shape[1:], queries.shape[1:]] != shapes:
        raise ValueError(
            f"own, mask, negatives and queries must have shapes [N, m, H], [N, m], "
            f"[n, H] and [q, H], got {own.shape}, {mask.shape}, {negatives.shape} and "
            f"{queries.shape}."
        )
    if not len(negatives):
        raise ValueError("negatives must have a row or more, got none.")
    check_finite(own=own[mask], negatives=negatives, queries=queries)
    return own, mask, negatives, queries


def score(
    name: str,
    own: np.ndarray,
    mask: np.ndarray,
    negatives: np.ndarray,
    queries: np.ndarray,
    seed: int = 0,
) -> np.ndarray:
    """Scores by every client, ``[N, q]`` float32 in (0, 1].

    A client without examples scores 1/2; 1e-8 is added, so that no sum is 0.

    Args:
      name: one of `SCORERS`.
      own: ``[N, m, H]`` features of the clients' examples.
      mask: ``[N, m]`` bool, which there are.
      negatives: ``[n, H]`` features of public examples.
      queries: ``[q, H]`` of those to score.
      seed: of what is drawn, for each client anew.

    Raises:
      ValueError: no such name, or as `check_features`.
    """
    check.one_of(SCORERS, name=name)
    own, mask, negatives, queries = check_features(own, mask, negatives, queries)
    seeds = hash64(seed, np.arange(len(own))) % 2**32
    rows = [
        (SCORERS[name] if there.any() else equal)(h[there], negatives, queries, int(s))
        for h, there, s in zip(own, mask, seeds, strict=True)
    ]
    return np.minimum(np.asarray(rows, np.float32) + np.float32(1e-8), 1)


def nearest(queries: np.ndarray, own: np.ndarray, k: int = 4) -> np.ndarray:
    """A client's k examples that are most like each query, ``[q, k]``, nearest first.

    By the cosine of features: an audit of what the public examples that a client scores
    highest tell of its own (Sattler, equation C.23).

    Args:
      queries: ``[q, H]`` features, those of the highest scores say.
      own: ``[m, H]`` features of the client's examples.
      k: 1 to m.
    """
    check.in_range(1, len(own), k=k)
    a, b = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        for x in (queries, own)
    )
    return np.argsort(-(a @ b.T), axis=1, kind="stable")[:, :k]


def _from_0_to_1(values: np.ndarray) -> np.ndarray:
    width = np.ptp(values)
    return (values - values.min()) / width if width > 0 else np.full(len(values), 0.5)
