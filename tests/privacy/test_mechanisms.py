"""Noise and its calibration: printed numbers, quadrature, exact ratios, statistics."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from fedjax_core import privacy

KEY = jax.random.key(0)


# T-P2: calibration.


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [(0.5, 7.031827), (1, 3.730632), (4, 1.081162), (10, 0.499889)],
)
def test_the_smallest_sigma_has_the_known_values(epsilon, expected):
    sigma = privacy.gaussian_sigma(epsilon, 1e-5)
    assert sigma == pytest.approx(expected, abs=5e-7)
    assert privacy.gaussian_delta(sigma, epsilon) <= 1e-5
    assert privacy.gaussian_delta(sigma * (1 - 1e-9), epsilon) > 1e-5


@pytest.mark.parametrize("epsilon", [1e-3, 0.3, 20.0, 200.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-2, 0.6])
def test_the_smallest_sigma_is_valid_and_tight_everywhere(epsilon, delta):
    sigma = privacy.gaussian_sigma(epsilon, delta)
    assert privacy.gaussian_delta(sigma, epsilon) <= delta * (1 + 1e-12)
    assert privacy.gaussian_delta(0.999 * sigma, epsilon) > delta


def test_the_classical_formula_is_generous_below_one_and_wrong_at_ten():
    classical = privacy.gaussian_sigma_classical
    assert classical(0.5, 1e-5) == pytest.approx(9.689611, abs=5e-7)
    assert privacy.gaussian_delta(9.689611, 0.5) == pytest.approx(1.6e-8, rel=0.05)
    assert classical(1, 1e-5, allow_large_epsilon=True) == pytest.approx(
        4.844805, abs=1e-6
    )
    at_ten = classical(10, 1e-5, allow_large_epsilon=True)
    assert at_ten == pytest.approx(0.484481, abs=5e-7)
    delta = privacy.gaussian_delta(at_ten, 10)
    assert delta == pytest.approx(2.27e-5, rel=5e-3)
    with pytest.raises(ValueError, match=r"epsilon must be < 1 .* got 1"):
        classical(1, 1e-5)


def test_calibration_scales_with_the_sensitivity():
    sensitivity = math.sqrt(30) / 8  # of the chain of three nodes
    sigma = privacy.gaussian_sigma_classical(0.5, 1e-5, sensitivity)
    assert sigma == pytest.approx(6.63402, abs=5e-6)
    assert privacy.gaussian_sigma(0.5, 1e-5, 3) == pytest.approx(
        3 * privacy.gaussian_sigma(0.5, 1e-5), rel=1e-12
    )
    assert privacy.laplace_scale(0.5, 3) == 6


@pytest.mark.parametrize(("sigma", "epsilon"), [(2.0, 0.1), (1.0, 1.0), (0.4, 6.0)])
def test_the_exact_curve_is_the_integral_it_stands_for(sigma, epsilon):
    def excess(x):
        p, q = stats.norm.pdf(x, 1, sigma), stats.norm.pdf(x, 0, sigma)
        return max(0.0, p - math.exp(epsilon) * q)

    start = 0.5 + epsilon * sigma**2  # where the densities' ratio is e^epsilon
    expected = integrate.quad(excess, start, 1 + 12 * sigma, epsabs=1e-14)[0]
    delta = privacy.gaussian_delta(sigma, epsilon)
    assert delta == pytest.approx(expected, rel=1e-8)


def test_laplace_noise_of_the_calibrated_scale_is_private_with_delta_zero():
    epsilon, sensitivity = 0.7, 2.0
    b = privacy.laplace_scale(epsilon, sensitivity)
    x = np.linspace(-30, 30, 1201)
    ratio = stats.laplace.pdf(x, 0, b) / stats.laplace.pdf(x, sensitivity, b)
    assert ratio.max() == pytest.approx(math.exp(epsilon), rel=1e-12)


# T-P4: Rényi.


@pytest.mark.parametrize("order", [1.5, 3, 8])
def test_renyi_divergence_of_the_gaussian_by_quadrature(order):
    def density(x):
        p, q = stats.norm.logpdf(x, 1, 2), stats.norm.logpdf(x, 0, 2)
        return math.exp(order * p + (1 - order) * q)

    integral = integrate.quad(density, order - 30, order + 30, epsabs=1e-13)[0]
    expected = math.log(integral) / (order - 1)
    assert privacy.gaussian_rdp(order, 2) == pytest.approx(expected, rel=1e-9)
    if order == 3:
        assert privacy.gaussian_rdp(3, 2) == pytest.approx(0.375, rel=1e-12)


def test_rdp_converts_to_a_valid_epsilon():
    orders = np.linspace(1.01, 200, 5000)
    spent = min(
        privacy.rdp_epsilon(a, privacy.gaussian_rdp(a, 4), 1e-5) for a in orders
    )
    closed = 1 / 32 + math.sqrt(2 * math.log(1e5)) / 4  # at the best order
    assert spent == pytest.approx(closed, rel=1e-4)
    assert privacy.gaussian_delta(4, spent) < 1e-5


def test_divergences_of_finite_outputs():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    expected = math.log(np.sum(q * (p / q) ** 2))
    assert privacy.renyi_divergence(p, q, 2) == pytest.approx(expected, rel=1e-12)
    assert privacy.renyi_divergence(p, p, 2) == 0
    assert privacy.renyi_divergence([0.5, 0.5], [1, 0], 2) == math.inf
    assert privacy.finite_delta(p, q, 0) == pytest.approx(0.3, rel=1e-12)
    largest = math.log(2.5)
    assert privacy.finite_delta(p, q, largest) == pytest.approx(0, abs=1e-15)


def test_no_map_of_the_output_gives_more_away():
    """Prop. 9.1, exactly: T-P5 for finitely many values."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        p, q = rng.dirichlet(np.ones(6), 2)
        post = rng.dirichlet(np.ones(4), 6)  # a random map, row by row
        for epsilon in (0.0, 0.5, 1.5):
            after = privacy.finite_delta(p @ post, q @ post, epsilon)
            assert after <= privacy.finite_delta(p, q, epsilon) + 1e-9
        after = privacy.renyi_divergence(p @ post, q @ post, 3)
        assert after <= privacy.renyi_divergence(p, q, 3) + 1e-9


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
    tree = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3, jnp.float32)}
    chex.assert_trees_all_equal_dtypes(privacy.add_gaussian(KEY, tree, 1.0), tree)
    with jax.enable_x64(True):
        x = jnp.ones(3, jnp.float64)
        assert privacy.add_laplace(KEY, x, 1.0).dtype == jnp.float64
    with pytest.raises(TypeError, match="int32"):
        privacy.add_gaussian(KEY, jnp.arange(3), 1.0)


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


