"""Methods in turn on random images: what benchmarks against FedAvg share."""

import argparse
import statistics
from collections.abc import Mapping

import jax
import numpy as np

from fedjax_core import (
    Algorithm,
    Execution,
    FederatedData,
    Packed,
    Result,
    client_mesh,
    simulate,
)
from fedjax_core.models.model import Model


def arguments(doc: str | None, **defaults: int) -> argparse.ArgumentParser:
    """A parser of numbers that all of these benchmarks have, and of more."""
    parser = argparse.ArgumentParser(description=doc)
    common = {"clients": 50, "cohort": 10, "rounds": 4, "devices": 2, "repeats": 5}
    for name, number in (common | defaults).items():
        parser.add_argument(f"--{name}", type=int, default=number)
    return parser


def images(clients: int, shape=(784,), classes=10, train=100, test=0) -> FederatedData:
    """Random images, as many for each client."""
    rng = np.random.default_rng(0)

    def split(each):
        n = each * clients
        examples = {
            "x": rng.standard_normal((n, *shape), np.float32),
            "y": rng.integers(0, classes, n).astype(np.int32),
        }
        return Packed(examples, np.arange(clients + 1) * each)

    return FederatedData(split(train), test=split(test) if test else None)


def timed(
    method: Algorithm,
    data: FederatedData,
    model: Model,
    args: argparse.Namespace,
    seeds: int = 1,
) -> tuple[float, Result]:
    """Seconds a round of all seeds, without compiling, and the run."""
    result = simulate(
        method,
        data,
        model,
        rounds=args.rounds,
        cohort_size=args.cohort,
        seeds=range(seeds),
        eval_every=args.rounds,
        eval_splits=(),
        progress=False,
        execution=Execution(mesh=client_mesh(jax.devices()[: args.devices])),
    )
    return result.seconds / result.timed_rounds, result


def against_fedavg(
    methods: Mapping[str, Algorithm],
    data: FederatedData,
    model: Model,
    args: argparse.Namespace,
) -> tuple[dict[str, float], float, Result]:
    """Runs "fedavg" and one other method in turn.

    Returns:
      Medians and their ratio by name, the fastest round of the other and its last run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    result = None
    for _ in range(args.repeats):
        for name, method in methods.items():
            taken, result = timed(method, data, model, args)
            seconds[name].append(taken)
    assert result is not None
    base, other = seconds.values()
    line = {f"{n}_s": round(statistics.median(s), 4) for n, s in seconds.items()}
    line["over_fedavg"] = round(statistics.median(other) / statistics.median(base), 3)
    # Beside busy neighbours the fastest tells more than the median.
    line["fastest_over_fedavg"] = round(min(other) / min(base), 3)
    return line, min(other), result
