r"""Federated distillation by labels: clients share the mean logits of every class.

Without public data (Jeong et al.): client i sends the mean of its model's logits over
examples of each label k that it holds, and the server the mean over clients,

.. math::

  F^i_k = \frac{1}{|D^i_k|} \sum_{x \in D^i_k} f_{\theta^i}(x), \qquad
  F_k = \frac{1}{|S_k|} \sum_{i \in S_k} F^i_k,

which in the next round regularise local training, of models that clients keep:

.. math::

  \ell(x, y) + \gamma H(\mathrm{softmax} F_y, \mathrm{softmax} f_\theta(x)) .

Logits are taken as examples pass in training, up to a constant of each, and weigh by
the steps that saw them. A label that no client of the cohort holds keeps its logits.

References:
  Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated
  Distillation and Augmentation under Non-IID Private Data", arXiv 1811.11479, 2018,
  Algorithm 1, with the mean over all clients.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import distillation
from fedjax_core.arrays import num_bytes, repeat_rows
from fedjax_core.distillation import LogitsFn, ensemble, logits_of_loss, soft_loss
from fedjax_core.local import LocalConfig, init_bytes, local_sgd
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bytes, Mean
from fedjax_core.parts import check_parts
from fedjax_core.reduce import total
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    LossFn,
    NonNegative,
    Params,
    PositiveInt,
    Stateful,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters, with those of `LocalConfig`.

    Attributes:
      num_classes: K.
      gamma: :math:`\gamma`, weight of the regulariser.
    """

    num_classes: PositiveInt = 10
    gamma: NonNegative = 0.1


class State(NamedTuple):
    """What survives a round."""

    params: Params  # at the start
    logits: jax.Array  # [K, K] float32, of each label
    known: jax.Array  # [K, 1] bool, labels that somebody held
    clients: Any  # [N, ...], models


def client_program(
    config: Config,
    loss_fn: LossFn,
    logits: LogitsFn,
    optimizer: optax.GradientTransformation,
) -> ClientProgram:
    """One client, whose row is its model; shared is logits and which are known."""
    num_classes = config.num_classes
    soft = soft_loss(loss_fn, num_classes)

    def regularised(received):
        targets, known = received

        def loss(params, batch, key):
            losses, stats = loss_fn(params, batch, key), ()
            labels = {"labels": jax.nn.softmax(targets)[batch["y"]]}
            pulls = soft(params, {**batch, **labels}, key)
            if isinstance(params, Stateful):
                (losses, stats), (pulls, _) = losses, pulls
            pulls = jnp.where(known[batch["y"], 0], pulls, 0)
            losses = losses + config.gamma * pulls
            return (losses, stats) if isinstance(params, Stateful) else losses

        return loss

    def local(received):
        return local_sgd(regularised(received), optimizer)

    def init(received, own, turn):
        nothing = jnp.zeros((num_classes, num_classes), float)
        return local(received).init(own, (), turn), Mean(nothing, nothing[:, :1])

    def step(received, carry, batch, turn):
        model, seen = carry
        rows = {name: x for name, x in batch.items() if name != "y"}
        said = logits(model.params, rows)
        of = jax.nn.one_hot(batch["y"], num_classes) * batch["example_mask"][:, None]
        said = (of.T @ said.astype(of.dtype), of.sum(0)[:, None])
        model = local(received).step(model.params, model, batch, turn)
        return model, seen + Mean(*said)

    def finish(received, carry, own, turn):
        model, seen = carry
        holds = (seen.count > 0).astype(jnp.float32)
        metrics = {"train_loss": model.train_loss}
        sent = Mean(ensemble(seen).astype(jnp.float32) * holds, holds)
        return sent, model.params, metrics

    return ClientProgram(init, step, finish)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
    logits: LogitsFn | None = None,
) -> Algorithm:
    """Builds the method for a loss that is the cross-entropy of ``batch["y"]``.

    In evaluations "personal" is the clients' models; the server's is the one at the
    start. The arguments are those of `fedjax_core.algorithms.fd.make`.
    """
    check_parts(Config, config, loss_fn, client_optimizer=client_optimizer)
    client_opt = client_optimizer or optax.sgd(config.client_lr)
    logits = logits or logits_of_loss(loss_fn, config.num_classes)
    client = client_program(config, loss_fn, logits, client_opt)

    def init(params, num_clients):
        none = jnp.zeros((config.num_classes, config.num_classes), jnp.float32)
        known = jnp.zeros((config.num_classes, 1), bool)
        return State(params, none, known, repeat_rows(params, num_clients))

    def round(state, cohort, key):
        shared = (state.logits, state.known)
        results = map_clients(
            client, shared, cohort, key, reduce=total(), client_state=state.clients
        )
        held = results.update.count > 0
        new = ensemble(results.update).astype(jnp.float32)
        receive = jnp.where(cohort.round > 0, cohort.client_mask.sum(), 0)
        metrics = {"downlink_bytes": Bytes.of(num_bytes(shared)) * receive}
        state = State(
            state.params,
            jnp.where(held, new, state.logits),
            state.known | held,
            results.client_state,
        )
        return state, results.metrics | metrics

    return Algorithm(
        name="label_logits",
        config=config,
        work=config.work,
        init=init,
        round=round,
        own_models=lambda state, row: {"personal": row},
        # Its row, before and after.
        client_bytes=init_bytes(client_opt, models=2),
        parts={"client_optimizer": "custom" if client_optimizer else "sgd"},
        needs=distillation.needs(config.num_classes),
    )
