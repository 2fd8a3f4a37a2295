"""Budgets of zCDP: known numbers, the Gaussian mechanism, what adds up."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from fedjax_core.privacy import (
    DynamicBudget,
    SplitBudget,
    budget_epsilon,
    gaussian_budget,
    gaussian_delta,
    minimiser_sensitivity,
    spend,
)

TEXT = DynamicBudget(1e-3, 0.99)
LINEAR = cast(Any, "linear")


def test_B1_totals_have_the_known_values_and_are_the_sums_of_all_messages(x64):
    for budget, messages, total in (
        (TEXT, 1, 1e-3),
        (TEXT, 100, 0.171467903616475),
        (TEXT, 200, 0.639918049360508),
        (TEXT, 300, 1.919723391463734),
        (DynamicBudget(1e-2, 0.9), 10, 0.168117479171320),
    ):
        t = np.arange(messages)
        _, spent = budget.message(t, np.ones(messages), 1.0)
        np.testing.assert_allclose(budget.total(messages), total, rtol=1e-12)
        np.testing.assert_allclose(np.sum(spent), total, rtol=1e-12)


def test_B2_totals_convert_to_the_known_epsilons():
    for messages, epsilon in (
        (200, 6.068482797423),
        (300, 11.322198027278),
        (100, 2.981519286756),
        (1, 0.215596602629),
    ):
        got = budget_epsilon(TEXT.total(messages), 1e-5)
        np.testing.assert_allclose(got, epsilon, rtol=1e-11)


def test_B3_the_divergence_of_normal_noise_is_linear_in_the_order(x64):
    sigma, sensitivity = 0.7, 1.3
    budget = float(gaussian_budget(sigma, sensitivity))
    found, spent = DynamicBudget(budget).message(0, sensitivity, sensitivity)
    np.testing.assert_allclose([found, spent], [sigma, budget], rtol=1e-14)
    for order in (1.5, 3.0):
        moment, _ = integrate.quad(
            lambda x, a=order: np.exp(
                a * stats.norm.logpdf(x, sensitivity, sigma)
                + (1 - a) * stats.norm.logpdf(x, 0, sigma)
            ),
            -20,
            20,
        )
        divergence = np.log(moment) / (order - 1)
        np.testing.assert_allclose(divergence, order * budget, rtol=1e-8)
    # The conversion holds for what the mechanism exactly gives away.
    epsilon = budget_epsilon(budget, 1e-5)
    assert gaussian_delta(sigma, epsilon, sensitivity) < 1e-5


def test_B4_B7_totals_are_stable_where_budgets_stay_and_monotone():
    assert DynamicBudget(1e-3).total(200) == pytest.approx(0.2, rel=1e-14)
    for zeta in (1 - 1e-6, 1 - 1e-12, 1 - 1e-16):
        assert DynamicBudget(1e-3, zeta).total(200) == pytest.approx(0.2, rel=2e-4)
    by_first = [DynamicBudget(f, 0.97).total(50) for f in (1e-4, 1e-3, 1e-2)]
    by_decay = [DynamicBudget(1e-3, z).total(50) for z in (1.0, 0.99, 0.9)]
    assert by_first == sorted(by_first)
    assert by_decay == sorted(by_decay)


def test_B5_budgets_add_up_over_parts_and_only_where_a_message_was_sent():
    first, rest = TEXT.total(80), DynamicBudget(1e-3 * 0.99**-80, 0.99).total(120)
    assert first + rest == pytest.approx(TEXT.total(200), rel=1e-12)
    spent = spend(jnp.array([1.0, 2.0]), 0.5, jnp.array([True, False]))
    np.testing.assert_array_equal(spent, [1.5, 2.0])


def test_B6_equal_parts_of_epsilon_and_delta_need_far_more_noise(x64):
    t = np.arange(200)
    sigma, _ = TEXT.message(t, np.ones(200), 1.0)
    variance = np.asarray(sigma) ** 2
    np.testing.assert_allclose(variance[[0, -1]], [500, 67.67], rtol=1e-4)
    np.testing.assert_allclose(variance.sum(), 43_301, rtol=1e-4)
    split = SplitBudget.matching(TEXT, 1e-5, 200)
    sigma, _ = split.message(t, np.ones(200), 1.0)
    np.testing.assert_allclose(np.asarray(sigma) ** 2, 37_004.6, rtol=1e-5)
    # The book-keeping of zCDP sees how little such messages really spend.
    budget = gaussian_budget(sigma)
    assert budget.sum() < TEXT.total(200) / 100


def test_both_schedules_agree_where_the_sensitivity_stays(x64):
    t = np.arange(30)
    other = DynamicBudget(1e-3, 0.99, "variance")
    stays, falls = np.full(30, 0.3), 0.3 / np.sqrt(t + 1)
    for of, against in zip(
        TEXT.message(t, stays, 0.3), other.message(t, stays, 0.3), strict=True
    ):
        np.testing.assert_allclose(of, against, rtol=1e-13)
    sigma, spent = TEXT.message(t, falls, 0.3)
    more, less = other.message(t, falls, 0.3)
    assert (sigma <= more).all()
    assert (less <= spent).all()
    np.testing.assert_allclose(spent.sum(), TEXT.total(30), rtol=1e-12)
    np.testing.assert_allclose(less, gaussian_budget(more, falls), rtol=1e-13)


def test_a_message_may_be_traced_in_single_precision():
    sigma, spent = jax.jit(TEXT.message)(199, jnp.float32(0.5), 0.5)
    np.testing.assert_allclose(spent, 1e-3 * 0.99**-199, rtol=1e-5)
    np.testing.assert_allclose(sigma, 0.5 / np.sqrt(2 * spent), rtol=1e-5)


def test_long_runs_are_in_range_where_their_budgets_are():
    # e^105 times the first budget, and 2^1100 times.
    for schedule in ("budget", "variance"):
        budget = DynamicBudget(1e-30, 0.9, schedule)
        sigma, spent = budget.message(1000, jnp.float32(1e-3), 1.0)
        falls = 1.0 if schedule == "budget" else 1e-6
        expected = 1e-30 * 0.9**-1000 * falls
        np.testing.assert_allclose(spent, expected, rtol=2e-5)
        np.testing.assert_allclose(sigma, 1e-3 / np.sqrt(2 * expected), rtol=2e-5)
    exact = (2**1100 - 1) // 10**300
    assert DynamicBudget(1e-300, 0.5).total(1100) == pytest.approx(exact, rel=1e-12)
    for budget in (DynamicBudget(1e-3, 0.5), DynamicBudget(1e308)):
        with pytest.raises(ValueError, match=r"so few .* got 2000"):
            budget.total(2000)


def test_what_is_out_of_range_is_refused():
    for wrong, match in (
        (lambda: DynamicBudget(0.0), "first must be > 0"),
        (lambda: DynamicBudget(1.0, 1.5), "decay must be in"),
        (lambda: DynamicBudget(1.0, 0.0), "decay must be > 0"),
        (lambda: DynamicBudget(float("nan")), "first must be > 0"),
        (
            lambda: DynamicBudget(1.0, 0.9, LINEAR),
            "schedule must be one of",
        ),
        (lambda: TEXT.total(0), "messages must be >= 1"),
        (lambda: SplitBudget(1.0, 1.0, 5), "delta must be"),
        (lambda: SplitBudget(1.0, 0.1, 0), "messages must be >= 1"),
        (lambda: budget_epsilon(-1.0, 0.1), "budget must be >= 0"),
        (lambda: gaussian_budget(0.0), "sigma must be > 0 and finite, got 0.0"),
        (lambda: gaussian_budget(1.0, -1.0), "sensitivity must be finite and >= 0"),
        (lambda: gaussian_budget(1.0, np.nan), "sensitivity must be finite and >= 0"),
        (lambda: minimiser_sensitivity(1.0, np.array([3, 0]), 1.0), "got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
