"""Models with running statistics: averaged by weight, never stepped by an optimiser."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core import Execution, FederatedData, LocalWork, models, server, simulate
from fedjax_core.algorithms import (
    cfl,
    fedavg,
    feddyn,
    fednova,
    fedsgd,
    local_only,
    mimelite,
    qfedavg,
    scaffold,
)
from fedjax_core.compress.sparsifiers import top_k
from fedjax_core.metrics import Mean
from fedjax_core.transform import clip
from fedjax_core.types import Stateful

SIZES, MOMENTUM, LR = (3, 8, 5), 0.9, 0.1


class Normalised(nn.Module):
    """Batch normalisation, then an affine map; counts its steps."""

    @nn.compact
    def __call__(self, x, train: bool):
        steps = self.variable("counters", "steps", lambda: jnp.int32(0))
        if train:
            steps.value += 1
        x = nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x)
        return nn.Dense(1)(x)


def squared(outputs, batch):
    return jnp.square(outputs[:, 0] - batch["y"]) / 2


MODEL = models.from_linen(
    Normalised(), jax.ShapeDtypeStruct((2,), jnp.float32), models.Task(squared)
)


def make_data():
    rng = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(SIZES):
        x = rng.standard_normal((n, 2)).astype(np.float32) * (1 + i) + i
        clients.append({"x": x, "y": rng.standard_normal(n).astype(np.float32)})
    return FederatedData.from_lists(clients, clients)


@functools.cache
def initial():
    return jax.jit(MODEL.init)(jax.random.key(3))


def start():
    """The initial model in float64: trained parameters, then statistics."""
    params = jax.tree.map(np.float64, initial())
    norm, dense = params.params["BatchNorm_0"], params.params["Dense_0"]
    weights = {
        "scale": norm["scale"],
        "shift": norm["bias"],
        "kernel": dense["kernel"][:, 0],
        "bias": dense["bias"][0],
    }
    return weights, {"mean": np.zeros(2), "var": np.ones(2), "steps": 0.0}


def local(weights, stats, x, y, steps):
    """Steps of SGD on all of a client's examples."""
    w, s = dict(weights), dict(stats)
    for _ in range(steps):
        mean, var = x.mean(0), x.var(0)
        unit = (x - mean) / np.sqrt(var + 1e-5)
        error = (w["scale"] * unit + w["shift"]) @ w["kernel"] + w["bias"] - y
        gradient = {
            "scale": (error[:, None] * unit * w["kernel"]).mean(0),
            "shift": error.mean() * w["kernel"],
            "kernel": (error[:, None] * (w["scale"] * unit + w["shift"])).mean(0),
            "bias": error.mean(),
        }
        w = {k: w[k] - LR * gradient[k] for k in w}
        s["mean"] = MOMENTUM * s["mean"] + (1 - MOMENTUM) * mean
        s["var"] = MOMENTUM * s["var"] + (1 - MOMENTUM) * var
        s["steps"] += 1
    return w, s


def one_round(weights, stats, data, server_step, by="examples", steps=2):
    """A round in float64; `server_step` maps the mean delta to a change."""
    share = np.asarray(SIZES if by == "examples" else (1, 1, 1), float)
    share /= share.sum()
    ends = []
    for i in range(len(SIZES)):
        client = {k: v.astype(np.float64) for k, v in data.train.client(i).items()}
        ends.append(local(weights, stats, client["x"], client["y"], steps))
    ends = list(zip(share, ends, strict=True))
    delta = {k: sum(p * (w[k] - weights[k]) for p, (w, _) in ends) for k in weights}
    mean = {k: sum(p * s[k] for p, (_, s) in ends) for k in stats}
    return {k: weights[k] + server_step(delta[k]) for k in weights}, mean


def run(algorithm, data, rounds=1, **kwargs: Any):
    """Not evaluated unless told otherwise."""
    options: dict[str, Any] = {"eval_splits": ()} | kwargs
    return simulate(
        algorithm, data, MODEL, rounds=rounds, cohort_size=3, params=initial(),
        progress=False, **options,
    )  # fmt: skip


