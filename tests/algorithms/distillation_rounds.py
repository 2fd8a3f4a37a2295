"""Distillation of a softmax regression in NumPy, float64, on the small population."""

import math
from typing import Any

import numpy as np
from tests.algorithms.softmax_rounds import START, deltas

from fedjax_core import LocalWork

RNG = np.random.default_rng(1)
N_PUBLIC, K = 12, 3
PUBLIC = {"x": RNG.normal(size=(N_PUBLIC, 3)).astype(np.float32)}
X_PUBLIC = PUBLIC["x"].astype(np.float64)
# Batches of everything: then the order is of no account.
PUBLIC_WORK = LocalWork(batch_size=N_PUBLIC, epochs=3)
COMMON: dict[str, Any] = {
    "num_classes": K,
    "client_lr": 0.3,
    "work": LocalWork(batch_size=4),
    "public_work": PUBLIC_WORK,
}
DISTIL_LR = 0.5


def softmax(z):
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def logits(params, x=X_PUBLIC):
    return x @ params["w"] + params["b"]


def says(params, x=X_PUBLIC):
    return softmax(logits(params, x))


def clients(params, cohort, lr=0.3) -> dict[int, dict[str, np.ndarray]]:
    """The models of the cohort after local training."""
    moves = deltas(params, cohort, lr)
    return {i: {k: params[k] + moves[i][k] for k in START} for i in moves}


def learn(params, labels, x=X_PUBLIC, steps=3, lr=DISTIL_LR):
    """Gradient descent on the cross-entropy to soft labels."""
    for _ in range(steps):
        error = (says(params, x) - labels) / len(x)
        gradient = {"w": x.T @ error, "b": error.sum(0)}
        params = {name: params[name] - lr * gradient[name] for name in params}
    return params


def entropy(symbols) -> int:
    """Bits of all symbols under their empirical distribution, whole ones."""
    share = np.unique(symbols, return_counts=True)[1] / len(symbols)
    return math.ceil(-len(symbols) * (share * np.log2(share)).sum() - 1e-3)
