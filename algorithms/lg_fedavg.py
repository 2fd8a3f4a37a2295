r"""LG-FedAvg: personal representations under a shared head.

A client's model is :math:`(\ell_i, \theta)`: a representation of its own and the global
part, usually the last layers. Clients of the cohort S train both together and send the
global part alone:

.. math::

  (\ell_i, \theta_i) \leftarrow \mathrm{SGD}(f_i; (\ell_i, \theta_t)), \qquad
  \theta_{t+1} = \frac{\sum_{i \in S} n_i \theta_i}{\sum_{i \in S} n_i} .

It is FedPer with the roles of the layers exchanged, and named by what is shared. The
paper starts from a model that FedAvg has trained (``simulate(params=...)``), and its
ensemble of all representations for unknown clients is not here.

References:
  Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
  Representations", arXiv 2001.01523, 2020, Algorithm 1.
"""

import dataclasses
from typing import Unpack

from fedjax_core.local import LocalConfig
from fedjax_core.parts import check_parts
from fedjax_core.personal import Parts, partial_averaging, split
from fedjax_core.types import Algorithm, LossFn, Names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Hyper-parameters of LG-FedAvg, with those of `LocalConfig`.

    Attributes:
      shared: names of what is shared, see `fedjax_core.personal.split`: the last layer
        of a network of three, ("Dense_2",). All else is personal.
    """

    shared: Names


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds LG-FedAvg; its state and `parts` are `fedjax_core.personal`'s.

    Running statistics of personal layers are personal.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      **parts: see there; `transform` is of what is shared, `reduce` instead of
        the mean by examples.
    """
    check_parts(Config, config, loss_fn, **parts)
    return partial_averaging(
        "lg_fedavg",
        config,
        loss_fn,
        lambda params: split(params, config.shared)[::-1],
        weights="examples",
        **parts,
    )
