"""A run that was stopped, or killed at any moment, goes on to the same bits.

Run as a script, this file is the process that gets killed.
"""

import dataclasses
import functools
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
    driver,
    gaussian_mean,
    mean,
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


RUNS = {
    # Adam's moments on the server, what was not sent on every client.
    "device": (moments_and_residuals, {"seeds": [3, 5]}),
    "host": (controls, {"seeds": [3, 5], "client_store": "host"}),
}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """The uninterrupted runs of `RUNS`, made when first asked for."""
    folder = tmp_path_factory.mktemp("wholes")

    @functools.cache
    def whole(name):
        make, options = RUNS[name]
        return run(make(), run_dir=folder / name, **options)

    return whole


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on_to_the_same_bits(name, wholes, tmp_path):
    (make, options), whole = RUNS[name], wholes(name)
    cut = tmp_path / "cut"
    stopped = run(make(), run_dir=cut, callbacks=stop_at(7), **options)
    assert stopped.rounds == 7
    resumed = run(make(), run_dir=cut, resume=True, **options)
    assert_same(resumed, whole)
    assert_same_tables(cut, whole.run_dir)
    assert resumed.timed_rounds == 13
    states = [np.any(x) for x in jax.tree.leaves(resumed.state.clients)]
    assert states
    assert all(states)

    # Resuming what is finished runs nothing, and leaves what is there as it is.
    files = {p: p.stat().st_mtime_ns for p in cut.glob("*.npz")}
    finished = run(make(), run_dir=cut, resume=True, **options)
    assert finished.compilations == 0
    assert finished.seconds == 0
    assert_same(finished, whole)
    assert_same_tables(cut, whole.run_dir)
    assert files == {p: p.stat().st_mtime_ns for p in files}


def test_client_state_may_move_to_the_host_when_a_run_goes_on(wholes, tmp_path):
    options = {"seeds": [3, 5], "run_dir": tmp_path}
    run(controls(), callbacks=stop_at(7), client_store="device", **options)
    resumed = run(controls(), client_store="host", resume=True, **options)
    assert_same(resumed, wholes("host"))


