"""What the command line tells about this machine and about data sets."""

import ast
import importlib
import importlib.metadata
import importlib.resources
import inspect
import os
import platform
import time
from pathlib import Path
from types import ModuleType

import numpy as np
from rich.console import Console
from rich.table import Table

from fedjax_core import FederatedData, LocalWork, models, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.datasets import digits, partition, plots

_DEPENDENCIES = ("jax", "jaxlib", "numpy", "scipy", "optax", "flax", "orbax-checkpoint")
_SPEED_SECONDS = 5.0


def doctor() -> None:
    """Prints devices, versions, memory, and what a small round takes here."""
    import jax

    console = Console()
    version = importlib.metadata.version
    rows = {
        "fedjax_core": version("fedjax_core"),
        "python": platform.python_version(),
        **{name: version(name) for name in _DEPENDENCIES},
        "backend": jax.default_backend(),
        "devices": ", ".join(str(device) for device in jax.devices()),
        "cores": str(os.cpu_count()),
        "memory": _memory(),
    }
    for name, value in rows.items():
        console.print(f"{name:<17} {value}", highlight=False)
    data = partition.iid(digits.load(), num_clients=100)
    model = models.mlp(64, 10, hidden=(100,))
    algorithm = fedavg.make(fedavg.Config(work=LocalWork(batch_size=5)), model.loss)
    started = time.perf_counter()
    result = simulate(
        algorithm,
        data,
        model,
        rounds=100_000,
        cohort_size=20,
        eval_every=100_000,
        eval_splits=(),
        progress=False,
        callbacks=[lambda _: time.perf_counter() - started > _SPEED_SECONDS],
    )
    console.print(
        f"{'speed':<17} {result.rounds_per_second:.0f} rounds a second of 20 clients, "
        f"3 steps on 7,510 parameters; compiled in {result.compile_seconds:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def _memory() -> str:
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return f"{stats['bytes_limit'] / 2**30:.1f} GiB a device"
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB" if pages else "?"


def data_sets() -> dict[str, str]:
    """Names of the data sets and what they are, from their docstrings."""
    folder = importlib.resources.files("fedjax_core.datasets")
    found = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".py"):
            doc = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
            if "\nLicence:" in doc:
                found[file.name[:-3]] = doc
    return found


def list_data() -> None:
    """Prints every data set: what it is, who its clients are, if it needs files."""
    columns = ("data set", "what it is", "clients", "files")
    table = Table(*columns, box=None, pad_edge=False)
    for name, doc in data_sets().items():
        paragraphs = {p.split(":")[0]: p.partition(":")[2] for p in doc.split("\n\n")}
        clients = paragraphs.get("Client key", paragraphs.get("Clients", "see docs"))
        files = "needed" if _reads_files(name) else "none"
        clients = " ".join(clients.split()).split(".")[0].split(";")[0]
        table.add_row(name, " ".join(doc.split("\n\n")[0].split()), clients, files)
    console = Console()
    console.print(table)
    console.print("\n'fedjax-core data NAME --path FILES' reads one and shows it.")


def show_data(name: str, path: Path | None, clients: int, alpha: float, out: Path):
    """Prints statistics of a data set and draws who holds what.

    Args:
      name: of a data set that `load` reads.
      path: where its files are.
      clients: among how many one without clients of its own is split,
      alpha: by a Dirichlet distribution of this concentration.
      out: the picture.

    Raises:
      ValueError: it has no `load`, needs a path, or has none.
    """
    load = getattr(_module(name), "load", None)
    arguments = inspect.signature(load).parameters if load else {}
    if "path" in arguments and path is None:
        raise ValueError(f"{name} is read from files: say where with --path.")
    if "path" not in arguments and path is not None:
        raise ValueError(f"{name} needs no files, got --path {path}.")
    required = [a for a, p in arguments.items() if p.default is p.empty and a != "path"]
    if load is None or required:
        raise ValueError(
            f"{name} is read or drawn with arguments of its own, see "
            f"docs/datasets/{name}.md."
        )
    data = load(path) if path else load()
    console = Console()
    if not isinstance(data, FederatedData):
        console.print(f"no clients of its own: Dirichlet({alpha}) over {clients}")
        data = partition.dirichlet(data, num_clients=clients, alpha=alpha)
    console.print(data)
    labelled = data.train.examples.get("y", np.zeros(1)).dtype.kind in "iub"
    (plots.label_counts if labelled else plots.sizes)(data, path=out)
    console.print(f"picture: {out}")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"fedjax_core.datasets.{name}")


def _reads_files(name: str) -> bool:
    """Whether a public function of its own takes a path or a folder."""
    module = _module(name)
    return any(
        {"path", "folder"} & set(inspect.signature(function).parameters)
        for own, function in inspect.getmembers(module, inspect.isfunction)
        if own[0] != "_" and function.__module__ == module.__name__
    )
