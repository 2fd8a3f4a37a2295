"""apple/pfl-research's FedAvg, one process, on the workloads of `workload_data`.

pip install torch numpy && pip install 'pfl[pytorch]==0.6.0'
PYTHONPATH=benchmarks:benchmarks/peers python benchmarks/peers/pfl_peer.py
"""

import argparse
import itertools
import time

import numpy as np
import torch
import workload_data as W
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch_loop import cross_entropy, model, tensors

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workload", choices=list(W.COHORT), default="W2")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--threads", type=int, default=2)


class Net(torch.nn.Module):
    """The workload's model with the two methods that pfl asks for."""

    def __init__(self, name: str):
        super().__init__()
        self.net = model(name)

    def loss(self, x, y):
        return cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when every round ends."""

    def __init__(self):
        self.marks: list[float] = []

    def on_train_begin(self, *, model):
        self.marks.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.marks.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clients, net, clock = tensors(args.workload), Net(args.workload), Clock()
    # One user more than the rounds need: the backend looks one ahead.
    cohorts = W.cohorts(args.workload, args.rounds)
    users = itertools.cycle(np.concatenate(cohorts))

    def user(i):
        return Dataset(raw_data=list(clients[int(i)]), user_id=str(i))

    train = FederatedDataset(user, lambda: next(users))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=W.COHORT[args.workload],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=train, val_data=train, postprocessors=[WeightByDatapoints()]
        ),
        model=PyTorchModel(
            model=net,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=W.LR,
            local_num_epochs=1,
            local_batch_size=W.BATCH[args.workload],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    seconds = list(np.diff(clock.marks))
    version = f"pfl 0.6.0, torch {torch.__version__}"
    W.report(
        f"pfl-research, {args.threads} threads", args.workload, seconds, on=version
    )


if __name__ == "__main__":
    main()
