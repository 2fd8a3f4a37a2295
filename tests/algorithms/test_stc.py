"""STC against the thesis in NumPy, its conservation law, and what downloads cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from tests.algorithms.softmax_rounds import (
    COHORTS,
    KEY,
    MODEL_BYTES,
    PARAMS,
    START,
    TRAIN,
    N,
    X,
    Y,
    deltas,
    last,
    rounds,
)
from tests.reference import softmax_gradient, softmax_loss, visits

from fedjax_core import (
    Execution,
    FederatedData,
    LocalWork,
    Model,
    client_mesh,
    plan_round,
    simulate,
)
from fedjax_core.algorithms import fedavg, stc
from fedjax_core.compress import coders, golomb, sbc, top_k
from fedjax_core.compress import stc as ternary
from fedjax_core.compress.caching import every_message, with_cache
from fedjax_core.metrics import Bits
from fedjax_core.transform import identity
from fedjax_core.types import Stateful

D, K = 12, 3
CONFIG = stc.Config(
    client_lr=0.3, sparsity_up=4, sparsity_down=4, work=LocalWork(batch_size=4, steps=1)
)


def flat(params):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


def tree(vector):
    return {"b": vector[:3], "w": vector[3:].reshape(3, 3)}


def compressed(v):
    """The message in float64 and the bits of its code."""
    positions = np.sort(np.argsort(-np.abs(v), kind="stable")[:K])
    out = np.zeros(D)
    out[positions] = np.abs(v[positions]).mean() * np.sign(v[positions])
    b = golomb.parameter(K / D)
    return out, len(golomb.encode(positions, D, b)) + K + 32


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_rounds_match_the_thesis(momentum):
    config = dataclasses.replace(CONFIG, momentum=momentum, tau_max=2)
    w, server = flat(START), np.zeros(D)
    residuals, velocities = np.zeros((N, D)), np.zeros((N, D))
    sizes, synced = [], np.zeros(N, int)
    cohorts = [*COHORTS, [0, 7, 4, 1], [2, 5, 6, 0]]
    for state, metrics, cohort in rounds(stc.make(config, softmax_loss), cohorts):
        sent, up, down = [], 0, 0
        for i, (batch,) in visits(cohort).items():
            missed = sizes[synced[i] :]
            down += 32 * D if len(missed) > 2 else min(32 * D, sum(missed))
            synced[i] = len(sizes)
            gradient = flat(softmax_gradient(tree(w), X[batch], Y[batch])[1])
            velocities[i] = (momentum or 0) * velocities[i] + gradient
            v = residuals[i] - 0.3 * velocities[i]
            message, bits = compressed(v)
            residuals[i] = v - message
            sent.append(message)
            up += bits
        v = server + np.mean(sent, axis=0)
        message, bits = compressed(v)
        server, w = v - message, w + message
        sizes.append(bits)
        np.testing.assert_allclose(flat(state.params), w, rtol=1e-5, atol=2e-6)
        kept = jax.vmap(lambda r: ravel_pytree(r)[0])
        np.testing.assert_allclose(
            kept(state.clients[1].residual), residuals, rtol=1e-4, atol=5e-6
        )
        assert metrics["uplink_bytes"] == up / 8
        assert metrics["downlink_bytes"] == down / 8
    assert synced.max() == len(cohorts) - 1


def test_delayed_binary_rounds_match_the_thesis():
    # Algorithm 4, two local steps whose velocity starts from 0 in every round.
    config = dataclasses.replace(
        CONFIG,
        momentum=0.9,
        persist_momentum=False,
        work=LocalWork(batch_size=4, steps=2),
    )
    algorithm = stc.make(config, softmax_loss, transform=sbc(0.25), downlink=identity())
    w, residuals = flat(START), np.zeros((N, D))
    for state, metrics, cohort in rounds(algorithm):
        sent, up = [], 0
        for i, batches in visits(cohort).items():
            local, velocity = w, np.zeros(D)
            for batch in batches:
                gradient = flat(softmax_gradient(tree(local), X[batch], Y[batch])[1])
                velocity = 0.9 * velocity + gradient
                local = local - 0.3 * velocity
            v = residuals[i] + local - w
            order = np.argsort(v, kind="stable")
            low, high = np.sort(order[:K]), np.sort(order[-K:])
            mean, kept = max((v[high].mean(), 1), (-v[low].mean(), 0))
            positions = high if kept else low
            message = np.zeros(D)
            message[positions] = mean if kept else -mean
            residuals[i] = v - message
            sent.append(message)
            up += len(golomb.encode(positions, D, golomb.parameter(K / D))) + 32
        w = w + np.mean(sent, axis=0)
        np.testing.assert_allclose(flat(state.params), w, rtol=1e-5, atol=2e-6)
        assert metrics["uplink_bytes"] == up / 8


def test_both_directions_are_one_product_of_masks():
    # Where values are sent as they are, the server's mask over the mean of masked
    # updates is what clients would have sent under both: sparser, but the same kind.
    config = dataclasses.replace(CONFIG, work=LocalWork(batch_size=4, steps=1))
    algorithm = stc.make(
        config, softmax_loss, transform=top_k(0.5), downlink=top_k(0.25)
    )
    state, _, cohort = next(rounds(algorithm))
    updates = np.array([flat(u) for u in deltas(START, cohort, 0.3).values()])

    def mask(v, k):
        out = np.zeros(D)
        out[np.argsort(-np.abs(v), kind="stable")[:k]] = 1
        return out

    up = np.array([mask(u, D // 2) for u in updates])
    down = mask((up * updates).mean(0), D // 4)
    expected = flat(START) + ((up * down) * updates).mean(0)
    np.testing.assert_allclose(flat(state.params), expected, rtol=1e-5, atol=2e-6)
    assert (up * down).sum(1).max() <= D // 4


def test_nothing_is_lost_on_the_way():
    # What arrived and what both sides keep moves by the mean of the clients' updates,
    # which one device finds for two.
    how = Execution(block_size=2, mesh=client_mesh(jax.devices()[:2]))
    algorithm = stc.make(CONFIG, softmax_loss)
    average = fedavg.make(
        fedavg.Config(client_lr=0.3, work=CONFIG.work, weights="uniform"), softmax_loss
    )
    step, plain = jax.jit(algorithm.round), jax.jit(average.round)

    def kept(state):
        _, feedback = state.clients
        server = state.rest.downlink[0].residual
        return sum(
            flat(jax.tree.map(lambda x: np.float64(x), part))
            for part in (
                state.params,
                server,
                jax.tree.map(lambda x: x.sum(0) / 4, feedback.residual),
            )
        )

    state, rng = algorithm.init(PARAMS, N), np.random.default_rng(0)
    start, moved = kept(state), np.zeros(D)
    for t in range(8):
        ids = rng.choice([0, 1, 2, 4, 5, 6, 7], 4, replace=False)
        plan = functools.partial(plan_round, ids, TRAIN, CONFIG.work, seed=3, round=t)
        here = jax.tree.map(np.asarray, state.params)
        mean = plain(average.init(here, N), plan(), KEY)[0].params
        moved += flat(mean) - flat(here)
        state, _ = step(state, plan(execution=how), KEY)
        np.testing.assert_allclose(kept(state) - start, moved, atol=5e-6)


def test_a_run_that_was_interrupted_loses_nothing(tmp_path):
    config = dataclasses.replace(CONFIG, momentum=0.9)
    model = Model(lambda key: PARAMS, softmax_loss, lambda params, batch: {})
    how = {"cohort_size": 3, "eval_splits": (), "progress": False, "eval_every": 2}

    def run(rounds, path, **more):
        algorithm = stc.make(config, softmax_loss)
        data = FederatedData(TRAIN)
        where = {"rounds": rounds, "run_dir": tmp_path / path}
        return simulate(algorithm, data, model, **where, **how, **more)

    run(2, "b")
    whole, parts = run(6, "a"), run(6, "b", resume=True)
    for a, b in zip(*map(jax.tree.leaves, (whole.state, parts.state)), strict=True):
        np.testing.assert_array_equal(a, b)
    for name in ("uplink_bytes", "downlink_bytes"):
        np.testing.assert_array_equal(whole.train[name], parts.train[name])
        assert whole.total_bits(name) == parts.total_bits(name)


def test_an_absent_client_catches_up_on_messages_alone():
    inner = ternary(0.25)

    def apply(message, state, key):
        message, kept = inner.apply(message, state[0], key)
        return message, (kept, message.update)

    downlink = inner._replace(init=lambda u: (inner.init(u), u), apply=apply)
    algorithm = stc.make(CONFIG, softmax_loss, downlink=downlink)
    absent, sizes = flat(PARAMS), []
    recent = np.zeros(0)
    for state, _, _ in rounds(algorithm, [*COHORTS, *COHORTS]):
        message = flat(state.rest.downlink[0][1])
        code = coders.encode_sparse(message, K, "signs")
        sizes.append(len(code))
        recent = np.asarray(state.downloads.recent)
        absent = absent + coders.decode_sparse(code, D, K, "signs")
        np.testing.assert_array_equal(absent, flat(state.params))
    np.testing.assert_array_equal(recent[:8], sizes[::-1])


def test_without_compression_it_is_fedavg():
    work = LocalWork(batch_size=4, steps=3)
    config = stc.Config(client_lr=0.3, work=work)
    dense = stc.make(config, softmax_loss, transform=identity(), downlink=identity())
    plain = fedavg.make(
        fedavg.Config(client_lr=0.3, work=work, weights="uniform"), softmax_loss
    )
    for name, value in last(plain).params.items():
        np.testing.assert_array_equal(last(dense).params[name], value)
    for t, (_, metrics, cohort) in enumerate(rounds(dense)):
        clients = len(visits(cohort))
        assert metrics["uplink_bytes"] == MODEL_BYTES * clients
        # Everybody has the first model; afterwards it is never more than the model.
        assert metrics["downlink_bytes"] == (MODEL_BYTES * clients if t else 0)


def test_running_statistics_are_downloaded_beside_the_messages():
    """A model of twelve weights and 100 statistics: one message missed, and all."""
    params = Stateful({"w": jnp.zeros(12)}, jnp.zeros(100))

    def round(state, cohort, key):
        return state, {}

    plain = dataclasses.replace(
        fedavg.make(fedavg.Config(), softmax_loss),
        init=lambda params, n: fedavg.State(params, (), (), ()),
        round=round,
    )
    cached = with_cache(plain, 2, lambda state: Bits.of(8 * 4), every_message)
    cohort = plan_round([0], TRAIN, LocalWork(), seed=0, round=0)
    state, down = cached.init(params, 2), []
    for _ in range(2):
        state, metrics = cached.round(state, cohort, KEY)
        down.append(int(np.asarray(metrics["downlink_bytes"])))
    late = plan_round([1], TRAIN, LocalWork(), seed=0, round=2)
    for _ in range(2):
        state, _ = cached.round(state, cohort, KEY)
    _, metrics = cached.round(state, late, KEY)
    down.append(int(np.asarray(metrics["downlink_bytes"])))
    assert down == [0, 4 + 400, 448]


def test_downloads_are_one_over_the_participation_times_uploads():
    clients, cohort_size, steps, bits = 50, 5, 400, 700

    def round(state, cohort, key):
        return state, {"idle": jnp.bool_(False)}

    # A method whose messages all have the same size.
    plain = dataclasses.replace(
        fedavg.make(fedavg.Config(), softmax_loss),
        init=lambda params, n: fedavg.State(params, (), (), ()),
        round=round,
    )
    cached = with_cache(plain, 60, lambda state: Bits.of(bits), every_message)
    template = plan_round(range(cohort_size), TRAIN, LocalWork(), seed=0, round=0)

    def step(state, key):
        ids = jax.random.choice(key, clients, (cohort_size,), replace=False)
        ones = jnp.ones_like(template.num_steps)
        ids = jnp.zeros_like(ones).at[:cohort_size].set(ids)
        mask = jnp.arange(len(ones)) < cohort_size
        cohort = dataclasses.replace(
            template, client_id=ids, num_steps=jnp.where(mask, 1, 0)
        )
        state, metrics = cached.round(state, cohort, key)
        return state, metrics["downlink_bytes"]

    start = cached.init(jnp.zeros(10_000), clients)
    keys = jax.random.split(KEY, steps)
    _, down = jax.jit(lambda s: jax.lax.scan(step, s, keys))(start)
    ratio = 8 * np.asarray(down).sum() / (bits * cohort_size * steps)
    # The messages since a client's last turn are not fetched yet: 10 of 400 on average.
    assert abs(ratio - 10 * (1 - 10 / steps)) < 0.15


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"client_lr": 0.0}, "client_lr must be > 0"),
        ({"sparsity_up": 0}, "sparsity_up must be >= 1"),
        ({"sparsity_down": 0}, "sparsity_down must be >= 1"),
        ({"tau_max": 0}, "tau_max must be >= 1"),
        ({"momentum": 1.0}, "momentum must be in"),
    ],
)
def test_configs_that_make_no_sense_are_refused(how, rule):
    with pytest.raises(ValueError, match=rule):
        stc.Config(**how)
