"""Clients of several servers have the laws of the text, by their key alone."""

from typing import Any, cast

import jax
import numpy as np
import pytest

from fedjax_core.datasets.servers import class_pairs, related_lines


def test_related_lines_are_multiples_with_few_noisy_rows():
    draw = jax.jit(lambda key: related_lines(key))
    one, again, other = (
        jax.tree.map(np.asarray, draw(jax.random.key(k))) for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(one.X, again.X)
    assert (one.truth != other.truth).all()
    np.testing.assert_array_equal(np.bincount(one.server), 15)
    np.testing.assert_array_equal(np.bincount(one.cluster), 50)
    count = one.mask.sum(1)
    assert (count.min(), count.max()) == (2, 9)
    assert (one.X[~one.mask] == 0).all()
    assert (one.y[~one.mask] == 0).all()
    models = np.stack([one.truth[one.cluster == q][0] for q in range(3)])
    ratio = models[1:] / models[:1]
    np.testing.assert_allclose(ratio, np.repeat(ratio[:, :1], 60, 1), rtol=1e-4)
    assert (np.abs(ratio - 1) < 0.3 / 0.85).all()
    error = (np.einsum("kmd,kd->km", one.X, one.truth) - one.y)[one.mask]
    # About 825 normals of deviation 2: within 5 % of it but for a chance of 0.05.
    assert 1.9 < error.std() < 2.1


def test_pairs_are_images_of_the_task_and_tested_on_others():
    rng = np.random.default_rng(0)
    train, test = rng.random((4, 7, 5)) + 0.1, rng.random((4, 3, 5)) + 0.1
    tasks = [((0, 1), (2, 3)), ((1, 0), (3, 2)), ((3, 1), (2, 0))]
    drawn = class_pairs(jax.random.key(2), train, test, tasks, 2, 6, (2, 4))
    drawn = jax.tree.map(np.asarray, drawn)
    unit = train / np.linalg.norm(train, axis=2, keepdims=True)
    flat = unit.reshape(28, 5)
    for k in range(12):
        X, y = drawn.X[k][drawn.mask[k]], drawn.y[k][drawn.mask[k]]
        assert len(y) % 4 == 0
        assert 8 <= len(y) <= 16
        assert y.sum() == 0
        classes = np.abs(X[:, None] - flat[None]).sum(2).argmin(1) // 7
        expected = np.tile(np.concatenate(tasks[drawn.cluster[k]]), len(y) // 4)
        np.testing.assert_array_equal(classes, expected)
    np.testing.assert_allclose(np.linalg.norm(drawn.X[drawn.mask], axis=1), 1, 1e-5)
    X, y = drawn.test
    held = test / np.linalg.norm(test, axis=2, keepdims=True)
    np.testing.assert_allclose(X[2], held[[3, 1, 2, 0]].reshape(12, 5), rtol=1e-5)
    np.testing.assert_array_equal(y[2], np.repeat([-1, 1], 6))


def test_what_cannot_be_drawn_is_refused():
    images, alone = np.ones((3, 2, 4)), cast(Any, [(0, 1)])
    for wrong, match in (
        (lambda: related_lines(jax.random.key(0), sizes=(0, 3)), "least_size must be"),
        (lambda: related_lines(jax.random.key(0), sizes=(4, 3)), "least_size must be"),
        (lambda: related_lines(jax.random.key(0), spread=-1.0), "spread must be >= 0"),
        (
            lambda: class_pairs(jax.random.key(0), images, images, [((0,), (3,))]),
            "classes in 0..2",
        ),
        (
            lambda: class_pairs(jax.random.key(0), images, images, alone),
            "pairs of groups",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
