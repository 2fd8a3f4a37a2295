"""Epsilon: closed forms, brackets by other accountants, published values, direction."""

import math
import sys

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from fedjax_core.participation import Availability, Full, Poisson, Uniform, Weighted
from fedjax_core.privacy import accounting

dp_accounting = pytest.importorskip("dp_accounting")

REPLACE = "replace-one"
ADD = "add-or-remove"


def spent(participation, **changes):
    """Epsilon of a small standard run, with changes."""
    run = {"num_clients": 100, "rounds": 20, "noise_multiplier": 2.0, "delta": 1e-5}
    return accounting.epsilon(participation, **(run | changes))


def available(cohort_size):
    return Availability(cohort_size=cohort_size, available_fn=lambda round: [])


def gaussian_delta(mu, epsilon):
    """Theorem 8 of Balle and Wang (2018) with mu = sensitivity / standard deviation."""
    first = stats.norm.cdf(mu / 2 - epsilon / mu)
    return first - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))


def subsampled_delta(mu, rate, epsilon):
    """Hockey-stick divergence of (1-q) N(0,1) + q N(mu,1) from N(0,1), integrated."""

    def excess(x):
        q = stats.norm.pdf(x)
        m = rate * stats.norm.pdf(x - mu) + (1 - rate) * q
        return max(0.0, m - math.exp(epsilon) * q)

    edge = mu / 2 + math.log1p(math.expm1(epsilon) / rate) / mu
    return integrate.quad(excess, edge, edge + 12 + mu, epsabs=1e-13)[0]


def rdp_epsilon(event, relation, rounds, delta):
    orders = np.arange(2, 80)
    accountant = dp_accounting.rdp.RdpAccountant(orders, relation)
    return accountant.compose(event, rounds).get_epsilon(delta)


# Gaussian mechanism.


@pytest.mark.parametrize("rounds", [1, 30])
@pytest.mark.parametrize("noise_multiplier", [0.3, 2.0, 50.0])
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_full_participation_is_the_gaussian_mechanism(
    rounds, noise_multiplier, adjacency
):
    epsilon = spent(
        Full(), rounds=rounds, noise_multiplier=noise_multiplier, adjacency=adjacency
    )
    sensitivity = {ADD: 1, REPLACE: 2}[adjacency]
    mu = sensitivity * math.sqrt(rounds) / noise_multiplier
    assert gaussian_delta(mu, epsilon) == pytest.approx(1e-5, rel=1e-6)


def test_full_participation_agrees_with_dp_accounting():
    event = dp_accounting.GaussianDpEvent(2.0)
    accountant = dp_accounting.pld.PLDAccountant()
    reference = accountant.compose(event, 20).get_epsilon(1e-5)
    assert spent(Full()) == pytest.approx(reference, rel=1e-3)


# Sensitivity 2C and C.


def test_sensitivity():
    assert accounting.sensitivity(0.7, ADD) == 0.7
    assert accounting.sensitivity(0.7, REPLACE) == 1.4


def test_replacing_costs_what_half_the_noise_costs():
    assert spent(Full(), adjacency=REPLACE) == spent(Full(), noise_multiplier=1.0)


@pytest.mark.parametrize("participation", [Uniform(cohort_size=100), available(10)])
def test_nothing_is_amplified_at_sensitivity_two(participation):
    assert spent(participation) == spent(Full(), adjacency=REPLACE)


