"""Sensitivity, tests, audits and information: finite differences, tables, bounds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_core import privacy
from fedjax_core.networks import builders
from fedjax_core.networks.graph import Graph
from fedjax_core.networks.spectrum import laplacian_matrix
from fedjax_core.networks.theory import leakage
from fedjax_core.privacy import information

KEY = jax.random.key(0)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def solve(adjacency, X, y, mask, alpha):
    """GTVMin of the chain of means of squared errors, in NumPy."""
    n, _, d = X.shape
    m = mask.sum(1)
    Q = alpha * np.kron(np.diag(adjacency.sum(1)) - adjacency, np.eye(d))
    b = np.zeros((n, d))
    for i in range(n):
        Xi, yi = X[i][mask[i]], y[i][mask[i]]
        Q[i * d : (i + 1) * d, i * d : (i + 1) * d] += Xi.T @ Xi / m[i]
        b[i] = Xi.T @ yi / m[i]
    return np.linalg.solve(Q, b.ravel()).reshape(n, d), np.linalg.eigvalsh(Q)[0]


# T-P1: sensitivity.


def test_sensitivity_of_the_chain_of_three(x64):
    graph = Graph.from_edges(np.array([[0, 1], [1, 2]]), dtype=np.float64)
    exact = leakage.label_sensitivity(graph, jnp.ones((3, 1, 1)), 1.0)
    expected = np.sqrt([[30], [24], [30]]) / 8
    np.testing.assert_allclose(exact, expected, rtol=1e-12)
    smallest = leakage.check_regular(graph, jnp.ones((3, 1, 1)), 1.0)
    assert smallest == pytest.approx(1, rel=1e-12)


def test_sensitivity_is_the_finite_difference(x64):
    rng = np.random.default_rng(0)
    for _ in range(20):
        n, m, d = 4, 3, 2
        upper = np.triu(rng.random((n, n)) + 0.1, 1)
        adjacency = upper + upper.T
        X, y = rng.standard_normal((n, m, d)), rng.standard_normal((n, m))
        mask = np.ones((n, m), bool)
        mask[0, 2] = mask[2, 1:] = False
        alpha = rng.uniform(0.1, 3)
        graph = Graph.from_dense(adjacency)
        exact = leakage.label_sensitivity(graph, jnp.asarray(X), alpha, mask)
        W, smallest = solve(adjacency, X, y, mask, alpha)
        bound = leakage.label_sensitivity_bound(jnp.asarray(X), smallest, mask)
        assert leakage.check_regular(graph, X, alpha, mask) == pytest.approx(smallest)
        assert np.all(np.asarray(exact) <= np.asarray(bound) + 1e-9)
        for i, r in np.ndindex(n, m):
            step = rng.uniform(0.5, 2)
            moved = y.copy()
            moved[i, r] += step
            other, _ = solve(adjacency, X, moved, mask, alpha)
            expected = np.linalg.norm(other - W) / step
            np.testing.assert_allclose(exact[i, r], expected, rtol=1e-9, atol=1e-12)


def test_sensitivity_is_traced_in_alpha_and_float32():
    graph = Graph.from_edges(np.array([[0, 1], [1, 2]]))
    sweep = jax.jit(
        jax.vmap(lambda a: leakage.label_sensitivity(graph, jnp.ones((3, 1, 1)), a))
    )
    out = sweep(jnp.array([1.0, 1e4]))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out[0, :, 0], np.sqrt([30, 24, 30]) / 8, rtol=1e-5)
    np.testing.assert_allclose(out[1], 1 / math.sqrt(3), rtol=1e-2)  # consensus


def test_a_singular_problem_is_refused():
    graph = Graph.from_edges(np.array([[0, 1]]), num_nodes=3)
    X = jnp.zeros((3, 1, 1)).at[0].set(1)
    with pytest.raises(ValueError, match=r"singular Q.*alpha = 1\.0"):
        leakage.check_regular(graph, X, 1.0)


@pytest.mark.parametrize("alpha", [1e4, 1e6, 1e9])
def test_large_alpha_is_consensus_in_float32(alpha):
    graph = builders.chain(10)
    X = np.ones((10, 1, 1), np.float32)
    assert leakage.check_regular(graph, X, alpha) == pytest.approx(1, rel=1e-5)
    got = leakage.label_sensitivity(graph, X, alpha)
    values, V = np.linalg.eigh(np.asarray(laplacian_matrix(graph), np.float64))
    inverse = V / (1 + alpha * np.maximum(values, 0)) @ V.T
    np.testing.assert_allclose(got[:, 0], np.linalg.norm(inverse, axis=0), rtol=1e-5)


def test_sensitivity_of_a_singular_problem_is_not_a_number():
    rng = np.random.default_rng(0)
    graph = Graph.from_edges(np.zeros((0, 2), int), num_nodes=3)
    mask = np.array([[True, True], [True, True], [True, False]])
    out = leakage.label_sensitivity(graph, rng.normal(size=(3, 2, 3)), 1.0, mask)
    np.testing.assert_array_equal(out, np.where(mask, np.nan, 0))


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


# T-P9: information.


def test_information_of_small_tables():
    mi = information.mutual_information
    assert mi(np.outer([0.2, 0.8], [0.3, 0.3, 0.4])) == pytest.approx(0, abs=1e-15)
    assert mi(np.eye(4) / 4) == pytest.approx(math.log(4), rel=1e-12)
    noisy = np.array([[0.9, 0.1], [0.1, 0.9]]) / 2  # a binary symmetric channel
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert mi(noisy) == pytest.approx(math.log(2) - entropy, rel=1e-12)
    assert mi([[0.5, 0], [0.5, 0]]) == 0  # an impossible value
    np.testing.assert_allclose(
        information.gaussian_mutual_information([0, 0.6, -0.6, 1]),
        [0, -math.log(0.8), -math.log(0.8), math.inf],
        rtol=1e-12,
    )


def test_gaussian_information_is_the_limit_of_fine_tables():
    edges = np.linspace(-6, 6, 241)
    centre = (edges[1:] + edges[:-1]) / 2
    a, b = np.meshgrid(centre, centre, indexing="ij")
    table = np.exp(-(a**2 - 1.2 * a * b + b**2) / (2 * (1 - 0.36)))
    expected = information.gaussian_mutual_information(0.6)
    assert information.mutual_information(table / table.sum()) == pytest.approx(
        expected, rel=1e-3
    )


def test_the_funnel_hides_what_the_label_does_not_need():
    # x = (s, y), both fair bits: grouping by y leaks nothing and keeps everything.
    joint = np.zeros((2, 2, 4))
    for x in range(4):
        joint[x // 2, x % 2, x] = 0.25
    (best,) = information.privacy_funnel(joint, math.log(2))
    np.testing.assert_array_equal(best.groups, [0, 1, 0, 1])
    assert best.leakage == 0
    assert best.utility == pytest.approx(math.log(2), rel=1e-12)


def test_the_funnel_rises_with_what_must_be_kept():
    rng = np.random.default_rng(0)
    for _ in range(5):
        joint = rng.dirichlet(np.full(3 * 2 * 6, 0.3)).reshape(3, 2, 6)
        most = information.mutual_information(joint.sum(0))
        bounds = np.linspace(0, most, 15)
        curve = information.privacy_funnel(joint, bounds)
        leaks = np.array([point.leakage for point in curve])
        assert np.all(np.diff(leaks) >= -1e-12)
        assert leaks[0] < 1e-12  # the constant map
        assert leaks[-1] <= information.mutual_information(joint.sum(1)) + 1e-12
        for bound, point in zip(bounds, curve, strict=True):
            assert point.utility >= bound - 1e-12
            merged = np.zeros((3, 6))
            np.add.at(merged.T, point.groups, joint.sum(1).T)
            assert information.mutual_information(merged) == pytest.approx(
                point.leakage, abs=1e-12
            )


def test_the_funnel_tries_every_map():
    joint = np.full((1, 1, 6), 1 / 6)
    assert len(information.privacy_funnel(joint, [0.0, 0.0])) == 2
    bell = [1, 2, 5, 15, 52, 203, 877]
    for size, count in enumerate(bell, 1):
        rows = information._partitions(size)
        assert len(np.unique(rows, axis=0)) == len(rows) == count


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
