"""Time and memory of a round against the size of the cohort.

A population of 1,000,000 clients with 10 examples of 16 features; cohorts of 1,000,
10,000 and 100,000. Then 50 rounds of cohorts between 80 and 120 and how often the round
was compiled for them.

    python benchmarks/scale.py
"""

import argparse
import json
import time

import numpy as np

from fedjax_core import LocalWork

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--population", type=int, default=1_000_000)
parser.add_argument("--cohorts", type=int, nargs="+", default=[1000, 10_000, 100_000])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--devices", type=int, default=2)


def population(num_clients: int):
    from fedjax_core import FederatedData, Packed

    rng = np.random.default_rng(0)
    n = 10 * num_clients
    x = rng.standard_normal((n, 16), dtype=np.float32)
    y = (x @ rng.standard_normal(16).astype(np.float32) > 0).astype(np.int32)
    packed = Packed({"x": x, "y": y}, np.arange(num_clients + 1) * 10)
    return FederatedData(packed)


def round_memory(data, algorithm, model, how, cohort_size: int) -> int:
    """Temporary bytes of the compiled round."""
    import jax

    from fedjax_core import plan_round

    cohort = plan_round(
        np.arange(cohort_size),
        data.train,
        algorithm.work,
        seed=0,
        round=0,
        execution=how,
    )
    state = algorithm.init(model.init(jax.random.key(0)), data.num_clients)
    compiled = (
        jax.jit(algorithm.round).lower(state, cohort, jax.random.key(0)).compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None  # every backend of ours reports it
    return memory.temp_size_in_bytes


def main() -> None:
    args = parser.parse_args()
    from fedjax_core import Execution, client_mesh, models, simulate, use_host_devices
    from fedjax_core.algorithms import fedavg

    use_host_devices(args.devices)
    from workloads import FixedCohorts

    how = Execution(mesh=client_mesh())
    data = population(args.population)
    model = models.logistic_regression(16, 2)
    algorithm = fedavg.make(fedavg.Config(work=LocalWork(batch_size=10)), model.loss)
    for size in args.cohorts:
        seconds, clock = [], time.perf_counter()

        def tick(report, seconds=seconds):
            nonlocal clock
            now = time.perf_counter()
            seconds.append(now - clock)
            clock = now

        simulate(
            algorithm,
            data,
            model,
            rounds=args.rounds + 2,
            cohort_size=size,
            eval_every=1,
            callbacks=[tick],
            progress=False,
            execution=how,
        )
        line = {
            "benchmark": "scale",
            "population": args.population,
            "cohort": size,
            "round_s_median": round(float(np.median(seconds[2:])), 4),
            "us_per_client": round(float(np.median(seconds[2:])) / size * 1e6, 2),
            "round_temp_mb": round_memory(data, algorithm, model, how, size) / 2**20,
        }
        print(json.dumps(line), flush=True)
    rng = np.random.default_rng(1)
    varied = [
        rng.choice(args.population, rng.integers(80, 121), replace=False)
        for _ in range(50)
    ]
    result = simulate(
        algorithm,
        data,
        model,
        rounds=50,
        participation=FixedCohorts(varied),
        progress=False,
        execution=how,
    )
    line = {
        "benchmark": "varied cohorts",
        "rounds": 50,
        "compilations": result.compilations,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
