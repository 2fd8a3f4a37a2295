"""google/fedjax's own FedAvg on the workloads of `workload_data`.

pip install jax==0.4.30 jaxlib==0.4.30 'numpy<2' 'scipy<1.14' fedjax==0.0.17
PYTHONPATH=benchmarks python benchmarks/peers/fedjax_peer.py --backend jit
"""

import argparse
import itertools
import os
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workload", choices=["W1", "W2"], default="W2")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--backend", choices=["jit", "pmap"], default="jit")
args = parser.parse_args()
if args.backend == "pmap":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import workload_data as W
from fedjax.algorithms import fed_avg


def logits(x: jax.Array) -> jax.Array:
    if args.workload == "W1":
        x = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID")(x))
        x = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID")(x))
        x = hk.Flatten()(hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(x))
        x = jax.nn.relu(hk.Linear(128)(x))
    return hk.Linear(W.CLASSES[args.workload])(x)


def main() -> None:
    net = hk.transform(logits)
    x, y, offsets = W.arrays(args.workload)
    clients = [
        fedjax.ClientDataset({"x": x[a:b], "y": y[a:b]})
        for a, b in itertools.pairwise(offsets)
    ]

    def loss(params, batch, rng):
        log_p = jax.nn.log_softmax(net.apply(params, rng, batch["x"]))
        return -jnp.take_along_axis(log_p, batch["y"][:, None], 1).mean()

    algorithm = fed_avg.federated_averaging(
        jax.jit(jax.grad(loss)),
        fedjax.optimizers.sgd(W.LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(
            batch_size=W.BATCH[args.workload], num_epochs=1
        ),
    )
    state = algorithm.init(net.init(jax.random.PRNGKey(0), x[:1]))
    seconds = []
    for t, ids in enumerate(W.cohorts(args.workload, args.rounds)):
        clock = time.perf_counter()
        keys = jax.random.split(jax.random.PRNGKey(t), len(ids))
        cohort = [(int(i), clients[i], key) for i, key in zip(ids, keys, strict=True)]
        state, _ = algorithm.apply(state, cohort)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - clock)
    version = f"fedjax 0.0.17, jax {jax.__version__}"
    W.report(f"FedJAX {args.backend}", args.workload, seconds, on=version)


with fedjax.for_each_client_backend(args.backend):
    main()
