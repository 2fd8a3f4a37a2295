"""Log-normal and geometric sizes are those of their formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.datasets.partition_helpers import (
    assert_exact_cover,
    datasets,
    make_dataset,
    seeds,
)

from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import partition
from fedjax_core.datasets.partition._sizes import geometric_shares


def test_log_normal_sizes_are_log_normal():
    # 1,000 examples per client: rounding is far below the spread. The logarithms minus
    # their mean are normal with deviation sigma; Kolmogorov-Smirnov at 1e-3, with the
    # mean fitted and so conservative.
    for sigma in (0.3, 1.0):
        n = np.arange(500_000, dtype=np.int32)
        data = partition.log_normal(Dataset({"x": n}, {"x": n[:500]}), 500, sigma, 3)
        logs = np.log(data.train.sizes)
        assert (
            stats.kstest(logs - logs.mean(), stats.norm(scale=sigma).cdf).pvalue > 1e-3
        )
        assert abs(logs.std() - sigma) < 5 * sigma / np.sqrt(2 * 500)
        assert np.abs(data.test.sizes - data.train.sizes / 1000).max() < 1  # pyright: ignore


@settings(deadline=None)
@given(datasets(), st.integers(1, 20), st.floats(0, 1e308), seeds, st.integers(0, 2))
def test_log_normal_keeps_a_minimum_size(dataset, num_clients, sigma, seed, min_size):
    if num_clients * min_size > len(dataset.train["y"]):
        with pytest.raises(ValueError, match="min_size must leave"):
            partition.log_normal(dataset, num_clients, sigma, seed, min_size)
        return
    data = partition.log_normal(dataset, num_clients, sigma, seed, min_size)
    assert_exact_cover(data, dataset)
    assert data.train.sizes.min() >= min_size


def test_no_spread_means_equal_sizes():
    data = partition.log_normal(make_dataset(np.zeros(100, int)), 7, 0.0)
    assert np.ptp(data.train.sizes) <= 1


def test_balancedness_has_the_published_shares():
    # Sattler, derived values: rho_1 and rho_10 of 10, largest to smallest of 200.
    rho = geometric_shares(10, 0.9)
    assert rho[0] == pytest.approx(0.1481805940, abs=5e-11)
    assert rho[9] == pytest.approx(0.0635339933, abs=5e-11)
    rho = geometric_shares(200, 0.9)
    assert rho.max() / rho.min() == pytest.approx(181.0, abs=0.05)


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0, 1, exclude_min=True))
def test_balancedness_shares_fall_and_sum_to_one(num_clients, gamma):
    rho = geometric_shares(num_clients, gamma)
    assert abs(rho.sum() - 1) < 1e-12
    assert np.all(np.diff(rho) <= 1e-17)
    assert rho.min() >= 0.1 / num_clients - 1e-15
    i = np.arange(1, num_clients + 1)
    with np.errstate(under="ignore", invalid="ignore", divide="ignore"):
        printed = 0.1 / num_clients + 0.9 * gamma**i / np.sum(gamma**i)
    if np.all(np.isfinite(printed)) and gamma > 1e-3:
        np.testing.assert_allclose(rho, printed, rtol=1e-9)


@settings(deadline=None)
@given(
    datasets(),
    st.integers(1, 20),
    st.floats(0.01, 1),
    st.none() | st.integers(1, 3),
    seeds,
)
def test_sizes_are_the_shares_rounded(dataset, num_clients, gamma, classes, seed):
    _, totals = np.unique(dataset.train["y"], return_counts=True)
    if classes is not None and classes > len(totals):
        return
    data = partition.balancedness(dataset, num_clients, gamma, classes, seed)
    assert_exact_cover(data, dataset)
    expected = geometric_shares(num_clients, gamma) * totals.sum()
    assert np.all(np.abs(data.train.sizes - expected) < 1 + 1e-9)


@pytest.mark.parametrize("gamma", [0.8, 0.9, 0.98, 1.0])
@pytest.mark.parametrize("classes", [1, 2, 5, 10])
def test_clients_take_few_classes_and_equally_many_of_each(gamma, classes):
    dataset = make_dataset(np.repeat(np.arange(10), 600))
    data = partition.balancedness(dataset, 20, gamma, classes)
    matrix = data.label_counts()
    held = (matrix > 0).sum(axis=1)
    possible = np.ceil(data.train.sizes / 600)  # a client may be larger than a class
    assert np.all(held >= np.minimum(np.maximum(classes, possible), data.train.sizes))
    # Only a class that is used up makes a client begin another.
    assert np.mean(held == classes) >= 0.6
    for row in matrix[held == classes][:5]:
        assert np.ptp(row[row > 0]) <= 1


def test_equal_sizes_of_as_many_classes_as_there_are_is_nearly_iid():
    dataset = make_dataset(np.repeat(np.arange(10), 600))
    matrix = partition.balancedness(dataset, 20, 1.0, 10).label_counts()
    assert np.all(matrix == 30)


def test_impossible_arguments_are_refused():
    dataset = make_dataset([0, 1, 1], [0])
    for gamma in (0.0, -0.5, 1.1, np.nan):
        with pytest.raises(ValueError, match="gamma must be"):
            partition.balancedness(dataset, 2, gamma)
    with pytest.raises(ValueError, match=r"classes_per_client must be in \[1, 2\]"):
        partition.balancedness(dataset, 2, 0.9, 3)
    with pytest.raises(ValueError, match="classes_per_client must be >= 1"):
        partition.balancedness(dataset, 2, 0.9, 0)
    with pytest.raises(ValueError, match="sigma must be >= 0"):
        partition.log_normal(dataset, 2, -1.0)
    with pytest.raises(ValueError, match="min_size must be >= 0"):
        partition.log_normal(dataset, 2, 1.0, min_size=-1)


def test_all_clients_have_the_common_examples_beside_their_own():
    n = np.arange(200, dtype=np.int32)
    pooled = Dataset({"x": n, "y": n % 10}, {"x": n[:20], "y": n[:20] % 10})

    def one_class(rest):
        return partition.classes_per_client(rest, num_clients=10, num_classes=1)

    data = partition.shared(pooled, one_class, 0.1, seed=3)
    everyone = set.intersection(*(set(data.train.client(i)["x"]) for i in range(10)))
    assert len(everyone) == 20
    own = [set(data.train.client(i)["x"]) - everyone for i in range(10)]
    assert set.union(*own) | everyone == set(n)
    assert sum(map(len, own)) == 180
    for i, mine in enumerate(own):
        assert len({x % 10 for x in mine}) == 1
        part = data.train.client(i)
        assert len(part["x"]) == len(mine) + 20
        np.testing.assert_array_equal(part["y"], part["x"] % 10)
    assert data.test is not None
    assert data.test.num_examples == 20
    again = partition.shared(pooled, one_class, 0.1, seed=4).train.client(0)["x"]
    assert not set(data.train.client(0)["x"]) >= set(again)
    with pytest.raises(ValueError, match="fraction must be > 0 and < 1"):
        partition.shared(pooled, one_class, 1.0)
