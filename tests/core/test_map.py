"""The engine: any cohort in any blocks on any devices equals a loop over clients."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import (
    fedavg_delta,
    fedavg_round,
    softmax_gradient,
    softmax_loss,
    softmax_problem,
    visits,
)

from fedjax_core import (
    ClientProgram,
    Execution,
    LocalWork,
    Packed,
    Transform,
    client_mesh,
    clip,
    local_sgd,
    map_clients,
    mean,
    monoid,
    plan_round,
    stack,
    total,
    with_transform,
)
from fedjax_core.algorithms import fedavg, scaffold
from fedjax_core.map import STAGES
from fedjax_core.metrics import Mean, Sum
from fedjax_core.plan import Capacity, Draft
from fedjax_core.transform import stateless


def f32(values):
    return np.array(values, np.float32)


def mesh(devices):
    return client_mesh(jax.devices()[:devices])


HOW = {
    "plain": Execution(),
    "blocks of 3": Execution(block_size=3),
    "blocks of 2 on 4 devices": Execution(block_size=2, mesh=mesh(4)),
    "blocks of 2": Execution(block_size=2),
    "at most 24 steps": Execution(block_size=3, max_steps=24),
}
C, N, EXAMPLES = 6, 7, 48


def plan(ids, offsets, work, examples, how, *, seed=0, round=0):
    """A plan whose shapes depend on nothing but `how`, so that a test compiles once."""
    draft = Draft(np.asarray(ids), offsets, work, seed=seed, round=round, execution=how)
    capacity = Capacity(C, C, 160, EXAMPLES)
    cohort = draft.build(capacity, num_clients=len(offsets) - 1)
    return jax.tree.map(
        jnp.asarray, dataclasses.replace(cohort, examples=dict(examples))
    )


# What one client does here is simple enough to be repeated by hand: it adds up the
# examples it sees and counts its steps.

NAMES = (
    "by_examples",
    "uniform",
    "by_array",
    "total",
    "weighted_total",
    "stack",
    "max_norm",
    "log_sum_exp",
)


def add_up() -> ClientProgram:
    def init(shared, state, key):
        return jnp.zeros(2), jnp.float32(0), jnp.float32(0)

    def step(shared, carry, batch, key):
        total, steps, seen = carry
        x = jnp.where(batch["example_mask"][:, None], batch["x"], 0)
        return total + x.sum(0), steps + 1, seen + batch["example_mask"].sum()

    def finish(shared, carry, state, key):
        total, steps, seen = carry
        update = total + shared * steps
        metrics = {"loss": Mean(total[0], steps), "seen": Sum(seen)}
        return dict.fromkeys(NAMES, update), state + steps, metrics

    return ClientProgram(init, step, finish)


def reductions(weights) -> dict[str, Any]:
    return {
        "by_examples": mean("examples"),
        "uniform": mean("uniform"),
        "by_array": mean(weights),
        "total": total(),
        "weighted_total": total("examples"),
        "stack": stack(),
        "max_norm": monoid(
            lambda update, arrival: jnp.linalg.norm(update),
            jnp.maximum,
            lambda update: jnp.float32(-1),
        ),
        "log_sum_exp": monoid(
            lambda update, arrival: update,
            jnp.logaddexp,
            lambda update: jnp.full(update.shape, -jnp.inf, update.dtype),
        ),
    }


@jax.jit
def add_up_and_reduce(cohort, shared, weights, state):
    return map_clients(
        add_up(),
        shared,
        cohort,
        jax.random.key(0),
        reduce=reductions(weights),
        client_state=state,
    )


def loop(ids, sizes, work, x, shared, weights, state):
    """The same cohort, client by client."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    updates, mass, rows, state = [], [], [], dict(enumerate(state))
    loss, seen = [], []
    for slot, i in enumerate(ids):
        steps = work.epochs * -(-sizes[i] // work.batch_size)
        if not steps:
            continue
        own = x[offsets[i] : offsets[i + 1]].sum(0) * work.epochs
        updates.append(own + shared * steps)
        mass.append((sizes[i], weights[slot]))
        state[i] = state[i] + steps
        rows.append(slot)
        loss.append((own[0], steps))
        seen.append(sizes[i] * work.epochs)
    u, w = np.array(updates).reshape(-1, 2), np.array(mass).reshape(-1, 2)
    everyone = np.zeros((C, 2))
    everyone[rows] = u

    def average(w):
        return w @ u / w.sum() if w.sum() > 0 else np.zeros(2)

    with np.errstate(divide="ignore"):
        lse = np.logaddexp.reduce(u, axis=0) if len(u) else np.full(2, -np.inf)
    update = {
        "by_examples": average(w[:, 0]),
        "uniform": average(np.ones(len(u))),
        "by_array": average(w[:, 1]),
        "total": u.sum(0),
        "weighted_total": w[:, 0] @ u,
        "stack": everyone,
        "max_norm": np.linalg.norm(u, axis=1).max(initial=-1),
        "log_sum_exp": lse,
    }
    total_loss = np.sum(loss, axis=0) if loss else np.array([np.nan, 1])
    metrics = {
        "loss": total_loss[0] / total_loss[1],
        "seen": sum(seen),
        "valid_clients": len(rows),
        "num_examples": w[:, 0].sum(),
        "excluded_clients": 0,
    }
    return update, np.array(list(state.values())), metrics, rows


@st.composite
def populations(draw):
    sizes = draw(st.lists(st.integers(0, 8), min_size=N - 1, max_size=N - 1))
    ids = draw(st.permutations(range(N - 1)))[: draw(st.integers(0, C))]
    work = LocalWork(batch_size=4, epochs=draw(st.integers(1, 4)))
    # The last client holds what is left, which keeps the shape of the data.
    return ids, [*sizes, EXAMPLES - sum(sizes)], work, draw(st.integers(0, 2**16))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(populations())
def test_every_schedule_equals_a_loop_over_clients(case):
    ids, sizes, work, seed = case
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(EXAMPLES, 2)).astype(np.float32)
    shared = rng.normal(size=2).astype(np.float32)
    weights = rng.uniform(size=C).astype(np.float32) * rng.integers(0, 2, C)
    state = rng.integers(0, 9, N).astype(np.float32)
    expected = loop(ids, sizes, work, *map(np.float64, (x, shared, weights, state)))
    update, new_state, metrics, rows = expected
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    for name, how in HOW.items():
        cohort = plan(ids, offsets, work, {"x": x}, how, seed=seed)
        got = jax.device_get(add_up_and_reduce(cohort, shared, weights, state))
        for key in NAMES:
            np.testing.assert_allclose(
                got.update[key],
                update[key],
                rtol=2e-5,
                atol=2e-5,
                err_msg=f"{name} {key}",
            )
        np.testing.assert_array_equal(got.client_state, new_state, err_msg=name)
        np.testing.assert_array_equal(np.flatnonzero(got.valid), rows)
        assert not got.failure.any()
        for key, value in metrics.items():
            np.testing.assert_allclose(got.metrics[key], value, rtol=2e-5, atol=2e-5)
        per_client = got.client_metrics["seen"]
        np.testing.assert_array_equal(per_client[np.array(rows, int)], [
            sizes[ids[slot]] * work.epochs for slot in rows
        ])  # fmt: skip
        assert np.isnan(np.delete(got.client_metrics["loss"], rows)).all()


