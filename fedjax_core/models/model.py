"""What the simulator asks of a model: three pure functions, and two kinds of models.

A batch is a dict of arrays with a leading example axis, `x` [B, ...], `y` [B, ...] and
`example_mask` [B], bool, whose False rows are padding and may hold anything. A model
answers per example and never mixes rows; masking and averaging belong to the caller:

  loss = sum(where(mask, model.loss(params, batch, key), 0)) / max(sum(mask), 1).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from fedjax_core import check
from fedjax_core.metrics import Mean
from fedjax_core.types import Batch, Key, LossFn, Metrics, Params

Array: TypeAlias = jax.Array


class Model(NamedTuple):
    """A model as pure functions; nothing in it knows about clients.

    Attributes:
      init: key -> params, a pytree of arrays.
      loss: (params, batch, key) -> [B] float32, what training minimises per example.
        The key feeds dropout and the like; a deterministic model ignores it.
      metrics: (params, batch) -> name -> [B] float32, per-example values for
        evaluation, to be averaged over the examples whose mask is True. A `Mean` of
        [B] arrays instead says of every example what it adds to the numerator and to
        the denominator of that average: the right tokens of a text and its tokens.
    """

    init: Callable[[Key], Params]
    loss: LossFn
    metrics: Callable[[Params, Batch], Metrics]


def classifier(
    module: nn.Module, example_shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> Model:
    r"""A classifier trained with softmax cross-entropy.

    With logits :math:`z = f(w, x)` and label :math:`y` the loss of an example is
    :math:`\log \sum_k e^{z_k} - z_y`; its accuracy is 1 where the largest logit is
    that of the label (the first one on a tie) and 0 elsewhere.

    Args:
      module: maps `x` [B, *example_shape] to logits [B, num_classes]. It is applied
        with its parameters only: deterministic, without mutable collections.
      example_shape: shape of one example, without the batch axis.
      dtype: of `x`, for initialising the module: an integer type where it looks up
        embeddings.

    Returns:
      A `Model` whose params are the module's "params" collection. `batch["x"]` is of
      `dtype`, `batch["y"]` int32 in [0, num_classes). If the batch has an
      `example_mask`, the rows it hides are replaced by zeros on the way in, so that
      not even a NaN in them reaches the gradient of the masked average.

    Raises:
      ValueError: `example_shape` holds a size below 1; when tracing, `x` does not
        have this shape or `y` is not one label per example.
      TypeError: `example_shape` holds something else than ints, `y` is not integer.
    """
    shape = tuple(example_shape)
    for size in shape:
        check.positive_int(example_shape=size)

    def init(key: Key) -> Params:
        return module.init(key, jnp.zeros((1, *shape), dtype))["params"]

    def logits_and_labels(params: Params, batch: Batch) -> tuple[Array, Array]:
        x, y = _unpad(batch, shape, ())
        logits = module.apply({"params": params}, x)
        assert isinstance(logits, jax.Array)  # no mutable collections were asked for
        return logits.astype(jnp.float32), y

    def loss(params: Params, batch: Batch, key: Key) -> Array:
        del key
        return _cross_entropy(*logits_and_labels(params, batch))

    def metrics(params: Params, batch: Batch) -> dict[str, Array]:
        logits, y = logits_and_labels(params, batch)
        correct = jnp.argmax(logits, axis=-1) == y
        return {
            "loss": _cross_entropy(logits, y),
            "accuracy": correct.astype(jnp.float32),
        }

    return Model(init, loss, metrics)


def language_model(module: nn.Module, length: int, pad: int = 0) -> Model:
    r"""A model of the next token at every position, trained with cross-entropy.

    An example is a piece of text: `x` its tokens, `y` the token after each. Targets
    that are `pad` are not scored. With s the number of targets that are, the loss of an
    example is the mean :math:`\frac 1 s \sum_t (\log \sum_k e^{z_{tk}} - z_{t y_t})`
    over them, 0 if there are none: every example weighs the same in training, however
    much of it is padding. The metrics "loss" and "accuracy" are `Mean` of numerators
    and scored targets, so that evaluation averages over tokens and not over pieces.

    Args:
      module: maps `x` [B, length] to logits [B, length, num_tokens], deterministic
        and without mutable collections.
      length: tokens of a piece.
      pad: the token that fills up pieces.

    Returns:
      A `Model` whose params are the module's "params" collection. `batch["x"]` and
      `batch["y"]` are int32 [B, length]. Rows that `example_mask` hides are read as
      if they were all padding.

    Raises:
      ValueError: `length` below 1; when tracing, `x` or `y` of another shape.
      TypeError: `length` is not an int, `y` is not integer.
    """
    check.positive_int(length=length)

    def init(key: Key) -> Params:
        return module.init(key, jnp.zeros((1, length), jnp.int32))["params"]

    def logits_and_targets(params: Params, batch: Batch) -> tuple[Array, Array]:
        x, y = _unpad(batch, (length,), (length,), pad)
        logits = module.apply({"params": params}, x)
        assert isinstance(logits, jax.Array)  # no mutable collections were asked for
        return logits.astype(jnp.float32), y

    def over_tokens(values: Array, y: Array) -> Mean:
        scored = y != pad
        total = jnp.where(scored, values, 0).sum(axis=-1)
        return Mean(total, scored.sum(axis=-1).astype(jnp.float32))

    def loss(params: Params, batch: Batch, key: Key) -> Array:
        del key
        logits, y = logits_and_targets(params, batch)
        mean = over_tokens(_cross_entropy(logits, y), y)
        return mean.total / jnp.maximum(mean.count, 1)

    def metrics(params: Params, batch: Batch) -> dict[str, Mean]:
        logits, y = logits_and_targets(params, batch)
        return {
            "loss": over_tokens(_cross_entropy(logits, y), y),
            "accuracy": over_tokens(jnp.argmax(logits, axis=-1) == y, y),
        }

    return Model(init, loss, metrics)


def _unpad(
    batch: Batch, x_shape: tuple[int, ...], y_shape: tuple[int, ...], fill: int = 0
) -> tuple[Array, Array]:
    """The checked `x` [B, *x_shape] and `y` [B, *y_shape], masked rows `fill`."""
    x, y = batch["x"], batch["y"]
    if x.shape[1:] != x_shape:
        raise ValueError(f"batch['x'] must have shape (B, *{x_shape}), got {x.shape}.")
    if y.shape != (len(x), *y_shape):
        what = "one label" if not y_shape else f"{y_shape[0]} targets"
        raise ValueError(
            f"batch['y'] must hold {what} per example, shape {(len(x), *y_shape)}, "
            f"got shape {y.shape}."
        )
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise TypeError(f"batch['y'] must be integer, got {y.dtype}.")
    if "example_mask" not in batch:
        return x, y
    mask = batch["example_mask"].astype(bool)

    def unpad(values: Array) -> Array:
        by_row = mask.reshape((-1,) + (1,) * (values.ndim - 1))
        return jnp.where(by_row, values, jnp.asarray(fill, values.dtype))

    return unpad(x), unpad(y)


def _cross_entropy(logits: Array, y: Array) -> Array:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)
