"""A run that was stopped, or killed at any moment, goes on to the same bits.

Run as a script, this file is the process that gets killed.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core import (
    Execution,
    FederatedData,
    LocalWork,
    Poisson,
    Result,
    RunDirError,
    client_mesh,
    clip,
    gaussian_mean,
    run_dir,
    simulate,
    top_k,
    use_host_devices,
)
from fedjax_core.algorithms import fedavg, scaffold
from fedjax_core.models.model import Model

SIZES = (3, 5, 2, 8, 1, 4, 6, 3, 7, 2)
TABLES = ("metrics.csv", "evaluations.csv")
TIMEOUT = 120  # seconds; a process takes a few


def residual(params, batch):
    return batch["x"] @ params["w"] + params["b"] - batch["y"]


MODEL = Model(
    init=lambda key: {"w": 0.1 * jax.random.normal(key, (3,)), "b": jnp.zeros(())},
    loss=lambda params, batch, key: residual(params, batch) ** 2,
    metrics=lambda params, batch: {"loss": residual(params, batch) ** 2},
)


def make_data(sizes=SIZES, seed=0, **kwargs):
    rng = np.random.default_rng(seed)
    train, test = (
        [
            {
                "x": rng.standard_normal((n, 3)).astype(np.float32),
                "y": rng.standard_normal(n).astype(np.float32),
            }
            for n in split
        ]
        for split in (sizes, sizes[::-1])
    )
    return FederatedData.from_lists(train, test, **kwargs)


def moments_and_residuals():
    """Adam's moments on the server, what was not sent on every client."""
    return fedavg.make(
        fedavg.Config(client_lr=0.05, work=LocalWork(batch_size=2)),
        MODEL.loss,
        server_optimizer=optax.adam(0.05),
        transform=top_k(0.5),
    )


def plain():
    return fedavg.make(
        fedavg.Config(client_lr=0.05, work=LocalWork(batch_size=2)), MODEL.loss
    )


def controls():
    return scaffold.make(
        scaffold.Config(client_lr=0.05, work=LocalWork(batch_size=2)), MODEL.loss
    )


def run(algorithm=None, data=None, **kwargs) -> Result:
    options = {
        "rounds": 20,
        "eval_every": 5,
        "checkpoint_every": 7,
        "execution": Execution(),
        "progress": False,
    }
    if "participation" not in kwargs:
        options["cohort_size"] = 4
    algorithm = algorithm or plain()
    return simulate(algorithm, data or make_data(), MODEL, **(options | kwargs))


def stop_at(round):
    return [lambda report: report.round >= round]


def numbers(result: Result):
    tree = {
        "train": result.train,
        "evaluations": result.evaluations,
        "client_metrics": result.client_metrics,
        "evaluated": result.evaluated,
        "state": result.state,
    }
    return jax.tree.map(np.asarray, tree)


def assert_same(a: Result, b: Result):
    """Everything that was measured and everything the algorithm holds, to the bit."""
    assert (a.rounds, a.seeds, a.excluded) == (b.rounds, b.seeds, b.excluded)
    assert jax.tree.structure(a.state) == jax.tree.structure(b.state)
    leaves = jax.tree.leaves_with_path(numbers(a))
    for (path, x), y in zip(leaves, jax.tree.leaves(numbers(b)), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, y, err_msg=name, strict=True)


def assert_same_tables(a: Path, b: Path):
    for name in TABLES:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


# ---- stopped and resumed ----


@pytest.mark.parametrize(
    ("make", "store", "seeds"),
    [(moments_and_residuals, "device", [3, 5]), (controls, "host", [3, 5])],
)
def test_a_stopped_run_goes_on_to_the_same_bits(make, store, seeds, tmp_path):
    options = {"seeds": seeds, "client_store": store}
    whole = run(make(), run_dir=tmp_path / "whole", **options)
    stopped = run(make(), run_dir=tmp_path / "cut", callbacks=stop_at(7), **options)
    assert stopped.rounds == 7
    resumed = run(make(), run_dir=tmp_path / "cut", resume=True, **options)
    assert_same(resumed, whole)
    assert_same_tables(tmp_path / "cut", tmp_path / "whole")
    assert resumed.timed_rounds == 13
    states = [np.any(x) for x in jax.tree.leaves(resumed.state.clients)]
    assert states
    assert all(states)

    # Resuming what is finished runs nothing, and leaves what is there as it is.
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "cut").glob("*.npz")}
    finished = run(make(), run_dir=tmp_path / "cut", resume=True, **options)
    assert finished.compilations == 0
    assert finished.seconds == 0
    assert_same(finished, whole)
    assert_same_tables(tmp_path / "cut", tmp_path / "whole")
    assert files == {p: p.stat().st_mtime_ns for p in files}


