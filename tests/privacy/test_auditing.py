"""Audits refute what is false, and limits on tests hold."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_core import privacy
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.theory import leakage
from fedjax_core.privacy import information

KEY = jax.random.key(0)


# T-P3: tests.


def test_no_threshold_beats_the_limits_of_the_gaussian_mechanism():
    rng = np.random.default_rng(0)
    for epsilon, delta in ((0.5, 1e-5), (2.0, 1e-2)):
        sigma = privacy.gaussian_sigma(epsilon, delta)
        # D' shifts the output by 1; declare D' above the threshold.
        t = np.r_[
            rng.uniform(-30, 30, 2000), np.linspace(-10 * sigma, 10 * sigma, 2000)
        ]
        p1, p2 = stats.norm.sf(t, 0, sigma), stats.norm.cdf(t, 1, sigma)
        slack = privacy.trade_off_slack(p1, p2, epsilon, delta)
        assert slack.shape == (4000,)
        assert slack.min() >= -1e-12
        # The exact sigma leaves nothing to spare at the best threshold, where the
        # densities' ratio is e^epsilon: less noise breaks the limit there.
        best = 0.5 + epsilon * sigma**2
        errors = stats.norm.sf(best, 0, sigma), stats.norm.cdf(best, 1, sigma)
        assert privacy.trade_off_slack(*errors, epsilon, delta) < 1e-9
        assert privacy.epsilon_from_errors(*errors, delta) == pytest.approx(
            epsilon, rel=1e-6
        )
        less = 0.9 * sigma
        best = 0.5 + epsilon * less**2
        errors = stats.norm.sf(best, 0, less), stats.norm.cdf(best, 1, less)
        assert privacy.trade_off_slack(*errors, epsilon, delta) < 0


def test_both_limits_count():
    # The first holds with room to spare, the second does not.
    assert privacy.trade_off_slack(0.5, 0.01, 1.0, 0.0) == pytest.approx(
        0.5 + math.e * 0.01 - 1
    )
    np.testing.assert_allclose(
        privacy.epsilon_from_errors([0.5, 0.0, 0.9], [0.01, 0.5, 0.9], 0.0),
        [math.log(50), math.inf, 0],
    )


# T-P5 and T-P6: audits.


def release(sigma):
    """A mean of 20 values in [0, 1], times 20, released with noise."""
    return lambda key, x: privacy.add_gaussian(key, x.sum(), sigma)


DATA = jnp.linspace(0, 1, 20)


NEIGHBOUR = DATA.at[0].set(1.0)  # one value moves by 1, the sensitivity


def test_an_audit_does_not_refute_an_honest_claim():
    sigma = privacy.gaussian_sigma(0.5, 1e-5)
    found = privacy.audit(KEY, release(sigma), DATA, NEIGHBOUR, runs=4000, delta=1e-5)
    assert found.epsilon <= 0.5  # a false alarm for 5 % of keys at most, by design
    assert 0.45 < found.accuracy < 0.6
    # The same of algorithms that leak nothing, with 19 more keys: at most 5 % of bounds
    # may be positive, 6 or more of 20 happen by chance once in 3,000.
    audits = [
        privacy.audit_outputs(*np.random.default_rng(k).normal(size=(2, 400)), delta=0)
        for k in range(20)
    ]
    assert sum(found.epsilon > 0 for found in audits) < 6


def test_an_audit_exposes_too_little_noise():
    sigma = privacy.gaussian_sigma(0.5, 1e-5) / 10
    found = privacy.audit(KEY, release(sigma), DATA, NEIGHBOUR, runs=4000, delta=1e-5)
    assert found.epsilon > 0.5
    # The truth for this sigma, which a valid bound must not exceed.
    assert privacy.gaussian_delta(sigma, found.epsilon) > 1e-5
    best = stats.norm.cdf(0.5 / sigma)
    assert found.accuracy == pytest.approx(best, abs=6 * 0.5 / math.sqrt(4000))
    # Its bounds on errors are above those of some threshold.
    threshold = stats.norm.isf(found.p1, 0, sigma)
    assert found.p2 > stats.norm.cdf(threshold, 1, sigma) - 0.03


def test_an_audit_sees_no_more_after_a_fixed_map():
    """T-P5. A difference of bounds deviates by at most 0.46, a mean of 40 by 0.073.

    So 0.3 is four standard deviations: a false alarm of 1 in 30,000 for each map.
    """
    maps = [
        lambda x: np.tanh(x - 1),
        lambda x: np.round(x),
        lambda x: x.sum(1),
        lambda x: np.minimum(x, 0.5),
        lambda x: x[:, 0],  # the coordinate that does not depend on the data
        lambda x: 0 * x,
    ]
    bounds = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        first, second = (
            rng.normal([0.0, shift], 1.0, (2000, 2)) for shift in (0.0, 1.0)
        )
        audits = [
            privacy.audit_outputs(post(first), post(second), delta=1e-5)
            for post in (lambda x: x, *maps)
        ]
        bounds.append([found.epsilon for found in audits])
        assert audits[-1].epsilon == 0
        assert audits[-1].accuracy == 0.5
    before, *after = np.mean(bounds, 0)
    assert before > 1
    assert max(after) <= before + 0.3
    assert after[-2] < 0.3


def test_an_audit_takes_pytrees_and_other_predictors():
    rng = np.random.default_rng(0)
    first = {"a": rng.standard_normal((600, 2)), "b": rng.standard_normal(600)}
    second = {**first, "a": 5 * rng.standard_normal((600, 2))}  # no mean gives it away
    linear = privacy.audit_outputs(first, second, delta=0.0)
    size = privacy.audit_outputs(
        first, second, delta=0.0, fit=lambda x, label: lambda x: np.abs(x).max(1)
    )
    assert size.epsilon > linear.epsilon + 0.5
    assert size.accuracy > 0.8


# What is refused.


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: privacy.trade_off_slack(0.1, 0.1, 0, 0.1), "epsilon must be > 0"),
        (lambda: privacy.trade_off_slack(0.1, 0.1, 1, 1), r"delta must be in \[0, 1\)"),
        (lambda: privacy.trade_off_slack(1.1, 0.1, 1, 0), "p1 must be prob"),
        (lambda: privacy.epsilon_from_errors(0.1, -1, 0), "p2 must be prob"),
        (lambda: leakage.label_sensitivity_bound(jnp.ones((1, 1, 1)), 0), "smallest"),
        (
            lambda: leakage.label_sensitivity(
                Graph.from_edges(np.array([[0, 1]])), jnp.ones((3, 1, 1)), 1.0
            ),
            r"X must have shape \(2, m, d\)",
        ),
        (
            lambda: leakage.label_sensitivity(
                Graph.from_edges(np.array([[0, 1]])), jnp.ones((2, 1, 1)), -1.0
            ),
            "alpha must be >= 0",
        ),
        (
            lambda: privacy.audit_outputs(np.ones(3), np.ones(9), delta=0),
            "runs must be >= 4",
        ),
        (
            lambda: privacy.audit_outputs(np.ones(9), np.ones(9), delta=2),
            "delta must be",
        ),
        (
            lambda: privacy.audit_outputs(
                np.ones(9), np.ones(9), delta=0, confidence=1
            ),
            "confidence must be",
        ),
        (lambda: information.mutual_information([0.5, 0.5]), "joint must have 2 axes"),
        (lambda: information.mutual_information([[0.5, 0.6]]), "sum to 1"),
        (lambda: information.mutual_information([[1.5, -0.5]]), "joint must be prob"),
        (lambda: information.gaussian_mutual_information(1.1), "correlation"),
        (
            lambda: information.privacy_funnel(np.full((1, 1, 11), 1 / 11), 0),
            "at most 10 values",
        ),
        (
            lambda: information.privacy_funnel(np.full((1, 1, 2), 0.5), 0.1),
            r"at_least must be <= I\(y; x\)",
        ),
    ],
)
def test_bad_arguments_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_limits_at_any_epsilon():
    slack = privacy.trade_off_slack([0.0, 1e-3, 0.5], [0.0, 0.0, 0.5], 800.0, 0.1)
    np.testing.assert_array_equal(slack, [-0.9, 1e-3 - 0.9, np.inf])
