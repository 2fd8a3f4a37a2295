"""Local losses of all nodes against definitions and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import oracles

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(4, 7, 3)), RNG.normal(size=(4, 7))
V, OTHER = RNG.normal(size=(4, 3)), RNG.normal(size=(4, 3))
RHO = np.array([0.1, 0.5, 1.0, 3.0])

pytestmark = pytest.mark.usefixtures("x64")


def close(actual, wanted, tol=1e-9):
    np.testing.assert_allclose(actual, wanted, rtol=tol, atol=tol)


def logistic(w, data):
    x, y = data
    return jnp.logaddexp(0, -jnp.sign(y) * (x @ w)).mean()


def test_statistics_are_the_average_squared_error_and_its_gradient():
    """T-E4."""
    losses = oracles.quadratic(*oracles.least_squares_statistics(X, Y))
    wanted = [((y - x @ w) ** 2).mean() for x, y, w in zip(X, Y, V, strict=True)]
    close(losses.value(jnp.asarray(V)), wanted)
    gradient = jax.grad(lambda W: losses.value(W).sum())(jnp.asarray(V))
    close(losses.grad(jnp.asarray(V)), gradient)
    by_hand = [-2 / 7 * x.T @ (y - x @ w) for x, y, w in zip(X, Y, V, strict=True)]
    close(gradient, by_hand)


def test_masked_rows_do_not_count_whatever_they_hold():
    mask = np.arange(7) < np.array([7, 3, 1, 0])[:, None]
    spoiled = np.where(mask[..., None], X, np.nan)
    Q, q, c = oracles.least_squares_statistics(spoiled, Y, mask, allow_empty=True)
    close(Q[1], X[1, :3].T @ X[1, :3] / 3)
    close(q[1], -2 * X[1, :3].T @ Y[1, :3] / 3)
    close(c[1], (Y[1, :3] ** 2).mean())
    assert not Q[3].any()
    assert not q[3].any()
    assert c[3] == 0


@pytest.mark.parametrize("rho", [0.7, RHO])
def test_prox_of_quadratics(rho, run):
    """T-O5: the closed form, and the gradient of the definition vanishes."""
    Q, q, c = oracles.least_squares_statistics(X, Y)
    losses = oracles.quadratic(Q, q, c)
    W = run(losses.prox)(jnp.asarray(V), jnp.asarray(rho))
    r = np.broadcast_to(rho, 4)
    for i in range(4):
        wanted = np.linalg.solve(2 * Q[i] + r[i] * np.eye(3), r[i] * V[i] - q[i])
        close(W[i], wanted)
    close(losses.prox_at(jnp.asarray(rho))(jnp.asarray(V)), W)
    close(oracles.prox_residual(losses, V, W, rho), np.zeros(4))


def test_prox_of_distances_and_of_nothing():
    a = RNG.normal(size=(4, 2, 3))
    v = jnp.asarray(RNG.normal(size=(4, 2, 3)))
    losses = oracles.squared_distance(a)
    r = RHO[:, None, None]
    close(losses.prox(v, RHO), (2 * a + r * v) / (2 + r))
    close(losses.value(v), ((v - a) ** 2).sum((1, 2)))
    close(losses.grad(v), 2 * (v - a))
    flat = oracles.quadratic(
        np.tile(np.eye(6), (4, 1, 1)), -2 * a.reshape(4, 6), (a**2).sum((1, 2))
    )
    close(losses.value(v), flat.value(v.reshape(4, 6)))
    assert (oracles.zero().prox(v, 1.0) == v).all()
    assert not oracles.zero().value({"w": v}).any()
    assert not oracles.zero().grad(v).any()


def test_prox_is_firmly_non_expansive_and_contracts():
    losses = oracles.quadratic(*oracles.least_squares_statistics(X, Y))
    v, u = jnp.asarray(V), jnp.asarray(OTHER)
    moved = losses.prox(v, RHO) - losses.prox(u, RHO)
    assert ((moved**2).sum(1) <= (moved * (v - u)).sum(1) + 1e-9).all()
    convexity = 2 * np.linalg.eigvalsh(np.einsum("nmd,nme->nde", X, X) / 7)[:, 0]
    factor = 1 / (1 + convexity / RHO)
    assert (
        np.linalg.norm(moved, axis=1) <= factor * np.linalg.norm(v - u, axis=1) + 1e-9
    ).all()


def test_smooth_newton_solves_quadratics_and_logistic_regression():
    data = (jnp.asarray(X), jnp.asarray(Y))
    quadratic = oracles.quadratic(*oracles.least_squares_statistics(X, Y))
    same = oracles.smooth(lambda w, d: ((d[1] - d[0] @ w) ** 2).mean(), data, steps=1)
    close(same.prox(jnp.asarray(V), RHO), quadratic.prox(jnp.asarray(V), RHO))
    close(same.value(jnp.asarray(V)), quadratic.value(jnp.asarray(V)))

    losses = oracles.smooth(logistic, data)
    # Full Newton steps diverge from here.
    far = jnp.asarray(100 * V)
    W = losses.prox(far, 1e-3)
    assert (oracles.prox_residual(losses, far, W, 1e-3) < 1e-9).all()


def test_smooth_gradient_steps_report_what_is_left():
    data = (jnp.asarray(X), jnp.asarray(Y))
    tree = {"w": jnp.asarray(V)}

    def loss(params, d):
        return logistic(params["w"], d)

    left = []
    for steps in (5, 50):
        losses = oracles.smooth(
            loss, data, method="gradient", steps=steps, step_size=0.2
        )
        W = losses.prox(tree, 1.0)
        left.append(oracles.prox_residual(losses, tree, W, 1.0).max())
    exact = oracles.smooth(loss, data).prox(tree, 1.0)
    assert left[1] < 1e-3 * left[0]
    # rho-strong convexity: the distance is at most the residual over rho.
    assert np.linalg.norm(W["w"] - exact["w"], axis=1).max() <= left[1]


def test_float32_stays_float32():
    with jax.enable_x64(False):
        losses = oracles.quadratic(*oracles.least_squares_statistics(X, Y))
        W = losses.prox(jnp.zeros((4, 3)), 1.0)
        assert W.dtype == losses.value(W).dtype == jnp.float32


def test_check_quadratic():
    Q = np.einsum("nmd,nme->nde", X, X)
    oracles.check_quadratic(Q, definite=True)
    low_rank = Q.copy()
    low_rank[2] = np.outer(V[0], V[0])
    oracles.check_quadratic(low_rank)
    oracles.check_quadratic(np.ones((2, 1, 1), int), definite=True)
    with pytest.raises(ValueError, match=r"definite.*node 2"):
        oracles.check_quadratic(low_rank, definite=True)
    with pytest.raises(ValueError, match=r"semi-definite.*node 1"):
        oracles.check_quadratic(Q * np.array([1, -1, 1, 1])[:, None, None])
    skew = Q.copy()
    skew[3, 0, 1] += 1
    with pytest.raises(ValueError, match="symmetric"):
        oracles.check_quadratic(skew)
    with pytest.raises(ValueError, match="finite"):
        oracles.check_quadratic(np.full((1, 2, 2), np.nan))
    with pytest.raises(ValueError, match="shape"):
        oracles.check_quadratic(Q[0])


def test_bad_arguments_are_refused():
    Q, q, _ = oracles.least_squares_statistics(X, Y)
    losses = oracles.quadratic(Q, q)
    with pytest.raises(ValueError, match="shapes"):
        oracles.least_squares_statistics(X, Y[:, :3])
    with pytest.raises(ValueError, match="finite"):
        oracles.least_squares_statistics(np.full_like(X, np.nan), Y)
    mask = np.arange(7) < np.array([7, 0, 1, 2])[:, None]
    with pytest.raises(ValueError, match="none for node 1"):
        oracles.least_squares_statistics(X, Y, mask)
    with pytest.raises(ValueError, match="mask must be bool of shape"):
        oracles.least_squares_statistics(X, Y, np.ones((4, 3), bool))
    with pytest.raises(ValueError, match="shapes"):
        oracles.quadratic(Q, q[:, :2])
    for each in (losses, oracles.zero(), oracles.squared_distance(V)):
        for rho in (0.0, -1.0, np.nan, np.array([1, 1, 0, 1.0])):
            with pytest.raises(ValueError, match="rho must be > 0"):
                each.prox(jnp.asarray(V), rho)
        with pytest.raises(ValueError, match="rho must be one number"):
            each.prox(jnp.asarray(V), np.ones(3))
    with pytest.raises(ValueError, match="method"):
        oracles.smooth(logistic, (X, Y), method="bfgs")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="step_size"):
        oracles.smooth(logistic, (X, Y), method="gradient")
    with pytest.raises(ValueError, match="steps"):
        oracles.smooth(logistic, (X, Y), steps=0)


def test_losses_of_one_node_do_not_spread_to_others():
    losses = oracles.quadratic(np.ones((1, 2, 2)), np.ones((1, 2)))
    W = jnp.ones((3, 2))
    for use in (losses.value, losses.grad, lambda W: losses.prox(W, 1.0)):
        with pytest.raises(ValueError, match=r"W must have shape \(1, 2\)"):
            use(W)
