"""FedAvg as a loop in PyTorch, on the workloads of `workload_data`.

pip install torch numpy
PYTHONPATH=benchmarks python benchmarks/peers/torch_loop.py --workload W2
"""

import argparse
import copy
import itertools
import time

import torch
import torch.nn.functional as F
import workload_data as W
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workload", choices=list(W.COHORT), default="W2")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--threads", type=int, default=2)


class CharLSTM(nn.Module):
    """The next of 90 characters at every position."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(W.CLASSES["W3"], 8)
        self.lstm = nn.LSTM(8, 256, 2, batch_first=True)
        self.dense = nn.Linear(256, W.CLASSES["W3"])

    def forward(self, x):
        return self.dense(self.lstm(self.embedding(x))[0])


def model(name: str) -> nn.Module:
    if name == "W2":
        return nn.Linear(784, W.CLASSES[name])
    if name == "W3":
        return CharLSTM()
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, W.CLASSES[name]),
    )


def cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def tensors(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Examples and targets of every client."""
    x, y, offsets = W.arrays(name)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y).long()
    if name == "W3":
        tx = tx.long()
    if name == "W1":
        tx = tx.permute(0, 3, 1, 2).contiguous()
    return [(tx[a:b], ty[a:b]) for a, b in itertools.pairwise(offsets)]


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clients, server = tensors(args.workload), model(args.workload)
    seconds = []
    for ids in W.cohorts(args.workload, args.rounds):
        clock = time.perf_counter()
        mean = [torch.zeros_like(p) for p in server.parameters()]
        total = sum(len(clients[i][1]) for i in ids)
        for i in ids:
            x, y = clients[i]
            local = copy.deepcopy(server)
            sgd = torch.optim.SGD(local.parameters(), lr=W.LR)
            for batch in torch.randperm(len(y)).split(W.BATCH[args.workload]):
                sgd.zero_grad()
                cross_entropy(local(x[batch]), y[batch]).backward()
                sgd.step()
            with torch.no_grad():
                for m, p in zip(mean, local.parameters(), strict=True):
                    m.add_(p, alpha=len(y) / total)
        with torch.no_grad():
            for p, m in zip(server.parameters(), mean, strict=True):
                p.copy_(m)
        seconds.append(time.perf_counter() - clock)
    version = f"torch {torch.__version__}"
    W.report(
        f"PyTorch loop, {args.threads} threads", args.workload, seconds, on=version
    )


if __name__ == "__main__":
    main()
