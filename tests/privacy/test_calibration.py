"""Calibration against integrals and known values."""

import math

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


def test_delta_at_an_epsilon_whose_exponential_overflows():
    p, q = [0.5, 0.3, 0.2, 0.0], [0.0, 0.4, 0.3, 0.3]
    for epsilon in (709.0, 800.0, 1e6):
        assert privacy.finite_delta(p, q, epsilon) == pytest.approx(0.5, rel=1e-12)
    # e^740 times the smallest positive float is 0.0121.
    tiny = [5e-324, 1.0]
    delta = privacy.finite_delta([0.5, 0.5], tiny, 740.0)
    assert delta == pytest.approx(0.5 - math.exp(740 - 744.4400719213812), rel=1e-6)
    assert privacy.finite_delta([0.5, 0.5], tiny, 800.0) == 0
