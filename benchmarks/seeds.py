"""Five seeds in one call against single runs.

python benchmarks/seeds.py
"""

import argparse
import json
import time

import numpy as np

from fedjax_core import LocalWork

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--rounds", type=int, default=200)
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--devices", type=int, default=2)


def main() -> None:
    args = parser.parse_args()
    from fedjax_core import models, simulate, use_host_devices
    from fedjax_core.algorithms import fedavg
    from fedjax_core.datasets import digits, partition

    use_host_devices(args.devices)
    data = partition.dirichlet(digits.load(), num_clients=100, alpha=0.3, seed=0)
    model = models.mlp(64, 10, hidden=(100,))
    config = fedavg.Config(work=LocalWork(epochs=2, batch_size=10))

    def run(seeds):
        clock = time.perf_counter()
        result = simulate(
            fedavg.make(config, model.loss),
            data,
            model,
            rounds=args.rounds,
            cohort_size=10,
            seeds=seeds,
            progress=False,
        )
        return result, time.perf_counter() - clock

    ratios, whole, compilations = [], [], 0
    for _ in range(args.repeats):
        single, single_s = run(0)
        several, several_s = run(range(args.seeds))
        ratios.append(several.seconds / single.seconds)
        whole.append(several_s / single_s)
        compilations = several.compilations
    line = {
        "benchmark": "seeds",
        "seeds": args.seeds,
        "rounds_ratio_median": round(float(np.median(ratios)), 2),
        "whole_call_ratio_median": round(float(np.median(whole)), 2),
        "compilations": compilations,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
