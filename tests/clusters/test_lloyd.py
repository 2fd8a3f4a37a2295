"""k-means from inner products against scikit-learn's."""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.cluster import KMeans

from fedjax_core.clusters import lloyd


def inertia(x, label):
    return sum(((x[label == k] - x[label == k].mean(0)) ** 2).sum() for k in set(label))


def test_it_is_as_good_as_k_means_of_the_vectors():
    rng = np.random.default_rng(0)
    run = jax.jit(lambda x, ids, key: lloyd(x, ids, 4, key))
    for seed in range(3):
        # Far from 0, where float32 would lose the distances of what is not centred.
        x = 30 + rng.normal(size=(4, 10)).repeat(6, 0) + rng.normal(size=(24, 10)) / 2
        x, there = x * 10.0 ** (25 * (seed - 1)), np.ones(24, bool)
        there[3 * seed] = False
        tree = {
            "a": jnp.asarray(x[:, :3]),
            "b": jnp.asarray(x[:, 3:].reshape(24, 7, 1)),
        }
        label = np.asarray(
            run(tree, np.where(there, np.arange(24), -1), jax.random.key(seed))
        )
        assert label[3 * seed] == -1
        assert list(dict.fromkeys(label[there])) == [0, 1, 2, 3]
        best = KMeans(4, n_init=10, random_state=0).fit(x[there]).labels_  # type: ignore
        least = inertia(x[there], best)
        np.testing.assert_allclose(inertia(x[there], label[there]), least, rtol=1e-3)


def test_fewer_points_than_clusters_leave_clusters_empty():
    x = jnp.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    label = lloyd(x, jnp.arange(3), 3, jax.random.key(0), restarts=2)
    np.testing.assert_array_equal(label, [0, 0, 1])
