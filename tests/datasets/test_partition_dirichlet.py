"""Dirichlet partitions follow the distribution they name."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.datasets.partition_helpers import (
    alphas,
    assert_exact_cover,
    counts,
    datasets,
    make_dataset,
    mean_distance,
    seeds,
)

from fedjax_core.datasets import digits, partition
from fedjax_core.datasets.partition._dirichlet import equal_shares

THREE = [
    partition.dirichlet,
    partition.dirichlet_by_client,
    partition.alternating_dirichlet,
]


@settings(deadline=None)
@given(datasets(), st.integers(1, 20), alphas, seeds, st.data())
def test_min_size_holds_and_changes_train_only(dataset, num_clients, alpha, seed, data):
    most = len(dataset.train["y"]) // num_clients
    min_size = data.draw(st.integers(0, most))
    filled = partition.dirichlet(dataset, num_clients, alpha, seed, min_size)
    drawn = partition.dirichlet(dataset, num_clients, alpha, seed)
    assert_exact_cover(filled, dataset)
    assert filled.train.sizes.min() >= min_size
    for name in list(dataset.splits)[1:]:
        before, after = (d.splits[name].sizes for d in (drawn, filled))
        np.testing.assert_array_equal(before, after)
    # Clients below min_size get what they lack and no more; nobody falls below it.
    small = drawn.train.sizes < min_size
    assert np.all(filled.train.sizes[small] == min_size)
    assert np.all(filled.train.sizes[~small] <= drawn.train.sizes[~small])


def test_min_size_takes_from_the_largest_clients_first():
    dataset = make_dataset(np.repeat(np.arange(10), 100))
    drawn = partition.dirichlet(dataset, 10, alpha=0.1).train.sizes
    filled = partition.dirichlet(dataset, 10, alpha=0.1, min_size=50).train.sizes
    assert drawn.min() < 50
    donors = filled < drawn
    assert filled[donors].min() >= filled[~donors].max() - 1
    assert np.ptp(filled[donors]) <= 1


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 1e4, 1e300])
def test_no_alpha_is_too_small_or_too_large(alpha):
    dataset = make_dataset(np.repeat([0, 1], 500))
    for seed in range(20):
        data = partition.dirichlet(dataset, 10, alpha, seed)
        matrix = counts(data.train, [0, 1])
        assert matrix.sum() == 1000
        if alpha < 1:  # one client holds (nearly) the whole class
            assert np.all(matrix.max(axis=1) >= 250)
        else:  # 50 each, but for rounding and a standard deviation of at most 1 %
            assert 46 <= matrix.min() <= matrix.max() <= 54


@pytest.mark.parametrize("alpha", [5e-324, 1e-308, 1.7e308])
@pytest.mark.parametrize("split", THREE)
def test_the_ends_of_the_floats_are_alphas_too(split, alpha):
    dataset = make_dataset(np.repeat([0, 1, 2], [70, 20, 1]))
    assert_exact_cover(split(dataset, 7, alpha), dataset)


def test_nearly_equal_shares_are_not_rounded_up_for_the_same_clients():
    # 100 classes of 15 for 100 clients: a client's size has mean 15 and, with rounding
    # that is independent between classes, variance 100 * 0.15 * 0.85 = 3.6 ** 2. Six
    # standard deviations are allowed; rounded alike in every class it is 0 or 100.
    dataset = make_dataset(np.repeat(np.arange(100), 15))
    sizes = partition.dirichlet(dataset, 100, alpha=1e4).train.sizes
    assert np.abs(sizes - 15).max() <= 6 * 3.6


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0, 50.0])
def test_shares_have_the_mean_and_variance_of_a_dirichlet(alpha):
    # A share is Beta(alpha, (N - 1) alpha); classes are independent draws. Bounds are 5
    # standard errors: in 32 comparisons a correct sampler fails for 2e-5 of the seeds.
    # Rounding to 1 / 500 adds at most 1e-6 to a variance, far below its standard error.
    num_classes, num_clients, size = 1000, 4, 500
    labels = np.repeat(np.arange(num_classes), size)
    data = partition.dirichlet(make_dataset(labels), num_clients, alpha)
    drawn = data.label_counts().T / size

    share = stats.beta(alpha, (num_clients - 1) * alpha)
    variance, kurtosis = (float(m) for m in share.stats(moments="vk"))
    error = np.sqrt(variance / num_classes)
    assert np.abs(drawn.mean(axis=0) - 1 / num_clients).max() < 5 * error
    error = variance * np.sqrt((kurtosis + 2) / num_classes)
    assert np.abs(drawn.var(axis=0) - variance).max() < 5 * error


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_train_and_test_share_one_draw(alpha):
    y_train, y_test = np.repeat(np.arange(7), 900), np.repeat(np.arange(7), 300)
    data = partition.dirichlet(make_dataset(y_train, y_test), 10, alpha)
    train, test = (counts(s, range(7)) for s in data.splits.values())
    # Either is within one example of its share.
    assert np.abs(train / 900 - test / 300).max() <= 1 / 900 + 1 / 300


def test_which_row_of_a_class_a_client_gets_is_random():
    # One class, two clients: of 200 rows client 0 gets about half from the first half.
    # Hypergeometric, standard deviation at most 3.6; six of them are allowed.
    data = partition.dirichlet(make_dataset(np.zeros(200, int)), 2, alpha=1e4)
    ids = data.train.client(0)["id"]
    assert abs(np.sum(ids < 100) - len(ids) / 2) < 22


def test_examples_of_a_client_are_not_sorted_by_class():
    data = partition.dirichlet(make_dataset(np.repeat(np.arange(10), 50)), 2, 100.0)
    assert np.any(np.diff(data.train.client(0)["y"]) < 0)


def test_a_validation_split_follows_train():
    y = np.repeat(np.arange(7), 900)
    data = partition.dirichlet(make_dataset(y, y[:0], y[::9]), 10, 0.3)
    train, _, validation = (counts(s, range(7)) for s in data.splits.values())
    assert np.abs(train / 900 - validation / 100).max() <= 1 / 900 + 1 / 100


def test_capped_clients_get_nothing_of_later_classes():
    dataset = make_dataset(np.repeat(np.arange(10), 100))
    data = partition.dirichlet(dataset, 10, 0.3, capped=True)
    matrix = counts(data.train, range(10))
    before = np.cumsum(matrix, axis=0) - matrix
    assert np.all(matrix[before >= 100] == 0)
    assert np.any(before >= 100)
    free = partition.dirichlet(dataset, 10, 0.3)
    assert data.train.sizes.std() < free.train.sizes.std()


@pytest.mark.parametrize("split", THREE)
def test_distance_to_the_pooled_labels_falls_with_alpha(split):
    dataset = make_dataset(np.repeat(np.arange(10), 1000))
    distances = [
        np.mean([mean_distance(split(dataset, 20, a, s)) for s in range(5)])
        for a in (1e-3, 0.01, 0.1, 1.0, 10.0, 100.0, 1e4)
    ]
    assert np.all(np.diff(distances) < 0)
    assert distances[0] > 0.8
    assert distances[-1] < 0.08


@pytest.mark.parametrize("prior", ["uniform", "pooled"])
@pytest.mark.parametrize("alpha", [0.2, 1.0, 30.0])
def test_the_first_client_draws_from_a_dirichlet_over_classes(alpha, prior: Any):
    # Share k of a client of s examples is Dirichlet-multinomial: with parameters a_k of
    # sum A and m = a_k / A, mean m and variance m (1 - m) (s + A) / (s (1 + A)). It is
    # exact as long as no class is used up, so for the first client. Bounds are 5
    # standard errors, the variance's from the samples: 24 comparisons.
    totals, num_clients, repeats = np.array([50, 100, 150, 200]), 10, 500
    dataset = make_dataset(np.repeat(np.arange(4), totals))
    size = totals.sum() // num_clients
    assert size <= totals.min()
    first = np.array(
        [
            partition.dirichlet_by_client(
                dataset, num_clients, alpha, seed, prior=prior
            ).label_counts()[0]
            / size
            for seed in range(repeats)
        ]
    )
    a = np.full(4, alpha) if prior == "uniform" else alpha * totals / totals.sum()
    m, total = a / a.sum(), a.sum()
    variance = m * (1 - m) * (size + total) / (size * (1 + total))
    assert np.all(np.abs(first.mean(0) - m) < 5 * np.sqrt(variance / repeats))
    error = np.sqrt(np.var((first - m) ** 2, axis=0) / repeats)
    assert np.all(np.abs(((first - m) ** 2).mean(0) - variance) < 5 * error)


def test_clients_with_a_distribution_of_their_own_are_of_equal_size():
    dataset = make_dataset(np.repeat(np.arange(3), [5, 500, 50]))
    for alpha in (1e-3, 1.0, 1e4):
        data = partition.dirichlet_by_client(dataset, 7, alpha)
        assert np.ptp(data.train.sizes) <= 1


def test_large_alpha_means_the_prior():
    # Half of the first client's 100 examples, or a tenth; standard deviations 5 and 3.
    dataset = make_dataset(np.repeat([0, 1], [9000, 1000]))
    uniform = partition.dirichlet_by_client(dataset, 100, 1e6)
    assert abs(uniform.label_counts()[0, 1] - 50) <= 25
    pooled = partition.dirichlet_by_client(dataset, 100, 1e6, prior="pooled")
    assert abs(pooled.label_counts()[0, 1] - 10) <= 15


# Sattler: checked for these (M, K, a); the mean largest class share is given for three.
SINKHORN = [(20, 10, 0.1, 0.63), (20, 10, 100, 0.12), (100, 10, 0.01, 0.92)]


@pytest.mark.parametrize(
    ("num_clients", "num_classes", "alpha"),
    [*(case[:3] for case in SINKHORN), (10, 10, 1)],
)
def test_rows_and_columns_of_the_shares_have_their_sums(
    num_clients, num_classes, alpha
):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        p = equal_shares(rng, num_clients, alpha, np.full(num_classes, 500))
        assert np.abs(p.sum(axis=1) - num_classes / num_clients).max() < 1e-9
        assert np.abs(p.sum(axis=0) - 1).max() < 1e-12
        assert p.min() >= 0


@pytest.mark.parametrize(("num_clients", "num_classes", "alpha", "largest"), SINKHORN)
def test_the_largest_class_of_a_client_has_the_published_share(
    num_clients, num_classes, alpha, largest
):
    # The published numbers are means over one draw of a matrix; over 20 draws the
    # standard error is below 0.01, and the printed one may be off by its own deviation.
    drawn = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        p = equal_shares(rng, num_clients, alpha, np.full(num_classes, 500))
        drawn.append((p.max(axis=1) / p.sum(axis=1)).mean())
    assert abs(np.mean(drawn) - largest) < 2 * np.std(drawn) + 0.01


def test_classes_of_unequal_size_give_clients_of_equal_size():
    totals = np.array([100, 900, 400, 50])
    p = equal_shares(np.random.default_rng(0), 20, 0.3, totals)
    np.testing.assert_allclose(p @ totals, totals.sum() / 20, rtol=1e-9)
    dataset = make_dataset(np.repeat(np.arange(4), totals))
    sizes = partition.alternating_dirichlet(dataset, 20, 0.3).train.sizes
    # Each of 4 classes is rounded up or down.
    assert np.abs(sizes - totals.sum() / 20).max() < 4


def test_a_guide_to_the_concentration():
    # Sattler: 100 gives nearly identical label distributions, 0.01 mostly one class.
    dataset = make_dataset(np.repeat(np.arange(10), 1000))
    even = partition.alternating_dirichlet(dataset, 20, 100).label_counts()
    assert np.abs(even - 50).max() < 25
    skewed = partition.alternating_dirichlet(dataset, 20, 0.01).label_counts()
    assert np.median(skewed.max(axis=1) / skewed.sum(axis=1)) > 0.5


def test_digits_can_be_given_a_minimum_size():
    data = partition.dirichlet(digits.load(), num_clients=20, alpha=0.3, min_size=5)
    assert data.train.sizes.min() >= 5
    kept = data.subset(np.flatnonzero(data.train.sizes > 10))
    assert kept.train.sizes.min() > 10


def test_impossible_arguments_are_refused():
    dataset = make_dataset([0, 1, 1], [0])
    with pytest.raises(ValueError, match=r"3 train examples, got 2 \* 2"):
        partition.dirichlet(dataset, 2, 1.0, min_size=2)
    with pytest.raises(ValueError, match="min_size must be >= 0"):
        partition.dirichlet(dataset, 2, 1.0, min_size=-1)
    for split in THREE:
        for alpha in (0.0, -1.0, np.nan, np.inf):
            with pytest.raises(ValueError, match="alpha must be > 0"):
                split(dataset, 2, alpha)
    with pytest.raises(ValueError, match="prior must be one of"):
        partition.dirichlet_by_client(dataset, 2, 1.0, prior="none")  # pyright: ignore
