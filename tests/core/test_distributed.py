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


def runs(mesh, folder: Path) -> dict:
    """A run in memory, and one that stops at round 4 and is resumed."""
    config = fedavg.Config(client_lr=0.05, work=LocalWork(batch_size=2))
    algorithm = fedavg.make(
        config,
        MODEL.loss,
        server_optimizer=optax.adam(0.05),
        transform=top_k(0.5),
    )

    def run(**kwargs):
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

    directory = folder / "run"
    stopped = run(run_dir=directory, callbacks=[lambda report: report.round >= 4])
    results = {
        "memory": run(feed="host", client_store="host"),
        "stopped": stopped,
        "resumed": run(run_dir=directory, resume=True),
        "finished": run(run_dir=directory, resume=True),
    }
    return {
        name: {
            "rounds": result.rounds,
            "compilations": result.compilations,
            "numbers": [
                np.asarray(x).tolist()
                for part in ("state", "train", "evaluations", "client_metrics")
                for x in jax.tree.leaves(getattr(result, part))
            ],
        }
        for name, result in results.items()
    }


def main(index: int, port: int, folder: Path) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, index)
    assert jax.device_count() == PROCESSES * DEVICES_EACH
    (folder / f"{index}.json").write_text(json.dumps(runs(client_mesh(), folder)))


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
    devices = jax.devices()[: PROCESSES * DEVICES_EACH]
    expected = runs(client_mesh(devices), tmp_path)
    assert first.keys() == expected.keys()
    for name, one in expected.items():
        # Every process holds the same result, to the bit.
        np.testing.assert_equal(first[name], second[name])
        assert first[name]["rounds"] == one["rounds"] == (4 if name == "stopped" else 6)
        assert first[name]["compilations"] == (0 if name == "finished" else 1)
        for a, b in zip(first[name]["numbers"], one["numbers"], strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=name)
    np.testing.assert_equal(first["finished"]["numbers"], first["resumed"]["numbers"])

    # One process wrote, once.
    with open(folder / "run" / "metrics.csv", newline="") as file:
        rows = [(int(row["round"]), int(row["seed"])) for row in csv.DictReader(file)]
    assert rows == [(r, s) for r in range(1, ROUNDS + 1) for s in SEEDS]
    assert not list((folder / "run").glob("*.tmp"))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
