"""Times zCDP-NFL against the loop over clients that one would write in NumPy.

python benchmarks/zcdp_nfl.py

100 runs with data and noise of their own, 50 nodes of mean degree 3 with 50 rows of 8
features, 200 rounds, by least absolute deviations or with --ridge. Ours is all runs
through `networks.run`, records and evaluation included, with and without compiling. The
loop is timed on a few runs and scaled; both have the same data and other noise.
"""

import argparse
import json
import time

import jax
import numpy as np

from fedjax_core import random
from fedjax_core.algorithms.networks import zcdp_nfl
from fedjax_core.datasets.networks import unit_linear
from fedjax_core.networks import builders
from fedjax_core.networks.risks import Risk, world
from fedjax_core.networks.run import run
from fedjax_core.privacy import DynamicBudget

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--runs", type=int, default=100)
parser.add_argument("--rounds", type=int, default=200)
parser.add_argument("--loops", type=int, default=3, help="runs of the loop")
parser.add_argument("--ridge", action="store_true")
args = parser.parse_args()

K, D, P, RHO, ETA = 50, 50, 8, 1.0, 4.0
FIRST, DECAY, BOUND, STRENGTH = 1e-2, 0.97, 1.0, 1.0
RISK = Risk(strength=STRENGTH) if args.ridge else Risk("absolute")
GRAPH = builders.random_connected(K, 3, seed=1)


def draw(key):
    data = unit_linear(key, K, D, P)
    return data.X, data.y, data.mask


WORLD = jax.jit(world(RISK, draw))


def ours():
    config = zcdp_nfl.Config(
        RHO, ETA, 0.5, budget=DynamicBudget(FIRST, DECAY), gradient_bound=BOUND
    )
    return run(
        zcdp_nfl.make(config, GRAPH, RISK, draw),
        rounds=args.rounds,
        seeds=range(args.runs),
        progress=False,
        seeds_axis="vmap",
    )


def loop(seed):
    """One run, client by client, as the algorithm is printed; the error of both."""
    rng = np.random.default_rng(seed)
    # The world of ours, with its centralised solution: not what is timed.
    drawn = WORLD(random.stream(random.seed_key(seed), "world"))
    X, y, w = map(np.asarray, (drawn.data.X, drawn.data.y, drawn.optimum))
    start = time.perf_counter()
    A = np.asarray(GRAPH.dense())
    neighbours = [np.flatnonzero(A[k]) for k in range(K)]
    W, sent, dual = np.zeros((3, K, P))
    for n in range(1, args.rounds + 1):
        eta = ETA / np.sqrt(n)
        for k in range(K):
            error = X[k] @ sent[k] - y[k]
            if args.ridge:
                grad = 2 * X[k].T @ error / D + STRENGTH / K * 2 * sent[k]
            else:
                grad = X[k].T @ np.sign(error) / D
            pulls = sum(sent[k] + sent[j] for j in neighbours[k])
            curvature = 1 / eta + 2 * RHO * len(neighbours[k])
            W[k] = (sent[k] / eta + RHO * pulls - dual[k] - grad) / curvature
        for k in range(K):
            most = 2 * BOUND / (D * (2 * RHO * len(neighbours[k]) + 1 / eta))
            sigma = most / np.sqrt(2 * FIRST * DECAY ** -(n - 1))
            sent[k] = W[k] + sigma * rng.standard_normal(P)
        for k in range(K):
            dual[k] += RHO * sum(sent[k] - sent[j] for j in neighbours[k])
    return time.perf_counter() - start, ((W - w) ** 2).sum() / (w @ w)


start = time.perf_counter()
result = ours()
whole = time.perf_counter() - start
took, by_loop = zip(*map(loop, range(args.loops)), strict=True)
slow = np.median(took) * args.runs
line = {
    "benchmark": "zcdp_nfl",
    "runs": args.runs,
    "rounds": args.rounds,
    "compilations": result.compilations,
    "seconds": round(result.seconds, 3),
    "seconds_with_compiling": round(whole, 2),
    "seconds_of_loop": round(slow, 1),
    "times_faster": round(slow / result.seconds, 1),
    "times_faster_with_compiling": round(slow / whole, 1),
    "errors": result.evaluations["normalised_error"][: args.loops, -1].tolist(),
    "errors_of_loop": list(by_loop),
}
print(json.dumps(line))
