"""Validation and diagnosis of what was learned on one device.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 2.3 and 2.4.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_core import check
from fedjax_core.types import Key, PyTree


class Validated(NamedTuple):
    """What `train_and_validate` returns.

    Attributes:
      hypothesis: what was learned on the training part.
      train_error: its average loss there, E_t.
      validation_error: its average loss on the rest, E_v.
    """

    hypothesis: Any
    train_error: jax.Array
    validation_error: jax.Array


def train_and_validate(
    key: Key,
    data: PyTree,
    fit: Callable[[PyTree], Any],
    loss: Callable[[Any, PyTree], jax.Array],
    validation_fraction: float = 0.2,
) -> Validated:
    """Splits the data at random, learns on one part and measures on both.

    Jung, Alg. 1.

    Args:
      key: of the split.
      data: leaves ``[m, ...]``.
      fit: ``(training part) -> hypothesis``.
      loss: ``(hypothesis, part) -> [rows]``, the loss of every data point.
      validation_fraction: in (0, 1), rounded to whole rows.

    Raises:
      ValueError: leaves of different lengths, or one of the two parts would be empty.
    """
    sizes = {x.shape[0] for x in jax.tree.leaves(data)}
    if len(sizes) != 1:
        raise ValueError(f"data must have leaves of one length, got {sorted(sizes)}.")
    (m,) = sizes
    held_out = round(validation_fraction * m)
    if not 0 < held_out < m:
        raise ValueError(
            "validation_fraction must leave rows on both sides, got "
            f"{validation_fraction} of {m}."
        )
    order = jax.random.permutation(key, m)
    validation = jax.tree.map(lambda x: x[order[:held_out]], data)
    train = jax.tree.map(lambda x: x[order[held_out:]], data)
    hypothesis = fit(train)
    return Validated(
        hypothesis, loss(hypothesis, train).mean(), loss(hypothesis, validation).mean()
    )


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What two errors and a baseline say.

    Attributes:
      verdict: "fine", "overfitting", "underfitting" or "unlucky split".
      advice: what to try.
    """

    verdict: str
    advice: str


_DIAGNOSES = {
    "fine": "There is little room for improvement.",
    "overfitting": "Use a smaller model, a stronger penalty or more data.",
    "underfitting": "Use a larger model and check that the optimiser converged.",
    "unlucky split": (
        "Enlarge the validation set, augment the data, and test whether the two parts "
        "come from one distribution."
    ),
}


def diagnose(
    train_error: float, validation_error: float, baseline: float, tol: float = 1.5
) -> Diagnosis:
    """Compares training error, validation error and a baseline.

    The book speaks of errors that are about equal or much larger; here an error is much
    larger than another if it is more than `tol` times it. Jung, Section 2.4.

    Args:
      train_error: E_t >= 0.
      validation_error: E_v >= 0.
      baseline: what can be reached, >= 0: the Bayes risk, an existing method or human
        performance.
      tol: > 1.
    """
    check.non_negative(
        train_error=train_error, validation_error=validation_error, baseline=baseline
    )
    check.open_interval(1, math.inf, tol=tol)
    if validation_error > tol * train_error:
        verdict = "overfitting"
    elif train_error > tol * validation_error:
        verdict = "unlucky split"
    elif validation_error > tol * baseline:
        verdict = "underfitting"
    else:
        verdict = "fine"
    return Diagnosis(verdict, _DIAGNOSES[verdict])
