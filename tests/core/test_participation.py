"""Cohorts: who takes part, how often, and from which random numbers."""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy import stats

from fedjax_core.participation import (
    Availability,
    Failing,
    Full,
    Participation,
    Poisson,
    Uniform,
    Weighted,
    generator,
)

# Statistical tests fail by chance with this probability at most, each; all seeds are
# fixed, so a test that passed once passes always.
FALSE_ALARM = 1e-4

N = 50
MEMBERS = {
    "full": Full(),
    "uniform": Uniform(cohort_size=7),
    "poisson": Poisson(rate=0.2),
    "weighted": Weighted(cohort_size=7, weights=np.arange(N)),
    "availability": Availability(
        cohort_size=7, available_fn=lambda round: np.arange(N) % 2 == round % 2
    ),
    "failing": Failing(participation=Uniform(cohort_size=7), rate=0.3),
}


@pytest.fixture(params=MEMBERS)
def member(request) -> Participation:
    return MEMBERS[request.param]


def test_draw_keeps_the_protocol(member):
    assert isinstance(member, Participation)
    for round in range(50):
        ids = member.draw(3, round, N)
        assert ids.dtype == np.int64
        assert ids.ndim == 1
        assert np.all(np.diff(ids) > 0), "ascending, no repeat"
        assert ids.size == 0 or (ids[0] >= 0 and ids[-1] < N)
        assert ids.size <= member.max_cohort_size(N)
    assert isinstance(member.max_cohort_size(N), int)
    assert isinstance(member.expected_cohort_size(N), float)


def test_draw_is_a_pure_function_of_its_arguments(member):
    cohorts = [member.draw(5, round, N) for round in range(8)]
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state(legacy=False)  # noqa: NPY002
    for round in reversed(range(8)):  # any order, NumPy ints too
        again = member.draw(np.int64(5), np.int32(round), N)
        np.testing.assert_array_equal(again, cohorts[round])
    after = np.random.get_state(legacy=False)  # noqa: NPY002
    np.testing.assert_equal(after, before)


def test_seed_and_round_change_the_cohort(member):
    if isinstance(member, Full):
        pytest.skip("nothing is drawn")

    def cohorts(seed, rounds):
        return [member.draw(seed, round, N).tolist() for round in rounds]

    assert cohorts(0, range(10)) != cohorts(1, range(10))
    assert cohorts(0, range(0, 10, 2)) != cohorts(0, range(2, 12, 2))


def test_generator_separates_seeds_rounds_and_other_uses_of_the_seed():
    big = 2**32
    keys = [*itertools.product([0, 1, 7, big, big + 1, 2**200], [0, 1, 7, big])]
    first = {int(generator(*key).integers(2**63)) for key in keys}
    assert len(first) == len(keys)
    plain = np.random.Generator(np.random.Philox(np.random.SeedSequence(7)))
    assert int(plain.integers(2**63)) not in first


def test_uniform_selection_counts():
    # 1,000 clients, cohort 10, 300 rounds.
    counts = np.zeros(1000, int)
    for round in range(300):
        ids = Uniform(cohort_size=10).draw(0, round, 1000)
        assert np.unique(ids).size == 10
        counts[ids] += 1
    # A round takes C of N without replacement: counts have variance R p (1 - p) and
    # correlation -1 / (N - 1), so this sum is chi-square with N - 1 degrees of freedom.
    p = 10 / 1000
    statistic = np.sum((counts - 300 * p) ** 2) / (300 * p * (1 - p)) * (999 / 1000)
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], 999)
    assert low < statistic < high


def test_uniform_reaches_every_client():
    seen = [Uniform(cohort_size=10).draw(0, round, 1000) for round in range(2000)]
    # 1,000 clients are each missed with probability 0.99^2000 = 2e-9.
    assert np.unique(np.concatenate(seen)).size == 1000


@pytest.mark.parametrize("size", [1, 3, 5])
def test_uniform_subsets_are_equally_likely(size):
    subsets = list(itertools.combinations(range(5), size))
    draws = [tuple(Uniform(cohort_size=size).draw(1, r, 5)) for r in range(2000)]
    counts = [draws.count(subset) for subset in subsets]
    if size == 5:
        assert counts == [2000]
    else:
        assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_poisson_sizes_are_binomial_and_clients_independent():
    n, rate, rounds = 12, 0.15, 4000
    cohorts = [Poisson(rate=rate).draw(2, round, n) for round in range(rounds)]
    sizes = np.bincount([ids.size for ids in cohorts], minlength=n + 1)
    expected = rounds * stats.binom.pmf(np.arange(n + 1), n, rate)
    # Rare sizes in one cell, so that the chi-square law holds.
    observed = np.append(sizes[:5], sizes[5:].sum())
    expected = np.append(expected[:5], expected[5:].sum())
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM
    assert sizes[0] > 0, "an empty cohort is a cohort"

    part = np.zeros((rounds, n))
    for round, ids in enumerate(cohorts):
        part[round, ids] = 1
    # Means and covariances within the normal quantile of their standard errors.
    tests = n + n * (n - 1) // 2
    z = stats.norm.isf(FALSE_ALARM / 2 / tests)
    variance = rate * (1 - rate)
    assert np.abs(part.mean(0) - rate).max() < z * np.sqrt(variance / rounds)
    covariance = (part - rate).T @ (part - rate) / rounds
    off_diagonal = covariance[~np.eye(n, dtype=bool)]
    assert np.abs(off_diagonal).max() < z * variance / np.sqrt(rounds)


