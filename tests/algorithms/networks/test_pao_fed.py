"""PAO-Fed: a loop over clients in NumPy float64 with dense masks gives the same."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_core import NonFiniteUpdateError, random
from fedjax_core.algorithms.networks import pao_fed
from fedjax_core.networks import run as runs
from fedjax_core.networks.streaming import Events, World, held_out_error
from fedjax_core.networks.theory.partial_sharing import (
    aggregation_matrix,
    ideal_mean_square_deviation,
    merge_matrix,
)

K, D, T = 9, 10, 40
BASE = pao_fed.Config(step_size=0.3, num_shared=3, max_delay=3)


def make_world(seed=0, num_clients=K, d=D, iterations=T, available=0.5, late=0.5):
    """Clients that observe one linear function of d inputs."""
    rng = np.random.default_rng(seed)
    shape = iterations, num_clients
    x = rng.standard_normal((*shape, d)) / np.sqrt(d)
    truth = rng.standard_normal(d)
    y = x @ truth + 0.1 * rng.standard_normal(shape)
    arrived: Any = rng.random(shape) < 0.8
    there: Any = arrived & (rng.random(shape) < available)
    delay: Any = (rng.geometric(1 - late, shape) - 1).astype(np.int32)
    events = Events(arrived, there, delay)
    floats = (x, y, x[0], y[0])
    x, y, test_x, test_y = (a.astype(np.float32) for a in floats)
    return World(x, y, events, None, test_x, test_y)


def ideal(world):
    """Nobody is away or late."""
    everywhere = np.ones_like(world.events.arrived)
    return world._replace(
        events=Events(everywhere, everywhere, np.zeros_like(world.events.delay))
    )


def mask(config, d, n, k):
    """M of client k in iteration n, as the text rolls it."""
    m = d if config.num_shared is None else config.num_shared
    base = np.arange(d) < m
    return np.roll(base, m * (n + (0 if config.coordinated else k)))


def draws(config, world, seed=0):
    """Who takes part: available, and drawn where only some are."""
    takes_part = np.array(world.events.available)
    if config.sample_rate < 1:
        key = random.seed_key(seed)
        for n, row in enumerate(takes_part):
            drawn = jax.random.uniform(random.round_key(key, n), row.shape)
            row &= np.asarray(drawn < config.sample_rate)
    return takes_part


def reference(config, world):
    """The text's algorithm, client by client; w after each iteration ``[T, d]``."""
    x, y = np.asarray(world.x, np.float64), np.asarray(world.y, np.float64)
    iterations, num_clients, d = x.shape
    takes_part, delay = draws(config, world), np.asarray(world.events.delay)
    w, W, sent, history = np.zeros(d), np.zeros((num_clients, d)), [], []
    for n in range(iterations):
        sent.append({})
        for k in range(num_clients):
            v = W[k]
            if takes_part[n, k]:
                M = np.ones(d) if config.full_downlink else mask(config, d, n, k)
                v = M * w + (1 - M) * W[k]
            gradient = (y[n, k] - v @ x[n, k]) * x[n, k]
            learns = (
                world.events.arrived[n, k] if config.autonomous else takes_part[n, k]
            )
            if not config.signs:
                W[k] = v + config.step_size * gradient * learns
            if takes_part[n, k]:
                S = mask(config, d, n + config.refined, k)
                message = np.sign(gradient) if config.signs else S * W[k]
                sent[n][k] = (S, message)
        classes = [
            [sent[n - i][k] for k in sent[n - i] if delay[n - i, k] == i]
            for i in range(min(config.max_delay, n) + 1)
        ]
        everything = [message for some in classes for message in some]
        if config.signs:
            w = w + config.step_size * np.sign(sum((s for _, s in everything), 0 * w))
        elif config.pooled:
            if everything:
                w = w + np.mean([s - S * w for S, s in everything], 0)
        else:
            taken, step = np.zeros(d, bool), np.zeros(d)
            for i, some in enumerate(classes):
                free = ~taken if config.latest_wins else np.ones(d, bool)
                for S, s in some:
                    step += config.late_weight**i / len(some) * free * (s - S * w)
                    taken |= S > 0
            w = w + step
        history.append(w)
    return np.array(history)


