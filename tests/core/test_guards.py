"""What can't be right is refused by name; what goes wrong is blamed on its cause."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_core import (
    Algorithm,
    ClientProgram,
    FederatedData,
    LocalWork,
    Model,
    NonFiniteUpdateError,
    Poisson,
    chain,
    clip,
    gaussian_mean,
    map_clients,
    mean,
    plan_round,
    simulate,
    stack,
    trimmed_mean,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.evaluate import evaluate
from fedjax_core.robust import clipped_mean
from fedjax_core.transform import stateless


def data(sizes, dtype=np.float32):
    return FederatedData.from_lists([{"x": np.arange(n).astype(dtype)} for n in sizes])


def model(loss=lambda params, batch, key: (batch["x"] - params) ** 2) -> Model:
    return Model(lambda key: jnp.zeros(()), loss, lambda params, batch: {})


class State(NamedTuple):
    params: Any
    clients: Any


def scaled_by_population() -> Algorithm:
    """Its state depends on the number of clients, as SCAFFOLD's server could."""

    def finish(shared, carry, client_state, key):
        return carry, client_state + 1, {}

    client = ClientProgram(
        lambda shared, state, key: jnp.float32(1),
        lambda shared, carry, batch, key: carry,
        finish,
    )

    def init(params, num_clients):
        return State(params + num_clients, jnp.zeros(num_clients))

    def round(state, cohort, key):
        out = map_clients(
            client, (), cohort, key, reduce=mean(), client_state=state.clients
        )
        params = state.params + out.update
        return State(params, out.client_state), out.metrics

    return Algorithm(
        name="scaled", config=None, work=LocalWork(batch_size=2), init=init, round=round
    )


def test_a_host_store_tells_init_the_real_number_of_clients():
    runs = [
        simulate(
            scaled_by_population(),
            data((2, 1, 3, 2, 1)),
            model(),
            rounds=3,
            cohort_size=2,
            client_store=store,
            progress=False,
        )
        for store in ("device", "host")
    ]
    assert float(runs[0].params[0]) == 5 + 3
    for a, b in zip(*(jax.tree.leaves(run.state) for run in runs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_lost_on_the_server_is_not_blamed_on_a_client():
    algorithm = fedavg.make(
        fedavg.Config(work=LocalWork(batch_size=100)),
        model().loss,
        server_optimizer=optax.sgd(1e38),
    )
    with pytest.raises(
        NonFiniteUpdateError, match=r"after the server's step"
    ) as caught:
        simulate(
            algorithm,
            data((100, 100)),
            model(),
            rounds=5,
            cohort_size=2,
            progress=False,
        )
    assert not caught.value.result.excluded


def test_a_loss_that_is_not_finite_excludes_its_client():
    def loss(params, batch, key):
        # NaN for one client's examples, with a gradient of zero.
        broken = jax.lax.stop_gradient(jnp.where(batch["x"] > 5, jnp.nan, 0.0))
        return (batch["x"] - params) ** 2 + broken

    packed = data((3, 8, 2)).train
    algorithm = fedavg.make(fedavg.Config(work=LocalWork(batch_size=10)), loss)
    cohort = plan_round([0, 1, 2], packed, algorithm.work, seed=0, round=0)
    state = algorithm.init(jnp.zeros(()), 3)
    _, metrics = jax.jit(algorithm.round)(state, cohort, jax.random.key(0))
    assert metrics["excluded_clients"] == 1
    assert np.flatnonzero(metrics["failure"]).tolist() == [1]
    assert np.isfinite(metrics["train_loss"])


def test_a_poisson_round_of_clients_without_examples_is_a_round_of_nobody():
    algorithm = fedavg.make(
        fedavg.Config(work=LocalWork(batch_size=2)),
        model().loss,
        transform=clip(1.0),
        reduce=gaussian_mean(1.0, 1),
    )
    result = simulate(
        algorithm,
        data((0, 0, 0, 2)),
        model(),
        rounds=12,
        participation=Poisson(rate=0.2),
        progress=False,
    )
    assert result.train["valid_clients"].min() == 0
    # Noise moved the model in rounds that nobody trained in, too.
    assert np.isfinite(result.params).all()
    assert result.params[0] != 0


def broken_data(sizes, broken):
    clients = [{"x": np.full(n, i, np.float32)} for i, n in enumerate(sizes)]
    for i in broken:
        clients[i]["x"][0] = np.nan
    return FederatedData.from_lists(clients)


@pytest.mark.parametrize(
    ("reduce", "said"),
    [
        (trimmed_mean(0.2), r"trimmed_mean\(trim_fraction=0.2\) is; "),
        (clipped_mean(0.25), r"clipped_mean\(clip_fraction=0.25\) is; "),
    ],
)
def test_too_few_clients_left_to_trim_are_counted_and_the_others_named(reduce, said):
    said += r"3 clients counted; not finite and excluded: 1, 3\."
    with pytest.raises(NonFiniteUpdateError, match=f"round 1, seed 0: .* {said}"):
        simulate(
            fedavg.make(fedavg.Config(), model().loss, reduce=reduce),
            broken_data((2, 2, 2, 2, 2), (1, 3)),
            model(),
            rounds=1,
            cohort_size=5,
            progress=False,
        )


def test_excluding_everybody_ends_no_run_in_which_noise_hides_who_took_part():
    def run(**parts):
        return simulate(
            fedavg.make(fedavg.Config(), model().loss, **parts),
            broken_data((2, 2), (0, 1)),
            model(),
            rounds=2,
            cohort_size=1,
            progress=False,
        )

    with pytest.raises(NonFiniteUpdateError, match="every update of a cohort"):
        run()
    result = run(transform=clip(1.0), reduce=gaussian_mean(1.0, 1))
    assert len(result.excluded) == 2
    assert "idle" not in result.train
    assert result.params[0] != 0


def test_a_transform_that_says_nothing_has_no_bound():
    louder = stateless(lambda message, key: message)
    assert louder.norm_bound(1.0) == math.inf
    assert chain(clip(1.0), louder).norm_bound(math.inf) == math.inf
    assert chain(louder, clip(1.0)).norm_bound(math.inf) == 1.0


def test_a_run_records_what_the_algorithm_is_made_of():
    algorithm = fedavg.make(
        fedavg.Config(),
        model().loss,
        transform=chain(clip(0.5), clip(0.25)),
        reduce=gaussian_mean(2.0, 10),
        client_optimizer=optax.adam(0.1),
    )
    assert algorithm.parts == {
        "client_optimizer": "custom",
        "server_optimizer": "sgd",
        "transform": "chain(clip(0.5), clip(0.25))",
        "reduce": "gaussian_mean(2.0, 10)",
        "downlink": "none",
    }
    assert stack().name == "custom"


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (np.array(["a", "b"]), TypeError, "'x' must be numbers"),
        (np.array([0, 2**40]), ValueError, "'x' must fit int32"),
    ],
)
def test_examples_that_jax_can_not_hold_are_named(values, error, message):
    federated = FederatedData.from_lists([{"x": values}])
    algorithm = fedavg.make(fedavg.Config(), model().loss)
    with pytest.raises(error, match=message):
        simulate(algorithm, federated, model(), rounds=1, cohort_size=1, progress=False)