def test_poisson_with_rate_one_is_full():
    np.testing.assert_array_equal(Poisson(rate=1).draw(0, 0, 9), np.arange(9))
    assert Poisson(rate=1).max_cohort_size(9) == 9


def test_poisson_max_cohort_size_is_rarely_exceeded():
    for n, rate in itertools.product([1, 10, 1000, 10**6], np.logspace(-6, 0, 50)):
        size = Poisson(rate=rate).max_cohort_size(n)
        assert 1 <= size <= n
        assert stats.binom.sf(size, n, rate) < 4e-4
        if n * rate >= 1000:
            assert stats.binom.sf(size, n, rate) < 3e-9
    assert Poisson(rate=0.01).max_cohort_size(10_000) == 160  # 100 + 6 sqrt(99)
    assert Poisson(rate=0.25).expected_cohort_size(10) == 2.5


def test_weighted_matches_successive_sampling():
    weights = np.array([1.0, 0.0, 2.0, 5.0, 0.5])

    def probability(order):  # of drawing the clients one by one in this order
        left, result = weights.sum(), 1.0
        for i in order:
            result *= weights[i] / left
            left -= weights[i]
        return result

    subsets = list(itertools.combinations([0, 2, 3, 4], 2))
    exact = [sum(map(probability, itertools.permutations(s))) for s in subsets]
    np.testing.assert_allclose(sum(exact), 1)

    member = Weighted(cohort_size=2, weights=weights)
    draws = [tuple(member.draw(0, round, 5)) for round in range(4000)]
    counts = [draws.count(subset) for subset in subsets]
    assert sum(counts) == 4000, "weight 0 is never drawn"
    assert stats.chisquare(counts, 4000 * np.array(exact)).pvalue > FALSE_ALARM


def test_weighted_is_invariant_to_scale_down_to_the_smallest_numbers():
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    draws = [
        [tuple(Weighted(cohort_size=2, weights=w).draw(0, r, 4)) for r in range(50)]
        for w in (weights, weights * 2.0**900, weights * 2.0**-1000)
    ]
    assert draws[0] == draws[1] == draws[2]


def test_weighted_takes_all_positive_clients_when_it_must():
    member = Weighted(cohort_size=3, weights=[0, 1e-300, 1, 0, 1e300])
    np.testing.assert_array_equal(member.draw(0, 0, 5), [1, 2, 4])


def test_weighted_keeps_a_read_only_copy_and_compares_by_value():
    weights = np.ones(3)
    member = Weighted(cohort_size=1, weights=weights)
    same = Weighted(cohort_size=1, weights=[1, 1, 1])
    assert member == same
    assert hash(member) == hash(same)
    assert member != dataclasses.replace(member, cohort_size=2)
    assert member != Weighted(cohort_size=1, weights=[1, 1, 2])
    weights[0] = np.nan
    assert member == same
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(member.weights)[0] = 2


def test_availability_draws_uniformly_among_the_available():
    available = np.array([1, 4, 6, 9])
    mask = np.isin(np.arange(10), available)
    by_mask = Availability(cohort_size=2, available_fn=lambda round: mask)
    by_ids = Availability(cohort_size=2, available_fn=lambda round: [9, 4, 4, 1, 6])
    draws = [tuple(by_mask.draw(0, round, 10)) for round in range(2000)]
    assert draws == [tuple(by_ids.draw(0, round, 10)) for round in range(2000)]
    subsets = list(itertools.combinations(available.tolist(), 2))
    counts = [draws.count(subset) for subset in subsets]
    assert sum(counts) == 2000
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_clients_of_a_cohort_fail_independently():
    drawn, rounds = Uniform(cohort_size=10), 400
    left = Failing(participation=drawn, rate=0.3)
    sizes = []
    for t in range(rounds):
        ids = left.draw(0, t, N)
        assert set(ids) <= set(drawn.draw(0, t, N))
        sizes.append(len(ids))
    counts = np.bincount(sizes, minlength=11)[:11]
    binomial = stats.binom.pmf(np.arange(11), 10, 0.7)
    rare = binomial * rounds < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = rounds * np.append(binomial[~rare], binomial[rare].sum())
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM
    assert left.expected_cohort_size(N) == pytest.approx(7)
    everyone = Failing(participation=drawn, rate=0.0)
    np.testing.assert_array_equal(everyone.draw(0, 5, N), drawn.draw(0, 5, N))


