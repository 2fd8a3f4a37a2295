r"""STC: sparse ternary updates in both directions, with residuals on both sides.

In every round the clients of a cohort of m take a local step from the server's model,
and what they and the server send is compressed, its error kept for the next time:

.. math::

  v_i = R_i + \delta_i, \quad \hat v_i = \mathrm{STC}(v_i), \quad
  R_i \leftarrow v_i - \hat v_i,

.. math::

  V = R + \frac1m \sum_i \hat v_i, \quad \hat V = \mathrm{STC}(V), \quad
  R \leftarrow V - \hat V, \quad w \leftarrow w + \hat V .

Clients that did not take part for a while download the messages that they missed.
Other compressors make other methods: `sbc` up and `identity` down is sparse binary
compression, `identity` both ways distributed SGD; with local steps both are delayed.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, Algorithms 4 and 7.
  Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID
  Data", IEEE TNNLS 31, 2020.
"""

import dataclasses
import functools

import optax

from fedjax_core.algorithms import fedavg
from fedjax_core.compress.caching import every_message, with_cache
from fedjax_core.compress.sparsifiers import stc
from fedjax_core.local import LocalConfig, local_sgd
from fedjax_core.metrics import Bits
from fedjax_core.parts import check_parts
from fedjax_core.transform import Transform
from fedjax_core.types import (
    Algorithm,
    Fraction,
    LocalWork,
    LossFn,
    PositiveInt,
    trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of STC, with those of `LocalConfig`.

    Attributes:
      momentum: of the clients' SGD, in [0, 1), or None.
      persist_momentum: a client's velocity goes on where its last round ended. In
        rounds of one step there is no momentum otherwise.
      sparsity_up: a client sends one coordinate in so many, :math:`1 / p`.
      sparsity_down: and so does the server.
      tau_max: :math:`\tau_\max`, messages that the server keeps for clients to catch
        up; a client that missed more downloads the model.
    """

    momentum: Fraction | None = None
    persist_momentum: bool = True
    sparsity_up: PositiveInt = 400
    sparsity_down: PositiveInt = 400
    tau_max: PositiveInt = 100
    work: LocalWork = LocalWork(steps=1)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    transform: Transform | None = None,
    downlink: Transform | None = None,
) -> Algorithm:
    """Builds STC for the given loss.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      transform: of what clients send, instead of `stc`.
      downlink: of what the server sends, instead of `stc`.
    """
    check_parts(Config, config, loss_fn, transform=transform, downlink=downlink)
    algorithm = fedavg.make(
        fedavg.Config(client_lr=config.client_lr, work=config.work, weights="uniform"),
        loss_fn,
        transform=transform or stc(1 / config.sparsity_up),
        downlink=_recorded(downlink or stc(1 / config.sparsity_down)),
        **client_parts(config.client_lr, config.momentum, config.persist_momentum),
    )
    cached = with_cache(
        algorithm, config.tau_max, lambda state: state.downlink[1], every_message
    )
    parts = {k: cached.parts[k] for k in ("transform", "downlink")}
    return dataclasses.replace(cached, name="stc", config=config, parts=parts)


def client_parts(client_lr: float, momentum: float | None, persist: bool) -> dict:
    """The clients' side of `fedavg.make`: SGD whose velocity may outlive a round."""
    optimizer = optax.sgd(client_lr, momentum)
    parts = {"client_optimizer": optimizer}
    if momentum is None or not persist:
        return parts
    return parts | {
        "program": functools.partial(local_sgd, keep_optimizer=True),
        "keep": lambda params: optimizer.init(trained(params)),
    }


def _recorded(transform: Transform) -> Transform:
    """The transform, whose state is a pair with the bits of its last message."""

    def init(update):
        return transform.init(update), Bits.of(0)

    def apply(message, state, key):
        message, kept = transform.apply(message, state[0], key)
        return message, (kept, message.bits)

    return transform._replace(init=init, apply=apply)
