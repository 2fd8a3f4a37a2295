"""Decisions on mixing coefficients against NumPy, printed numbers and their theory.

What is called for many points is compiled once, for all of them.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from fedjax_core import fair
from fedjax_core.algorithms import aaggff_d, aaggff_s, afl, portfolio, propfair, term
from fedjax_core.fair import Told, theory

RNG = np.random.default_rng(0)
HALF = np.full((2, 2), 0.5)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def points(*shape):
    """Random points of the simplex."""
    return RNG.dirichlet(np.full(shape[-1], 0.5), shape[:-1])


@functools.partial(jax.jit, static_argnames="cdf")
def respond_each(losses, cdf="normal", low=0.0, high=1.0):
    """The responses of rounds one by one, ``[T, K]``."""
    return jax.vmap(lambda F: fair.respond(F, cdf=cdf, low=low, high=high))(losses)


gradient_each = jax.jit(jax.vmap(fair.decision_gradient))
decision_loss = jax.jit(fair.decision_loss)
play = jax.jit(fair.play, static_argnums=0)


@jax.jit
def best_fixed(R, steps):
    T, K = R.shape
    return theory._best(R, jnp.ones(T), jnp.full(K, 1 / K), steps)


def heard(losses, ids):
    """What a cohort tells, clients of one example."""
    n = len(losses)
    ids = jnp.asarray(np.array(ids))
    return Told(jnp.asarray(losses), jnp.ones(n, bool), ids, jnp.ones(n, int))


# Responses


X = np.array([0.01, 0.10, 0.02])
PRINTED = {  # Hahn, table 3.3, with more digits
    "weibull": (0.051861, 0.995134, 0.191858),
    "frechet": (0.013124, 0.648344, 0.114559),
    "gumbel": (0.115544, 0.763041, 0.180258),
    "exponential": (0.206077, 0.900509, 0.369687),
    "logistic": (0.316646, 0.787127, 0.368546),
    "normal": (0.220878, 0.904511, 0.295129),
}
AT_0 = {"gumbel": 0.0660, "logistic": 0.2689, "normal": 0.1587}


@pytest.mark.parametrize("cdf", fair.CDFS)
def test_responses_have_the_printed_values_and_shape(cdf):
    rows = np.array([X, 100 * X, np.ones(3), np.zeros(3)])
    printed, scaled, even, nothing = np.asarray(respond_each(rows, cdf=cdf))
    np.testing.assert_allclose(printed, PRINTED[cdf], atol=5e-7)
    np.testing.assert_allclose(scaled, printed, rtol=1e-12)
    assert len(set(even)) == 1
    # Losses of 0 tell nothing: the response of a mean loss.
    np.testing.assert_allclose(nothing, even)
    losses = np.sort(RNG.exponential(size=9))
    rows = np.array([losses, 1e3 * losses])
    r, scaled = np.asarray(respond_each(rows, cdf=cdf, low=0.2, high=0.7))
    assert (np.diff(r) > 0).all()
    assert ((r >= 0.2) & (r <= 0.7)).all()
    np.testing.assert_allclose(scaled, r, rtol=1e-12)
    zero = float(fair.CDFS[cdf](jnp.float64(0)))
    np.testing.assert_allclose(zero, AT_0.get(cdf, 0), atol=5e-5)


def test_responses_are_of_clients_that_count():
    for other in (7.0, -7.0, np.nan):
        r = fair.respond(np.r_[X, other], np.array([True] * 3 + [False]))
        np.testing.assert_allclose(r[:3], PRINTED["normal"], atol=5e-7)


@pytest.mark.parametrize("cdf", fair.CDFS)
def test_responses_to_losses_at_the_limits(cdf):
    # Whose sum is out of range; with signs, of which no share of a mean is.
    F = np.array([1.0, 0.5, 1.0])
    rows = np.array([F, -F, F - 0.6, -X])
    usual, *negative = np.asarray(respond_each(rows, cdf=cdf))
    largest = np.tile(F, 100)[None] * np.finfo(float).max
    for of_largest in (
        respond_each(largest, cdf=cdf)[0, :3],
        fair.respond(F * np.finfo(float).max, cdf=cdf),
    ):
        np.testing.assert_allclose(of_largest, usual, rtol=1e-12)
    assert np.isnan(negative).all()
    # One client has all of it, among many.
    one = np.asarray(respond_each(np.r_[1e300, np.zeros(999)][None], cdf=cdf))
    np.testing.assert_allclose(one[0, 0], 1, atol=1e-3)
    below, tiny = fair.CDFS[cdf](jnp.array([-50.0, 1e-12]))
    np.testing.assert_allclose(below, 0, atol=1e-20)
    start = {"weibull": 1e-24, "exponential": 1e-12, "frechet": 0}
    if cdf in start:
        np.testing.assert_allclose(tiny, start[cdf], rtol=1e-9)


def test_a_distribution_has_to_be_known():
    with pytest.raises(ValueError, match="cdf must be one of 'weibull'"):
        fair.respond(X, cdf="cauchy")


def test_a_range_of_responses_has_to_be_one():
    with pytest.raises(ValueError, match=r"low must be < high, got 0\.5 and 0\.2"):
        fair.respond(X, low=0.5, high=0.2)
    of = jax.jit(lambda high: fair.respond(X, low=0.5, high=high))
    assert np.isnan(of(0.2)).all()


# The decision loss


def test_two_decisions_differ_by_one_logarithm():
    # l(p) - l(q) = log(1 + <g_p, p - q>): convexity and both regret bounds come of it.
    P, Q, R = points(50, 5), points(50, 5), RNG.random((50, 5))
    G, of_p = np.asarray(gradient_each(P, R)), np.asarray(decision_loss(P, R))
    gap = of_p - decision_loss(Q, R)
    along = (G * (P - Q)).sum(1)
    np.testing.assert_allclose(gap, np.log1p(along), rtol=1e-10, atol=1e-14)
    by_autodiff = jax.jit(jax.vmap(jax.grad(fair.decision_loss)))(P, R)
    np.testing.assert_allclose(G, by_autodiff, rtol=1e-12)
    # exp(-l) is linear, and the quadratic lower bound has its gradient at p.
    np.testing.assert_allclose(np.exp(-of_p), 1 + (P * R).sum(1))
    slope = -along
    assert (np.abs(slope) <= 1).all()
    delta = np.minimum(0.5, 0.5 / np.maximum(np.abs(slope), 1e-12))
    assert (-gap >= slope + delta / 2 * slope**2 - 1e-12).all()


def test_slopes_are_bounded_in_the_1_norm_but_not_as_printed():
    low, high = 0.3, 1.1
    P, Q, R = points(200, 4), points(200, 4), RNG.uniform(low, high, (200, 4))
    assert np.abs(gradient_each(P, R)).max() <= fair.lipschitz(low, high)
    gap = np.abs(decision_loss(P, R) - decision_loss(Q, R))
    apart = np.abs(P - Q).sum(1)
    assert (gap <= (high - low) / (2 * (1 + low)) * apart + 1e-12).all()
    most = np.log((1 + high) / (1 + low))
    assert gap.max() <= most <= fair.lipschitz(low, high)
    # Lemma 3.1 has the largest coordinate of p - q here.
    r = np.array([1.0, 1, 0, 0])
    p, q = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])
    gap = abs(float(fair.decision_loss(p, r) - fair.decision_loss(q, r)))
    np.testing.assert_allclose(gap, np.log(2))
    assert gap > fair.lipschitz(0, 1) * np.abs(p - q).max()


def test_the_logarithm_does_not_move_the_worst_case():
    F = RNG.random(4)
    at = points(500, 4)
    assert np.argmax(np.log1p(at @ F)) == np.argmax(at @ F)
    assert (np.log1p(at @ F) >= 0).all()


# Estimated responses


def cohorts(K, m):
    """All cohorts of m of K clients, ``[cohorts, K]``."""
    some = itertools.combinations(range(K), m)
    return np.array([np.isin(np.arange(K), ids) for ids in some])


estimate_each = jax.jit(jax.vmap(fair.doubly_robust))
linearised_each = jax.jit(jax.vmap(fair.linearised_gradient, (None, 0, 0)))


def test_a_value_fixed_before_sampling_makes_the_estimate_unbiased():
    r, guess = RNG.random(5), RNG.random(5)
    samples = cohorts(5, 2)
    guessed = jax.jit(jax.vmap(fair.doubly_robust, (None, 0, None)))
    all_of_them = np.asarray(guessed(r, samples, guess))
    np.testing.assert_allclose(all_of_them.mean(0), r, rtol=1e-12)
    # And with a fixed reference the gradient is, since it is linear.
    p, about = points(5), RNG.random(5)
    gradients = linearised_each(p, all_of_them, np.tile(about, (10, 1)))
    exact = fair.linearised_gradient(p, r, about)
    np.testing.assert_allclose(np.mean(gradients, 0), exact, rtol=1e-12)
    means = np.array([r[S].mean() for S in samples])
    own = linearised_each(p, all_of_them, np.tile(means[:, None], 5))
    of_mean = fair.linearised_gradient(p, r, np.full(5, r.mean()))
    assert np.abs(np.mean(own, 0) - of_mean).max() > 1e-3


KAPPA = (1, 0.416667, 0.222222, 0.125, 0.066667, 0.027778, 0)


def test_the_printed_estimate_shrinks_towards_the_mean():
    # Lemma 3.2 has it unbiased.
    r = RNG.random(7)
    samples = np.concatenate([cohorts(7, m) for m in range(1, 8)])
    estimates = np.asarray(estimate_each(np.tile(r, (127, 1)), samples))
    for m, kappa in zip(range(1, 8), KAPPA, strict=True):
        np.testing.assert_allclose(fair.shrinkage(7, m), kappa, atol=5e-7)
        mean = estimates[samples.sum(1) == m].mean(0)
        expected = r + fair.shrinkage(7, m) * (r.mean() - r)
        np.testing.assert_allclose(mean, expected, rtol=1e-12)
    np.testing.assert_allclose(fair.shrinkage(817, 5), 0.19902, atol=5e-6)
    # Imputing each client by the others of the cohort repairs it.
    S = cohorts(7, 3)
    heard_of = np.where(S, r, 0)
    others = (heard_of.sum(1, keepdims=True) - heard_of) / (3 - S)
    repaired = jax.jit(jax.vmap(fair.doubly_robust, (None, 0, 0)))(r, S, others)
    np.testing.assert_allclose(np.mean(repaired, 0), r, rtol=1e-12)
    with pytest.raises(ValueError, match="cohort_size must be in"):
        fair.shrinkage(3, 4)


def test_the_gradient_is_linearised():
    p, r, about = points(4), RNG.random(4), RNG.random(4)
    J = jax.jit(jax.jacobian(fair.decision_gradient, 1))(p, about)
    exact, at_about = np.asarray(gradient_each(np.array([p, p]), np.array([r, about])))
    got, at = np.asarray(
        linearised_each(p, np.array([r, about]), np.array([about, about]))
    )
    np.testing.assert_allclose(got, at_about + J @ (r - about), rtol=1e-12)
    s, d = 1 + p @ about, p @ (r - about)
    remainder = r * d / (s * (s + d)) - about * d / s**2
    np.testing.assert_allclose(exact - got, remainder)
    np.testing.assert_allclose(at, at_about)


def test_estimated_gradients_are_bounded():
    S = RNG.permuted(np.arange(6) < RNG.integers(1, 7, (300, 1)), axis=1)
    R = RNG.uniform(0.1, 0.6, (300, 6))
    means = np.where(S, R, 0).sum(1) / S.sum(1)

    @jax.jit
    @jax.vmap
    def gradient(p, r, S, mean):
        estimate = fair.doubly_robust(r, S)
        return fair.linearised_gradient(p, estimate, jnp.full(6, mean))

    g = np.abs(gradient(points(300, 6), R, S, means)).max(1)
    assert (g <= fair.lipschitz_of_estimates(0.1, 0.6, S.mean(1))).all()


# Quadratic programs


def test_projections_are_optax_s_on_the_simplex_and_scipy_s_in_a_box():
    from optax.projections import projection_simplex

    V = RNG.normal(size=(20, 5))
    for got, optax_s in zip(
        *(jax.jit(jax.vmap(f))(V) for f in (fair.project, projection_simplex)),
        strict=True,
    ):
        np.testing.assert_allclose(got, optax_s, atol=1e-12)
    v, low, high = RNG.normal(size=4), np.full(4, 0.1), np.array([0.3, 0.5, 0.3, 0.4])
    best = scipy_minimum(np.eye(4), v, low, high)
    np.testing.assert_allclose(fair.project(v, low, high), best, atol=1e-6)


def scipy_minimum(B, b, low, high):
    return minimize(
        lambda p: p @ B @ p / 2 - b @ p,
        np.clip(np.full(len(b), 1 / len(b)), low, high),
        jac=lambda p: B @ p - b,
        bounds=list(zip(low, high, strict=True)),
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    ).x


solve = jax.jit(fair.minimise)


def test_quadratic_programs_are_solved():
    for scale in (0.1, 1, 10):
        A = RNG.normal(size=(6, 4))
        B, b = A @ A.T + 0.5 * np.eye(6), scale * RNG.normal(size=6)
        p = np.asarray(solve(B, b, np.zeros(6), np.ones(6)))
        gradient = B @ p - b
        assert gradient @ p - gradient.min() <= 1e-10
        np.testing.assert_allclose(p.sum(), 1, rtol=1e-12)
        assert (p >= 0).all()
        low, high = np.full(6, 1 / 6 - 0.1), np.full(6, 1 / 6 + 0.1)
        p = np.asarray(solve(B, b, low, high))
        best = scipy_minimum(B, b, low, high)
        np.testing.assert_allclose(p, best, atol=1e-6)
    # A singular one: the first two coordinates are the same.
    B = np.array([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])
    B = np.pad(B, (0, 3), constant_values=0) + np.diag([0, 0, 0, 9, 9, 9])
    p = np.asarray(solve(B, np.zeros(6), np.zeros(6), np.ones(6)))
    gradient = B @ p
    assert gradient @ p - gradient.min() <= 1e-8


def test_quadratic_programs_of_what_is_not_finite_have_no_solution():
    B = np.eye(6)
    for bad in (np.nan, np.inf):
        wrong = B.copy()
        wrong[1, 2] = bad
        b = np.full(6, bad)
        for args in ((wrong, np.ones(6)), (B, b)):
            assert np.isnan(solve(*args, np.zeros(6), np.ones(6))).all()


def test_the_best_fixed_decision_gains_by_no_corner():
    clients = 60
    # Responses near 1 / K, between which a step of the multiplicative rule is tiny.
    R = RNG.uniform(size=(300, clients)) ** 2 / clients
    best = np.asarray(best_fixed(R, 50))
    gain = ((1 + R) / (1 + R @ best)[:, None]).mean(0).max() - 1
    assert 300 * gain < 1e-6  # which bounds what is left of the regret
    assert (best >= 0).all()


def test_an_undefined_loss_makes_every_response_undefined():
    F = np.array([1.0, np.nan, 2.0])
    found = jax.jit(lambda F: [fair.respond(F, cdf=cdf) for cdf in fair.CDFS])(F)
    assert np.isnan(found).all()


# Rules without a memory


SIZES, LOSSES = np.array([10, 20, 30]), np.array([1.0, 2.0, 0.5])


def weights(*deciders, losses=LOSSES):
    """What deciders say to one round of losses, one after the other."""
    rounds = np.atleast_2d(losses)
    played = jax.jit(lambda F: [fair.play(one, F, SIZES)[-1] for one in deciders])
    return np.array([w / w.sum() for w in map(np.asarray, played(rounds))])


def powers(q):
    return fair.tilted(lambda F: q * jnp.log(F), name="powers")


def tilt(x, **how):
    return term.decider(term.Config(tilt=x, **how))


def utility(M, **how):
    return propfair.decider(propfair.Config(ceiling=M, where="server", **how))


RULES = [
    (fair.static(), (1 / 6, 1 / 3, 1 / 2)),
    (powers(1), (2 / 13, 8 / 13, 3 / 13)),
    (powers(5), (0.015362, 0.983197, 0.001440)),
    (tilt(0.1), (0.164907, 0.364500, 0.470593)),
    (tilt(1.0), (0.121122, 0.658486, 0.220392)),
    (utility(3.0), (5 / 37, 20 / 37, 12 / 37)),
]


def test_rules_have_their_values_and_limits():
    rules, expected = zip(*RULES, strict=True)
    np.testing.assert_allclose(weights(*rules), expected, atol=5e-7)
    even = weights(*rules, losses=np.ones(3))
    np.testing.assert_allclose(even, np.tile(SIZES / 60, (len(rules), 1)))
    nothing = weights(powers(0), tilt(0.0), tilt(1e-9), utility(1e9))
    np.testing.assert_allclose(nothing, np.tile(SIZES / 60, (4, 1)), atol=1e-8)
    extreme = weights(powers(200), tilt(200.0))
    np.testing.assert_allclose(extreme, [[0, 1, 0]] * 2, atol=1e-12)
    of_worst = weights(*(tilt(float(x)) for x in range(6)))[:, 1]
    assert (np.diff(of_worst) > 0).all()
    assert np.isnan(weights(utility(1.5))).all(), "a ceiling below a loss"
    (uniform,) = weights(tilt(1.0, weights="uniform"))
    np.testing.assert_allclose(uniform, np.exp(LOSSES) / np.exp(LOSSES).sum())


def test_a_tilt_minimises_its_objective():
    q, r = points(3), RNG.random(3)
    p = q * np.exp(r)
    p /= p.sum()
    # Along the simplex -r + log(p / q) is constant.
    slope = -r + np.log(p / q)
    np.testing.assert_allclose(slope, slope[0])
    told = heard(r, range(3))._replace(num_examples=jnp.asarray(1e6 * q))
    _, got = fair.tilted(lambda F: F, name="it")[1]((), told)
    np.testing.assert_allclose(got, p, rtol=1e-9)


def test_nobody_has_no_weight():
    none = Told(jnp.zeros(3), jnp.zeros(3, bool), -jnp.ones(3, int), jnp.zeros(3, int))
    deciders = fair.static(), powers(2), aaggff_d.decider()
    update = jax.jit(lambda told: [one.update(one.init(3), told) for one in deciders])
    for state, w in update(none):
        np.testing.assert_array_equal(w, np.zeros(3))
        for x in jax.tree.leaves(state):
            assert np.isfinite(x).all()


# AFL and the portfolio rules


def test_afl_climbs():
    config = afl.Config(mixing_lr=0.1)
    p, losses = np.full(3, 1 / 3), RNG.random((5, 3))
    played = fair.play(afl.decider(config), losses)
    for F, got in zip(losses, played, strict=True):
        p = scipy_minimum(np.eye(3), p + 0.1 * F, np.zeros(3), np.ones(3))
        np.testing.assert_allclose(got, p, atol=1e-6)


def test_what_losses_have_in_common_does_not_move_a_decision():
    F, common = np.array([0.0, 2.0, 4.0]), 1e16  # with the next numbers 2 apart
    climb = afl.decider(afl.Config(mixing_lr=0.1))
    rules = climb, tilt(0.1)
    apart = weights(*rules, losses=F)
    np.testing.assert_allclose(apart[0], [2 / 15, 1 / 3, 8 / 15], rtol=1e-9)
    np.testing.assert_allclose(weights(*rules, losses=common + F), apart)


def test_portfolios_match_their_formulas():
    losses = RNG.random((4, 3))
    R = np.asarray(respond_each(losses, high=1 / 3))

    def played(rule):
        config = portfolio.Config(rule=rule, mixing_lr=2.0, points=20_000)
        return np.asarray(fair.play(portfolio.decider(config), losses))

    by_eg, by_ogd, by_ftrl = played("eg"), played("ogd"), played("ftrl")
    eg, ogd, ftrl = (np.full(3, 1 / 3) for _ in range(3))
    total = np.zeros(3)
    for t, r in enumerate(R, 1):
        eg = eg * np.exp(2 * r / (1 + eg @ r))
        eg /= eg.sum()
        step = ogd + 2 * r / (1 + ogd @ r)
        ogd = scipy_minimum(np.eye(3), step, np.zeros(3), np.ones(3))
        total -= r / (1 + ftrl @ r)
        ftrl = np.exp(-np.sqrt(np.log(3)) * total * 3 / np.sqrt(t + 1))
        ftrl /= ftrl.sum()
        np.testing.assert_allclose(by_eg[t - 1], eg, rtol=1e-10)
        np.testing.assert_allclose(by_ogd[t - 1], ogd, atol=1e-6)
        np.testing.assert_allclose(by_ftrl[t - 1], ftrl, rtol=1e-10)
    # The first universal portfolio in closed form, by moments of the uniform law.
    second = (np.ones((3, 3)) + np.eye(3)) / 12
    expected = (1 / 3 + second @ R[0]) / (1 + R[0].mean())
    np.testing.assert_allclose(played("universal")[0], expected, atol=4e-3)


# AAggFF


def test_silos_have_the_derived_numbers():
    losses = np.tile(X, (3, 1))
    first = fair.respond(X, high=1 / 3)
    np.testing.assert_allclose(first, (0.0736260546, 0.3015037178, 0.0983764086))
    even = np.full(3, 1 / 3)
    np.testing.assert_allclose(fair.decision_loss(even, first), -0.1465522219)
    np.testing.assert_allclose(
        fair.decision_gradient(even, first),
        (-0.0635893971, -0.2604029203, -0.0849657983),
        rtol=1e-8,
    )
    got = fair.play(aaggff_s.decider(), losses)
    np.testing.assert_allclose(got, [
        (0.3152300085, 0.3642191515, 0.3205508399),
        (0.2973083111, 0.3947950979, 0.3078965910),
        (0.2795636223, 0.4250690525, 0.2953673252),
    ], rtol=1e-9)  # fmt: skip
    wide = fair.play(aaggff_s.decider(aaggff_s.Config(most=1.0)), losses[:2])
    np.testing.assert_allclose(wide, [
        (0.3190845681, 0.3576429437, 0.3232724882),
        (0.3050247061, 0.3816302691, 0.3133450249),
    ], rtol=1e-9)  # fmt: skip


def test_silos_follow_the_regularised_leader():
    # The sums as printed, minimised anew in every round, and twins in another order.
    K, losses = 4, RNG.exponential(size=(12, 4)) ** 3
    config = aaggff_s.Config(most=1.0, curvature="proven")
    alpha, beta = 4 * K, 0.25
    decider = aaggff_s.decider(config)
    played = np.asarray(play(decider, losses))
    before = np.vstack([np.full(K, 1 / K), played[:-1]])
    slopes, past = np.asarray(gradient_each(before, respond_each(losses))), []
    for g, p, got in zip(slopes, before, played, strict=True):
        past.append((g, p))
        B = alpha * np.eye(K) + beta * sum(np.outer(g, g) for g, _ in past)
        b = sum(-g + beta * g * (g @ q) for g, q in past)
        best = scipy_minimum(B, b, np.zeros(K), np.ones(K))
        np.testing.assert_allclose(got, best, atol=1e-6)
        gradient = B @ got - b
        assert gradient @ got - gradient.min() < 1e-10
    order = np.array([2, 0, 3, 1])
    mixed = play(decider, losses[:, order])
    np.testing.assert_allclose(mixed, played[:, order], rtol=1e-9)
    even = play(decider, np.ones((12, 4)))
    np.testing.assert_allclose(even, np.full((12, 4), 0.25))
    # An observation, no theorem: the largest loss of every round leads.
    worst = RNG.random((12, 4)) + 2 * np.eye(4)[3]
    assert (np.argmax(fair.play(aaggff_s.decider(), worst), 1) == 3).all()


def literal_devices(K, plays, cdf="normal"):
    """Algorithm 3.2 as it is printed: estimates, gradients and all."""
    G, p = np.zeros(K), np.full(K, 1 / K)
    for t, (ids, F) in enumerate(plays, 1):
        c = len(ids) / K
        r = np.asarray(fair.respond(F, cdf=cdf, high=c))
        full, S = np.zeros(K), np.isin(np.arange(K), ids)
        full[ids] = r
        about = np.full(K, r.mean())
        G = G + fair.linearised_gradient(p, fair.doubly_robust(full, S), about)
        slope = fair.lipschitz_of_estimates(0, c, c)
        p = np.exp(-np.sqrt(np.log(K)) * G / (slope * np.sqrt(t + 1)))
        p = p / p.sum()
        yield G, p, p[ids]


def devices(K, plays, cdf="normal"):
    decider = aaggff_d.decider(aaggff_d.Config(cdf=cdf))
    state = decider.init(K)
    for ids, F in plays:
        state, w = decider.update(state, heard(F, ids))
        yield state, np.asarray(w)


def test_devices_have_the_derived_numbers():
    first = [([0, 2], np.array([0.5, 1.5]))]
    r = fair.respond(first[0][1], high=0.5)
    np.testing.assert_allclose(r, (0.1542687694, 0.3457312306), rtol=1e-9)
    estimate = fair.doubly_robust(
        np.array([r[0], 0, r[1], 0]), np.array([1, 0, 1, 0.0]) > 0
    )
    np.testing.assert_allclose(estimate, (0.0585375387, 0.25, 0.4414624613, 0.25))
    assert fair.lipschitz_of_estimates(0, 0.5, 0.5) == 2.5
    (G, p, _), (state, w) = next(literal_devices(4, first)), next(devices(4, first))
    np.testing.assert_allclose(G, (-0.0468300310, -0.2, -0.3531699690, -0.2), rtol=1e-8)
    expected = (0.2374130769, 0.2498374510, 0.2629120211, 0.2498374510)
    np.testing.assert_allclose(p, expected, rtol=1e-9)
    np.testing.assert_allclose(w, p[[0, 2]], rtol=1e-12)
    np.testing.assert_allclose(w / w.sum(), (0.4745176243, 0.5254823757), rtol=1e-9)
    assert state.rounds == 1


@pytest.mark.parametrize("cdf", ["normal", "frechet"])
def test_devices_need_only_the_centred_responses(cdf):
    K = 9
    plays = [
        (RNG.choice(K - 2, m, replace=False), RNG.exponential(size=m))
        for m in (3, 3, 1, 7, 3, 1, 7, 3)
    ]
    pairs = zip(literal_devices(K, plays, cdf), devices(K, plays, cdf), strict=True)
    for (_, p, of_cohort), (state, w) in pairs:
        np.testing.assert_allclose(w, of_cohort, rtol=1e-12)
        assert abs(float(state.excess.sum())) < 1e-12
        # Clients that nobody ever heard of share one coefficient.
        assert state.excess[-1] == state.excess[-2] == 0
        np.testing.assert_allclose(p[-1], p[-2], rtol=1e-12)


def test_the_largest_loss_of_every_round_has_the_largest_weight():
    losses = RNG.random((20, 5)) + np.eye(5)[2]
    assert (np.argmax(fair.play(aaggff_d.decider(), losses), 1) == 2).all()


def test_a_softmax_is_the_entropic_minimum_and_the_conjugate_s_gradient():
    G, zeta = RNG.normal(size=4), 0.7

    def objective(p):
        return G @ p + zeta * np.sum(p * np.log(p))

    best = minimize(
        objective,
        np.full(4, 0.25),
        bounds=[(1e-9, 1)] * 4,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(best.x, jax.nn.softmax(-G / zeta), atol=1e-5)

    # The printed (3.92) lacks the factor zeta.
    def conjugate(q):
        return zeta * jax.nn.logsumexp(q / zeta)

    np.testing.assert_allclose(-best.fun, conjugate(-G), rtol=1e-8)
    np.testing.assert_allclose(jax.grad(conjugate)(-G), jax.nn.softmax(-G / zeta))


# Regret


NEWTON = aaggff_s.decider(aaggff_s.Config(most=1.0))
FTRL = portfolio.decider(portfolio.Config(rule="ftrl"))


def regret_of(decider, losses, **response):
    K = losses.shape[1]
    R = np.asarray(respond_each(losses, **response))
    after = np.asarray(play(decider, losses))
    before = np.vstack([np.full(K, 1 / K), after[:-1]])
    return np.asarray(fair.regret(before, R)), R, before


HARD = {
    "noise": lambda T, K: RNG.exponential(size=(T, K)) ** 2,
    "one is bad": lambda T, K: RNG.random((T, K)) + 5.0 * (np.arange(K) == 1),
    "turns": lambda T, K: 0.1 + 3.0 * (np.arange(K)[None] == np.arange(T)[:, None] % K),
}


@pytest.mark.parametrize("kind", HARD)
def test_regret_stays_below_its_bounds(kind):
    T, K = 100, 5
    losses = HARD[kind](T, K)
    regret, R, _ = regret_of(NEWTON, losses)
    bound = np.asarray(fair.ons_bound(np.arange(1, T + 1), K))
    closed = 2 * K * (1 + np.log1p(np.arange(1, T + 1) / (16 * K)))
    np.testing.assert_allclose(bound, closed)
    assert (regret <= bound).all()
    # Exact gradients have the slope 1 / K.
    ftrl, R, before = regret_of(FTRL, losses, high=1 / K)
    assert (ftrl <= np.asarray(fair.ftrl_bound(np.arange(1, T + 1), K, 1 / K))).all()
    # The best fixed decision is one: nothing else on the simplex does better.
    best = np.asarray(best_fixed(R, 50))
    np.testing.assert_allclose(best.sum(), 1)
    gradient = np.mean(gradient_each(np.tile(best, (T, 1)), R), 0)
    assert gradient @ best - gradient.min() < 2e-3 / K
    shorter = np.asarray(best_fixed(R, 1))
    points = np.array([before[0], shorter, best])[:, None]
    worth = np.asarray(decision_loss(points, R[None])).sum(1)
    assert (np.diff(worth) <= 1e-9).all()


def test_regret_is_against_what_was_best_so_far():
    R, P = RNG.random((7, 2)), points(7, 2)
    grid = np.linspace(0, 1, 20_001)
    grid = np.stack([grid, 1 - grid], 1)
    paid = -np.log1p((P * R).sum(1)).cumsum()
    least = (-np.log1p(grid @ R.T).cumsum(1)).min(0)
    found = np.asarray(fair.regret(P, R))
    np.testing.assert_allclose(found, paid - least, atol=1e-7)


def test_the_surrogate_of_devices_stays_below_its_bound():
    K, m, T = 8, 3, 200
    plays = [
        (RNG.choice(K, m, replace=False), RNG.exponential(size=m)) for _ in range(T)
    ]
    G, past, paid = np.zeros(K), np.full(K, 1 / K), 0.0
    slope = fair.lipschitz_of_estimates(0, m / K, m / K)
    for t, (total, p, _) in enumerate(literal_devices(K, plays), 1):
        paid += (np.asarray(total) - G) @ past
        G, past = np.asarray(total), p
        assert paid - G.min() <= fair.ftrl_bound(t, K, float(np.asarray(slope)))


def test_regret_decomposes_for_any_losses_and_points():
    # (3.49), with L_t the sum of the losses before t and a regulariser of round t.
    T, K = 6, 3
    P, u = points(T + 1, K), points(K)
    a, z = RNG.normal(size=(T + 1, K)), RNG.random(T + 2)

    def loss(t, p):
        return a[t] @ p

    def reg(t, p):
        return z[t] * p @ p

    def leader(t, p):
        return sum(loss(s, p) for s in range(t)) + reg(t, p)

    left = sum(loss(t, P[t]) - loss(t, u) for t in range(T))
    right = reg(T, u) - leader(0, P[0]) + leader(T, P[T]) - leader(T, u)
    right += sum(
        leader(t, P[t]) + loss(t, P[t]) - leader(t + 1, P[t + 1]) for t in range(T)
    )
    np.testing.assert_allclose(left, right)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: fair.project(np.ones(3), low=0.5), "room for 3 numbers with sum 1"),
        (lambda: fair.minimise(np.eye(3), np.zeros(3), high=0.2), "room for 3 numbers"),
        (lambda: fair.project(np.ones(3), 0.4, 0.3), "got 0.4 and 0.3"),
        (lambda: fair.play(fair.static(), -np.ones((1, 2))), "losses must be in"),
        (lambda: fair.play(fair.static(), np.ones(3)), r"losses must be \[T, K\]"),
        (lambda: fair.doubly_robust(np.ones(3), np.arange(3)), "sampled"),
        (
            lambda: fair.regret(HALF, np.full((2, 2), np.nan)),
            "responses must be finite",
        ),
        (lambda: fair.regret(HALF, -np.ones((2, 2))), "responses must be > -1"),
        (lambda: fair.ftrl_bound(10, 3, -1.0), "slope must be >= 0"),
    ],
)
def test_what_has_no_meaning_is_refused(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        wrong()


def test_no_decision_is_paid_less_than_everything():
    p, r = np.ones(3) / 3, -3 * np.ones(3)
    assert np.isnan(fair.decision_loss(p, r))
    assert np.isnan(fair.decision_gradient(p, r)).all()


def test_a_bound_is_refused_where_nothing_is_proven():
    with pytest.raises(ValueError, match=r"curvature must be > 0 and < 0.5"):
        fair.ons_bound(100, 7, 1 / 7, 7 / 4)


def test_the_printed_curvature_exceeds_what_is_proven():
    # 1 / 4 L is K / 4 for the range [0, 1 / K].
    K, F = 8, RNG.random(8)
    told = heard(F, range(K))
    g = np.asarray(
        fair.decision_gradient(np.full(K, 1 / K), fair.respond(F, high=1 / K))
    )
    both = [
        aaggff_s.decider(aaggff_s.Config(curvature=c)) for c in ("printed", "proven")
    ]

    @jax.jit
    def hessians(told):  # without the decision, which XLA then leaves out
        return [one.update(one.init(K), told)[0].hessian for one in both]

    for got, beta in zip(hessians(told), (2.0, 0.5), strict=True):
        np.testing.assert_allclose(got, 4 * np.eye(K) + beta * np.outer(g, g))
    with pytest.raises(ValueError, match="aaggff_s must have all 9 clients"):
        aaggff_s.decider().update(aaggff_s.decider().init(9), told)
