"""Generated populations follow the distributions they name.

Seeds are fixed. Each statistical check would fail for 1 seed in 10,000 (`RARE`) if the
code is right.
"""

import numpy as np
import pytest
from scipy import stats

from fedjax_core.datasets import synthetic

RARE = 1e-4
WEIGHTS = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])
MEANS = np.array([[0.0, 0.0], [1.5, 2.0]])  # at distance 2.5


def linear(num_clients, **kwargs):
    return synthetic.linear_clusters(num_clients, WEIGHTS, **kwargs)


def mixture(num_clients, alpha: float | None = 0.5, shift=1.0, **kwargs):
    return synthetic.gaussian_mixture(num_clients, MEANS, alpha, shift, **kwargs)


GENERATORS = [linear, synthetic.fedprox, synthetic.fedprox_iid, mixture]


def pooled(data):
    """The examples of both splits, client by client."""
    both = [
        [s.client(i) for s in data.splits.values()]
        for i in range(len(data.train.sizes))
    ]
    return [{k: np.concatenate([c[k] for c in pair]) for k in "xy"} for pair in both]


def assert_standard_normal(values):
    assert stats.kstest(np.ravel(values), "norm").pvalue > RARE


def assert_variance(values, variance):
    """`values`, normal of mean 0, have this variance."""
    tail = stats.chi2.cdf(np.sum(np.square(values)) / variance, np.size(values))
    assert RARE / 2 < tail < 1 - RARE / 2


@pytest.mark.parametrize("generate", GENERATORS)
def test_a_client_does_not_depend_on_the_number_of_clients(generate):
    few, few_truth = generate(3, sizes=None, seed=4)
    many, many_truth = generate(5, sizes=None, seed=4)
    for name, split in few.splits.items():
        for i in range(3):
            for key, array in split.client(i).items():
                other = many.splits[name].client(i)[key]
                np.testing.assert_array_equal(array, other)
    for name, array in few_truth.items():
        np.testing.assert_array_equal(array, many_truth[name][:3])


@pytest.mark.parametrize("generate", GENERATORS)
def test_only_the_seed_decides(generate):
    np.random.seed(7)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(7)  # noqa: NPY002
    one, same, other = (
        generate(2, sizes=6, seed=s)[0].train.examples["x"] for s in (0, 0, 1)
    )
    assert np.random.random() == expected  # noqa: NPY002
    np.testing.assert_array_equal(one, same)
    assert not np.any(one == other)


def test_the_functions_draw_independently():
    first = [g(1, sizes=6)[0].train.examples["x"][0, 0] for g in GENERATORS]
    assert len(set(first)) == len(GENERATORS)


@pytest.mark.parametrize("generate", GENERATORS)
def test_sizes_are_split_with_train_rounded_down(generate):
    sizes = np.array([0, 1, 9, 10, 25])
    data, _ = generate(5, sizes=sizes, test_fraction=0.1)
    np.testing.assert_array_equal(data.train.sizes, [0, 0, 8, 9, 22])
    np.testing.assert_array_equal(data.test.sizes, [0, 1, 1, 1, 3])
    assert generate(1, sizes=10, test_fraction=0.9)[0].train.sizes == [1]
    for packed in data.splits.values():
        assert packed.examples["x"].dtype == np.float32
        dtype = np.float32 if generate is linear else np.int32
        assert packed.examples["y"].dtype == dtype
    equal, _ = generate(3, sizes=7)
    np.testing.assert_array_equal(equal.train.sizes + equal.test.sizes, 7)


@pytest.mark.parametrize("generate", GENERATORS)
def test_test_fraction_moves_the_boundary_only(generate):
    a, b = (generate(2, sizes=20, test_fraction=f)[0] for f in (0.0, 0.5))
    for one, other in zip(pooled(a), pooled(b), strict=True):
        np.testing.assert_array_equal(one["x"], other["x"])


def test_drawn_sizes_follow_the_log_normal_of_the_paper_s_code():
    n = 3000  # with one feature, or this would need memory
    data, _ = synthetic.linear_clusters(n, [[1.0]], sizes=None, test_fraction=0.1)
    sizes = np.array([len(client["y"]) for client in pooled(data)])
    np.testing.assert_array_equal(data.train.sizes, (0.9 * sizes).astype(int))
    inner = np.array([52, 60, 80, 100, 130, 200, 400, 2000])  # <= 52, <= 60, ...
    observed = np.bincount(np.searchsorted(inner, sizes), minlength=9)
    below = stats.norm.cdf((np.log(inner - 50 + 1) - 4) / 2)
    expected = n * np.diff([0, *below, 1])
    assert stats.chisquare(observed, expected).pvalue > RARE
    assert sizes.min() >= 50
    few, _ = synthetic.fedprox(10)
    assert np.ptp(few.train.sizes) > 0


