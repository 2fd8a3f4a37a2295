"""FedEvg in NumPy, float64, with a softmax regression as energy model."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    COHORTS,
    EXAMPLES,
    KEY,
    PARAMS,
    SIZES,
    START,
    TRAIN,
    N,
    X,
    Y,
    rounds,
)
from tests.reference import softmax_gradient, visits

from fedjax_core import LocalWork, models, plan_round
from fedjax_core.algorithms import fedevg
from fedjax_core.generated import fit_seed
from fedjax_core.personal import Row
from fedjax_core.types import Turn

M, K, D = 6, 3, 3
LABELS = np.repeat(np.arange(K), M // K)
SAMPLES = np.random.default_rng(2).normal(size=(M, D)).astype(np.float32)
# It starts from the same parameters whatever the key, so that rounds draw nothing.
FIXED = models.Classifier(lambda key: PARAMS, lambda p, x: x @ p["w"] + p["b"][None])
LR = 0.1
CONFIG = fedevg.Config(
    num_classes=K,
    work=LocalWork(batch_size=8, epochs=2),
    decay=1.0,
    replay=0.4,
    chain_steps=2,
    chain_step_size=0.3,
    chain_noise=0.0,
    rounds=4,
    first_step=0.5,
    last_step=0.1,
    schedule="half",
    noise=0.0,
)


def method(classifier=FIXED, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return fedevg.make(config, classifier, client_optimizer=optax.sgd(LR))


# ---- the method in NumPy ----


def logits(params, x):
    return x @ params["w"] + params["b"]


def softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def slopes(params, x, y, kind):
    """Of the energy: to the logits, ``[B, K]``."""
    return -(softmax(logits(params, x)) if kind == "marginal" else np.eye(K)[y])


def energies(params, x, y, kind):
    z = logits(params, x)
    if kind == "marginal":
        return -np.log(np.exp(z).sum(1))
    return -z[np.arange(len(y)), y]


def to_params(x, of_logits):
    return {"w": x.T @ of_logits / len(x), "b": of_logits.mean(0)}


def client(params, x, batches, config, lr=LR):
    """Algorithm 4.2, with the sign of L_pcd that raises the likelihood."""
    chain, kind = x.copy(), config.kind
    low, high = config.within or (-np.inf, np.inf)
    most = (config.gradient_within or (-np.inf, np.inf))[1]

    def clip(g):
        return np.clip(g, -most, most)

    for batch in batches:
        before = chain
        for _ in range(config.chain_steps):
            g = clip(slopes(params, chain, LABELS, kind) @ params["w"].T)
            chain = np.clip(chain - config.chain_step_size * g, low, high)
        again = x if config.replayed == "received" else before
        real_x, real_y = X[batch], Y[batch]
        terms = [
            (1, to_params(real_x, slopes(params, real_x, real_y, kind))),
            (-1, to_params(chain, slopes(params, chain, LABELS, kind))),
            (1, softmax_gradient(params, real_x, real_y)[1]),
            (config.replay, softmax_gradient(params, again, LABELS)[1]),
        ]
        step = {k: sum(c * g[k] for c, g in terms) for k in params}
        params = {k: params[k] - lr * step[k] for k in params}
    g = clip(slopes(params, x, LABELS, kind) @ params["w"].T)
    return params, -energies(params, x, LABELS, kind), g


def server(x, beta, says, config):
    """Algorithm 4.1 without noise; `says` by client."""
    top, bottom = np.zeros_like(x), np.zeros((len(x), 1))
    for i, (value, g) in says.items():
        e = np.exp(np.sign(value) if config.signed else value)[:, None]
        top, bottom = top + SIZES[i] * e * g, bottom + SIZES[i] * e
    low, high = config.within or (-np.inf, np.inf)
    return np.clip(x - beta * top / bottom, low, high)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "marginal", "signed": False, "replayed": "refined"},
        {"stateful": True, "within": (-0.8, 0.8), "gradient_within": (-0.4, 0.4)},
    ],
    ids=["as printed", "marginal energies, not signed", "stateful and clipped"],
)
def test_rounds_match_the_chapter(changes):
    algorithm, x = method(**changes), SAMPLES.astype(np.float64)
    config, kept = algorithm.config, {}
    assert isinstance(config, fedevg.Config)
    everything = rounds(algorithm, params=SAMPLES)
    for t, (state, metrics, cohort) in enumerate(everything):
        says = {}
        for i, batches in visits(cohort).items():
            params, *said = client(kept.get(i, START), x, batches, config)
            says[i] = said
            if config.stateful:
                kept[i] = params
        beta = 0.1 + 0.4 * (1 + np.cos(np.pi * t / 3)) / 2
        x = server(x, beta, says, config)
        np.testing.assert_allclose(state.params, x, rtol=1e-4, atol=1e-5)
        # As many numbers up as down: samples and one more for each.
        for way in ("uplink_bytes", "downlink_bytes"):
            assert metrics[way] == 4 * M * (D + 1) * len(says)
    last: Any = state  # pyright: ignore[reportPossiblyUnboundVariable]
    for i, params in kept.items():
        np.testing.assert_allclose(
            last.clients.own["w"][i], params["w"], rtol=1e-4, atol=1e-5
        )


# ---- one client ----


def turn(step=0, round=0):
    return Turn(KEY, *map(jnp.int32, (round, step, 1, 8)))


SHARED = {"x": jnp.asarray(SAMPLES), "y": jnp.asarray(LABELS, jnp.int32)}
BATCH = {k: jnp.asarray(v[:4]) for k, v in EXAMPLES.items()}
BATCH["example_mask"] = jnp.ones(4, bool)


def test_a_chain_goes_on_where_its_batch_left_it():
    config = dataclasses.replace(CONFIG, work=LocalWork(batch_size=2))
    program = fedevg.client_program(config, FIXED, optax.sgd(LR))
    step = jax.jit(program.step)
    carry, moved = program.init(SHARED, (), turn()), []
    for t in range(12):
        now = turn()._replace(key=jax.random.fold_in(KEY, t))
        after = step(SHARED, carry, BATCH, now)
        rows = np.flatnonzero((after.chain != carry.chain).any(1))
        assert len(rows) == 2
        moved.extend(rows)
        carry = after
    # In 12 draws of 2 of 6 one of them is never seen once in 20 keys or so.
    assert set(moved) == set(range(M))
    assert not (carry.chain == SHARED["x"]).any()


def test_a_step_raises_the_likelihood():
    # Of a single class cross-entropies are 0, and the contrast is all there is.
    config = dataclasses.replace(CONFIG, num_classes=1)
    slope = models.Classifier(
        lambda key: {"w": jnp.array([[-0.2]])}, lambda p, x: x @ p["w"]
    )
    program = fedevg.client_program(config, slope, optax.sgd(LR))
    shared = {"x": -jnp.ones((M, 1)), "y": jnp.zeros(M, jnp.int32)}
    batch = {"x": jnp.full((4, 1), 3.0), "y": jnp.zeros(4, jnp.int32)}
    batch["example_mask"] = jnp.ones(4, bool)
    before = program.init(shared, (), turn())
    after = program.step(shared, before, batch, turn())

    def contrast(carry):
        value = partial(slope.logits, carry.model.params)
        return value(batch["x"]).mean() - value(after.chain).mean()

    assert contrast(after) > contrast(before)


def test_step_sizes_of_clients_decay_by_the_round():
    one = LocalWork(batch_size=8, steps=1)
    config = dataclasses.replace(
        CONFIG, decay=0.5, decay_every=10, stateful=True, work=one
    )
    algorithm = fedevg.make(config, FIXED)
    start, step = algorithm.init(SAMPLES, N), jax.jit(algorithm.round)

    def move(round):
        cohort = plan_round([2], TRAIN, config.work, seed=3, round=round)
        state, _ = step(start, cohort, KEY)
        return state.clients.own["w"][2] - PARAMS["w"]

    # Of the same 8 examples; Adam's first step is as long as its rate.
    np.testing.assert_allclose(np.abs(move(0)), 1e-3, rtol=1e-3)
    np.testing.assert_allclose(move(9), move(0), rtol=1e-3)
    np.testing.assert_allclose(move(25), move(0) / 4, rtol=1e-3)


# ---- rounds ----


def played(algorithm, ids, train=TRAIN, round=0, x=SAMPLES):
    cohort = plan_round(ids, train, algorithm.work, seed=3, round=round)
    state = algorithm.init(x, train.num_clients)
    return algorithm.round(state, cohort, KEY)


def test_without_steps_and_noise_nothing_moves_and_labels_never_do():
    algorithm = method(first_step=0.0, last_step=0.0)
    state, _ = jax.jit(partial(played, algorithm, COHORTS[0]))()
    np.testing.assert_array_equal(state.params, SAMPLES)
    noisy = method(first_step=0.0, last_step=0.0, noise=0.3, work=LocalWork())
    x = np.zeros((600, D), np.float32)
    state, _ = jax.jit(lambda x: played(noisy, [2, 5], x=x))(x)
    # 1800 draws: off by 5 standard errors once in two million keys.
    assert abs(state.params.std() / 0.3 - 1) < 5 / 3600**0.5
    assert abs(state.params.mean()) < 5 * 0.3 / 1800**0.5


def test_clients_draw_their_own_classifier_in_every_round():
    drawn = models.Classifier(
        lambda key: {"w": jax.random.normal(key, (D, K)), "b": jnp.zeros(K)},
        FIXED.logits,
    )
    for stateful in (False, True):
        config = dataclasses.replace(CONFIG, stateful=stateful)
        program = fedevg.client_program(config, drawn, optax.sgd(LR))
        kept = Row(PARAMS, jnp.bool_(True))
        new = kept._replace(took_part=jnp.bool_(False))
        other = turn()._replace(key=jax.random.key(7))
        first, second, again = (
            program.init(SHARED, row, at).model.params["w"]
            for row, at in ((new, turn()), (new, other), (kept, other))
        )
        assert not (first == second).any()
        assert bool((again == PARAMS["w"]).all()) == stateful


def test_what_is_evaluated_has_learnt_from_samples_alone():
    far = np.eye(K)[LABELS].astype(np.float32) * 3
    algorithm = method(fit_lr=0.1, fit_work=LocalWork(batch_size=3, epochs=20))
    state = algorithm.init(far, N)
    learn = jax.jit(algorithm.model)
    learnt = learn(state)
    guess = np.argmax(FIXED.logits(learnt, jnp.asarray(far)), 1)
    np.testing.assert_array_equal(guess, LABELS)
    again = learn(state)
    np.testing.assert_array_equal(learnt["w"], again["w"], "the same of the same")


def test_the_servers_classifier_is_another_in_every_run():
    algorithm = method()
    cohort = plan_round(COHORTS[0], TRAIN, algorithm.work, seed=3, round=0)
    step = jax.jit(algorithm.round)
    start, keys = algorithm.init(SAMPLES, N), jax.random.split(KEY)
    seeds = [int(step(start, cohort, key)[0].seed) for key in keys]
    assert seeds == [int(fit_seed(key)) for key in keys]
    assert len({0, *seeds}) == 3


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match="num_samples must be a positive multiple of"):
        method().init(SAMPLES[:4], N)
    with pytest.raises(ValueError, match="num_samples must be a positive multiple of"):
        method().init(SAMPLES[:0], N)
    with pytest.raises(ValueError, match="replay must be >= 0 and finite, got -1"):
        fedevg.Config(replay=-1)
    with pytest.raises(ValueError, match="chain_noise must be >= 0 and finite, got"):
        fedevg.Config(chain_noise=-0.1)
    with pytest.raises(ValueError, match="last_step must be >= 0 and finite, got -1"):
        fedevg.Config(last_step=-1)
