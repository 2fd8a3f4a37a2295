"""Rounds of methods that keep a model per client, against FedAvg's; and five seeds.

python benchmarks/client_state.py --clients 1000
python benchmarks/client_state.py --clients 50 --seeds 5
"""

import json
import statistics

import jax
from in_turn import arguments, images, timed

from fedjax_core import LocalWork, models, top_k, use_host_devices
from fedjax_core.algorithms import fedavg, scaffold

parser = arguments(__doc__, clients=1000, seeds=1, cohort=20, rounds=20, repeats=3)


if __name__ == "__main__":
    args = parser.parse_args()
    use_host_devices(args.devices)
    data = images(args.clients)
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
            seconds[name].append(timed(method, data, model, args)[0])
            if args.seeds > 1:
                many[name].append(timed(method, data, model, args, args.seeds)[0])
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
