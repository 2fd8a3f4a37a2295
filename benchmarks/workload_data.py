"""The benchmark workloads in NumPy: the same clients and cohorts for every framework.

========  ===========================  ==========  ======  =====
workload  model                        population  cohort  batch
========  ===========================  ==========  ======  =====
W1        EMNIST CNN, 1,206,590        200         50      20
W2        logistic regression 784-62   2,000       1,000   20
W3        character LSTM, 820,522      40          10      4
========  ===========================  ==========  ======  =====

Sizes are log-normal with mean about 100, clipped to 20..200, for W3 about 40 in 8..80.
Images are uniform noise labelled by a random linear teacher; texts are 80 ids out of
90, every second one a function of the one before, each with the id after it as target.
One local epoch of SGD at 0.1; the server takes the mean by examples. Seeds are fixed.
"""

import json
import math
import os
import platform
import resource
from typing import Any

import numpy as np

POPULATION = {"W1": 200, "W2": 2000, "W3": 40}
COHORT = {"W1": 50, "W2": 1000, "W3": 10}
BATCH = {"W1": 20, "W2": 20, "W3": 4}
CLASSES = {"W1": 62, "W2": 62, "W3": 90}
LENGTH, LR = 80, 0.1


def sizes(name: str) -> np.ndarray:
    """Examples per client, ``[N]`` int64."""
    mean, least, most = (40, 8, 80) if name == "W3" else (100, 20, 200)
    rng = np.random.default_rng(1)
    drawn = rng.lognormal(math.log(mean) - 0.125, 0.5, POPULATION[name])
    return np.clip(np.round(drawn), least, most).astype(np.int64)


def arrays(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels, or texts and targets, and client offsets ``[N + 1]``."""
    size = sizes(name)
    offsets = np.concatenate([[0], np.cumsum(size)])
    rng = np.random.default_rng(2)
    if name == "W3":
        ids = rng.integers(0, CLASSES[name], (size.sum(), LENGTH + 1), np.int32)
        ids[:, 1::2] = (ids[:, :-1:2] * 7 + 3) % CLASSES[name]
        return ids[:, :-1].copy(), ids[:, 1:].copy(), offsets
    x = rng.random((size.sum(), 784), dtype=np.float32)
    teacher = rng.standard_normal((784, CLASSES[name])).astype(np.float32)
    y = np.argmax((x - 0.5) @ teacher, 1).astype(np.int32)
    if name == "W1":
        x = x.reshape(-1, 28, 28, 1)
    return x, y, offsets


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
