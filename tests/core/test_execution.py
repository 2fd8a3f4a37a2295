"""The execution chosen from devices, memory and the size of a round."""

import types

import jax
import numpy as np
import pytest

from fedjax_core import Execution, LocalWork, Packed, client_mesh, models
from fedjax_core import execution as execution_lib
from fedjax_core.algorithms import scaffold


def population(num_clients: int, features: int, size: int = 10) -> Packed:
    n = num_clients * size
    examples = {"x": np.zeros((n, features), np.float32), "y": np.zeros(n, np.int32)}
    return Packed(examples, np.arange(num_clients + 1) * size)


def choose(train: Packed, features: int, cohort_size: float) -> Execution:
    model = models.logistic_regression(features, 3)
    work = LocalWork(batch_size=5, epochs=2)
    return execution_lib.choose_execution(model, train, work, cohort_size)


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"max_steps": -1}])
def test_impossible_executions_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Execution(**wrong)


def test_operations_count_parameters_examples_and_visits():
    work = LocalWork(batch_size=5, epochs=2)
    operations = execution_lib.round_operations(population(4, 2), work, 100, 3)
    assert operations == 6 * 100 * (3 * 10 * 2)  # 3 clients, 10 examples, twice


def test_small_rounds_stay_on_one_device_and_large_ones_use_all():
    assert choose(population(10, 4), 4, 5) == Execution(mesh=None)
    assert choose(population(10, 4), 4, 10**7) == Execution(mesh=client_mesh())


def test_a_client_needs_its_models_and_what_the_backward_pass_keeps():
    work = LocalWork(batch_size=5)
    wide = models.mlp(7, 3, hidden=(50,))
    params = wide.init(jax.random.key(0))
    assert execution_lib.num_bytes(params) == 4 * execution_lib.num_parameters(params)
    need = execution_lib.client_memory(wide, params, population(2, 7), work)
    models_alone = 4 * execution_lib.num_bytes(params)
    hidden = 5 * 50 * 4
    assert models_alone + 2 * hidden <= need
    assert need <= models_alone + 2 * (execution_lib.num_bytes(params) + 20 * hidden)


@pytest.mark.parametrize(
    ("free", "cohort", "block"),
    [
        (2**34, 8 * 6, 6),  # a device's share of the cohort
        (2**34, 8 * 64, 64),
        (2**16, 8 * 64, None),  # memory decides
        (0, 8 * 64, 1),
    ],
)
def test_memory_and_the_cohort_decide_the_block_of_an_accelerator(
    free, cohort, block, monkeypatch
):
    device = types.SimpleNamespace(
        memory_stats=lambda: {"bytes_limit": 2**35, "bytes_in_use": 2**35 - free}
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    train = population(10, 4)
    how = choose(train, 4, cohort)
    assert how.mesh == client_mesh()
    if block is None:
        model = models.logistic_regression(4, 3)
        params = jax.eval_shape(model.init, jax.random.key(0))
        one = execution_lib.client_memory(model, params, train, LocalWork(batch_size=5))
        assert 1 < how.block_size < 64
        assert how.block_size * one <= free / 2 < 2 * how.block_size * one + free / 4
    else:
        assert how.block_size == block


def test_what_a_method_holds_besides_makes_blocks_smaller(monkeypatch):
    memory = {"bytes_limit": 2**20, "bytes_in_use": 0}
    device = types.SimpleNamespace(memory_stats=lambda: memory)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    train, work = population(10, 4), LocalWork(batch_size=5)
    model = models.logistic_regression(4, 3)

    def block(extra, runs=1):
        return execution_lib.choose_execution(
            model, train, work, 8 * 512, lambda params: extra, runs
        ).block_size

    assert block(2**20) == 1 < block(2**14) <= 2**19 // 2**14 < block(0)
    assert block(2**14, runs=4) <= 2**19 // 2**16 < block(2**14)
    method = scaffold.make(scaffold.Config(), model.loss)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert method.client_bytes(params) == 3 * 4 * (4 * 3 + 3)


def test_a_block_weighs_waiting_for_the_longest_client_against_launches():
    alike, skewed = np.full(64, 5), np.r_[np.full(8, 80), np.full(56, 1)]
    costly = 100 * execution_lib._LAUNCHES
    assert execution_lib._cheapest_block(alike, 1000, costly) == 64
    assert execution_lib._cheapest_block(skewed, 1000, costly) <= 8
    # Launches of a tiny step cost more than any waiting.
    assert execution_lib._cheapest_block(skewed, 1000, costly / 1e9) == 64
    assert execution_lib._cheapest_block(np.zeros(3, int), 2, costly) in (1, 2)


def test_a_typical_cohort_has_the_populations_quantiles():
    cohort = execution_lib._typical_cohort(np.random.default_rng(0).permutation(100), 5)
    np.testing.assert_array_equal(cohort, [89, 69, 50, 30, 10])  # of 0, 1, ..., 99
