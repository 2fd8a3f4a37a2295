"""The benchmark workloads: the same clients, cohorts and steps for every framework.

========  ===========================  ==========  ======  =====
workload  model                        population  cohort  batch
========  ===========================  ==========  ======  =====
W1        EMNIST CNN, 1,206,590        200         50      20
W2        logistic regression 784-62   2,000       1,000   20
========  ===========================  ==========  ======  =====

Sizes are log-normal with mean about 100, clipped to 20..200; images are uniform noise
labelled by a random linear teacher. One local epoch of SGD at 0.1; the server takes the
mean by examples. Seeds are fixed.
"""

import argparse
import json
import math
import os
import platform
import resource
from typing import Any

import jax
import numpy as np

from fedjax_core import Execution, FederatedData, Model, Packed, client_mesh, models
from fedjax_core.algorithms import fedavg

POPULATION = {"W1": 200, "W2": 2000}
COHORT = {"W1": 50, "W2": 1000}
CLASSES = 62


def sizes(name: str) -> np.ndarray:
    """Examples per client, ``[N]`` int64."""
    rng = np.random.default_rng(1)
    drawn = rng.lognormal(math.log(100) - 0.125, 0.5, POPULATION[name])
    return np.clip(np.round(drawn), 20, 200).astype(np.int64)


def data(name: str) -> FederatedData:
    """The population of a workload."""
    size = sizes(name)
    rng = np.random.default_rng(2)
    x = rng.random((size.sum(), 784), dtype=np.float32)
    teacher = rng.standard_normal((784, CLASSES)).astype(np.float32)
    y = np.argmax((x - 0.5) @ teacher, 1).astype(np.int32)
    if name == "W1":
        x = x.reshape(-1, 28, 28, 1)
    offsets = np.concatenate([[0], np.cumsum(size)])
    return FederatedData(Packed({"x": x, "y": y}, offsets))


def cohorts(name: str, rounds: int) -> list[np.ndarray]:
    """Client ids of every round."""
    rng = np.random.default_rng(3)
    return [
        rng.choice(POPULATION[name], COHORT[name], replace=False) for _ in range(rounds)
    ]


def model(name: str) -> Model:
    """The workload's model."""
    if name == "W1":
        return models.emnist_cnn(CLASSES)
    return models.logistic_regression(784, CLASSES)


def algorithm(name: str) -> Any:
    """FedAvg as every workload runs it."""
    config = fedavg.Config(client_lr=0.1, batch_size=20)
    return fedavg.make(config, model(name).loss)


class FixedCohorts:
    """A participation that replays given cohorts."""

    def __init__(self, ids: list[np.ndarray]):
        self.ids = ids

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        del seed, num_clients
        return self.ids[round]

    def max_cohort_size(self, num_clients: int) -> int:
        del num_clients
        return max(map(len, self.ids))

    def expected_cohort_size(self, num_clients: int) -> float:
        del num_clients
        return float(np.mean([len(ids) for ids in self.ids]))


def execution_from(args: argparse.Namespace) -> Execution:
    """The execution that the options --devices, --block and --stride ask for."""
    return Execution(
        block_size=args.block,
        mesh=client_mesh(jax.devices()[: args.devices]),
        steps_per_check=args.stride,
    )


def add_execution_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, default=2, help="host devices on CPU")
    parser.add_argument("--block", type=int, default=1, help="clients per block")
    parser.add_argument("--stride", type=int, default=1, help="steps per check")


def report(benchmark: str, seconds: list[float], **extra: Any) -> None:
    """Prints one JSON line; the first two times are warm-up."""
    steady = np.array(seconds[2:])
    line = {
        "framework": "fedjax_core",
        "benchmark": benchmark,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "first_round_s": round(seconds[0], 3),
        "round_s_median": round(float(np.median(steady)), 4),
        "round_s_min": round(float(steady.min()), 4),
        "round_s_max": round(float(steady.max()), 4),
        "rounds_timed": len(steady),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        **extra,
    }
    print(json.dumps(line), flush=True)