@pytest.mark.parametrize("name", ["plain", "blocks of 3"])
def test_rounds_copy_no_rows_of_clients_that_take_no_part(name):
    def temporary_bytes(num_clients):
        x = np.ones((num_clients, 50), np.float32)
        train = Packed({"x": x}, np.arange(num_clients + 1))
        cohort = plan_round(
            range(5), train, LocalWork(batch_size=1), seed=0, round=0,
            execution=HOW[name],
        )  # fmt: skip

        def finish(shared, carry, state, turn):
            return carry + state, 0.5 * (carry + state), {}

        program = ClientProgram(
            lambda shared, state, turn: shared,
            lambda shared, carry, batch, turn: carry + batch["x"][0],
            finish,
        )

        def rounds(state, cohort):
            def one(k, state):
                key = jax.random.key(k)
                out = map_clients(
                    program, state[0], cohort, key, reduce=mean(), client_state=state[1]
                )
                return out.update, out.client_state

            return jax.lax.fori_loop(0, 3, one, state)

        state = jnp.zeros(50), jnp.zeros((num_clients, 50))
        compiled = jax.jit(rounds, donate_argnums=0).lower(state, cohort).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes(2000) - temporary_bytes(1000) < 4 * 50 * 1000


def test_a_cohort_of_nobody_reduces_to_nothing():
    offsets = np.append(np.zeros(N, int), EXAMPLES)
    examples = {"x": np.ones((EXAMPLES, 2), np.float32)}
    cohort = plan([], offsets, LocalWork(batch_size=4), examples, HOW["plain"])
    got = add_up_and_reduce(
        cohort, np.ones(2, np.float32), jnp.ones(C), np.zeros(N, np.float32)
    )
    for name in ("by_examples", "uniform", "by_array", "total", "weighted_total"):
        np.testing.assert_array_equal(got.update[name], [0, 0])
    np.testing.assert_array_equal(got.update["stack"], np.zeros((C, 2)))
    assert got.metrics["valid_clients"] == 0
    assert np.isnan(got.metrics["loss"])


