"""The benchmark workloads in NumPy: the same clients and cohorts for every framework.

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

import json
import math
import os
import platform
import resource
from typing import Any

import numpy as np

POPULATION = {"W1": 200, "W2": 2000}
COHORT = {"W1": 50, "W2": 1000}
BATCH, CLASSES, LR = 20, 62, 0.1


def sizes(name: str) -> np.ndarray:
    """Examples per client, ``[N]`` int64."""
    rng = np.random.default_rng(1)
    drawn = rng.lognormal(math.log(100) - 0.125, 0.5, POPULATION[name])
    return np.clip(np.round(drawn), 20, 200).astype(np.int64)


def arrays(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels and client offsets ``[N + 1]``."""
    size = sizes(name)
    rng = np.random.default_rng(2)
    x = rng.random((size.sum(), 784), dtype=np.float32)
    teacher = rng.standard_normal((784, CLASSES)).astype(np.float32)
    y = np.argmax((x - 0.5) @ teacher, 1).astype(np.int32)
    if name == "W1":
        x = x.reshape(-1, 28, 28, 1)
    return x, y, np.concatenate([[0], np.cumsum(size)])


def cohorts(name: str, rounds: int) -> list[np.ndarray]:
    """Client ids of every round."""
    rng = np.random.default_rng(3)
    return [
        rng.choice(POPULATION[name], COHORT[name], replace=False) for _ in range(rounds)
    ]


def report(framework: str, benchmark: str, seconds: list[float], **extra: Any) -> None:
    """Prints one JSON line; the first two times are warm-up."""
    steady = np.array(seconds[2:])
    line = {
        "framework": framework,
        "benchmark": benchmark,
        "python": platform.python_version(),
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