def assert_is(params, weights, stats):
    """The state of one seed is the reference's."""
    norm, dense = params.params["BatchNorm_0"], params.params["Dense_0"]
    got = (norm["scale"], norm["bias"], dense["kernel"][..., 0], dense["bias"][..., 0])
    for x, name in zip(got, ("scale", "shift", "kernel", "bias"), strict=True):
        np.testing.assert_allclose(x[0], weights[name], rtol=1e-4, atol=1e-6)
    running = params.stats["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(running["mean"][0], stats["mean"], rtol=1e-5)
    np.testing.assert_allclose(running["var"][0], stats["var"], rtol=1e-5)
    steps = params.stats["counters"]["steps"]
    assert steps.dtype == jnp.int32
    assert steps[0] == round(stats["steps"])


CONFIG: Any = {"client_lr": LR, "work": LocalWork(batch_size=8, epochs=2)}


@pytest.mark.parametrize("name", ["fedavg", "fedadam"])
def test_a_round_of_batch_normalisation_is_the_one_derived_by_hand(name):
    # Clients of 3 and 5 examples fill batches of 8 with padding.
    data, adam = make_data(), None
    change, execution = (lambda d: 0.5 * d), Execution()
    if name == "fedadam":
        adam, execution = optax.adam(0.1, eps=1e-3), Execution(block_size=2)
        change = lambda d: 0.1 * d / (np.abs(d) + 1e-3)  # its first step  # noqa: E731
    config = fedavg.Config(**CONFIG, server_lr=0.5)
    algorithm = fedavg.make(config, MODEL.loss, server_optimizer=adam)
    result = run(algorithm, data, execution=execution, eval_splits=("test",))
    weights, stats = one_round(*start(), data, change)
    assert_is(result.state.params, weights, stats)
    # Evaluation uses the running statistics.
    x, y = (data.splits["test"].examples[k].astype(np.float64) for k in "xy")
    unit = (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
    outputs = (weights["scale"] * unit + weights["shift"]) @ weights["kernel"]
    loss = np.square(outputs + weights["bias"] - y).mean() / 2
    np.testing.assert_allclose(result.final("test_loss")[0], loss, rtol=1e-4)


def test_the_first_round_of_scaffold_averages_clients_uniformly():
    data = make_data()
    config = scaffold.Config(**CONFIG, server_lr=0.5)
    result = run(scaffold.make(config, MODEL.loss), data)
    weights, stats = one_round(*start(), data, lambda d: 0.5 * d, by="uniform")
    assert_is(result.state.params, weights, stats)
    trained = jax.tree.structure(result.state.params.params)
    assert jax.tree.structure(result.state.control) == trained


FIRST_ROUNDS = {
    # Method: step along the mean delta, weights of clients, local steps.
    "fednova": (
        lambda loss: fednova.make(fednova.Config(**CONFIG), loss),
        (1.0, "examples", 2),
    ),
    "fedsgd": (
        lambda loss: fedsgd.make(fedsgd.Config(server_lr=LR, batch_size=8), loss),
        (1.0, "examples", 1),
    ),
    # From h = 0 and with everyone, h / alpha is minus the mean delta.
    "feddyn": (
        lambda loss: feddyn.make(feddyn.Config(**CONFIG, alpha=1e-5), loss),
        (2.0, "uniform", 2),
    ),
    "mimelite": (
        lambda loss: mimelite.make(mimelite.Config(**CONFIG, beta1=0.0), loss),
        (1.0, "uniform", 2),
    ),
    "cfl": (  # of one cluster
        lambda loss: cfl.make(cfl.Config(**CONFIG, eps2=1e6), loss),
        (1.0, "examples", 2),
    ),
    "qfedavg": (
        lambda loss: qfedavg.make(qfedavg.Config(**CONFIG, q=0.0), loss),
        (1.0, "uniform", 2),
    ),
}


@pytest.mark.parametrize("name", FIRST_ROUNDS)
def test_methods_average_statistics_by_their_weights(name):
    make, (server_lr, by, steps) = FIRST_ROUNDS[name]
    data = make_data()
    result = run(make(MODEL.loss), data)
    weights, stats = one_round(*start(), data, lambda d: server_lr * d, by, steps)
    assert_is(result.state.params, weights, stats)


def test_local_training_keeps_the_statistics_of_each_client():
    data = make_data()
    config = local_only.Config(**CONFIG)
    result = run(local_only.make(config, MODEL.loss), data)
    for i in range(len(SIZES)):
        client = {k: v.astype(np.float64) for k, v in data.train.client(i).items()}
        expected = local(*start(), client["x"], client["y"], 2)
        assert_is(
            jax.tree.map(lambda x, i=i: x[:, i], result.state.clients[0]), *expected
        )


def test_statistics_pass_beside_compression_and_not_past_clipping():
    data, config = make_data(), fedavg.Config(**CONFIG)
    algorithm = fedavg.make(config, MODEL.loss, transform=top_k(0.5))
    result = run(algorithm, data)
    _, stats = one_round(*start(), data, lambda d: d)
    running = result.state.params.stats["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(running["var"][0], stats["var"], rtol=1e-5)
    # 3 of 7 coordinates with 3 bits of address; 5 statistics of 32 bits.
    expected = 3 * (3 * (32 + 3) + 5 * 32) / 8
    np.testing.assert_allclose(result.train["uplink_bytes"], [[expected]])
    both_ways = fedavg.make(config, MODEL.loss, transform=top_k(0.5), downlink=top_k(1))
    result = run(both_ways, data)
    np.testing.assert_allclose(result.train["uplink_bytes"], [[expected]])
    received = 3 * (7 * 32 + 5 * 32) / 8  # whoever gets all needs no address
    np.testing.assert_allclose(result.train["downlink_bytes"], [[received]])
    with pytest.raises(ValueError, match=r"statistics pass, got clip\(1.0\)"):
        run(fedavg.make(config, MODEL.loss, transform=clip(1.0)), data)


@functools.partial(jax.jit, static_argnums=0)
def step(optimizer, params, state, update):
    direction, state = server.direction(optimizer, params, state, update)
    return server.move(params, direction, update), state


def test_the_server_averages_statistics_and_rounds_counters():
    old = {"var": jnp.float32([2.0, 1e-3]), "count": jnp.int32(7)}
    params = Stateful({"w": jnp.float32(1)}, old)
    adam = optax.adam(0.1)
    state = server.init(adam, params)
    # Sums of three clients with weights 1, 2 and 4, one variance 0 at all of them.
    sums: Any = {"var": jnp.float32([9, 0]), "count": jnp.float32(8 + 18 + 44)}
    update = Stateful({"w": jnp.float32(0.5)}, Mean(sums, jnp.float32(7)))
    new, state = step(adam, params, state, update)
    np.testing.assert_allclose(new.stats["var"], [9 / 7, 0], rtol=1e-6)
    assert (new.stats["count"], new.stats["count"].dtype) == (10, jnp.int32)
    np.testing.assert_allclose(new.params["w"], 1.1, rtol=1e-5)
    nobody = jax.tree.map(jnp.zeros_like, update)
    kept, _ = step(adam, new, state, nobody)
    jax.tree.map(np.testing.assert_array_equal, kept.stats, new.stats)


def test_moments_are_float32_at_least():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    state = server.init(optax.adam(0.1), params)
    new, _ = step(optax.adam(0.1), params, state, {"w": jnp.ones(2)})
    assert {x.dtype for x in jax.tree.leaves(state[0].mu)} == {jnp.dtype(jnp.float32)}
    assert new["w"].dtype == jnp.bfloat16
