"""Noise of accumulated updates, and rates of convergence."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.compress import golomb, labels, theory


def test_accumulated_variance_is_the_double_sum_and_below_its_bound():
    for beta in np.linspace(-0.99, -0.01, 25).tolist():
        gaps = np.abs(np.subtract.outer(np.arange(200), np.arange(200)))
        sums = (beta**gaps).cumsum(0).cumsum(1).diagonal()
        for steps, double_sum in enumerate(sums, 1):
            exact, bound = theory.accumulated_variance(steps, beta, sigma=2.0)
            assert exact == pytest.approx(4 * double_sum, rel=1e-9, abs=1e-9)
            assert exact <= bound * (1 + 1e-12)
    assert theory.accumulated_variance(10, -0.5) == (3.77734375, 6)
    exact, bound = theory.accumulated_variance(100, -0.5)
    assert (round(exact, 4), bound) == (33.7778, 51)


def test_accumulated_noise_has_this_variance():
    rng, beta, steps, draws = np.random.default_rng(0), -0.6, 30, 40_000
    noise = rng.normal(size=draws)
    total = noise.copy()
    for _ in range(steps - 1):
        noise = beta * noise + math.sqrt(1 - beta**2) * rng.normal(size=draws)
        total += noise
    exact, _ = theory.accumulated_variance(steps, beta)
    # Three deviations of a sample variance: a false alarm in 370.
    assert abs(total.var() - exact) < 3 * exact * math.sqrt(2 / draws)


def test_delay_raises_the_signal_to_noise_ratio():
    ratios = [theory.signal_to_noise(0.1, steps, -0.5) for steps in (1, 10, 100)]
    assert ratios[0] == pytest.approx(0.1 / math.sqrt(1.5))
    assert ratios == sorted(ratios)
    assert ratios[2] == pytest.approx(10 / math.sqrt(51))


def test_compression_costs_nothing_in_the_long_run():
    how = {"smoothness": 8.0, "convexity": 2.0, "gradient": 3.0}
    first, second, third = theory.convergence_terms(10, 0.1, **how)
    assert first == 9 / (2 * 10)
    assert second == pytest.approx(9 * 4 / (0.01 * 2 * 100))
    assert third == pytest.approx(9 / (0.001 * 2 * 1000))
    # With kappa = 4 and p = 0.1 the first is the largest from kappa / p^2 = 400 on, not
    # from sqrt(kappa) / p = 20.
    for steps, largest in ((21, 1), (399, 1), (401, 0)):
        terms = theory.convergence_terms(steps, 0.1, **how)
        assert terms.index(max(terms)) == largest


def test_what_theory_does_not_cover_is_refused():
    unknown: Any = "run lengths"
    for wrong, message in [
        (lambda: theory.accumulated_variance(3, 0.5), "beta must be > -1 and < 0"),
        (lambda: theory.worst_contraction(5, 4), "k must be in"),
        (lambda: theory.value_bits(unknown, 0.1), "method must be one of"),
        (lambda: theory.download_ratio(0.0, "stc"), "participation must be"),
        (lambda: theory.residual_bound(1.0, 1.0), "alpha must be in"),
        (lambda: theory.residual_bound(0.5, -1.0), "largest must be >= 0"),
        (lambda: theory.information_budget("stc", 0.0, 1, 1, 1), "rate must be > 0"),
        (lambda: theory.contraction(jnp.ones(3), 0), r"k must be in \[1, 3\], got 0"),
        (
            lambda: theory.convergence_terms(
                3, 1.5, smoothness=1, convexity=1, gradient=1
            ),
            "rate must be in",
        ),
        (lambda: golomb.expected_bits(2.0, 3), "rate must be > 0 and < 1"),
        (lambda: golomb.expected_bits(0.5, -1), r"b must be in \[0, 62\], got -1"),
        (lambda: labels.num_label_vectors(0, 3), "bits must be >= 1"),
        (
            lambda: labels.delta_entropy(np.array([0.5, 2.0]), 3),
            r"in \[0, 1\], got 2.0",
        ),
        (
            lambda: labels.fit_power_law(np.arange(2), np.ones(2)),
            r"rounds must be .* got 0",
        ),
        (lambda: labels.fit_power_law(np.ones(2), np.arange(2)), "entropy must be"),
        (lambda: labels.fit_power_law(np.ones(2), np.ones(2)), "two different rounds"),
        (
            lambda: labels.fit_power_law(np.arange(1, 4), np.ones(2)),
            "two different rounds",
        ),
        (lambda: theory.compression_ratio("sbc", 0.7), r"rate must be in \[0, 0.5\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()
