"""A run directory: what ran, what it measured, and where to go on after a kill.

::

  config.json      everything that decides the numbers
  versions.json    python, jax and package versions, devices; one entry per change
  metrics.csv      one row per round and seed
  evaluations.csv  one row per evaluated round and seed
  excluded.csv     one row per client and round whose update was not finite
  client_metrics.npz  the latest evaluation per client, [S, N] each
  checkpoints/     the algorithm's state (orbax)

Files are replaced atomically or appended to before the checkpoint that covers them, so
a kill at any moment leaves a directory that can be resumed.
"""

import contextlib
import csv
import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from fedjax_core.data.packed import FederatedData
from fedjax_core.types import PyTree


def to_json(value: Any) -> Any:
    """Plain JSON values for configs: dataclasses by field, arrays as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
        return {"type": type(value).__qualname__, **fields}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return np.asarray(value).tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # A function has no value to record; its name at least tells which one it was.
    return getattr(value, "__qualname__", type(value).__qualname__)


def versions() -> dict[str, str]:
    """What a run's numbers may depend on besides its config."""
    packages = ("fedjax_core", "jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        **{name: importlib.metadata.version(name) for name in packages},
    }


def fingerprint(data: FederatedData) -> dict[str, Any]:
    """Sizes, layout and a sample of the values, to notice other data when resuming."""
    train = data.train
    crc = 0
    for split in data.splits.values():
        crc = zlib.crc32(split.offsets.tobytes(), crc)
        for name, array in split.examples.items():
            layout = f"{name} {array.dtype} {array.shape}"
            crc = zlib.crc32(layout.encode(), crc)
            stride = max(1, len(array) // 5000)
            for part in (array[:1000], array[::stride], array[-1000:]):
                crc = zlib.crc32(np.ascontiguousarray(part).tobytes(), crc)
    for name, array in data.public.items():
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).tobytes(), crc)
    return {
        "clients": train.num_clients,
        "examples": train.num_examples,
        "checksum": f"{crc:08x}",
    }


class RunDirError(ValueError):
    """A run directory can't be used for this run."""


