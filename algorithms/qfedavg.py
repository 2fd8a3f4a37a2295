r"""q-FedAvg: more weight for clients that the model serves badly.

For :math:`\sum_i F_i^{q+1} / (q + 1)`. Clients of the cohort S tell their loss
:math:`F_i` at the server's parameters :math:`w`, then take local steps from there by
:math:`\Delta_i`. With the estimate :math:`L = 1 / \eta` of a Lipschitz constant,

.. math::

  w \leftarrow w + \frac{\sum_i L F_i^q \Delta_i}{\sum_i h_i}, \qquad
  h_i = q F_i^{q-1} L^2 \lVert \Delta_i \rVert^2 + L F_i^q .

q = 0 is FedAvg, and large q minimises the largest loss. Losses must be >= 0: otherwise
powers of them mean nothing, and the model becomes NaN. A loss below 1e-10 counts as
1e-10, as in the authors' code.

References:
  Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020, Algorithm 2.
  It draws clients in proportion to their examples and counts each once ("uniform").
"""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_core import server
from fedjax_core.arrays import repeat_rows
from fedjax_core.fair.decider import hear
from fedjax_core.local import LocalConfig, check_whole_epochs, init_bytes, local_sgd
from fedjax_core.map import map_clients, two_passes
from fedjax_core.metrics import Mean
from fedjax_core.parts import check_parts
from fedjax_core.reduce import total
from fedjax_core.transform import Transform, flat_norm, identity, with_transform
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    LocalWork,
    LossFn,
    NonNegative,
    Params,
    trained,
)

_LEAST_LOSS = 1e-10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    r"""Hyper-parameters of q-FedAvg, with those of `LocalConfig`.

    Attributes:
      client_lr: :math:`\eta`.
      q: >= 0; the larger, the more equal the losses.
      work: whole epochs.
      weights: "uniform" counts every client of the cohort once, "examples" as often as
        it has examples.
    """

    q: NonNegative = 1.0
    work: Annotated[LocalWork, check_whole_epochs] = LocalWork()
    weights: Literal["examples", "uniform"] = "uniform"


class State(NamedTuple):
    """What survives a round."""

    params: Params
    clients: Any  # [N, ...] state of the transform: residuals, say


def with_norm(program: ClientProgram) -> ClientProgram:
    """The program with the norm of its update among the metrics, "delta_norm"."""

    def finish(*args):
        update, new, metrics = program.finish(*args)
        norm = flat_norm(trained(update))
        return update, new, {**metrics, "delta_norm": Mean(norm, jnp.ones_like(norm))}

    return program._replace(finish=finish)


def make(
    config: Config,
    loss_fn: LossFn,
    *,
    client_optimizer: optax.GradientTransformation | None = None,
    transform: Transform | None = None,
) -> Algorithm:
    """Builds q-FedAvg for the given loss; arguments as in `fedavg.make`."""
    check_parts(
        Config, config, loss_fn, client_optimizer=client_optimizer, transform=transform
    )
    client_opt = client_optimizer or optax.sgd(config.client_lr)
    transform = transform or identity()
    client = with_norm(with_transform(local_sgd(loss_fn, client_opt), transform))

    def init(params, num_clients):
        row = ((), transform.init(trained(params)))
        return State(params, repeat_rows(row, num_clients))

    def round(state, cohort, key):
        before, told = hear(loss_fn, state.params, cohort, key)
        loss = jnp.maximum(told.loss, _LEAST_LOSS)
        # Numerator and denominator relative to the largest loss, whose powers might
        # overflow or vanish: L F^q cancels, and h / (L F^q) = 1 + q L |delta|^2 / F.
        weight = (loss / loss.max()) ** config.q
        if config.weights == "examples":
            weight *= cohort.num_examples
        results = map_clients(
            client,
            state.params,
            cohort.only(before.valid),
            key,
            reduce=total(weight),
            client_state=state.clients,
        )
        norm = jnp.where(results.valid, results.client_metrics["delta_norm"], 0)
        h = weight * (1 + config.q * norm**2 / (config.client_lr * loss))
        h = jnp.where(results.valid, h, 0).sum()
        step = jax.tree.map(
            lambda d: d / jnp.where(h > 0, h, 1).astype(d.dtype),
            trained(results.update),
        )
        params = server.move(state.params, step, results.update)
        return State(params, results.client_state), two_passes(before, results)

    return Algorithm(
        name="qfedavg",
        config=config,
        work=config.work,
        init=init,
        round=round,
        client_bytes=init_bytes(client_opt, transform),
        parts={
            "client_optimizer": "custom" if client_optimizer else "sgd",
            "transform": transform.name,
        },
    )
