"""`simulate` gives the same run however it is executed, and says so when it can't."""

import dataclasses
import functools
import logging
import os
import random
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core import (
    Algorithm,
    Availability,
    ClientProgram,
    Execution,
    FederatedData,
    Full,
    LocalWork,
    NonFiniteUpdateError,
    Poisson,
    Result,
    RunDirError,
    client_mesh,
    clip,
    gaussian_mean,
    map_clients,
    mean,
    plan_round,
    simulate,
    top_k,
    transform,
)
from fedjax_core import execution as execution_lib
from fedjax_core.algorithms import fedavg, scaffold
from fedjax_core.models.model import Model

ONE_DEVICE = Execution()
SIZES = (3, 5, 2, 8, 1, 4, 6, 3, 7, 2)
TEST_SIZES = (2, 0, 3, 1, 4, 2, 2, 1, 3, 2)


def residual(params, batch):
    return batch["x"] @ params["w"] + params["b"] - batch["y"]


REGRESSION = Model(
    init=lambda key: {"w": 0.1 * jax.random.normal(key, (3,)), "b": jnp.zeros(())},
    loss=lambda params, batch, key: residual(params, batch) ** 2,
    metrics=lambda params, batch: {
        "loss": residual(params, batch) ** 2,
        "close": (jnp.abs(residual(params, batch)) < 1).astype(jnp.float32),
    },
)


def make_clients(sizes, seed):
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.standard_normal((n, 3)).astype(np.float32),
            "y": rng.standard_normal(n).astype(np.float32),
        }
        for n in sizes
    ]


def make_data(sizes=SIZES, test_sizes: tuple[int, ...] | None = TEST_SIZES, **kwargs):
    test = None if test_sizes is None else make_clients(test_sizes, 1)
    return FederatedData.from_lists(make_clients(sizes, 0), test, **kwargs)


DATA = make_data()


def average(loss=REGRESSION.loss, **kwargs):
    return fedavg.make(
        fedavg.Config(client_lr=0.05, work=LocalWork(batch_size=2)), loss, **kwargs
    )


def momentum_and_residual():
    """State on the server and on every client."""
    return average(server_optimizer=optax.adam(0.05), transform=top_k(0.5))


def controlled():
    return scaffold.make(
        scaffold.Config(client_lr=0.05, work=LocalWork(batch_size=2)), REGRESSION.loss
    )


def run(algorithm=None, data=DATA, model=REGRESSION, **kwargs) -> Result:
    """Six short rounds on one device unless told otherwise."""
    options = {
        "rounds": 6,
        "eval_every": 2,
        "execution": ONE_DEVICE,
        "progress": False,
    }
    if "participation" not in kwargs:
        options["cohort_size"] = 4
    return simulate(algorithm or average(), data, model, **(options | kwargs))


def numbers(result: Result):
    """Every number of a result that may not depend on how it was executed."""
    return {
        "train": result.train,
        "evaluations": result.evaluations,
        "client_metrics": result.client_metrics,
        "state": result.state,
    }


def assert_same(a, b, exact=True):
    """Equal bit for bit, or up to float32 rounding."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if exact:
            np.testing.assert_array_equal(x, y, err_msg=name, strict=True)
        else:
            np.testing.assert_allclose(x, y, 2e-5, 2e-6, err_msg=name)


@functools.cache
def reference_run(make, seeds: Any = 0) -> Result:
    """A run on one device with everything on it."""
    return run(make(), seeds=seeds)


def reference(make, seeds: Any = 0):
    """Its numbers."""
    return numbers(reference_run(make, seeds))


def seed_of(tree, s):
    return jax.tree.map(lambda x: x[s : s + 1], tree)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Draws what it is told, the last cohort for ever."""

    cohorts: tuple[tuple[int, ...], ...]

    def draw(self, seed, round, num_clients):
        return np.array(self.cohorts[min(round, len(self.cohorts) - 1)], np.int64)

    def max_cohort_size(self, num_clients):
        return max(map(len, self.cohorts))

    def expected_cohort_size(self, num_clients):
        return float(np.mean([len(c) for c in self.cohorts]))


# ---- seeds ----


@pytest.mark.parametrize(
    ("make", "axis"), [(momentum_and_residual, "vmap"), (controlled, "map")]
)
def test_several_seeds_are_as_many_runs(make, axis):
    # In turn, as they are on CPU unless told otherwise.
    in_turn = axis == "map"
    both = (
        reference_run(make, (3, 5))
        if in_turn
        else run(make(), seeds=[3, 5], seeds_axis=axis)
    )
    assert both.seeds == (3, 5)
    assert both.compilations == 1
    for s, seed in enumerate(both.seeds):
        alone = reference(make, seed)
        assert_same(seed_of(numbers(both), s), alone, exact=False)
        for count in ("valid_clients", "num_examples", "uplink_bytes"):
            np.testing.assert_array_equal(
                both.train[count][s], alone["train"][count][0]
            )