class RunDir:
    """Opens or creates a run directory.

    Args:
      path: the directory.
      config: what decides the numbers, see `to_json`. An entry named "rounds" may
        differ from one run to the next.
      resume: continue what is there; without it the directory must be new or empty.

    Raises:
      RunDirError: the directory holds something and `resume` is False, it was written
        with another config (the message names the first difference), it is no run
        directory, or another process is running in it.
    """

    def __init__(self, path: str | os.PathLike, config: dict[str, Any], resume: bool):
        self.path = Path(path).absolute()
        self._writes = jax.process_index() == 0
        config = json.loads(json.dumps(to_json(config)))
        self._check(config, resume)
        if jax.process_count() > 1:  # everyone has looked before someone writes
            multihost_utils.sync_global_devices("run_dir")
        with contextlib.ExitStack() as undo:
            if self._writes:
                self.path.mkdir(parents=True, exist_ok=True)
                undo.enter_context(_locked(self.path / ".lock"))
                text = json.dumps(config, indent=2) + "\n"
                _replace(self.path / "config.json", text)
                self._note_versions()
            self._checkpoints = ocp.CheckpointManager(
                self.path / "checkpoints",
                options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True),
            )
            undo.callback(self._checkpoints.close)
            self._close = undo.pop_all().close

    def _check(self, config: dict[str, Any], resume: bool) -> None:
        """Raises RunDirError unless what is there is nothing, or this run's."""
        ours = (".lock", "config.json.tmp")  # left by a kill before anything else
        names = [p.name for p in self.path.iterdir()] if self.path.exists() else []
        if not [name for name in names if name not in ours]:
            return
        if "config.json" not in names:
            raise RunDirError(
                f"{self.path} is not empty and no run directory, since it has no "
                f"config.json; name a new directory."
            )
        if not resume:
            raise RunDirError(
                f"{self.path} is not empty; pass resume=True to continue it, or name a "
                f"new directory."
            )
        try:
            old = json.loads((self.path / "config.json").read_text())
        except ValueError as error:
            raise RunDirError(f"{self.path}/config.json is not JSON: {error}") from None
        _check_same(self.path, old, config)

    def _note_versions(self) -> None:
        """Adds today's versions to versions.json where they differ from the last."""
        path, now = self.path / "versions.json", versions()
        noted = json.loads(path.read_text()) if path.exists() else []
        if not noted or noted[-1] != now:
            _replace(path, json.dumps([*noted, now], indent=2) + "\n")

    @property
    def round(self) -> int:
        """Rounds that the latest checkpoint covers; 0 without one."""
        return self._checkpoints.latest_step() or 0

    def restore(self, like: PyTree) -> PyTree:
        """The latest checkpoint, as arrays like those of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            return self._checkpoints.restore(
                self.round, args=ocp.args.StandardRestore(abstract)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirError(
                f"the checkpoint in {self.path} holds the state of another model, "
                f"algorithm or client_store: {str(error).splitlines()[0]}"
            ) from error

    def save(self, round: int, tree: PyTree) -> None:
        """Writes a checkpoint after `round` rounds and waits until it is complete."""
        self._checkpoints.save(round, args=ocp.args.StandardSave(tree))
        self._checkpoints.wait_until_finished()

    def append(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Adds rows, all with the same columns and with a "round", to a table."""
        if self._writes and rows:
            path = self.path / f"{table}.csv"
            if not path.exists():
                _replace(path, _csv_text([], rows[0]))
            _append(path, _csv_text(rows))

    def rewind(self, table: str) -> list[dict[str, str]]:
        """Drops what the latest checkpoint does not cover and returns the rest."""
        path = self.path / f"{table}.csv"
        if not path.exists():
            return []
        reader = csv.DictReader(io.StringIO(path.read_bytes().decode(), newline=""))
        # A torn last line belongs to a round after the checkpoint, but of its number
        # the first digits may be all that is left: then it lacks values.
        rows = [
            row
            for row in reader
            if None not in row.values() and _covered(row["round"], self.round)
        ]
        if self._writes:
            _replace(path, _csv_text(rows, reader.fieldnames))
        return rows

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Replaces ``name.npz``."""
        if self._writes and arrays:
            out = io.BytesIO()
            np.savez(out, **arrays)  # type: ignore[arg-type]
            _replace(self.path / f"{name}.npz", out.getvalue())

    def read_arrays(self, name: str) -> dict[str, np.ndarray]:
        """What `write_arrays` wrote last, or nothing."""
        path = self.path / f"{name}.npz"
        if not path.exists():
            return {}
        with np.load(path) as arrays:
            return dict(arrays)

    def close(self) -> None:
        """Releases the checkpoint manager and the lock."""
        self._close()


def _locked(path: Path) -> Any:
    """An open file whose lock ends with it, or with the process however it dies."""
    file = open(path, "w")  # noqa: SIM115  # stays open as long as the run
    try:
        import fcntl
    except ImportError:  # Windows has no flock; there the user must take care
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunDirError(f"{path.parent} is in use by another process.") from None
    return file


def _check_same(path: Any, old: Any, new: Any, where: str = "") -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            if name != "rounds":
                inside = f"{where}.{name}".lstrip(".")
                _check_same(path, old.get(name), new.get(name), inside)
    elif old != new:
        raise RunDirError(
            f"{path} was written with {where} = {old!r}, got {new!r}; resume with the "
            f"same settings or name a new directory."
        )


def _covered(text: str | None, last: int) -> bool:
    return bool(text) and text.isdigit() and int(text) <= last


def _csv_text(rows: list[dict[str, Any]], header: Iterable[str] | None = None) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(header or rows[0]), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _replace(path: Path, content: str | bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    _write(temporary, "wb", content)
    os.replace(temporary, path)


def _append(path: Path, text: str) -> None:
    _write(path, "ab", text)


def _write(path: Path, mode: str, content: str | bytes) -> None:
    with open(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