def test_cohorts_that_outgrow_their_buffers_resume_to_the_same_bits(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Small(Poisson):
        def max_cohort_size(self, num_clients):
            return 1

    options = {
        "participation": Small(rate=0.3),
        "rounds": 6,
        "eval_every": 3,
        "checkpoint_every": 3,
    }
    whole = run(run_dir=tmp_path / "whole", **options)
    assert len(np.unique(whole.train["valid_clients"])) > 2
    run(run_dir=tmp_path / "cut", callbacks=stop_at(3), **options)
    resumed = run(run_dir=tmp_path / "cut", resume=True, **options)
    assert_same(resumed, whole)
    assert_same_tables(tmp_path / "cut", tmp_path / "whole")


SHORT = {"eval_every": 2, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Four rounds and where they are recorded."""
    target = tmp_path_factory.mktemp("short") / "a" / "b"
    # A new directory can be resumed, so that one command line serves every start.
    return run(rounds=4, run_dir=target, resume=True, **SHORT), target


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Where the first two of these rounds are recorded."""
    target = tmp_path_factory.mktemp("cut") / "run"
    run(rounds=2, run_dir=target, **SHORT)
    return target


@pytest.mark.parametrize(("at_risk", "kept"), [(0.0, [2, 4]), (1e9, [4])])
def test_what_a_crash_may_cost_is_counted_in_time(tmp_path, monkeypatch, at_risk, kept):
    monkeypatch.setattr(driver, "_AT_RISK", at_risk)
    run(rounds=4, run_dir=tmp_path, eval_every=2, checkpoint_every=None)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == kept


def test_more_rounds_can_be_asked_for(short, cut, tmp_path):
    whole, target = short
    copy = shutil.copytree(cut, tmp_path / "copy")
    assert_same(run(rounds=4, run_dir=copy, resume=True, **SHORT), whole)
    assert_same_tables(copy, target)
    assert json.loads((copy / "config.json").read_text())["rounds"] == 4
    with pytest.raises(RunDirError, match="4 rounds, more than rounds=3"):
        run(rounds=3, run_dir=copy, resume=True, **SHORT)


def test_a_run_may_go_on_with_other_devices(short, cut, tmp_path):
    copy = shutil.copytree(cut, tmp_path / "copy")
    mesh = Execution(mesh=client_mesh())
    resumed = run(rounds=4, run_dir=copy, resume=True, execution=mesh, **SHORT)
    pairs = zip(
        *(jax.tree.leaves(numbers(r)) for r in (resumed, short[0])), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_what_is_recorded_can_be_read_without_the_package(short):
    result, target = short
    assert result.run_dir == target
    assert {path.name for path in target.iterdir()} == {
        ".lock",
        "config.json",
        "versions.json",
        "checkpoints",
        "client_metrics.npz",
        *TABLES,
    }
    config = json.loads((target / "config.json").read_text())
    assert config["algorithm"]["config"]["client_lr"] == 0.05
    assert config["rounds"] == 4
    (versions,) = json.loads((target / "versions.json").read_text())
    assert versions["jax"] == jax.__version__
    table = np.genfromtxt(target / "metrics.csv", delimiter=",", names=True)
    np.testing.assert_array_equal(table["round"], [1, 2, 3, 4])
    np.testing.assert_array_equal(table["train_loss"], result.train["train_loss"][0])
    with np.load(target / "client_metrics.npz") as arrays:
        np.testing.assert_array_equal(
            arrays["test_loss"], result.client_metrics["test_loss"]
        )


def test_a_longer_run_goes_on_with_the_default_of_a_shorter_one(tmp_path):
    options = {"run_dir": tmp_path / "run", "eval_every": None}
    run(rounds=2, **options)
    assert run(rounds=40, resume=True, **options).rounds == 40


# ---- the real thing ----


def victim(target: Path) -> None:
    """Runs until it kills itself while a checkpoint is being written."""

    def die_in_checkpoint():
        while not any("tmp" in name for name in os.listdir(target / "checkpoints")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    def callback(report):
        if report.round >= 8:
            threading.Thread(target=die_in_checkpoint, daemon=True).start()
            time.sleep(0.05)

    make, options = RUNS["host"]
    run(make(), run_dir=target, callbacks=[callback], checkpoint_every=4, **options)


def test_sigkill_is_survived(wholes, tmp_path):
    target = tmp_path / "cut"
    command = [sys.executable, __file__, str(target)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    (make, options), whole = RUNS["host"], wholes("host")
    assert_same(run(make(), run_dir=target, resume=True, **options), whole)
    assert_same_tables(target, whole.run_dir)


# ---- what is not resumed ----


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
        (lambda: {"eval_every": 5}, "eval_every = 2, got 5"),
        (lambda: {"eval_splits": ("train",)}, r"eval_splits = \['test'\], got"),
        (lambda: {"record": {"model": "other"}}, "record"),
        (lambda: {"resume": False}, "not empty; pass resume=True"),
        (lambda: {"data": make_data(SIZES[::-1])}, r"data\..*checksum"),
        (lambda: {"data": make_data(SIZES[1:])}, "data.*clients = 10, got 9"),
        (lambda: {"data": first_value_changed()}, r"data\..*checksum"),
        (lambda: {"data": last_value_changed()}, r"data\..*checksum"),
        (lambda: {"data": changed_test_split()}, r"data\..*checksum"),
    ],
)
def test_another_run_is_refused_and_the_difference_named(other, message, cut):
    before = {p: p.read_bytes() for p in cut.glob("*.*")}
    with pytest.raises(RunDirError, match=message):
        run(**({"rounds": 2, "run_dir": cut, "resume": True} | SHORT | other()))
    assert before == {p: p.read_bytes() for p in before}


def noisy(**parts):
    parts = {"transform": clip(1.0), "reduce": gaussian_mean(1.0, 2)} | parts
    return fedavg.make(fedavg.Config(work=LocalWork(batch_size=3)), MODEL.loss, **parts)


@dataclasses.dataclass(frozen=True)
class Never(Poisson):
    """Ends a run as soon as it has recorded what it is."""

    def draw(self, seed, round, num_clients):
        raise InterruptedError


@pytest.fixture(scope="module")
def noisy_run(tmp_path_factory):
    options = {"run_dir": tmp_path_factory.mktemp("noisy") / "run", "resume": True}
    options["participation"] = Never(rate=0.5)
    with pytest.raises(InterruptedError):
        run(noisy(), **options)
    return options


@pytest.mark.parametrize(
    "other",
    [
        {"reduce": gaussian_mean(0.5, 2)},
        {"reduce": mean(np.arange(4.0))},
        {"transform": clip(2.0)},
        {"server_optimizer": optax.adam(0.1)},
    ],
)
def test_another_transform_reduction_or_optimizer_is_refused(other, noisy_run):
    with pytest.raises(RunDirError, match=r"algorithm\.parts"):
        run(noisy(**other), **noisy_run)
    with pytest.raises(InterruptedError):
        run(noisy(), **noisy_run)


def test_other_initial_parameters_are_refused(tmp_path):
    # Whatever kind of arrays holds them.
    params = jax.tree.map(np.asarray, MODEL.init(jax.random.key(9)))
    same = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    other = jax.tree.map(lambda x: x + np.float32(1e-6), params)
    where = {"run_dir": tmp_path / "run", "cohort_size": 4}
    first = run(rounds=1, params=params, **where)
    for wrong in (other, None):
        with pytest.raises(RunDirError, match=r"written with params = '\w{8}', got"):
            run(rounds=1, params=wrong, resume=True, **where)
    assert_same(run(rounds=1, params=same, resume=True, **where), first)


def test_what_has_no_value_to_record_is_refused_at_the_start(tmp_path):
    with pytest.raises(TypeError, match=r"config\.record\.lock must be a value"):
        run(run_dir=tmp_path / "run", record={"lock": threading.Lock()})
    assert not (tmp_path / "run").exists()


if __name__ == "__main__":
    use_host_devices(8)
    victim(Path(sys.argv[1]))