# Rows of the case table, by number.

WORK = LocalWork(batch_size=4)
SIZES = [1, 7, 64, 0, 10]
EXAMPLES_1, OFFSETS, PARAMS = softmax_problem(SIZES)
TRAIN = Packed(EXAMPLES_1, OFFSETS)
X, Y = EXAMPLES_1["x"].astype(np.float64), EXAMPLES_1["y"]


@functools.cache
def training(by="examples", lr=0.3):
    @jax.jit
    def run(params, cohort, key):
        program = local_sgd(softmax_loss, optax.sgd(lr))
        return map_clients(program, params, cohort, key, reduce=mean(by))

    return run


def trained(ids, *, by="examples", work=WORK, train=TRAIN, how=HOW["plain"]):
    cohort = plan_round(ids, train, work, seed=0, round=0, execution=how, cohort_size=5)
    return training(by)(PARAMS, cohort, jax.random.key(0)), cohort


def assert_same(a, b, rtol=1e-5):
    chex.assert_trees_all_close(a, b, rtol=rtol, atol=1e-6)


def filled(ids, value):
    """The population with everyone else's features replaced."""
    x = np.full_like(EXAMPLES_1["x"], value)
    for i in ids:
        x[OFFSETS[i] : OFFSETS[i + 1]] = EXAMPLES_1["x"][OFFSETS[i] : OFFSETS[i + 1]]
    return Packed(EXAMPLES_1 | {"x": x}, OFFSETS)


def test_row_1_everyone_is_empty():
    got, _ = trained([3])
    chex.assert_trees_all_equal(got.update, jax.tree.map(jnp.zeros_like, PARAMS))
    assert got.metrics["valid_clients"] == 0
    assert got.metrics["excluded_clients"] == 0


@pytest.mark.parametrize("by", ["examples", "uniform"])
def test_row_1_one_client_is_empty(by):
    with_it, _ = trained([0, 3, 1], by=by)
    without, _ = trained([0, 1], by=by)
    assert_same(with_it.update, without.update)
    assert with_it.metrics["train_loss"] == without.metrics["train_loss"]


def constant_update(size=()) -> ClientProgram:
    """The update is the client's own constant: its examples are all the same number."""
    return ClientProgram(
        lambda shared, state, key: jnp.zeros(size),
        lambda shared, carry, batch, key: jnp.broadcast_to(batch["x"][0], size),
        lambda shared, carry, state, key: (carry, state, {}),
    )


@jax.jit
def mean_constant(cohort):
    return map_clients(
        constant_update(), (), cohort, jax.random.key(0), reduce=mean("examples")
    ).update


@pytest.mark.parametrize("epochs", [1, 5])
@pytest.mark.parametrize("batch_size", [10, 500])
def test_rows_2_3_weights_count_examples_not_batches_or_epochs(batch_size, epochs):
    x = np.repeat(f32([1, 2]), [10, 1000])
    train = Packed({"x": x}, np.array([0, 10, 1010]))
    cohort = plan_round(
        [0, 1],
        train,
        LocalWork(batch_size=batch_size, epochs=epochs),
        seed=0,
        round=0,
    )
    got = mean_constant(cohort)
    np.testing.assert_allclose(got, (10 * 1 + 1000 * 2) / 1010, rtol=1e-6)


