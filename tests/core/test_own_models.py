"""Clients' own models: each evaluated on its client's examples, wherever they live."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import Execution, FederatedData, Packed, client_mesh, models, simulate
from fedjax_core import own_models as own_models_lib
from fedjax_core.algorithms import fedavg
from fedjax_core.evaluate import compile_evaluation
from fedjax_core.metrics import AUROC, Mean, gini
from fedjax_core.own_models import compile_own_evaluation

SIZES = (3, 0, 1, 7, 2, 0, 5, 9, 4, 4, 1)
NUM_CLIENTS, SEEDS = len(SIZES), 2


class State(NamedTuple):
    params: Any
    clients: Any


def metrics_fn(params, batch):
    score = batch["x"] @ params["w"]
    return {
        "score": score,
        "above": Mean((score > 0) * batch["weight"], batch["weight"]),
        "auroc": AUROC.per_example(score, batch["y"], bins=64),
    }


def score_only(params, batch):
    return {"score": batch["x"] @ params["w"]}


def own_models(state, row):
    """The shared model, and one scaled by the client's row."""
    own = {"w": row["scale"] * state.params["w"] + row["shift"]}
    return {"shared": state.params, "own": own}


@pytest.fixture(scope="module")
def data():
    rng, n = np.random.default_rng(0), sum(SIZES)
    examples = {
        "x": rng.standard_normal((n, 3)).astype(np.float32),
        "y": rng.integers(0, 2, n).astype(np.int32),
        "weight": rng.integers(0, 3, n).astype(np.float32),
    }
    packed = Packed(examples, np.concatenate([[0], np.cumsum(SIZES)]))
    return FederatedData(packed, test=packed)


@pytest.fixture(scope="module")
def state():
    rng = np.random.default_rng(1)
    rows = {
        "scale": rng.standard_normal((SEEDS, NUM_CLIENTS)).astype(np.float32),
        "shift": rng.standard_normal((SEEDS, NUM_CLIENTS, 3)).astype(np.float32),
    }
    params = {"w": rng.standard_normal((SEEDS, 3)).astype(np.float32)}
    return State(params, rows)


def reference(data, state, seed):
    """Scores under own models client by client in float64: per client, and pooled."""
    means, everything = [], []
    for i in range(NUM_CLIENTS):
        scale, shift = (state.clients[k][seed, i] for k in ("scale", "shift"))
        w = scale.astype(np.float64) * state.params["w"][seed] + shift
        score = data.test.client(i)["x"] @ w
        everything.append(score)
        means.append(score.mean() if len(score) else np.nan)
    return np.array(means), np.concatenate(everything).mean()


@pytest.fixture(scope="module")
def shared(data, state):
    summaries = {"gini": gini}
    run = compile_evaluation(metrics_fn, data, ("test",), client_summaries=summaries)
    return run(state.params)


def run_own(data, state, rows_on_host=False, execution=None, **how):
    run = compile_own_evaluation(
        own_models,
        metrics_fn,
        data,
        ("test", "validation"),
        execution or Execution(),
        rows_on_host=rows_on_host,
        client_summaries={"gini": gini},
        **how,
    )
    rows = state.clients if rows_on_host else jax.tree.map(jnp.asarray, state.clients)
    return run(state._replace(clients=()), rows)


PLACES = [
    (1, 1, False, False),
    (4, 1, True, False),
    (1, 4, False, True),
    (4, 4, True, True),
]


@pytest.mark.parametrize(("block_size", "devices", "on_host", "rows_on_host"), PLACES)
def test_every_client_is_evaluated_under_its_own_models(
    data, state, shared, block_size, devices, on_host, rows_on_host, monkeypatch
):
    monkeypatch.setattr(own_models_lib, "_GROUP", 4)
    execution = Execution(
        block_size=block_size, mesh=client_mesh(jax.devices()[:devices])
    )
    scalars, per_client = run_own(data, state, rows_on_host, execution, on_host=on_host)
    for seed in range(SEEDS):
        means, pooled = reference(data, state, seed)
        np.testing.assert_allclose(per_client["test_own_score"][seed], means, 1e-4)
        np.testing.assert_allclose(scalars["test_own_score"][seed], pooled, 1e-4)
        np.testing.assert_allclose(
            scalars["test_own_score_client_mean"][seed], np.nanmean(means), 1e-4
        )
        np.testing.assert_allclose(
            scalars["test_own_score_client_p10"][seed], np.nanquantile(means, 0.1), 1e-4
        )
    # A model that all clients share is evaluated as it is elsewhere.
    for mine, everyones in zip((scalars, per_client), shared, strict=True):
        assert len(mine) == 2 * len(everyones)
        for name, expected in everyones.items():
            got = mine[name.replace("test_", "test_shared_")]
            np.testing.assert_allclose(got, expected, 1e-5, 1e-6, err_msg=name)


