"""Two processes run what one process with as many devices runs.

Run as a script, this file is one of the processes.
"""

import csv
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_core import (
    Execution,
    FederatedData,
    LocalWork,
    Result,
    client_mesh,
    simulate,
    top_k,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.models.model import Model

PROCESSES, DEVICES_EACH, SEEDS, ROUNDS = 2, 2, (3, 5), 6
TIMEOUT = 120  # seconds; a run takes about ten


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


def run(mesh, **kwargs) -> Result:
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
        rounds=ROUNDS,
        cohort_size=4,
        seeds=SEEDS,
        eval_every=2,
        progress=False,
        execution=Execution(mesh=mesh),
        **kwargs,
    )


def numbers(result: Result) -> list:
    return [
        np.asarray(x).tolist()
        for part in ("state", "train", "evaluations", "client_metrics")
        for x in jax.tree.leaves(getattr(result, part))
    ]


def main(index: int, port: int, folder: Path) -> None:
    """A run in memory, and one that stops at round 4 and is resumed."""
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # What was compiled for the stopped run serves the resumed one.
    jax.config.update("jax_compilation_cache_dir", str(folder / f"cache{index}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, index)
    assert jax.device_count() == PROCESSES * DEVICES_EACH
    mesh, directory = client_mesh(), folder / "run"
    at_4 = [lambda report: report.round >= 4]
    results = {
        "memory": run(mesh, feed="host", client_store="host"),
        "stopped": run(mesh, run_dir=directory, callbacks=at_4),
        "resumed": run(mesh, run_dir=directory, resume=True),
        "finished": run(mesh, run_dir=directory, resume=True),
    }
    out = {
        name: {
            "rounds": result.rounds,
            "compilations": result.compilations,
            "numbers": numbers(result),
        }
        for name, result in results.items()
    }
    (folder / f"{index}.json").write_text(json.dumps(out))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_run_what_one_runs(tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    arguments = [str(free_port()), str(folder)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(i), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    try:
        logs = [p.communicate(timeout=TIMEOUT)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
            if p.stdout is not None:
                p.stdout.close()
    assert [p.returncode for p in processes] == [0] * PROCESSES, "\n".join(logs)
    first, second = (json.loads((folder / f"{i}.json").read_text()) for i in (0, 1))
    # Every process holds the same result, to the bit.
    np.testing.assert_equal(first, second)
    assert {name: (r["rounds"], r["compilations"]) for name, r in first.items()} == {
        "memory": (6, 1),
        "stopped": (4, 1),
        "resumed": (6, 1),
        "finished": (6, 0),
    }
    mesh = client_mesh(jax.devices()[: PROCESSES * DEVICES_EACH])
    expected = numbers(run(mesh))
    for name in ("memory", "resumed"):  # whose first rounds are the stopped one's
        for a, b in zip(first[name]["numbers"], expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=name)
    np.testing.assert_equal(first["finished"]["numbers"], first["resumed"]["numbers"])

    # One process wrote, once.
    with open(folder / "run" / "metrics.csv", newline="") as file:
        rows = [(int(row["round"]), int(row["seed"])) for row in csv.DictReader(file)]
    assert rows == [(r, s) for r in range(1, ROUNDS + 1) for s in SEEDS]
    assert not list((folder / "run").glob("*.tmp"))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
