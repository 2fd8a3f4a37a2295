"""12 learning rates x 3 seeds of FedAvg on digits: one sweep against 36 single runs.

python benchmarks/sweep.py
python benchmarks/sweep.py --rounds 200 --hidden 100
"""

import argparse
import json
import time

import jax
import numpy as np

from fedjax_core import LocalWork, Result, models, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.datasets import digits, partition
from fedjax_core.sweep import sweep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rates", type=int, default=12)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--rounds", type=int, default=100)
parser.add_argument("--cohort", type=int, default=10)
parser.add_argument("--hidden", type=int, default=0, help="0: logistic regression")


if __name__ == "__main__":
    args = parser.parse_args()
    data = partition.dirichlet(digits.load(), num_clients=100, alpha=0.3)
    model = models.mlp(64, 10, hidden=(args.hidden,) if args.hidden else ())
    configs = [
        fedavg.Config(client_lr=float(rate), work=LocalWork(batch_size=10))
        for rate in np.geomspace(0.001, 1, args.rates)
    ]
    options = {"rounds": args.rounds, "cohort_size": args.cohort}

    def make(config):
        return fedavg.make(config, model.loss)

    start = time.perf_counter()
    swept = sweep(make, configs, data, model, seeds=range(args.seeds), **options)
    one = time.perf_counter() - start
    start = time.perf_counter()
    single = [
        simulate(make(config), data, model, seeds=seed, progress=False, **options)
        for config in configs
        for seed in range(args.seeds)
    ]
    many = time.perf_counter() - start
    done = [end for end in swept if isinstance(end, Result)]
    accuracies = np.concatenate([r.evaluations["test_accuracy"][:, -1] for r in done])
    expected = [run.final("test_accuracy")[0] for run in single]
    line = {
        "device": jax.devices()[0].device_kind,
        "runs": len(single),
        "sweep_seconds": round(one, 1),
        "single_seconds": round(many, 1),
        "ratio": round(one / many, 2),
        "compilations": max(run.compilations for run in done),
        "largest_difference": float(np.abs(accuracies - expected).max()),
    }
    print(json.dumps(line))
