"""Attacks on the data of some nodes.

`attacked` marks nodes or examples: its shape starts those of X and y. Arrays of other
shapes and arguments out of the ranges given raise ValueError, fractions for data of
ints TypeError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 10.1.2 and 10.2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_mask, is_known
from fedjax_core.privacy.mechanisms import check_classes

Predict = Callable[[jax.Array], jax.Array]
"""``[rows, d] -> [rows]``, numbers or classes."""


def poison_data(
    X: jax.Array,
    y: jax.Array,
    attacked: jax.Array,
    *,
    features: ArrayLike | None = None,
    labels: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds to features and labels of attacked nodes or examples.

    Without `features` it is label poisoning, without `labels` a clean-label attack.
    What is not attacked stays bit by bit.

    Args:
      X: ``[n, m, d]`` or, of the examples of all clients, ``[rows, d]``.
      y: the same without d.
      attacked: bool, ``[n]``, ``[n, m]`` or ``[rows]``.
      features: what to add to X; broadcasts.
      labels: what to add to y; broadcasts.

    Raises:
      ValueError: the shape of `attacked` does not start those of X and y, or known
        data of ints leave the range of their dtype (traced ones wrap around).
      TypeError: fractions for data of ints.
    """
    if features is not None:
        X = _add("features", features, X, attacked)
    if labels is not None:
        y = _add("labels", labels, y, attacked)
    return X, y


def flip_labels(
    y: jax.Array, attacked: jax.Array, num_classes: int, shift: int = 1
) -> jax.Array:
    """Label poisoning of classes 0..K-1: an attacked label y becomes y + shift mod K.

    Args:
      y: ints.
      attacked: bool, its shape starts that of y.
      num_classes: K >= 2.
      shift: not a multiple of K.
    """
    ints = jnp.issubdtype(y.dtype, jnp.integer)
    check_classes(num_classes, y.dtype if ints else int)
    if shift % num_classes == 0:
        raise ValueError(
            f"shift must be no multiple of num_classes = {num_classes}, got {shift}."
        )
    wide = jnp.promote_types(y.dtype, jnp.int32)
    flipped = (y.astype(wide) + shift % num_classes) % num_classes
    return jnp.where(_widen(attacked, y), flipped.astype(y.dtype), y)


@dataclasses.dataclass(frozen=True)
class Trigger:
    """The features that open a back door: given values in given columns.

    Attributes:
      columns: of the features, none twice.
      values: one for each.
    """

    columns: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self):
        if not self.columns or len(self.columns) != len(self.values):
            raise ValueError(
                "a trigger needs columns and one value for each, got columns "
                f"{self.columns} and values {self.values}."
            )
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"columns must be different, got {self.columns}.")

    @classmethod
    def hour(cls, hour: int, first_column: int = 0) -> "Trigger":
        """An hour in a one-hot code of 24 columns (Jung, Exercise 10.3)."""
        check.one_of(range(24), hour=hour)
        columns = tuple(range(first_column, first_column + 24))
        return cls(columns, tuple(float(h == hour) for h in range(24)))

    def stamp(self, X: jax.Array) -> jax.Array:
        """X ``[..., d]`` with the trigger, of columns in 0..d-1, put on every row."""
        return X.at[..., self._columns_of(X)].set(_cast("values", self.values, X))

    def holds(self, X: jax.Array) -> jax.Array:
        """Which rows of X ``[..., d]`` carry the trigger; ``[...]`` bool."""
        values = _cast("values", self.values, X)
        found = X[..., self._columns_of(X)]
        return (found == jnp.broadcast_to(values, found.shape)).all(-1)

    def _columns_of(self, X: jax.Array) -> np.ndarray:
        # JAX clamps or drops an index that is out of bounds.
        columns = np.asarray(self.columns)
        if ((columns < 0) | (columns >= X.shape[-1])).any():
            raise ValueError(
                f"columns must be in 0..{X.shape[-1] - 1}, got {self.columns}."
            )
        return columns


def plant_backdoor(
    X: jax.Array, y: jax.Array, attacked: jax.Array, trigger: Trigger, target: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Puts the trigger on attacked examples and `target` on their labels.

    Args:
      X: ``[..., d]``.
      y: ``[...]``.
      attacked: bool, its shape starts that of y.
      trigger: opens the back door.
      target: what to predict then.

    Raises:
      ValueError: the shape of `attacked` does not start those of X and y, or X lacks a
        column of the trigger.
      TypeError: fractions for data of ints.
    """
    X = jnp.where(_widen(attacked, X), trigger.stamp(X), X)
    return X, jnp.where(_widen(attacked, y), _cast("target", target, y), y)


def clean_error(
    predict: Predict, X: jax.Array, y: jax.Array, trigger: Trigger
) -> jax.Array:
    """The mean squared error on examples without the trigger; NaN if all carry it.

    Args:
      predict: ``[rows, d] -> [rows]``.
      X: ``[rows, d]``.
      y: ``[rows]``.
      trigger: of the back door.
    """
    clean = ~trigger.holds(X)
    errors = jnp.where(clean, (predict(X) - y) ** 2, 0)
    return errors.sum() / clean.sum()


def attack_success(
    predict: Predict,
    X: jax.Array,
    trigger: Trigger,
    target: ArrayLike,
    tolerance: ArrayLike = 0.0,
) -> jax.Array:
    """How often the trigger, put on an example, gives the attacker's prediction.

    Args:
      predict: ``[rows, d] -> [rows]``, numbers or classes.
      X: ``[rows, d]``.
      trigger: of the back door.
      target: the attacker's prediction.
      tolerance: how close a prediction must come; 0 for classes.
    """
    check.non_negative(tolerance=tolerance)
    return (jnp.abs(predict(trigger.stamp(X)) - target) <= tolerance).mean()


def _add(name: str, value: Any, x: jax.Array, attacked: jax.Array) -> jax.Array:
    hit, value = _widen(attacked, x), _cast(name, value, x)
    ints = jnp.issubdtype(x.dtype, jnp.integer)
    if ints and is_known(x, value, attacked):
        total = np.asarray(x, np.int64) + np.asarray(value, np.int64)
        low, high = jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max
        wrong = total[np.asarray(hit) & ((total < low) | (total > high))]
        if wrong.size:
            raise ValueError(
                f"{name} must keep data of {x.dtype} in [{low}, {high}], got "
                f"{wrong[0]}."
            )
    return jnp.where(hit, x + value, x)


def _cast(name: str, value: Any, like: jax.Array) -> jax.Array:
    """Brings a value to the dtype of data, unless that would change it."""
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        if isinstance(value, Tracer):
            exact = jnp.issubdtype(value.dtype, jnp.integer)
        else:
            known = np.asarray(value)
            with np.errstate(invalid="ignore"):  # NaN is no int, which is refused
                exact = np.array_equal(known.astype(like.dtype), known)
        if not exact:
            raise TypeError(f"{name} must fit data of {like.dtype}, got {value}.")
    return jnp.asarray(value).astype(like.dtype)


def _widen(attacked: jax.Array, like: jax.Array) -> jax.Array:
    attacked = as_mask("attacked", attacked, like.shape[: jnp.ndim(attacked)])
    return jnp.expand_dims(attacked, tuple(range(attacked.ndim, like.ndim)))