def test_client_ids_must_be_ints():
    with pytest.raises(TypeError, match="client_ids must be ints"):
        plan_round(
            np.array([0.9, 1.2]),
            data((2, 2)).train,
            LocalWork(batch_size=2),
            seed=0,
            round=0,
        )


def test_a_model_may_start_from_python_numbers():
    plain = model()._replace(init=lambda key: {"w": 0.0})
    algorithm = fedavg.make(
        fedavg.Config(work=LocalWork(batch_size=2)),
        lambda params, batch, key: (batch["x"] - params["w"]) ** 2,
    )
    result = simulate(
        algorithm, data((2, 2)), plain, rounds=1, cohort_size=2, progress=False
    )
    assert result.params["w"].shape == (1,)


@pytest.mark.parametrize("reduce", [mean("uniform"), trimmed_mean(0.4)])
def test_leaves_without_entries_change_nothing(reduce):
    def run(params):
        def loss(params, batch, key):
            return (batch["x"] - sum(x.sum() for x in params.values())) ** 2

        result = simulate(
            fedavg.make(fedavg.Config(), loss, reduce=reduce),
            data((3, 2, 4)),
            Model(lambda key: params, loss, lambda params, batch: {}),
            rounds=1,
            cohort_size=3,
            progress=False,
        )
        return result.params

    w = {"w": jnp.ones(2)}
    shapes = {"wide": (3, 0), "long": (0, 3), "none": (0,)}
    got = run(w | {name: jnp.ones(shape) for name, shape in shapes.items()})
    np.testing.assert_array_equal(got["w"], run(w)["w"])
    for name, shape in shapes.items():
        assert got[name].shape == (1, *shape)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({}, ValueError, r"must have parameters to train, got \{\}"),
        ({"e": jnp.zeros((3, 0))}, ValueError, "must have parameters to train"),
        (
            {"n": jnp.int32(3)},
            TypeError,
            r"must be floats to train, got int32 at \['n'",
        ),
        (jnp.int32(3), TypeError, r"got int32 at the only leaf; cast it"),
    ],
)
def test_a_model_that_can_not_be_trained_is_refused(params, error, message):
    with pytest.raises(error, match=message):
        simulate(
            fedavg.make(fedavg.Config(), model().loss),
            data((3, 2)),
            model()._replace(init=lambda key: params),
            rounds=1,
            cohort_size=1,
            progress=False,
        )


def ask(algorithm=None, **kwargs):
    defaults = {"rounds": 1, "cohort_size": 2, "progress": False}
    algorithm = algorithm or fedavg.make(fedavg.Config(), model().loss)
    metrics = {"metrics": lambda params, batch: {"x": batch["x"]}}
    measured = model()._replace(**metrics)
    clients = [{"x": np.ones(2, np.float32)}] * 2
    both = FederatedData.from_lists(clients, clients)
    return simulate(algorithm, both, measured, **(defaults | kwargs))


@pytest.mark.parametrize("wrong", [[len], {"g": "x"}, len, "gini", [], 0])
def test_client_summaries_map_names_to_functions(wrong):
    with pytest.raises(TypeError, match="client_summaries must map names to functions"):
        ask(client_summaries=wrong)
    metrics = model().metrics
    with pytest.raises(TypeError, match="client_summaries must map names to functions"):
        evaluate(metrics, jnp.zeros(()), data((2,)).train, wrong)


def test_one_split_may_be_named_without_a_tuple():
    assert "train_x" in ask(eval_splits="train").evaluations
    with pytest.raises(ValueError, match=r"eval_splits must be one of .*, got 'dev'"):
        ask(eval_splits="dev")
