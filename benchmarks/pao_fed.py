"""Times PAO-Fed against a loop in NumPy, and with many runs and many clients.

python benchmarks/pao_fed.py --case base
python benchmarks/pao_fed.py --case runs --devices 2
python benchmarks/pao_fed.py --case clients

`base`: 256 clients, 2,000 iterations, 20 runs of PAO-Fed-U1 through `networks.run`, and
the loop over iterations that one would write, vectorised over clients, for --numpy_runs
of them. `runs`: 100 runs in one compiled program, split over devices. `clients`: up to
100,000 clients, 50 iterations. Ours includes drawing all data, NumPy's has them given.
Seconds of all cores together are less moved by what else the machine does.
"""

import argparse
import json
import os
import resource
import time

import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--case", choices=["base", "runs", "clients"], default="base")
parser.add_argument("--devices", type=int, default=1, help="host devices, of runs")
parser.add_argument("--runs", type=int)
parser.add_argument("--numpy_runs", type=int, default=1)
parser.add_argument("--iterations", type=int)
parser.add_argument("--clients", type=int, default=100_000, help="of clients")
args = parser.parse_args()

from fedjax_core import use_host_devices

use_host_devices(args.devices)

import jax
from jax import lax

from fedjax_core import client_mesh, random
from fedjax_core.algorithms.networks import pao_fed
from fedjax_core.datasets import streams
from fedjax_core.networks.run import run
from fedjax_core.networks.streaming import held_out_error
from fedjax_core.rounds import compiler_options

METHOD = pao_fed.METHODS["PAO-Fed-U1"]


class Clock:
    """Seconds since it was made, and those of all cores together."""

    def __init__(self):
        self._start = time.perf_counter(), time.process_time()

    def __call__(self):
        now = time.perf_counter(), time.process_time()
        return np.subtract(now, self._start)


def report(variant, seconds, clients, iterations, runs, **extra):
    seconds, of_cores = seconds
    line = {
        "benchmark": args.case,
        "variant": variant,
        "cores": os.cpu_count(),
        "clients": clients,
        "iterations": iterations,
        "runs": runs,
        "seconds": round(seconds, 3),
        "core_seconds": round(of_cores, 3),
        "ns_per_client_iteration": round(
            1e9 * seconds / clients / iterations / runs, 1
        ),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        **extra,
    }
    print(json.dumps(line), flush=True)


def numpy_loop(world, mu=0.4, m=4, max_delay=10):
    """PAO-Fed-U1, all clients at once, masks and messages as arrays."""
    world = jax.tree.map(np.asarray, world)
    (iterations, num_clients, _), d = world.x.shape, world.test_z.shape[1]
    omega, b = (np.float64(a) for a in world.features)
    x, y = np.asarray(world.x, np.float64), np.asarray(world.y, np.float64)
    arrived, available, delay = world.events
    base, clients = np.arange(d) < m, np.arange(num_clients)

    def masks(n):
        entry = (np.arange(d)[None] - m * (n + clients)[:, None]) % d
        return base[entry]

    w, W, sent = np.zeros(d), np.zeros((num_clients, d)), []
    for n in range(iterations):
        z = np.sqrt(2 / d) * np.cos(x[n] @ omega + b)
        V = np.where(masks(n) & available[n][:, None], w, W)
        error = arrived[n] * (y[n] - (V * z).sum(1))
        W = V + mu * error[:, None] * z
        sent = [(masks(n + 1), W, available[n], delay[n]), *sent[:max_delay]]
        taken, step = np.zeros(d, bool), np.zeros(d)
        for late, (S, models, there, delays) in enumerate(sent):
            k = np.flatnonzero(there & (delays == late))
            if len(k):
                free = S[k] & ~taken
                step += (free * (models[k] - w)).sum(0) / len(k)
                taken |= S[k].any(0)
        w = w + step
    return w


def base():
    config = streams.Config(iterations=args.iterations or 2000)
    runs, world = args.runs or 20, streams.nonlinear(config)
    system = pao_fed.make(METHOD, world)
    clock = Clock()
    result = run(system, rounds=config.iterations, seeds=range(runs), progress=False)
    seconds = clock()
    report(
        "networks.run", seconds, config.num_clients, config.iterations, runs,
        compile_seconds=round(result.compile_seconds, 2),
        compilations=result.compilations,
    )  # fmt: skip
    theirs = []
    for seed in range(args.numpy_runs):
        drawn = jax.jit(world)(random.stream(random.seed_key(seed), "world"))
        jax.block_until_ready(drawn)
        clock = Clock()
        w = numpy_loop(drawn)
        theirs.append(clock())
        np.testing.assert_allclose(result.state.params[seed], w, atol=2e-4)
    mean = np.mean(theirs, axis=0)
    report("numpy", mean, config.num_clients, config.iterations, 1)
    clocks = ["seconds", "core_seconds"]
    ratios = dict(zip(clocks, (runs * mean / seconds).round(1), strict=True))
    running = seconds[0] - result.compile_seconds
    ratios["seconds_without_compiling"] = round(runs * mean[0] / running, 1)
    print(json.dumps({"benchmark": "base", "numpy_over_ours": ratios}))


def program(config):
    """The last test error for every key, all of it one function."""
    world = streams.nonlinear(config)

    def one(key):
        drawn = world(random.stream(key, "world"))

        def step(t, state):
            key_of_round = random.round_key(key, t)
            return pao_fed.step(METHOD, drawn, state, t, key_of_round)[0]

        state = pao_fed.init(METHOD, drawn)
        state = lax.fori_loop(0, config.iterations, step, state)
        return held_out_error(drawn, state.params)["test_mse"]

    return lambda keys: lax.map(one, keys)


def compiled(config, runs):
    keys = jax.numpy.stack([random.seed_key(seed) for seed in range(runs)])
    whole, mesh = program(config), client_mesh()
    if mesh is not None:
        over = jax.sharding.PartitionSpec("clients")
        whole = jax.shard_map(
            whole, mesh=mesh, in_specs=over, out_specs=over, check_vma=False
        )
        keys = jax.device_put(keys, jax.sharding.NamedSharding(mesh, over))
    clock = Clock()
    options = compiler_options()
    ready = jax.jit(whole, compiler_options=options).lower(keys).compile()
    compile_seconds = clock()[0]
    clock = Clock()
    error = np.asarray(ready(keys))
    seconds = clock()
    report(
        f"one program, {args.devices} devices", seconds, config.num_clients,
        config.iterations, runs, compile_seconds=round(compile_seconds, 2),
        test_db=round(float(10 * np.log10(error.mean())), 2),
    )  # fmt: skip


def runs():
    compiled(streams.Config(iterations=args.iterations or 2000), args.runs or 100)


def clients():
    for count in (args.clients // 100, args.clients // 10, args.clients):
        iterations = args.iterations or 50
        config = streams.Config(num_clients=count, iterations=iterations, tests=1)
        compiled(config, args.runs or 1)


{"base": base, "runs": runs, "clients": clients}[args.case]()
