r"""signSGD with majority vote: one bit per coordinate, in both directions.

The clients of a cohort send the signs of a gradient of theirs, and the server moves
every coordinate by the same step :math:`\eta`, the way most of them go:

.. math::

  w \leftarrow w - \eta\, \mathrm{sign} \sum_i \mathrm{sign}(g_i) .

With momentum, signs are those of the clients' velocities. A client that did not take
part for a while downloads the sum of the :math:`\tau` votes since, whose
:math:`2 \tau + 1` values take :math:`\log_2 (2 \tau + 1)` bits each.

References:
  Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault
  Tolerant", ICLR 2019, Algorithm 1.
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin 2021, section 4.4.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_core.algorithms import fedavg
from fedjax_core.algorithms.stc import client_parts
from fedjax_core.compress.caching import with_cache
from fedjax_core.compress.quantisers import digit_bits, majority_vote, sign
from fedjax_core.metrics import Bits
from fedjax_core.parts import check_parts
from fedjax_core.types import (
    Algorithm,
    Checked,
    Fraction,
    LocalWork,
    LossFn,
    Positive,
    PositiveInt,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    r"""Hyper-parameters of signSGD.

    Attributes:
      step_size: :math:`\eta`, how far a round moves every coordinate.
      momentum: of the clients, in [0, 1), or None; their velocities outlive a round.
      tau_max: votes that the server keeps for clients to catch up; a client that missed
        more downloads the model.
      work: local work per client and round: one step is the method of the paper, of
        several the sign of the whole way counts.
    """

    step_size: Positive = 2e-4
    momentum: Fraction | None = None
    tau_max: PositiveInt = 100
    work: LocalWork = LocalWork(steps=1)


def make(config: Config, loss_fn: LossFn) -> Algorithm:
    """Builds signSGD for the given loss, see `fedjax_core.types.LossFn`."""
    check_parts(Config, config, loss_fn)
    algorithm = fedavg.make(
        fedavg.Config(client_lr=1.0, server_lr=config.step_size, work=config.work),
        loss_fn,
        transform=sign(),
        reduce=majority_vote(),
        **client_parts(1.0, config.momentum, True),
    )
    cached = with_cache(algorithm, config.tau_max, lambda state: Bits.of(0), votes_bits)
    return dataclasses.replace(cached, name="signsgd", config=config, parts={})


def votes_bits(recent: Bits, size: int) -> Bits:
    """Bits of the sum of the last 1, 2, ... votes, ``[tau_max]``, of `size` each."""
    longest = recent.low.shape[0]
    each = [Bits.of(digit_bits(size, 2 * s + 1)) for s in range(1, longest + 1)]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)