def test_every_seed_starts_and_draws_on_its_own():
    # They may be NumPy's integers.
    result = run(seeds=np.array([0, 1, 2**32 - 1]))
    assert result.seeds == (0, 1, 2**32 - 1)
    assert_same(seed_of(numbers(result), 0), reference(average), exact=False)
    weights = np.asarray(result.params["w"])
    assert len(np.unique(weights[:, 0])) == 3
    given = {"w": np.ones(3, np.float32), "b": np.float32(0)}
    shared = run(seeds=[0, 1], rounds=3, params=given)
    # The same start for all seeds: what is left are the cohorts.
    assert not np.array_equal(
        shared.train["num_examples"][0], shared.train["num_examples"][1]
    )
    np.testing.assert_array_equal(given["w"], 1)


# ---- compilation and schedule ----


@pytest.mark.parametrize(
    ("rounds", "eval_every", "expected"),
    [(7, 3, [3, 6, 7]), (1, None, [1]), (5, 9, [5]), (4, 1, [1, 2, 3, 4])],
)
def test_the_last_round_is_evaluated_and_all_rounds_share_a_program(
    rounds, eval_every, expected
):
    result = run(rounds=rounds, eval_every=eval_every)
    assert result.compilations == 1
    assert result.rounds == rounds
    np.testing.assert_array_equal(result.evaluated, expected)
    for values in result.train.values():
        assert values.shape == (1, rounds)
    for values in result.evaluations.values():
        assert values.shape == (1, len(expected))


