"""Choosing the k largest of d, and a round of STC against one of FedAvg.

python benchmarks/compressed.py selection
python benchmarks/compressed.py round --steps 10
"""

import json
import time

import jax
import numpy as np
from in_turn import against_fedavg, arguments, images

from fedjax_core import LocalWork, models, use_host_devices
from fedjax_core.algorithms import fedavg, stc
from fedjax_core.compress import select
from fedjax_core.rounds import compiler_options

parser = arguments(__doc__, sparsity=400, steps=10)
parser.add_argument("what", choices=["selection", "round"])
parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 3e6, 1e7])
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


def rounds(args) -> None:
    """Both methods in turn; the median of each, and their ratio."""
    model = models.emnist_cnn()
    work = LocalWork(batch_size=20, steps=args.steps)
    config = stc.Config(
        work=work, sparsity_up=args.sparsity, sparsity_down=args.sparsity
    )
    methods = {
        "fedavg": fedavg.make(fedavg.Config(work=work, weights="uniform"), model.loss),
        "stc": stc.make(config, model.loss),
    }
    data = images(args.clients, (28, 28, 1), 62)
    times, _, _ = against_fedavg(methods, data, model, args)
    line = {"sparsity": args.sparsity, "steps": args.steps, "cohort": args.cohort}
    print(json.dumps(line | times), flush=True)


if __name__ == "__main__":
    args = parser.parse_args()
    use_host_devices(args.devices)
    selection(args) if args.what == "selection" else rounds(args)
