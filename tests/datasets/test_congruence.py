"""Who can share a model in the toy problems, by fitting one."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from fedjax_core.datasets.congruence import random_gradients, two_groups


def accuracies(kind, make):
    """Of one model for all, on test; and the worst of one for each group."""
    data, group = two_groups(kind, num_clients=6, size=40, seed=1)
    train, test = data.train.examples, data.splits["test"].examples
    of_row = np.repeat(group, data.train.sizes)
    rows = [np.ones(len(of_row), bool), of_row == 0, of_row == 1]
    return [
        make().fit(train["x"][r], train["y"][r]).score(test["x"][r], test["y"][r])
        for r in rows
    ]


@pytest.mark.parametrize(
    ("kind", "line", "any_model"),
    [("congruent", True, True), ("xor", False, True), ("conflicting", False, False)],
)
def test_groups_alone_are_separable_and_together_as_said(kind, line, any_model):
    for make, fits in (
        (LogisticRegression, line),
        (lambda: KNeighborsClassifier(5), any_model),
    ):
        together, first, second = accuracies(kind, make)
        assert first == second == 1
        assert (together > 0.99) == fits
        assert fits or together < 0.8


def test_toys_are_drawn_from_their_seed():
    data, group = two_groups("xor", num_clients=4, size=7, seed=3)
    np.testing.assert_array_equal(group, [0, 0, 1, 1])
    np.testing.assert_array_equal(data.train.sizes, 7)
    same, other = (
        two_groups("xor", num_clients=4, size=7, seed=s).data for s in (3, 4)
    )
    np.testing.assert_array_equal(same.train.examples["x"], data.train.examples["x"])
    assert (other.train.examples["x"] != data.train.examples["x"]).any()
    with pytest.raises(ValueError, match="num_clients must be even, got 3"):
        two_groups("xor", num_clients=3)
    with pytest.raises(ValueError, match="kind must be one of"):
        two_groups("linear")  # type: ignore[arg-type]


def test_random_gradients_balance_and_have_the_noise_asked_for():
    clean, truth = random_gradients(4, 0.0, clients_each=2, dim=30, seed=1)
    np.testing.assert_array_equal(truth, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_allclose(clean.sum(0), 0, atol=1e-12)
    np.testing.assert_array_equal(clean[::2], clean[1::2])
    noisy, _ = random_gradients(4, 0.7, clients_each=2, dim=30, seed=1)
    noise = np.linalg.norm(noisy - clean, axis=1) / np.linalg.norm(clean, axis=1)
    np.testing.assert_allclose(noise, 0.7)
    with pytest.raises(ValueError, match="num_distributions must be in"):
        random_gradients(1, 0.1)
