"""Rounds of methods that keep a model per client, against FedAvg's; and five seeds.

python benchmarks/client_state.py --clients 1000
python benchmarks/client_state.py --clients 50 --seeds 5
"""

import argparse
import json
import statistics

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
    top_k,
    use_host_devices,
)
from fedjax_core.algorithms import fedavg, scaffold

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--clients", type=int, default=1000)
parser.add_argument("--seeds", type=int, default=1)
parser.add_argument("--cohort", type=int, default=20)
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--repeats", type=int, default=3)


def round_seconds(algorithm, data, model, args, num_seeds: int) -> float:
    """Seconds a round of all seeds, without compiling."""
    result = simulate(
        algorithm,
        data,
        model,
        rounds=args.rounds,
        cohort_size=args.cohort,
        seeds=range(num_seeds),
        eval_every=args.rounds,
        eval_splits=(),
        progress=False,
        execution=Execution(mesh=client_mesh()),
    )
    return result.seconds / result.timed_rounds


if __name__ == "__main__":
    args = parser.parse_args()
    use_host_devices(2)
    rng = np.random.default_rng(0)
    n = 100 * args.clients
    examples = {
        "x": rng.standard_normal((n, 784), np.float32),
        "y": rng.integers(0, 10, n).astype(np.int32),
    }
    data = FederatedData(Packed(examples, np.arange(args.clients + 1) * 100))
    model = models.mlp(784, 10, hidden=(1250,))
    work = LocalWork(batch_size=20)
    methods = {
        "fedavg": fedavg.make(fedavg.Config(work=work), model.loss),
        "scaffold": scaffold.make(scaffold.Config(work=work), model.loss),
        "top-k": fedavg.make(
            fedavg.Config(work=work), model.loss, transform=top_k(0.01)
        ),
    }
    seconds = {name: [] for name in methods}
    many = {name: [] for name in methods}
    for _ in range(args.repeats):
        for name, method in methods.items():
            seconds[name].append(round_seconds(method, data, model, args, 1))
            if args.seeds > 1:
                several = round_seconds(method, data, model, args, args.seeds)
                many[name].append(several)
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    for name in methods:
        line = {
            "method": name,
            "parameters": sum(
                x.size for x in jax.tree.leaves(model.init(jax.random.key(0)))
            ),
            "clients": args.clients,
            "round_s": round(middle[name], 4),
            "over_fedavg": round(middle[name] / middle["fedavg"], 2),
        }
        if args.seeds > 1:
            line["seeds"] = args.seeds
            line["over_single"] = round(statistics.median(many[name]) / middle[name], 2)
        print(json.dumps(line), flush=True)
