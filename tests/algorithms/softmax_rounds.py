"""A small population with a softmax regression, and rounds of a method on it."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from tests.reference import local_sgd, softmax_problem, visits

from fedjax_core import Packed, plan_round

SIZES = [5, 1, 8, 0, 3, 6, 2, 9]
N = len(SIZES)
COHORTS = [[2, 0, 5, 7], [1, 7, 3, 4], [0, 2, 4, 5], [6, 7, 1, 2]]
EVERYONE = [0, 1, 2, 4, 5, 6, 7]  # client 3 has no examples
EXAMPLES, OFFSETS, PARAMS = softmax_problem(SIZES)
TRAIN = Packed(EXAMPLES, OFFSETS)
X, Y = EXAMPLES["x"].astype(np.float64), EXAMPLES["y"]
START = {name: p.astype(np.float64) for name, p in PARAMS.items()}
ZEROS = {name: np.zeros_like(p) for name, p in START.items()}
MODEL_BYTES = 4 * 12
KEY = jax.random.key(0)  # a softmax regression draws nothing


def broken(client: int) -> Packed:
    """The population with a NaN among the examples of one client."""
    x = EXAMPLES["x"].copy()
    x[OFFSETS[client]] = np.nan
    return Packed(EXAMPLES | {"x": x}, OFFSETS)


def own_rows(client: int) -> np.ndarray:
    """The examples of a client."""
    return np.arange(OFFSETS[client], OFFSETS[client + 1])


def rounds(
    algorithm, cohorts=COHORTS, train=TRAIN, params=PARAMS, public=None
) -> Iterator[tuple[Any, dict, Any]]:
    """Yields the state and the metrics after every round, and its plan."""
    state = algorithm.init(params, train.num_clients)
    step = jax.jit(algorithm.round)
    for t, ids in enumerate(cohorts):
        cohort = plan_round(ids, train, algorithm.work, seed=3, round=t, public=public)
        state, metrics = step(state, cohort, KEY)
        yield state, metrics, cohort


def with_and_without(algorithm, client=2, others=(0, 5)) -> list[tuple[Any, dict]]:
    """A round in which a client has a NaN, and one that it has no part in."""
    step, out = jax.jit(algorithm.round), []
    for ids, train in (([client, *others], broken(client)), ([3, *others], TRAIN)):
        cohort = plan_round(ids, train, algorithm.work, seed=3, round=0)
        out.append(step(algorithm.init(PARAMS, N), cohort, KEY))
    return out


def last(algorithm, cohorts=COHORTS, train=TRAIN) -> Any:
    """The state after the rounds."""
    *_, (state, _, _) = rounds(algorithm, cohorts, train)
    return state


def deltas(params, cohort, lr, **how) -> dict[int, dict[str, np.ndarray]]:
    """How far local SGD in float64 takes each client of a plan."""
    out = {}
    for i, batches in visits(cohort).items():
        local, _ = local_sgd(params, X, Y, batches, lr, **how)
        out[i] = {name: local[name] - params[name] for name in params}
    return out


def combined(weights: dict[int, float], updates: dict[int, dict]) -> dict:
    """The weighted sum of the clients' updates."""
    return {
        name: np.sum([weights[i] * updates[i][name] for i in updates], axis=0)
        for name in START
    }


def moved(params: dict, step: dict, lr: float = 1.0) -> dict:
    """Parameters after a step."""
    return {name: params[name] + lr * step[name] for name in params}


def shares(ids, by="examples") -> dict[int, float]:
    """The weights of a mean over clients."""
    weight = {i: float(SIZES[i]) if by == "examples" else 1.0 for i in ids}
    total = sum(weight.values())
    return {i: w / total for i, w in weight.items()}


def assert_close(got, expected, rtol=1e-5, atol=2e-6) -> None:
    """Compares two models."""
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=rtol, atol=atol)