def test_row_5_weights_by_examples_and_uniform_by_hand(run):
    x = np.repeat(f32([3, 6]), [1, 2])
    train = Packed({"x": x}, np.array([0, 1, 3]))
    cohort = plan_round([0, 1], train, WORK, seed=0, round=0)

    def both(cohort):
        return [
            map_clients(
                constant_update(), (), cohort, jax.random.key(0), reduce=mean(by)
            ).update
            for by in ("examples", "uniform")
        ]

    np.testing.assert_allclose(run(both)(cohort), [5.0, 4.5], rtol=1e-6)


def test_row_6_a_client_without_a_full_batch_does_not_dilute_the_mean():
    work = LocalWork(batch_size=5, drop_remainder=True)
    # Client 0 has 1 example; client 1 has 7.
    together, _ = trained([0, 1], by="uniform", work=work)
    alone, _ = trained([1], by="uniform", work=work)
    assert_same(together.update, alone.update)
    assert together.metrics["valid_clients"] == 1
    assert together.metrics["num_examples"] == 7


@pytest.mark.parametrize("name", ["plain", "blocks of 3", "blocks of 2 on 4 devices"])
def test_row_7_together_is_the_mean_of_one_by_one(name):
    ids = [0, 1, 2]
    alone = [trained([i], how=HOW[name])[0] for i in ids]
    weights = np.array(SIZES)[ids] / np.sum(np.array(SIZES)[ids])
    expected = jax.tree.map(
        lambda *u: sum(w * np.float64(x) for w, x in zip(weights, u, strict=True)),
        *[a.update for a in alone],
    )
    together, cohort = trained(ids, how=HOW[name])
    assert_same(together.update, expected)
    # And both equal plain NumPy.
    params = {k: v.astype(np.float64) for k, v in PARAMS.items()}
    sizes = dict(enumerate(SIZES))
    delta, losses = fedavg_delta(params, X, Y, visits(cohort), sizes, 0.3)
    assert_same(together.update, delta)
    for slot, i in enumerate(ids):
        np.testing.assert_allclose(
            together.client_metrics["train_loss"][slot], losses[i], rtol=1e-5
        )


@pytest.mark.parametrize("value", [np.nan, 1e30, -np.inf])
@pytest.mark.parametrize(
    "name", ["plain", "blocks of 3", "blocks of 2", "blocks of 2 on 4 devices"]
)
def test_row_7_other_clients_examples_do_not_leak(name, value):
    for ids in ([0], [1], [0, 2]):
        clean, _ = trained(ids, how=HOW[name])
        dirty, _ = trained(ids, how=HOW[name], train=filled(ids, value))
        chex.assert_trees_all_equal(dirty, clean)


@pytest.mark.parametrize("name", ["blocks of 3", "at most 24 steps"])
def test_row_7_a_batch_holds_only_rows_of_its_client(name):
    def step(shared, carry, batch, key):
        return jnp.maximum(carry, jnp.abs(batch["x"]).max())  # masked rows too

    program = ClientProgram(
        lambda shared, state, key: jnp.float32(0),
        step,
        lambda shared, carry, state, key: (carry, state, {}),
    )
    cohort = plan_round(
        [1, 0], filled([0, 1], 1e30), WORK, seed=0, round=0, execution=HOW[name]
    )
    got = jax.jit(
        lambda c: map_clients(program, (), c, jax.random.key(0), reduce=stack())
    )(cohort)
    own = [np.abs(TRAIN.client(i)["x"]).max() for i in (1, 0)]
    np.testing.assert_array_equal(got.update, f32(own))


# Row 19: an update that is not finite.


def broken_transform() -> Transform:
    """Breaks the update of whoever's update starts with a number above 2."""
    return stateless(
        lambda message, key: message._replace(
            update=jnp.where(message.update > 2, jnp.inf, message.update)
        )
    )