def test_nothing_compiles_after_the_first_report():
    compiled, seen = [], []

    def listen(event, duration_secs, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(rounds=11, eval_every=2, callbacks=[lambda _: seen.append(len(compiled))])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert seen[0] > 0
    assert len(seen) >= 6
    assert len(set(seen)) == 1, seen


@dataclasses.dataclass(frozen=True)
class Varying:
    """Cohorts of 80 to 120 clients; reserves room for `reserved` of them."""

    reserved: int

    def draw(self, seed, round, num_clients):
        rng = np.random.default_rng([seed, round])
        size = (80, 120)[round] if round < 2 else rng.integers(80, 121)
        return np.sort(rng.choice(num_clients, size, replace=False))

    def max_cohort_size(self, num_clients):
        return self.reserved

    def expected_cohort_size(self, num_clients):
        return 100.0


@pytest.mark.parametrize("feed", ["device", "host"])
@pytest.mark.parametrize("reserved", [120, 70])
def test_cohorts_of_many_sizes_need_few_compilations(feed, reserved):
    rng = np.random.default_rng(0)
    data = make_data(tuple(rng.integers(1, 6, 150)), None)
    arrays = []
    result = run(
        data=data,
        participation=Varying(reserved),
        rounds=40,
        eval_every=1,
        feed=feed,
        callbacks=[lambda _: arrays.append(len(jax.live_arrays()))],
    )
    sizes = result.train["valid_clients"][0]
    assert {sizes.min(), sizes.max()} == {80, 120}
    assert len(np.unique(sizes)) > 10
    assert result.compilations <= (1 if reserved == 120 else 4)
    # Memory is flat: at most the chunk that is being prepared comes and goes, and it
    # has fewer than 16 arrays.
    assert max(arrays[20:]) <= max(arrays[:20]) + 16


# ---- reproducibility ----


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not():
    first = reference(momentum_and_residual, 3)
    assert_same(first, numbers(run(momentum_and_residual(), seeds=3)))
    other = reference(momentum_and_residual, 5)
    assert not np.array_equal(
        first["train"]["num_examples"], other["train"]["num_examples"]
    )
    assert not np.array_equal(first["state"].params["w"], other["state"].params["w"])


def test_global_generators_are_neither_read_nor_changed():
    expected = reference(average)
    np.random.seed(11)  # noqa: NPY002
    random.seed(11)
    states = [(np.random.get_state(), random.getstate())]  # noqa: NPY002

    def callback(report):
        state = np.random.get_state(), random.getstate()  # noqa: NPY002
        np.testing.assert_equal(state, states[-1])
        np.random.seed(report.round)  # noqa: NPY002
        random.seed(report.round)
        states.append((np.random.get_state(), random.getstate()))  # noqa: NPY002

    assert_same(numbers(run(callbacks=[callback])), expected)
    state = np.random.get_state(), random.getstate()  # noqa: NPY002
    np.testing.assert_equal(state, states[-1])
    assert len(states) == 4


def test_data_and_initial_parameters_stay_as_they_were():
    data = make_data()
    before = jax.tree.map(np.copy, dict(data.train.examples))
    params = {"w": jnp.arange(3.0), "b": jnp.float32(1)}
    run(data=data, params=params)
    assert_same(dict(data.train.examples), before)
    np.testing.assert_array_equal(params["w"], [0, 1, 2])  # not donated


# ---- cohorts without work ----


@pytest.mark.parametrize("feed", ["device", "host"])
def test_a_round_of_nobody_leaves_everything_as_it_was(feed):
    # Momentum would go on moving the model, and Adam's step count would count.
    data = make_data((3, 0, 2, 0), None)
    algorithm = fedavg.make(
        fedavg.Config(),
        REGRESSION.loss,
        server_optimizer=optax.chain(optax.trace(0.9), optax.adam(0.1)),
    )

    not_drawn, no_data = (), (1, 3)
    cohorts = (
        not_drawn, (0, 2), (0, 1), not_drawn, not_drawn, (2,), no_data, no_data, (0,)
    )  # fmt: skip
    kept = []
    result = run(
        algorithm,
        data=data,
        participation=Scripted(cohorts),
        params={"w": np.ones(3), "b": 2.0},
        rounds=len(cohorts),
        eval_every=1,
        feed=feed,
        callbacks=[lambda r: kept.append(jax.tree.map(np.array, r.state))],
    )
    np.testing.assert_array_equal(kept[0].params["w"], np.ones((1, 3)))
    for after, before in ((3, 2), (4, 2), (6, 5), (7, 5)):
        assert_same(kept[after], kept[before])
    for after, before in ((1, 0), (2, 1), (5, 4), (8, 7)):
        assert not np.array_equal(kept[after].params["w"], kept[before].params["w"])
    valid = [0, 2, 1, 0, 0, 1, 0, 0, 1]
    np.testing.assert_array_equal(result.train["valid_clients"][0], valid)
    assert np.isfinite(kept[-1].params["w"]).all()


def test_noise_arrives_in_a_round_of_nobody():
    # Were the model to stay as it is, it would tell that nobody took part.
    algorithm = fedavg.make(
        fedavg.Config(),
        REGRESSION.loss,
        transform=clip(1.0),
        reduce=gaussian_mean(1.0, expected_cohort_size=2),
    )
    result = run(
        algorithm,
        data=make_data((3, 0), None),
        participation=Scripted(((1,),)),
        params={"w": jnp.zeros(3), "b": jnp.float32(0)},
        rounds=1,
    )
    assert (np.asarray(result.params["w"]) != 0).all()


def test_a_population_in_which_nobody_could_train_is_refused():
    data = FederatedData.from_lists([*make_clients((0, 0), 0)])
    with pytest.raises(ValueError, match="data must give some client a local step"):
        run(data=data, participation=Full())
    config = fedavg.Config(work=LocalWork(batch_size=9, drop_remainder=True))
    with pytest.raises(ValueError, match=r"got at most 8 .*batch_size=9.*remainder"):
        run(fedavg.make(config, REGRESSION.loss))


def test_a_client_without_examples_changes_nothing():
    data = make_data((3, 0, 2, 4), None)
    params = REGRESSION.init(jax.random.key(0))
    results = [
        run(data=data, participation=Scripted((cohort,)), params=params, rounds=3)
        for cohort in ((0, 1, 2), (0, 2))
    ]
    assert_same(numbers(results[0]), numbers(results[1]), exact=False)
    np.testing.assert_array_equal(results[0].train["valid_clients"], 2)


def test_poisson_cohorts_may_be_empty():
    participation = Poisson(rate=0.05)
    sizes = [len(participation.draw(0, k, 10)) for k in range(12)]
    assert 0 in sizes
    assert max(sizes) > 0
    states = []
    result = run(
        momentum_and_residual(),
        participation=participation,
        rounds=12,
        eval_every=1,
        callbacks=[lambda r: states.append(jax.tree.map(np.array, r.state))],
    )
    np.testing.assert_array_equal(result.train["valid_clients"][0], sizes)
    np.testing.assert_array_equal(
        np.isnan(result.train["train_loss"][0]), np.equal(sizes, 0)
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state))
    empty = [k for k in range(1, 12) if sizes[k] == 0]
    for k in empty:
        assert_same(states[k].clients, states[k - 1].clients)
    assert "nan" not in repr(result) or sizes[-1] == 0


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rounds": 0}, ValueError, "rounds must be >= 1, got 0"),
        ({"rounds": 2.5}, TypeError, "rounds must be an int, got 2.5"),
        ({"rounds": None}, TypeError, "rounds must be an int, got None"),
        ({"cohort_size": 0}, ValueError, "cohort_size must be >= 1, got 0"),
        ({"cohort_size": 2.0}, TypeError, "cohort_size must be an int, got 2.0"),
        ({"cohort_size": 20}, ValueError, "cohort_size must be <= num_clients=10, got 20"),  # noqa: E501
        ({"cohort_size": None}, ValueError, "cohort_size=None and participation=None"),
        ({"participation": Full(), "cohort_size": 3}, ValueError, "cohort_size=3 and"),
        ({"eval_every": 0}, ValueError, "eval_every must be >= 1, got 0"),
        ({"eval_every": -1}, ValueError, "eval_every must be >= 1, got -1"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every must be >= 1, got 0"),
        ({"eval_splits": ("tset",)}, ValueError, "eval_splits .*'test'.* got 'tset'"),
        ({"eval_splits": "tset"}, ValueError, "eval_splits .*got 'tset'"),
        ({"seeds": -1}, ValueError, "seeds .*got -1"),
        ({"seeds": 2**32}, ValueError, "seeds .*got 4294967296"),
        ({"seeds": ()}, ValueError, r"seeds .*got \(\)"),
        ({"seeds": [1, 1]}, ValueError, r"seeds .*distinct.*got \(1, 1\)"),
        ({"seeds": [0.5]}, TypeError, "seeds .*got 0.5"),
        ({"seeds": True}, TypeError, "seeds .*got True"),
        ({"seeds": "7"}, TypeError, "seeds .*got '7'"),
        ({"seeds": None}, TypeError, "seeds .*got None"),
        ({"seeds": 1.5}, TypeError, "seeds .*got 1.5"),
        ({"feed": "disk"}, ValueError, "feed must be one of .*got 'disk'"),
        ({"client_store": "disk"}, ValueError, "client_store must be .*got 'disk'"),
        ({"seeds_axis": "pmap"}, ValueError, "seeds_axis must be one of .*got 'pmap'"),
        ({"resume": True}, ValueError, "resume .*run_dir=None"),
        ({"callbacks": print}, TypeError, "callbacks .*got <built-in function print>"),
        ({"callbacks": [3]}, TypeError, r"callbacks .*got \[3\]"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, error, message, tmp_path):
    target = tmp_path / "run"
    if "resume" not in arguments:
        arguments = {"run_dir": target, **arguments}
    with pytest.raises(error, match=message):
        run(**arguments)
    assert not target.exists()  # a typo leaves no directory behind


def test_too_few_available_clients_name_the_round():
    participation = Availability(
        cohort_size=3, available_fn=lambda round: range(4 if round < 2 else 2)
    )
    with pytest.raises(ValueError, match="round 2 with 2 of 10"):
        run(participation=participation, eval_every=1)


# ---- updates that are not finite ----

NAMES = tuple(f"client-{i}" for i in range(10))


def poisoned(clients):
    data = make_data(client_ids=NAMES)
    for i in clients:
        data.train.client(i)["y"][-1] = np.nan
    return data


def test_broken_clients_are_left_out_and_reported(caplog):
    data = poisoned([3])
    data.train.client(8)["y"][0] = np.inf
    others = (0, 1, 2, 4, 5, 6, 7, 9)
    options = {
        "params": REGRESSION.init(jax.random.key(1)),
        "rounds": 3,
        "seeds": [1, 2],
    }
    with caplog.at_level(logging.WARNING, "fedjax_core"):
        result = run(momentum_and_residual(), data, participation=Full(), **options)
    assert [tuple(e) for e in result.excluded] == [
        (round, seed, client, "local update")
        for round in (1, 2, 3)
        for seed in (1, 2)
        for client in ("client-3", "client-8")
    ]
    assert "client-3" in caplog.text
    np.testing.assert_array_equal(result.train["excluded_clients"], 2)
    np.testing.assert_array_equal(result.train["valid_clients"], 8)
    for residual in jax.tree.leaves(result.state.clients):
        np.testing.assert_array_equal(np.asarray(residual)[:, [3, 8]], 0)
    without = run(
        momentum_and_residual(), data, participation=Scripted((others,)), **options
    )
    assert without.excluded == []
    assert result.train.keys() == without.train.keys()
    for other in ("excluded_clients", "downlink_bytes"):  # they did receive the model
        assert np.all(result.train.pop(other) > without.train.pop(other))
    assert_same(numbers(result), numbers(without), exact=False)


def test_a_broken_transform_is_named():
    broken = transform.stateless(
        lambda message, key: message._replace(
            update=jax.tree.map(
                lambda u: jnp.where(jnp.abs(u).max() > 0, u / 0.0, u), message.update
            )
        )
    )
    with pytest.raises(NonFiniteUpdateError, match="the transform of client"):
        run(average(transform=broken))


@pytest.mark.parametrize("client_store", ["device", "host"])
def test_strict_stops_at_a_broken_client(client_store):
    cohorts = Scripted(((0, 1), (0, 2), (2, 3), (0, 1)))
    with pytest.raises(
        NonFiniteUpdateError,
        match="round 3, seed 7: the local update of client client-3",
    ) as caught:
        run(
            momentum_and_residual(),
            poisoned([3]),
            participation=cohorts,
            seeds=7,
            eval_every=1,
            strict=True,
            client_store=client_store,
        )
    result = caught.value.result
    assert result.rounds == 3
    assert [tuple(e)[:3] for e in result.excluded] == [(3, 7, "client-3")]
    # The state a result holds is that of the population, wherever it lived.
    assert {x.shape[:2] for x in jax.tree.leaves(result.state.clients)} == {(1, 10)}
    np.testing.assert_array_equal(result.evaluated, [1, 2])


def test_a_cohort_of_broken_clients_is_an_error_that_points_at_it():
    # Round 1 loses one client of two, round 3 all of them, in one chunk of rounds.
    cohorts = Scripted(((0, 1), (1, 2), (1, 3), (0, 2)))
    with pytest.raises(
        NonFiniteUpdateError, match=r"every update.*round 3, seed 0: .*client-1"
    ) as caught:
        run(data=poisoned([1, 3]), participation=cohorts, eval_every=4, rounds=4)
    excluded = [(e.round, e.client_id) for e in caught.value.result.excluded]
    assert excluded[:2] == [(1, "client-1"), (2, "client-1")]
    assert excluded[2:4] == [(3, "client-1"), (3, "client-3")]


# ---- evaluation ----


def test_pooled_accuracy_and_client_mean_are_both_there_and_named():
    constant = Model(
        init=lambda key: {"w": jnp.zeros(())},
        loss=lambda params, batch, key: 0.0 * params["w"] * batch["y"],
        metrics=lambda params, batch: {
            "loss": 0.0 * batch["y"],
            "accuracy": batch["y"],
        },
    )
    clients = [{"y": np.zeros(1, np.float32)}, {"y": np.ones(99, np.float32)}]
    data = FederatedData.from_lists(clients, clients)
    config = fedavg.Config(work=LocalWork(batch_size=10, epochs=3))
    result = run(
        fedavg.make(config, constant.loss),
        data,
        constant,
        participation=Full(),
        rounds=2,
    )
    assert result.final("test_accuracy")[0] == pytest.approx(0.99, abs=1e-6)
    assert result.final("test_accuracy_client_mean")[0] == 0.5
    np.testing.assert_array_equal(result.client_metrics["test_accuracy"], [[0, 1]])
    np.testing.assert_array_equal(result.evaluations["test_loss"], 0)
    np.testing.assert_array_equal(result.train["train_loss"], np.zeros((1, 2)))
    assert "test_accuracy_client_mean        0.5" in repr(result)


def test_training_loss_is_a_mean_over_steps():
    # The model stays put, so every step of client i has loss i: 1 and 3 steps an epoch.
    stay = Model(
        init=lambda key: {"w": jnp.zeros(())},
        loss=lambda params, batch, key: batch["y"] + 0.0 * params["w"],
        metrics=lambda params, batch: {"loss": batch["y"]},
    )
    data = FederatedData.from_lists(
        [{"y": np.full(n, y, np.float32)} for n, y in ((2, 1.0), (5, 2.0))]
    )
    config = fedavg.Config(work=LocalWork(batch_size=2, epochs=3))
    result = run(
        fedavg.make(config, stay.loss), data, stay, participation=Full(), rounds=1
    )
    np.testing.assert_allclose(result.train["train_loss"], (3 * 1 + 9 * 2) / 12, 1e-6)


def test_data_without_a_test_split_trains_all_the_same(tmp_path):
    result = run(
        data=make_data(test_sizes=None), run_dir=tmp_path / "run", progress=True
    )
    assert result.evaluations == {}
    assert result.client_metrics == {}
    assert "train_loss" in repr(result)
    result.plot(path=tmp_path / "train.png")
    assert (tmp_path / "train.png").stat().st_size > 1000
    with pytest.raises(KeyError, match=r"test_loss.*train_loss"):
        result.series("test_loss")


def test_any_split_can_be_evaluated():
    data = FederatedData.from_lists(
        make_clients(SIZES, 0), make_clients([0] * 10, 1), make_clients(SIZES, 2)
    )
    result = run(data=data, eval_splits=("train", "validation", "test"), rounds=2)
    names = {name.split("_")[0] for name in result.evaluations}
    assert names == {"train", "validation"}  # nobody has a test example
    weights = np.asarray(result.params["w"])[0]
    x, y = data.train.examples["x"], data.train.examples["y"]
    expected = np.mean((x @ weights + result.params["b"][0] - y) ** 2)
    np.testing.assert_allclose(result.final("train_loss")[0], expected, rtol=1e-5)


# ---- where things live ----


def on_disk(data, folder):
    """The same data, memory-mapped."""

    def mapped(name, packed):
        examples = {}
        for key, array in packed.examples.items():
            path = folder / f"{name}-{key}"
            array.tofile(path)
            examples[key] = np.memmap(path, array.dtype, "r", shape=array.shape)
        return type(packed)(examples, packed.offsets)

    return FederatedData(**{k: mapped(k, v) for k, v in data.splits.items()})


@pytest.mark.parametrize(("devices", "seeds"), [(1, [3, 5]), (8, 3)])
def test_the_host_feed_gives_the_same_bits(devices, seeds, tmp_path):
    execution = Execution(mesh=client_mesh(jax.devices()[:devices]))
    options = {"seeds": seeds, "execution": execution, "rounds": 5}
    resident = run(average(), **options)
    mapped = run(average(), on_disk(DATA, tmp_path), feed="host", **options)
    assert_same(numbers(mapped), numbers(resident))
    assert mapped.compilations == resident.compilations == 1


@pytest.mark.parametrize("make", [momentum_and_residual, controlled])
def test_client_state_on_the_host_is_the_same(make):
    host = run(make(), seeds=[3, 5], client_store="host")
    assert jax.tree.leaves(host.state.clients)
    assert all(np.any(x) for x in jax.tree.leaves(host.state.clients))
    assert_same(numbers(host), reference(make, (3, 5)), exact=False)


def test_everything_on_the_host_and_on_eight_devices_at_once():
    host = run(
        controlled(),
        seeds=[3, 5],
        feed="host",
        client_store="host",
        seeds_axis="vmap",
        execution=Execution(block_size=2, mesh=client_mesh()),
    )
    assert_same(numbers(host), reference(controlled, (3, 5)), exact=False)


def test_host_devices_share_large_client_states(monkeypatch):
    options = {"execution": Execution(mesh=client_mesh()), "rounds": 3}
    copies = run(controlled(), **options)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(copies.state.clients))
    monkeypatch.setattr(execution_lib, "_WORTH_SHARING", 0)
    shared = run(controlled(), **options)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(shared.state.clients))
    assert_same(numbers(shared), numbers(copies))
    alone = run(controlled(), rounds=3, execution=Execution())
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(alone.state.clients))


