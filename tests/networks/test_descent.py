"""Gradient, perturbed, projected, proximal and generalised steps against closed forms.

Random instances sit in the rows of one array, as the nodes of a network would.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import minimize

from fedjax_core.compress.quantisers import bit_plan, quantise, quantise_update
from fedjax_core.networks import projections
from fedjax_core.networks.descent import (
    Backtracking,
    backtracking_step,
    generalised_step,
    gradient_step,
    proximal_step,
    surrogate_error,
)
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.oracles import quadratic
from fedjax_core.networks.schedules import check_decay, power_decay
from fedjax_core.networks.theory.contraction import (
    check_rate,
    condition_number,
    contraction_factor,
    distance_bound,
    extreme_eigenvalues,
    guaranteed_rounds,
    optimal_factor,
    optimal_rate,
    perturbed_bound,
    probe_operator,
)
from fedjax_core.transform import Message

SLACK = 1e-9

pytestmark = pytest.mark.usefixtures("x64")


def problems(n=100, d=4, seed=0, singular=False):
    """Random quadratics: losses, minimisers, and the eigenvalues of every Q."""
    rng = np.random.default_rng(seed)
    B = rng.normal(size=(n, d, d))
    if singular:
        B[:, 0] = 0
    Q = np.swapaxes(B, 1, 2) @ B / d + (0 if singular else 0.1) * np.eye(d)
    q = np.einsum("nde,ne->nd", -2 * Q, rng.normal(size=(n, d)))
    low, *_, high = np.linalg.eigvalsh(Q).T
    best = np.einsum("nde,ne->nd", np.linalg.pinv(Q), -q / 2)
    return quadratic(Q, q), Q, q, best, low, high


def norms(x):
    return np.linalg.norm(np.asarray(x), axis=-1)


def trace(step, start, rounds):
    """The states after 1, 2, ... steps, in NumPy, which adds the minimisers to them."""
    return np.asarray(iterate(step, start, rounds, record=lambda w: w)[1])


def test_every_step_contracts_by_kappa():
    # T-O1, (80)
    losses, _, _, best, low, high = problems()
    rng = np.random.default_rng(1)
    eta = rng.uniform(0.01, 0.99, len(low)) / high
    start = jnp.asarray(rng.normal(size=best.shape))
    path = trace(gradient_step(losses.grad, eta), start, 20)
    errors = np.r_[norms(start - best)[None], norms(path - best)]
    kappa = np.asarray(contraction_factor(eta, low, high))
    assert (kappa < 1).all()
    assert (errors[1:] <= kappa * errors[:-1] + SLACK).all()


def test_the_optimal_rate_has_the_smallest_factor():
    # T-O1, (83) and (86)
    *_, low, high = problems()
    eta = optimal_rate(low, high)
    kappa = contraction_factor(eta, low, high)
    condition = np.asarray(condition_number(low, high))
    np.testing.assert_allclose(kappa, optimal_factor(low, high), rtol=1e-9)
    np.testing.assert_allclose(kappa, (condition - 1) / (condition + 1), rtol=1e-9)
    for other in np.linspace(0.05, 1.95, 20):
        assert (contraction_factor(other * eta, low, high) >= kappa - SLACK).all()
    # The factor is met along an eigenvector, and equal eigenvalues need one step.
    worst = jnp.diag(jnp.array([1 - 2 * 0.2 * 1, 1 - 2 * 0.2 * 4]))
    assert float(jnp.abs(worst).max()) == pytest.approx(optimal_factor(1.0, 4.0))
    one = gradient_step(lambda w: 2 * 3 * w, optimal_rate(3.0, 3.0))
    np.testing.assert_allclose(one(jnp.ones(2), 0, None), 0, atol=1e-15)
    # The book's fixed-point section: eta = 1 / (2 ld) has 1 - l1 / ld.
    np.testing.assert_allclose(
        contraction_factor(1 / (2 * high), low, high), 1 - low / high, rtol=1e-9
    )


def test_g_chain3_by_gradient_descent():
    # The golden run of the running example at the optimal rate.
    L = np.array([[1, -1, 0], [-1, 2, -1], [0, -1, 1]])
    Q, q, best = np.eye(3) + L, np.array([0, 0, -6.0]), np.array([3 / 8, 3 / 4, 15 / 8])
    low, high = extreme_eigenvalues(Q)
    assert (low, high) == pytest.approx((1, 4))
    step = gradient_step(lambda w: 2 * Q @ w + q, optimal_rate(low, high))
    path = trace(step, jnp.zeros(3), 3)
    np.testing.assert_allclose(
        path, [[0, 0, 1.2], [0, 0.48, 1.44], [0.192, 0.48, 1.68]], atol=1e-12
    )
    relative = norms(path - best) / norms(best)
    np.testing.assert_allclose(relative, [0.5241, 0.3090, 0.1850], atol=5e-5)


def test_a_singular_quadratic_converges_below_the_limit():
    losses, _, _, best, low, high = problems(singular=True)
    assert np.abs(low).max() < 1e-12
    start = jnp.zeros(best.shape)
    last, _ = iterate(gradient_step(losses.grad, 0.5 / high), start, 20_000)
    assert norms(losses.grad(last)).max() < 1e-3
    assert float(condition_number(0.0, 1.0)) == np.inf


def test_the_guaranteed_rounds_reach_eps():
    # T-O2
    losses, _, _, best, low, high = problems()
    eta = optimal_rate(low, high)
    start, eps = jnp.zeros(best.shape), 1e-3
    kappa = np.asarray(contraction_factor(eta, low, high))
    rounds = np.array(
        [guaranteed_rounds(d, eps, k) for d, k in zip(norms(best), kappa, strict=True)]
    )
    step = gradient_step(losses.grad, eta)
    path = trace(step, start, int(rounds.max()))
    path = np.r_[np.asarray(start)[None], path]
    reached = path[rounds, np.arange(len(rounds))]
    assert (norms(reached - best) <= eps + SLACK).all()
    assert guaranteed_rounds(1.0, 2.0, 0.5) == 0
    assert guaranteed_rounds(5.0, 1.0, 0.0) == 1
    assert guaranteed_rounds(1.0, 1 / 8, 0.5) == 3


def test_the_gradient_certifies_the_distance():
    losses, _, _, best, low, _ = problems()
    w = jnp.asarray(np.random.default_rng(2).normal(size=best.shape))
    bound = jax.vmap(distance_bound)(losses.grad(w), jnp.asarray(low))
    assert (norms(w - best) <= np.asarray(bound) + SLACK).all()


def test_the_corrected_perturbation_bound_holds_and_the_printed_one_does_not():
    # T-O3; (88) prints kappa^k where kappa^(k-1) belongs.
    losses, _, _, best, low, high = problems()
    rng = np.random.default_rng(3)
    noise = jnp.asarray(rng.normal(size=(24, *best.shape)) * 0.3)
    start = jnp.asarray(best + rng.normal(size=best.shape) * 0.1)
    eta = optimal_rate(low, high)
    step = gradient_step(losses.grad, eta, error=lambda w, t, key: noise[t])
    path = trace(step, start, 24)
    errors = norms(path - best)
    kappa = np.asarray(contraction_factor(eta, low, high))
    bound = jax.vmap(perturbed_bound, (0, 0, 1), 1)(
        kappa, norms(start - best), norms(noise)
    )
    assert (errors <= np.asarray(bound) + SLACK).all()
    damped = kappa ** np.arange(1, 25)[:, None] * norms(start - best)
    printed = damped + kappa * (np.asarray(bound) - damped)
    assert (errors > printed + SLACK).any()
    # From the minimiser, the first error arrives undamped.
    first = step(jnp.asarray(best), 0, None)
    assert (norms(first - best) > kappa * norms(noise[0])).all()
    np.testing.assert_allclose(norms(first - best), norms(noise[0]), rtol=1e-9)
    # Constant noise: at most e / (1 - kappa) in the limit.
    limit = perturbed_bound(0.5, 3.0, jnp.full(80, 0.2))[-1]
    assert limit == pytest.approx(0.2 / (1 - 0.5))


def test_a_gradient_step_minimises_the_linear_model():
    # T-O4: argmin of f(w_t) + g'(w - w_t) + |w - w_t|^2 / (2 eta).
    losses, _, _, best, _, high = problems()
    w = jnp.asarray(np.random.default_rng(4).normal(size=best.shape))
    eta = 0.3 / high
    new = gradient_step(losses.grad, eta)(w, 0, None)
    slope = losses.grad(w)

    def model(v):
        near = jnp.sum(jnp.square(v - w), axis=1) / (2 * eta)
        return jnp.sum(jnp.sum(slope * (v - w), axis=1) + near)

    np.testing.assert_allclose(jax.grad(model)(new), 0, atol=1e-9)


def test_the_proximal_step_minimises_numerically():
    # T-O5 and Exercise 3.15
    losses, Q, q, best, _, _ = problems(3)
    w = np.random.default_rng(5).normal(size=best.shape)
    eta = np.array([0.1, 1.0, 10.0])
    new = proximal_step(losses.prox, eta)(jnp.asarray(w), 0, None)
    for i in range(3):
        rho = 1 / eta[i]

        def target(v, i=i, rho=rho):
            return v @ Q[i] @ v + q[i] @ v + rho / 2 * np.sum((v - w[i]) ** 2)

        def slope(v, i=i, rho=rho):
            return 2 * Q[i] @ v + q[i] + rho * (v - w[i])

        numeric = minimize(target, w[i], jac=slope, tol=1e-12).x
        np.testing.assert_allclose(new[i], numeric, atol=1e-8)
        closed = np.linalg.solve(2 * Q[i] + rho * np.eye(4), rho * w[i] - q[i])
        np.testing.assert_allclose(new[i], closed, rtol=1e-9)


def worst_pairs(Q, seed=6):
    """Random pairs and those that differ along the extreme eigenvectors of Q."""
    v = np.random.default_rng(seed).normal(size=(30, len(Q)))
    w = v + np.random.default_rng(seed + 1).normal(size=v.shape)
    w[:2] = v[:2] + np.linalg.eigh(Q)[1][:, [0, -1]].T
    return jnp.asarray(w), jnp.asarray(v)


@pytest.mark.parametrize("factor", [0.5, 0.999, 1.05])
def test_thresholds_of_operator_classes(factor):
    # T-O6: non-expansive iff eta <= 1 / ld, firmly iff eta <= 1 / (2 ld).
    _, Q, q, *_, high = problems(1)
    pairs = worst_pairs(Q[0])

    def probe(eta):
        return probe_operator(
            lambda w: gradient_step(lambda u: 2 * Q[0] @ u + q[0], eta)(w, 0, None),
            *pairs,
        )

    below = factor < 1
    assert (probe(factor / high[0]).expansion <= 1 + SLACK) == below
    assert (probe(factor / (2 * high[0])).firmness >= -SLACK) == below
    # Between the limits the step is non-expansive but not firmly so.
    between = probe(0.9 / high[0])
    assert between.expansion <= 1 + SLACK
    assert between.firmness < 0


@pytest.mark.parametrize(
    ("eta", "non_expansive", "firm"),
    [(0.5, 1, 1), (1.0, 1, 1), (1.05, 1, 0), (2.0, 1, 0), (2.1, 0, 0)],
)
def test_exercise_4_7(eta, non_expansive, firm):
    # T-O6 for f = w^2 / 2
    step = gradient_step(lambda w: w, eta)
    found = probe_operator(
        lambda w: step(w, 0, None), jnp.array([1.0, 3.0]), jnp.array([0.0, -2.0])
    )
    assert (found.expansion <= 1 + SLACK) == bool(non_expansive)
    assert (found.firmness >= -SLACK) == bool(firm)


def test_prox_is_firm_and_a_projection_too():
    _, Q, q, *_ = problems(1)
    losses = quadratic(Q, q)
    w, v = worst_pairs(Q[0])
    prox = probe_operator(lambda u: losses.prox(u[None], 0.7)[0], w, v)
    low, _ = extreme_eigenvalues(Q[0])
    assert prox.firmness >= -SLACK
    assert prox.expansion <= 1 / (1 + 2 * low / 0.7) + SLACK
    assert probe_operator(lambda u: projections.ball(u, 1.0), w, v).firmness >= -SLACK


def test_projected_descent_contracts_just_as_fast():
    # T-O7 with a ball and with the consensus subspace
    losses, Q, q, _, low, high = problems()
    rng = np.random.default_rng(7)
    w, v = (jnp.asarray(rng.normal(size=Q.shape[:2]) * 3) for _ in range(2))
    eta = 0.8 / high
    kappa = np.asarray(contraction_factor(eta, low, high))
    ball = jax.vmap(lambda u: projections.ball(u, 0.5))
    step = gradient_step(losses.grad, eta, project=ball)
    gap = norms(step(w, 0, None) - step(v, 0, None))
    assert (gap <= kappa * norms(w - v) + SLACK).all()
    last, _ = iterate(step, w, 3000)
    # The limit is optimal: inside, or the gradient points along the radius.
    g, r = np.asarray(losses.grad(last)), norms(last)
    outward = (g * np.asarray(last)).sum(1) / r**2
    np.testing.assert_allclose(g, outward[:, None] * np.asarray(last), atol=1e-6)
    assert (r <= 0.5 + SLACK).all()
    assert (outward <= 1e-6).all()
    # Consensus: all rows end at the minimiser of the sum.
    rate = 0.8 / high.max()
    factor = float(contraction_factor(rate, low.min(), high.max()))
    step = gradient_step(losses.grad, rate, project=projections.consensus)
    gap = np.linalg.norm(np.asarray(step(w, 0, None) - step(v, 0, None)))
    assert gap <= factor * np.linalg.norm(np.asarray(w - v)) + SLACK
    last, _ = iterate(step, w, 2000)
    pooled = np.linalg.solve(Q.sum(0), -q.sum(0) / 2)
    np.testing.assert_allclose(last, np.tile(pooled, (len(Q), 1)), atol=1e-9)


@pytest.mark.parametrize(
    "value",
    [
        lambda w: jnp.sum(w**4),
        lambda w: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2,
        lambda w: jnp.sum(jnp.logaddexp(0.0, 5 * w)) + jnp.sum(w**2),
    ],
    ids=["quartic", "Rosenbrock", "logistic"],
)
def test_decrease_and_retry_never_increases(value):
    # T-O8; the guess of the rate is far too large.
    step = backtracking_step(value, jax.grad(value))
    start = Backtracking(jnp.array([2.0, -3.0]), jnp.float64(50))
    _, values = iterate(step, start, 200, record=lambda s: value(s.w))
    values = np.r_[float(value(start.w)), values]
    assert (np.diff(values) <= 0).all()
    assert values[-1] < 0.05 * values[0]


def test_decrease_and_retry_takes_the_first_rate_that_is_good_enough():
    # f = w^2 / 2 at w = 1: accepted iff eta <= 2 (1 - c1).
    step = backtracking_step(lambda w: w**2 / 2, lambda w: w, c1=0.5)
    new = step(Backtracking(jnp.float64(1), jnp.float64(4)), 0, None)
    assert (new.eta, new.w) == (1, 0)
    # When no try is accepted, w stays.
    step = backtracking_step(lambda w: w**2 / 2, lambda w: w, max_tries=2)
    new = step(Backtracking(jnp.float64(1), jnp.float64(1e6)), 0, None)
    assert (new.w, new.eta) == (1, 1e6)


def test_powers_of_t_whose_rates_suit():
    # T-O9: partial sums over t in (T, 2T] tell whether a sum is finite.
    t = np.arange(2**20)

    def tails(p):
        rates = np.asarray(power_decay(power=p)(jnp.asarray(t)))
        halves = [np.sum(rates[2**k : 2 ** (k + 1)]) for k in (10, 14, 18)]
        squares = [np.sum(rates[2**k : 2 ** (k + 1)] ** 2) for k in (10, 14, 18)]
        return halves[2] > 0.9 * halves[0], squares[2] < 0.9 * squares[0]

    for p in (0.4, 0.5, 0.51, 0.75, 1.0, 1.2):
        infinite, square_finite = tails(p)
        suits = infinite and square_finite
        assert suits == (0.5 < p <= 1), p
        if suits:
            check_decay(p)
        else:
            with pytest.raises(ValueError, match="power must be in"):
                check_decay(p)


def test_one_over_t_diverges_on_the_fourth_power():
    # T-O9: gradients are unbounded.
    step = gradient_step(lambda w: 4 * w**3, power_decay())
    path = trace(step, jnp.float64(2), 3)
    np.testing.assert_allclose(path, [-30, 53970, -2.096e14], rtol=1e-3)
    np.testing.assert_allclose(path[:2], [-30, 53970], rtol=1e-12)


def test_schedules_have_the_rates_of_the_text():
    t = jnp.arange(4)
    np.testing.assert_allclose(power_decay()(t), 1 / np.arange(1, 5))
    np.testing.assert_allclose(power_decay(shift=6)(t), 1 / np.arange(6, 10))
    np.testing.assert_allclose(
        power_decay(power=0.5, shift=6)(t), np.arange(6, 10) ** -0.5
    )
    np.testing.assert_allclose(
        power_decay(0.3 * 7, shift=7)(t), 0.3 / (1 + np.arange(4) / 7)
    )
    step = gradient_step(lambda w: jnp.ones_like(w), optax.constant_schedule(0.5))
    assert step(jnp.float64(1), 0, None) == 0.5


def test_a_surrogate_gives_the_steps_of_another_objective():
    # T-O11
    losses, _, _, best, _, high = problems(5)

    def other(w):
        return jnp.tanh(w) + 4 * w**3

    eta = 0.1 / high
    error = surrogate_error(losses.grad, other, eta)
    start = jnp.asarray(best) / 10
    path = trace(gradient_step(losses.grad, eta, error=error), start, 5)
    direct = trace(gradient_step(other, eta), start, 5)
    np.testing.assert_allclose(path, direct, rtol=1e-9, atol=1e-12)


def weighted_least_squares(X, y, weight):
    return jnp.linalg.solve(X.T @ (weight[:, None] * X), X.T @ (weight * y))


def test_alg_3_on_a_linear_model():
    # T-O12: with the exact test set sqrt(d) e_j it is the proximal step.
    rng = np.random.default_rng(8)
    X, y, w = rng.normal(size=(7, 3)), rng.normal(size=7), rng.normal(size=3)
    eta, Q, q = 0.4, X.T @ X / 7, -2 * X.T @ y / 7

    def step(test):
        return generalised_step(
            weighted_least_squares, lambda h, x: x @ h, (X, y), test, eta
        )

    exact = np.sqrt(3) * np.eye(3)
    prox = proximal_step(quadratic(Q[None], q[None]).prox, eta)
    path = trace(step(exact), jnp.asarray(w), 4)
    expected = iterate(prox, jnp.asarray(w)[None], 4, record=lambda h: h[0])[1]
    np.testing.assert_allclose(path, expected, rtol=1e-9)
    # Any other test set: the printed closed form.
    T = rng.normal(size=(5, 3))
    metric = T.T @ T / (2 * eta * 5)
    closed = np.linalg.solve(Q + metric, -q / 2 + metric @ w)
    np.testing.assert_allclose(step(T)(jnp.asarray(w), 0, None), closed, rtol=1e-9)


def test_alg_3_with_a_decision_tree():
    from sklearn.tree import DecisionTreeRegressor

    rng = np.random.default_rng(9)
    X, test = rng.uniform(-1, 1, size=(60, 1)), rng.uniform(-1, 1, size=(40, 1))
    y = np.sign(X[:, 0])
    step = generalised_step(
        lambda X, y, weight: DecisionTreeRegressor(max_depth=3, random_state=0).fit(
            X, y, weight
        ),
        lambda h, X: np.zeros(len(X)) if h is None else h.predict(X),
        (X, y),
        test,
        eta=1.0,
    )
    h, errors = None, []
    for t in range(6):
        h = step(h, t, None)
        errors.append(np.mean((h.predict(X) - y) ** 2))
    assert errors[-1] < errors[0] < 1


def test_quantised_coordinates_err_by_at_most_half_a_cell():
    # T-O13
    x = {
        "a": jnp.asarray(np.random.default_rng(10).normal(size=(50, 3))),
        "b": jnp.array([0.0, -9.0, 9.0]),
    }
    for bits in (1, 2, 5, 8, 2.5):
        sent = quantise(x, bits)
        for name in x:
            assert np.abs(sent[name] - x[name]).max() <= 9 * 2.0**-bits + 1e-12
    levels = np.unique(np.round(np.asarray(quantise(x, 3)["a"] / 9 * 8, float)))
    assert len(levels) <= 8
    np.testing.assert_array_equal(quantise(jnp.zeros(3), 4), 0)
    float32 = quantise(jnp.ones(3, jnp.float32), 4)
    assert float32.dtype == jnp.float32


def test_quantised_updates_count_their_bits():
    update = {"w": jnp.arange(5.0), "b": jnp.ones(2)}
    message, _ = quantise_update(4).apply(
        Message(update, jnp.float32(0)), (), jax.random.key(0)
    )
    assert message.bits == 4 * 7 + 32
    np.testing.assert_allclose(message.update["w"], update["w"], atol=4 / 16)


def plan_error(plan, kappa):
    """What errors 2^-b at every step leave at the end."""
    return float(np.sum(kappa ** np.arange(len(plan))[::-1] * 2.0**-plan))


def test_late_steps_deserve_more_bits():
    # T-O13, Exercise 4.6
    kappa, rounds, total = 0.8, 12, 60
    plan = bit_plan(total, rounds, kappa)
    s = np.arange(rounds)[::-1]
    np.testing.assert_allclose(
        plan, total / rounds + (s - (rounds - 1) / 2) * np.log2(kappa)
    )
    assert plan.sum() == pytest.approx(total)
    assert (np.diff(plan) > 0).all()
    uniform = np.full(rounds, total / rounds)
    assert plan_error(plan, kappa) == pytest.approx(
        float(perturbed_bound(kappa, 0.0, 2.0**-plan)[-1])
    )
    assert plan_error(plan, kappa) < 0.9 * plan_error(uniform, kappa)
    assert plan_error(uniform, kappa) < plan_error(plan[::-1], kappa)
    rng = np.random.default_rng(11)
    for _ in range(50):
        other = plan + 0.3 * rng.normal(size=rounds)
        other += (total - other.sum()) / rounds
        assert plan_error(plan, kappa) <= plan_error(other, kappa) + 1e-12


def test_a_small_budget_goes_to_the_last_steps():
    plan = bit_plan(3, 20, 0.5)
    assert plan.sum() == pytest.approx(3)
    assert (plan >= 0).all()
    assert plan[0] == 0
    result = minimize(
        lambda b: np.sum(0.5 ** np.arange(20)[::-1] * 2.0**-b),
        np.full(20, 3 / 20),
        bounds=[(0, None)] * 20,
        constraints={"type": "eq", "fun": lambda b: b.sum() - 3},
    )
    assert plan_error(plan, 0.5) <= result.fun + 1e-6
    whole = bit_plan(30, 7, 0.9, whole=True)
    assert whole.sum() == 30
    assert (whole == np.round(whole)).all()
    assert np.abs(whole - bit_plan(30, 7, 0.9)).max() < 1
    np.testing.assert_allclose(bit_plan(8, 4, 1.0), 2)


def test_quantised_descent_stays_below_its_bound():
    # T-O13: the error of quantised gradients, by the perturbation bound.
    losses, _, _, best, low, high = problems(20)
    eta = optimal_rate(low, high)
    bits = jnp.asarray(bit_plan(60, 10, 0.8))
    quantised = jax.vmap(quantise, (0, None))

    def error(w, t, key):
        g = losses.grad(w)
        return eta[:, None] * (g - quantised(g, bits[t]))

    step = gradient_step(losses.grad, eta, error=error)

    def both(state, t, key):
        return step(state[0], t, key), error(state[0], t, key)

    start = jnp.zeros(best.shape)
    path, errors = map(
        np.asarray, iterate(both, (start, start), 10, record=lambda state: state)[1]
    )
    kappa = np.asarray(contraction_factor(eta, low, high))
    bound = jax.vmap(perturbed_bound, (0, 0, 1), 1)(kappa, norms(best), norms(errors))
    assert (norms(path - best) <= np.asarray(bound) + SLACK).all()


def test_rates_by_node_and_pytrees():
    grad = {"a": jnp.ones((2, 3)), "b": jnp.ones(2)}
    step = gradient_step(lambda w: grad, jnp.array([1.0, 2.0]))
    new = step(jax.tree.map(jnp.zeros_like, grad), 0, None)
    np.testing.assert_array_equal(new["a"], [[-1] * 3, [-2] * 3])
    np.testing.assert_array_equal(new["b"], [-1, -2])


def test_ints_are_no_parameters():
    with pytest.raises(TypeError, match="must be floats"):
        gradient_step(lambda w: w, 0.1)(jnp.arange(3), 0, None)


def test_weighted_means():
    W = {"a": jnp.array([[1.0], [3.0], [5.0], [9.0]]), "b": jnp.arange(4.0)}
    np.testing.assert_allclose(projections.consensus(W)["b"], 1.5)
    np.testing.assert_allclose(
        projections.consensus(W, np.array([False, True, True, False]))["a"], 4
    )
    np.testing.assert_array_equal(projections.consensus(W, np.zeros(4))["a"], W["a"])


def test_balls_and_boxes():
    w = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
    new = projections.ball(w, 1.0)
    np.testing.assert_allclose(new["a"], [0.6, 0])
    np.testing.assert_allclose(new["b"], 0.8)
    same = projections.ball(w, 5.0)
    np.testing.assert_array_equal(same["a"], w["a"])
    centred = projections.ball(jnp.array([5.0, 1.0]), 2.0, jnp.array([1.0, 1.0]))
    np.testing.assert_allclose(centred, [3, 1])
    np.testing.assert_array_equal(projections.ball(jnp.ones(2), 0.0), 0)
    slope = jax.grad(lambda u: projections.ball(u, 1.0).sum())(jnp.zeros(2))
    np.testing.assert_allclose(slope, 1)
    np.testing.assert_allclose(projections.box(w, -1.0, np.inf)["a"], [3, 0])
    np.testing.assert_allclose(
        projections.box(w["a"], -1.0, np.array([2.0, 5.0])), [2, 0]
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gradient_step(jnp.sin, 0.0), "eta must be > 0"),
        (lambda: gradient_step(jnp.sin, np.array([1, -1.0])), "node 1"),
        (lambda: proximal_step(lambda v, rho: v, np.nan), "eta must be > 0"),
        (lambda: check_rate(0.5, 2.0), "below 1/high = 0.5"),
        (lambda: check_rate(-0.1, 2.0), "eta must be > 0"),
        (lambda: check_rate(np.array([0.1, np.nan]), 2.0), "got nan"),
        (lambda: guaranteed_rounds(1.0, 0.0, 0.5), "eps"),
        (lambda: guaranteed_rounds(1.0, 0.1, 1.0), "kappa must be < 1"),
        (lambda: extreme_eigenvalues(np.diag([1.0, -1e-3])), "psd"),
        (lambda: extreme_eigenvalues(np.triu(np.ones((2, 2)))), "symmetric"),
        (lambda: extreme_eigenvalues(np.full((1, 1), np.nan)), "finite"),
        (lambda: extreme_eigenvalues(np.ones((2, 3))), "square"),
        (lambda: projections.ball(jnp.ones(2), -1.0), "radius"),
        (lambda: projections.box(jnp.ones(2), 1.0, 0.0), "low must be <= high"),
        (lambda: projections.check_clusters(np.array([0, 2]), 2, 2), "node 1"),
        (lambda: projections.check_clusters(np.array([0]), 2, 2), "shape"),
        (lambda: projections.consensus(jnp.ones(2), np.array([1.0, -1.0])), "node 1"),
        (lambda: backtracking_step(jnp.sum, jnp.sin, c1=1.0), "c1"),
        (lambda: backtracking_step(jnp.sum, jnp.sin, shrink=0.0), "shrink"),
        (lambda: power_decay(power=-1.0), "power"),
        (lambda: quantise(jnp.ones(2), 0), "bits"),
        (lambda: bit_plan(-1, 3, 0.5), "total"),
        (lambda: bit_plan(3, 3, 0.0), "kappa"),
        (lambda: bit_plan(3.5, 3, 0.5, whole=True), "int"),
        (
            lambda: generalised_step(
                weighted_least_squares,
                jnp.dot,
                (jnp.ones((1, 1)), jnp.ones(1)),
                jnp.ones((0, 1)),
                1.0,
            ),
            "test must have",
        ),
        (
            lambda: generalised_step(
                weighted_least_squares,
                jnp.dot,
                (jnp.ones((1, 1)), jnp.ones(1)),
                jnp.ones((1, 1)),
                0.0,
            ),
            "eta",
        ),
    ],
)
def test_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_balls_take_ints_and_what_squares_overflow():
    np.testing.assert_allclose(projections.ball([3, 4], 2.5), [1.5, 2.0])
    half = projections.ball(jnp.array([300, 400], jnp.float16), 1.0)
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half, [0.6, 0.8], rtol=2e-3)
    large = projections.ball(jnp.array([3e20, 4e20], jnp.float32), 1.0)
    np.testing.assert_allclose(large, [0.6, 0.8], rtol=1e-6)
    tiny = projections.ball(jnp.array([3e-30, 4e-30], jnp.float32), 1e-30)
    np.testing.assert_allclose(tiny, [6e-31, 8e-31], rtol=1e-6)


def test_vectors_of_the_largest_floats_are_quantised():
    x = jnp.array([3.4e38, -3.4e38, -1.0, 1e38], jnp.float32)
    for bits in (1, 4, 0.5):
        error = np.abs(np.float64(quantise(x, bits)) - np.float64(x)).max()
        assert error <= 3.4e38 * 2.0**-bits * (1 + 1e-6)
    mixed = {"a": jnp.float32([1e5]), "b": jnp.ones(2, jnp.float16)}
    sent = quantise(mixed, 12)
    assert sent["b"].dtype == jnp.float16
    for name, exact in mixed.items():
        error = np.abs(np.float64(sent[name]) - np.float64(exact)).max()
        assert error <= 1e5 * 2.0**-12 * (1 + 1e-3)
    with pytest.raises(ValueError, match="x must hold an array"):
        quantise({}, 4)


def test_there_are_no_more_levels_than_bits_can_tell():
    for bits in (13, 17):
        x = jnp.linspace(-1, 1, 2 ** (bits + 2) + 1, dtype=jnp.float32)
        sent = np.asarray(quantise(x, bits))
        assert np.abs(sent).max() < 1
        assert len(np.unique(sent)) == 2**bits


@pytest.mark.parametrize("eta", [None, "fast", [None, 1.0], 1j])
def test_rates_are_numbers(eta):
    with pytest.raises(
        TypeError, match="eta must be a number, one per node or a sched"
    ):
        gradient_step(lambda w: w, eta)


def test_rates_of_another_number_of_nodes_are_refused():
    with pytest.raises(ValueError, match=r"one per node, got shape \(3, 1\)"):
        gradient_step(lambda w: w, np.ones((3, 1)))
    for eta in (np.ones(2), lambda t: jnp.ones((3, 1))):
        step = gradient_step(lambda w: w, eta)
        with pytest.raises(ValueError, match=r"one number or one each, shape \(3,\)"):
            step(jnp.ones((3, 2)), jnp.int32(0), None)


def test_boxes_make_floats_of_ints():
    np.testing.assert_array_equal(
        projections.box(jnp.array([1, 2]), 0.5, 1.5), [1, 1.5]
    )


def test_rows_of_weight_zero_may_hold_anything():
    W = {"a": jnp.array([[1.0], [jnp.nan], [3.0], [jnp.inf]]), "b": jnp.ones(4)}
    weight = np.array([1.0, 0.0, 1.0, 0.0])
    np.testing.assert_array_equal(projections.consensus(W, weight)["a"], [[2]] * 4)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_lies_in_no_ball(bad):
    for centre in (None, jnp.ones(2)):
        found = projections.ball(jnp.array([bad, 1.0]), 1.0, centre)
        assert np.isnan(found).all()
