"""Several models as one say the mean of what they say."""

from typing import Any

import jax
import numpy as np
import pytest

from fedjax_core import models
from fedjax_core.prototypes import as_one

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def test_their_mean_logits_are_measured_and_each_alone():
    two = [models.mlp(4, 3, hidden=(2,)), models.logistic_regression(4, 3)]
    whole = as_one(two)
    params = whole.init(KEY)
    batch: Any = {
        "x": RNG.normal(size=(6, 4)).astype(np.float32),
        "y": np.arange(6) % 3,
    }
    got = whole.metrics(params, batch)
    log_p = []
    for i, (model, own) in enumerate(zip(two, params, strict=True)):
        alone = model.metrics(own, batch)
        for name in ("accuracy", "loss"):
            np.testing.assert_allclose(got[f"{name}_{i}"], alone[name], rtol=1e-5)
        losses = [
            model.metrics(own, batch | {"y": np.full(6, k)})["loss"] for k in range(3)
        ]
        log_p.append(-np.stack(losses, 1))
    z = np.mean(log_p, 0)
    expected = np.log(np.exp(z).sum(1)) - z[np.arange(6), batch["y"]]
    np.testing.assert_allclose(got["loss"], expected, rtol=1e-5)
    np.testing.assert_array_equal(got["accuracy"], z.argmax(1) == batch["y"])
    with pytest.raises(TypeError, match="have no loss of their own"):
        whole.loss(params, batch, KEY)