def test_a_host_store_without_client_state_is_the_device_one():
    host = run(client_store="host")
    assert_same(numbers(host), reference(average), exact=False)


def test_host_store_survives_cohorts_larger_than_expected():
    @dataclasses.dataclass(frozen=True)
    class Growing(Scripted):
        def max_cohort_size(self, num_clients):
            return 1

    cohorts = ((0,), tuple(range(10)), ())
    options = {"participation": Growing(cohorts), "rounds": 3, "eval_every": 3}
    device = run(momentum_and_residual(), **options)
    host = run(momentum_and_residual(), client_store="host", **options)
    assert_same(numbers(host), numbers(device), exact=False)


def test_host_store_refuses_states_that_start_out_different(monkeypatch):
    def init(params, num_clients):
        state = controlled().init(params, num_clients)
        ramp = {"w": jnp.ones((num_clients, 3)), "b": jnp.arange(float(num_clients))}
        return state._replace(clients=(ramp, state.clients[1]))

    algorithm = dataclasses.replace(controlled(), init=init)
    with pytest.raises(ValueError, match=r"client_store='host'.*scaffold"):
        run(algorithm, client_store="host")
    monkeypatch.setattr(execution_lib, "_WORTH_SHARING", 0)
    result = run(algorithm, rounds=1, execution=Execution(mesh=client_mesh()))
    assert isinstance(result.state.clients[0]["b"], jax.Array)


