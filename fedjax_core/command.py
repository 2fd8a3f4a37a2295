"""The command that made a directory: recorded there, to be shown and done again."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedjax_core import processes
from fedjax_core.run_dir import COMMAND as FILE
from fedjax_core.run_dir import RunDirError, read_json, write_json

_OUT = "{out}"


class Command(NamedTuple):
    """What ran."""

    command: str  # as it was typed
    experiment: str = ""  # its name; empty where a Python program ran
    preset: str = ""  # of the experiment
    devices: int | None = None  # into which the CPU was split, None for its cores
    options: tuple[str, ...] = ()  # all settings but for the directory
    finished: bool = False  # whether it came to its end


def of_program() -> Command:
    """That of the running Python program."""
    return Command(shlex.join([Path(sys.executable).name, *sys.argv]))


def exists(out: Path) -> bool:
    """Whether a directory has a record."""
    return (out / FILE).exists()


def write(out: Path, command: Command) -> None:
    """Records a command in a directory; paths inside move with it.

    Of several processes the first one does.
    """
    if not processes.is_first():
        return
    inside = f"{out.absolute()}/"
    options = [option.replace(inside, f"{_OUT}/", 1) for option in command.options]
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FILE, command._replace(options=options)._asdict())


@contextlib.contextmanager
def recorded(out: Path, command: Command) -> Iterator[None]:
    """Records a command, and that it has finished where what is inside comes to an end.

    Where it is refused, the record is what it was before.
    """
    path = out / FILE
    before = path.read_bytes() if path.exists() else None
    write(out, command)
    try:
        yield
    except Exception:
        if processes.is_first() and before is not None:
            path.write_bytes(before)
        elif processes.is_first() and not any(out.rglob("config.json")):
            path.unlink()  # there is nothing to go on with
            with contextlib.suppress(OSError):
                out.rmdir()
        raise
    write(out, command._replace(finished=True))


def read(out: Path) -> Command:
    """The command that made a directory.

    Raises:
      RunDirError: there is no record, or it is damaged.
    """
    if not out.is_dir():
        raise RunDirError(f"{out} is no directory.")
    path = out / FILE
    if not path.exists():
        raise RunDirError(f"{out} does not say what made it{_instead(out)}.")
    found = read_json(path, dict, "put it back from a copy")
    try:
        command = Command(**found)
        options = [o.replace(_OUT, str(out.absolute()), 1) for o in command.options]
    except (TypeError, AttributeError) as error:
        raise RunDirError(f"{path} is damaged: {error}.") from None
    return command._replace(options=tuple(options))


def _instead(out: Path) -> str:
    """What to do about a directory without a record."""
    if not (out / "config.json").exists():
        return f": it has no {FILE}"
    above = [folder for folder in out.absolute().parents if exists(folder)]
    if above:
        return f", but is a part of {above[0]}"
    return (
        "; a Python program recorded a run there, and goes on with it where it calls "
        "simulate with resume=True"
    )
