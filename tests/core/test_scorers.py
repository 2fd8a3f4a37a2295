"""Scorers of public examples by what they are, and the audit of what they tell."""

import numpy as np
import pytest
from sklearn.datasets import load_iris

from fedjax_core.scorers import SCORERS, nearest, score

RNG = np.random.default_rng(0)
OWN = np.stack([RNG.normal(3, 1, (30, 2)), RNG.normal(-3, 1, (30, 2))])
MASK = np.ones((2, 30), bool)
MASK[1, 20:] = False
NEGATIVES = RNG.normal(0, 4, (40, 2))
# Like the first client's, like the second's, like nobody's.
QUERIES = np.array([[3.0, 3], [-3, -3], [20, -20]])


@pytest.mark.parametrize("name", SCORERS)
def test_scores_lie_in_0_to_1_and_know_a_client_by_its_own(name):
    got = score(name, OWN, MASK, NEGATIVES, QUERIES, seed=1)
    assert got.shape == (2, 3)
    assert got.dtype == np.float32
    assert (got > 0).all()
    assert (got <= 1).all()
    if name not in ("random", "equal"):
        assert got[0, 0] > got[0, 1]
        assert got[1, 1] > got[1, 0]
        assert got[:, 2].max() < min(got[0, 0], got[1, 1])
    np.testing.assert_array_equal(
        got, score(name, OWN, MASK, NEGATIVES, QUERIES, seed=1)
    )
    # What lies behind a client's examples is not looked at.
    other = np.where(MASK[..., None], OWN, 100)
    np.testing.assert_array_equal(
        got, score(name, other, MASK, NEGATIVES, QUERIES, seed=1)
    )


def test_equal_is_a_half_and_so_is_what_cannot_be_told():
    alike = np.repeat(QUERIES[:1], 4, 0)
    for name in ("equal", "isolation forest", "density"):
        got = score(name, OWN, MASK, NEGATIVES, alike)
        np.testing.assert_allclose(got, 0.5, rtol=1e-6)
    nobody = np.zeros((2, 30), bool)
    np.testing.assert_allclose(score("density", OWN, nobody, NEGATIVES, QUERIES), 0.5)
    one = np.arange(30) < np.array([[1], [30]])
    got = score("two-class SVM", OWN, one, NEGATIVES, QUERIES)
    np.testing.assert_allclose(got[0], 0.5, rtol=1e-6)


def test_densities_are_normal_kernels_at_the_queries():
    got = score("density", OWN[:1], MASK[:1], NEGATIVES, QUERIES)
    square = ((QUERIES[:, None] - OWN[0]) ** 2).sum(-1)
    expected = np.exp(-square / (2 * 0.5**2)).sum(1)
    expected = (expected - expected.min()) / np.ptp(expected)
    np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=2e-8)


def test_nearest_neighbours_are_by_cosine():
    queries = RNG.normal(size=(5, 3))
    own = RNG.normal(size=(9, 3))
    got = nearest(queries, own, 4)
    for q, rows in zip(queries, got, strict=True):
        cosine = own @ q / np.linalg.norm(own, axis=1) / np.linalg.norm(q)
        assert rows.tolist() == np.argsort(-cosine)[:4].tolist()
    assert nearest(3 * own, own, 1)[:, 0].tolist() == list(range(9))
    with pytest.raises(ValueError, match=r"k must be in \[1, 9\], got 10"):
        nearest(queries, own, 10)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="name must be one of 'two-class SVM'"):
        score("svm", OWN, MASK, NEGATIVES, QUERIES)
    with pytest.raises(ValueError, match="queries must be finite"):
        score("isolation forest", OWN, MASK, NEGATIVES, QUERIES * np.nan)
    with pytest.raises(ValueError, match="must have shapes"):
        score("equal", OWN, MASK, NEGATIVES, QUERIES[:, :1])


def test_densities_make_an_ensemble_of_constant_classifiers_right():
    # Iris on two principal axes, one class a client: the mean of all is right in 1/3.
    x, y = load_iris(return_X_y=True)
    x = np.asarray(x) - np.mean(x, axis=0)
    x = x @ np.linalg.svd(x, full_matrices=False)[2][:2].T
    own, mask = x.reshape(3, 50, 2), np.ones((3, 50), bool)
    certain = score("density", own, mask, x[:1], x)
    assert (certain.argmax(0) == y).mean() > 0.85