@pytest.mark.parametrize("make", [momentum_and_residual, controlled])
def test_eight_devices_give_what_one_gives(make):
    eight = run(make(), seeds=3, execution=Execution(mesh=client_mesh()))
    assert_same(numbers(eight), reference(make, 3), exact=False)
    assert eight.compilations == 1


def test_the_default_device_may_be_another_one():
    with jax.default_device(jax.devices()[3]):
        result = run()
    assert result.params["w"].devices() == {jax.devices()[3]}
    assert_same(numbers(result), reference(average))


# ---- callbacks ----


def test_callbacks_see_what_the_result_has_and_may_keep_views_of_it():
    reports, views = [], []

    def callback(report):
        views.append(np.asarray(report.state.params["w"]))
        state = jax.tree.map(np.array, report.state)
        reports.append(report._replace(state=state))

    result = run(
        momentum_and_residual(),
        seeds=[3, 5],
        rounds=7,
        eval_every=3,
        callbacks=[callback],
    )
    assert [r.round for r in reports if r.evaluation] == [3, 6, 7]
    assert reports[-1].round == 7
    for name, values in result.train.items():
        np.testing.assert_array_equal(
            np.concatenate([r.train[name] for r in reports], axis=1), values
        )
    for name, values in result.evaluations.items():
        np.testing.assert_array_equal(
            np.stack([r.evaluation[name] for r in reports if r.evaluation], 1), values
        )
    assert_same(reports[-1].state, jax.tree.map(np.asarray, result.state))
    # Later rounds did not write over what was seen.
    np.testing.assert_array_equal(views, [r.state.params["w"] for r in reports])
    assert len(np.unique(np.stack(views)[:, 0, 0])) == len(views)


