"""Flipped labels follow the transition matrix, and nothing else changes.

Seeds are fixed. Each statistical check would fail for 1 seed in 10,000 (`RARE`) if the
code is right.
"""

import numpy as np
import pytest
from numpy.typing import DTypeLike
from scipy import stats

from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets import label_noise

RARE = 1e-4
KINDS = [label_noise.symmetric, label_noise.pair]


def make_dataset(y, dtype: DTypeLike = np.int32):
    y = np.asarray(y, dtype)
    split = {"x": np.arange(len(y)), "y": y}
    return Dataset(train=split, test=dict(split), validation=dict(split))


def make_clients(sizes, num_classes=4):
    rng = np.random.default_rng(0)
    clients = [{"y": rng.integers(0, num_classes, n)} for n in sizes]
    ids = [f"client {i}" for i in range(len(sizes))]
    return FederatedData.from_lists(clients, clients, clients, client_ids=ids)


def transitions(clean, noisy, num_classes):
    """[K, K]: how often a true label (row) became an observed one (column)."""
    cells = np.ravel_multi_index((clean, noisy), (num_classes, num_classes))
    counts = np.bincount(cells, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.8])
def test_symmetric_has_its_transition_matrix(rate):
    num_classes, n = 5, 4000
    dataset = make_dataset(np.repeat(np.arange(num_classes), n))
    noisy, _ = label_noise.symmetric(dataset, rate, num_classes)
    counts = transitions(dataset.train["y"], noisy.train["y"], num_classes)
    matrix = np.full((num_classes, num_classes), rate / (num_classes - 1))
    np.fill_diagonal(matrix, 1 - rate)
    statistic = np.sum((counts - n * matrix) ** 2 / (n * matrix))
    assert stats.chi2.sf(statistic, num_classes * (num_classes - 1)) > RARE


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_pair_has_its_transition_matrix(rate):
    num_classes, n = 5, 4000
    dataset = make_dataset(np.repeat(np.arange(num_classes), n))
    noisy, _ = label_noise.pair(dataset, rate, num_classes)
    counts = transitions(dataset.train["y"], noisy.train["y"], num_classes)
    kept, moved = np.diag(counts), counts[np.arange(5), [1, 2, 3, 4, 0]]
    np.testing.assert_array_equal(kept + moved, n)
    statistic = np.sum((moved - n * rate) ** 2 / (n * rate * (1 - rate)))
    assert stats.chi2.sf(statistic, num_classes) > RARE


def test_flips_are_independent_of_one_another():
    # Neighbours in the row order: flips of the second do not depend on the first.
    dataset = make_dataset(np.zeros(40_000))
    _, flipped = label_noise.symmetric(dataset, 0.3, 10)
    # They agree with probability 0.3^2 + 0.7^2.
    agree = np.sum(flipped[::2] == flipped[1::2])
    assert stats.binomtest(int(agree), 20_000, 0.58).pvalue > RARE


@pytest.mark.parametrize("flip", KINDS)
def test_the_mask_says_what_changed_and_nothing_else_does(flip):
    dataset = make_dataset(np.arange(1000) % 10, np.uint8)
    before = dataset.train["y"].copy()
    noisy, flipped = flip(dataset, 0.3, 10)
    assert flipped.dtype == bool
    assert 0 < flipped.sum() < 1000
    np.testing.assert_array_equal(noisy.train["y"] != before, flipped)
    np.testing.assert_array_equal(dataset.train["y"], before)
    assert noisy.train["y"].dtype == np.uint8
    assert noisy.train["y"].max() <= 9
    assert noisy.train["x"] is dataset.train["x"]
    assert noisy.test is dataset.test
    assert noisy.validation is dataset.validation


@pytest.mark.parametrize("flip", KINDS)
def test_labels_do_not_overflow_their_dtype(flip):
    dataset = make_dataset(np.arange(256), np.uint8)
    noisy, flipped = flip(dataset, 0.49, 256)
    np.testing.assert_array_equal(noisy.train["y"] != dataset.train["y"], flipped)
    if flip is label_noise.pair:
        expected = np.roll(np.arange(256), -1)
        np.testing.assert_array_equal(noisy.train["y"][flipped], expected[flipped])


@pytest.mark.parametrize("flip", KINDS)
def test_clients_keep_everything_but_train_labels(flip):
    data = make_clients([5, 0, 30])
    noisy, flipped = flip(data, 0.4, 4)
    assert noisy.client_ids == data.client_ids
    np.testing.assert_array_equal(noisy.train.offsets, data.train.offsets)
    assert noisy.test is data.test
    assert noisy.validation is data.validation
    changed = noisy.train.examples["y"] != data.train.examples["y"]
    np.testing.assert_array_equal(changed, flipped)


@pytest.mark.parametrize("flip", KINDS)
def test_every_client_has_its_own_rate(flip):
    data = make_clients([5000, 5000, 0, 5000])
    rates = np.array([0.0, 0.1, 0.2, 0.45])
    _, flipped = flip(data, rates, 4)
    counts = np.add.reduceat(flipped, [0, 5000, 10_000])
    assert counts[0] == 0
    assert stats.binomtest(int(counts[1]), 5000, 0.1).pvalue > RARE
    assert stats.binomtest(int(counts[2]), 5000, 0.45).pvalue > RARE
    # Another rate for one client leaves the others' labels alone.
    other, _ = flip(data, [0.3, 0.1, 0.2, 0.45], 4)
    same, _ = flip(data, rates, 4)
    for i in (1, 3):
        one, two = (d.train.client(i)["y"] for d in (other, same))
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("flip", KINDS)
def test_rate_0_changes_nothing_and_higher_rates_keep_the_flips_of_lower_ones(flip):
    dataset = make_dataset(np.arange(500) % 7)
    clean, none = flip(dataset, 0, 7)
    assert not none.any()
    np.testing.assert_array_equal(clean.train["y"], dataset.train["y"])
    (low, few), (high, more) = (flip(dataset, rate, 7) for rate in (0.2, 0.4))
    assert np.all(more[few])
    np.testing.assert_array_equal(low.train["y"][few], high.train["y"][few])


