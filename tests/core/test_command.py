"""What made a directory is recorded there and moves with it."""

import pytest

from fedjax_core import RunDirError, command
from fedjax_core.command import Command

MADE = Command("fedjax-core run x", "x", "smoke", 2, ("--rounds", "6"))


def test_a_record_is_read_as_it_was_written(tmp_path):
    with command.recorded(tmp_path / "new", MADE):
        assert command.read(tmp_path / "new") == MADE
    assert command.read(tmp_path / "new") == MADE._replace(finished=True)


def test_paths_inside_move_and_others_stay(tmp_path):
    old, new, other = (tmp_path / name for name in ("old", "new", "older"))
    paths = (f"{old}/runs", f"{other}/data", str(tmp_path))
    command.write(old, MADE._replace(options=paths))
    old.rename(new)
    expected = (f"{new}/runs", f"{other}/data", str(tmp_path))
    assert command.read(new).options == expected


def test_what_is_refused_leaves_the_record_as_it_was(tmp_path):
    command.write(tmp_path, MADE)
    other = MADE._replace(preset="default")
    with pytest.raises(ValueError, match="no"), command.recorded(tmp_path, other):
        raise ValueError("no")
    assert command.read(tmp_path) == MADE
    with pytest.raises(KeyboardInterrupt), command.recorded(tmp_path, other):
        raise KeyboardInterrupt
    assert command.read(tmp_path) == other


@pytest.mark.parametrize("runs", [False, True])
def test_a_failure_is_recorded_where_there_is_something_to_go_on_with(runs, tmp_path):
    out = tmp_path / "new"

    def fail():
        if runs:
            (out / "cell").mkdir()
            (out / "cell" / "config.json").write_text("{}")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), command.recorded(out, MADE):
        fail()
    assert out.exists() == runs
    if runs:
        assert command.read(out) == MADE


def test_directories_without_a_record_say_what_to_do(tmp_path):
    cell = tmp_path / "study" / "runs" / "cell"
    cell.mkdir(parents=True)
    with pytest.raises(RunDirError, match="nowhere is no directory"):
        command.read(tmp_path / "nowhere")
    with pytest.raises(RunDirError, match=r"it has no command\.json"):
        command.read(cell)
    (cell / "config.json").write_text("{}")
    with pytest.raises(RunDirError, match="a Python program recorded a run there"):
        command.read(cell)
    command.write(tmp_path / "study", MADE)
    with pytest.raises(RunDirError, match=f"is a part of {tmp_path}/study"):
        command.read(cell)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON of a run"),
        ('{"experiment": "x"}', "is damaged: .*'command'"),
        ('{"command": "x", "options": [3]}', "is damaged"),
        ('{"command": "x", "more": 1}', "is damaged: .*'more'"),
    ],
)
def test_a_damaged_record_is_refused(content, message, tmp_path):
    (tmp_path / command.FILE).write_text(content)
    with pytest.raises(RunDirError, match=message):
        command.read(tmp_path)