def test_a_callback_can_stop_the_run():
    stops = []
    result = run(
        rounds=9,
        callbacks=[lambda r: r.round >= 6, lambda r: stops.append(r.round)],
    )
    assert result.rounds == 6
    assert stops[-1] == 6  # every callback sees the last report
    np.testing.assert_array_equal(result.evaluated, [2, 4, 6])
    assert_same(numbers(result), reference(average))


def test_a_callback_that_raises_ends_the_run_and_its_threads():
    def fail(report):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run(callbacks=[fail])
    assert not [t for t in threading.enumerate() if t.name.startswith("feed")]


def test_a_callback_may_run_a_simulation_of_its_own(capsys):
    inner = []
    outer = run(
        rounds=2,
        progress=True,
        callbacks=[lambda r: inner.append(run(rounds=2, progress=True)) and None],
    )
    assert_same(numbers(inner[0]), numbers(outer))


# ---- what a result can do ----


def test_a_result_in_numbers_and_pictures(tmp_path):
    result = run(seeds=[3, 5, 8], rounds=7, eval_every=3)
    rounds, losses = result.series("train_loss")
    np.testing.assert_array_equal(rounds, np.arange(1, 8))
    assert losses.shape == (3, 7)
    evaluated, values = result.series("test_loss")
    np.testing.assert_array_equal(evaluated, [3, 6, 7])
    mean, std = result.final("test_loss")
    assert mean == pytest.approx(values[:, -1].mean())
    assert std == pytest.approx(values[:, -1].std(ddof=1))
    # Every client of the cohort sends 4 float32 numbers every round.
    assert result.total("uplink_bytes") == 7 * 4 * 4 * 4
    assert repr(result).startswith("Result: 7 rounds, 3 seed(s)\n")
    assert "+-" in repr(result)
    assert result.rounds_per_second > 0
    with pytest.raises(KeyError, match="no metric 'accuracy'"):
        result.final("accuracy")

    from matplotlib.image import imread

    figure = result.plot("test_loss", "train_loss", path=tmp_path / "two.png")
    assert len(figure.axes) == 2
    image = imread(tmp_path / "two.png")
    assert image.shape[1] > image.shape[0] > 100
    assert image.min() < 0.5 < image.max()
    figure.savefig(tmp_path / "again.png", dpi=150)  # with its titles
    np.testing.assert_array_equal(imread(tmp_path / "again.png"), image)
    assert len(result.plot().axes) == len(result.evaluations)


