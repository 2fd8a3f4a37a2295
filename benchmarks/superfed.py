"""A round of SuPerFed against one of FedAvg, and all mixtures of all clients evaluated.

python benchmarks/superfed.py --mixing model
python benchmarks/superfed.py --mixing layer --model emnist_cnn
"""

import json
import statistics
import time
from typing import Any

import jax
from in_turn import against_fedavg, arguments, images

from fedjax_core import Execution, LocalWork, client_mesh, models, use_host_devices
from fedjax_core.algorithms import fedavg, superfed
from fedjax_core.own_models import compile_own_evaluation

parser = arguments(__doc__, examples=100, tested=20, epochs=2)
parser.add_argument("--mixing", choices=["model", "layer"], default="model")
parser.add_argument("--model", choices=["mlp", "emnist_cnn"], default="mlp")


def main(args) -> None:
    """Both methods in turn, and the time of an evaluation."""
    small = args.model == "mlp"
    shape = (784,) if small else (28, 28, 1)
    data = images(args.clients, shape, train=args.examples, test=args.tested)
    model = models.mlp(784, 10) if small else models.emnist_cnn(10)
    work = LocalWork(batch_size=10, epochs=args.epochs)
    config = superfed.Config(mixing=args.mixing, work=work)
    methods = {
        "fedavg": fedavg.make(fedavg.Config(work=work), model.loss),
        "superfed": superfed.make(config, model.loss, init=model.init),
    }
    times, fastest, result = against_fedavg(methods, data, model, args)
    own_models = methods["superfed"].own_models
    assert own_models is not None
    execution = Execution(mesh=client_mesh(jax.devices()[: args.devices]))
    run = compile_own_evaluation(own_models, model.metrics, data, ("test",), execution)
    state: Any = result.state
    pieces = state._replace(clients=()), state.clients
    evaluations = []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run(*pieces))
        evaluations.append(time.perf_counter() - start)
    line = {"mixing": args.mixing, "model": args.model, "cohort": args.cohort} | times
    lambdas = f"{len(config.lambdas)}_lambdas_of_{args.clients}_clients"
    line[f"{lambdas}_s"] = round(statistics.median(evaluations[1:]), 4)
    line["evaluation_over_round"] = round(min(evaluations[1:]) / fastest, 3)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    args = parser.parse_args()
    use_host_devices(args.devices)
    main(args)
