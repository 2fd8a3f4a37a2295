"""Who goes back up the tree of clusters."""

import numpy as np

from fedjax_core.clusters.tree import fall_back


def test_who_does_worse_in_its_cluster_keeps_the_model_above():
    seen = {
        "validation_cluster_accuracy": np.array([[0.5, 0.7, 0.6, np.nan]]),
        "validation_parent_accuracy": np.array([[0.6, 0.7, 0.2, np.nan]]),
        "test_cluster_accuracy": np.array([[0.1, 0.2, 0.3, 0.4]]),
        "test_parent_accuracy": np.array([[0.9, 0.8, 0.7, 0.6]]),
    }
    worse, kept = fall_back(seen)
    # Those that are as good, or have nothing to tell by, stay.
    np.testing.assert_array_equal(worse, [[True, False, False, False]])
    np.testing.assert_array_equal(kept, [[0.9, 0.2, 0.3, 0.4]])
