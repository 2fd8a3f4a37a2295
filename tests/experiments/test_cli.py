"""The command line: what a new user types, right and wrong."""

import dataclasses
import importlib
import io
import json
import sys
from pathlib import Path

import jax
import pytest
import rich.console
import rich.table
import tyro

from fedjax_core import command
from fedjax_core.command import Command
from fedjax_core.experiments import cli, quickstart, tools

ROOT = Path(__file__).parents[2]


def run(*argv: str) -> int:
    return cli.main(["run", *argv])


def test_list_shows_every_experiment(capsys):
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.EXPERIMENTS)


@pytest.mark.parametrize("name", cli.EXPERIMENTS)
def test_every_experiment_keeps_the_protocol(name):
    module = __import__(f"fedjax_core.experiments.{name}", fromlist=["main"])
    assert {"default", "smoke"} <= set(module.PRESETS)
    assert all(isinstance(p, module.Experiment) for p in module.PRESETS.values())


@pytest.mark.parametrize("encoding", ["ascii", "cp932", "gbk", "cp1251"])
def test_a_sign_that_the_output_lacks_does_not_end_a_run(encoding, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    table = rich.table.Table("°C²", "größe", "λ₂ ≤ é 字")
    table.add_row("25 °C²", "½", "—")
    main = lambda _: rich.console.Console().print(table)  # noqa: E731
    monkeypatch.setattr(quickstart, "main", main)
    assert run("quickstart", "--devices", "8") == 0
    out.flush()
    assert "25 " in out.buffer.getvalue().decode(encoding)


def test_programs_are_kept_while_a_command_runs(monkeypatch):
    seen = []

    def main(_):
        folder = Path(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
        jax.jit(lambda x: x + 41)(jax.numpy.float32(1))
        seen.append((folder, any(folder.iterdir())))

    monkeypatch.setattr(quickstart, "main", main)
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    assert run("quickstart", "--devices", "8") == 0
    assert seen.pop()[0] == Path(given), "that of the user"
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert run("quickstart", "--devices", "8") == 0
        assert jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_compilation_cache_dir", given)
    ((folder, filled),) = seen
    assert filled
    assert not folder.exists()


def test_data_lists_every_data_set_and_shows_one(capsys, tmp_path):
    assert cli.main(["data"]) == 0
    out = capsys.readouterr().out
    for page in (ROOT / "docs" / "datasets").glob("*.md"):
        assert page.stem == "README" or page.stem in out
    picture = tmp_path / "who.png"
    assert cli.main(["data", "digits", "--clients", "7", "--out", str(picture)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "FederatedData, 7 clients" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["digts"], "Did you mean 'digits'?"),
        (["mnist"], "say where with --path"),
        (["digits", "--path", "x"], "digits needs no files, got --path x"),
        (["leaf", "--path", "x"], "leaf"),
        (["mnist", "--path", "nowhere"], "nowhere"),
        (["digits", "--alpha", "0"], "alpha must be > 0"),
    ],
)
def test_data_that_cannot_be_shown_ends_with_one_line(argv, message, capsys):
    assert cli.main(["data", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_doctor_tells_devices_versions_and_speed(capsys, monkeypatch):
    monkeypatch.setattr(tools, "_SPEED_SECONDS", 0.0)
    monkeypatch.setattr(cli, "use_host_devices", lambda: None)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("jax ", "devices", "memory", "rounds a second"):
        assert word in out


def test_an_unknown_name_suggests_the_nearest(capsys):
    assert run("quikstart") == 2
    assert "Did you mean 'quickstart'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["heart_disease", "mnist_by_writer"])
def test_absent_files_end_with_one_line_that_says_what_to_fetch(name, tmp_path, capsys):
    where = ["--path", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run(name, "--devices", "8", *where) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
    assert "fetch" in line


def test_what_cannot_be_read_ends_with_one_line(tmp_path, capsys):
    roles = tmp_path / "roles.jsonl"
    roles.write_text('{"client_id": "a/B", "snippets": ["to be", "or not"]}')
    out = ["--devices", "8", "--out", str(tmp_path / "out")]
    for options in (["--path", str(tmp_path)], ["--path", str(roles)]):
        assert run("shakespeare", *options, "--num-clients", "5000", *out) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("fedjax-core: ")
        assert str(tmp_path) in line
    assert "expected 5000 with two speeches, found 1" in line


def test_run_alone_lists_the_experiments(capsys):
    assert run() == 2
    assert "quickstart" in capsys.readouterr().out
    assert run("--help") == 0


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        run("quickstart", "--help")
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for option in ("--preset", "--devices", "--rounds", "--algorithm.client-lr"):
        assert option in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rounds", "many"], "many"),
        (["--no-such-option", "1"], "no-such-option"),
        (["--preset", "huge"], "huge"),
        (["--devices", "0"], "devices"),
        (["--algorithm.client-lr", "-1"], "client_lr must be > 0"),
        (["--rounds", "0"], "rounds must be >= 1"),
        (["--cohort-size", "1000"], "cohort_size must be in [1, 100]"),
        (["--alpha", "-1"], "alpha must be > 0"),
    ],
)
def test_wrong_options_end_with_status_2(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("quickstart", *argv)
    assert stopped.value.code == 2
    out = capsys.readouterr()
    assert message in out.err + out.out


def test_the_quickstart_leaves_its_record_and_shows_it_again(tmp_path, capsys):
    out = tmp_path / "record"
    options = ["--preset", "smoke", "--devices", "8", "--out", str(out)]
    assert run("quickstart", *options) == 0
    first = capsys.readouterr().out
    assert "test accuracy" in first
    assert "rounds/s" in first
    assert str(out) in first.replace("\n", "")
    assert (out / "test_accuracy.png").stat().st_size > 10_000
    config = json.loads((out / "config.json").read_text())
    assert config["rounds"] == quickstart.PRESETS["smoke"].rounds

    moved = tmp_path / "moved"
    out.rename(moved)
    assert cli.main(["resume", str(moved)]) == 0
    again = capsys.readouterr()
    assert f"{moved} is finished: fedjax-core run quickstart" in again.err
    assert "test accuracy" in again.out
    assert "rounds/s" not in again.out
    record = (moved / "command.json").read_text()
    options[-1] = str(moved)
    assert run("quickstart", *options, "--algorithm.client-lr", "0.2") == 2
    assert "client_lr" in capsys.readouterr().err
    assert (moved / "command.json").read_text() == record


def test_show_prints_the_settings_of_a_preset(capsys):
    assert cli.main(["show", "quickstart", "--preset", "smoke"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rounds"] == quickstart.PRESETS["smoke"].rounds
    assert shown["algorithm"]["client_lr"] == 0.1
    assert cli.main(["show", "quikstart"]) == 2
    assert "Did you mean 'quickstart'?" in capsys.readouterr().err
    assert cli.main(["show", "quickstart", "--preset", "huge"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("no preset 'huge' of quickstart, but default, smoke.")


def test_an_interrupt_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []

    def interrupted(experiment):
        started.append(experiment)
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "main", interrupted)
    options = ["--preset", "smoke", "--rounds", "7", "--out", "a b", "--hidden"]
    assert run("quickstart", "--devices", "8", *options) == 130
    said, how = capsys.readouterr().err.splitlines()
    assert said == "fedjax-core: stopped."
    assert how == "fedjax-core: to go on from what is saved: fedjax-core resume 'a b'"
    # What the experiment is does not hang on what its preset is by now.
    other = {"default": quickstart.Experiment(rounds=99)}
    monkeypatch.setattr(quickstart, "PRESETS", other)
    Path("a b").rename("c")
    assert cli.main(["resume", "c"]) == 130
    first, second = started
    assert (first.rounds, first.hidden) == (7, ())
    assert second == dataclasses.replace(first, out=Path("c"))
    typed = "fedjax-core run quickstart --devices 8 --preset smoke --rounds 7"
    assert f"c goes on: {typed}" in capsys.readouterr().err


def test_what_cannot_be_resumed_ends_with_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Command("fedjax-core run x", "quickstart")
    command.write(Path("script"), Command("python my_study.py"))
    command.write(Path("gone"), made._replace(experiment="slowstart"))
    command.write(Path("other"), made._replace(options=("--no-such-option", "1")))
    Path("damaged").mkdir()
    Path("damaged/command.json").write_text("{")
    Path("empty").mkdir()
    for name, message in (
        ("script", "was made by 'python my_study.py'; that goes on with it"),
        ("gone", "was made by the experiment 'slowstart', which is not here"),
        ("other", "quickstart does not take: --no-such-option 1"),
        ("damaged", "command.json is not JSON of a run"),
        ("empty", "does not say what made it: it has no command.json"),
        ("nowhere", "nowhere is no directory"),
    ):
        assert cli.main(["resume", name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("fedjax-core: ")
        assert message in line


@pytest.mark.parametrize("name", cli.EXPERIMENTS)
def test_all_settings_of_an_experiment_can_be_typed(name):
    module = importlib.import_module(f"fedjax_core.experiments.{name}")
    for preset in module.PRESETS.values():
        typed = cli._options(preset)
        read = tyro.cli(module.Experiment, args=typed, default=module.Experiment())
        for field in dataclasses.fields(preset):
            value, again = getattr(preset, field.name), getattr(read, field.name)
            if field.name != "out":
                value = jax.tree.map(
                    lambda v: v.absolute() if isinstance(v, Path) else v, value
                )
            assert again == value, field.name
