"""Times rounds on networks: FedGD against SciPy, a million nodes, a star.

python benchmarks/graph_rounds.py --case fedgd
python benchmarks/graph_rounds.py --case million --devices 8
python benchmarks/graph_rounds.py --case star

`fedgd`: 10,000 least-squares models of 10 parameters, about 10 neighbours each, 1,000
iterations; ours on one device and SciPy's CSR loop run in turn. `million`: a step along
the Laplacian of 250,000 to 1,000,000 nodes of 16 parameters, about 8 neighbours each;
with several devices also split over them by features. `star`: the same with 100,000
leaves, and a chain of as many edges.
"""

import argparse
import json
import os
import resource
import time

import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--case", choices=["fedgd", "million", "star"], default="fedgd")
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--iterations", type=int, default=1000, help="of fedgd")
parser.add_argument("--nodes", type=int, help="of fedgd or the largest of million")
parser.add_argument("--devices", type=int, default=1, help="host devices")
args = parser.parse_args()

from fedjax_core import use_host_devices

use_host_devices(args.devices)

import jax
import jax.numpy as jnp
from jax import lax
from scipy import sparse

from fedjax_core import client_mesh
from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph, degree, laplacian, over_features
from fedjax_core.rounds import compiler_options


def report(runs, **extra):
    """Runs all in turn, after a warm-up, and prints their times."""
    seconds = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            clock = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - clock)
    for name, times in seconds.items():
        line = {
            "benchmark": args.case,
            "variant": name,
            "cores": os.cpu_count(),
            "seconds_median": round(float(np.median(times)), 5),
            "seconds_min": round(min(times), 5),
            "seconds_max": round(max(times), 5),
            "repeats": len(times),
            **extra,
        }
        print(json.dumps(line), flush=True)
    return {name: float(np.median(times)) for name, times in seconds.items()}


def megabytes(tree):
    return round(sum(x.nbytes for x in jax.tree.leaves(tree)) / 2**20, 1)


def fedgd():
    n, d, m, half = args.nodes or 10_000, 10, 20, 5
    alpha, eta = np.float32(0.05), np.float32(0.1)
    rng = np.random.default_rng(0)
    network = builders.erdos_renyi(n, 2 * half / (n - 1))
    X = rng.standard_normal((n, m, d)).astype(np.float32)
    y = np.einsum("nmd,nd->nm", X, rng.standard_normal((n, d)).astype(np.float32))
    Q = np.einsum("nmd,nme->nde", X, X) / np.float32(m)
    q = -2 * np.einsum("nmd,nm->nd", X, y) / np.float32(m)

    def ours(Q, q):
        def step(_, W):
            gradient = 2 * jnp.einsum("nde,ne->nd", Q, W) + q
            return W - eta * (gradient + 2 * alpha * laplacian(network, W))

        return lax.fori_loop(0, args.iterations, step, jnp.zeros_like(q))

    run = jax.jit(ours, compiler_options=compiler_options())
    Qj, qj = jnp.asarray(Q), jnp.asarray(q)

    edges = (np.asarray(network.target), np.asarray(network.source))
    A = sparse.csr_matrix((np.ones(len(edges[0]), np.float32), edges), (n, n))
    deg = np.asarray(degree(network))[:, None]

    def scipy_loop():
        W = np.zeros_like(q)
        for _ in range(args.iterations):
            gradient = 2 * np.matmul(Q, W[..., None])[..., 0] + q
            W = W - eta * (gradient + 2 * alpha * (deg * W - A @ W))
        return W

    np.testing.assert_allclose(run(Qj, qj), scipy_loop(), rtol=1e-3, atol=1e-3)
    medians = report(
        {"fedjax_core": lambda: run(Qj, qj).block_until_ready(), "scipy": scipy_loop},
        nodes=n,
        edges=network.num_edges,
        iterations=args.iterations,
    )
    ratio = medians["scipy"] / medians["fedjax_core"]
    print(json.dumps({"benchmark": args.case, "scipy_over_ours": round(ratio, 2)}))


def product(network: Graph, d: int, split: bool = True):
    """A Laplacian product in place, over and over, on one device and on all."""
    n = network.num_nodes
    W = jax.random.normal(jax.random.key(0), (n, d))

    def runner(operation, network, W):
        # The old state is given away: memory is that of one state, not two.
        step = jax.jit(
            lambda network, W: W - 0.01 * operation(network, W),
            donate_argnums=1,
            compiler_options=compiler_options(),
        )
        compiled = step.lower(network, W).compile()
        state = [W]

        def run():
            state[0] = compiled(network, state[0]).block_until_ready()

        return run, compiled.memory_analysis(), state

    run, memory, state = runner(laplacian, network, W + 0)
    runs = {"fedjax_core": run}
    if split and args.devices > 1:
        mesh = client_mesh()
        assert mesh is not None
        nodes = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("clients"))
        copied = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        run_split, _, other = runner(
            over_features(laplacian, mesh),
            jax.device_put(network, copied),
            jax.device_put(W, nodes),
        )
        runs[f"fedjax_core on {args.devices} devices"] = run_split
        run()
        run_split()
        np.testing.assert_allclose(state[0], other[0], rtol=1e-5, atol=1e-6)
    report(
        runs,
        nodes=n,
        edges=network.num_edges,
        features=d,
        state_mb=megabytes(W),
        graph_mb=megabytes(network),
        temporary_mb=memory and round(memory.temp_size_in_bytes / 2**20, 1),
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )


def million():
    most = args.nodes or 1_000_000
    for n in (most // 4, most // 2, most):
        clock = time.perf_counter()
        network = builders.erdos_renyi(n, 8 / (n - 1))
        built = {"benchmark": args.case, "nodes": n}
        built["build_seconds"] = round(time.perf_counter() - clock, 2)
        print(json.dumps(built), flush=True)
        product(network, 16)


def star():
    product(builders.star(100_001), 16, split=False)
    # As many edges without a hub.
    product(builders.chain(100_001), 16, split=False)


{"fedgd": fedgd, "million": million, "star": star}[args.case]()
