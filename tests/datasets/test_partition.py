"""Partitions cover every example once and follow the distribution they name."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from scipy import stats

from fedjax_core.data import Dataset
from fedjax_core.datasets import digits, partition

NO_LABELS = np.zeros(0, int)


def make_dataset(y_train: ArrayLike, y_test: ArrayLike = NO_LABELS):
    """Every example has a number of its own, "id"."""
    y_train, y_test = np.asarray(y_train), np.asarray(y_test)
    n, m = len(y_train), len(y_test)
    return Dataset(
        train={"id": np.arange(n), "y": y_train},
        test={"id": np.arange(n, n + m), "y": y_test},
    )


def counts(packed, names):
    """[K, N]: how often client i holds class names[c]."""
    clients = [packed.client(i)["y"] for i in range(packed.num_clients)]
    return np.array([[np.sum(y == c) for y in clients] for c in names])


def assert_exact_cover(data, dataset):
    for packed, pool in zip(data.splits.values(), dataset.splits.values(), strict=True):
        order = np.argsort(packed.examples["id"])
        for name, array in pool.items():
            assert packed.examples[name].dtype == array.dtype
            np.testing.assert_array_equal(packed.examples[name][order], array)


def assert_same(a, b):
    for one, other in ((a.train, b.train), (a.test, b.test)):
        np.testing.assert_array_equal(one.offsets, other.offsets)
        for name in one.examples:
            np.testing.assert_array_equal(one.examples[name], other.examples[name])


@st.composite
def datasets(draw):
    """1 to 5 classes, ints or strings, each possibly missing from one split."""
    names = draw(st.sampled_from([np.arange(5), np.array(["a", "bb", "c", "d", "e"])]))
    num_classes = draw(st.integers(1, 5))
    sizes = st.lists(st.integers(0, 12), min_size=num_classes, max_size=num_classes)
    train, test = (np.repeat(names[:num_classes], draw(sizes)) for _ in range(2))
    return make_dataset(train, test)


alphas = st.floats(-3, 4).map(lambda power: 10.0**power)
seeds = st.integers(0, 2**32)


@settings(deadline=None)
@given(datasets(), st.integers(1, 20), seeds)
def test_iid_covers_every_example_once_with_equal_sizes(dataset, num_clients, seed):
    data = partition.iid(dataset, num_clients, seed)
    assert_exact_cover(data, dataset)
    for packed in data.splits.values():
        assert packed.num_clients == num_clients
        assert np.ptp(packed.sizes) <= 1


@settings(deadline=None)
@given(datasets(), st.integers(1, 20), alphas, seeds)
def test_dirichlet_covers_every_example_once(dataset, num_clients, alpha, seed):
    data = partition.dirichlet(dataset, num_clients, alpha, seed)
    assert data.num_clients == num_clients
    assert_exact_cover(data, dataset)


@settings(deadline=None)
@given(datasets(), st.integers(1, 20), alphas, seeds, st.data())
def test_min_size_holds_and_changes_train_only(dataset, num_clients, alpha, seed, data):
    most = len(dataset.train["y"]) // num_clients
    min_size = data.draw(st.integers(0, most))
    filled = partition.dirichlet(dataset, num_clients, alpha, seed, min_size)
    drawn = partition.dirichlet(dataset, num_clients, alpha, seed)
    assert_exact_cover(filled, dataset)
    assert filled.train.sizes.min() >= min_size
    before, after = (d.splits["test"].sizes for d in (drawn, filled))
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
    clients = np.repeat(np.arange(num_clients), data.train.sizes)
    shares = np.zeros((num_classes, num_clients))
    np.add.at(shares, (data.train.examples["y"], clients), 1 / size)

    share = stats.beta(alpha, (num_clients - 1) * alpha)
    variance, kurtosis = (float(m) for m in share.stats(moments="vk"))
    error = np.sqrt(variance / num_classes)
    assert np.abs(shares.mean(axis=0) - 1 / num_clients).max() < 5 * error
    error = variance * np.sqrt((kurtosis + 2) / num_classes)
    assert np.abs(shares.var(axis=0) - variance).max() < 5 * error


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_train_and_test_share_one_draw(alpha):
    y_train, y_test = np.repeat(np.arange(7), 900), np.repeat(np.arange(7), 300)
    data = partition.dirichlet(make_dataset(y_train, y_test), 10, alpha)
    train, test = (counts(s, range(7)) for s in data.splits.values())
    # Either is within one example of its share.
    assert np.abs(train / 900 - test / 300).max() <= 1 / 900 + 1 / 300


@settings(deadline=None)
@given(datasets(), st.integers(1, 10), alphas, seeds, st.integers(0, 1))
def test_class_counts_do_not_depend_on_the_order_of_rows(
    dataset, num_clients, alpha, seed, min_size
):
    rng = np.random.default_rng(0)
    shuffled = Dataset(
        *(
            {k: rng.permuted(v) if k == "y" else v for k, v in s.items()}
            for s in dataset.splits.values()
        )
    )
    if num_clients > len(dataset.train["y"]):
        min_size = 0
    names = np.unique(np.concatenate([dataset.train["y"], dataset.test["y"]]))
    a, b = (
        partition.dirichlet(d, num_clients, alpha, seed, min_size)
        for d in (dataset, shuffled)
    )
    np.testing.assert_array_equal(counts(a.train, names), counts(b.train, names))
    np.testing.assert_array_equal(counts(a.test, names), counts(b.test, names))


def test_which_row_of_a_class_a_client_gets_is_random():
    # One class, two clients: of 200 rows client 0 gets about half from the first half.
    # Hypergeometric, standard deviation at most 3.6; six of them are allowed.
    data = partition.dirichlet(make_dataset(np.zeros(200, int)), 2, alpha=1e4)
    ids = data.train.client(0)["id"]
    assert abs(np.sum(ids < 100) - len(ids) / 2) < 22


def test_examples_of_a_client_are_not_sorted_by_class():
    dataset = make_dataset(np.repeat(np.arange(10), 50))
    for data in (partition.iid(dataset, 2), partition.dirichlet(dataset, 2, 100.0)):
        y = data.train.client(0)["y"]
        assert np.any(np.diff(y) < 0)


@pytest.mark.parametrize(
    "split",
    [partition.iid, lambda d, n, seed: partition.dirichlet(d, n, 0.3, seed, 2)],
    ids=["iid", "dirichlet"],
)
def test_the_seed_decides_and_the_global_generator_does_not(split):
    dataset = make_dataset(np.arange(60) % 3, np.arange(30) % 3)
    first = split(dataset, 5, seed=1)
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002  # pyright: ignore
    assert_same(first, split(dataset, 5, seed=1))
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002  # pyright: ignore
    other = split(dataset, 5, seed=2)
    assert not np.array_equal(first.train.examples["id"], other.train.examples["id"])


def test_digits_keep_their_arrays():
    data = partition.dirichlet(digits.load(), num_clients=20, alpha=0.3, min_size=5)
    assert data.train.sizes.min() >= 5
    assert sum(split.num_examples for split in data.splits.values()) == 1797
    assert data.train.client(0)["x"].dtype == np.float32
    assert data.train.client(0)["x"].shape[1:] == (64,)


def test_impossible_arguments_are_refused():
    dataset = make_dataset([0, 1, 1], [0])
    with pytest.raises(ValueError, match=r"3 train examples, got 2 \* 2"):
        partition.dirichlet(dataset, 2, 1.0, min_size=2)
    with pytest.raises(ValueError, match="min_size must be >= 0"):
        partition.dirichlet(dataset, 2, 1.0, min_size=-1)
    with pytest.raises(ValueError, match="alpha must be > 0"):
        partition.dirichlet(dataset, 2, 0.0)
    with pytest.raises(ValueError, match="num_clients must be >= 1"):
        partition.iid(dataset, 0)
    with pytest.raises(ValueError, match="label must be one of 'id', 'y', got 'z'"):
        partition.dirichlet(dataset, 2, 1.0, label="z")


@pytest.mark.parametrize(
    ("y_train", "y_test", "error"),
    [
        ([0.0, 1.0], [1.0], TypeError),
        ([0, 1], ["1"], TypeError),
        ([[0], [1]], [[1]], ValueError),
    ],
)
def test_labels_that_are_not_classes_are_refused(y_train, y_test, error):
    with pytest.raises(error, match="y must be"):
        partition.dirichlet(make_dataset(y_train, y_test), 2, 1.0)


@pytest.mark.parametrize("split", [partition.iid, partition.dirichlet])
def test_no_row_is_dropped_in_silence(split):
    dataset = Dataset(
        {"x": np.zeros(5), "y": np.zeros(4, int)}, {"y": np.zeros(1, int)}
    )
    arguments = (2,) if split is partition.iid else (2, 1.0)
    with pytest.raises(ValueError, match="equal numbers of rows"):
        split(dataset, *arguments)
