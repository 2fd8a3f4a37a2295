"""Two processes run what one process with as many devices runs.

Run as a script, this file is the command line of one of the processes, with an
experiment of its own.
"""

import csv
import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core import (
    Execution,
    FederatedData,
    LocalWork,
    Result,
    client_mesh,
    processes,
    run_dir,
    simulate,
    top_k,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.experiments import cli
from fedjax_core.models.model import Model
from fedjax_core.networks.run import System
from fedjax_core.networks.run import run as run_system

PROCESSES, DEVICES_EACH, SEEDS, ROUNDS = 2, 2, (3, 5), 6
TIMEOUT = 300  # seconds; a quiet machine takes about twelve


def residual(params, batch):
    return batch["x"] @ params["w"] + params["b"] - batch["y"]


MODEL = Model(
    init=lambda key: {"w": 0.1 * jax.random.normal(key, (3,)), "b": jnp.zeros(())},
    loss=lambda params, batch, key: residual(params, batch) ** 2,
    metrics=lambda params, batch: {"loss": residual(params, batch) ** 2},
)


def make_data():
    rng = np.random.default_rng(0)
    sizes = (3, 5, 2, 8, 0, 4, 6, 3, 7, 2)
    train, test = (
        [
            # Labels of 64 bits, as NumPy makes them.
            {"x": rng.standard_normal((n, 3)), "y": rng.integers(0, 3, n)}
            for n in split
        ]
        for split in (sizes, sizes[::-1])
    )
    return FederatedData.from_lists(train, test)


def run(mesh, rounds=ROUNDS, **kwargs) -> Result:
    config = fedavg.Config(client_lr=0.05, work=LocalWork(batch_size=2))
    algorithm = fedavg.make(
        config,
        MODEL.loss,
        server_optimizer=optax.adam(0.05),
        transform=top_k(0.5),
    )
    return simulate(
        algorithm,
        make_data(),
        MODEL,
        rounds=rounds,
        cohort_size=4,
        seeds=SEEDS,
        eval_every=2,
        progress=False,
        execution=Execution(mesh=mesh),
        **kwargs,
    )


def decay(**kwargs) -> Result:
    """A system on a network, which every process runs by itself."""
    return run_system(
        System(
            "decay",
            None,
            (),
            lambda world, key: jax.random.normal(key, (3,)),
            lambda world, x, t, key: (0.9 * x, {"sum": x.sum()}),
        ),
        rounds=ROUNDS,
        seeds=SEEDS,
        progress=False,
        **kwargs,
    )


def numbers(result: Result) -> list:
    return [
        np.asarray(x).tolist()
        for part in ("state", "train", "evaluations", "client_metrics")
        for x in jax.tree.leaves(getattr(result, part))
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    out: Path = Path("runs")


PRESETS = {"default": Experiment()}


def main(experiment: Experiment) -> None:
    """Runs in memory, some that stop at round 4 and are resumed, and two that fail."""
    assert jax.device_count() == PROCESSES * DEVICES_EACH
    index, out = jax.process_index(), experiment.out
    pair = client_mesh(jax.devices()[::DEVICES_EACH])  # one device of each process
    # The first process decides.
    at_4 = [lambda report: report.round >= 4 and index == 0]
    results = {
        "memory": run(client_mesh(), feed="host", client_store="host"),
        "stopped": run(pair, run_dir=out / "run", callbacks=at_4),
        "resumed": run(pair, run_dir=out / "run", resume=True),
        "finished": run(pair, run_dir=out / "run", resume=True),
        "decay_stopped": decay(run_dir=out / "decay", callbacks=at_4),
        "decay": decay(run_dir=out / "decay", resume=True),
    }
    print("what process 0 prints")
    errors = []
    run_dir._NFS_SECONDS = 0  # nothing appears later here
    wrong: list[dict[str, Any]]
    wrong = [{"rounds": ROUNDS + index}, {"run_dir": out / f"run{index}"}]
    for options in wrong:
        with pytest.raises((processes.ProcessesError, ValueError)) as found:
            run(pair, **options)
        errors.append(str(found.value))
    numbers_of = {name: numbers(result) for name, result in results.items()}
    rounds = {name: result.rounds for name, result in results.items()}
    compilations = [results[name].compilations for name in ("memory", "finished")]
    record = {"numbers": numbers_of, "rounds": rounds, "compilations": compilations}
    (out / f"{index}.json").write_text(json.dumps(record | {"errors": errors}))
    if index == 1:
        raise RuntimeError("what fails here alone")
    run(pair)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_run_what_one_runs(tmp_path):
    options = {
        "out": tmp_path,
        "coordinator": f"127.0.0.1:{free_port()}",
        "num-processes": PROCESSES,
        "devices": DEVICES_EACH,
    }
    # What was compiled for the stopped run serves the resumed one.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    argv = [f"--{name}={value}" for name, value in options.items()]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "run", "tiny", f"--process-id={i}", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | cache,
        )
        for i in range(PROCESSES)
    ]
    try:
        said = [p.communicate(timeout=TIMEOUT) for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()
    log = "\n".join(text for texts in said for text in texts)
    # Where one failed, both ended and said why; one printed, and nothing else.
    assert [p.returncode for p in started] == [1] * PROCESSES, log
    assert [out for out, _ in said] == ["what process 0 prints\n", ""]
    assert "another one ended first" in said[0][1]
    assert "what fails here alone" in said[1][1]

    first, second = (json.loads((tmp_path / f"{i}.json").read_text()) for i in (0, 1))
    shared = "must be on a disk that all processes share"
    for errors in (first.pop("errors"), second.pop("errors")):
        assert "process 0 has rounds = 6 and process 1 7" in errors[0]
        assert shared in errors[1]
    # Every process holds the same result, to the bit.
    np.testing.assert_equal(first, second)
    assert first["compilations"] == [1, 0]
    assert first["rounds"] == {
        "memory": 6, "stopped": 4, "resumed": 6, "finished": 6,
        "decay_stopped": 4, "decay": 6,
    }  # fmt: skip
    found = first["numbers"]
    # Of two devices a sum is the same in either order, of four it is not.
    one = numbers(run(client_mesh(jax.devices()[:PROCESSES])))
    np.testing.assert_equal(found["resumed"], one)
    np.testing.assert_equal(found["finished"], one)
    for a, b in zip(found["memory"], one, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    np.testing.assert_equal(found["decay"], numbers(decay()))

    # One process wrote, once.
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = [(int(row["round"]), int(row["seed"])) for row in csv.DictReader(file)]
    assert rows == [(r, s) for r in range(1, ROUNDS + 1) for s in SEEDS]
    assert not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"coordinator": "host"}, "coordinator must be host:port, got 'host'"),
        ({"coordinator": "host:0"}, "coordinator must be host:port, got 'host:0'"),
        ({"num_processes": 0}, "num_processes must be >= 1, got 0"),
        ({"process_id": 2, "num_processes": 2}, r"in \[0, num_processes\), got 2 of 2"),
    ],
)
def test_wrong_places_name_the_argument(where, message):
    with pytest.raises(processes.ProcessesError, match=message):
        processes.join(**where)


def test_a_port_in_use_is_an_error():
    with socket.create_server(("", 0)) as taken:
        coordinator = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(processes.ProcessesError, match="must be a free port"):
            processes.join(coordinator, 0, 1)


if __name__ == "__main__":
    sys.modules["fedjax_core.experiments.tiny"] = sys.modules["__main__"]
    cli.EXPERIMENTS["tiny"] = "what the test runs"
    sys.exit(cli.main(sys.argv[1:]))
