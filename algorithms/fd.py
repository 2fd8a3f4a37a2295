r"""Federated distillation: clients send what their models say of a public data set.

Clients of the cohort S train :math:`\theta_t` on their own data to :math:`\theta^i`,
and send soft labels of the n public inputs. A model learns their mean,

.. math::

  Y_t = \frac{1}{|S|} \sum_{i \in S} \mathrm{softmax} f_{\theta^i}(X_{pub}), \qquad
  \theta_{t+1} = \mathrm{distil}(\theta, X_{pub}, Y_t) .

Where the server distils, it sends :math:`\theta_{t+1}`. Where clients do, it sends
:math:`Y_t`; they share the seed of all that is random and end with the same parameters
to the bit, so they are made once. Those who follow every round may start from their
last ones, others have to start from a common :math:`\theta_0`.

The public inputs are ``FederatedData.public["x"]``; sending them is not counted. One
round of long local training is one-shot distillation (Guha et al.).

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, Algorithm 3 and section 2.1; Guha et al., "One-Shot Federated
  Learning", arXiv 1902.11175, 2019.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, Unpack

import jax.numpy as jnp

from fedjax_core import distillation, random
from fedjax_core.arrays import num_bytes
from fedjax_core.distillation import (
    Parts,
    informative,
    labelling_clients,
    predict,
    public_inputs,
)
from fedjax_core.local import init_bytes
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bytes
from fedjax_core.types import Algorithm, LossFn, Params, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(distillation.Config):
    r"""Hyper-parameters, with those of `fedjax_core.distillation.Config`.

    Attributes:
      num_public: n, inputs that are labelled in a round, chosen by `select`.
      distil_on: "clients" or the "server".
      start: distillation starts from its "previous" result, which clients have only
        where all take part in every round, or from the "initial" model.
      select: "first" takes the first n public inputs, the others those of
        `fedjax_core.distillation.informative`, anew in every round, by the last model.
      charge_first_download: count labels as received in the first round too, when there
        are none and clients start from :math:`\theta_0`.
    """

    num_public: PositiveInt = 1000
    distil_on: Literal["clients", "server"] = "clients"
    start: Literal["previous", "initial"] = "initial"
    select: Literal["first", "random", "entropy", "certainty", "margin"] = "first"
    charge_first_download: bool = False


class State(NamedTuple):
    """What survives a round."""

    params: Params  # what distillation made last
    initial: Any  # theta_0, or () where nobody starts there


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds federated distillation for a loss that is the cross-entropy of a class.

    Its `parts` are `fedjax_core.distillation.Parts`.
    """
    plugs = distillation.plugs(Config, config, loss_fn, **parts)
    client = labelling_clients(loss_fn, plugs.client, plugs.logits)
    n = config.num_public

    def init(params, num_clients):
        return State(params, params if config.start == "initial" else ())

    def round(state, cohort, key):
        public, rows = public_inputs(cohort, n), jnp.arange(n)
        if config.select != "first":
            said = predict(plugs.logits, state.params, public)
            rows = informative(said, n, config.select, random.stream(key, "select"))
        public = {name: x[rows] for name, x in public.items()}
        shared = (state.params, public)
        results = map_clients(client, shared, cohort, key, reduce=plugs.reduce)
        start = state.initial if config.start == "initial" else state.params
        params, loss = plugs.distil(
            start, public, results.update, random.stream(key, "distil")
        )
        size, receive = num_bytes(params), cohort.client_mask.sum()
        if config.distil_on == "clients":
            size = 4 * n * config.num_classes
            if not config.charge_first_download:
                receive = jnp.where(cohort.round > 0, receive, 0)
        metrics = {"distil_loss": loss, "downlink_bytes": Bytes.of(size) * receive}
        return state._replace(params=params), results.metrics | metrics

    return Algorithm(
        name="fd",
        config=config,
        work=config.work,
        init=init,
        round=round,
        client_bytes=lambda params: (
            init_bytes(plugs.client)(params) + 4 * n * config.num_classes
        ),
        parts=plugs.names | {"reduce": plugs.reduce.name},
        needs=distillation.needs(config.num_classes),
    )
