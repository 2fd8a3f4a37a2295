"""How well a test can tell neighbouring datasets apart by an algorithm's output.

How far the solution of GTVMin moves with one label is in `networks.theory.leakage`,
what features tell about an attribute in `information`.

Arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 9.1 and 9.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from scipy import stats

from fedjax_core import check
from fedjax_core.types import Key, PyTree

Score = Callable[[np.ndarray], np.ndarray]


def trade_off_slack(
    p1: npt.ArrayLike, p2: npt.ArrayLike, epsilon: float, delta: float
) -> np.ndarray:
    r"""What is left of the limits that (epsilon, delta)-DP sets to every test.

    A test that errs with probability p1 on D (it says D') and p2 on D' satisfies

    .. math::

      e^\varepsilon p_1 + p_2 \ge 1 - \delta, \qquad
      p_1 + e^\varepsilon p_2 \ge 1 - \delta .

    The book prints the first; neighbours are symmetric, hence the second. Jung, (180).

    Args:
      p1: probabilities in [0, 1], of any shape.
      p2: the same for D'.
      epsilon: > 0.
      delta: in [0, 1).

    Returns:
      The smaller of left minus right, of the shape of p1; negative values refute the
      claim.
    """
    check.positive(epsilon=epsilon)
    p1, p2 = _errors(p1, p2, delta)
    with np.errstate(divide="ignore", over="ignore"):  # 0 times e^epsilon is 0
        first, second = np.exp(epsilon + np.log(p1)), np.exp(epsilon + np.log(p2))
    return np.minimum(first + p2, p1 + second) - (1 - delta)


def epsilon_from_errors(
    p1: npt.ArrayLike, p2: npt.ArrayLike, delta: float
) -> np.ndarray:
    """The smallest epsilon >= 0 that a test with these errors leaves possible.

    log((1 - delta - p2) / p1), or the same with p1 and p2 exchanged if that is more;
    upper confidence bounds of the errors give a lower one of epsilon. Args are those of
    `trade_off_slack`; the result is `inf` for a test that errs too seldom on one side.
    """
    p1, p2 = _errors(p1, p2, delta)

    def one(a, b):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (1 - delta - b) / a
            return np.where(b < 1 - delta, np.log(np.maximum(ratio, 1)), 0.0)

    return np.maximum(one(p1, p2), one(p2, p1))


class Audit(NamedTuple):
    """What a black-box audit found.

    Attributes:
      accuracy: share of held-out outputs whose dataset was told right.
      epsilon: lower confidence bound on epsilon at the delta asked for, >= 0.
      p1: upper confidence bound on the error for the dataset.
      p2: upper confidence bound on the error for its neighbour.
    """

    accuracy: float
    epsilon: float
    p1: float
    p2: float


def audit(
    key: Key,
    algorithm: Callable[[Key, Any], PyTree],
    data: Any,
    neighbour: Any,
    *,
    runs: int,
    delta: float,
    confidence: float = 0.95,
) -> Audit:
    """Tests a claim of privacy by running the algorithm on two neighbouring datasets.

    The algorithm is only run, never looked into. Of its outputs one half trains a
    predictor of which dataset was used, the other half counts its errors. A claim
    (epsilon, delta) is refuted if the bound exceeds epsilon; not refuting it proves
    nothing, since another pair of datasets or another predictor may do better.

    Args:
      key: PRNG key.
      algorithm: of a key and a dataset; jit- and vmap-able. For others collect the
        outputs and call `audit_outputs`.
      data: a dataset, a pytree.
      neighbour: a dataset of the same shapes that differs in one data point.
      runs: on each of the two, >= 4.
      delta: of the claim, in [0, 1).
      confidence: with which the bound holds, in (0, 1).

    References:
      Jung, Section 9.2, "How To Be Sure?".
    """
    check.positive_int(runs=runs)
    keys = jax.random.split(key, (2, runs))
    run_all = jax.jit(jax.vmap(algorithm, (0, None)))
    return audit_outputs(
        run_all(keys[0], data),
        run_all(keys[1], neighbour),
        delta=delta,
        confidence=confidence,
    )


def audit_outputs(
    outputs: PyTree,
    neighbour_outputs: PyTree,
    *,
    delta: float,
    confidence: float = 0.95,
    fit: Callable[[np.ndarray, np.ndarray], Score] | None = None,
) -> Audit:
    """The audit of `audit` on outputs already there, one per run.

    Args:
      outputs: leaves ``[runs, ...]`` of independent runs on a dataset.
      neighbour_outputs: leaves ``[runs', ...]`` of independent runs on its neighbour.
      delta: of the claim, in [0, 1).
      confidence: with which the bound holds, in (0, 1).
      fit: learns a score from flat outputs ``[k, p]`` and labels ``[k]`` in {-1, 1}, 1
        for the neighbour; by default linear least squares. The threshold on the score
        is chosen here, on the same outputs.
    """
    check.open_interval(0, 1, confidence=confidence)
    first, second = _flat(outputs), _flat(neighbour_outputs)
    if min(len(first), len(second)) < 4:
        raise ValueError(
            f"runs must be >= 4 on each dataset, got {len(first)} and {len(second)}."
        )
    halves = [(x[: len(x) // 2], x[len(x) // 2 :]) for x in (first, second)]
    (train1, test1), (train2, test2) = halves
    x = np.concatenate([train1, train2])
    label = np.repeat([-1.0, 1.0], [len(train1), len(train2)])
    score = (fit or _least_squares)(x, label)

    # Each of the two bounds may fail with half of what is left over.
    level = 1 - (1 - confidence) / 2
    values = np.sort(score(x))
    thresholds = np.unique(np.quantile(values, np.linspace(0, 1, 201)))
    bounds = _error_bounds(score(train1), score(train2), thresholds, level)
    best = thresholds[[np.argmax(epsilon_from_errors(*bounds, delta))]]
    p1, p2 = _error_bounds(score(test1), score(test2), best, level)
    middle = thresholds[
        [np.argmin(np.add(*_error_counts(score(train1), score(train2), thresholds)))]
    ]
    errors = np.add(*_error_counts(score(test1), score(test2), middle))[0]
    return Audit(
        accuracy=float(1 - errors / (len(test1) + len(test2))),
        epsilon=float(epsilon_from_errors(p1, p2, delta)[0]),
        p1=float(p1[0]),
        p2=float(p2[0]),
    )


def _errors(
    p1: npt.ArrayLike, p2: npt.ArrayLike, delta: float
) -> tuple[np.ndarray, np.ndarray]:
    check.fraction(delta=delta)
    p1, p2 = np.asarray(p1, np.float64), np.asarray(p2, np.float64)
    for name, value in (("p1", p1), ("p2", p2)):
        if not np.all((value >= 0) & (value <= 1)):
            raise ValueError(f"{name} must be probabilities, got {value}.")
    return p1, p2


def _flat(outputs: PyTree) -> np.ndarray:
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(outputs)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)


def _least_squares(x: np.ndarray, label: np.ndarray) -> Score:
    mean = x.mean(0)
    scale = x.std(0)
    scale[scale == 0] = 1
    w = np.linalg.lstsq((x - mean) / scale, label - label.mean(), rcond=None)[0]
    return lambda x: (x - mean) / scale @ w


def _error_counts(
    first: np.ndarray, second: np.ndarray, thresholds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of the test that says "neighbour" above a threshold, for every threshold."""
    first, second = np.sort(first), np.sort(second)
    return (
        len(first) - np.searchsorted(first, thresholds, side="right"),
        np.searchsorted(second, thresholds, side="right"),
    )


def _error_bounds(
    first: np.ndarray, second: np.ndarray, thresholds: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds of Clopper and Pearson on the two error probabilities."""
    bounds = []
    counts = _error_counts(first, second, thresholds)
    for wrong, total in zip(counts, (len(first), len(second)), strict=True):
        bound = stats.beta.ppf(level, wrong + 1, np.maximum(total - wrong, 1))
        bounds.append(np.where(wrong == total, 1.0, bound))
    return bounds[0], bounds[1]
