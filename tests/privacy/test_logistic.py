"""Certainties against scipy, closed forms and the numbers of the paper."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from scipy import optimize, special

from fedjax_core import privacy
from fedjax_core.privacy import logistic

KEY = jax.random.key(0)
ROOT = 1.6335061701558464  # of 0.1 w = 1 / (1 + e^w)
E1 = np.array([1.0, 0.0])
OPEN = privacy.CertaintyConfig(epsilon=None, quantile=1.0)
CLASSICAL = privacy.CertaintyConfig(mechanism="classical", quantile=1.0)


def unit(rng, *shape):
    """Features with norms up to 1."""
    x = rng.normal(size=(*shape,))
    return (
        x
        / np.linalg.norm(x, axis=-1, keepdims=True)
        * rng.uniform(size=(*shape[:-1], 1))
    )


def fit(own, negatives, regularisation):
    """The minimum of one client, of 100 examples and 100 negatives."""
    sizes = np.array([100])
    w, gradient = logistic.minimise(own[None], sizes, negatives, regularisation)
    assert gradient[0] <= logistic.GRADIENT_NORM
    return w[0]


def test_the_minimum_is_scipys_for_every_client_of_its_size():
    rng = np.random.default_rng(0)
    sizes, regularisation = [7, 2, 0], 0.1
    own, negatives = unit(rng, 3, 7, 4), unit(rng, 11, 4)
    mask = np.arange(7) < np.array(sizes)[:, None]
    queries = 3 * unit(rng, 5, 4)
    config = dataclasses.replace(OPEN, quantile=0.5)
    got = privacy.certainty(config, KEY, own, mask, negatives, queries)
    public = np.concatenate([negatives, queries])
    bound = np.median(np.linalg.norm(public, axis=1))

    def clipped(h):
        return h / np.maximum(np.linalg.norm(h, axis=1, keepdims=True), bound)

    for i, n in enumerate(sizes):
        h = np.concatenate([clipped(own[i, :n]), -clipped(negatives)])  # t h

        def objective(w, h=h):
            value = np.logaddexp(0, -h @ w).mean() + regularisation / 2 * w @ w
            slope = -special.expit(-h @ w) @ h / len(h) + regularisation * w
            return value, slope

        found = optimize.minimize(objective, np.zeros(4), jac=True, tol=1e-12)
        np.testing.assert_allclose(got.weights[i], found.x, atol=1e-6)
        assert np.linalg.norm(objective(got.weights[i])[1]) < 2e-9
        expected = special.expit(clipped(queries) @ got.weights[i]) + 1e-8
        np.testing.assert_allclose(got.scores[i], expected, rtol=1e-6)
        assert np.linalg.norm(got.weights[i]) <= math.sqrt(2 * math.log(2) / 0.1)
    assert not got.sigma.any()


def test_opposite_points_have_the_scalar_root_and_own_ones_score_above_negatives():
    w = fit(np.tile(E1, (100, 1)), np.tile(-E1, (100, 1)), 0.1)
    np.testing.assert_allclose(w, ROOT * E1, atol=2e-8)
    own, negative = special.expit([w @ E1, -w @ E1])
    assert own > 0.8 > 0.2 > negative


def test_weights_stay_in_the_ball_of_the_penalty():
    # sqrt(2 ln 2 / 0.1) = 3.723; a hundred points on one side come close to 1 / lambda.
    for regularisation, most in ((0.1, 3.723299), (1.0, 1.0), (10.0, 0.1)):
        w = fit(np.tile(E1, (100, 1)), np.zeros((100, 2)), regularisation)
        assert np.linalg.norm(w) <= min(1 / regularisation, most)


def test_one_example_moves_the_minimum_by_no_more_than_the_theorem_says():
    rng, ratios = np.random.default_rng(1), []
    own, negatives, regularisation = unit(rng, 100, 2), unit(rng, 100, 2), 0.05
    before = fit(own, negatives, regularisation)
    direction = before / np.linalg.norm(before)
    for new in [*unit(rng, 6, 2), direction, -direction, -own[0]]:
        other = np.concatenate([new[None], own[1:]])
        moved = np.linalg.norm(fit(other, negatives, regularisation) - before)
        ratios.append(moved / logistic.sensitivity(regularisation, 200))
    assert 0.1 < max(ratios) <= 1


def test_a_normaliser_from_private_data_breaks_the_theorem_and_is_refused():
    own, negatives = np.tile(E1, (1, 100, 1)), np.tile(-E1, (100, 1))
    other = own.copy()
    other[0, 0] = [0.0, 100.0]
    seed_max = dataclasses.replace(OPEN, normaliser="own_max")
    mask = np.ones((1, 100), bool)
    before, after = (
        privacy.certainty(seed_max, KEY, x, mask, negatives, negatives).weights[0]
        for x in (own, other)
    )
    np.testing.assert_allclose(before, [1.6335, 0], atol=5e-5)
    np.testing.assert_allclose(after, [0.0497, 0.0247], atol=5e-5)
    allowed = logistic.sensitivity(0.1, 200)
    assert allowed == pytest.approx(0.1)
    assert np.linalg.norm(after - before) == pytest.approx(1.584, abs=5e-4)
    # The public bound keeps it: the long example is clipped.
    before, after = (
        privacy.certainty(OPEN, KEY, x, mask, negatives, negatives).weights[0]
        for x in (own, other)
    )
    assert 0 < np.linalg.norm(after - before) < allowed
    with pytest.raises(ValueError, match=r"normaliser must be 'public' .*epsilon=0.1"):
        dataclasses.replace(seed_max, epsilon=0.1)


def test_the_noise_has_the_printed_scale():
    for total, printed in ((22500, 0.0430649), (1000, 0.9689611)):
        change = logistic.sensitivity(0.1, total)
        textbook = privacy.gaussian_sigma_classical(0.1, 1e-5, change)
        assert textbook == pytest.approx(printed, abs=5e-8)
        # What the solver leaves of the gradient is accounted for, and hardly anything.
        ours = logistic.sigma(CLASSICAL, total)
        assert textbook < ours < textbook * (1 + 3e-5)
        exact = logistic.sigma(privacy.CertaintyConfig(), total)
        assert privacy.gaussian_delta(exact, 0.1, change) <= 1e-5
        assert exact < 0.65 * textbook
    assert math.sqrt(8 * math.log(1.25e5)) == pytest.approx(9.6896105, abs=5e-8)


def test_the_noise_is_normal_of_that_scale_and_the_clients_own():
    own, negatives = np.zeros((2, 2, 20_000)), np.zeros((8, 20_000))
    mask = np.ones((2, 2), bool)
    got = privacy.certainty(CLASSICAL, KEY, own, mask, negatives, negatives[:1])
    # 2 / (0.1 * 10) sqrt(2 ln(1.25e5)) / 0.1; the spread of 20,000 draws is known to
    # 0.5 %, their correlation to 0.7 %: six and four standard deviations.
    np.testing.assert_allclose(got.sigma, 96.896105, rtol=1e-7)
    np.testing.assert_allclose(got.weights.std(1), 96.896105, rtol=0.03)
    assert abs(np.corrcoef(got.weights)[0, 1]) < 0.03
    again = privacy.certainty(
        CLASSICAL, KEY, own[:1], mask[:1], negatives, negatives[:1]
    )
    np.testing.assert_array_equal(again.weights[0], got.weights[0])


def test_features_of_zeros_are_as_uncertain_as_can_be():
    own, mask, zeros = np.zeros((2, 3, 4)), np.zeros((2, 3), bool), np.zeros((5, 4))
    mask[0] = True
    for normaliser in ("public", "own_max"):
        config = privacy.CertaintyConfig(epsilon=None, normaliser=normaliser)
        got = privacy.certainty(config, KEY, own, mask, zeros, zeros)
        np.testing.assert_allclose(got.scores, 0.5)


def test_guarantees_add_up():
    assert privacy.compose((0.1, 1e-5), (2.0, 1e-6)) == pytest.approx((2.1, 1.1e-5))
    assert privacy.compose() == (0, 0)
    assert privacy.compose((0.1, 0.9), (0.1, 0.9)) == (0.2, 1)
    with pytest.raises(ValueError, match=r"epsilon must be >= 0"):
        privacy.compose((-0.1, 0))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("regularisation", 0.0, "regularisation must be > 0 and finite, got 0.0"),
        ("epsilon", 0.0, "epsilon must be > 0 and finite, got 0.0"),
        ("epsilon", 1.0, "epsilon must be < 1 for the classical formula, got 1.0"),
        ("delta", 1.0, "delta must be > 0 and < 1, got 1.0"),
        ("mechanism", "laplace", "mechanism must be one of 'exact', 'classical'"),
        ("quantile", 1.5, r"quantile must be in \[0, 1\], got 1.5"),
        ("normaliser", "mean", "normaliser must be one of 'public', 'own_max'"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CLASSICAL, **{field: value})


def test_arguments_name_what_is_wrong():
    own, mask, negatives = np.zeros((2, 3, 4)), np.ones((2, 3), bool), np.zeros((5, 4))
    with pytest.raises(ValueError, match=r"must have shapes \[N, m, H\].* \(5, 3\)"):
        privacy.certainty(OPEN, KEY, own, mask, negatives[:, :3], negatives)
    queries = np.where(np.arange(5)[:, None] == 2, np.nan, negatives)
    with pytest.raises(ValueError, match="queries must be finite"):
        privacy.certainty(OPEN, KEY, own, mask, negatives, queries)
    with pytest.raises(ValueError, match="own must be finite"):
        privacy.certainty(OPEN, KEY, own + np.nan, mask, negatives, negatives)
    with pytest.raises(ValueError, match="negatives must have a row or more, got none"):
        privacy.certainty(OPEN, KEY, own, mask, negatives[:0], negatives)
    with pytest.raises(ValueError, match="num_examples must be in"):
        logistic.sensitivity(0.1, 0)


def test_certainty_makes_an_ensemble_of_constant_classifiers_right():
    # Ten clients that always say their own class; printed accuracies are of one draw.
    rng = np.random.default_rng(0)
    means = rng.normal(size=(10, 20))
    own = means[:, None] + rng.normal(size=(10, 500, 20))
    negatives = rng.normal(0, 1.4, (1000, 20))
    labels = np.tile(np.arange(10), 100)
    queries = means[labels] + rng.normal(size=(1000, 20))

    def accuracy(regularisation, epsilon):
        config = dataclasses.replace(
            CLASSICAL, regularisation=regularisation, epsilon=epsilon
        )
        mask = np.ones(own.shape[:2], bool)
        got = privacy.certainty(config, KEY, own, mask, negatives, queries)
        # Of logits F_i = e_i the weighted mean is s_i(x) / sum_j s_j(x) in class i.
        return (got.scores.argmax(0) == labels).mean()

    assert accuracy(0.1, None) == pytest.approx(0.968, abs=0.03)
    assert accuracy(0.01, None) == pytest.approx(0.979, abs=0.03)
    noisy = accuracy(0.1, 0.1)
    assert noisy == pytest.approx(0.28, abs=0.1)
    assert accuracy(0.01, 0.1) < noisy
    assert accuracy(0.1, 0.5) == pytest.approx(0.81, abs=0.1)


def test_scores_are_the_share_of_a_clients_density_where_logits_are_linear():
    # p = N(m, 1) against q = N(0, 1) with N / n = exp(m^2 / 2): log N p / n q is m x.
    rng, n = np.random.default_rng(0), 4000
    centers = np.array([0.5, -1.0, 1.2])
    sizes = np.round(n * np.exp(centers**2 / 2)).astype(int)
    mask = np.arange(sizes.max()) < sizes[:, None]
    own = rng.normal(centers[:, None], 1, mask.shape)[..., None]
    queries = np.linspace(-2, 2, 9)[:, None]
    config = dataclasses.replace(OPEN, regularisation=1e-5)
    negatives = rng.normal(size=(n, 1))
    got = privacy.certainty(config, KEY, own, mask, negatives, queries)
    # The slope is known to about 0.02: three of them at x = 2 move a score by 0.03.
    expected = special.expit(centers[:, None] * queries[:, 0])
    np.testing.assert_allclose(got.scores, expected, atol=0.03)
