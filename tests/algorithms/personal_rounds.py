"""What tests of personalised methods share: a population, rounds, own models."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from tests.reference import (
    Tree,
    local_sgd,
    softmax_gradient,
    softmax_loss,
    softmax_problem,
)

from fedjax_core import Algorithm, Cohort, Execution, FederatedData, Packed, plan_round
from fedjax_core.own_models import compile_own_evaluation

SIZES = [5, 1, 8, 0, 3, 6, 2, 9]
N = len(SIZES)
COHORTS = [[2, 0, 5, 7], [1, 7, 3, 4], [0, 2, 4, 5]]
EXAMPLES, OFFSETS, PARAMS = softmax_problem(SIZES)
X, Y = EXAMPLES["x"].astype(np.float64), EXAMPLES["y"]
START = {name: p.astype(np.float64) for name, p in PARAMS.items()}
KEY = jax.random.key(0)


def rounds(
    algorithm: Algorithm, cohorts=COHORTS, x: np.ndarray = EXAMPLES["x"]
) -> Iterator[tuple[Any, dict[str, Any], Cohort]]:
    """State, metrics and plan of one round after the other."""
    train = Packed(EXAMPLES | {"x": x}, OFFSETS)
    state, step = algorithm.init(PARAMS, N), jax.jit(algorithm.round)
    for t, ids in enumerate(cohorts):
        cohort = plan_round(ids, train, algorithm.work, seed=3, round=t)
        state, metrics = step(state, cohort, KEY)
        yield state, metrics, cohort


def last(algorithm: Algorithm, cohorts=COHORTS, **kwargs) -> Any:
    """The state after all rounds."""
    *_, (state, _, _) = rounds(algorithm, cohorts, **kwargs)
    return state


def assert_close(got: Any, expected: Tree, rtol: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=rtol, atol=2e-6)


def own_model(algorithm: Algorithm, state: Any, i: int) -> Any:
    """The personal model of client i."""
    assert algorithm.own_models is not None
    row = jax.tree.map(lambda x: x[i], state.clients)
    return algorithm.own_models(state, row)["personal"]


def assert_own_losses(algorithm: Algorithm, state: Any, models: list[Tree]) -> None:
    """Every client's own model is `models[i]`, and is evaluated as a loop would."""
    data = FederatedData(Packed(EXAMPLES, OFFSETS), test=Packed(EXAMPLES, OFFSETS))

    def metrics(params, batch):
        return {"loss": softmax_loss(params, batch, None)}

    assert algorithm.own_models is not None
    run = compile_own_evaluation(
        algorithm.own_models, metrics, data, ("test",), Execution()
    )
    one_seed = jax.tree.map(lambda x: x[None], state)
    scalars, per_client = run(one_seed._replace(clients=()), one_seed.clients)
    losses = []
    for i, model in enumerate(models):
        assert_close(own_model(algorithm, state, i), model)
        own = slice(OFFSETS[i], OFFSETS[i + 1])
        losses.append(softmax_gradient(model, X[own], Y[own])[0] if SIZES[i] else 0)
    got = np.asarray(per_client["test_personal_loss"][0])
    assert np.isnan(got[3])
    there = np.array(SIZES) > 0
    np.testing.assert_allclose(got[there], np.array(losses)[there], rtol=1e-4)
    np.testing.assert_allclose(
        scalars["test_personal_loss"][0], np.average(losses, weights=SIZES), rtol=1e-4
    )


def average(models: list[Tree], weights: list[float]) -> Tree:
    """The weighted mean."""
    return {k: np.average([m[k] for m in models], 0, weights) for k in models[0]}


def partial_round(
    shared: Tree, own: list[Tree], orders: dict[int, list[np.ndarray]], lr: float
) -> tuple[Tree, list[Tree]]:
    """Shared parts trained together with clients' own, and averaged by examples."""
    own, sent = list(own), []
    for i, batches in orders.items():
        local, _ = local_sgd(shared | own[i], X, Y, batches, lr)
        own[i] = {name: local[name] for name in own[i]}
        sent.append({name: local[name] for name in shared})
    return average(sent, [SIZES[i] for i in orders]), own
