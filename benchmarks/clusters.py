"""Similarities of updates on disk, block by block, and the cuts of their clusters.

    python benchmarks/clusters.py --clients 1000 --parameters 1000000

Needs 4 bytes of disk a number, in `--folder`. Memory is the peak of what the process
has of its own; pages of the file that the system keeps cached come on top.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

from fedjax_core.clusters import bipartition, similarity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--clients", type=int, default=1000)
parser.add_argument("--parameters", type=int, default=1_000_000)
parser.add_argument("--folder", help="where to write the updates for the time it takes")


class Memory(threading.Thread):
    """Watches what the process has of its own."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak_mb = 0.0

    def run(self):
        while True:
            status = Path("/proc/self/status").read_text()
            own = int(status.split("RssAnon:")[1].split()[0]) / 1024
            self.peak_mb = max(self.peak_mb, own)
            time.sleep(0.01)


def main() -> None:
    args = parser.parse_args()
    M, d, clusters = args.clients, args.parameters, 4
    rng = np.random.default_rng(0)
    truth = np.arange(M) % clusters
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file = np.memmap(Path(folder) / "u", np.float32, "w+", shape=(M, d))
        means = rng.standard_normal((clusters, d), np.float32)
        for i in range(M):
            file[i] = means[truth[i]] + rng.standard_normal(d, np.float32)
        file.flush()
        del file
        file = np.memmap(Path(folder) / "u", np.float32, "r", shape=(M, d))
        memory = Memory()
        memory.start()
        clock = time.perf_counter()
        S = similarity(file).block_until_ready()
        seconds = time.perf_counter() - clock
    cut = jax.jit(bipartition)
    cut(S)
    clock = time.perf_counter()
    part = np.asarray(cut(S).part)
    cut_seconds = time.perf_counter() - clock
    kept = all(len(set(part[truth == k])) == 1 for k in range(clusters))
    line = {
        "clients": M, "parameters": d, "similarity_s": round(seconds, 2),
        "peak_mb": round(memory.peak_mb),
        "bipartition_ms": round(1000 * cut_seconds, 2), "correct": kept,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
