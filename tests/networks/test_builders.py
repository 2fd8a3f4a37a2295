"""Builders of networks: shapes, frequencies of random ones, choices of neighbours."""

import sys

import jax
import numpy as np
import pytest
from scipy import sparse, stats

from fedjax_core.networks import builders, graph
from fedjax_core.networks.spectrum import check_connected


def degrees(network):
    return np.asarray(graph.num_neighbours(network)).tolist()


def test_small_networks_by_their_degrees():
    assert degrees(builders.star(5)) == [4, 1, 1, 1, 1]
    assert degrees(builders.chain(4)) == [1, 2, 2, 1]
    assert degrees(builders.cycle(4)) == [2, 2, 2, 2]
    assert degrees(builders.complete(4)) == [3, 3, 3, 3]
    assert degrees(builders.clique_plus_pendant(3)) == [3, 2, 2, 1]
    for build in (builders.star, builders.chain, builders.complete):
        assert degrees(build(1)) == [0]
    with pytest.raises(ValueError, match="cycle must be >= 3, got 2"):
        builders.cycle(2)
    with pytest.raises(ValueError, match="num_nodes must be >= 1, got 0"):
        builders.star(0)


def test_TL1_erdos_renyi_draws_every_pair_with_probability_p():
    n, p, draws = 7, 0.3, 2_000
    rng = np.random.default_rng(0)
    total, edges = np.zeros((n, n)), []
    for _ in range(draws):
        i, j = builders._random_pairs(n, p, rng)
        total[i, j] += 1
        edges.append(len(i))
    count = total[np.triu_indices(n, 1)]
    # 21 binomials, each two-sided at 1e-4: false alarms below 0.3 percent.
    low, high = stats.binom.ppf([5e-5, 1 - 5e-5], draws, p)
    assert ((low <= count) & (count <= high)).all()
    # The mean degree, p (n - 1), and the spread of the number of edges, at 1e-4 each.
    z = (np.mean(edges) - 21 * p) / np.sqrt(21 * p * (1 - p) / draws)
    assert abs(z) < stats.norm.isf(5e-5)
    spread = np.var(edges, ddof=1) / (21 * p * (1 - p)) * (draws - 1)
    assert 5e-5 < stats.chi2.cdf(spread, draws - 1) < 1 - 5e-5


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (50, 3), (50, 2 - 2 / 50), (6, 5)])
def test_random_connected_networks_have_their_mean_degree(n, degree):
    one, same, other = (builders.random_connected(n, degree, s) for s in (0, 0, 1))
    check_connected(one)
    assert one.num_edges == round(degree * n / 2)
    np.testing.assert_array_equal(one.tail, same.tail)
    if n == 50:
        assert (one.tail != other.tail).any()
    with pytest.raises(ValueError, match="mean_degree must be in"):
        builders.random_connected(n, n, 0)


def test_erdos_renyi_at_the_ends_and_by_seed():
    assert builders.erdos_renyi(6, 0.0).num_edges == 0
    assert builders.erdos_renyi(6, 1.0).num_edges == 15
    assert builders.erdos_renyi(1, 0.5).num_edges == 0
    one, same, other = (builders.erdos_renyi(200, 0.1, s) for s in (0, 0, 1))
    np.testing.assert_array_equal(one.head, same.head)
    assert one.num_edges != other.num_edges or (one.head != other.head).any()
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 1.5"):
        builders.erdos_renyi(3, 1.5)


def test_pairs_are_numbered_right_where_the_square_root_is_not_exact():
    n = 94_906_267  # n^2 / 2 beyond the integers of a float64
    i, j = builders._random_pairs(n, 1e-12, np.random.default_rng(0))
    assert len(i) > 1_000
    assert ((i >= 0) & (i < j) & (j < n)).all()
    assert j.max() > 0.99 * n


