"""Sweeps how a cohort runs on an accelerator: clients per block, lowering.

Runs W1, W2, W3 and the CIFAR-10 job through `simulate`, one JSON line per setting; the
first line of a job is what `choose_execution` picks. What it finds decides the defaults
for accelerators (docs/performance.md).

    python benchmarks/accelerator.py --jobs cifar10 W1 W2
"""

import argparse
import json
import time

import cifar10_iid
import jax
import workload_data
import workloads

from fedjax_core import (
    Algorithm,
    Execution,
    FederatedData,
    LocalWork,
    Model,
    client_mesh,
    models,
    simulate,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.execution import choose_execution
from fedjax_core.models.layers import Lowering

SETTINGS: dict[str, dict[Lowering, tuple[int, ...]]] = {  # clients per block
    "cifar10": {"patches": (10, 25, 50), "lax": (50,)},
    "W1": {"patches": (8, 13, 25, 50), "lax": (25,)},
    "W2": {"auto": (63, 125, 250, 500, 1000)},
    "W3": {"auto": (1, 5, 10)},
}
ROUNDS = {"cifar10": 60, "W1": 40, "W2": 120, "W3": 15}


def population(name: str) -> tuple[FederatedData, int]:
    """Data and cohort size of a job."""
    if name == "cifar10":
        return cifar10_iid.data(), 50
    return workloads.data(name), workload_data.COHORT[name]


def method(name: str, lowering: Lowering) -> tuple[Model, Algorithm]:
    """Model and algorithm of a job."""
    if name == "cifar10":
        model = models.cifar_cnn(lowering=lowering)
        config = fedavg.Config(work=LocalWork(batch_size=10), client_lr=0.1)
        return model, fedavg.make(config, model.loss)
    model = workloads.model(name)
    if name == "W1":
        model = models.emnist_cnn(workload_data.CLASSES[name], lowering=lowering)
    config = fedavg.Config(
        client_lr=workload_data.LR, work=LocalWork(batch_size=workload_data.BATCH[name])
    )
    return model, fedavg.make(config, model.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", default=list(SETTINGS))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds in all")
    args = parser.parse_args()
    start = time.perf_counter()
    for name in args.jobs:
        data, cohort_size = population(name)
        model, algorithm = method(name, "auto")
        chosen = choose_execution(model, data.train, algorithm.work, cohort_size)
        settings: list[tuple[Lowering, int]] = [("auto", chosen.block_size)]
        for lowering, blocks in SETTINGS[name].items():
            settings.extend((lowering, block) for block in blocks)
        for lowering, block in settings:
            if time.perf_counter() - start > args.limit:
                return
            model, algorithm = method(name, lowering)
            result = simulate(
                algorithm,
                data,
                model,
                rounds=ROUNDS[name],
                cohort_size=cohort_size,
                eval_every=ROUNDS[name],
                eval_splits=(),
                execution=Execution(block_size=block, mesh=client_mesh()),
                progress=False,
            )
            line = {
                "benchmark": name,
                "device": jax.devices()[0].device_kind,
                "lowering": lowering,
                "block": block,
                "rounds_per_s": round(result.rounds_per_second, 2),
                "compile_s": round(result.compile_seconds, 1),
                "train_loss": round(float(result.train["train_loss"][0, -1]), 4),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
