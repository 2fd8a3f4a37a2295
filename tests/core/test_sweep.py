"""Configs that differ in numbers share a program, and each is what `simulate` gives."""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.reference import softmax_loss, softmax_problem

from fedjax_core import (
    FederatedData,
    LocalWork,
    Model,
    Packed,
    Result,
    clip,
    simulate,
)
from fedjax_core.algorithms import apfl, centralised, fedavg
from fedjax_core.driver import NonFiniteUpdateError
from fedjax_core.simulate import Cohorts
from fedjax_core.sweep import numbers, same_but_numbers, sweep, with_numbers

SIZES = [5, 1, 8, 3, 6, 2]
EXAMPLES, OFFSETS, PARAMS = softmax_problem(SIZES)
PACKED = Packed(EXAMPLES, OFFSETS)
DATA = FederatedData(PACKED, PACKED)
MODEL = Model(
    init=lambda key: jax.tree.map(jnp.asarray, PARAMS),
    loss=softmax_loss,
    metrics=lambda params, batch: {"loss": softmax_loss(params, batch, None)},
)
RUN: dict[str, Any] = {"rounds": 4, "eval_every": 2, "cohort_size": 3, "seeds": (3, 5)}
WORK = LocalWork(batch_size=4)
PLAIN = fedavg.Config(work=WORK)


def averaging(config):
    return fedavg.make(config, MODEL.loss)


def lrs(*values):
    return [dataclasses.replace(PLAIN, client_lr=value) for value in values]


@functools.cache
def alone(client_lr) -> Result:
    """What `simulate` gives."""
    (config,) = lrs(client_lr)
    return simulate(averaging(config), DATA, MODEL, progress=False, **RUN)


@pytest.fixture(scope="module")
def in_turn() -> list[Result]:
    """Rates of 0.1, 0.2 and 0.3 in one program."""
    return results(sweep(averaging, lrs(0.1, 0.2, 0.3), DATA, MODEL, **RUN))


def results(ends) -> list[Result]:
    assert all(isinstance(end, Result) for end in ends), ends
    return ends


def values(result):
    return {**result.train, **result.evaluations, **result.client_metrics}


def assert_close(got, expected, rtol=1e-5):
    for name, value in values(expected).items():
        np.testing.assert_allclose(values(got)[name], value, rtol, 1e-6, err_msg=name)


def test_the_pooled_population_takes_numbers_as_arguments(caplog):
    # As every method's do, see tests/algorithms/test_contract.py.
    configs = [centralised.Config(client_lr=lr, work=WORK) for lr in (0.1, 0.07)]
    options: dict[str, Any] = RUN | {"cohort_size": 1, "seeds": 3, "eval_splits": ()}
    data = centralised.pool(DATA)

    def make(config):
        return centralised.make(config, MODEL.loss)

    ends = results(sweep(make, configs, data, MODEL, **options))
    assert not caplog.records
    assert [end.compilations for end in ends] == [1, 1]
    alone = simulate(make(configs[1]), data, MODEL, progress=False, **options)
    assert_close(ends[1], alone, rtol=1e-4)
    states = zip(*map(jax.tree.leaves, (ends[1].state, alone.state)), strict=True)
    for got, expected in states:
        np.testing.assert_allclose(got, expected, 1e-4, 1e-6)
    assert not np.array_equal(ends[0].train["train_loss"], alone.train["train_loss"])


def test_a_rate_that_scales_what_it_did_gives_the_same_bits(in_turn):
    for end, client_lr in ((in_turn[0], 0.1), (in_turn[2], 0.3)):
        for name, value in values(alone(client_lr)).items():
            np.testing.assert_array_equal(values(end)[name], value, err_msg=name)


MIXED = tuple(apfl.Config(alpha=a, work=WORK) for a in (0.2, 0.5, 0.9))


@functools.cache
def mixed_alone() -> Result:
    algorithm = apfl.make(MIXED[2], MODEL.loss)
    return simulate(algorithm, DATA, MODEL, progress=False, **RUN)


@pytest.mark.parametrize("store", ["device", "host"])
def test_runs_side_by_side_are_those_in_turn(store):
    in_turn, side_by_side = (
        sweep(
            lambda config: apfl.make(config, MODEL.loss), list(MIXED), DATA, MODEL,
            seeds_axis=axis, client_store=store, **RUN,
        )
        for axis in ("map", "vmap")
    )  # fmt: skip
    assert_close(results(in_turn)[2], mixed_alone())  # own models depend on alpha
    for a, b in zip(results(in_turn), results(side_by_side), strict=True):
        assert b.compilations == 1
        assert_close(b, a)
        for x, y in zip(*map(jax.tree.leaves, (a.state, b.state)), strict=True):
            np.testing.assert_allclose(x, y, 1e-5, 1e-6)


