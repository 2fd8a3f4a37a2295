"""Chooses how a cohort runs, from the devices at hand and the size of a round."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_core import processes
from fedjax_core.arrays import num_bytes
from fedjax_core.data.packed import Packed
from fedjax_core.devices import client_mesh
from fedjax_core.local import batch_loss
from fedjax_core.models.model import Model
from fedjax_core.plan import num_steps
from fedjax_core.types import (
    Execution,
    LocalWork,
    Params,
    PyTree,
    trained,
    with_trained,
)

# Splitting a round over host devices costs a few tenths of a millisecond.
_WORTH_SPLITTING = 3e8

# Bytes of client state that host devices rather share than each have a copy of.
_WORTH_SHARING = 2**26

# What an H200 computes while the kernels of a local step are launched.
_LAUNCHES = 6e8


def round_operations(
    train: Packed, work: LocalWork, num_parameters: int, cohort_size: float
) -> float:
    """Multiplications and additions of a round: 6 per parameter, example and visit.

    Forward and backward pass of a dense model; the order of magnitude of any other.
    """
    steps = float(num_steps(train.sizes, work).mean()) * cohort_size
    return 6.0 * steps * work.batch_size * num_parameters


def client_memory(model: Model, params: Params, train: Packed, work: LocalWork) -> int:
    """Bytes of device memory of one client in mid-step.

    Its parameters, gradient, update and delta, and twice what the backward pass of a
    batch keeps: traced, not run.
    """
    batch = batch_shapes(train, work.batch_size)

    def backward(params, batch):
        def loss(weights):
            whole, key = with_trained(params, weights), jax.random.key(0)
            return batch_loss(model.loss, whole, batch, key)[0]

        return jax.vjp(loss, trained(params))[1]

    kept = jax.eval_shape(backward, params, batch)
    return 4 * num_bytes(params) + 2 * num_bytes(kept)


def batch_shapes(packed: Packed, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a batch of `packed` as programs and models see it."""
    arrays = {k: (x.shape[1:], x.dtype) for k, x in packed.examples.items()}
    return {
        name: jax.ShapeDtypeStruct(
            (batch_size, *shape), jax.dtypes.canonicalize_dtype(dtype)
        )
        for name, (shape, dtype) in (arrays | {"example_mask": ((), bool)}).items()
    }


def num_parameters(params: Params) -> int:
    """Coordinates of all arrays of a pytree."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def choose_execution(
    model: Model,
    train: Packed,
    work: LocalWork,
    cohort_size: float,
    client_bytes: Callable[[Params], int] = lambda params: 0,
    runs: int = 1,
) -> Execution:
    """The execution that `simulate` uses unless it is given one.

    On CPU every device runs one client at a time, and small rounds stay on one device.
    On an accelerator clients run side by side, at most as many as fit into half of the
    memory that the population leaves free to each of so many `runs` side by side;
    `client_bytes` is what the algorithm adds to a client, see `Algorithm`.
    """
    params = jax.eval_shape(
        lambda: jax.tree.map(jnp.asarray, model.init(jax.random.key(0)))
    )
    mesh, parameters = client_mesh(), num_parameters(params)
    if jax.default_backend() == "cpu":
        operations = round_operations(train, work, parameters, cohort_size)
        small = operations < _WORTH_SPLITTING and jax.process_count() == 1
        return Execution(mesh=None if small else mesh)
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 2**33) - stats.get("bytes_in_use", 0)
    population = sum(x.nbytes for x in train.examples.values())
    need = client_memory(model, params, train, work) + client_bytes(params)
    fit = processes.least(max(free - population, free // 4) / 2 / (need * runs))
    share = max(1, math.ceil(cohort_size / jax.device_count()))
    steps = _typical_cohort(num_steps(train.sizes, work), share)
    operations = 6.0 * work.batch_size * parameters
    block = _cheapest_block(steps, int(max(fit, 1)), operations)
    return Execution(block_size=block, mesh=mesh)


def choose_client_store(state: PyTree, mesh: jax.sharding.Mesh | None) -> str:
    """Where `simulate` keeps the rows of clients unless it is told.

    Devices of the mesh each hold a copy of all rows in `state`, shapes of all seeds. On
    CPU that is memory and time for nothing once there is more than `_WORTH_SHARING`; on
    an accelerator it may not fit.
    """
    rows = num_bytes(getattr(state, "clients", ()))
    if jax.default_backend() != "cpu":
        stats = jax.local_devices()[0].memory_stats() or {}
        limit = processes.least(stats.get("bytes_limit", 2**33))
        return "host" if rows > limit / 2 else "device"
    alone = mesh is None or jax.process_count() > 1
    return "device" if alone or rows <= _WORTH_SHARING else "host"


def _typical_cohort(steps: np.ndarray, size: int) -> np.ndarray:
    """Step counts of `size` clients spread evenly over the population, decreasing."""
    places = (np.arange(size) + 0.5) / size
    return np.quantile(steps, 1 - places, method="nearest")


def _cheapest_block(steps: np.ndarray, most: int, operations: float) -> int:
    """The number of clients side by side, at most `most`, that costs a cohort least.

    Steps ``[n]`` decrease. A block takes as many as its longest client, and a step of L
    clients costs what L clients cost, each so many `operations`, and the launches,
    worth `_LAUNCHES / operations` clients more. Large blocks share the launches, small
    ones wait less for the longest client.
    """
    n = len(steps)
    most = min(most, n)
    # Cuts a cohort into 1, 2, 4, ... nearly equal blocks.
    sizes = {min(most, -(-n // 2**k)) for k in range(n.bit_length() + 1)}
    return min(
        sorted(sizes, reverse=True),
        key=lambda size: steps[::size].sum() * (size + _LAUNCHES / operations),
    )