def test_cohorts_that_outgrow_their_buffers_resume_to_the_same_bits(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Small(Poisson):
        def max_cohort_size(self, num_clients):
            return 1

    options = {
        "participation": Small(rate=0.3),
        "rounds": 12,
        "eval_every": 4,
        "checkpoint_every": 4,
    }
    whole = run(run_dir=tmp_path / "whole", **options)
    assert len(np.unique(whole.train["valid_clients"])) > 2
    run(run_dir=tmp_path / "cut", callbacks=stop_at(8), **options)
    resumed = run(run_dir=tmp_path / "cut", resume=True, **options)
    assert_same(resumed, whole)
    assert_same_tables(tmp_path / "cut", tmp_path / "whole")


def test_more_rounds_can_be_asked_for(tmp_path):
    options = {"eval_every": 3, "checkpoint_every": 3}
    whole = run(rounds=9, run_dir=tmp_path / "whole", **options)
    run(rounds=6, run_dir=tmp_path / "cut", **options)
    extended = run(rounds=9, run_dir=tmp_path / "cut", resume=True, **options)
    assert_same(extended, whole)
    assert_same_tables(tmp_path / "cut", tmp_path / "whole")
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["rounds"] == 9
    with pytest.raises(RunDirError, match="9 rounds, more than rounds=8"):
        run(rounds=8, run_dir=tmp_path / "cut", resume=True, **options)


def test_a_run_may_go_on_with_other_devices(tmp_path):
    whole = run(rounds=8, checkpoint_every=4)
    target = tmp_path / "run"
    run(rounds=8, checkpoint_every=4, run_dir=target, callbacks=stop_at(4))
    execution = Execution(mesh=client_mesh())
    resumed = run(
        rounds=8, checkpoint_every=4, run_dir=target, resume=True, execution=execution
    )
    for a, b in zip(
        jax.tree.leaves(numbers(resumed)), jax.tree.leaves(numbers(whole)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_a_new_directory_can_be_resumed(tmp_path):
    """So that one command line serves the first start and every later one."""
    target = tmp_path / "a" / "b"
    result = run(rounds=2, run_dir=target, resume=True)
    assert result.rounds == 2
    assert result.run_dir == target
    assert {p.name for p in target.iterdir()} == {
        ".lock",
        "config.json",
        "versions.json",
        "checkpoints",
        "client_metrics.npz",
        *TABLES,
    }


def test_excluded_clients_of_any_name_are_read_back(tmp_path):
    names = ('a,"b"', "two\nlines", " größe ", "", "'", *"56789")
    data = make_data(client_ids=names)
    for i in range(4):
        data.train.client(i)["y"][0] = np.nan
    options = {"rounds": 6, "eval_every": 3, "checkpoint_every": 3, "cohort_size": 9}
    whole = run(data=data, **options)
    assert {e.client_id for e in whole.excluded} == set(names[:4])
    run(data=data, run_dir=tmp_path / "run", callbacks=stop_at(3), **options)
    resumed = run(data=data, run_dir=tmp_path / "run", resume=True, **options)
    assert_same(resumed, whole)


# ---- what a crash leaves behind ----


SHORT = {"rounds": 4, "eval_every": 2, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def whole_and_cut(tmp_path_factory):
    """Four rounds, recorded; and a directory of the first two of them."""
    folder = tmp_path_factory.mktemp("runs")
    whole = run(run_dir=folder / "whole", **SHORT)
    run(run_dir=folder / "cut", callbacks=stop_at(2), **SHORT)
    return whole, folder / "cut"


@pytest.mark.parametrize("torn", ["1", "3,0,0.5", "3,0,1\n4,", "3,0,1\n4,0\n1"])
def test_torn_lines_and_leftovers_are_cleaned_up(torn, whole_and_cut, tmp_path):
    whole, cut = whole_and_cut
    target = shutil.copytree(cut, tmp_path / "cut")
    for name in TABLES:
        with open(target / name, "a") as file:
            file.write(torn)
        (target / f"{name}.tmp").write_text("round,se")
    (target / "config.json.tmp").write_text('{"algor')
    (target / "client_metrics.npz.tmp").write_bytes(b"PK")
    (target / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()
    assert_same(run(run_dir=target, resume=True, **SHORT), whole)
    assert_same_tables(target, whole.run_dir)


def test_a_table_that_lacks_rounds_of_the_checkpoint_is_an_error(
    whole_and_cut, tmp_path
):
    target = shutil.copytree(whole_and_cut[1], tmp_path / "cut")
    lines = (target / "metrics.csv").read_text().splitlines(keepends=True)
    (target / "metrics.csv").write_text("".join(lines[:-1]))
    with pytest.raises(RunDirError, match=r"checkpoint of round 2, but .* 1 rounds"):
        run(run_dir=target, resume=True, **SHORT)


class Killed(BaseException):
    """Stands for the end of the process."""


def test_death_at_any_write_is_survived(tmp_path, monkeypatch):
    options = {**SHORT, "seeds": [0, 1]}
    whole = run(run_dir=tmp_path / "whole", **options)
    write, save = run_dir._write, run_dir.RunDir.save
    left = 0

    def last_act() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def dying_write(path, mode, content):
        if last_act():
            content = content.encode() if isinstance(content, str) else content
            write(path, mode, content[: 2 * len(content) // 3])  # torn
            raise Killed
        write(path, mode, content)

    def dying_save(self, round, tree):
        if last_act():
            raise Killed
        save(self, round, tree)

    monkeypatch.setattr(run_dir, "_write", dying_write)
    monkeypatch.setattr(run_dir.RunDir, "save", dying_save)
    target = tmp_path / "cut"
    # One death after another, each a write later, until nothing is left to die of.
    for deaths in range(30):
        left = deaths
        try:
            resumed = run(run_dir=target, resume=True, **options)
        except Killed:
            continue
        break
    else:
        pytest.fail("never finished")
    assert deaths >= 8
    assert_same(resumed, whole)
    assert_same_tables(target, tmp_path / "whole")


# ---- the real thing ----


def victim(target: Path, how: str, argument: int) -> None:
    """Runs until it kills itself: in a callback, in a checkpoint, or at any moment."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_checkpoint():
        checkpoints = target / "checkpoints"
        while True:
            if any("tmp" in name for name in os.listdir(checkpoints)):
                die()

    def callback(report):
        if how == "callback" and report.round >= argument:
            die()
        if how == "checkpoint" and report.round >= argument:
            threading.Thread(target=die_in_checkpoint, daemon=True).start()
            time.sleep(0.05)
        if how == "timer" and report.round == argument:
            delay = np.random.default_rng().uniform(0, 0.5)
            threading.Timer(delay, die).start()

    run(controls(), run_dir=target, resume=True, callbacks=[callback], **KILLED)


KILLED = {"client_store": "host", "checkpoint_every": 4}


def test_sigkill_is_survived(tmp_path):
    whole = run(controls(), run_dir=tmp_path / "whole", **KILLED)
    target = tmp_path / "cut"
    codes = []
    for how, argument in (("callback", 2), ("checkpoint", 8), ("timer", 9)):
        done = subprocess.run(
            [sys.executable, __file__, str(target), how, str(argument)],
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
        codes.append(done.returncode)
    assert codes[:2] == [-signal.SIGKILL] * 2
    resumed = run(controls(), run_dir=target, resume=True, **KILLED)
    assert_same(resumed, whole)
    assert_same_tables(target, tmp_path / "whole")


# ---- what is not resumed ----


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    target = tmp_path_factory.mktemp("short") / "run"
    run(rounds=2, run_dir=target)
    return target


def other_config():
    return fedavg.make(
        fedavg.Config(client_lr=0.06, work=LocalWork(batch_size=2)), MODEL.loss
    )


def first_value_changed():
    data = make_data()
    data.train.examples["x"][0, 0] += 1
    return data


def last_value_changed():
    data = make_data()
    data.train.examples["y"][-1] += 1
    return data


def changed_test_split():
    data = make_data()
    assert data.test is not None
    data.test.examples["y"][-1] += 1
    return data


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: {"algorithm": other_config()}, r"config\.client_lr = 0.05, got 0.06"),
        (lambda: {"algorithm": controls()}, "algorithm.*'fedavg', got 'scaffold'"),
        (lambda: {"cohort_size": 5}, r"participation\.cohort_size = 4, got 5"),
        (lambda: {"participation": Poisson(rate=0.5)}, "participation.* got"),
        (lambda: {"seeds": 1}, r"seeds = \[0\], got \[1\]"),
        (lambda: {"seeds": [0, 1]}, r"seeds = \[0\], got \[0, 1\]"),
        (lambda: {"eval_every": 2}, "eval_every = 5, got 2"),
        (lambda: {"eval_splits": ("train",)}, r"eval_splits = \['test'\], got"),
        (lambda: {"record": {"model": "other"}}, "record"),
        (lambda: {"data": make_data(SIZES[::-1])}, r"data\..*checksum"),
        (lambda: {"data": make_data(SIZES[1:])}, "data.*clients = 10, got 9"),
        (lambda: {"data": first_value_changed()}, r"data\..*checksum"),
        (lambda: {"data": last_value_changed()}, r"data\..*checksum"),
        (lambda: {"data": changed_test_split()}, r"data\..*checksum"),
    ],
)
def test_another_run_is_refused_and_the_difference_named(other, message, short_run):
    before = {p: p.read_bytes() for p in short_run.glob("*.*")}
    with pytest.raises(RunDirError, match=message):
        run(**({"rounds": 2, "run_dir": short_run, "resume": True} | other()))
    assert before == {p: p.read_bytes() for p in before}


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    table = tmp_path / "metrics.csv"
    table.write_text("round,loss\n1,0.5\n")
    with pytest.raises(RunDirError, match="no run directory"):
        run(rounds=2, run_dir=tmp_path, resume=True)
    assert table.read_text() == "round,loss\n1,0.5\n"
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(RunDirError, match="not JSON"):
        run(rounds=2, run_dir=tmp_path, resume=True)


def test_two_runs_do_not_share_a_directory(tmp_path):
    def meddle(report):
        del report
        with pytest.raises(RunDirError, match="in use"):
            run(rounds=2, run_dir=tmp_path / "run", resume=True)

    whole = run(rounds=2, run_dir=tmp_path / "run", callbacks=[meddle])
    assert_same(run(rounds=2, run_dir=tmp_path / "run", resume=True), whole)


@pytest.mark.parametrize(
    "other",
    [
        {"reduce": gaussian_mean(0.5, 2)},
        {"transform": clip(2.0)},
        {"server_optimizer": optax.adam(0.1)},
    ],
)
def test_another_transform_reduction_or_optimizer_is_refused(other, tmp_path):
    def algorithm(**parts):
        parts = {"transform": clip(1.0), "reduce": gaussian_mean(1.0, 2)} | parts
        return fedavg.make(
            fedavg.Config(work=LocalWork(batch_size=3)), MODEL.loss, **parts
        )

    run(algorithm(), rounds=2, run_dir=tmp_path / "run")
    with pytest.raises(RunDirError, match=r"algorithm\.parts"):
        run(algorithm(**other), rounds=4, run_dir=tmp_path / "run", resume=True)


def test_versions_are_noted_where_they_change(short_run, tmp_path):
    copy = shutil.copytree(short_run, tmp_path / "copy")
    path = copy / "versions.json"
    path.write_text(path.read_text().replace(jax.__version__, "0.0.1"))
    for _ in range(2):
        run(rounds=2, run_dir=copy, resume=True)
    first, second = json.loads(path.read_text())
    assert first["jax"] == "0.0.1"
    assert second["jax"] == jax.__version__


def test_a_longer_run_goes_on_with_the_default_of_a_shorter_one(tmp_path):
    options = {"run_dir": tmp_path / "run", "eval_every": None}
    run(rounds=20, **options)
    assert run(rounds=40, resume=True, **options).rounds == 40


def test_a_directory_in_use_is_not_overwritten(short_run, tmp_path):
    with pytest.raises(RunDirError, match="not empty; pass resume=True"):
        run(rounds=2, run_dir=short_run)
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(RunDirError, match="not empty"):
        run(rounds=2, run_dir=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_what_is_recorded_can_be_read_without_the_package(short_run, tmp_path):
    result = run(
        rounds=2, run_dir=shutil.copytree(short_run, tmp_path / "copy"), resume=True
    )
    config = json.loads((short_run / "config.json").read_text())
    assert config["algorithm"]["config"]["client_lr"] == 0.05
    assert config["rounds"] == 2
    (versions,) = json.loads((short_run / "versions.json").read_text())
    assert versions["jax"] == jax.__version__
    table = np.genfromtxt(short_run / "metrics.csv", delimiter=",", names=True)
    np.testing.assert_array_equal(table["round"], [1, 2])
    np.testing.assert_array_equal(table["train_loss"], result.train["train_loss"][0])
    with np.load(short_run / "client_metrics.npz") as arrays:
        np.testing.assert_array_equal(
            arrays["test_loss"], result.client_metrics["test_loss"]
        )


if __name__ == "__main__":
    use_host_devices(8)
    victim(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
