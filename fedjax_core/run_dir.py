"""A run directory: what ran, what it measured, and where to go on after a kill.

::

  config.json      everything that decides the numbers
  command.json     what `fedjax-core resume` does again, if the command line made it
  versions.json    python, jax and package versions, devices; one entry per change
  metrics.csv      one row per round and seed
  evaluations.csv  one row per evaluated round and seed
  excluded.csv     one row per client and round whose update was not finite
  client_metrics.npz  the latest evaluation per client, [S, N] each
  checkpoints/     the algorithm's state and what the tables held (orbax)

Files are replaced atomically or appended to before the checkpoint that covers them, so
a kill at any moment leaves a directory that can be resumed. A checkpoint records the
checksums of everything it covers, so nothing that changed since is taken for a result.
"""

import contextlib
import csv
import errno
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import platform
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_core import processes
from fedjax_core.data.packed import FederatedData
from fedjax_core.record import difference, to_json
from fedjax_core.types import PyTree

# Global settings that change what the same program computes.
_SETTINGS = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_enable_x64",
    "jax_default_matmul_precision",
)
_GO_ON = "once that is mended, resume=True goes on from the last checkpoint."
COMMAND = "command.json"  # what made it, see `fedjax_core.command`
_NFS_SECONDS = 60  # after which a network disk shows what others wrote
_COVERED = "covered.json"  # the last file of a checkpoint, which completes it
_WHOLE_BYTES = 2**28  # an eighth of a second to read
_TEXT: Any = {"errors": "surrogatepass"}  # a client's name may be any str
T = TypeVar("T")


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
    """Sizes, layout and values, to notice other data when resuming.

    Of an array of examples with more than 256 MiB a sample of the rows counts.
    """
    crc = 0

    def add(name: str, array: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        nonlocal crc
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        for part in parts:
            raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            crc = zlib.crc32(raw, crc)

    for split in data.splits.values():
        crc = zlib.crc32(split.offsets.tobytes(), crc)
        for name, array in sorted(split.examples.items()):
            parts = [array]
            if array.nbytes > _WHOLE_BYTES:
                stride = max(1, len(array) // 5000)
                parts = [array[:1000], array[::stride], array[-1000:]]
            add(name, array, parts)
    for name, array in sorted(data.public.items()):
        add(name, array, [array])
    return {
        "clients": data.train.num_clients,
        "examples": data.train.num_examples,
        "checksum": f"{crc:08x}",
    }


def checksum(tree: PyTree) -> str:
    """Of structure, dtypes, shapes and all values, to notice other arrays."""
    leaves, form = jax.tree.flatten(tree)
    crc = zlib.crc32(str(form).encode())
    for x in map(np.asarray, leaves):
        crc = zlib.crc32(f"{x.dtype}{x.shape}".encode() + x.tobytes(), crc)
    return f"{crc:08x}"


class RunDirError(ValueError):
    """A run directory can't be used for this run."""


class SavedRun:
    """What a run directory holds up to its latest checkpoint; it may be in use."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path).absolute()
        self._saved = self.path / "checkpoints"

    @property
    def config(self) -> dict[str, Any]:
        """What decided the numbers, as JSON.

        Raises:
          RunDirError: it is no run directory, or damaged.
        """
        path = self.path / "config.json"
        if not path.exists():
            raise RunDirError(
                f"{self.path} is no run directory, since it has no config.json."
            )
        return read_json(path, dict, "put it back from a copy")

    @property
    def round(self) -> int:
        """Rounds that the latest checkpoint covers; 0 without one."""
        return max(self._rounds(), default=0)

    def rows(self, table: str) -> list[dict[str, str]]:
        """The rows of a table that the latest checkpoint covers.

        Raises:
          RunDirError: something that it covers is missing or not what was written.
        """
        text = self._table(table).decode(**_TEXT)
        return list(csv.DictReader(io.StringIO(text, newline="")))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """What ``name.npz`` held at the latest checkpoint."""
        npz = self._held().get(name)
        if npz is None:
            return {}
        with np.load(io.BytesIO(npz)) as arrays:
            return dict(arrays)

    def _held(self) -> dict[str, bytes]:
        """The contents of the files of arrays at the latest checkpoint, by name."""
        return self._whole(
            lambda round: {p.stem: p.read_bytes() for p in self._intact(round, "*.npz")}
        )

    def _rounds(self) -> list[int]:
        """Rounds of the complete checkpoints, the latest last."""
        complete = [p for p in _folders(self._saved) if (p / _COVERED).exists()]
        return sorted(int(path.name) for path in complete)

    def _table(self, name: str) -> bytes:
        path = self.path / f"{name}.csv"
        return self._whole(lambda round: self._read_table(round, path))

    def _whole(self, read: Callable[[int], T]) -> T:
        """What `read` finds at the latest checkpoint, or an error with a remedy."""
        *earlier, latest = self._rounds() or [0]
        try:
            return read(latest)
        except _Damaged as error:
            damage = str(error)
        remedy = "put it back from a copy or name a new directory"
        for round in earlier:
            with contextlib.suppress(_Damaged):
                read(round)
                remedy = (
                    f"remove {self._saved / str(latest)} to go on from round {round}, "
                    f"whose checkpoint is whole"
                )
        raise RunDirError(f"{damage}; {remedy}.")

    def _read_covered(self, round: int) -> dict[str, dict[str, Any]]:
        """What a checkpoint covers: tables, layout of the state, its own files."""
        if not round:
            return {"tables": {}, "files": {}}
        path = self._saved / str(round) / _COVERED
        with _damage(path):
            covered = json.loads(path.read_bytes())
            whole = covered.pop("crc32") == _crc_of_json(covered)
            if not whole or not {"tables", "layout", "files"} <= covered.keys():
                raise ValueError("it is not what was saved")
        return covered

    def _read_table(self, round: int, path: Path) -> bytes:
        size, crc = self._read_covered(round)["tables"].get(path.stem, (0, 0))
        with _damage(path):
            content = path.read_bytes()[:size] if size else b""
        if zlib.crc32(content) != crc:
            what = "lacks rows" if len(content) < size else "has other rows than those"
            raise _Damaged(f"{path} {what} that the checkpoint of round {round} covers")
        return content

    def _intact(self, round: int, pattern: str) -> list[Path]:
        """The files of a checkpoint that match, after a look at their contents."""
        out = []
        for name, digest in self._read_covered(round)["files"].items():
            if Path(name).match(pattern):
                out.append(self._saved / str(round) / name)
                with _damage(out[-1]):
                    if _digest(out[-1]) != digest:
                        raise ValueError("it is not what was saved")
        return out


class RunDir(SavedRun):
    """Opens or creates a run directory.

    A finished run can be read where nothing can be written.

    Args:
      path: the directory.
      config: what decides the numbers, see `fedjax_core.record.to_json`; recorded with
        the global settings of jax that do. "rounds", and "rounds" in "record", may
        differ from one run to the next.
      resume: continue what is there; without it the directory must be new or empty.

    Raises:
      RunDirError: the directory holds something and `resume` is False, it was written
        with another config (the message names the first difference), it is no run
        directory, lacks something or is damaged, it holds more rounds than the config,
        or another process is running in it.
      TypeError: `config` holds something that has no value to record.
    """

    def __init__(self, path: str | os.PathLike, config: dict[str, Any], resume: bool):
        super().__init__(path)
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        config = json.loads(json.dumps({**to_json(config), "settings": settings}))
        self._check(config, resume)
        processes.check_same({"rounds in run_dir": self.round})  # before one writes
        with contextlib.ExitStack() as undo:
            finished = 0 < config.get("rounds", 0) <= self.round
            self._writes = processes.is_first() and self._lock(undo, finished)
            if self._writes:
                write_json(self.path / "config.json", config)
                self._note_versions()
                for folder in _folders(self._saved):
                    if not (folder / _COVERED).exists():  # left by a kill
                        shutil.rmtree(folder)
            processes.meet("what a kill left is gone")
            self._check_shared()
            options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
            with _quiet():
                self._checkpoints = ocp.CheckpointManager(self._saved, options=options)
            undo.callback(self._checkpoints.close)
            self._tables: dict[str, tuple[int, int]] = {}
            self._arrays = super()._held()
            self._close = undo.pop_all().close

    def _check(self, config: dict[str, Any], resume: bool) -> None:
        """Raises RunDirError unless what is there is nothing, or this run's."""
        if self.path.exists() and not self.path.is_dir():
            raise RunDirError(f"{self.path} is no directory; name a new one.")
        names = os.listdir(self.path) if self.path.exists() else []
        # Left by a kill before anything else, or by the command that is starting.
        if not {*names} - {".lock", "config.json.tmp", COMMAND}:
            return
        new = "name a new directory"
        if "config.json" not in names:
            raise RunDirError(
                f"{self.path} is not empty and no run directory, since it has no "
                f"config.json; {new}."
            )
        if not resume:
            raise RunDirError(
                f"{self.path} is not empty; pass resume=True to continue it, or {new}."
            )
        if found := difference(_decisive(self.config), _decisive(config)):
            where, was, now = found
            raise RunDirError(
                f"{self.path} was written with {where} = {_short(repr(was))}, got "
                f"{_short(repr(now))}; resume with the same settings or {new}."
            )
        if self.round > config.get("rounds", self.round):
            raise RunDirError(
                f"{self.path} holds {self.round} rounds, more than "
                f"rounds={config['rounds']}."
            )
        if "checkpoints" not in names and any(name.endswith(".csv") for name in names):
            raise RunDirError(
                f"{self._saved} is missing; put it back from a copy or {new}."
            )

    def _lock(self, undo: contextlib.ExitStack, finished: bool) -> bool:
        """Takes the lock; False where nothing can be written, nor has to be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            undo.enter_context(_locked(self.path / ".lock"))
        except OSError as error:
            if finished and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return False
            raise RunDirError(
                f"{self.path}: it can't be written to: {error.strerror}; make it "
                f"writable, or copy it to where it is."
            ) from None
        return True

    def _check_shared(self) -> None:
        """Raises RunDirError unless every process sees what the first one wrote."""
        until = time.monotonic() + _NFS_SECONDS
        path = self.path / "config.json"
        while not (seen := path.exists()) and time.monotonic() <= until:
            time.sleep(0.1)
        if not processes.least(seen):
            raise RunDirError(
                f"{self.path} must be on a disk that all processes share, and some do "
                f"not see what process 0 wrote there."
            )

    def _note_versions(self) -> None:
        """Adds today's versions to versions.json where they differ from the last."""
        path, now = self.path / "versions.json", versions()
        noted = read_json(path, list, "remove it") if path.exists() else []
        if not noted or noted[-1] != now:
            write_json(path, [*noted, now])

    def restore(self, like: PyTree) -> PyTree:
        """The latest checkpoint, as arrays like those of `like`.

        Raises:
          RunDirError: it holds a state of other shapes or dtypes, or it is damaged; the
            message says how to go on from an earlier one that is not.
        """
        return self._whole(lambda round: self._read_state(round, like))

    def save(self, round: int, tree: PyTree) -> None:
        """Writes a checkpoint after `round` rounds and waits until it is complete."""
        folder, tree = self._saved / str(round), processes.portable(tree)
        try:
            with _quiet():
                self._checkpoints.save(round, args=ocp.args.StandardSave(tree))
                self._checkpoints.wait_until_finished()
        except Exception as error:  # orbax passes on whatever its storage raises
            raise RunDirError(
                f"{folder} can't be written: {_first_line(error)}; {_GO_ON}"
            ) from None
        if self._writes:
            for name, content in self._arrays.items():
                _write(folder / f"{name}.npz", "wb", content)
            files = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
            covered = {
                "tables": self._tables,
                "layout": _layout(tree),
                "files": {p.as_posix(): _digest(folder / p) for p in sorted(files)},
            }
            write_json(folder / _COVERED, {"crc32": _crc_of_json(covered), **covered})
        processes.meet("the checkpoint is complete")

    def append(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Adds rows, all with the same columns and with a "round", to a table."""
        if rows:
            size, crc = self._tables.get(table, (0, 0))
            content = _csv_text(rows, header=not size).encode(**_TEXT)
            self._tables[table] = size + len(content), zlib.crc32(content, crc)
            if self._writes:
                _write(self.path / f"{table}.csv", "ab", content)

    def rows(self, table: str) -> list[dict[str, str]]:
        """Drops what the latest checkpoint does not cover and returns the rest."""
        path, content = self.path / f"{table}.csv", self._table(table)
        self._tables[table] = len(content), zlib.crc32(content)
        if self._writes and path.exists():
            if not content:
                path.unlink()
            elif path.stat().st_size > len(content):
                _replace(path, content)
        return super().rows(table)

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Replaces ``name.npz``; the next checkpoint covers it."""
        out = io.BytesIO()
        np.savez(out, **arrays)  # type: ignore[arg-type]
        self._arrays[name] = out.getvalue()
        self._put_arrays(name)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """What ``name.npz`` held at the latest checkpoint, and puts that back there."""
        self._put_arrays(name)
        return super().arrays(name)

    def _held(self) -> dict[str, bytes]:
        return self._arrays

    def _put_arrays(self, name: str) -> None:
        path, content = self.path / f"{name}.npz", self._arrays.get(name)
        if not self._writes:
            return
        if content is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != content:
            _replace(path, content)

    def _read_state(self, round: int, like: PyTree) -> PyTree:
        if found := difference(self._read_covered(round)["layout"], _layout(like)):
            name, was, now = found
            raise RunDirError(
                f"the checkpoint in {self.path} holds the state of another model or "
                f"algorithm: {name} is {was}, got {now}."
            )
        self._intact(round, "*")
        like = processes.portable(like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._checkpoints.restore(round, args=ocp.args.StandardRestore(abstract))

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
    except OSError as error:
        file.close()
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise RunDirError(f"{path.parent} is in use by another process.") from None
        raise RunDirError(
            f"{path} can't be locked: {error}; name a directory on another disk."
        ) from None
    return file


def _decisive(config: dict[str, Any]) -> dict[str, Any]:
    """Without what may differ from one run to the next."""
    kept = {k: v for k, v in config.items() if k != "rounds"}
    if isinstance(kept.get("record"), dict):
        kept["record"] = {k: v for k, v in kept["record"].items() if k != "rounds"}
    return kept


def write_json(path: Path, value: Any) -> None:
    """Writes a file or, where it was, replaces it at once."""
    _replace(path, (json.dumps(value, indent=2) + "\n").encode())


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """What a file holds, of type `kind`, or a RunDirError that ends in `remedy`."""
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, kind):
            return value
        reason = f"it holds no {kind.__name__}"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise RunDirError(f"{path} is not JSON of a run: {reason}; {remedy}.")


def _folders(checkpoints: Path) -> list[Path]:
    """Checkpoints, complete or not; copies under other names are none."""
    return [p for p in checkpoints.glob("[0-9]*") if p.name.isdecimal()]


class _Damaged(Exception):
    """Something is not what was written; the message says what."""


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Blames whatever goes wrong inside on the contents of `path`."""
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _Damaged(f"{path} is damaged: {_first_line(error)}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what orbax logs of an error before it raises it, and of damage."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _first_line(error: Exception) -> str:
    return _short((str(error).splitlines() or [type(error).__name__])[0].rstrip("."))


def _layout(tree: PyTree) -> dict[str, str]:
    """Dtype and shape of every leaf, by its path."""
    out = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        out[jax.tree_util.keystr(path)] = f"{leaf.dtype}{list(leaf.shape)}"
    return out


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _crc_of_json(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _csv_text(rows: list[dict[str, Any]], header: bool) -> str:
    out = io.StringIO()
    # A bare "\r" ends a row when it is read, yet nothing quotes it by itself.
    texts = (v for row in rows for v in row.values() if isinstance(v, str))
    quoting = csv.QUOTE_ALL if "\r" in "".join(texts) else csv.QUOTE_MINIMAL
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n", quoting=quoting)
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    _write(temporary, "wb", content)
    os.replace(temporary, path)


def _write(path: Path, mode: str, content: bytes) -> None:
    try:
        with open(path, mode) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunDirError(
            f"{path} can't be written: {error.strerror}; {_GO_ON}"
        ) from None
