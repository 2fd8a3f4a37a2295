r"""FedPer: a shared body that the server averages, a personal head that stays.

A client's model is :math:`(\phi, h_i)`. Clients of the cohort S train both together,
from the server's body and their own head, and send the body alone:

.. math::

  (\phi_i, h_i) \leftarrow \mathrm{SGD}(f_i; (\phi_t, h_i)), \qquad
  \phi_{t+1} = \frac{\sum_{i \in S} n_i \phi_i}{\sum_{i \in S} n_i} .

Which layers are personal is a choice, usually the last ones. With none it is FedAvg,
with all of them local training. The server's own model, which is evaluated too, has the
initial head, and so has the model of a client that never took part.

References:
  Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv
  1912.00818, 2019, Algorithms 1 and 2.
"""

import dataclasses
import functools
from typing import Unpack

from fedjax_core.local import LocalConfig
from fedjax_core.parts import check_parts
from fedjax_core.personal import Parts, partial_averaging, split
from fedjax_core.types import Algorithm, LossFn, Names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of FedPer, with those of `LocalConfig`.

    Attributes:
      personal: names of what is personal, see `fedjax_core.personal.split`: the last
        layer of a network of three, ("Dense_2",).
    """

    personal: Names


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds FedPer; its state and `parts` are `fedjax_core.personal`'s.

    Running statistics of personal layers are personal.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      **parts: see there; `transform` is of what is shared, `reduce` instead of
        the mean by examples.
    """
    check_parts(Config, config, loss_fn, **parts)
    return partial_averaging(
        "fedper",
        config,
        loss_fn,
        functools.partial(split, names=config.personal),
        weights="examples",
        **parts,
    )
