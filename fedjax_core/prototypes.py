"""Models of several architectures that are evaluated as one, and each alone."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fedjax_core import random
from fedjax_core.distillation import logits_of_model
from fedjax_core.models.model import Model
from fedjax_core.models.tasks import classes
from fedjax_core.types import Batch, Key, Metrics, Params


def as_one(models: Sequence[Model]) -> Model:
    """Classifiers of the same classes as a model whose parameters are a tuple.

    Its metrics are those of the mean of their log-probabilities, as of logits, and with
    a number behind their names those of each: "accuracy", "accuracy_0" and so on. It
    has no loss: who trains them trains one at a time.
    """
    logits = list(map(logits_of_model, models))

    def init(key: Key) -> Params:
        keys = [random.stream(key, f"prototype {p}") for p in range(len(models))]
        return tuple(m.init(k) for m, k in zip(models, keys, strict=True))

    def loss(params: Params, batch: Batch, key: Key) -> Any:
        raise TypeError("models of several architectures have no loss of their own.")

    def metrics(params: Params, batch: Batch) -> Metrics:
        said = [f(p, batch) for f, p in zip(logits, params, strict=True)]
        measure = classes().metrics
        assert measure is not None
        values = measure(jnp.stack(said).mean(0), batch)
        for i, one in enumerate(said):
            alone = measure(one, batch)
            values |= {f"{name}_{i}": alone[name] for name in alone}
        return values

    return Model(init, loss, metrics, models[0].ids)
