"""Devices: host devices asked for early, the mesh of clients, shipping arrays to it."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_core.types import Cohort, PyTree, Queue

Spec = jax.sharding.PartitionSpec


def use_host_devices(count: int | None = None) -> int:
    """Splits the CPU into several devices; call it before jax is first used.

    A loop over clients keeps one core busy, so a CPU run is fastest with as many host
    devices as it has cores. XLA fixes their number when it starts, hence one explicit
    switch: the command line calls it, a notebook's first cell can.

    Args:
      count: devices, by default the cores this process may use.

    Returns:
      The number of devices that jax has now.

    Raises:
      RuntimeError: jax has started already, with another number of devices.
    """
    if count is None:
        affinity = getattr(os, "sched_getaffinity", None)
        count = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.local_device_count() != count:
            raise RuntimeError(
                f"use_host_devices({count}) must be called before jax is first used; "
                f"jax has started with {jax.local_device_count()} device(s)."
            ) from None
    return jax.local_device_count()


def client_mesh(devices: Sequence[Any] | None = None) -> jax.sharding.Mesh | None:
    """A mesh with the one axis ``clients`` over `devices`, or None for a single one.

    By default over every device of every process (`jax.distributed`).
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) == 1:
        return None
    return jax.sharding.Mesh(np.array(devices), ("clients",))


def ship(tree: PyTree, mesh: jax.sharding.Mesh | None, spec: Any = None) -> PyTree:
    """Puts host arrays on the devices of a mesh, or on the default device.

    Args:
      tree: NumPy arrays.
      mesh: where to.
      spec: a `PartitionSpec`, or a pytree of them that is a prefix of `tree`; None
        copies everything to every device.

    Returns:
      The same tree of jax arrays. With several processes every one of them passes the
      same arrays and receives global ones.
    """
    if mesh is None:
        return jax.device_put(tree)
    sharding = jax.tree.map(
        lambda s: jax.sharding.NamedSharding(mesh, s), Spec() if spec is None else spec
    )
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def put(where: jax.sharding.Sharding, x: Any) -> jax.Array:
        return jax.make_array_from_callback(
            np.shape(x), where, lambda index: np.asarray(x)[index]
        )

    return jax.tree.map(put, jax.tree.broadcast(sharding, tree), tree)


def ship_cohort(
    cohort: Cohort, mesh: jax.sharding.Mesh | None, lead: int = 0
) -> Cohort:
    """Puts a planned cohort on the devices, each device's queue on that device.

    `lead` axes stand in front of every array, over rounds and seeds.
    """
    mine: Any = Spec(*[None] * lead, "clients")
    whole = mine if cohort.sharded_examples else Spec()
    spec = dataclasses.replace(
        jax.tree.map(lambda _: Spec(), cohort),
        queue=Queue(mine, mine, mine, mine),
        examples=cohort.examples and dict.fromkeys(cohort.examples, whole),
    )
    return ship(cohort, mesh, spec)
