r"""FedDF: FedAvg whose server distils the cohort's ensemble into the mean of models.

.. math::

  \bar\theta = \frac{\sum_{i \in S} n_i \theta^i}{\sum_{i \in S} n_i}, \qquad
  \theta_{t+1} = \mathrm{distil}\Bigl(\bar\theta, X_{pub},
    \mathrm{softmax}\Bigl(\frac{1}{|S|} \sum_{i \in S} f_{\theta^i}(X_{pub})\Bigr)\Bigr)

Logits are averaged, not probabilities. Clients send models as in FedAvg; what these say
of the public inputs, ``FederatedData.public["x"]``, is summed up as they come.

References:
  Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning",
  NeurIPS 2020, Algorithm 1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import optax

from fedjax_core import distillation, random, server
from fedjax_core.arrays import num_bytes
from fedjax_core.distillation import (
    Examples,
    LogitsFn,
    ensemble,
    predict,
    public_inputs,
    weighted,
    with_outputs,
)
from fedjax_core.local import init_bytes, local_sgd
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bytes
from fedjax_core.reduce import Reduction, mean, total
from fedjax_core.types import Algorithm, Key, LossFn, Params, PyTree, trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(distillation.Config):
    """Hyper-parameters of FedDF, with those of `fedjax_core.distillation.Config`.

    Attributes:
      weights: of the mean of models, "examples" or "uniform".
    """

    weights: Literal["examples", "uniform"] = "examples"


class State(NamedTuple):
    """What survives a round."""

    params: Params


class Teacher(NamedTuple):
    """How an ensemble comes from clients: their mean logits, unless said otherwise.

    Attributes:
      says: ``(params, received) -> outputs`` of a client, whose model is `params` and
        who was sent the server's model and the public inputs.
      reduce: of the outputs, besides the models.
      labels: ``(outputs, update, center, public, key) -> [n, K]``, probabilities, from
        what was reduced of outputs and updates, and the mean model.
    """

    says: Callable[[Params, Any], PyTree]
    reduce: Reduction
    labels: Callable[[Any, PyTree, Params, Examples, Key], jax.Array]


def mean_logits(logits: LogitsFn) -> Teacher:
    """The teacher of FedDF."""
    return Teacher(
        lambda params, received: weighted(predict(logits, params, received[1])),
        total(),
        lambda outputs, *_: jax.nn.softmax(ensemble(outputs)),
    )


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
    distil_optimizer: optax.GradientTransformation | None = None,
    logits: LogitsFn | None = None,
    teacher: Callable[[LogitsFn], Teacher] = mean_logits,
    average: int = 1,
) -> Algorithm:
    """Builds FedDF for a loss that is the cross-entropy of a class.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      client_optimizer: instead of SGD with ``config.client_lr``.
      distil_optimizer: instead of Adam with ``config.distil_lr``.
      logits: of a model with dropout or running statistics, in evaluation:
        `fedjax_core.distillation.logits_of_model`.
      teacher: what is distilled.
      average: as in `fedjax_core.distillation.distil`.
    """
    plugs = distillation.plugs(
        Config, config, loss_fn, client_optimizer, distil_optimizer, logits
    )
    taught = teacher(plugs.logits)
    client = with_outputs(local_sgd(loss_fn, plugs.client), taught.says)
    reduce = {"update": mean(config.weights), "outputs": taught.reduce}

    def init(params, num_clients):
        return State(params)

    def round(state, cohort, key):
        shared = (state.params, public := public_inputs(cohort))
        results = map_clients(client, shared, cohort, key, reduce=reduce)
        update, outputs = results.update["update"], results.update["outputs"]
        center = server.move(state.params, trained(update), update)
        labels = taught.labels(
            outputs, update, center, public, random.stream(key, "teacher")
        )
        params, loss = plugs.distil(
            center, public, labels, random.stream(key, "distil"), average=average
        )
        receive, size = cohort.client_mask.sum(), num_bytes(state.params)
        metrics = {"distil_loss": loss, "downlink_bytes": Bytes.of(size) * receive}
        return State(params), results.metrics | metrics

    return Algorithm(
        name="feddf",
        config=config,
        work=config.work,
        init=init,
        round=round,
        # Outputs are few; a model's squares are another model.
        client_bytes=init_bytes(plugs.client, models=1),
        parts=plugs.names,
        needs=distillation.needs(config.num_classes),
    )
