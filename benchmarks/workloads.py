"""The benchmark workloads for fedjax_core; see `workload_data`."""

import argparse
from typing import Any

import jax
import numpy as np
from workload_data import BATCH, CLASSES, LENGTH, LR, arrays

from fedjax_core import (
    Execution,
    FederatedData,
    LocalWork,
    Model,
    Packed,
    client_mesh,
    models,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.models import language_model


def data(name: str) -> FederatedData:
    """The population of a workload."""
    x, y, offsets = arrays(name)
    return FederatedData(Packed({"x": x, "y": y}, offsets))


def model(name: str) -> Model:
    """The workload's model."""
    if name == "W1":
        return models.emnist_cnn(CLASSES[name])
    if name == "W2":
        return models.logistic_regression(784, CLASSES[name])
    # Its texts have no padding: every target counts, as for the peers.
    return language_model(models.CharLSTM(CLASSES[name]), LENGTH, pad=-1)


def algorithm(name: str) -> Any:
    """FedAvg as every workload runs it."""
    config = fedavg.Config(client_lr=LR, work=LocalWork(batch_size=BATCH[name]))
    return fedavg.make(config, model(name).loss)


class FixedCohorts:
    """A participation that replays given cohorts."""

    def __init__(self, ids: list[np.ndarray]):
        self.ids = ids

    def draw(self, seed: int, round: int, num_clients: int) -> np.ndarray:
        del seed, num_clients
        return self.ids[round]

    def max_cohort_size(self, num_clients: int) -> int:
        del num_clients
        return max(map(len, self.ids))

    def expected_cohort_size(self, num_clients: int) -> float:
        del num_clients
        return float(np.mean([len(ids) for ids in self.ids]))


def execution_from(args: argparse.Namespace) -> Execution:
    """The execution that the options --devices and --block ask for."""
    return Execution(
        block_size=args.block,
        mesh=client_mesh(jax.devices()[: args.devices]),
    )
