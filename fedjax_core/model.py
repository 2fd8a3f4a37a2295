"""What the simulator asks of a model: three pure functions, and classifiers as such.

A batch is a dict of arrays with a leading example axis, `x` [B, ...], `y` [B] and
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

from fedjax_core import check
from fedjax_core.types import Batch, Key, LossFn, Params

Array: TypeAlias = jax.Array


class Model(NamedTuple):
    """A model as pure functions; nothing in it knows about clients.

    Attributes:
      init: key -> params, a pytree of arrays.
      loss: (params, batch, key) -> [B] float32, what training minimises per example.
        The key feeds dropout and the like; a deterministic model ignores it.
      metrics: (params, batch) -> name -> [B] float32, per-example values for
        evaluation, to be averaged over the examples whose mask is True.
    """

    init: Callable[[Key], Params]
    loss: LossFn
    metrics: Callable[[Params, Batch], dict[str, Array]]


def classifier(module: nn.Module, example_shape: Sequence[int]) -> Model:
    r"""A classifier trained with softmax cross-entropy.

    With logits :math:`z = f(w, x)` and label :math:`y` the loss of an example is
    :math:`\log \sum_k e^{z_k} - z_y`; its accuracy is 1 where the largest logit is
    that of the label (the first one on a tie) and 0 elsewhere.

    Args:
      module: maps `x` [B, *example_shape] to logits [B, num_classes]. It is applied
        with its parameters only: deterministic, without mutable collections.
      example_shape: shape of one example, without the batch axis.

    Returns:
      A `Model` whose params are the module's "params" collection. `batch["x"]` is
      float, `batch["y"]` int32 in [0, num_classes). If the batch has an
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
        return module.init(key, jnp.zeros((1, *shape)))["params"]

    def logits_and_labels(params: Params, batch: Batch) -> tuple[Array, Array]:
        x, y = _unpad(batch, shape)
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


def _unpad(batch: Batch, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The checked `x` [B, *shape] and `y` [B] with zeros in the masked rows."""
    x, y = batch["x"], batch["y"]
    if x.shape[1:] != shape:
        raise ValueError(f"batch['x'] must have shape (B, *{shape}), got {x.shape}.")
    if y.shape != x.shape[:1]:
        raise ValueError(
            f"batch['y'] must hold one label per example, shape {x.shape[:1]}, "
            f"got shape {y.shape}."
        )
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise TypeError(f"batch['y'] must be integer, got {y.dtype}.")
    if "example_mask" not in batch:
        return x, y
    mask = batch["example_mask"].astype(bool)
    by_row = mask.reshape((-1,) + (1,) * len(shape))
    return jnp.where(by_row, x, 0), jnp.where(mask, y, 0)


def _cross_entropy(logits: Array, y: Array) -> Array:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)
