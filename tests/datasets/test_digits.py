"""The digits are those of scikit-learn, split class by class."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedjax_core.datasets import digits

# Test part of the UCI data set, as its documentation counts it.
COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def rows(split):
    return np.column_stack([split["x"] * 16, split["y"]]).astype(int)


def test_train_and_test_are_the_original_split_in_two():
    dataset = digits.load()
    assert dataset.train["x"].dtype == dataset.test["x"].dtype == np.float32
    assert dataset.train["y"].dtype == dataset.test["y"].dtype == np.int32
    pixels, labels = load_digits(return_X_y=True)
    original = np.column_stack([pixels, labels]).astype(int)
    got = np.concatenate([rows(dataset.train), rows(dataset.test)])
    assert got.shape == (1797, 65)
    np.testing.assert_array_equal(
        got[np.lexsort(got.T)], original[np.lexsort(original.T)]
    )


def test_pixels_run_from_paper_0_to_ink_1():
    x = digits.load().train["x"]
    assert x.min() == 0
    assert x.max() == 1
    image = x.mean(axis=0).reshape(8, 8)
    assert image[:, 0].max() < 0.1 < 0.5 < image[3:5, 3:5].mean()


@pytest.mark.parametrize("test_fraction", [0.0, 0.2, 0.5, 1.0])
def test_every_class_gives_its_share_to_test(test_fraction):
    dataset = digits.load(test_fraction)
    train, test = (np.bincount(s["y"], minlength=10) for s in dataset.splits.values())
    np.testing.assert_array_equal(train + test, COUNTS)
    assert np.abs(test - test_fraction * np.array(COUNTS)).max() <= 0.5
    assert dataset.train["x"].shape == (train.sum(), 64)
    assert dataset.test["x"].shape == (test.sum(), 64)


def test_the_split_depends_on_the_seed_and_on_nothing_else():
    first = digits.load(seed=3)
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002  # pyright: ignore
    again = digits.load(seed=3)
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002  # pyright: ignore
    for a, b in zip(first.splits.values(), again.splits.values(), strict=True):
        np.testing.assert_array_equal(rows(a), rows(b))
    assert not np.array_equal(first.test["x"], digits.load(seed=4).test["x"])


@pytest.mark.parametrize("test_fraction", [-0.1, 1.5, float("nan")])
def test_impossible_fractions_are_refused(test_fraction):
    with pytest.raises(ValueError, match="test_fraction must be in"):
        digits.load(test_fraction)


def test_impossible_seeds_are_refused():
    with pytest.raises(ValueError, match=r"seed must be >= 0 and < 2.*, got -1"):
        digits.load(seed=-1)
    with pytest.raises(TypeError, match="seed must be an int, got 'a'"):
        digits.load(seed="a")  # pyright: ignore
