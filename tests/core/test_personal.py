"""Parts of a model; personalised methods on models with running statistics."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_core import FederatedData, LocalWork, clip, models, plan_round
from fedjax_core.algorithms import (
    apfl,
    ditto,
    fedavg,
    fedper,
    fedrep,
    fine_tuning,
    lg_fedavg,
    pfedme,
)
from fedjax_core.personal import merge, split
from fedjax_core.types import Stateful

EXAMPLE = jax.ShapeDtypeStruct((2,), jnp.float32)


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(3)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.out = nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


MODEL = models.from_linen(Normalised(), EXAMPLE, models.classes())
PARAMS = jax.jit(MODEL.init)(jax.random.key(0))
METRICS = jax.jit(MODEL.metrics)


def paths(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_parts_are_those_named_and_merge_again():
    tree = {"a": {"w": 1, "b": 2}, "aa": {"w": 3}, "c": [4, (), None]}
    for names, expected in [
        ((), set()),
        (("a",), {"a/w", "a/b"}),
        (("a/w", "c"), {"a/w", "c/0"}),
        (("a", "aa", "c/0"), {"a/w", "a/b", "aa/w", "c/0"}),
    ]:
        shared, own = split(tree, names)
        assert paths(own) == expected
        assert paths(shared) == paths(tree) - expected
        assert merge(shared, own) == merge(own, shared) == tree
    for name in ("w", "a/", "a/w/x", "A", "b"):
        with pytest.raises(ValueError, match=f"which are a/b, a/w, .*; got '{name}'"):
            split(tree, (name,))


@pytest.mark.parametrize(
    ("model", "norm"),
    [(MODEL, "BatchNorm_0"), (models.from_nnx(Nnx, EXAMPLE, models.classes()), "norm")],
    ids=["linen", "nnx"],
)
def test_statistics_go_with_their_layer(model, norm):
    params = jax.eval_shape(model.init, jax.random.key(0))
    shared, own = split(params, (norm,))
    assert isinstance(shared, Stateful)
    assert isinstance(own, Stateful)
    assert not jax.tree.leaves(shared.stats)
    assert len(jax.tree.leaves(own.params)) == len(jax.tree.leaves(shared.params)) == 2
    np.testing.assert_equal(paths(own.stats), paths(params.stats))
    other, _ = split(params, tuple(paths(shared.params)))
    assert len(jax.tree.leaves(other.stats)) == len(jax.tree.leaves(params.stats))
    with pytest.raises(ValueError, match="names of layers must begin the path"):
        split(params, ("batch_stats",))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    clients = [
        {
            "x": (rng.standard_normal((n, 2)) * (1 + i) + i).astype(np.float32),
            "y": rng.integers(0, 3, n).astype(np.int32),
        }
        for i, n in enumerate((4, 9, 6))
    ]
    return FederatedData.from_lists(clients, clients)


WORK: Any = {"work": LocalWork(batch_size=9, epochs=2)}


def run(algorithm, data, rounds=2):
    """The state after rounds of everyone."""
    state, step = algorithm.init(PARAMS, 3), jax.jit(algorithm.round)
    for t in range(rounds):
        cohort = plan_round(range(3), data.train, algorithm.work, seed=0, round=t)
        state, _ = step(state, cohort, jax.random.key(0))
    return jax.device_get(state)


def followed(x, rounds):
    """Running means of a client after two steps a round on all of its data."""
    mean = np.zeros(2)
    for _ in range(2 * rounds):
        mean = 0.5 * mean + 0.5 * x.mean(0)
    return mean


@pytest.mark.parametrize(
    "algorithm",
    [
        fedper.make(fedper.Config(personal=("BatchNorm_0",), **WORK), MODEL.loss),
        fedrep.make(
            fedrep.Config(personal=("BatchNorm_0",), head=1, **WORK), MODEL.loss
        ),
        lg_fedavg.make(lg_fedavg.Config(shared=("Dense_0",), **WORK), MODEL.loss),
        ditto.make(ditto.Config(**WORK), MODEL.loss),
        apfl.make(apfl.Config(**WORK), MODEL.loss),
        apfl.make(apfl.Config(adaptive=True, **WORK), MODEL.loss),
    ],
    ids=["fedper", "fedrep", "lg_fedavg", "ditto", "apfl", "apfl, adaptive"],
)
def test_personal_models_have_statistics_of_their_client(algorithm, data):
    state = run(algorithm, data)
    own: Any = algorithm.own_models
    for i in range(3):
        model = own(state, jax.tree.map(lambda x, i=i: x[i], state.clients))["personal"]
        assert jax.tree.structure(model) == jax.tree.structure(PARAMS)
        got = model.stats["batch_stats"]["BatchNorm_0"]["mean"]
        np.testing.assert_allclose(got, followed(data.train.client(i)["x"], 2), 1e-5)
        assert np.isfinite(METRICS(model, data.train.client(i))["loss"]).all()


@pytest.mark.parametrize(
    "algorithm",
    [
        fine_tuning.make(fine_tuning.Config(**WORK), MODEL.loss),
        pfedme.make(pfedme.Config(personal_steps=1, **WORK), MODEL.loss),
    ],
    ids=["fine_tuning", "pfedme"],
)
def test_personal_models_that_start_from_the_server_s_have_its_statistics(
    algorithm, data
):
    state = run(algorithm, data, rounds=1)
    own: Any = algorithm.own_models
    for i in range(3):
        model = own(state, jax.tree.map(lambda x, i=i: x[i], state.clients))["personal"]
        got = model.stats["batch_stats"]["BatchNorm_0"]["mean"]
        np.testing.assert_allclose(got, followed(data.train.client(i)["x"], 1), 1e-5)


def test_statistics_of_shared_layers_are_averaged(data):
    algorithm = fedper.make(fedper.Config(personal=("Dense_0",), **WORK), MODEL.loss)
    state = run(algorithm, data)
    same = run(fedavg.make(fedavg.Config(**WORK), MODEL.loss), data)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        state.params.stats,
        same.params.stats,
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        state.params.params["Dense_0"],
        PARAMS.params["Dense_0"],
    )


def test_what_clips_refuses_statistics_that_are_shared(data):
    for personal in (("Dense_0",), ()):
        algorithm = fedper.make(
            fedper.Config(personal=personal, **WORK), MODEL.loss, transform=clip(1.0)
        )
        with pytest.raises(ValueError, match="statistics pass, got clip"):
            run(algorithm, data)
