"""The natural split takes clients from the data."""

import numpy as np
import pytest
from tests.datasets.partition_helpers import assert_exact_cover, make_dataset

from fedjax_core.data.packed import Dataset
from fedjax_core.datasets import partition


def with_key(dataset, **keys):
    """Adds "who" to the splits named."""
    return Dataset(**{k: {**v, "who": keys[k]} for k, v in dataset.splits.items()})


def test_clients_are_the_keys_in_order():
    plain = make_dataset([0, 1, 2, 3, 4], [5, 6], [7])
    dataset = with_key(
        plain,
        train=np.array(["bo", "al", "bo", "di", "al"]),
        test=np.array(["di", "cy"]),
        validation=np.array(["al"]),
    )
    data = partition.natural(dataset, "who")
    assert data.client_ids == ("al", "bo", "cy", "di")
    assert_exact_cover(data, plain)
    assert "who" not in data.train.examples
    held = [data.train.client(i)["y"].tolist() for i in range(4)]
    assert held == [[1, 4], [0, 2], [], [3]]
    assert data.test is not None
    assert data.test.sizes.tolist() == [0, 0, 1, 1]
    assert data.validation is not None
    assert data.validation.sizes.tolist() == [1, 0, 0, 0]


def test_number_keys_are_in_order_of_size():
    dataset = with_key(
        make_dataset([0, 1, 2], []), train=np.array([10, 2, 10]), test=np.zeros(0, int)
    )
    assert partition.natural(dataset, "who").client_ids == ("2", "10")


def test_two_halves_of_the_digits():
    # The congruent pair of Sattler: two clients, digits 0-4 and 5-9.
    y = np.random.default_rng(0).integers(0, 10, 200)
    dataset = with_key(make_dataset(y, y[:50]), train=y // 5, test=y[:50] // 5)
    data = partition.natural(dataset, "who")
    for split in data.splits.values():
        assert set(split.client(0)["y"]) == set(range(5))
        assert set(split.client(1)["y"]) == set(range(5, 10))


def test_impossible_keys_are_refused():
    dataset = make_dataset([0, 1], [0])
    with pytest.raises(ValueError, match="got 'who'"):
        partition.natural(dataset, "who")
    mixed = with_key(dataset, train=np.array([0, 1]), test=np.array(["0"]))
    with pytest.raises(TypeError, match="who must be ints or text"):
        partition.natural(mixed, "who")
