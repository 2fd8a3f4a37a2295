"""The CIFAR-10 job of pfl-research's framework comparison, in shape.

1,000 clients of 50 images, cohorts of 50, one local epoch of batches of 10 at 0.1, a
CNN of 1,626,442 parameters, 1,500 rounds. Images are noise labelled by a random linear
teacher: the job measures speed. Meant for an accelerator, where the block size comes
from memory; on CPU pass fewer rounds.

    python benchmarks/cifar10_iid.py
    python benchmarks/cifar10_iid.py --rounds 5 --eval-every 5       # on CPU
    python benchmarks/cifar10_iid.py --block 10 25 50                # sweep

References:
  Granqvist et al., "pfl-research: simulation framework for accelerating research in
  Private Federated Learning", NeurIPS 2024, Table 1.
"""

import argparse
import dataclasses
import json

import jax
import numpy as np

from fedjax_core import FederatedData, LocalWork, Packed, models, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.execution import choose_execution

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=1500)
parser.add_argument("--eval-every", type=int, default=10, help="0: at the end only")
parser.add_argument("--block", type=int, nargs="+", help="block sizes to sweep")
parser.add_argument("--lowering", default="auto", help="auto, patches or lax")


def data() -> FederatedData:
    """1,000 clients of 50 train and 10 test images."""
    rng = np.random.default_rng(0)
    teacher = rng.standard_normal((3072, 10)).astype(np.float32)

    def images(n):
        x = rng.random((n, 32, 32, 3), dtype=np.float32)
        y = np.argmax((x.reshape(n, -1) - 0.5) @ teacher, 1).astype(np.int32)
        return {"x": x, "y": y}

    return FederatedData(
        train=Packed(images(50_000), np.arange(1001) * 50),
        test=Packed(images(10_000), np.arange(1001) * 10),
    )


def main() -> None:
    args = parser.parse_args()
    population = data()
    model = models.cifar_cnn(lowering=args.lowering)
    algorithm = fedavg.make(
        fedavg.Config(work=LocalWork(batch_size=10), client_lr=0.1), model.loss
    )
    chosen = choose_execution(model, population.train, algorithm.work, 50)
    for block in args.block or [chosen.block_size]:
        how = dataclasses.replace(chosen, block_size=block)
        result = simulate(
            algorithm,
            population,
            model,
            rounds=args.rounds,
            cohort_size=50,
            eval_every=args.eval_every or args.rounds,
            execution=how,
            progress=False,
        )
        blocks = -(-50 // (block * how.num_devices)) * how.num_devices
        line = {
            "benchmark": "cifar10_iid",
            "device": jax.devices()[0].device_kind,
            "devices": how.num_devices,
            "block": block,
            "rounds": args.rounds,
            "rounds_s": round(result.seconds, 2),
            "rounds_per_s": round(result.rounds_per_second, 3),
            "compile_s": round(result.compile_seconds, 2),
            "padding": round(blocks * block / 50, 3),
            "test_accuracy": round(result.final("test_accuracy")[0], 4),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
