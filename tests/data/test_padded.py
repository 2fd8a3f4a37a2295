"""Padded examples are the clients' own, and zeros behind them."""

import numpy as np

from fedjax_core import Packed
from fedjax_core.data.padded import pad


def test_every_client_has_its_own_rows_and_zeros():
    rng = np.random.default_rng(0)
    clients = [
        {
            "x": rng.normal(size=(size, 2, 3)).astype(np.float32),
            "y": rng.integers(1, 9, size, np.int32),
        }
        for size in (2, 0, 4, 1)
    ]
    arrays, mask = pad(Packed.from_lists(clients))
    assert arrays["x"].shape == (4, 4, 2, 3)
    np.testing.assert_array_equal(mask.sum(1), [2, 0, 4, 1])
    for i, client in enumerate(clients):
        for name, expected in client.items():
            got = arrays[name][i]
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got[: len(expected)], expected)
            assert not got[len(expected) :].any()
        assert mask[i, : len(client["y"])].all()


def test_nobody_with_an_example_is_a_network_of_empty_nodes():
    arrays, mask = pad(Packed({"x": np.zeros((0, 3))}, np.zeros(3, int)))
    assert arrays["x"].shape == (2, 0, 3)
    assert mask.shape == (2, 0)
