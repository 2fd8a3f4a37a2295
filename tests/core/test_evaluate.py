"""Evaluation equals plain NumPy averages, whatever the batches and devices."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import FederatedData, Packed, client_mesh, evaluate
from fedjax_core.evaluate import Evaluator
from fedjax_core.metrics import Mean

evaluate_lib = sys.modules["fedjax_core.evaluate"]  # the package exports the function

PARAMS = {"w": jnp.array([0.5, -1.0, 2.0])}
SIZES = {
    "ragged": (3, 0, 1, 7, 2, 0, 5),
    "one client": (4,),
    "one example": (0, 1, 0),
    "empty ends": (0, 0, 6, 0),
    "a batch exactly": (4, 4),
    "many": tuple(range(12)),
}


def metrics(params, batch):
    """One metric that knows no bounds and one that is 0 or 1."""
    score = batch["x"] @ params["w"]
    return {"score": score, "above": score > batch["y"]}


def make(sizes, seed=0):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    examples = {
        "x": rng.standard_normal((n, 3)).astype(np.float32),
        "y": rng.standard_normal(n).astype(np.float32),
    }
    return Packed(examples, np.concatenate([[0], np.cumsum(sizes)]))


def reference(packed):
    """Client by client in float64."""
    w = np.asarray(PARAMS["w"], np.float64)
    by_client: dict[str, list] = {"score": [], "above": []}
    for i in range(packed.num_clients):
        client = packed.client(i)
        score = client["x"].astype(np.float64) @ w
        by_client["score"].append(score)
        by_client["above"].append((score > client["y"]).astype(np.float64))
    out = {}
    for name, values in by_client.items():
        means = np.array([v.mean() if len(v) else np.nan for v in values])
        there = means[~np.isnan(means)]
        out[name] = {
            "pooled": np.concatenate(values).mean(),
            "client_mean": there.mean(),
            "client_p10": np.quantile(there, 0.1),
            "per_client": means,
        }
    return out


def compare(evaluation, packed):
    for name, expected in reference(packed).items():
        for field, value in expected.items():
            np.testing.assert_allclose(
                getattr(evaluation, field)[name], value, 1e-5, 1e-6, err_msg=field
            )


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("devices", [1, 8])
def test_averages_are_those_of_numpy(sizes, devices):
    packed = make(sizes)
    mesh = client_mesh(jax.devices()[:devices])
    evaluator = Evaluator(metrics, packed, mesh, batch_size=4)
    compare(jax.jit(evaluator)(PARAMS, evaluator.data), packed)


@pytest.mark.parametrize("batch_size", [1, 7, 18, 1000])
def test_the_batch_size_does_not_matter(batch_size):
    packed = make(SIZES["ragged"])
    compare(Evaluator(metrics, packed, batch_size=batch_size)(PARAMS), packed)


def test_a_model_is_evaluated_in_one_call():
    packed = make(SIZES["ragged"])
    compare(evaluate(metrics, PARAMS, packed), packed)


def test_padding_is_masked_and_repeats_a_real_row():
    packed = make((2, 3))
    packed.examples["x"][:] += 100
    evaluator = Evaluator(
        lambda params, batch: {
            # What a careless model would notice: a mean over the rows of a batch.
            "smallest": jnp.full(batch["x"].shape[0], batch["x"].min()),
            "rows": jnp.ones(batch["x"].shape[0]),
        },
        packed,
        batch_size=4,
    )
    (batches, _), *_ = evaluator.chunks()
    mask = np.asarray(batches["example_mask"])
    assert mask.shape == (1, 2, 4)
    assert mask.sum() == 5
    result = evaluator(PARAMS)
    assert result.pooled["smallest"] > 90
    np.testing.assert_array_equal(result.pooled["rows"], 1)


def test_what_a_metric_says_of_padding_stays_out():
    packed = make((2, 3))
    evaluator = Evaluator(
        lambda params, batch: {"v": jnp.where(batch["example_mask"], 1.0, jnp.nan)},
        packed,
        client_mesh(),
        batch_size=3,
    )
    result = evaluator(PARAMS)
    np.testing.assert_array_equal(result.per_client["v"], [1, 1])
    assert result.pooled["v"] == result.client_mean["v"] == result.client_p10["v"] == 1


def test_sums_of_small_whole_numbers_are_exact():
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 50, 40)
    hits = rng.integers(0, 2, sizes.sum())
    packed = Packed({"hit": hits}, np.concatenate([[0], np.cumsum(sizes)]))
    for mesh in (None, client_mesh()):
        result = Evaluator(lambda p, b: {"hit": b["hit"]}, packed, mesh)(PARAMS)
        assert result.pooled["hit"] == np.float32(hits.sum()) / np.float32(len(hits))
        sums = np.array([packed.client(i)["hit"].sum() for i in range(40)])
        with np.errstate(invalid="ignore"):
            expected = sums.astype(np.float32) / sizes.astype(np.float32)
        np.testing.assert_allclose(result.per_client["hit"], expected, rtol=2e-7)


@pytest.mark.parametrize("clients", [1, 2, 3, 10, 11, 21, 40])
def test_the_tenth_percentile_interpolates_as_numpy_does(clients):
    values = np.random.default_rng(clients).permutation(clients).astype(np.float32) ** 2
    # An empty client after every other one.
    sizes = np.resize([1, 0], 2 * clients)
    packed = Packed({"v": values}, np.concatenate([[0], np.cumsum(sizes)]))
    result = Evaluator(lambda p, b: {"v": b["v"]}, packed)(PARAMS)
    np.testing.assert_allclose(
        result.client_p10["v"], np.quantile(values, 0.1), rtol=1e-6, atol=1e-6
    )
    assert np.isnan(result.per_client["v"][1::2]).all()


def test_a_diverged_model_shows_in_every_average():
    values = np.array([1, 2, np.nan, 4], np.float32)
    packed = Packed({"v": values}, np.arange(5))
    result = Evaluator(lambda p, b: {"v": b["v"]}, packed)(PARAMS)
    for average in (result.pooled, result.client_mean, result.client_p10):
        assert np.isnan(average["v"])
    np.testing.assert_array_equal(result.per_client["v"], values)
    infinite = Packed({"v": np.array([np.inf, 1, 1], np.float32)}, np.arange(4))
    result = Evaluator(lambda p, b: {"v": b["v"]}, infinite)(PARAMS)
    assert result.pooled["v"] == np.inf
    assert result.client_p10["v"] == 1


def test_names_say_the_split_and_the_average():
    packed = make((2, 2))
    assert set(evaluate(metrics, PARAMS, packed).named("validation")) == {
        f"validation_{name}{suffix}"
        for name in ("score", "above")
        for suffix in ("", "_client_mean", "_client_p10")
    }


def test_many_models_share_the_examples():
    packed = make(SIZES["ragged"])
    evaluator = Evaluator(metrics, packed, client_mesh(), batch_size=4)
    both = jax.tree.map(lambda w: jnp.stack([w, -w]), PARAMS)
    result = jax.jit(jax.vmap(evaluator, in_axes=(0, None)))(both, evaluator.data)
    compare(jax.tree.map(lambda x: x[0], result), packed)
    np.testing.assert_allclose(
        result.pooled["score"][1], -result.pooled["score"][0], rtol=1e-5
    )


def test_nothing_to_evaluate_on_is_an_error():
    with pytest.raises(ValueError, match="at least one example"):
        Evaluator(metrics, make((0, 0)))
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        Evaluator(metrics, make((1,)), batch_size=0)


@pytest.mark.parametrize("mesh", [None, client_mesh()])
def test_a_mean_weighs_examples_by_their_denominators(mesh):
    right = np.array([[1, 2, 3, 0, 0, 5, 7, 0]]).T.astype(np.float32)
    tokens = np.array([[2, 4, 3, 0, 4, 5, 9, 0]]).T.astype(np.float32)
    packed = Packed({"right": right, "tokens": tokens}, np.array([0, 3, 4, 7, 8]))

    def metrics_fn(params, batch):
        return {"accuracy": Mean(batch["right"][:, 0], batch["tokens"][:, 0])}

    out = jax.jit(Evaluator(metrics_fn, packed, mesh, batch_size=2))({})
    np.testing.assert_allclose(out.pooled["accuracy"], 18 / 27, rtol=1e-6)
    # A client whose only example has nothing to count counts as one without examples.
    means = np.array([6 / 9, np.nan, 12 / 18, np.nan])
    np.testing.assert_allclose(out.per_client["accuracy"], means, rtol=1e-6)
    np.testing.assert_allclose(out.client_mean["accuracy"], np.nanmean(means))


@pytest.mark.parametrize("mesh", [None, client_mesh()])
@pytest.mark.parametrize("on_host", [False, True])
def test_chunks_and_the_place_of_the_examples_change_nothing(
    mesh, on_host, monkeypatch
):
    monkeypatch.setattr(evaluate_lib, "_CHUNK_ROWS", 5)
    packed = make(SIZES["many"])
    evaluator = Evaluator(metrics, packed, mesh, batch_size=4, on_host=on_host)
    assert (evaluator.data is None) == on_host
    compare(evaluator(PARAMS), packed)


def test_sums_go_on_where_float32_would_stand_still(monkeypatch):
    monkeypatch.setattr(evaluate_lib, "_CHUNK_ROWS", 16)
    values = np.ones(16 * 64, np.float32)
    values[0] = 2**24
    packed = Packed({"v": values}, np.array([0, len(values)]))
    mean = evaluate(lambda params, batch: {"v": batch["v"]}, {}, packed).pooled["v"]
    np.testing.assert_allclose(mean, values.mean(dtype=np.float64), rtol=5e-6)


def test_several_models_evaluate_the_same_from_the_host(monkeypatch):
    monkeypatch.setattr(evaluate_lib, "_CHUNK_ROWS", 6)
    data = FederatedData(make(SIZES["ragged"]), make(SIZES["many"][:7], seed=1))
    models = {"w": jnp.stack([PARAMS["w"], 2 * PARAMS["w"]])}
    there, here = (
        evaluate_lib.compile_evaluation(
            metrics, data, ("train", "test"), client_mesh(), on_host=on_host
        )(models)
        for on_host in (False, True)
    )
    for a, b in zip(there, here, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            np.testing.assert_allclose(value, b[name], rtol=1e-6, err_msg=name)
