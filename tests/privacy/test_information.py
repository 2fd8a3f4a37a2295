"""Mutual information by hand, and funnels by trying every map."""

import math

import numpy as np
import pytest

from fedjax_core.privacy import information

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