# What is refused.


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: privacy.gaussian_sigma(0, 1e-5), "epsilon must be > 0"),
        (lambda: privacy.gaussian_sigma(1, 0), "delta must be > 0 and < 1, got 0"),
        (lambda: privacy.gaussian_sigma(1, 1), "delta must be > 0 and < 1, got 1"),
        (lambda: privacy.gaussian_sigma(1, 0.1, 0), "sensitivity must be > 0"),
        (lambda: privacy.gaussian_sigma_classical(-1, 0.1), "epsilon must be > 0"),
        (lambda: privacy.gaussian_sigma_classical(0.5, 2), "delta"),
        (lambda: privacy.gaussian_delta(0, 1), "sigma must be > 0"),
        (lambda: privacy.gaussian_delta(1, 0), "epsilon must be > 0"),
        (lambda: privacy.laplace_scale(-0.5), "epsilon must be > 0"),
        (lambda: privacy.gaussian_rdp(1, 1), "order must be > 1 and finite, got 1"),
        (lambda: privacy.gaussian_rdp(2, -1), "sigma must be > 0"),
        (lambda: privacy.rdp_epsilon(0.5, 1, 0.1), "order must be > 1"),
        (lambda: privacy.rdp_epsilon(2, -1, 0.1), "gamma must be >= 0"),
        (lambda: privacy.rdp_epsilon(2, 1, 0), "delta"),
        (lambda: privacy.finite_delta([0.5, 0.6], [1, 0], 1), "p must be prob"),
        (lambda: privacy.renyi_divergence([1.0], [0.5, 0.5], 2), "q must have"),
        (lambda: privacy.response_probability(1, 1), "num_classes must be >= 2"),
        (lambda: privacy.response_probability(3, 0), "epsilon must be > 0"),
        (lambda: privacy.random_labels(KEY, jnp.arange(3), 1), "num_classes"),
        (
            lambda: privacy.randomised_response(KEY, jnp.arange(3), 2, 1),
            r"labels must be in 0\.\.1, got 0 to 2",
        ),
        (lambda: privacy.add_gaussian(KEY, jnp.ones(2), 0.0), "sigma must be > 0"),
        (lambda: privacy.add_laplace(KEY, jnp.ones(2), -1), "scale must be > 0"),
        (lambda: privacy.replace_features(KEY, jnp.ones(2)), "x must have shape"),
        (
            lambda: privacy.replace_features(KEY, jnp.ones((2, 2)), 1.5),
            r"probability must be in \[0, 1\]",
        ),
        (lambda: privacy.subsample(KEY, jnp.ones(2), 3), "size must be <= 2"),
        (
            lambda: privacy.subsample(KEY, (jnp.ones(2), jnp.ones(3)), 1),
            "examples must agree",
        ),
    ],
)
def test_bad_arguments_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


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
        with pytest.raises(ValueError, match="num_classes must be .* fit labels of int8"):
            call(jax.random.key(0))
    assert int(privacy.random_labels(jax.random.key(0), labels, 128).max()) == 127


def test_delta_at_an_epsilon_whose_exponential_overflows():
    p, q = [0.5, 0.3, 0.2, 0.0], [0.0, 0.4, 0.3, 0.3]
    for epsilon in (709.0, 800.0, 1e6):
        assert privacy.finite_delta(p, q, epsilon) == pytest.approx(0.5, rel=1e-12)
    # e^740 times the smallest positive float is 0.0121.
    tiny = [5e-324, 1.0]
    delta = privacy.finite_delta([0.5, 0.5], tiny, 740.0)
    assert delta == pytest.approx(0.5 - math.exp(740 - 744.4400719213812), rel=1e-6)
    assert privacy.finite_delta([0.5, 0.5], tiny, 800.0) == 0
