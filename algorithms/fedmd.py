r"""FedMD and its kin: clients keep models of their own and agree on public labels.

Nobody sends a model, so no two need be of one kind or in step. A client of the cohort S
first learns what the cohort before it agreed on, then its own data, and says what it
makes of the public inputs, ``FederatedData.public["x"]``:

.. math::

  \theta^i \leftarrow \mathrm{SGD}(f_i; \mathrm{distil}(\theta^i, X_{pub}, Y_t)), \quad
  Y_{t+1} = \mathrm{softmax}\Bigl(\frac{1}{|S|} \sum_{i \in S}
    f_{\theta^i}(X_{pub})\Bigr) .

===================  ==========================================================
FedMD                as it is, with `pretrain`
Itahara et al.       ``average="probabilities"``: federated distillation without a
                     common seed, so that models drift apart
Cronus               ``average="probabilities", joint=True`` and a robust `reduce`
===================  ==========================================================

Models of several architectures are one pass for each, over ``cohort.only(mask)``, whose
sums of labels add up (`fedjax_core.distillation.weighted`); here all have one.

References:
  Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", arXiv
  1910.03581, 2019, Algorithm 1; Itahara et al., "Distillation-Based Semi-Supervised
  Federated Learning", IEEE TMC 2021; Chang et al., "Cronus: Robust and Heterogeneous
  Collaborative Learning with Black-Box Knowledge Transfer", arXiv 1912.11279, 2019.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_core import distillation, random
from fedjax_core.arrays import num_bytes, repeat_rows
from fedjax_core.distillation import Parts, first_inputs, predict, soft_loss
from fedjax_core.local import init_bytes, local_sgd, loss_and_gradient
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bytes
from fedjax_core.types import Algorithm, ClientProgram, LossFn, Params, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(distillation.Config):
    """Hyper-parameters of FedMD, with those of `fedjax_core.distillation.Config`.

    Attributes:
      num_public: n, the first public inputs, which are labelled.
      average: what clients send, "logits" or "probabilities".
      joint: clients learn public labels beside their own data, a batch of each in every
        step, and not before.
      pretrain: in the first round what is agreed on are the public data's own labels,
        ``FederatedData.public["y"]``; otherwise nothing is.
    """

    num_public: PositiveInt = 1000
    average: Literal["logits", "probabilities"] = "logits"
    joint: bool = False
    pretrain: bool = False


class State(NamedTuple):
    """What survives a round."""

    params: Params  # at the start
    labels: jax.Array  # [n, K] float32, what the last cohort agreed on
    clients: Any  # [N, ...], models


def client_program(
    config: Config, loss_fn: LossFn, plugs: distillation.Plugs
) -> ClientProgram:
    """One client, whose row is its model; shared is the public inputs and labels."""
    local = local_sgd(loss_fn, plugs.client)
    soft = soft_loss(loss_fn, config.num_classes)

    def agreed(turn):
        return (turn.round > 0) | config.pretrain

    def init(received, own, turn):
        public, labels = received
        if config.joint:
            return local.init(own, (), turn)
        key = random.stream(turn.key, "distil")
        params = lax.cond(
            agreed(turn),
            lambda: plugs.distil(own, public, labels, key)[0],
            lambda: own,
        )
        return local.init(params, (), turn)

    def public_gradient(received, params, turn):
        """Of the cross-entropy of a batch of public inputs, 0 without labels."""
        data, size = received[0], config.public_work.batch_size
        key = random.stream(turn.key, "public")
        rows = jax.random.randint(key, (size,), 0, config.num_public)
        batch = {name: x[rows] for name, x in data.items()}
        batch |= {"labels": received[1][rows]}
        batch["example_mask"] = jnp.ones(size, bool) & agreed(turn)
        return loss_and_gradient(soft, params, batch, key)[1]

    def step(received, carry, batch, turn):
        if config.joint:
            beside = public_gradient(received, carry.params, turn)
            carry = carry._replace(correction=beside)
        carry = local.step(carry.params, carry, batch, turn)
        return carry._replace(correction=None)

    def finish(received, carry, own, turn):
        said = predict(plugs.logits, carry.params, received[0])
        if config.average == "probabilities":
            said = jax.nn.softmax(said)
        metrics = {"train_loss": carry.train_loss}
        return said.astype(jnp.float32), carry.params, metrics

    return ClientProgram(init, step, finish)


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds FedMD for a loss that is the cross-entropy of a class.

    In evaluations "personal" is the clients' models; the server's is the one at the
    start. Its `parts` are `fedjax_core.distillation.Parts`.
    """
    plugs = distillation.plugs(Config, config, loss_fn, **parts)
    client = client_program(config, loss_fn, plugs)
    shape = (config.num_public, config.num_classes)

    def init(params, num_clients):
        labels = jnp.zeros(shape, jnp.float32)
        return State(params, labels, repeat_rows(params, num_clients))

    def round(state, cohort, key):
        n, labels = config.num_public, state.labels
        public = first_inputs(cohort, n)
        if config.pretrain:
            own = jax.nn.one_hot(cohort.public["y"][:n], config.num_classes)
            labels = jnp.where(cohort.round == 0, own, labels)
        results = map_clients(
            client,
            (public, labels),
            cohort,
            key,
            reduce=plugs.reduce,
            client_state=state.clients,
        )
        labels = results.update.astype(jnp.float32)
        if config.average == "logits":
            labels = jax.nn.softmax(labels)
        receive = jnp.where(cohort.round > 0, cohort.client_mask.sum(), 0)
        metrics = {"downlink_bytes": Bytes.of(num_bytes(labels)) * receive}
        new = State(state.params, labels, results.client_state)
        return new, results.metrics | metrics

    return Algorithm(
        name="fedmd",
        config=config,
        work=config.work,
        init=init,
        round=round,
        own_models=lambda state, row: {"personal": row},
        # Its row, before and after.
        client_bytes=init_bytes(plugs.client, models=2),
        parts=plugs.names | {"reduce": plugs.reduce.name},
        needs=distillation.needs(config.num_classes),
    )