@pytest.mark.parametrize(
    "name", ["plain", "blocks of 3", "blocks of 2 on 4 devices", "at most 24 steps"]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_row_19_a_broken_client_is_excluded_counted_and_named(name, bad):
    x = f32([0, 1, bad, 1.5, 3, 0.5])  # client 2: its update; 4: the transform
    train = Packed({"x": x}, np.arange(7))
    state = ((), jnp.arange(6.0))

    def keep(transform):
        # Give the transform a state that must stay with a client that is excluded.
        def apply(message, state, key):
            message, _ = transform.apply(message, (), key)
            return message, state + 10

        return transform._replace(apply=apply)

    program = with_transform(constant_update(), keep(broken_transform()))

    @jax.jit
    def run(cohort):
        reduce = mean("uniform")
        return map_clients(
            program, (), cohort, jax.random.key(0), reduce=reduce, client_state=state
        )

    def result(ids):
        return run(
            plan_round(
                ids, train, WORK, seed=0, round=0, execution=HOW[name], cohort_size=6
            )
        )

    got = result([5, 4, 3, 2, 1])
    np.testing.assert_array_equal(got.failure, [0, 2, 0, 1, 0, 0])
    np.testing.assert_array_equal(got.metrics["failure"], got.failure)
    assert [STAGES[f] for f in got.failure[:4]] == ["", "transform", "", "local update"]
    np.testing.assert_array_equal(got.valid, [True, False, True, False, True, False])
    assert got.metrics["excluded_clients"] == 2
    assert got.metrics["valid_clients"] == 3
    np.testing.assert_array_equal(got.client_state[1], [0, 11, 2, 13, 4, 15])
    others = result([5, 3, 1])
    np.testing.assert_allclose(got.update, 1.0, rtol=1e-6)
    np.testing.assert_allclose(got.update, others.update, rtol=1e-6)
    np.testing.assert_array_equal(got.client_state[1], others.client_state[1])
    for metric in ("uplink_bytes", "num_examples"):
        assert got.metrics[metric] == others.metrics[metric]
    nobody = result([2, 4])
    assert nobody.update == 0
    assert nobody.metrics["excluded_clients"] == 2
    assert nobody.metrics["valid_clients"] == 0


def test_row_19_a_nan_in_the_data_reaches_only_its_client():
    x = EXAMPLES_1["x"].copy()
    x[OFFSETS[2] + 5] = np.nan
    train = Packed(EXAMPLES_1 | {"x": x}, OFFSETS)
    for name in ("plain", "blocks of 3"):
        got, _ = trained([0, 2, 1, 4], train=train, how=HOW[name])
        others, _ = trained([0, 1, 4], how=HOW[name])
        np.testing.assert_array_equal(got.failure, [0, 1, 0, 0, 0])
        assert_same(got.update, others.update)
        np.testing.assert_allclose(
            got.metrics["train_loss"], others.metrics["train_loss"], rtol=1e-6
        )


def with_state(finish) -> ClientProgram:
    return ClientProgram(
        lambda shared, state, key: jnp.float32(0),
        lambda shared, carry, batch, key: batch["x"][0],
        finish,
    )


def test_row_19_a_broken_client_state_excludes_its_client():
    train = Packed({"x": f32([1, -1, 4])}, np.arange(4))
    program = with_state(lambda shared, x, state, key: (x, jnp.sqrt(x), {}))
    cohort = plan_round([0, 1, 2], train, WORK, seed=0, round=0)
    got = jax.jit(
        lambda c, s: map_clients(
            program, (), c, jax.random.key(0), reduce=mean("uniform"), client_state=s
        )
    )(cohort, jnp.float32([7, 8, 9]))
    np.testing.assert_array_equal(got.failure, [0, 1, 0])
    np.testing.assert_array_equal(got.client_state, [1, 8, 2])
    np.testing.assert_allclose(got.update, 2.5)


# Metrics.


def test_row_26_train_loss_is_a_mean_over_steps():
    # Loss of an example is its x, whatever the parameters: 1 step of 0, 25 of 1.
    x = np.repeat(f32([0, 1]), [1, 99])
    train = Packed({"x": x}, np.array([0, 1, 100]))
    program = local_sgd(lambda w, batch, key: batch["x"] + 0 * w, optax.sgd(0.1))
    cohort = plan_round(
        [0, 1], train, LocalWork(batch_size=4, epochs=3), seed=0, round=0
    )
    got = jax.jit(
        lambda c: map_clients(
            program, jnp.float32(0), c, jax.random.key(0), reduce=mean()
        )
    )(cohort)
    np.testing.assert_array_equal(got.client_metrics["train_loss"][:2], [0, 1])
    np.testing.assert_allclose(got.metrics["train_loss"], 75 / 78, rtol=1e-6)


# Random numbers.


def draws() -> ClientProgram:
    """Three numbers per client: drawn at the start, in its last step and at the end."""

    def step(shared, carry, batch, turn):
        first, last, _ = carry
        return first, jax.random.bits(turn.key), last

    def finish(shared, carry, state, turn):
        return jnp.stack([*carry, jax.random.bits(turn.key)]), state, {}

    zero = jnp.uint32(0)
    return ClientProgram(
        lambda shared, state, turn: (jax.random.bits(turn.key), zero, zero),
        step,
        finish,
    )


@jax.jit
def stacked_draws(cohort, key):
    return map_clients(draws(), (), cohort, key, reduce=stack()).update


def drawn(ids, how, key=0, round=0):
    # Everyone has the same eight examples, so two local steps.
    train = Packed({"x": np.ones(8 * 20, np.float32)}, np.arange(21) * 8)
    cohort = plan_round(
        ids, train, WORK, seed=0, round=round, execution=how, cohort_size=8
    )
    out = stacked_draws(cohort, jax.random.key(key))
    return dict(zip(ids, map(tuple, np.asarray(out)), strict=False))


def test_keys_belong_to_clients_exactly():
    base = drawn([3, 1, 17, 8], HOW["plain"])
    for name, ids in [
        ("plain", [1]),
        ("plain", [8, 17, 1, 3, 0]),
        ("blocks of 2", [17, 3]),
        ("blocks of 2 on 4 devices", [0, 1, 2, 3, 17, 8]),
    ]:
        other = drawn(ids, HOW[name])
        for i in base.keys() & other.keys():
            assert other[i] == base[i]


def test_keys_differ_between_clients_stages_steps_and_rounds():
    # 32 numbers of 32 bits collide with probability 1.2e-7.
    a, b = drawn([0, 1, 2, 19], HOW["plain"]), drawn([0, 1, 2, 19], HOW["plain"], key=1)
    numbers = [n for out in (a, b) for numbers in out.values() for n in numbers]
    assert len(numbers) == 32
    assert len(set(numbers)) == 32


# Differentiation.


@functools.cache
def meta_loss(name="fedavg"):
    def loss(client_lr, cohort):
        config: dict[str, Any] = {
            "client_lr": client_lr,
            "work": LocalWork(batch_size=4),
        }
        if name == "scaffold":
            algorithm = scaffold.make(scaffold.Config(**config), softmax_loss)
        else:
            algorithm = fedavg.make(
                fedavg.Config(**config),
                softmax_loss,
                transform=clip(0.5) if name == "clip" else None,
            )
        state, _ = algorithm.round(
            algorithm.init(PARAMS, len(SIZES)), cohort, jax.random.key(0)
        )
        everyone = {"x": jnp.float32(X), "y": jnp.int32(Y)}
        return softmax_loss(state.params, everyone, None).mean()

    return jax.jit(jax.value_and_grad(loss))


def test_a_gradient_through_a_round_equals_finite_differences():
    how = dataclasses.replace(HOW["blocks of 2 on 4 devices"], max_steps=20)
    # Padding clients and an empty one take part in nothing, gradients included.
    cohort = plan_round(
        [1, 3, 2, 0], TRAIN, WORK, seed=0, round=0, execution=how, cohort_size=8
    )
    value, slope = meta_loss()(0.3, cohort)
    params = {k: v.astype(np.float64) for k, v in PARAMS.items()}
    sizes, orders = dict(enumerate(SIZES)), visits(cohort)

    def loss(lr):
        after = fedavg_round(params, X, Y, orders, sizes, lr, 1.0)
        return softmax_gradient(after, X, Y)[0]

    np.testing.assert_allclose(value, loss(0.3), rtol=1e-5)
    difference = (loss(0.3 + 1e-5) - loss(0.3 - 1e-5)) / 2e-5
    np.testing.assert_allclose(slope, difference, rtol=1e-4)


@pytest.mark.parametrize("name", ["scaffold", "clip"])
def test_a_gradient_through_a_round_sees_nothing_of_other_clients(name):
    ids = [1, 0]
    # Blocks of 3 leave a lane to padding, and two devices one without any client.
    how = Execution(block_size=3, mesh=mesh(2), max_steps=3)

    def result(train):
        cohort = plan_round(
            ids, train, WORK, seed=0, round=0, execution=how, cohort_size=4
        )
        return meta_loss(name)(0.3, cohort)

    clean = result(TRAIN)
    chex.assert_tree_all_finite(clean)
    for value in (np.nan, 1e30):
        chex.assert_trees_all_equal(result(filled(ids, value)), clean)


# What a client knows of its turn, and what it alone receives.


def tell() -> ClientProgram:
    """Sends what its turn says: at the start, in the last step and at the end."""

    def of(turn):
        return jnp.stack([turn.round, turn.step, turn.num_steps, turn.num_examples])

    return ClientProgram(
        lambda shared, state, turn: (of(turn), jnp.zeros(4, jnp.int32)),
        lambda shared, carry, batch, turn: (carry[0], of(turn)),
        lambda shared, carry, state, turn: (jnp.stack([*carry, of(turn)]), state, {}),
    )


@pytest.mark.parametrize("name", ["blocks of 3", "blocks of 2 on 4 devices"])
def test_a_turn_says_where_in_the_round_a_client_stands(name):
    cohort = plan_round([1, 4], TRAIN, WORK, seed=0, round=5, execution=HOW[name])
    got = jax.jit(
        lambda c: map_clients(tell(), (), c, jax.random.key(0), reduce=stack())
    )(cohort)
    for told, sizes in zip(got.update, (7, 10), strict=True):
        steps = WORK.epochs * -(-sizes // WORK.batch_size)
        np.testing.assert_array_equal(
            told,
            [
                [5, 0, steps, sizes],
                [5, steps - 1, steps, sizes],
                [5, steps, steps, sizes],
            ],
        )
    walked = WORK.epochs * sum(-(-n // WORK.batch_size) for n in (7, 10))
    assert got.metrics["local_steps"] == walked


@pytest.mark.parametrize("name", HOW)
def test_a_client_receives_its_own_row(name):
    rows = {"a": jnp.arange(6.0), "b": jnp.arange(12).reshape(6, 2)}
    program = ClientProgram(
        lambda shared, state, turn: shared,
        lambda shared, carry, batch, turn: carry,
        lambda shared, carry, state, turn: (carry, state, {}),
    )
    cohort = plan_round(
        [2, 3, 4, 1], TRAIN, WORK, seed=0, round=0, execution=HOW[name], cohort_size=6
    )
    got = jax.jit(
        lambda c, rows: map_clients(
            program, jnp.float32(7), c, jax.random.key(0), reduce=stack(), each=rows
        )
    )(cohort, rows)
    everyone, own = got.update
    valid = np.asarray(cohort.client_mask)
    np.testing.assert_array_equal(everyone, np.where(valid, 7, 0))
    for k in rows:
        shaped = valid.reshape(-1, *[1] * (rows[k].ndim - 1))
        np.testing.assert_array_equal(own[k], np.where(shaped, rows[k], 0))
    assert got.metrics["downlink_bytes"] == (4 + 4 + 8) * valid.sum()
    assert got.metrics["uplink_bytes"] == (4 + 4 + 8) * valid.sum()


def test_only_some_clients_is_the_plan_without_the_others():
    ids = [2, 3, 4, 1]
    cohort = plan_round(ids, TRAIN, WORK, seed=0, round=0, cohort_size=6)
    keep = jnp.array([True, False, True, False, True, True])
    step = jax.jit(
        lambda c: map_clients(
            local_sgd(softmax_loss, optax.sgd(0.1)),
            PARAMS,
            c,
            jax.random.key(0),
            reduce=mean(),
        )
    )
    got = step(cohort.only(keep))
    others = step(plan_round([2, 4], TRAIN, WORK, seed=0, round=0, cohort_size=6))
    chex.assert_trees_all_equal(got.update, others.update)
    np.testing.assert_array_equal(got.valid, keep & cohort.client_mask)


@pytest.mark.parametrize("drop", [False, True])
def test_first_epochs_walk_the_same_examples_in_the_same_order(drop):
    work = LocalWork(batch_size=3, epochs=3, drop_remainder=drop)
    cohort = plan_round([1, 4, 0], TRAIN, work, seed=0, round=0)
    one = dataclasses.replace(work, epochs=1)
    once = plan_round([1, 4, 0], TRAIN, one, seed=0, round=0)
    np.testing.assert_array_equal(cohort.first_epochs().num_steps, once.num_steps)
    np.testing.assert_array_equal(cohort.first_epochs(5).num_steps, cohort.num_steps)
    whole, first = visits(cohort.first_epochs()), visits(once)
    for i in first:
        for a, b in zip(whole[i], first[i], strict=True):
            np.testing.assert_array_equal(a, b)


def test_first_epochs_of_counted_steps_are_refused():
    work = LocalWork(batch_size=3, steps=2)
    cohort = plan_round([1], TRAIN, work, seed=0, round=0)
    with pytest.raises(ValueError, match=r"work must count epochs .* got steps=2"):
        cohort.first_epochs()


# Dtypes, shapes, errors.


def scalar_loss(w, batch, key):
    return jnp.square(w - batch["x"].astype(w.dtype)[:, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scalar_and_bfloat16_params(dtype):
    program = local_sgd(scalar_loss, optax.sgd(0.25))
    how = HOW["blocks of 2 on 4 devices"]
    cohort = plan_round([1, 4, 0], TRAIN, WORK, seed=0, round=0, execution=how)
    got = jax.jit(
        lambda c: map_clients(program, dtype(0.5), c, jax.random.key(0), reduce=mean())
    )(cohort)
    deltas = []
    for walk in (visits(cohort)[i] for i in (1, 4, 0)):
        w = 0.5
        for batch in walk:
            w -= 0.25 * 2 * (w - X[batch, 0]).mean()
        deltas.append(w - 0.5)
    expected = np.average(deltas, weights=[7, 10, 1])
    assert got.update.dtype == jnp.float32, "sums are kept in float32"
    assert got.update.shape == ()
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got.update, expected, atol=8 * eps)


def test_mean_takes_a_numpy_array():
    x = f32([1, 2, 4])
    train = Packed({"x": x}, np.arange(4))
    cohort = plan_round([2, 0, 1], train, WORK, seed=0, round=0)
    weights = np.array([3, 0, 1])
    got = jax.jit(
        lambda c: map_clients(
            constant_update(), (), c, jax.random.key(0), reduce=mean(weights)
        )
    )(cohort)
    np.testing.assert_allclose(got.update, (3 * 4 + 1 * 2) / 4, rtol=1e-6)


@pytest.mark.parametrize("make", [mean, total])
def test_mixing_weights_of_another_length_are_refused(make):
    cohort = plan_round([0, 1], TRAIN, WORK, seed=0, round=0)
    program = local_sgd(softmax_loss, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"shape \(2,\), got shape \(3,\)"):
        map_clients(
            program, PARAMS, cohort, jax.random.key(0), reduce=make(jnp.ones(3))
        )


def test_unknown_weights_are_refused():
    with pytest.raises(ValueError, match="by must be one of 'examples', 'uniform'"):
        mean("steps")
    with pytest.raises(TypeError, match="by must be 'examples', 'uniform' or an array"):
        mean(2.0)
    cohort = plan_round([0], TRAIN, WORK, seed=0, round=0)
    with pytest.raises(TypeError, match="reduce must consist of Reductions"):
        map_clients(add_up(), (), cohort, jax.random.key(0), reduce={"a": "mean"})


def test_a_loss_that_is_not_per_example_is_refused():
    cohort = plan_round([1], TRAIN, WORK, seed=0, round=0)
    program = local_sgd(lambda *a: softmax_loss(*a).mean(), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"one loss per example, shape \(4,\), got"):
        map_clients(program, PARAMS, cohort, jax.random.key(0), reduce=mean())