@functools.cache
def compiled(config):
    """W after each iteration, ``[T, d]``; compiles once for a config and shapes."""

    @jax.jit
    def follow(world, key):
        def one(state, t):
            state, metrics = pao_fed.step(
                config, world, state, t, random.round_key(key, t)
            )
            return state, (state.params, metrics)

        start = pao_fed.init(config, world)
        return lax.scan(one, start, jnp.arange(world.y.shape[0]))

    return follow


def follow(config, world, seed=0):
    return compiled(config)(world, random.seed_key(seed))[1]


VARIANTS = {
    "U1": {},
    "C0": {"coordinated": True, "refined": False},
    "C2, a full downlink": {
        "coordinated": True,
        "late_weight": 0.2,
        "full_downlink": True,
    },
    "U0, every arrival counts": {
        "refined": False,
        "latest_wins": False,
        "late_weight": 0.3,
    },
    "PSO-Fed": {"num_shared": 4, "sample_rate": 0.5},
    "Online-Fed": {
        "num_shared": None,
        "autonomous": False,
        "pooled": True,
        "sample_rate": 0.5,
    },
    "SignSGD": {"num_shared": None, "autonomous": False, "signs": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_iterations_are_those_of_the_text(name):
    config = dataclasses.replace(BASE, **VARIANTS[name])
    world = make_world()
    found, metrics = follow(config, world)
    np.testing.assert_allclose(found, reference(config, world), rtol=0, atol=1e-5)
    count = draws(config, world).sum(1)
    np.testing.assert_array_equal(metrics["participants"], count)
    m = config.num_shared or D
    up = D / 8 if config.signs else 4 * m
    np.testing.assert_allclose(metrics["uplink_bytes"], count * up)
    down = 4 * (D if config.full_downlink else m)
    np.testing.assert_allclose(metrics["downlink_bytes"], count * down)


def test_the_recursion_in_matrices_gives_the_same():
    world = make_world(num_clients=3, d=4, iterations=25)
    config = dataclasses.replace(BASE, num_shared=3, max_delay=2, late_weight=0.5)
    for latest in (True, False):
        config = dataclasses.replace(config, latest_wins=latest)
        expected, takes_part = reference(config, world), draws(config, world)
        delay, d, slots = world.events.delay, 4, config.max_delay + 1
        w = np.zeros(d * (1 + 3 * slots))
        for n in range(25):
            received = [mask(config, d, n, k) * takes_part[n, k] for k in range(3)]
            w = merge_matrix(np.array(received), config.max_delay) @ w
            for k in range(3):
                if world.events.arrived[n, k]:
                    own = slice(d * (k + 1), d * (k + 2))
                    z = np.asarray(world.x[n, k], np.float64)
                    w[own] += config.step_size * (world.y[n, k] - z @ w[own]) * z
            arriving = np.zeros((slots, 3, d), bool)
            for i in range(min(n + 1, slots)):
                for k in range(3):
                    if takes_part[n - i, k] and delay[n - i, k] == i:
                        arriving[i, k] = mask(config, d, n - i + 1, k)
            B = aggregation_matrix(arriving, 0.5, latest)
            np.testing.assert_allclose(B.sum(1), 1)
            assert not latest or (B >= 0).all()
            w = B @ w
            np.testing.assert_allclose(w[:d], expected[n], rtol=0, atol=1e-14)


def test_masks_are_the_ones_of_the_text():
    offsets: Any = pao_fed.offsets
    for d, m, period, hits in ((200, 4, 50, 1), (200, 32, 25, 4), (12, 4, 3, 1)):
        config = dataclasses.replace(BASE, num_shared=m)
        starts = [int(offsets(config, m, d, n, 1)[0]) for n in range(period + 1)]
        entries = [(s + np.arange(m)) % d for s in starts[:period]]
        assert starts[period] == starts[0]
        assert (np.bincount(np.concatenate(entries), minlength=d) == hits).all()
        # At one time, so many consecutive clients share every entry equally often.
        of_clients = np.asarray(offsets(config, m, d, 7, period))
        entries = ((of_clients[:, None] + np.arange(m)) % d).ravel()
        assert (np.bincount(entries, minlength=d) == hits).all()
        for n, k in ((0, 0), (3, 2), (70, 5)):
            start = offsets(config, m, d, n, 6)[k]
            rows = np.zeros(d, bool)
            rows[(start + np.arange(m)) % d] = True
            np.testing.assert_array_equal(rows, mask(config, d, n, k))
            alike = dataclasses.replace(config, coordinated=True)
            np.testing.assert_array_equal(
                np.unique(offsets(alike, m, d, n, 6)), m * n % d
            )


def test_what_is_received_next_has_been_refined_since_it_was_received():
    world = ideal(make_world(num_clients=1, d=12, iterations=12))
    world = world._replace(x=np.ones_like(world.x), y=np.ones_like(world.y))
    # The server's model never moves: alone, what a client sends is dropped, as late.
    late = world._replace(events=world.events._replace(delay=world.events.delay + 9))
    for refined, times in ((False, 1), (True, 3)):
        config = dataclasses.replace(
            BASE, num_shared=4, refined=refined, step_size=0.01
        )
        state, key = pao_fed.init(config, late), random.seed_key(0)
        step = jax.jit(functools.partial(pao_fed.step, config))
        steps = []  # of every entry since it was received
        age = np.zeros(12)
        for n in range(12):
            before = np.asarray(state.models[0])
            state, _ = step(late, state, n, key)
            age = np.where(mask(config, 12, n, 0), 0, age) + 1
            steps.append(age[mask(config, 12, n + refined, 0)])
            assert (np.asarray(state.models[0]) != before).any()
        assert set(np.concatenate(steps[3:])) == {times}
        assert not np.asarray(state.params).any()


def test_sharing_everything_without_delay_is_federated_least_mean_squares():
    world = ideal(make_world())
    expected, w = [], np.zeros(D)
    for x, y in zip(*(np.asarray(a, float) for a in (world.x, world.y)), strict=True):
        w = w + 0.3 / K * x.T @ (y - x @ w)
        expected.append(w)
    whole = dataclasses.replace(BASE, num_shared=D)
    average = dataclasses.replace(BASE, num_shared=None, autonomous=False, pooled=True)
    for config in (whole, average):
        np.testing.assert_allclose(follow(config, world)[0], expected, atol=1e-5)


def test_messages_that_are_too_late_or_weigh_nothing_change_nothing():
    world = make_world()
    away = Events(world.events.arrived, 0 * world.events.available, world.events.delay)
    late = world.events._replace(delay=world.events.delay + BASE.max_delay + 1)
    for events in (away._replace(available=away.available.astype(bool)), late):
        assert not np.asarray(follow(BASE, world._replace(events=events))[0]).any()
    light = dataclasses.replace(BASE, late_weight=0.0)
    dropped = np.where(world.events.delay > 0, 99, 0).astype(np.int32)
    np.testing.assert_array_equal(
        follow(light, world)[0],
        follow(light, world._replace(events=world.events._replace(delay=dropped)))[0],
    )


def test_without_the_latest_winning_whole_models_blow_up():
    world = make_world(available=0.9, late=0.7, iterations=400)
    whole = dataclasses.replace(BASE, num_shared=D, max_delay=6)
    blown = dataclasses.replace(whole, latest_wins=False)
    assert np.abs(follow(whole, world)[0]).max() < 10
    # Where delays are multiples, only these are kept apart.
    late = world._replace(events=world.events._replace(delay=2 * world.events.delay))
    by_two = dataclasses.replace(whole, delay_unit=2)
    np.testing.assert_allclose(
        follow(by_two, late)[0], follow(whole, late)[0], rtol=0, atol=1e-5
    )
    assert not np.abs(follow(blown, world)[0]).max() < 1e3


def test_the_mean_square_deviation_of_all_together_is_the_closed_form():
    # 64 chains, 1,500 iterations after 500: the deviation of a mean of squares of 8
    # numbers with a memory of some 20 iterations is 0.9 %; 4 % is wrong once in 10^5.
    num_clients, d, mu = 4, 8, 0.1
    config = dataclasses.replace(BASE, step_size=mu, num_shared=None, pooled=True)

    def chain(key):
        x = jax.random.normal(random.stream(key, "x"), (2000, num_clients, d))
        y = 0.1 * jax.random.normal(random.stream(key, "y"), (2000, num_clients))
        yes = jnp.ones((2000, num_clients), bool)
        world = World(x, y, Events(yes, yes, 0 * yes), None, x[0], y[0])
        return jnp.square(compiled(config)(world, key)[1][0][500:]).sum(1).mean()

    found = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), 64)).mean()
    expected = ideal_mean_square_deviation(mu, 0.01, 1.0, num_clients, d)
    assert expected == pytest.approx(1.19403e-3, rel=1e-5)
    assert found == pytest.approx(expected, rel=0.04)


