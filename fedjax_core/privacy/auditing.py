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
      The smaller of left minus right, like p1; negative values refute the claim.
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
    """What an audit found.

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
    outputs = run_all(keys[0], data), run_all(keys[1], neighbour)
    return audit_outputs(*outputs, delta=delta, confidence=confidence)


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
    runs = [_flat(outputs), _flat(neighbour_outputs)]
    sizes = [len(x) for x in runs]
    if min(sizes) < 4:
        raise ValueError(f"runs must be >= 4 on each dataset, got {sizes}.")
    train = [x[: len(x) // 2] for x in runs]
    label = np.repeat([-1.0, 1.0], [len(x) for x in train])
    score = (fit or _least_squares)(np.concatenate(train), label)
    seen = [score(x) for x in train]
    unseen = [score(x[len(x) // 2 :]) for x in runs]

    # Each of the two bounds may fail with half of what is left over.
    level = 1 - (1 - confidence) / 2
    thresholds = np.quantile(np.concatenate(seen), np.linspace(0, 1, 201))
    thresholds = np.unique(thresholds)
    p1, p2 = _error_bounds(seen, thresholds, level)
    best = thresholds[[epsilon_from_errors(p1, p2, delta).argmax()]]
    p1, p2 = _error_bounds(unseen, best, level)[:, 0]
    middle = thresholds[[_error_counts(seen, thresholds).sum(0).argmin()]]
    errors = _error_counts(unseen, middle).sum() / sum(map(len, unseen))
    epsilon = epsilon_from_errors(p1, p2, delta)
    return Audit(float(1 - errors), float(epsilon), float(p1), float(p2))


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
    mean, scale = x.mean(0), x.std(0)
    scale[scale == 0] = 1
    w = np.linalg.lstsq((x - mean) / scale, label - label.mean(), rcond=None)[0]
    return lambda x: (x - mean) / scale @ w


def _error_counts(scores: list[np.ndarray], thresholds: np.ndarray) -> np.ndarray:
    """Of the test that says "neighbour" above a threshold, ``[2, thresholds]``."""
    below = [np.searchsorted(np.sort(s), thresholds, side="right") for s in scores]
    return np.stack([len(scores[0]) - below[0], below[1]])


def _error_bounds(
    scores: list[np.ndarray], thresholds: np.ndarray, level: float
) -> np.ndarray:
    """Upper bounds of Clopper and Pearson on the probabilities of `_error_counts`."""
    wrong, total = _error_counts(scores, thresholds), np.c_[[len(s) for s in scores]]
    bound = stats.beta.ppf(level, wrong + 1, np.maximum(total - wrong, 1))
    return np.where(wrong == total, 1.0, bound)