def test_stochastic_block_is_dense_inside_and_loose_between():
    sizes = (30, 50, 20)
    label = builders.block_labels(sizes)
    np.testing.assert_array_equal(np.bincount(label), sizes)
    network = builders.stochastic_block(sizes, 0.5, 0.02, seed=3)
    same = label[network.head] == label[network.tail]
    inside = sum(s * (s - 1) // 2 for s in sizes)
    across = 100 * 99 // 2 - inside
    # Two binomials, each two-sided at 1e-4.
    for count, pairs, p in ((same.sum(), inside, 0.5), ((~same).sum(), across, 0.02)):
        assert 5e-5 < stats.binom.cdf(count, pairs, p) < 1 - 5e-5
    apart = builders.stochastic_block(sizes, 1.0, 0.0)
    assert apart.num_edges == inside
    with pytest.raises(ValueError, match="sizes must be >= 1, got 0"):
        builders.stochastic_block((3, 0), 0.5, 0.5)
    with pytest.raises(ValueError, match="at least one"):
        builders.stochastic_block((), 0.5, 0.5)


def test_k_random_neighbours_are_uniform_subsets():
    n, k, draws = 6, 2, 3_000
    seen = np.zeros((n, n))
    for seed in range(draws // n):
        chosen = builders._subsets(n, k, "k", np.random.default_rng(seed))
        assert (chosen != np.arange(n)[:, None]).all()
        assert (chosen[:, 0] != chosen[:, 1]).all()
        np.add.at(seen, (np.arange(n)[:, None], chosen), 1)
    # 30 binomials of 500 draws, each two-sided at 1e-4.
    low, high = stats.binom.ppf([5e-5, 1 - 5e-5], draws // n, k / (n - 1))
    others = seen[~np.eye(n, dtype=bool)]
    assert ((low <= others) & (others <= high)).all()
    network = builders.k_random_neighbours(100, 4, seed=0)
    assert min(degrees(network)) >= 4
    assert 200 <= network.num_edges <= 400
    assert builders.k_random_neighbours(5, 4).num_edges == 10
    for k in (0, 5):
        with pytest.raises(ValueError, match="k must be"):
            builders.k_random_neighbours(5, k)


def pairs(network):
    return {*zip(network.head.tolist(), network.tail.tolist(), strict=True)}


def test_TL3_nearest_neighbours_on_a_line():
    x = np.array([0.0, 1.0, 2.1, 3.3, 10.0])
    distance = np.abs(x[:, None] - x[None])
    # 0-1, 1-0, 2-1, 3-2 and 4-3: a choice on either side makes an edge.
    expected = {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert pairs(builders.knn(distance, 1)) == expected
    assert pairs(builders.knn_points(x[:, None], 1)) == expected
    # On equal gaps the first of equals is nearer: 1 chooses 0 and 2 chooses 1.
    even = np.arange(4.0)[:, None]
    assert pairs(builders.knn_points(even, 1)) == {(0, 1), (1, 2), (2, 3)}
    assert builders.knn(distance, 4).num_edges == 10
    for k in (0, 5):
        with pytest.raises(ValueError, match="k must be"):
            builders.knn(distance, k)


def test_a_single_node_has_no_neighbours():
    for build in (
        lambda: builders.knn(np.zeros((1, 1)), 1),
        lambda: builders.knn_points([(0.0, 0.0)], 1),
        lambda: builders.k_random_neighbours(1, 1),
        lambda: builders.ranked_choices([1.0]),
    ):
        with pytest.raises(ValueError, match="at least 2 nodes to be neighbours"):
            build()


def test_nearest_points_in_blocks_equal_those_from_all_distances(monkeypatch):
    points = np.random.default_rng(0).random((50, 2))
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    expected = pairs(builders.knn(distance, 3))
    monkeypatch.setattr(builders, "_BLOCK", 350)
    assert pairs(builders.knn_points(points, 3)) == expected


def test_geodesic_distances():
    helsinki, turku, north = (60.1699, 24.9384), (60.4518, 22.2666), (90.0, 0.0)
    d = builders.geodesic_distance([helsinki, turku], [helsinki, turku, north])
    np.testing.assert_allclose(np.diagonal(d), 0, atol=1e-9)
    # The spherical law of cosines gives 150.0 km; a quarter meridian is 10,007.6 km.
    lat, lon = np.radians([helsinki, turku]).T
    cosine = np.sin(lat).prod() + np.cos(lat).prod() * np.cos(lon[0] - lon[1])
    np.testing.assert_allclose(d[0, 1], 6371.0088 * np.arccos(cosine), rtol=1e-9)
    np.testing.assert_allclose(d[0, 2], 6371.0088 * np.radians(90 - helsinki[0]))
    # Across the date line 2 degrees are near, which differences of longitude miss.
    places = [(0.0, 179.0), (0.0, -179.0), (0.0, 175.0)]
    assert pairs(builders.knn_points(places, 1, "geodesic")) == {(0, 1), (0, 2)}
    with pytest.raises(ValueError, match="latitudes"):
        builders.knn_points([(91.0, 0.0), (0.0, 0.0)], 1, "geodesic")
    with pytest.raises(ValueError, match="points must be finite"):
        builders.knn_points([(np.nan, 0.0), (0.0, 0.0)], 1)
    with pytest.raises(ValueError, match="metric"):
        builders.knn_points(places, 1, "manhattan")


@pytest.mark.parametrize(
    ("distance", "message"),
    [
        ([[0.0, -1.0], [-1.0, 0.0]], ">= 0 and finite, got -1.0 from 0 to 1"),
        ([[0.0, np.nan], [np.nan, 0.0]], ">= 0 and finite, got nan"),
        ([[0.0, 1.0], [2.0, 0.0]], "symmetric, got 1.0 from 0 to 1 and 2.0 back"),
        ([[0.0, 1.0]], r"shape \(n, n\)"),
    ],
)
def test_bad_distances(distance, message):
    with pytest.raises(ValueError, match=message):
        builders.knn(distance, 1)


@pytest.mark.parametrize(("m", "expected"), [(1, 0.52), (10, 0.061), (1e9, 0.0491)])
def test_exercise_7_1_wrong_neighbours(m, expected):
    # n = 100 in two classes of means -1 and 1; the share of nodes with a neighbour of
    # the other class. 0.0491 is exact, the others are Monte Carlo to two digits.
    c = np.repeat([-1.0, 1.0], 50)
    trials, wrong = 150, []
    for seed in range(trials):
        rng = np.random.default_rng([seed, 7])
        means = c + rng.standard_normal(100) / np.sqrt(m)
        choices = builders.ranked_choices(means, seed=seed)
        wrong.append((c[choices] != c[:, None]).any(1).mean())
    error = np.std(wrong, ddof=1) / np.sqrt(trials)
    # Two-sided at 1e-4, plus the rounding of the expected number.
    rounding = 0.0001 if m == 1e9 else 0.01
    assert abs(np.mean(wrong) - expected) < 3.9 * error + rounding


def test_ranked_choices_are_the_nearest_of_the_candidates():
    values = np.array([0.0, 5.0, 1.0, 1.0, -2.0])
    choices = builders.ranked_choices(values, num_candidates=4, k=2)
    assert choices.tolist() == [[2, 3], [2, 3], [3, 0], [2, 0], [0, 2]]
    assert degrees(builders.from_choices(choices)) == [3, 2, 4, 3, 2]
    with pytest.raises(ValueError, match="num_candidates must be"):
        builders.ranked_choices(values, num_candidates=5)
    with pytest.raises(ValueError, match="k must be"):
        builders.ranked_choices(values, num_candidates=2, k=3)


class FakeNetwork:
    """What `from_networkx` asks of a networkx graph."""

    def __init__(self, edges, directed=False):
        self.nodes = sorted({v for u, w, _ in edges for v in (u, w)})
        self.edges = lambda data, default: [
            (u, v, default if a is None else a) for u, v, a in edges
        ]
        self.is_directed = lambda: directed
        self.is_multigraph = lambda: False


def test_from_networkx_keeps_order_and_weights():
    network = builders.from_networkx(FakeNetwork([("b", "a", 2.0), ("b", "c", None)]))
    assert pairs(network) == {(0, 1), (1, 2)}
    assert network.weight.tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match="undirected"):
        builders.from_networkx(FakeNetwork([("a", "b", 1.0)], directed=True))


def test_networkx_there_and_back():
    network = builders.erdos_renyi(20, 0.3).with_weight(
        jax.random.uniform(
            jax.random.key(0), builders.erdos_renyi(20, 0.3).weight.shape
        )
    )
    again = builders.from_networkx(builders.to_networkx(network))
    np.testing.assert_allclose(again.dense(), network.dense())


def test_networkx_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ImportError, match=r"fedjax_core\[networkx\]"):
        builders.to_networkx(builders.chain(2))


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "lil", "dok", "bsr", "dia"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, bool])
def test_from_scipy_equals_from_dense(kind, dtype):
    rng = np.random.default_rng(0)
    A = np.triu(rng.integers(1, 5, (9, 9)) * (rng.random((9, 9)) < 0.4), 1).astype(
        dtype
    )
    A = A + A.T
    matrix = sparse.csr_array(A).asformat(kind)
    before = matrix.copy()
    network, expected = builders.from_scipy(matrix), graph.Graph.from_dense(A)
    for name in ("head", "tail", "weight", "num_nodes"):
        np.testing.assert_array_equal(getattr(network, name), getattr(expected, name))
    assert (matrix != before).nnz == 0


