"""Clients whose labels disagree by cluster, and Algorithm 11 on them in NumPy."""

import itertools
from typing import Any

import jax
import numpy as np
from tests.reference import Tree, local_sgd, visits

from fedjax_core import LocalWork, Packed, plan_round

SIZES = [12, 9, 14, 0, 10, 12, 8, 15, 11]
TRUTH = np.array([0, 1, 2, 0, 0, 1, 1, 2, 0])  # client 3 has no examples
N, EVERYONE = len(SIZES), [0, 1, 2, 4, 5, 6, 7, 8]
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
WORK, LR = LocalWork(batch_size=16, epochs=2), 0.3
KEY = jax.random.key(0)  # a softmax regression draws nothing


def _examples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(OFFSETS[-1], 3)).astype(np.float32)
    names = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]])  # what clusters call classes
    y = names[np.repeat(TRUTH, SIZES), (x @ rng.normal(size=(3, 3))).argmax(1)]
    return {"x": x, "y": y.astype(np.int32)}


EXAMPLES = _examples()
TRAIN = Packed(EXAMPLES, OFFSETS)
PARAMS = {"w": np.zeros((3, 3), np.float32), "b": np.zeros(3, np.float32)}


def plans(ids_by_round, train=TRAIN) -> list[Any]:
    """The cohorts of rounds 0, 1, ..., with a server that knows the truth."""
    public = {"cluster": TRUTH.astype(np.int32)}
    return [
        plan_round(ids, train, WORK, seed=3, round=t, public=public)
        for t, ids in enumerate(ids_by_round)
    ]


def flat(update: Tree) -> np.ndarray:
    """All coordinates of a model."""
    return np.concatenate([update["b"].ravel(), update["w"].ravel()])


def best_cut(updates: np.ndarray) -> tuple[np.ndarray, float]:
    """By brute force: the second part and the largest cosine across."""
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    S, best = unit @ unit.T, (np.zeros(len(unit), bool), np.inf)
    for choice in itertools.product([False, True], repeat=len(unit) - 1):
        part = np.array([False, *choice])
        if part.any() and S[np.ix_(~part, part)].max() < best[1]:
            best = part, S[np.ix_(~part, part)].max()
    return best


def learn(
    theta: Tree, members: list[int], orders: list, born: int, config: Any
) -> list[tuple[int, list[int], Tree]]:
    """Algorithm 11: leaves as (round since when, members, model), first parts first."""
    x, y = EXAMPLES["x"].astype(np.float64), EXAMPLES["y"]

    def step(theta, deltas, some):
        w = np.array([SIZES[i] if config.weights == "examples" else 1 for i in some])
        mean = {
            k: np.tensordot(w / w.sum(), [deltas[i][k] for i in some], 1) for k in theta
        }
        return mean, {k: theta[k] + mean[k] for k in theta}

    for t in range(born, len(orders)):
        deltas = {}
        for i in members:
            local, _ = local_sgd(theta, x, y, orders[t][i], config.client_lr)
            deltas[i] = {k: local[k] - theta[k] for k in theta}
        updates = np.stack([flat(deltas[i]) for i in members])
        mean, moved = step(theta, deltas, members)
        if len(members) > 1:
            part, cross = best_cut(updates)
            if (
                np.linalg.norm(flat(mean)) < config.eps1
                and np.linalg.norm(updates, axis=1).max() >= config.eps2
                and np.sqrt((1 - cross) / 2) > config.gamma_max
            ):
                leaves = []
                for side in (~part, part):
                    some = [i for i, s in zip(members, side, strict=True) if s]
                    after = step(theta, deltas, some)[1]
                    leaves += learn(after, some, orders, t + 1, config)
                return leaves
        theta = moved
    return [(born, members, theta)]


def orders_of(cohorts) -> list[dict]:
    """Batches that each client sees in each round."""
    return [visits(cohort) for cohort in cohorts]