def test_models_of_data_in_halves_are_in_single_precision():
    world = make_world()
    floats = {name: getattr(world, name) for name in ("x", "y", "test_z", "test_y")}
    halves = {name: jnp.asarray(x, jnp.bfloat16) for name, x in floats.items()}
    found = follow(BASE, world._replace(**halves))[0]
    assert found.dtype == jnp.float32
    rounded = {name: np.asarray(x, np.float64) for name, x in halves.items()}
    expected = reference(BASE, world._replace(**rounded))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_runs_are_driven_recorded_and_resumed(tmp_path):
    system = pao_fed.make(BASE, make_world(), "U1")
    whole = runs.run(system, rounds=T, seeds=2, eval_every=10, progress=False)
    options = {"seeds": 2, "eval_every": 10, "progress": False, "run_dir": tmp_path}
    runs.run(system, rounds=20, **options)
    resumed = runs.run(system, rounds=T, resume=True, **options)
    for name in ("params", "models", "sums"):
        np.testing.assert_array_equal(
            getattr(whole.state, name), getattr(resumed.state, name)
        )
    assert resumed.evaluations["test_mse"].shape == (1, 4)
    assert whole.compilations == 1
    np.testing.assert_allclose(
        whole.state.params[0], reference(BASE, make_world())[-1], atol=1e-5
    )
    with pytest.raises(ValueError, match=f"rounds must be at most {T}"):
        runs.run(system, rounds=T + 1, progress=False)