@pytest.mark.parametrize("flip", KINDS)
def test_only_the_seed_decides(flip):
    dataset = make_dataset(np.arange(100) % 5)
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    one, two, three = (flip(dataset, 0.4, 5, seed)[1] for seed in (0, 0, 1))
    assert np.random.random() == expected  # noqa: NPY002
    np.testing.assert_array_equal(one, two)
    assert np.any(one != three)


def test_pair_asks_before_most_labels_are_wrong():
    dataset = make_dataset(np.arange(10_000) % 2)
    for rate in (0.5, 0.7):
        with pytest.raises(ValueError, match=rf"rate must be below 0.5, got {rate}"):
            label_noise.pair(dataset, rate, 2)
    _, flipped = label_noise.pair(dataset, 0.7, 2, keep_majority=False)
    assert stats.binomtest(int(flipped.sum()), 10_000, 0.7).pvalue > RARE


@pytest.mark.parametrize("flip", KINDS)
@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"rate": 1.0}, ValueError, r"rate must be in \[0, 1\), got 1.0"),
        ({"rate": -0.1}, ValueError, r"rate must be in \[0, 1\), got -0.1"),
        ({"rate": np.nan}, ValueError, r"rate must be in \[0, 1\), got nan"),
        ({"rate": [0.1, 0.2]}, ValueError, r"one per client, \[3\], got \[0.1, 0.2\]"),
        ({"num_classes": 1}, ValueError, "num_classes must be >= 2, got 1"),
        ({"num_classes": 3}, ValueError, r"y must be in 0..2 .* got 3"),
        ({"num_classes": 4.0}, TypeError, "num_classes must be an int"),
        ({"seed": -1}, ValueError, "seed must be >= 0 and < 2.*, got -1"),
        ({"seed": "a"}, TypeError, "seed must be an int, got 'a'"),
        ({"label": "z"}, ValueError, "label must be one of 'y', got 'z'"),
    ],
)
def test_rejects(flip, kwargs, error, match):
    with pytest.raises(error, match=match):
        flip(
            **(
                {"data": make_clients([9, 9, 9]), "rate": 0.1, "num_classes": 4}
                | kwargs
            )
        )


@pytest.mark.parametrize(
    ("labels", "error", "match"),
    [
        (np.array([-1, 0]), ValueError, r"y must be in 0..3 .* got -1"),
        (np.array(["a", "b"]), TypeError, "y must be ints, got <U1"),
        (np.array([True, False]), TypeError, "y must be ints, got bool"),
        (np.array([0, 1], np.int8), ValueError, r"holds 199 .* got int8"),
        (np.zeros((2, 1), int), ValueError, r"one label per row, got shape \(2, 1\)"),
    ],
)
def test_rejects_labels(labels, error, match):
    dataset = Dataset({"y": labels}, {"y": labels})
    with pytest.raises(error, match=match):
        label_noise.symmetric(dataset, 0.1, 200 if labels.dtype == np.int8 else 4)


def test_pooled_data_has_one_rate():
    with pytest.raises(ValueError, match=r"one number for pooled data, got \[0.1\]"):
        label_noise.symmetric(make_dataset([0, 1]), [0.1], 4)


@pytest.mark.parametrize("flip", KINDS)
def test_other_splits_are_as_noisy_if_asked(flip):
    data = make_clients([4000, 0, 4000])
    clean, _ = flip(data, [0.1, 0.0, 0.4], 4)
    noisy, _ = flip(data, [0.1, 0.0, 0.4], 4, noisy_test=True)
    np.testing.assert_array_equal(noisy.train.examples["y"], clean.train.examples["y"])
    wrong = {}
    for name in ("test", "validation"):
        split = getattr(noisy, name)
        wrong[name] = split.examples["y"] != getattr(data, name).examples["y"]
        for rate, flips in zip((0.1, 0.4), np.split(wrong[name], 2), strict=True):
            assert stats.binomtest(int(flips.sum()), 4000, rate).pvalue > RARE
    assert (wrong["test"] != wrong["validation"]).any()
    pooled, _ = flip(make_dataset(np.zeros(99)), 0.4, 4, noisy_test=True)
    assert pooled.test["y"].any()
    assert pooled.validation["y"].any()


def test_transition_matrices_are_doubly_stochastic_with_their_eigenvalues():
    n, rate = 20_000, 0.4
    dataset = make_dataset(np.repeat(np.arange(4), n))
    noisy, _ = label_noise.pair(dataset, rate, 4)
    shares = transitions(dataset.train["y"], noisy.train["y"], 4) / n
    roots = 1 - rate + rate * np.exp(2j * np.pi * np.arange(4) / 4)
    # 5 standard errors of a share, times at most 8 of them: fails for 1 seed in 10^5.
    wide = 5 * np.sqrt(rate * (1 - rate) / n) * 2
    found = np.linalg.eigvals(shares)
    for root in roots:
        assert np.abs(found - root).min() < wide
    np.testing.assert_allclose(shares.sum(0), 1, atol=wide)
    uniform, _ = label_noise.symmetric(dataset, 3 / 4, 4)
    shares = transitions(dataset.train["y"], uniform.train["y"], 4) / n
    np.testing.assert_allclose(shares, 1 / 4, atol=wide)
