"""Planes through three models against their definition, and what is read off them."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.landscape import barrier, dip, landscape, plane, width


def models():
    rng = np.random.default_rng(0)
    return [
        {
            "w": rng.normal(size=(3, 2)).astype(np.float32),
            "b": rng.normal(size=2).astype(np.float32),
        }
        for _ in range(3)
    ]


def flat(tree):
    return np.concatenate([np.ravel(tree[k]) for k in sorted(tree)]).astype(np.float64)


def test_a_plane_holds_its_models_and_its_directions_are_orthonormal():
    three = models()
    found = plane(*three)
    u = flat(three[1]) - flat(three[0])
    w = flat(three[2]) - flat(three[0])
    v = w - (w @ u) / (u @ u) * u
    along = w @ u / np.linalg.norm(u)
    np.testing.assert_allclose(
        found.corners,
        [[0, 0], [np.linalg.norm(u), 0], [along, np.linalg.norm(v)]],
        rtol=1e-9,
    )
    for model, corner in zip(three, found.corners, strict=True):
        np.testing.assert_allclose(flat(found.at(*corner)), flat(model), atol=1e-5)
    a, b = flat(found.across), flat(found.up)
    np.testing.assert_allclose([a @ a, b @ b, a @ b], [1, 1, 0], atol=1e-6)


def test_a_line_has_no_plane():
    first, second, _ = models()
    third = {k: (first[k] + second[k]) / 2 for k in first}
    with pytest.raises(ValueError, match="must not lie on a line"):
        plane(first, second, third)
    with pytest.raises(ValueError, match="must not lie on a line"):
        plane(first, first, second)


def test_a_bowl_is_seen_as_one_and_its_width_is_an_area():
    first = {"w": jnp.zeros(3)}
    over = plane(first, {"w": jnp.array([1.0, 0, 0])}, {"w": jnp.array([0, 2.0, 0])})

    def loss(params):
        return jnp.sum((params["w"] - jnp.array([1.0, 0.0, 3.0])) ** 2)

    x, y = np.linspace(-1, 3, 81), np.linspace(-2, 2, 81)
    values = landscape(over, loss, x, y)
    expected = (x - 1)[None] ** 2 + y[:, None] ** 2 + 9
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    # A disc of radius 1, by cells of 0.05 on its rim.
    assert abs(width(values, 0.05**2, 1.0) - np.pi) < 2 * np.pi * 0.05


def test_barriers_and_dips_of_a_way():
    lam = np.linspace(0, 1, 11)
    convex = 3 * (lam - 0.4) ** 2
    hill = lam + np.sin(np.pi * lam)
    np.testing.assert_allclose(barrier(lam, [convex, hill]), [0, 1], atol=1e-12)
    with pytest.raises(ValueError, match=r"lambdas must go from 0 to 1, got 0.1 to 1"):
        barrier(lam[1:], hill[1:])
    np.testing.assert_allclose(dip([[0.5, 0.9, 0.7], [0.9, 0.2, 0.8]]), [-0.2, -0.7])
    np.testing.assert_allclose(dip([0.5, 0.9, 0.5]), 0)
