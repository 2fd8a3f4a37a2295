r"""APFL: a personal model that is mixed with the global one.

Clients of the cohort S train the global model as FedAvg does, and on the same batches
their own part :math:`v_i` of the mixture :math:`m_i = \alpha_i v_i + (1 - \alpha_i)
w_i`, both from where they stood before the step:

.. math::

  w_i \leftarrow w_i - \eta \nabla f_i(w_i), \qquad
  v_i \leftarrow v_i - \eta \alpha_i \nabla f_i(m_i), \qquad
  w_{t+1} = \frac{1}{|S|} \sum_{i \in S} w_i .

Adaptive weights move in the first step of a client's round, and are clipped to [0, 1]:

.. math::

  \alpha_i \leftarrow \alpha_i - \eta \langle v_i - w_i, \nabla f_i(m_i) \rangle .

Since :math:`v_i` starts where the server does they stay in the run's first round. A
client uses its part mixed with the server's model: with :math:`\alpha = 0` that is
FedAvg's, with 1 trained on local data alone.

References:
  Deng et al., "Adaptive Personalized Federated Learning", arXiv 2003.13461, 2020,
  Algorithm 1.
"""

import dataclasses
from typing import Unpack

import jax.numpy as jnp
import optax

from fedjax_core.local import LocalConfig, init_bytes, local_sgd, sgd_step
from fedjax_core.parts import check_parts
from fedjax_core.personal import Parts, averaging, mix, with_own_model
from fedjax_core.types import Algorithm, LossFn, Params, Share, trained, with_trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of APFL, with those of `LocalConfig`.

    Attributes:
      client_lr: :math:`\eta`, step size of all that clients train.
      work: local work per client and round, of each of the two models.
      alpha: :math:`\alpha`, weight of the personal part in [0, 1], at the start.
      adaptive: whether every client learns a weight of its own.
    """

    alpha: Share = 0.5
    adaptive: bool = False


def _mixture(config: Config, own: Params, w: Params) -> Params:
    """The personal model, with the running statistics of `own`, a client's row."""
    row = trained(own)
    alpha = row["alpha"] if config.adaptive else config.alpha
    return with_trained(own, mix(trained(w), row["v"], alpha))


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds APFL; its state and `parts` are `fedjax_core.personal`'s.

    Metrics gain "personal_train_loss", of the mixture. Its statistics are the row's.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      **parts: see there; `client_optimizer` is of both models, and
        ``config.client_lr`` remains the rate of adaptive weights.
    """
    check_parts(Config, config, loss_fn, **parts)
    sgd = optax.sgd(config.client_lr)
    optimizer = own_optimizer = parts.get("client_optimizer") or sgd
    if config.adaptive:
        own_optimizer = optax.multi_transform(
            {"v": optimizer, "alpha": sgd}, {"v": "v", "alpha": "alpha"}
        )

    def keep(params):
        own = {"v": trained(params)}
        if config.adaptive:
            own["alpha"] = jnp.asarray(config.alpha, float)
        return with_trained(params, own)

    def own_step(_, model, own, batch, turn):
        scale = {"v": 1, "alpha": turn.step == 0} if config.adaptive else None

        def loss(own, batch, key):
            return loss_fn(_mixture(config, own, model), batch, key)

        own = sgd_step(
            loss, own_optimizer, own, batch, turn.key, scale=scale, round=turn.round
        )
        if config.adaptive:
            new = dict(trained(own.params))
            new["alpha"] = jnp.clip(new["alpha"], 0, 1)
            own = own._replace(params=with_trained(own.params, new))
        return own

    return averaging(
        "apfl",
        config,
        with_own_model(local_sgd(loss_fn, optimizer), own_optimizer, own_step),
        keep=keep,
        own_model=lambda params, own: _mixture(config, own, params),
        # The personal part before and after, the mixture and its gradient.
        client_bytes=init_bytes(optimizer, models=4),
        **parts,
    )
