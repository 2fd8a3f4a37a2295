"""Regularised risks: values, sub-gradients, proximal steps and the common minimum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks.risks import Risk, losses, minimum, nodes, normalised_error
from fedjax_core.networks.robust_loss import least_absolute_deviations

N, M, D = 5, 9, 3
RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(N, M, D)), RNG.normal(size=(N, M))
SIGNS = np.sign(Y)
MASK = np.arange(M) < np.array([9, 4, 6, 9, 5])[:, None]
RISKS = {
    "ridge": Risk(strength=0.7, l2=2.0),
    "elastic net": Risk(strength=0.7, l1=0.3),
    "absolute": Risk("absolute"),
    "logistic": Risk("logistic", strength=0.3),
}


@pytest.fixture(autouse=True)
def wide(x64):
    """All of it in double precision."""


def prepared(name):
    risk = RISKS[name]
    data = nodes(risk, X, SIGNS if name == "logistic" else Y, MASK)
    return risk, data, losses(risk, data)


def by_hand(name, k, w):
    """f_k(w) as in the text, over the rows that exist."""
    x, y = X[k][MASK[k]], Y[k][MASK[k]]
    risk = RISKS[name]
    error = {
        "absolute": np.abs(x @ w - y),
        "logistic": np.log1p(np.exp(-np.sign(y) * (x @ w))),
    }.get(name, (x @ w - y) ** 2)
    penalty = risk.l1 * np.abs(w).sum() + risk.l2 * (w @ w)
    return error.sum() / len(y) + risk.strength / N * penalty


@pytest.mark.parametrize("name", RISKS)
def test_values_gradients_and_proximal_steps(name):
    _, data, of = prepared(name)
    np.testing.assert_array_equal(data.num_examples, MASK.sum(1))
    W = np.random.default_rng(2).normal(size=(N, D))
    values = [by_hand(name, k, W[k]) for k in range(N)]
    np.testing.assert_allclose(of.value(W), values, rtol=1e-12)
    # No error is 0 at a random point: finite differences give the sub-gradient.
    h = 1e-6
    slopes = [
        [
            (by_hand(name, k, W[k] + h * e) - by_hand(name, k, W[k] - h * e)) / (2 * h)
            for e in np.eye(D)
        ]
        for k in range(N)
    ]
    np.testing.assert_allclose(of.grad(W), slopes, atol=1e-7)
    rho = RNG.uniform(0.5, 2, N)
    V = jnp.asarray(W)
    at = of.prox(V, rho)

    def target(w):
        return of.value(w) + rho / 2 * ((w - V) ** 2).sum(1)

    least = target(at)
    for move in 1e-3 * np.random.default_rng(3).normal(size=(40, N, D)):
        assert (target(at + move) >= least - 1e-12).all()


def test_a_node_moves_by_its_own_rows_alone():
    # A privacy budget accounts for these.
    other, W = Y.copy(), np.ones((N, D))
    other[1:] *= 10
    for name in ("elastic net", "absolute"):
        risk = RISKS[name]
        ours, theirs = (losses(risk, nodes(risk, X, y, MASK)) for y in (Y, other))
        np.testing.assert_array_equal(ours.grad(W)[0], theirs.grad(W)[0])


def test_the_common_minimum_has_its_known_solution():
    risk, data, of = prepared("ridge")
    rows, labels = X[MASK], Y[MASK]
    share = np.asarray(data.share)[MASK]
    H = rows.T * share @ rows + risk.strength * risk.l2 * np.eye(D)
    np.testing.assert_allclose(
        minimum(risk, data), np.linalg.solve(H, rows.T @ (share * labels)), rtol=1e-12
    )
    risk, data, _ = prepared("absolute")
    fit = least_absolute_deviations(share[:, None] * rows, share * labels)
    np.testing.assert_allclose(minimum(risk, data), fit.w, atol=1e-8)
    for name in ("elastic net", "logistic"):
        risk, data, of = prepared(name)
        w = jnp.tile(minimum(risk, data), (N, 1))
        assert (jnp.abs(w) > 1e-3).all()  # no kink: the gradient vanishes
        np.testing.assert_allclose(of.grad(w).sum(0), 0, atol=1e-9)


def test_the_minimum_is_found_in_single_precision_under_jit():
    with jax.enable_x64(False):
        for name, risk in RISKS.items():
            y = SIGNS if name == "logistic" else Y

            def solve(X, y, risk=risk):
                return minimum(risk, nodes(risk, X, y, MASK))

            got = jax.jit(solve)(np.float32(X), np.float32(y))
            with jax.enable_x64(True):
                wide = minimum(risk, nodes(risk, X, y, MASK))
            np.testing.assert_allclose(got, wide, atol=2e-5)


def test_the_normalised_error_is_a_sum_over_nodes():
    found = normalised_error(jnp.zeros((N, D)), jnp.array([1.0, 2.0, 3.0]))
    assert found["normalised_error"] == N
    np.testing.assert_array_equal(found["normalised_error_of_node"], np.ones(N))


def test_what_is_out_of_range_is_refused():
    for wrong, match in (
        (lambda: Risk("cubic"), "error must be one of"),  # pyright: ignore[reportArgumentType]
        (lambda: Risk(strength=-1.0), "strength must be >= 0"),
        (lambda: Risk("logistic", l1=0.1), "l1 must be 0 with logistic errors"),
        (lambda: Risk("absolute", strength=1.0), "strength must be 0 with absolute"),
        (lambda: nodes(Risk(), X, Y[:, :-1]), "X and y must have shapes"),
        (lambda: nodes(Risk(), X, Y, MASK & (np.arange(N) > 0)[:, None]), "node 0"),
        (lambda: nodes(Risk("logistic"), X, 0 * Y), "y must be labels -1 and 1"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