def test_a_million_clients():
    n = 10**6
    for member in [Uniform(cohort_size=100), Poisson(rate=1e-4)]:
        ids = np.concatenate([member.draw(0, round, n) for round in range(200)])
        # Both ends of the population are reached: uniform by Kolmogorov-Smirnov.
        assert stats.kstest(ids / n, "uniform").pvalue > FALSE_ALARM
    assert Weighted(cohort_size=100, weights=np.ones(n)).draw(0, 0, n).size == 100


def available(value):
    return Availability(cohort_size=3, available_fn=lambda round: value)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Uniform(cohort_size=0), ValueError, "cohort_size must be >= 1, got 0"),
        (lambda: Uniform(cohort_size=2.0), TypeError, "cohort_size must be an int"),  # pyright: ignore[reportArgumentType]
        (lambda: Poisson(rate=0), ValueError, "rate must be > 0"),
        (lambda: Poisson(rate=1.5), ValueError, r"rate must be in \[0, 1\], got 1.5"),
        (lambda: Poisson(rate=np.nan), ValueError, "rate must be"),
        (
            lambda: Weighted(cohort_size=1, weights=[[1.0]]),
            ValueError,
            r"weights must have shape \(num_clients,\), got \(1, 1\)",
        ),
        (
            lambda: Weighted(cohort_size=1, weights=[1, -2]),
            ValueError,
            r"weights must be finite and >= 0, got -2.0 for client 1",
        ),
        (
            lambda: Weighted(cohort_size=1, weights=[1, np.inf]),
            ValueError,
            "weights must be finite and >= 0, got inf for client 1",
        ),
        (
            lambda: Weighted(cohort_size=2, weights=[1, 0]),
            ValueError,
            "at least cohort_size=2 positive values, got 1 among 2",
        ),
        (
            lambda: Weighted(cohort_size=1, weights=["a"]),
            TypeError,
            "weights must be numbers",
        ),
        (
            lambda: Failing(participation=Full(), rate=1.0),
            ValueError,
            r"rate must be in \[0, 1\)",
        ),
        (
            lambda: Availability(cohort_size=1, available_fn=[1]),  # pyright: ignore[reportArgumentType]
            TypeError,
            "available_fn must be callable",
        ),
    ],
)
def test_wrong_settings_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("member", "arguments", "error", "message"),
    [
        (
            Uniform(cohort_size=20),
            (0, 0, 10),
            ValueError,
            "cohort_size must be <= num_clients=10, got 20",
        ),
        (
            available([0]),
            (0, 0, 2),
            ValueError,
            "cohort_size must be <= num_clients=2, got 3",
        ),
        (
            available([0, 5]),
            (0, 17, 10),
            ValueError,
            "cohort_size=3 in round 17 with 2 of 10 clients available",
        ),
        (available([]), (0, 4, 10), ValueError, "in round 4 with 0 of 10"),
        (
            available(np.ones(9, bool)),
            (0, 4, 10),
            ValueError,
            r"mask of shape \(10,\).*got a mask of shape \(9,\) in round 4",
        ),
        (available([0, 1, 10]), (0, 4, 10), ValueError, "got id 10 in round 4"),
        (available([0.0, 1.0]), (0, 4, 10), TypeError, "got dtype float64 in round 4"),
        (available([[1], [2]]), (0, 4, 10), ValueError, r"got shape \(2, 1\)"),
        (
            Weighted(cohort_size=1, weights=[1, 1]),
            (0, 0, 3),
            ValueError,
            r"one value per client, shape \(3,\), got shape \(2,\)",
        ),
    ],
)
def test_cohorts_that_cannot_be_drawn_are_explained(member, arguments, error, message):
    with pytest.raises(error, match=message):
        member.draw(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 0, N), ValueError, "seed must be >= 0, got -1"),
        ((0, -1, N), ValueError, "round must be >= 0, got -1"),
        ((0.0, 0, N), TypeError, "seed must be an int"),
        ((0, True, N), TypeError, "round must be an int"),
        ((0, 0, 0), ValueError, "num_clients must be >= 1"),
        ((0, 0, 10.0), TypeError, "num_clients must be an int"),
    ],
)
def test_wrong_arguments_of_draw_are_named(member, arguments, error, message):
    with pytest.raises(error, match=message):
        member.draw(*arguments)