def test_numbers_do_not_widen_half_precision():
    half = MODEL._replace(init=lambda key: jax.tree.map(jnp.bfloat16, PARAMS))
    end, _ = results(sweep(averaging, lrs(0.1, 0.3), DATA, half, **RUN))
    alone = simulate(averaging(lrs(0.1)[0]), DATA, half, progress=False, **RUN)
    for x, y in zip(*map(jax.tree.leaves, (end.state, alone.state)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_numbers_of_plugs_are_numbers_of_a_config(caplog):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Clipped(fedavg.Config):
        norm: float = 1.0

    def make(config):
        return fedavg.make(config, MODEL.loss, transform=clip(config.norm))

    configs = [Clipped(work=WORK, norm=norm) for norm in (100.0, 0.01)]
    ends = results(sweep(make, configs, DATA, MODEL, **RUN))
    assert ends[1].compilations == 1
    assert not caplog.records, "one program for all"
    assert_close(ends[0], alone(0.1))  # nothing is as long
    clipped = simulate(make(configs[1]), DATA, MODEL, progress=False, **RUN)
    assert_close(ends[1], clipped)


@pytest.mark.parametrize("axis", ["map", "vmap"])
def test_a_method_that_branches_on_a_number_is_compiled_for_each(
    axis, caplog, monkeypatch
):
    axes = []

    def cohorts(*args, seeds_axis="auto", **options):
        axes.append(seeds_axis)
        return Cohorts(*args, seeds_axis=seeds_axis, **options)

    monkeypatch.setattr(sys.modules["fedjax_core.sweep"], "Cohorts", cohorts)

    def make(config):
        if config.server_lr > 1:
            config = dataclasses.replace(config, weights="uniform")
        return averaging(config)

    configs = [dataclasses.replace(PLAIN, server_lr=lr) for lr in (1.0, 2.0)]
    ends = sweep(make, configs, DATA, MODEL, seeds_axis=axis, **RUN)
    assert "fedavg looks at one of server_lr from Python" in caplog.text
    assert axes == [axis] * 3  # together, then each
    for end, config in zip(ends, configs, strict=True):
        alone = simulate(
            make(config), DATA, MODEL, progress=False, seeds_axis=axis, **RUN
        )
        assert_close(end, alone, rtol=0)


@pytest.mark.parametrize("axis", ["map", "vmap"])
def test_a_config_that_diverges_leaves_the_others_alone(axis, tmp_path):
    configs = lrs(0.1, 1e38, 0.3)
    dirs = [tmp_path / str(i) for i in range(3)]
    options: dict[str, Any] = RUN | {
        "seeds_axis": axis,
        "resume": True,
        "run_dirs": dirs,
    }
    ends = sweep(averaging, configs, DATA, MODEL, **options)
    assert isinstance(ends[1], NonFiniteUpdateError)
    assert "seed 3" in str(ends[1])
    assert_close(ends[2], alone(0.3))
    # What is there is a run directory like any other, read without a round.
    again = simulate(
        averaging(configs[2]), DATA, MODEL, progress=False, run_dir=dirs[2],
        resume=True, **RUN,
    )  # fmt: skip
    assert (again.rounds, again.timed_rounds, again.compilations) == (4, 0, 0)
    assert_close(again, ends[2], rtol=0)


def test_runs_side_by_side_go_on_from_different_rounds(in_turn, tmp_path, caplog):
    configs = lrs(0.1, 0.2, 0.3)
    dirs = [tmp_path / str(i) for i in range(3)]
    options: dict[str, Any] = RUN | {"seeds_axis": "vmap", "resume": True}
    half: dict[str, Any] = options | {"rounds": 2, "run_dirs": dirs[:2]}
    sweep(averaging, configs[:2], DATA, MODEL, **half)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "stranger").touch()
    ends = sweep(averaging, configs, DATA, MODEL, run_dirs=dirs, **options)
    assert "no run directory" in str(ends[2])
    assert not caplog.records
    for end, expected in zip(results(ends[:2]), in_turn, strict=False):
        assert end.timed_rounds == 2
        assert_close(end, expected)


def test_configs_that_differ_in_more_are_refused():
    assert numbers(fedavg.Config(client_lr=1)) == {"client_lr": 1, "server_lr": 1}
    other = dataclasses.replace(PLAIN, weights="uniform")
    assert not same_but_numbers(PLAIN, other)
    assert not same_but_numbers(PLAIN, apfl.Config(work=WORK))
    with pytest.raises(ValueError, match="configs must differ in floats only"):
        sweep(averaging, [PLAIN, other], DATA, MODEL, **RUN)


def test_a_config_is_validated_when_built_and_not_again():
    assert with_numbers(PLAIN, {"client_lr": -1.0}).client_lr == -1.0
    assert PLAIN.client_lr == 0.1
    with pytest.raises(dataclasses.FrozenInstanceError):
        with_numbers(PLAIN, {}).client_lr = 1.0  # type: ignore[misc]
