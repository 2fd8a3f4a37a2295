"""What the simulator asks of a model: pure functions of parameters and a batch.

A batch is a dict of arrays with a leading example axis, `x` [B, ...], `y` [B, ...] and
`example_mask` [B], bool, whose False rows are padding and may hold anything. A model
answers per example; masking and averaging belong to the caller:

  loss = sum(where(mask, model.loss(params, batch, key), 0)) / max(sum(mask), 1).

Rows don't mix, but for batch statistics, which padding must not reach.
"""

import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedjax_core.types import Batch, Key, LossFn, Metrics, Params


class Ids(NamedTuple):
    """What an array of labels or tokens may hold.

    Attributes:
      num: ids are 0 to num - 1.
      missing: what stands for an id that is not known, or None.
    """

    num: int
    missing: int | None = None


class Model(NamedTuple):
    """A model as pure functions; nothing in it knows about clients.

    Attributes:
      init: key -> params, a pytree of arrays; a `Stateful` where the model keeps
        running statistics.
      loss: (params, batch, key) -> [B], float32 or wider, what training minimises per
        example; of a `Stateful` the pair (losses, new statistics). The key feeds
        dropout and the like; a deterministic model ignores it.
      metrics: (params, batch) -> name -> [B], per-example values for evaluation, to be
        averaged over the examples whose mask is True. A `Mean` of [B] arrays instead
        says of every example what it adds to the numerator and to the denominator of
        that average: the right tokens of a text and its tokens. Other summands with
        `value` and `count` are added up as well.
      ids: array of the batch -> its `Ids`, which data must keep to.
    """

    init: Callable[[Key], Params]
    loss: LossFn
    metrics: Callable[[Params, Batch], Metrics]
    ids: Mapping[str, Ids] = types.MappingProxyType({})
