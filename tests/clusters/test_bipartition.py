"""The best cut against brute force, and the gap that says it is right."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.clusters import bipartition, separation

K = 3


@jax.jit
def look(S, truth, cluster):
    return bipartition(S, cluster, K), separation(S, truth, cluster, K)


def best_cut(S, members):
    """The smallest largest similarity across, over all cuts."""
    best = np.inf
    for choice in itertools.product([0, 1], repeat=len(members) - 1):
        part = np.array([0, *choice], bool)
        if part.any():
            best = min(best, S[np.ix_(members[~part], members[part])].max())
    return best


def single_linkage(S, members):
    """Algorithm 9: merges the most similar until two components are left."""
    component = {i: i for i in members}
    pairs = itertools.product(members, members)
    for i, j in sorted(pairs, key=lambda p: -S[p]):
        if len(set(component.values())) > 2 and component[i] != component[j]:
            old, new = component[i], component[j]
            component = {k: new if c == old else c for k, c in component.items()}
    return component


def problems():
    """Similarities of 8 clients in up to 3 clusters, a third of them full of ties."""
    rng = np.random.default_rng(0)
    S = rng.uniform(-1, 1, (300, 8, 8))
    S[::3] = np.round(2 * S[::3]) / 2
    S = np.triu(S, 1) + np.triu(S, 1).swapaxes(1, 2) + np.eye(8)
    return S, rng.integers(-1, K, (300, 8))


def test_every_cluster_is_cut_as_by_brute_force():
    S, cluster = problems()
    sizes = set()
    for n in range(len(S)):
        cut, _ = look(S[n], cluster[n], cluster[n])
        for k in range(K):
            members = np.flatnonzero(cluster[n] == k)
            if len(members) < 2:
                assert np.isposinf(cut.cross[k])
                assert not cut.part[members].any()
                continue
            sizes.add(len(members))
            part = np.asarray(cut.part)[members]
            assert part.any()
            assert not part[0]
            across = S[n][np.ix_(members[~part], members[part])].max()
            np.testing.assert_allclose(across, cut.cross[k], rtol=1e-6)
            np.testing.assert_allclose(across, best_cut(S[n], members), rtol=1e-6)
            merged = single_linkage(S[n], members)
            if n % 3:  # without ties the cut itself is the same
                assert (
                    len({(merged[i], p) for i, p in zip(members, part, strict=True)})
                    == 2
                )
        assert not np.asarray(cut.part)[cluster[n] < 0].any()
    assert max(sizes) >= 6


def test_the_gap_of_known_clusters():
    # Distributions (0, 0, 1, 1) in one cluster, (2, 2, 3) in the other, -1 nowhere.
    cluster = np.array([0, 0, 0, 0, 1, 1, 1, -1])
    truth = np.array([0, 0, 1, 1, 2, 2, 3, 0])
    S = np.full((8, 8), 0.9)
    S[:2, 2:4], S[:4, 4:] = -0.5, 0.99
    S[0, 1], S[2, 3], S[4, 5], S[4, 6], S[5, 6] = 0.8, 0.7, 0.1, 0.3, 0.2
    S = np.triu(S, 1) + np.triu(S, 1).T + np.eye(8)
    cut, got = look(S, truth, cluster)
    np.testing.assert_allclose(got.intra, [0.7, 0.1, 1], rtol=1e-6)
    # 4 and 6 are most alike, so the second cut parts 4 and 5: its gap is not positive.
    np.testing.assert_allclose(got.cross, [-0.5, 0.2, np.inf], rtol=1e-6)
    np.testing.assert_allclose(got.gap, [1.2, -0.1, -np.inf], rtol=1e-6)
    np.testing.assert_array_equal(cut.part[:4], [False, False, True, True])


def test_a_positive_gap_makes_the_cut_correct():
    S, _ = problems()
    truth = np.random.default_rng(1).integers(0, 3, (len(S), 8))
    S = (0.8 * S + (truth[:, :, None] == truth[:, None])) / 1.8
    together, right = np.zeros(8, int), []
    for s, t in zip(S, truth, strict=True):
        cut, seen = look(s, t, together)
        part = np.asarray(cut.part)
        correct = all(len(set(part[t == k])) < 2 for k in range(3))
        right.append((bool(seen.gap[0] > 0), correct))
    assert 20 < right.count((True, True)) < 280
    assert (True, False) not in right
    assert (False, False) in right


@pytest.mark.parametrize(
    ("similarity", "cluster", "message"),
    [
        (np.eye(1), None, r"\[M, M\] with M >= 2, got \(1, 1\)"),
        (np.ones((2, 3)), None, r"got \(2, 3\)"),
        (np.full((2, 2), np.nan), None, "finite and in"),
        (np.array([[1, 0.5], [0.4, 1]]), None, "symmetric, is off by 0.1"),
        (np.eye(3), [0, 1], r"cluster must have shape \(3,\)"),
        (np.eye(3), [0, 1, 2], r"cluster must be in \[-1, 1\], got 2"),
    ],
)
def test_what_has_no_cut_is_refused(similarity, cluster, message):
    with pytest.raises(ValueError, match=message):
        bipartition(jnp.asarray(similarity), cluster, 2)
