"""A round of SuPerFed against one of FedAvg, and all mixtures of all clients evaluated.

python benchmarks/superfed.py --mixing model
python benchmarks/superfed.py --mixing layer --model emnist_cnn
"""

import argparse
import json
import statistics
import time
from typing import Any

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
from fedjax_core.algorithms import fedavg, superfed
from fedjax_core.own_models import compile_own_evaluation

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--mixing", choices=["model", "layer"], default="model")
parser.add_argument("--model", choices=["mlp", "emnist_cnn"], default="mlp")
parser.add_argument("--clients", type=int, default=50)
parser.add_argument("--examples", type=int, default=100)
parser.add_argument("--tested", type=int, default=20)
parser.add_argument("--cohort", type=int, default=10)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--repeats", type=int, default=5)


def population(args) -> FederatedData:
    """Random images, as many for each client."""
    rng, shape = np.random.default_rng(0), (784,)
    if args.model == "emnist_cnn":
        shape = (28, 28, 1)

    def split(each):
        n = each * args.clients
        examples = {
            "x": rng.standard_normal((n, *shape), np.float32),
            "y": rng.integers(0, 10, n).astype(np.int32),
        }
        return Packed(examples, np.arange(args.clients + 1) * each)

    return FederatedData(split(args.examples), test=split(args.tested))


def main(args) -> None:
    """Both methods in turn; medians, their ratio, and the time of an evaluation."""
    data, execution = (
        population(args),
        Execution(mesh=client_mesh(jax.devices()[: args.devices])),
    )
    model = models.mlp(784, 10) if args.model == "mlp" else models.emnist_cnn(10)
    work = LocalWork(batch_size=10, epochs=args.epochs)
    config = superfed.Config(mixing=args.mixing, work=work)
    methods = {
        "fedavg": fedavg.make(fedavg.Config(work=work), model.loss),
        "superfed": superfed.make(config, model.loss, init=model.init),
    }
    seconds = {name: [] for name in methods}
    state: Any = None
    for _ in range(args.repeats):
        for name, method in methods.items():
            result = simulate(
                method,
                data,
                model,
                rounds=args.rounds,
                cohort_size=args.cohort,
                eval_every=args.rounds,
                eval_splits=(),
                progress=False,
                execution=execution,
            )
            seconds[name].append(result.seconds / result.timed_rounds)
            state = result.state
    own_models = methods["superfed"].own_models
    assert own_models is not None
    run = compile_own_evaluation(own_models, model.metrics, data, ("test",), execution)
    pieces = state._replace(clients=()), state.clients
    evaluations = []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run(*pieces))
        evaluations.append(time.perf_counter() - start)
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    line = {"mixing": args.mixing, "model": args.model, "cohort": args.cohort}
    line |= {f"{name}_s": round(s, 4) for name, s in middle.items()}
    line["over_fedavg"] = round(middle["superfed"] / middle["fedavg"], 3)
    # Beside busy neighbours the fastest tells more than the median.
    fastest = min(seconds["superfed"]) / min(seconds["fedavg"])
    line["fastest_over_fedavg"] = round(fastest, 3)
    lambdas = f"{len(config.lambdas)}_lambdas_of_{args.clients}_clients"
    line[f"{lambdas}_s"] = round(statistics.median(evaluations[1:]), 4)
    line["evaluation_over_round"] = round(
        min(evaluations[1:]) / min(seconds["superfed"]), 3
    )
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    args = parser.parse_args()
    use_host_devices(args.devices)
    main(args)