def test_clients_may_have_no_row(data, state, shared):
    run = compile_own_evaluation(
        lambda state, row: {"own": state.params}, score_only, data, ("test",),
        Execution(),
    )  # fmt: skip
    scalars, _ = run(state._replace(clients=()), ())
    np.testing.assert_allclose(
        scalars["test_own_score"], shared[0]["test_score"], rtol=1e-5
    )


def test_a_diverged_model_shows_and_leaves_the_others_alone(data, state):
    broken = state._replace(clients=jax.tree.map(np.copy, state.clients))
    broken.clients["shift"][0, 3] = np.nan
    scalars, per_client = run_own(data, broken)
    score = per_client["test_own_score"]
    assert np.isnan(score[0, 3])
    np.testing.assert_array_equal(
        np.isnan(score[1]), np.array(SIZES) == 0
    )  # another seed
    assert np.isnan(score[0]).sum() == 1 + np.isnan(score[1]).sum()
    for suffix in ("", "_client_mean", "_client_p10"):
        assert np.isnan(scalars["test_own_score" + suffix][0])
        assert np.isfinite(scalars["test_own_score" + suffix][1])


def test_models_are_made_one_client_at_a_time(data):
    size = 2**18  # 1 MB for each client

    def scores(params, batch):
        return {"score": batch["x"] @ params["w"][:3]}

    sums = own_models_lib._OwnSums(
        lambda state, row: {"own": {"w": state.params["w"] * row}},
        scores,
        data.test,
        Execution(),
        on_host=False,
        rows_on_host=False,
    )
    states = State({"w": jnp.ones((SEEDS, size))}, ())
    rows = jnp.ones((SEEDS, NUM_CLIENTS, size))
    (cohort,) = sums._cohorts  # type: ignore
    program = sums._sums.lower(states, rows, jnp.arange(NUM_CLIENTS), cohort).compile()
    memory: Any = program.memory_analysis()
    assert memory.temp_size_in_bytes < NUM_CLIENTS / 2 * 4 * size


def test_one_program_serves_all_groups_and_evaluations(data, state, monkeypatch):
    monkeypatch.setattr(own_models_lib, "_GROUP", 3)
    traces = []

    def own(state, row):
        traces.append(1)
        return own_models(state, row)

    run = compile_own_evaluation(
        own, score_only, data, ("test",), Execution(), rows_on_host=True
    )
    run(state._replace(clients=()), state.clients)
    first = len(traces)
    run(state._replace(clients=()), state.clients)
    assert len(traces) == first <= 4  # shapes, then the program itself


class Personal(NamedTuple):
    """FedAvg's state, and how often each client took part."""

    params: Any
    server: Any
    clients: Any


def personal(model):
    base = fedavg.make(fedavg.Config(), model.loss)

    def init(params, num_clients):
        return Personal(params, base.init(params, num_clients), jnp.zeros(num_clients))

    def round(state, cohort, key):
        server, metrics = base.round(state.server, cohort, key)
        seen = state.clients.at[cohort.state_row].add(1, mode="drop")
        return Personal(server.params, server, seen), metrics

    def own(state, row):
        scaled = jax.tree.map(lambda x: row * x, state.params)
        return {"same": state.params, "scaled": scaled}

    return dataclasses.replace(base, init=init, round=round, own_models=own)


@pytest.mark.parametrize("place", ["device", "host"])
def test_simulate_evaluates_own_models(place):
    rng = np.random.default_rng(2)

    def client(n):
        y = rng.integers(0, 2, n).astype(np.int32)
        return {"x": rng.normal(y[:, None], 1, (n, 2)).astype(np.float32), "y": y}

    test = [client(n) for n in (3, 0, 5, 2, 6)]
    clients = FederatedData.from_lists([client(8) for _ in range(5)], test)
    model = models.logistic_regression(2, 2)
    result = simulate(
        personal(model), clients, model, rounds=2, cohort_size=2, seeds=(0, 1),
        eval_every=2, progress=False, feed=place, client_store=place,
        client_summaries={"gini": gini}, execution=Execution(),
    )  # fmt: skip
    for name in ("accuracy", "loss", "accuracy_client_mean", "accuracy_gini"):
        np.testing.assert_allclose(
            result.evaluations[f"test_same_{name}"],
            result.evaluations[f"test_{name}"],
            rtol=1e-5,
        )
    assert np.asarray(result.state.clients).sum() == 8
    loss = result.client_metrics["test_scaled_loss"]
    losses = jax.jit(lambda params, batch: model.metrics(params, batch)["loss"])
    for seed, i in np.ndindex(2, 5):
        row = result.state.clients[seed, i]
        scaled = jax.tree.map(lambda x, s=seed, r=row: r * x[s], result.params)
        if len(test[i]["y"]):
            expected = losses(scaled, test[i]).mean()
            np.testing.assert_allclose(loss[seed, i], expected, rtol=1e-5)
        else:
            assert np.isnan(loss[seed, i])