# Below a delta of 1e-10, by the Rényi divergences.


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 5.0])
def test_a_tiny_delta_is_accounted_by_renyi_orders_down_to_one(noise_multiplier):
    # dp_accounting has its own series for fractional orders, and the looser integer
    # ones would give hundreds of times as much for little noise.
    changes = {"rounds": 1000, "noise_multiplier": noise_multiplier, "delta": 1e-12}
    ours = spent(Poisson(rate=0.01), **changes)
    event = dp_accounting.PoissonSampledDpEvent(
        0.01, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    accountant = dp_accounting.rdp.RdpAccountant()
    assert accountant.compose(event, 1000).get_epsilon(1e-12) > 0.94 * ours
    # From above, as a loss distribution at that delta is still right to a few digits.
    exact = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    assert exact.compose(event, 1000).get_epsilon(1e-12) < ours


def test_a_tiny_delta_without_replacement_lies_between_its_bounds():
    # The case above, composed, is the pair that Poisson sampling is accounted with.
    changes = {"rounds": 50, "delta": 1e-12}
    ours = spent(Uniform(cohort_size=10), noise_multiplier=4.0, **changes)
    attained = spent(Poisson(rate=0.1), noise_multiplier=2.0, **changes)
    assert attained <= ours <= 1.1 * attained


# One round of a sampled cohort, exactly.


@pytest.mark.parametrize("noise_multiplier", [1.0, 4.0])
def test_one_round_without_replacement_is_exact(noise_multiplier):
    # The case above attains the bound: delta = q * delta of a Gaussian.
    epsilon = spent(Uniform(cohort_size=5), rounds=1, noise_multiplier=noise_multiplier)
    delta = subsampled_delta(2 / noise_multiplier, 0.05, epsilon)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert delta <= 1e-5 * (1 + 1e-6), "rounded against us"


def test_one_round_of_poisson_is_exact():
    epsilon = spent(Poisson(rate=0.05), rounds=1, noise_multiplier=1.0)
    delta = subsampled_delta(1.0, 0.05, epsilon)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert delta <= 1e-5 * (1 + 1e-6)


# Little noise, where few clients' losses are large.


def test_little_noise_is_accounted_as_closely_as_much():
    run = {"num_clients": 10_000, "rounds": 1000, "noise_multiplier": 0.3}
    # dp_accounting's own loss distribution, at steps of 1e-4, gives 69.816.
    assert spent(Poisson(rate=0.01), **run) == pytest.approx(69.816, rel=1e-3)


@pytest.mark.parametrize("member", [Poisson(rate=0.01), Uniform(cohort_size=50)])
def test_epsilon_has_no_jumps_in_the_noise(member):
    noises = np.geomspace(0.1, 5, 30)
    run = {"num_clients": 10_000, "rounds": 100}
    spent_at = [spent(member, noise_multiplier=z, **run) for z in noises]
    falls = -np.diff(np.log(spent_at))
    assert np.all(falls > 0)
    assert np.all(np.abs(np.diff(falls)) < 0.15), "the slope changes little by little"


@pytest.mark.parametrize("epsilon", [8.0, 100.0])
def test_the_noise_for_a_large_budget_spends_all_of_it(epsilon):
    run = {"num_clients": 10_000, "rounds": 100, "delta": 1e-5}
    uniform = Uniform(cohort_size=50)
    noise = accounting.noise_multiplier_for(uniform, epsilon=epsilon, **run)
    used = accounting.epsilon(uniform, noise_multiplier=noise, **run)
    assert 0.999 * epsilon < used <= epsilon


# Many rounds: between what is attained and what others prove.


@pytest.mark.parametrize(
    ("cohort_size", "rounds", "noise_multiplier"),
    [(1, 500, 2.0), (10, 50, 4.0), (50, 20, 8.0)],
)
def test_uniform_lies_between_its_bounds(cohort_size, rounds, noise_multiplier):
    changes = {"rounds": rounds, "noise_multiplier": noise_multiplier}
    ours = spent(Uniform(cohort_size=cohort_size), **changes)
    # The case above, composed, is the pair that Poisson sampling is accounted with.
    changes["noise_multiplier"] = noise_multiplier / 2
    attained = spent(Poisson(rate=cohort_size / 100), **changes)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        100, cohort_size, dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    proved = rdp_epsilon(event, relation, rounds, 1e-5)
    assert attained * (1 - 1e-3) <= ours <= proved
    assert ours <= 1.3 * attained


def test_poisson_is_tighter_than_rdp_and_close_to_it():
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    reference = rdp_epsilon(event, relation, 20, 1e-5)
    assert 0.75 * reference < spent(Poisson(rate=0.1)) <= reference


@pytest.mark.parametrize(
    ("rate", "noise_multiplier", "rounds", "published"),
    [
        # Abadi et al. (2016), section 3.2: q = 0.01, sigma = 4, T = 10,000.
        (0.01, 4.0, 10_000, 1.26),
        # Bu, Dong, Long and Su (2020), figure 4: batch 256, sigma 1.3, 20 epochs.
        (256 / 60_000, 1.3, 20 * 60_000 // 256, 1.34),
    ],
)
def test_poisson_against_published_moments_accountants(
    rate, noise_multiplier, rounds, published
):
    # Their conversion to epsilon is older and looser, so ours is lower, not by much.
    ours = spent(Poisson(rate=rate), noise_multiplier=noise_multiplier, rounds=rounds)
    assert 0.7 * published < ours < published


# Never 0, monotone, also at the ends of every range.

MEMBERS = {
    "full": Full(),
    "poisson": Poisson(rate=0.1),
    "uniform": Uniform(cohort_size=10),
    "availability": available(10),
}


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


def test_finite_noise_never_costs_nothing(member):
    noises = [0.02, 0.4, 3.0, 1e3, 1e5, 1e7, 1e12]
    epsilons = [spent(member, noise_multiplier=z) for z in noises]
    assert min(epsilons) > 0
    assert np.all(np.isfinite(epsilons))
    assert np.all(np.diff(epsilons) <= 0)
    # delta below the reach of the privacy loss distribution's floating point
    assert 0 < spent(member, delta=1e-12) < math.inf
    assert spent(member, delta=1e-12) > spent(member, delta=1e-6)


def test_no_noise_has_no_bound(member):
    assert spent(member, noise_multiplier=0) == math.inf


def test_epsilon_grows_with_rounds(member):
    for noise in [0.4, 2.0, 300.0]:  # small, usual, and mostly floor
        epsilons = [
            spent(member, rounds=rounds, noise_multiplier=noise)
            for rounds in [1, 2, 10, 11, 100, 10_000]
        ]
        assert np.all(np.diff(epsilons) > 0)


def test_epsilon_grows_with_the_sampling_rate():
    for noise in [0.4, 3.0]:
        rates = [0.001, 0.01, 0.011, 0.1, 0.5, 0.9, 0.99, 1.0]
        poisson = [spent(Poisson(rate=q), noise_multiplier=noise) for q in rates]
        sizes = [1, 2, 10, 50, 90, 99, 100]
        uniform = [spent(Uniform(cohort_size=c), noise_multiplier=noise) for c in sizes]
        for epsilons in (poisson, uniform):
            assert np.all(np.diff(epsilons) >= -1e-3 * np.array(epsilons[1:]))
        assert poisson[-1] == spent(Full(), noise_multiplier=noise)


# Calibration.


def test_noise_multiplier_for_the_gaussian_mechanism():
    noise = accounting.noise_multiplier_for(
        Full(), num_clients=100, rounds=1, epsilon=0.8, delta=1e-5
    )
    closed_form = optimize.root_scalar(
        lambda z: gaussian_delta(1 / z, 0.8) - 1e-5, bracket=(0.5, 50), xtol=1e-12
    ).root
    assert closed_form <= noise <= closed_form * (1 + 2e-4)


@pytest.mark.parametrize("epsilon", [0.2, 6.0])
def test_noise_multiplier_spends_the_budget(member, epsilon):
    run = {"num_clients": 100, "rounds": 20, "delta": 1e-5}
    noise = accounting.noise_multiplier_for(member, epsilon=epsilon, **run)
    used = accounting.epsilon(member, noise_multiplier=noise, **run)
    assert 0.995 * epsilon < used <= epsilon


# Errors.


@pytest.mark.parametrize(
    ("participation", "adjacency", "message"),
    [
        (
            Uniform(cohort_size=1),
            ADD,
            "must be 'replace-one' with Uniform participation, got 'add-or-remove'",
        ),
        (available(1), ADD, "must be 'replace-one' with Availability participation"),
        (Poisson(rate=0.5), REPLACE, "must be 'add-or-remove' with Poisson"),
        (Full(), "swap", "adjacency must be one of 'add-or-remove', 'replace-one'"),
        (
            Weighted(cohort_size=1, weights=np.ones(100)),
            None,
            "must not be Weighted for a privacy guarantee: none is known",
        ),
    ],
)
def test_guarantees_that_do_not_exist_are_refused(participation, adjacency, message):
    with pytest.raises(ValueError, match=message):
        spent(participation, adjacency=adjacency)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"delta": 0}, ValueError, "delta must be > 0 and < 1, got 0"),
        ({"delta": 1.0}, ValueError, "delta must be > 0 and < 1"),
        ({"noise_multiplier": -1}, ValueError, "noise_multiplier must be >= 0"),
        ({"rounds": 0}, ValueError, "rounds must be >= 1"),
        ({"rounds": 1.5}, TypeError, "rounds must be an int"),
        ({"num_clients": 5}, ValueError, "cohort_size must be <= num_clients=5"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        spent(Uniform(cohort_size=10), **changes)


def test_other_participations_are_refused():
    with pytest.raises(TypeError, match="participation must be one of Full, Poisson"):
        spent("uniform")


def test_a_missing_dp_accounting_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert spent(Full()) > 0, "needs no accountant"
    with pytest.raises(ImportError, match=r"pip install 'fedjax_core\[privacy\]'"):
        spent(Poisson(rate=0.1))
