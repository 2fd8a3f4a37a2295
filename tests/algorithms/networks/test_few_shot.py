"""A detector per category."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.algorithms.networks import few_shot
from fedjax_core.networks import builders
from fedjax_core.networks.gtvmin import closed_form
from fedjax_core.networks.oracles import quadratic

pytestmark = pytest.mark.usefixtures("x64")


def dense_solution(graph, Q, q, alpha):
    """The solution by NumPy; for many small networks."""
    Q, q, A = np.asarray(Q), np.asarray(q), np.asarray(graph.dense())
    n, d = q.shape
    whole = alpha * np.kron(np.diag(A.sum(1)) - A, np.eye(d))
    for i in range(n):
        whole[i * d : (i + 1) * d, i * d : (i + 1) * d] += Q[i]
    return np.linalg.solve(whole, -q.ravel() / 2).reshape(n, d)


def test_detectors_are_fitted_by_balanced_least_squares():
    X = np.random.default_rng(22).normal(size=(7, 2))
    label = np.array([0, 0, 0, 1, 1, 3, 3])
    stats = few_shot.one_vs_rest(X, label, 4)
    w = np.array([0.3, -1.2])
    values = quadratic(*stats).value(jnp.tile(jnp.asarray(w)[None], (4, 1)))
    for c in (0, 1, 3):
        own = label == c
        inside, outside = (
            np.mean((1 - X[own] @ w) ** 2),
            np.mean((-1 - X[~own] @ w) ** 2),
        )
        assert float(values[c]) == pytest.approx((inside + outside) / 2)
    assert values[2] == 0


def test_edges_help_detectors_with_one_example():
    # T-C8: 3 families of 3 categories; one of each family has a single example. The
    # text promises a gain without a number. Stable is that rare detectors err less;
    # over 30 seeds they did so in all of them, from 0.335 to 0.259 in the mean. Telling
    # a rare category from its relatives, by the loudest detector, does not get better
    # (error 0.82 to 0.86), so nothing is asserted about it.
    def errors(seed, alpha):
        rng = np.random.default_rng(seed)
        family = np.repeat(np.arange(3), 3)
        centre = 1.5 * rng.normal(size=(3, 10))[family] + rng.normal(size=(9, 10))
        count = np.where(np.arange(9) % 3 == 0, 1, 8)
        label, test = np.repeat(np.arange(9), count), np.repeat(np.arange(9), 30)

        def draw(labels):
            noise = 1.5 * rng.normal(size=(len(labels), 10))
            return np.c_[centre[labels] + noise, np.ones(len(labels))]

        X, X_test = draw(label), draw(test)
        stats = few_shot.one_vs_rest(X, label, 9)
        # A little ridge makes every detector unique, with and without edges.
        Q = np.asarray(stats.Q) + 1e-3 * np.eye(11)
        W = dense_solution(families, Q, stats.q, alpha)
        fires = X_test @ W.T > 0
        detection = [
            (np.mean(~fires[test == c, c]) + np.mean(fires[test != c, c])) / 2
            for c in (0, 3, 6)
        ]
        wrong = np.asarray(few_shot.classify(W, X_test)) != test
        return np.mean(detection), wrong.mean()

    families = builders.stochastic_block((3, 3, 3), 1.0, 0.0)
    alone = np.array([errors(seed, 0.0) for seed in range(8)])
    tied = np.array([errors(seed, 1.0) for seed in range(8)])
    print("rare detectors, all categories:", alone.mean(0), "with edges", tied.mean(0))
    assert (tied[:, 0] < alone[:, 0]).all()
    assert tied[:, 0].mean() < alone[:, 0].mean() - 0.03


def test_a_category_without_examples_takes_its_neighbours_detector():
    rng = np.random.default_rng(23)
    X, label = rng.normal(size=(12, 3)), np.repeat([0, 1], 6)
    stats = few_shot.one_vs_rest(X, label, 3)
    W = closed_form(builders.chain(3), stats.Q, stats.q, 0.1, require_unique=True)
    np.testing.assert_allclose(W[2], W[1], atol=1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: few_shot.one_vs_rest(np.ones((2, 1)), np.array([0, 2]), 2), "label"),
        (
            lambda: few_shot.one_vs_rest(np.ones((2, 1)), np.array([0, 0]), 2),
            "two categories",
        ),
    ],
)
def test_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_detectors_refuse_features_that_are_not_finite():
    X = np.array([[1.0], [np.nan]])
    with pytest.raises(ValueError, match="X must be finite"):
        few_shot.one_vs_rest(X, np.array([0, 1]), 2)
