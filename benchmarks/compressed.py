"""Choosing the k largest of d, and a round of STC against one of FedAvg.

python benchmarks/compressed.py selection
python benchmarks/compressed.py round --steps 10
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np

from fedjax_core import (
    Execution,
    FederatedData,
    LocalWork,
    Packed,
    client_mesh,
    models,
    simulate,
    use_host_devices,
)
from fedjax_core.algorithms import fedavg, stc
from fedjax_core.compress import select
from fedjax_core.rounds import compiler_options

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("what", choices=["selection", "round"])
parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 3e6, 1e7])
parser.add_argument("--sparsity", type=int, default=400)
parser.add_argument("--clients", type=int, default=50)
parser.add_argument("--cohort", type=int, default=10)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--repeats", type=int, default=5)
RATES = (1 / 1000, 1 / 400, 1 / 100, 1 / 25)
WAYS = (select.partial_sort, select.by_blocks, select.by_digits, select.largest)


def selection(args) -> None:
    """Milliseconds of every way, the fastest of the repeats; all choose the same."""
    for d in map(int, args.sizes):
        x = np.random.default_rng(0).standard_normal(d, np.float32)
        x = np.abs(x * np.exp(x[::-1]))
        for rate in RATES:
            line, expected = {"d": d, "rate": rate}, None
            for way in WAYS:
                run = jax.jit(way, static_argnums=1).lower(x, int(rate * d))
                run = run.compile(dict(compiler_options()))
                chosen, seconds = np.asarray(run(x)), []
                expected = chosen if expected is None else expected
                assert np.array_equal(chosen, expected)
                for _ in range(args.repeats):
                    start = time.perf_counter()
                    jax.block_until_ready(run(x))
                    seconds.append(time.perf_counter() - start)
                line[way.__name__ + "_ms"] = round(1e3 * min(seconds), 2)
            print(json.dumps(line), flush=True)


def round_seconds(algorithm, data, model, args) -> float:
    """Seconds a round, without compiling."""
    result = simulate(
        algorithm,
        data,
        model,
        rounds=args.rounds,
        cohort_size=args.cohort,
        eval_every=args.rounds,
        eval_splits=(),
        progress=False,
        execution=Execution(mesh=client_mesh(jax.devices()[: args.devices])),
    )
    return result.seconds / result.timed_rounds


def rounds(args) -> None:
    """Both methods in turn; the median of each, and their ratio."""
    rng = np.random.default_rng(0)
    n = 100 * args.clients
    examples = {
        "x": rng.standard_normal((n, 28, 28, 1), np.float32),
        "y": rng.integers(0, 62, n).astype(np.int32),
    }
    data = FederatedData(Packed(examples, np.arange(args.clients + 1) * 100))
    model = models.emnist_cnn()
    work = LocalWork(batch_size=20, steps=args.steps)
    methods = {
        "fedavg": fedavg.make(fedavg.Config(work=work, weights="uniform"), model.loss),
        "stc": stc.make(
            stc.Config(
                work=work, sparsity_up=args.sparsity, sparsity_down=args.sparsity
            ),
            model.loss,
        ),
    }
    seconds = {name: [] for name in methods}
    for _ in range(args.repeats):
        for name, method in methods.items():
            seconds[name].append(round_seconds(method, data, model, args))
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    line = {"sparsity": args.sparsity, "steps": args.steps, "cohort": args.cohort}
    line |= {f"{name}_s": round(s, 4) for name, s in middle.items()}
    line["over_fedavg"] = round(middle["stc"] / middle["fedavg"], 3)
    # Beside busy neighbours the fastest tells more than the median.
    fastest = min(seconds["stc"]) / min(seconds["fedavg"])
    line["fastest_over_fedavg"] = round(fastest, 3)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    args = parser.parse_args()
    use_host_devices(args.devices)
    selection(args) if args.what == "selection" else rounds(args)