def test_the_reported_error_is_that_of_the_model():
    world, w = make_world(), np.linspace(-1, 1, D).astype(np.float32)
    expected = np.mean((np.float64(world.test_y) - np.float64(world.test_z) @ w) ** 2)
    found = held_out_error(world, jnp.asarray(w))["test_mse"]
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_settings_out_of_range_are_refused():
    for settings, match in (
        ({"step_size": 0.0}, "step_size must be > 0"),
        ({"num_shared": 0}, "num_shared must be >= 1"),
        ({"late_weight": 1.1}, r"late_weight must be in \[0, 1\]"),
        ({"sample_rate": -0.1}, r"sample_rate must be in \[0, 1\]"),
        ({"max_delay": -1}, "max_delay must be >= 0"),
        ({"delay_unit": 2}, "max_delay must be a multiple of delay_unit=2, got 3"),
        ({"signs": True}, "num_shared must be None where signs are sent"),
        ({"pooled": True, "late_weight": 0.2}, "late_weight must be 1 where messages"),
    ):
        with pytest.raises(ValueError, match=match):
            dataclasses.replace(BASE, **settings)
    with pytest.raises(ValueError, match=rf"num_shared must be in \[1, {D}\]"):
        pao_fed.make(dataclasses.replace(BASE, num_shared=D + 1), make_world())


def test_worlds_whose_parts_do_not_belong_together_are_refused():
    world = make_world()
    arrived, available, delay = world.events
    for wrong, match in (
        (world._replace(x=world.x[:10]), r"x must be \[T, K\] like y"),
        (Events(arrived[:10], available, delay), "arrived must be"),
        (Events(arrived, available[:, :1], delay), "available must be"),
        (Events(arrived, available, delay - 1), r"delay must be in \[0, inf\], got -1"),
        (Events(available, arrived, delay), "available must be False where no sample"),
    ):
        wrong = wrong if isinstance(wrong, World) else world._replace(events=wrong)
        with pytest.raises(ValueError, match=match):
            pao_fed.make(BASE, wrong)


def test_samples_that_are_not_numbers_end_the_run():
    world = make_world()
    world.x[5] = np.nan
    with pytest.raises(NonFiniteUpdateError, match="round 6"):
        runs.run(pao_fed.make(BASE, world), rounds=T, progress=False)
