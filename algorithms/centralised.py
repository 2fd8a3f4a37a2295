"""Centralised training: SGD on all data in one place, the baseline from above.

In the engine this is one client that holds everything: `pool` makes that population,
`same_work` the steps in which a round looks at as many examples as a federated one, and
the optimiser goes on from round to round. Each round draws its examples anew, from all
of them without replacement. Run it with ``cohort_size=1``.
"""

import dataclasses
import functools

import numpy as np
import optax

from fedjax_core import check
from fedjax_core.algorithms import fedavg
from fedjax_core.data.packed import FederatedData, Packed
from fedjax_core.local import LocalConfig, local_sgd
from fedjax_core.parts import check_parts
from fedjax_core.types import Algorithm, LocalWork, LossFn, trained


def pool(data: FederatedData) -> FederatedData:
    """The population as one client, "pooled", that holds every split of it whole."""
    whole = {
        name: Packed(split.examples, np.array([0, split.num_examples]))
        for name, split in data.splits.items()
    }
    return dataclasses.replace(data, **whole, client_ids=("pooled",))


def same_work(data: FederatedData, work: LocalWork, cohort_size: int) -> LocalWork:
    """As many examples in a round as a cohort looks at on average, in whole batches.

    The data are the population before it was pooled, the work is that of a client of
    the federated method, whose cohorts are drawn uniformly.
    """
    check.positive_int(cohort_size=cohort_size)
    sizes, batch = data.train.sizes, work.batch_size
    per_epoch = work.steps_per_epoch(sizes)
    epoch = np.minimum(per_epoch * batch, sizes)
    seen = work.epochs * epoch
    if work.steps is not None:
        epochs, rest = np.divmod(work.steps, np.maximum(per_epoch, 1))
        seen = epochs * epoch + np.minimum(rest * batch, epoch)
    steps = max(1, round(cohort_size * seen.mean() / batch))
    return LocalWork(batch_size=batch, steps=steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Those of `LocalConfig`; `work` is the steps of a round, see `same_work`."""


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """Builds centralised training for the given loss, on data from `pool`.

    Args:
      config: hyper-parameters.
      loss_fn: per-example losses, see `fedjax_core.types.LossFn`.
      client_optimizer: instead of SGD with ``config.client_lr``.

    Raises:
      ValueError: when the state is made, for more than one client.
    """
    check_parts(Config, config, loss_fn, client_optimizer=client_optimizer)
    optimizer = client_optimizer or optax.sgd(config.client_lr)
    algorithm = fedavg.make(
        fedavg.Config(client_lr=config.client_lr, work=config.work),
        loss_fn,
        client_optimizer=client_optimizer,
        program=functools.partial(local_sgd, keep_optimizer=True),
        keep=lambda params: optimizer.init(trained(params)),
    )

    def init(params, num_clients):
        if num_clients != 1:
            raise ValueError(
                f"centralised training needs data of one client, as pool(data) makes "
                f"them, and its state on the device, got {num_clients} clients."
            )
        return algorithm.init(params, num_clients)

    parts = {"client_optimizer": algorithm.parts["client_optimizer"]}
    return dataclasses.replace(
        algorithm, name="centralised", config=config, init=init, parts=parts
    )
