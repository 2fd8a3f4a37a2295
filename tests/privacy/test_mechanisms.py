"""Random maps have their distributions and guarantees."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_core import privacy
from fedjax_core.transform import Message

KEY = jax.random.key(0)


# T-P7: labels.


@pytest.mark.parametrize("num_classes", [2, 7])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_randomised_response_is_exactly_private(num_classes, epsilon):
    keep = privacy.response_probability(num_classes, epsilon)
    answers = np.full((num_classes, num_classes), (1 - keep) / (num_classes - 1))
    np.fill_diagonal(answers, keep)
    assert answers.max() / answers.min() == pytest.approx(math.exp(epsilon), rel=1e-9)
    delta = privacy.finite_delta(answers[0], answers[1], epsilon)
    assert delta == pytest.approx(0, abs=1e-12)
    assert privacy.finite_delta(answers[0], answers[1], 0.99 * epsilon) > 0


def test_randomised_response_keeps_and_lies_as_often_as_it_should(run):
    num = 20_000
    labels = jnp.full(num, 2)
    respond = run(lambda k, y: privacy.randomised_response(k, y, 4, 1.0))
    counts = np.bincount(respond(KEY, labels), minlength=4)
    keep = math.e / (math.e + 3)
    expected = num * np.array([1 - keep, 1 - keep, 3 * keep, 1 - keep]) / 3
    # Chi-square with 3 degrees of freedom; a right implementation fails 1 key in 10^6.
    assert np.sum((counts - expected) ** 2 / expected) < stats.chi2.isf(1e-6, 3)


def test_random_labels_do_not_depend_on_the_label():
    labels = jnp.arange(12) % 3
    first = privacy.random_labels(KEY, labels, 3)
    second = privacy.random_labels(KEY, jnp.zeros_like(labels), 3)
    np.testing.assert_array_equal(first, second)
    assert set(np.asarray(first).tolist()) == {0, 1, 2}
    delta = privacy.finite_delta([1 / 3] * 3, [1 / 3] * 3, 0)
    assert delta == 0


# Noise on outputs.


@pytest.mark.parametrize(
    ("add", "distribution"),
    [
        (privacy.add_gaussian, stats.norm(scale=0.5)),
        (privacy.add_laplace, stats.laplace(scale=0.5)),
    ],
)
def test_noise_has_its_distribution_and_follows_the_key(add, distribution, run):
    tree = {"w": jnp.full((60, 50), 3.0), "b": jnp.zeros((2, 1000))}
    noisy = run(lambda k: add(k, tree, 0.5))(KEY)
    again, other = add(KEY, tree, 0.5), add(jax.random.key(1), tree, 0.5)
    chex.assert_trees_all_close(noisy, again, rtol=1e-6)
    assert not np.any(np.asarray(noisy["w"]) == np.asarray(other["w"]))
    noise = np.r_[(np.asarray(noisy["w"]) - 3).ravel(), np.asarray(noisy["b"]).ravel()]
    # Kolmogorov-Smirnov; a right implementation fails 1 key in 10^4.
    assert stats.kstest(noise, distribution.cdf).pvalue > 1e-4
    assert not np.array_equal(noise[:2000], noise[3000:])


def test_noise_keeps_dtypes():
    with jax.enable_x64(True):
        tree = {"a": jnp.ones(3, jnp.float64), "b": jnp.ones(3, jnp.float32)}
        for add in (privacy.add_gaussian, privacy.add_laplace):
            chex.assert_trees_all_equal_dtypes(add(KEY, tree, 1.0), tree)
    with pytest.raises(TypeError, match="int32"):
        privacy.add_gaussian(KEY, jnp.arange(3), 1.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_noise_that_halves_would_round_away_is_refused(dtype):
    # A message of 1000 with noise of 0.01 would be sent as it is.
    x = jnp.full(3, 1000, dtype)
    message = Message(x, jnp.float32(0))
    for add in (
        lambda: privacy.add_gaussian(KEY, x, 0.01),
        lambda: privacy.add_laplace(KEY, {"w": x}, 0.01),
        lambda: privacy.noisy(0.01).apply(message, (), KEY),
    ):
        with pytest.raises(TypeError, match=f"float32 or float64, got dtype {x.dtype}"):
            add()


def test_noise_sweeps_in_one_program():
    sigma = jnp.array([1e-3, 1.0, 100.0])
    out = jax.vmap(lambda s: privacy.add_gaussian(KEY, jnp.zeros(4), s))(sigma)
    np.testing.assert_allclose(out[1] * 100, out[2], rtol=1e-5)


# Maps before the algorithm.


@pytest.mark.parametrize("matched", ["gaussian", "marginals"])
def test_replaced_features_are_matched_to_the_data(matched):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4000, 3)) @ [[1, 0.9, 0], [0, 0.5, 0], [0, 0, 2]] + 5
    x = jnp.asarray(x, jnp.float32)
    new = np.asarray(privacy.replace_features(KEY, x, matched=matched))
    # Six standard errors of the mean of 4000, and of variances.
    np.testing.assert_allclose(new.mean(0), x.mean(0), atol=6 * 2 / 4000**0.5)
    np.testing.assert_allclose(new.var(0), x.var(0), rtol=6 * (2 / 4000) ** 0.5)
    correlation = np.corrcoef(new.T)[0, 1]
    expected = np.corrcoef(np.asarray(x).T)[0, 1] if matched == "gaussian" else 0
    assert correlation == pytest.approx(expected, abs=6 / 4000**0.5)
    if matched == "marginals":
        for j in range(3):
            assert np.isin(new[:, j], x[:, j]).all()


def test_replaced_features_of_few_or_equal_rows():
    x = jnp.asarray([[1.0, 2.0], [1.0, 2.0]])  # singular covariance
    np.testing.assert_allclose(privacy.replace_features(KEY, x), x, atol=1e-6)
    x = jnp.arange(200.0).reshape(100, 2)
    kept = privacy.replace_features(KEY, x, probability=0.0)
    np.testing.assert_array_equal(kept, x)
    same = np.asarray(privacy.replace_features(KEY, x, 0.5) == x).all(1)
    assert 25 < same.sum() < 75  # five standard deviations


def test_subsampling_takes_rows_together_without_repetition():
    examples = {"x": jnp.arange(20.0).reshape(10, 2), "y": jnp.arange(10)}
    out = jax.vmap(lambda k: privacy.subsample(k, examples, 4))(
        jax.random.split(KEY, 2000)
    )
    np.testing.assert_array_equal(out["x"][..., 0], 2 * out["y"])
    assert all(len(set(row)) == 4 for row in np.asarray(out["y"]).tolist())
    counts = np.bincount(np.asarray(out["y"]).ravel(), minlength=10)
    # Each row is there with probability 0.4; six standard deviations.
    assert np.abs(counts - 800).max() < 6 * math.sqrt(2000 * 0.24)


def test_constant_and_concatenated_maps():
    """A constant map is (0, 0)-DP; stages run in order with keys of their own."""
    chain = privacy.concatenate(
        lambda k, x: privacy.subsample(k, x, 3),
        lambda k, x: x.sum(0),
        lambda k, x: privacy.add_gaussian(k, x, 0.1),
    )
    ones = jnp.ones((5, 2))
    out = chain(KEY, ones)
    assert out.shape == (2,)
    assert np.all(np.abs(out - 3) < 1)
    assert np.all(out != 3)
    np.testing.assert_array_equal(out, chain(KEY, ones))
    hidden = privacy.concatenate(chain, lambda k, x: privacy.constant(x, 7.0))
    np.testing.assert_array_equal(hidden(KEY, ones), hidden(KEY, 2 * ones))


def test_labels_that_are_not_ints_are_refused():
    with pytest.raises(TypeError, match="labels must be ints"):
        privacy.randomised_response(KEY, jnp.ones(3), 2, 1.0)


def test_narrow_labels_get_every_answer():
    labels = jnp.full(20_000, 90, jnp.int8)
    answers = privacy.randomised_response(jax.random.key(0), labels, 100, 1e-3)
    assert answers.dtype == jnp.int8
    # 200 expected of each: none at all has a probability of 100 exp(-200).
    assert set(np.asarray(answers).tolist()) == set(range(100))
    for call in (
        lambda key: privacy.randomised_response(key, labels, 200, 1.0),
        lambda key: privacy.random_labels(key, labels, 200),
    ):
        with pytest.raises(ValueError, match="fit labels of int8"):
            call(jax.random.key(0))
    assert int(privacy.random_labels(jax.random.key(0), labels, 128).max()) == 127
