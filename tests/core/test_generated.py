"""Labels, Fréchet distances against closed forms, and attacks that must (not) work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import LocalWork
from fedjax_core.generated import (
    Classifier,
    Config,
    balanced_labels,
    frechet_distance,
    learner,
    membership_auroc,
)

RNG = np.random.default_rng(0)


def with_moments(mean, cov, n=40):
    """Rows whose mean and unbiased covariance are exactly these."""
    x = RNG.normal(size=(n, len(mean)))
    x -= x.mean(0)
    x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T
    return x @ np.linalg.cholesky(np.asarray(cov)).T + mean


def test_labels_come_class_by_class_as_often_each():
    np.testing.assert_array_equal(balanced_labels(6, 3), [0, 0, 1, 1, 2, 2])
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="num_samples must be a positive multiple"):
            balanced_labels(wrong, 3)


def test_a_learner_sees_examples_alone_and_repeats_itself_of_one_seed():
    k, sizes = 3, (3, 3)
    linear = Classifier(
        lambda key: {"w": jax.random.normal(key, sizes)}, lambda p, x: x @ p["w"]
    )
    work = LocalWork(batch_size=4, epochs=20)
    config = Config(num_classes=k, fit_lr=0.3, fit_work=work)
    learn = jax.jit(learner(config, linear))
    x, y = jnp.eye(k).repeat(4, 0), np.repeat(np.arange(k), 4)
    for examples, labels in ((x, y), (x[:, ::-1], y)):
        learnt = [learn(examples, jnp.uint32(seed))["w"] for seed in (1, 1, 2)]
        for w in learnt:
            np.testing.assert_array_equal(np.argmax(examples @ w, 1), labels)
        np.testing.assert_array_equal(learnt[0], learnt[1])
        assert (learnt[0] != learnt[2]).all()


def test_frechet_distances_of_isotropic_normals_are_as_known():
    k, first, second = 4, 1.5, 0.4
    shift = np.array([1.0, -2.0, 0.0, 0.5])
    a = with_moments(np.zeros(k), first**2 * np.eye(k))
    b = with_moments(shift, second**2 * np.eye(k), 25)
    expected = shift @ shift + k * (first - second) ** 2
    assert frechet_distance(a, b) == pytest.approx(expected)
    assert frechet_distance(b, a) == pytest.approx(expected)
    assert frechet_distance(a, a[::-1]) == pytest.approx(0, abs=1e-9)


def test_frechet_distances_of_any_normals_are_those_of_the_matrix_root():
    from scipy.linalg import sqrtm

    k = 3
    roots = RNG.normal(size=(2, k, k))
    one, other = (r @ r.T + 0.1 * np.eye(k) for r in roots)
    a, b = with_moments(np.zeros(k), one), with_moments(np.ones(k), other)
    expected = k + np.trace(one + other - 2 * np.real(sqrtm(one @ other)))
    assert frechet_distance(a, b) == pytest.approx(expected)
    # Ten examples of 30 features: covariances have no full rank, distances no sign.
    few = RNG.normal(size=(10, 30))
    assert frechet_distance(few, few) == pytest.approx(0, abs=1e-5)
    assert frechet_distance(few, few + 1) == pytest.approx(30, abs=1e-5)
    with pytest.raises(ValueError, match="b must hold two or more rows of 30 features"):
        frechet_distance(few, few[:, :2])


def test_copies_give_members_away_and_strangers_do_not():
    members, others = RNG.normal(size=(2, 60, 2, 3))
    assert membership_auroc(members[::2], members, others) > 0.7
    assert membership_auroc(members, members, others) == 1
    # Of 60 and 60 the area's standard error is 0.053: beyond 5 once in two million.
    strangers = RNG.normal(size=(30, 2, 3))
    assert abs(membership_auroc(strangers, members, others) - 0.5) < 5 * 0.053
