"""Several processes, on one host or many: how they join, agree and end.

JAX's runtime (`jax.distributed`) connects them. Each runs the same program on the same
data and all take part in every round; process 0 alone writes. With one process all of
this does nothing.
"""

import collections
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from fedjax_core.devices import Spec, client_mesh, ship, use_host_devices
from fedjax_core.record import difference
from fedjax_core.types import PyTree

_JOIN_SECONDS = 300
_LAST_WORDS = 2  # seconds in which others say themselves why they end


class ProcessesError(RuntimeError):
    """The processes of a run don't find or don't fit each other."""


def join(
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    devices: int | None = None,
) -> None:
    """Joins the other processes of a run; call it before jax is first used.

    What is not given JAX takes from the environment: that of Slurm, Open MPI,
    Kubernetes or a TPU pod. From then on processes other than the first write nothing
    to stdout and log errors alone.

    Args:
      coordinator: "host:port" of process 0, where it listens.
      process_id: which process this is, from 0.
      num_processes: of the run.
      devices: into how many the CPU of each process is split, see `use_host_devices`.

    Raises:
      ProcessesError: an argument is wrong or missing, not all processes came within
        five minutes, or they differ in the number of processes or devices.
    """
    _check(coordinator, process_id, num_processes)
    if hasattr(jax.config, preemption := "jax_enable_preemption_service"):
        # It would catch SIGTERM, and nothing here asks it whether that came.
        jax.config.update(preemption, False)
    # On a thread, or Ctrl-C would not be heard, and JAX aborts when its time is up.
    joined = ThreadPoolExecutor(1).submit(
        jax.distributed.initialize,
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=2 * _JOIN_SECONDS,
    )
    try:
        joined.result(_JOIN_SECONDS)
    except TimeoutError:
        raise ProcessesError(
            f"not all processes came within {_JOIN_SECONDS} s; start every process_id "
            f"from 0 to num_processes - 1 once, all with the same coordinator, at a "
            f"port that they can reach."
        ) from None
    except ValueError as error:
        raise ProcessesError(
            f"jax found neither Slurm, Open MPI, Kubernetes nor a TPU pod ({error}); "
            f"give coordinator, process_id and num_processes."
        ) from error
    except Exception as error:
        raise ProcessesError(f"the processes can't join: {error}.") from error
    use_host_devices(devices)
    count = collections.Counter(device.process_index for device in jax.devices())
    if num_processes not in (None, len(count)):
        raise ProcessesError(
            f"num_processes must be the same for all, got {num_processes} in process "
            f"{process_id} and {len(count)} in process 0."
        )
    if len(set(count.values())) > 1:
        raise ProcessesError(
            f"devices must be as many in every process, got {dict(count)} by process."
        )
    # Gloo wants all at their first collective within 30 s: here, and not where some
    # may have to load or compile longer than others.
    stdout = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Gloo says that it is connected
    ones = ship(np.ones(jax.device_count()), client_mesh(), Spec("clients"))
    try:
        meet("joined")
        jax.jit(jnp.sum)(ones).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        raise ProcessesError(
            f"the processes have joined but can't compute together, since one ended or "
            f"hosts can't reach each other: {error}"
        ) from error
    if is_first():
        os.dup2(stdout, 1)
    else:
        logging.getLogger("fedjax_core").setLevel(logging.ERROR)


def _check(
    coordinator: str | None, process_id: int | None, num_processes: int | None
) -> None:
    host, _, port = (coordinator or "host:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ProcessesError(f"coordinator must be host:port, got {coordinator!r}.")
    if num_processes is not None and num_processes < 1:
        raise ProcessesError(f"num_processes must be >= 1, got {num_processes}.")
    if process_id is not None and not 0 <= process_id < (num_processes or 2**31):
        raise ProcessesError(
            f"process_id must be in [0, num_processes), got {process_id} of "
            f"{num_processes}."
        )
    if coordinator and process_id == 0:
        try:  # or JAX may crash
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise ProcessesError(
                f"coordinator must be a free port of the host of process 0, got "
                f"{coordinator!r}: {error.strerror}."
            ) from None


def run_together(work: Callable[[], int], **where: Any) -> int:
    """Joins the other processes and returns the exit status of `work`.

    A process that fails ends all of them: Python's own end would wait for the others,
    who may wait for this one. Arguments are those of `join`.
    """
    last_words = 0
    try:
        join(**where)
        last_words = _LAST_WORDS if is_first() else 0
        status = work()
    except ProcessesError as error:
        print(f"fedjax-core: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    except SystemExit as stop:
        print(stop.code, file=sys.stderr)
        status = 1
    except BaseException:
        traceback.print_exc()
        print(
            "fedjax-core: this process ends, and so all do. If its error is about a "
            "connection, another one ended first and says why.",
            file=sys.stderr,
        )
        status = 1
    if status:
        time.sleep(last_words)  # where the first one ends, JAX ends the others at once
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def is_first() -> bool:
    """Whether this process writes."""
    return jax.process_index() == 0


def meet(where: str) -> None:
    """Waits for the other processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def least(value: float) -> float:
    """The least of the values that processes give, as float32 if there are several."""
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.process_allgather(np.float32(value)).min())


def first_says(answer: bool) -> bool:
    """The answer of process 0."""
    return bool(multihost_utils.broadcast_one_to_all(np.int32(answer)))


def check_same(values: Mapping[str, Any]) -> None:
    """Raises ProcessesError everywhere unless all processes give the same JSON."""
    if jax.process_count() == 1:
        return
    text = np.frombuffer(json.dumps(values).encode(), np.uint8)
    longest = multihost_utils.process_allgather(np.int32(len(text))).max()
    text = np.pad(text, (0, longest - len(text)), constant_values=ord(" "))
    gathered = multihost_utils.process_allgather(text)
    first, *others = (json.loads(bytes(each)) for each in gathered)
    for k, other in enumerate(others, 1):
        if found := difference(first, other):
            where, was, now = found
            raise ProcessesError(
                f"process 0 has {where} = {was!r} and process {k} {now!r}; all need "
                f"the same command, data and versions, and one run directory."
            )


def portable(tree: PyTree) -> PyTree:
    """With arrays that this process alone holds as NumPy's, for a checkpoint of all."""
    if jax.process_count() == 1:
        return tree

    def on_host(x: Any) -> Any:
        local = isinstance(x, jax.Array) and x.is_fully_addressable
        return np.asarray(x) if local else x

    return jax.tree.map(on_host, tree)
