"""Bounds of linearised ADMM against runs of it, with and without noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.networks import admm, builders, oracles, robust_loss
from fedjax_core.networks.iterate import iterate
from fedjax_core.networks.schedules import power_decay
from fedjax_core.networks.theory.consensus_admm import (
    ergodic_bound,
    gap_bounds,
    noise_bound,
    stability_margin,
)

GRAPH = builders.random_connected(8, 3, seed=2)
N, D = 8, 3
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(N, 10, D)), RNG.normal(size=(N, 10))


@pytest.fixture(autouse=True)
def wide(x64):
    """All of it in double precision."""


@functools.cache
def losses(kind):
    if kind == "ridge":
        stats = oracles.least_squares_statistics(X, Y)
        return oracles.quadratic(stats.Q + 0.1 * jnp.eye(D)[None], stats.q, stats.c)
    if kind == "absolute":
        return robust_loss.absolute(X, Y)
    slope = RNG.normal(size=(N, D))
    return oracles.quadratic(np.zeros((N, D, D)), slope - slope.mean(0))


@functools.cache
def compiled(kind, rho, first, decay, rounds):
    """``noise -> messages`` w_1 .. w_{T+1}."""
    grad = losses(kind).grad  # outside, as what is cached must not be traced

    def messages(noise):
        step = admm.step(
            GRAPH,
            rho,
            admm.linearised(grad, power_decay(first, decay)),
            lambda W, t, key: W + noise[t + 1],
        )
        start = admm.init(GRAPH, jnp.zeros((N, D)))
        return iterate(step, start, rounds + 1, record=lambda s: s.sent)[1]

    return jax.jit(messages)


def follow(kind, rho, first, decay, rounds, sigma=0.0, seed=0):
    """Messages w_0 .. w_{T+1}, their noise, and the steps."""
    noise = sigma * jax.random.normal(jax.random.key(seed), (rounds + 2, N, D))
    sent = compiled(kind, rho, first, decay, rounds)(noise)
    W = np.concatenate([np.zeros((1, N, D)), sent])
    eta = first * np.arange(1, rounds + 2) ** -decay
    return W, np.asarray(noise), eta


@functools.cache
def optimum(kind):
    if kind == "absolute":
        return robust_loss.least_absolute_deviations(X.reshape(-1, D), Y.ravel()).w
    if kind == "linear":
        return np.zeros(D)
    stats = oracles.least_squares_statistics(X, Y)
    Q = np.asarray(stats.Q + 0.1 * jnp.eye(D)[None]).sum(0)
    return np.linalg.solve(2 * Q, -np.asarray(stats.q).sum(0))


def value(kind, W):
    """F - f* at points ``[..., n, d]``."""
    best = losses(kind).value(jnp.tile(optimum(kind), (N, 1))).sum()
    points = jnp.asarray(W).reshape(-1, N, D)
    return np.asarray(jax.vmap(losses(kind).value)(points).sum(1) - best)


RUNS = [
    (kind, rho, first, decay, rounds)
    for kind in ("ridge", "absolute")
    for rho, first, decay in ((0.5, 0.3, 0.0), (1.0, 0.2, 0.5))
    for rounds in (10, 60)
]


def test_C11_gaps_of_linear_losses_are_known_exactly():
    W, _, eta = follow("linear", 0.7, 0.3, 0.5, 60)
    bounds = gap_bounds(GRAPH, W, np.zeros(D), 0.7, eta)
    np.testing.assert_allclose(value("linear", W[1:-1]), bounds, atol=1e-12)
    moved = gap_bounds(GRAPH, W, np.ones(D), 0.7, eta)  # any consensus is a minimum
    np.testing.assert_allclose(value("linear", W[1:-1]), moved, atol=1e-12)
    W, noise, eta = follow("linear", 0.7, 0.3, 0.5, 60, sigma=0.2)
    bounds = gap_bounds(GRAPH, W, np.zeros(D), 0.7, eta, noise)
    np.testing.assert_allclose(value("linear", W[1:-1]), bounds, atol=1e-11)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_C11_C12_gaps_are_below_their_bounds(run, sigma):
    kind, rho, *_, rounds = run
    W, noise, eta = follow(*run, sigma=sigma)
    args = GRAPH, W, optimum(kind), rho, eta, noise
    bounds = gap_bounds(*args)
    assert bounds.shape == (rounds,)
    assert (value(kind, W[1:-1]) <= bounds + 1e-10).all()
    # Convexity, and what the sum over all rounds drops.
    mean = W[1:-1].mean(0)
    assert value(kind, mean)[0] <= bounds.mean() + 1e-10
    assert bounds.mean() <= ergodic_bound(*args) + 1e-10


def test_C13_the_gap_of_the_mean_falls_as_one_over_T():
    gaps = []
    for rounds in (10, 60, 300):
        W, _, eta = follow("ridge", 0.5, 0.3, 0.0, rounds)
        gap = value("ridge", W[1:-1].mean(0))[0]
        assert gap <= ergodic_bound(GRAPH, W, optimum("ridge"), 0.5, eta)
        gaps.append(rounds * abs(gap))
    assert max(gaps[1:]) < 1.1 * gaps[0]
    assert gaps[2] < 1.1 * gaps[1]  # T times the gap has come to rest


def test_C14_the_price_of_noise_is_inverse_to_the_budget_and_above_what_it_costs():
    sensitivity, zeta = RNG.uniform(0.1, 0.3, N), 0.9
    price = [
        noise_bound(GRAPH, D, 0.5, sensitivity**2 / (2 * phi), zeta)
        for phi in (1e-2, 1e-1)
    ]
    np.testing.assert_allclose(price[0], 10 * price[1], rtol=1e-12)
    A = np.asarray(GRAPH.dense())
    minus = np.diag(A.sum(1)) - A
    low, high = np.linalg.eigvalsh(minus)[[1, -1]]
    plus = np.linalg.eigvalsh(np.diag(A.sum(1)) + A)[-1]
    by_hand = 4 * 0.5 * D * (high**2 + plus**2) / low
    by_hand *= (sensitivity**2).sum() / (2 * 1e-2 * (1 - zeta))
    np.testing.assert_allclose(price[0], by_hand, rtol=1e-6)
    # On average over noise the bound without its exact term holds with the price.
    left, rounds, sigma = [], 10, 0.1
    for seed in range(20):
        W, _, eta = follow("ridge", 0.5, 0.3, 0.0, rounds, sigma, seed)
        plain = ergodic_bound(GRAPH, W, optimum("ridge"), 0.5, eta)
        left.append(plain - value("ridge", W[1:-1].mean(0))[0])
    price = noise_bound(GRAPH, D, 0.5, np.full(N, sigma**2), 0.999) / rounds
    assert np.mean(left) + price > 0


def iteration(hessians, rho, eta):
    """The spectral radius of quadratic ADMM where duals sum to 0."""
    A = np.asarray(GRAPH.dense(), np.float64)
    L = np.kron(np.diag(A.sum(1)) - A, np.eye(D))
    F = np.zeros_like(L)
    for k in range(N):
        F[k * D : (k + 1) * D, k * D : (k + 1) * D] = hessians[k]
    inverse = np.diag(1 / (1 / eta + 2 * rho * np.repeat(A.sum(1), D)))
    # w+ = w - P (F w + gamma + rho L w), gamma+ = gamma + rho L w+, gamma = L^(1/2) g.
    values, vectors = np.linalg.eigh(L)
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    first = np.eye(N * D) - inverse @ (F + rho * L)
    top = np.hstack([first, -inverse @ root])
    low = np.hstack([rho * root @ first, np.eye(N * D) - rho * root @ inverse @ root])
    sizes = np.sort(np.abs(np.linalg.eigvals(np.vstack([top, low]))))
    return sizes[-D - 1]  # D directions of g are consensus and never move


def test_C8_the_margin_tells_where_quadratic_runs_are_stable():
    stats = oracles.least_squares_statistics(X, Y)
    F = 2 * np.asarray(stats.Q)
    highest = np.linalg.eigvalsh(F).max()
    for rho in (0.05, 0.5, 1.0):
        safe = 2 / highest
        assert stability_margin(GRAPH, F, rho, safe) > 0
        etas = safe * np.linspace(0.9, 4, 60)
        margins = np.array([stability_margin(GRAPH, F, rho, e) for e in etas])
        radii = np.array([iteration(F, rho, e) for e in etas])
        assert (radii[margins > 1e-9] < 1).all()
    with pytest.raises(ValueError, match="rho must be > 0"):
        stability_margin(GRAPH, F, 0.0, 0.1)