def test_one_seed_has_no_spread():
    result = reference_run(average)
    assert np.isnan(result.final("test_loss")[1])
    assert "+-" not in repr(result)


# ---- progress ----


def test_progress_leaves_stdout_to_the_results(capfd):
    run(rounds=2, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "rounds" in err


def test_no_progress_means_no_output(capfd):
    run(rounds=2, progress=False)
    assert capfd.readouterr() == ("", "")


SCRIPT = """
from fedjax_core import *
from fedjax_core.algorithms import fedavg
from fedjax_core.datasets import digits, partition
model = models.logistic_regression(64, 10)
data = partition.iid(digits.load(), 20)
simulate(fedavg.make(fedavg.Config(), model.loss), data, model, rounds=2, cohort_size=3)
"""


def test_progress_without_a_terminal_does_not_break():
    # Nowhere to print to, and an encoding that lacks the signs a bar is drawn with.
    done = subprocess.run(
        [sys.executable, "-c", "import os; os.close(1)\n" + SCRIPT],
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.strip()
    assert b"\x1b" not in done.stderr


# ---- what algorithms may ask of a run ----


class Learnt(NamedTuple):
    params: Any
    served: Any


def towards_public(copies=1) -> Algorithm:
    """Moves half-way to the mean of the server's data; serves twice its parameters."""

    def round(state, cohort, key):
        target = cohort.public["target"].mean(0)
        params = jax.tree.map(lambda p: p + (target - p) / 2, state.params)
        served = jax.tree.map(lambda p: 2 * p, params)
        return Learnt(params, served), {"round_seen": cohort.round}

    return Algorithm(
        name="towards_public",
        config=None,
        work=LocalWork(batch_size=2),
        init=lambda params, num_clients: Learnt(params, params),
        round=round,
        model=lambda state: state.served,
    )


POINT = Model(
    init=lambda key: jnp.zeros(3),
    loss=lambda params, batch, key: batch["y"] * 0 + params.sum(),
    metrics=lambda params, batch: {"first": batch["y"] * 0 + params[0]},
)


def test_the_servers_data_arrive_in_every_round_and_the_served_model_is_evaluated(
    tmp_path,
):
    target = np.array([[0, 1, 2], [2, 3, 4]], np.float32)
    data = dataclasses.replace(DATA, public={"target": target})
    result = run(
        towards_public(), data, POINT, seeds=(0, 1), rounds=4, run_dir=tmp_path / "run"
    )
    expected = (1 - 0.5**4) * target.mean(0)
    np.testing.assert_allclose(result.params, [expected] * 2, rtol=1e-6)
    np.testing.assert_array_equal(result.train["round_seen"], [[0, 1, 2, 3]] * 2)
    np.testing.assert_allclose(
        result.final("test_first")[0], 2 * expected[0], rtol=1e-6
    )
    # Other data of the server are another run.
    other = dataclasses.replace(DATA, public={"target": target + 1})
    with pytest.raises(RunDirError, match="data"):
        run(
            towards_public(), other, POINT, seeds=(0, 1), rounds=6,
            run_dir=tmp_path / "run", resume=True,
        )  # fmt: skip


def test_the_servers_data_are_an_argument_of_the_program_and_no_part_of_the_state(
    tmp_path,
):
    big = np.zeros((1000, 1000), np.float32)
    data = dataclasses.replace(DATA, public={"target": big[:, :3].copy(), "big": big})
    run(towards_public(), data, POINT, seeds=(0,), rounds=2, run_dir=tmp_path / "run")
    saved = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    assert saved < big.nbytes / 10
    cohort = plan_round(
        [0], data.train, LocalWork(batch_size=2), seed=0, round=0, public=data.public
    )
    state = towards_public().init(jnp.zeros(3), 10)
    lowered = jax.jit(towards_public().round).lower(state, cohort, jax.random.key(0))
    assert len(lowered.as_text()) < 100_000


def test_a_round_says_how_many_steps_its_clients_took():
    config = fedavg.Config(work=LocalWork(batch_size=2, epochs=3))
    result = run(
        fedavg.make(config, REGRESSION.loss), participation=Scripted(((0, 1), (3,)))
    )
    steps = [3 * (-(-3 // 2) - -5 // 2), 3 * 4]
    np.testing.assert_array_equal(result.train["local_steps"][0, :2], steps)
    assert result.execution == ONE_DEVICE


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": DATA.train}, "data must be a FederatedData, got Packed"),
        ({"algorithm": fedavg.Config()}, "algorithm must be an Algorithm, got Config"),
        ({"model": REGRESSION.loss}, "model must be a Model, got function"),
        ({"participation": 3}, "participation must be a Participation, got int"),
        ({"execution": 4}, "execution must be an Execution, got int"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_arguments_of_another_kind_are_named(wrong, message):
    with pytest.raises(TypeError, match=message):
        run(**wrong)


@pytest.mark.parametrize("method", [fedavg, scaffold])
def test_plugs_of_another_kind_are_named(method):
    with pytest.raises(TypeError, match="reduce must be a Reduction, got str"):
        method.make(method.Config(), REGRESSION.loss, reduce="mean")
    with pytest.raises(TypeError, match="transform must be a Transform, got float"):
        method.make(method.Config(), REGRESSION.loss, transform=1.0)


def test_draws_do_not_depend_on_blocks_whatever_the_default_generator():
    # These generators draw other numbers under vmap; ours are threefry's always.
    def noisy(params, batch, key):
        return REGRESSION.loss(params, batch, key) * jax.random.uniform(
            key, (len(batch["y"]),)
        )

    algorithm = fedavg.make(fedavg.Config(work=LocalWork(batch_size=2)), noisy)
    before = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    try:
        results = []
        for impl, block_size in (("rbg", 1), ("unsafe_rbg", 4)):
            jax.config.update("jax_default_prng_impl", impl)
            execution = Execution(block_size=block_size)
            results.append(run(algorithm, rounds=2, execution=execution))
    finally:
        jax.config.update("jax_default_prng_impl", before)
    for a, b in zip(*(jax.tree.leaves(r.params) for r in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_debugging_without_jit_gives_the_same_run():
    data = make_data((3, 2), (2, 1))
    with jax.disable_jit():
        slow = run(data=data, cohort_size=2, rounds=2)
    fast = run(data=data, cohort_size=2, rounds=2)
    for a, b in zip(
        jax.tree.leaves(slow.params), jax.tree.leaves(fast.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


class Counted(NamedTuple):
    params: Any
    clients: Any


def count_rounds() -> Algorithm:
    """Clients count their rounds; their own model is the server's plus that number."""
    program = ClientProgram(
        lambda shared, row, turn: (),
        lambda shared, carry, batch, turn: carry,
        lambda shared, carry, row, turn: (jnp.float32(1), row + 1, {}),
    )

    def round(state, cohort, key):
        out = map_clients(
            program, (), cohort, key, reduce=mean(), client_state=state.clients
        )
        params = jax.tree.map(lambda p: p + out.update, state.params)
        return Counted(params, out.client_state), out.metrics

    return Algorithm(
        name="count_rounds",
        config=None,
        work=LocalWork(batch_size=2),
        init=lambda params, n: Counted(params, jnp.zeros(n)),
        round=round,
        own_models=lambda state, row: {
            "shared": state.params,
            "own": state.params + row,
        },
    )


@pytest.mark.parametrize(
    ("store", "feed"), [("device", "host"), ("host", "device"), ("host", "host")]
)
def test_clients_own_models_are_evaluated_on_their_own_examples(store, feed):
    result = run(
        count_rounds(),
        model=POINT,
        participation=Scripted(((0, 2, 4), (2, 5))),
        seeds=(0, 1),
        rounds=2,
        client_store=store,
        feed=feed,
        client_summaries={"largest": lambda values, counts: jnp.nanmax(values)},
    )
    seen = np.bincount([0, 2, 4, 2, 5], minlength=len(TEST_SIZES))
    expected = np.where(np.array(TEST_SIZES) > 0, 2 + seen, np.nan)
    for s in range(2):
        np.testing.assert_allclose(
            result.client_metrics["test_own_first"][s], expected, rtol=1e-6
        )
        np.testing.assert_allclose(
            result.client_metrics["test_shared_first"][s],
            result.client_metrics["test_first"][s],
            rtol=1e-6,
        )
    pooled = np.nansum(expected * TEST_SIZES) / sum(TEST_SIZES)
    np.testing.assert_allclose(result.final("test_own_first")[0], pooled, rtol=1e-6)
    assert result.final("test_own_first_largest")[0] == np.nanmax(expected)
