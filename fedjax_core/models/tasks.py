"""What the outputs of a network are for: losses and metrics by example."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check
from fedjax_core.metrics import (
    AUROC,
    CalibrationError,
    MaximumCalibrationError,
    Mean,
    Perplexity,
)
from fedjax_core.models.model import Ids
from fedjax_core.types import Batch, Metrics

Array: TypeAlias = jax.Array


class Task(NamedTuple):
    """The loss and the metrics of a network's outputs.

    Attributes:
      loss: (outputs, batch) -> [B], what training minimises per example. Outputs are
        float32 or wider.
      metrics: (outputs, batch) -> name -> values as of `Model.metrics`; None measures
        the loss alone.
      ids: shape of one example's outputs -> the `Ids` of `y`; None where `y` may be
        anything.
    """

    loss: Callable[[Array, Batch], Array]
    metrics: Callable[[Array, Batch], Metrics] | None = None
    ids: Callable[[tuple[int, ...]], Ids] | None = None


def classes(
    missing: int | None = None,
    *,
    top: int | None = None,
    calibration: bool = False,
    per_batch: bool = False,
) -> Task:
    r"""One of K classes, by softmax cross-entropy: of each example or of each token.

    With logits :math:`z` and label :math:`y` the loss is
    :math:`\log \sum_k e^{z_k} - z_y`; accuracy is 1 where the largest logit is that of
    the label (the first one on a tie) and 0 elsewhere. Where an example has s labels
    that are not `missing`, its loss is their mean, 0 if s = 0: every example weighs the
    same in training. Outside 0 to K - 1 both are NaN.

    Args:
      missing: a label that is not scored. Metrics are then, as where an example has
        several labels, `Mean` of numerators and scored labels, so that evaluation
        averages over labels and not over examples.
      top: k, of another metric, "top5" of 5: 1 where the label is among the k largest
        logits.
      calibration: measure "ece" and "mce" as well, of one label by example, see
        `metrics.CalibrationError`.
      per_batch: and "ece_per_batch" and "mce_per_batch", means of those of ten examples
        at a time, for comparison with papers that have such.

    Returns:
      A `Task` for logits [B, ..., K], `y` [B, ...] integer.
    """
    if top is not None:
        check.positive_int(top=top)

    def scores(logits: Array, batch: Batch) -> tuple[Array, Array, Array]:
        """Cross-entropy, correctness and whether a label is scored, [B, ...]."""
        y = _targets(batch, logits.shape[:-1])
        if not jnp.issubdtype(y.dtype, jnp.integer):
            raise TypeError(
                f"batch['y'] must be integer, got {y.dtype}; cast labels by "
                f"y.astype('int32')."
            )
        scored = jnp.ones(y.shape, bool)
        if missing is not None:
            scored = y != missing
            y = jnp.where(scored, y, 0)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)
        correct = (jnp.argmax(logits, axis=-1) == y).astype(logits.dtype)
        known = (y >= 0) & (y < logits.shape[-1])
        return losses * _valid(known), jnp.where(known, correct, _valid(known)), scored

    def mean(values: Array, scored: Array) -> Mean:
        axes = tuple(range(1, values.ndim))
        total = jnp.where(scored, values, 0).sum(axes)
        return Mean(total, scored.sum(axes).astype(jnp.float32))

    def loss(logits: Array, batch: Batch) -> Array:
        losses, _, scored = scores(logits, batch)
        total, count = mean(losses, scored)
        return total / jnp.maximum(count, 1)

    def metrics(logits: Array, batch: Batch) -> Metrics:
        losses, correct, scored = scores(logits, batch)
        found = {"loss": losses, "accuracy": correct}
        if top is not None:
            found[f"top{top}"] = _among(top, logits, batch["y"])
        if missing is not None or losses.ndim > 1:
            found = {name: mean(values, scored) for name, values in found.items()}
        if calibration or per_batch:
            found |= _calibration(logits, correct, batch, per_batch)
        return found

    return Task(loss, metrics, lambda shape: Ids(shape[-1], missing))


def next_token(pad: int = 0) -> Task:
    """The token after each: `classes` over all but `pad`, with "perplexity" as well."""
    task = classes(pad)
    assert task.metrics is not None
    of_classes = task.metrics

    def metrics(logits: Array, batch: Batch) -> Metrics:
        found = of_classes(logits, batch)
        return found | {"perplexity": Perplexity(*found["loss"])}

    return task._replace(metrics=metrics)


def _among(top: int, logits: Array, y: Array) -> Array:
    """1 where the label is among the largest logits; ties go to the first classes."""
    of_label = jnp.take_along_axis(logits, y[..., None], axis=-1)
    earlier = jax.lax.broadcasted_iota(y.dtype, logits.shape, y.ndim) < y[..., None]
    # Written so that NaN is larger than any number.
    before = ~(logits <= of_label) | (logits == of_label) & earlier
    return (before.sum(-1) < top).astype(logits.dtype)


def _calibration(
    logits: Array, correct: Array, batch: Batch, per_batch: bool
) -> Metrics:
    if correct.ndim > 1:
        raise ValueError(
            f"calibration must be of one label per example, got labels of shape "
            f"{correct.shape}."
        )
    found = {}
    confidence = jax.nn.softmax(logits, axis=-1).max(-1)
    for name, kind in (("ece", CalibrationError), ("mce", MaximumCalibrationError)):
        found[name] = kind.per_example(confidence, correct)
        if per_batch:
            found[f"{name}_per_batch"] = kind.per_batch(
                confidence, correct, batch["example_mask"]
            )
    return found


def multi_label() -> Task:
    r"""K labels that hold or don't, each by the logistic loss.

    With logits :math:`z` and labels :math:`y \in \{0, 1\}^K` the loss is the mean over
    the labels of :math:`\log(1 + e^{z_k}) - y_k z_k`. Metrics are "loss", "accuracy",
    the share of labels on the right side of a probability of 1/2, and "auroc_0" to
    "auroc_{K-1}", see `metrics.AUROC`.

    Returns:
      A `Task` for logits [B, K], `y` [B, K] of 0 and 1 in any dtype.
    """

    def loss(logits: Array, batch: Batch) -> Array:
        y = _targets(batch, logits.shape)
        cross_entropy = optax.losses.sigmoid_binary_cross_entropy
        losses = cross_entropy(logits, y.astype(logits.dtype))
        return jnp.mean(losses * _valid((y == 0) | (y == 1)), axis=-1)

    def metrics(logits: Array, batch: Batch) -> Metrics:
        y = _targets(batch, logits.shape)
        right = (logits > 0) == (y == 1)
        return {"loss": loss(logits, batch), "accuracy": right.mean(-1)} | {
            f"auroc_{k}": AUROC.per_example(logits[:, k], y[:, k])
            for k in range(logits.shape[-1])
        }

    return Task(loss, metrics, lambda shape: Ids(2))


def _valid(known: Array) -> Array:
    """1, or NaN where a label is not known: a factor that reaches gradients too."""
    # Not the constant, at which `jax_debug_nans` would stop.
    return jnp.sqrt(jnp.where(known, jnp.float32(1), jnp.float32(-1)))


def _targets(batch: Batch, shape: tuple[int, ...]) -> Array:
    """`y`, which must have the given shape."""
    y = batch["y"]
    if y.shape != shape:
        sizes = " x ".join(map(str, shape[1:]))
        what = f"{sizes} targets" if sizes else "one label"
        raise ValueError(
            f"batch['y'] must hold {what} per example, shape {shape}, got shape "
            f"{y.shape}."
        )
    return y
