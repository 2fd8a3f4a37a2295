"""Trains on a population on disk: memory it takes, and speed against one in memory.

Clients of 100 examples of 784 float32 features and a label, one local epoch in batches
of 20; the same cohorts from the store and from arrays in memory, both through the host
feed. The model is the perceptron with two layers of 200, or logistic regression, which
computes a quarter as much on the same bytes. The population and each run have a process
of their own. The store's run starts with nothing of it in the system's cache, unless
`--warm`.

    python benchmarks/store.py --gigabytes 10

Needs that much disk in `--folder`, and for the comparison that much memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_core import LocalWork

FEATURES, CLASSES, EXAMPLES, WARM_UP = 784, 62, 100, 2

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--gigabytes", type=float, default=1.0, help="of 10^9 bytes")
parser.add_argument("--model", choices=["mlp", "logistic"], default="mlp")
parser.add_argument("--cohort", type=int, default=100)
parser.add_argument("--rounds", type=int, default=60)
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--devices", type=int, default=2, help="host devices on CPU")
parser.add_argument("--folder", help="where to write the store for the time it takes")
parser.add_argument("--warm", action="store_true", help="leave the system's cache")
parser.add_argument("--step", choices=["build", "store", "memory"])


def build(path: Path, gigabytes: float) -> dict[str, Any]:
    """Writes the population client by client."""
    from fedjax_core.data import store

    rng = np.random.default_rng(0)
    num_clients = round(gigabytes * 1e9 / (EXAMPLES * 4 * (FEATURES + 1)))

    def clients():
        for i in range(num_clients):
            x = rng.random((EXAMPLES, FEATURES), dtype=np.float32)
            y = rng.integers(CLASSES, size=EXAMPLES, dtype=np.int32)
            yield str(i), {"x": x, "y": y}

    clock = time.perf_counter()
    data = store.build(path, clients())
    arrays = data.train.examples.values()
    return {
        "population_bytes": sum(a.nbytes for a in arrays),
        "clients": num_clients,
        "build_s": round(time.perf_counter() - clock, 1),
        "build_peak_rss_mb": peak_rss_mb(),
    }


def train(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Runs the rounds; returns their rate and the process's memory."""
    from fedjax_core import FederatedData, Packed, models, simulate, use_host_devices
    from fedjax_core.algorithms import fedavg
    from fedjax_core.data import store
    from fedjax_core.run_dir import fingerprint

    use_host_devices(args.devices)
    data = store.open(path)
    if args.step == "memory":
        arrays = {k: in_memory(a) for k, a in data.train.examples.items()}
        data = FederatedData(Packed(arrays, data.train.offsets))
    elif not args.warm:
        forget(path)
    fingerprint(data)  # as a run directory takes it
    hidden = (200, 200) if args.model == "mlp" else ()
    model = models.mlp(FEATURES, CLASSES, hidden)
    algorithm = fedavg.make(fedavg.Config(work=LocalWork(batch_size=20)), model.loss)
    clocks, cpu = [], []

    def tick(report):
        clocks.append(time.perf_counter())
        cpu.append(time.process_time())

    simulate(
        algorithm,
        data,
        model,
        rounds=args.rounds + WARM_UP,
        cohort_size=args.cohort,
        eval_every=1,
        callbacks=[tick],
        progress=False,
        feed="host",
    )
    seconds = np.diff(clocks[WARM_UP - 1 :])
    busy = np.diff(cpu[WARM_UP - 1 :])
    return {
        "rounds_per_s": round(1 / float(seconds.mean()), 3),
        "round_s_median": round(float(np.median(seconds)), 4),
        "round_cpu_s": round(float(busy.mean()), 4),
        "round_s_max": round(float(seconds.max()), 4),
        "peak_rss_mb": peak_rss_mb(),
    }


def in_memory(mapped: np.ndarray) -> np.ndarray:
    """A copy of an array that is memory-mapped."""
    from fedjax_core.data.memmap import row_blocks

    copy, at = np.empty(mapped.shape, mapped.dtype), 0
    for rows in row_blocks(mapped):
        copy[at : at + len(rows)] = rows
        at += len(rows)
    return copy


def forget(path: Path) -> None:
    """Takes the store's files out of the system's cache."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_rss_mb() -> int:
    """Peak resident memory of this process, mapped pages of files included."""
    # Not ru_maxrss, which starts at what the parent had.
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def main() -> None:
    args = parser.parse_args()
    if args.step:
        path = Path(args.folder)
        ran = build(path, args.gigabytes) if args.step == "build" else train(path, args)
        print(json.dumps(ran))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:

        def step(name: str) -> dict[str, Any]:
            own = ["--step", name, "--folder", f"{folder}/store"]
            out = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], *own],
                check=True,
                stdout=subprocess.PIPE,
            )
            return json.loads(out.stdout.splitlines()[-1])

        built = step("build")
        # By turns, as other work on the machine comes and goes.
        ran = [(step("store"), step("memory")) for _ in range(args.repeats)]

    def medians(of: int) -> dict[str, float]:
        return {k: float(np.median([run[of][k] for run in ran])) for k in ran[0][of]}

    stored, memory = medians(0), medians(1)
    line = {
        "benchmark": "store",
        **built,
        "model": args.model,
        "cohort": args.cohort,
        "rounds_timed": args.rounds,
        "repeats": args.repeats,
        "warm": args.warm,
        "store": stored,
        "memory": memory,
        "ratio": round(stored["rounds_per_s"] / memory["rounds_per_s"], 3),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