def test_from_scipy_adds_up_entries_and_drops_zeros():
    matrix = sparse.coo_matrix(
        ([1.0, 2.0, 3.0, 0.0, 0.0], ([0, 0, 1, 1, 2], [1, 1, 0, 2, 2])), (4, 4)
    )
    network = builders.from_scipy(matrix)
    assert (network.num_nodes, pairs(network)) == (4, {(0, 1)})
    assert network.weight.tolist() == [3.0]
    assert matrix.nnz == 5


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0.0, 1.0]], "square, got shape"),
        ([[0, 1], [2, 0]], "symmetric, got 1 from 0 to 1 and 2 back"),
        ([[0, 1], [0, 0]], "symmetric, got 1 from 0 to 1 and 0 back"),
        ([[1, 0], [0, 0]], "zero diagonal, got 1 from 0 to 0"),
        ([[0.0, np.nan], [np.nan, 0.0]], "finite, got nan from 0 to 1"),
        ([[0, -1], [-1, 0]], ">= 0, got -1"),
    ],
)
def test_bad_sparse_matrices(matrix, message):
    with pytest.raises(ValueError, match=message):
        builders.from_scipy(sparse.csr_array(matrix))


def test_only_real_sparse_matrices_are_taken():
    with pytest.raises(TypeError, match=r"must be of scipy\.sparse, got ndarray"):
        builders.from_scipy(np.zeros((2, 2)))
    with pytest.raises(TypeError, match="must be real numbers, got dtype complex128"):
        builders.from_scipy(sparse.csr_array([[0, 1j], [1j, 0]]))


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: builders.erdos_renyi(4, 0.5, seed),
        lambda seed: builders.stochastic_block([2, 2], 0.5, 0.5, seed),
        lambda seed: builders.k_random_neighbours(4, 2, seed),
        lambda seed: builders.ranked_choices([1.0, 2.0, 3.0], 2, 1, seed),
    ],
)
def test_bad_seeds_are_refused(build):
    with pytest.raises(ValueError, match="seed must be >= 0"):
        build(-1)
    with pytest.raises(TypeError, match=r"seed must be an int, got 1\.5"):
        build(1.5)


def test_choices_of_another_shape_are_refused():
    with pytest.raises(
        ValueError, match=r"choices must have shape \(n, k\), got \(2,\)"
    ):
        builders.from_choices([1, 0])
    with pytest.raises(TypeError, match="must be ints"):
        builders.from_choices([[1.0], [0.0]])