def test_linear_clusters_share_weights_and_have_the_noise_they_say():
    data, truth = linear(5, sizes=4000, noise=0.3)
    np.testing.assert_array_equal(truth["cluster"], [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(truth["weights"], WEIGHTS[[0, 1, 0, 1, 0]])
    clients = pooled(data)
    x = np.concatenate([c["x"] for c in clients])
    errors = [
        c["y"] - c["x"] @ w for c, w in zip(clients, truth["weights"], strict=True)
    ]
    assert_standard_normal(x)
    assert_variance(errors, 0.3**2)
    assert_standard_normal(np.ravel(errors) / 0.3)
    # Independent coordinates: sqrt(n) times each sample correlation is about N(0, 1).
    correlations = np.corrcoef(x, rowvar=False)[np.triu_indices(3, 1)]
    assert np.all(np.abs(correlations) * np.sqrt(len(x)) < stats.norm.isf(RARE / 6))


def test_linear_clusters_without_noise_are_solved_by_least_squares():
    data, truth = linear(4, sizes=20, noise=0)
    for i in range(4):
        train = data.train.client(i)
        solution = np.linalg.lstsq(train["x"], train["y"], rcond=None)[0]
        np.testing.assert_allclose(solution, truth["weights"][i], atol=1e-5)


def test_fedprox_labels_are_the_largest_score():
    for generate in (synthetic.fedprox, synthetic.fedprox_iid):
        data, truth = generate(3, sizes=200)
        for i, client in enumerate(pooled(data)):
            scores = client["x"].astype(np.float64) @ truth["weights"][i]
            expected = np.argmax(scores + truth["bias"][i], axis=1)
            np.testing.assert_array_equal(client["y"], expected)


def test_fedprox_parameters_have_alpha_and_beta_as_standard_deviations():
    n = 2000
    _, truth = synthetic.fedprox(n, alpha=0.5, beta=2.0, sizes=0)
    model = np.concatenate([truth["weights"].reshape(n, -1), truth["bias"]], axis=1)
    for array, std in ((model, 0.5), (truth["mean"], 2.0)):
        dim = array.shape[1]
        # Over clients, the mean of N(u, 1) entries has variance std^2 + 1 / dim; within
        # a client the entries have variance 1.
        assert_variance(array.mean(axis=1), std**2 + 1 / dim)
        within = np.sum(np.var(array, axis=1) * dim)
        tail = stats.chi2.cdf(within, n * (dim - 1))
        assert RARE / 2 < tail < 1 - RARE / 2
    # One u for W and for b: their means differ by sampling noise only.
    difference = truth["weights"].mean(axis=(1, 2)) - truth["bias"].mean(axis=1)
    assert_variance(difference, 1 / 600 + 1 / 10)


def test_fedprox_features_have_variance_j_to_the_minus_1_2():
    variance = np.arange(1, 61) ** -1.2
    for generate in (synthetic.fedprox, synthetic.fedprox_iid):
        data, truth = generate(4, sizes=500)
        x = np.stack([c["x"] for c in pooled(data)])
        z = (x - truth["mean"][:, None]) / np.sqrt(variance)
        assert_standard_normal(z)
        tails = stats.chi2.cdf(np.sum(z**2, axis=(0, 1)), z.shape[0] * z.shape[1])
        assert np.all((tails > RARE / 120) & (tails < 1 - RARE / 120))


def test_fedprox_alpha_changes_weights_but_not_labels():
    (a, one), (b, other) = (synthetic.fedprox(5, alpha=s, sizes=300) for s in (0, 3))
    np.testing.assert_array_equal(a.train.examples["y"], b.train.examples["y"])
    assert not np.allclose(one["weights"], other["weights"])


def test_fedprox_iid_has_one_model_and_features_of_mean_0():
    _, truth = synthetic.fedprox_iid(3, sizes=5)
    np.testing.assert_array_equal(truth["weights"][0], truth["weights"][2])
    np.testing.assert_array_equal(truth["bias"][0], truth["bias"][2])
    assert_standard_normal(truth["weights"][0])
    assert not truth["mean"].any()
    _, heterogeneous = synthetic.fedprox(3, alpha=0, beta=0, sizes=5)
    assert not np.any(heterogeneous["weights"][0] == heterogeneous["weights"][2])
    assert heterogeneous["mean"].all()


def test_mixture_classes_are_gaussians_around_the_client_s_means():
    data, truth = mixture(4, sizes=3000, shift=2.0)
    for i, client in enumerate(pooled(data)):
        assert_standard_normal(client["x"] - truth["means"][i][client["y"]])
        k = np.sum(client["y"])
        assert stats.binomtest(k, 3000, truth["shares"][i, 1]).pvalue > RARE
    moved = truth["means"] - MEANS
    np.testing.assert_allclose(moved[:, 0], moved[:, 1], atol=1e-12)


def test_mixture_shares_are_dirichlet_and_shifts_normal():
    _, truth = mixture(2000, sizes=0, alpha=0.3, shift=2.0)
    # Dir(a, a) has Beta(a, a) margins.
    assert stats.kstest(truth["shares"][:, 0], "beta", (0.3, 0.3)).pvalue > RARE
    assert_standard_normal((truth["means"] - MEANS)[:, 0] / 2)
    _, equal = mixture(2, alpha=None, shift=0, sizes=0)
    np.testing.assert_array_equal(equal["shares"], np.full((2, 2), 0.5))
    np.testing.assert_array_equal(equal["means"], [MEANS, MEANS])
    for alpha in (1e-3, 1e4):
        shares = mixture(50, sizes=3, alpha=alpha)[1]["shares"]
        np.testing.assert_allclose(shares.sum(axis=1), 1)


@pytest.mark.parametrize("alpha", [None, 2.0])
def test_mixture_has_the_bayes_error_of_the_closed_form(alpha):
    n = 40_000
    data, truth = mixture(1, sizes=n, alpha=alpha, shift=1.0)
    client, (p0, p1) = pooled(data)[0], truth["shares"][0]
    distances = np.sum((client["x"][:, None] - truth["means"][0]) ** 2, axis=2)
    best = np.argmax(np.log([p0, p1]) - distances / 2, axis=1)
    t = np.log(p0 / p1) / 2.5
    error = p0 * stats.norm.cdf(-1.25 - t) + p1 * stats.norm.cdf(-1.25 + t)
    wrong = np.sum(best != client["y"])
    assert stats.binomtest(int(wrong), n, error).pvalue > RARE


def test_any_concentration_gives_shares():
    for alpha in (1e-300, 1e-3, 1e308):
        data, truth = mixture(5, alpha, seed=1)
        assert data.num_clients == 5
        np.testing.assert_allclose(truth["shares"].sum(1), 1)
    np.testing.assert_allclose(truth["shares"], 1 / 2)


@pytest.mark.parametrize("generate", GENERATORS)
@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"num_clients": 0}, ValueError, "num_clients must be >= 1, got 0"),
        ({"num_clients": 2.0}, TypeError, "num_clients must be an int, got 2.0"),
        ({"sizes": -1}, ValueError, "sizes must be one int >= 0 or one per .*got -1"),
        ({"sizes": [3, 4, 5]}, ValueError, r"per client, \[2\], got \[3, 4, 5\]"),
        ({"sizes": 2.5}, TypeError, "sizes must be ints, got 2.5"),
        ({"test_fraction": 1.5}, ValueError, r"test_fraction must be in \[0, 1\]"),
        ({"seed": -1}, ValueError, "seed must be >= 0 and < 2.*, got -1"),
        ({"seed": "a"}, TypeError, "seed must be an int, got 'a'"),
    ],
)
def test_rejects(generate, kwargs, error, match):
    with pytest.raises(error, match=match):
        generate(**({"num_clients": 2} | kwargs))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: linear(2, noise=-1), "noise must be >= 0"),
        (lambda: synthetic.linear_clusters(2, [1.0, 2.0]), "weights must be a matrix"),
        (lambda: synthetic.linear_clusters(2, [[np.nan]]), "weights must be a matrix"),
        (lambda: synthetic.linear_clusters(2, np.ones((0, 3))), "weights must be a"),
        (lambda: synthetic.fedprox(alpha=-1), "alpha must be >= 0"),
        (lambda: synthetic.fedprox(beta=np.inf), "beta must be >= 0 and finite"),
        (lambda: mixture(2, alpha=0), "alpha must be > 0"),
        (lambda: mixture(2, shift=-1), "shift must be >= 0"),
        (lambda: synthetic.gaussian_mixture(2, 1.0), "means must be a matrix"),
    ],
)
def test_rejects_parameters(call, match):
    with pytest.raises(ValueError, match=match):
        call()
