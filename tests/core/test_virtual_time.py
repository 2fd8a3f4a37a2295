"""Virtual time: turns by identity, rounds that wait and rounds that do not."""

import jax
import numpy as np
import pytest

from fedjax_core import (
    FederatedData,
    LocalWork,
    Packed,
    Poisson,
    Uniform,
    models,
    simulate,
)
from fedjax_core.algorithms import fedavg, fedbuff
from fedjax_core.virtual_time import Asynchronous, Devices, Synchronous, Timed

SECONDS = np.array([5.0, 1.0, 8.0, 0.5, 3.0, 6.0, 2.0, 9.0, 4.0, 7.0])
N = len(SECONDS)


def test_a_turn_takes_its_steps_and_its_bytes():
    alike = Devices(step_seconds=0.5, bytes_per_second=100.0)
    np.testing.assert_allclose(alike.seconds([4, 0, 6], 200.0), [4.0, 2.0, 5.0])
    np.testing.assert_allclose(Devices(step_seconds=2.0).seconds([3], 1e9), [6.0])


def test_devices_are_log_normal_and_belong_to_clients():
    devices = Devices(spread=0.5, bytes_per_second=1.0, link_spread=0.25, seed=7)
    count = 40_000
    logs = np.log(devices.seconds(np.ones(count)))
    links = np.log(devices.seconds(np.zeros(count), 1.0))
    for values, spread in ((logs, 0.5), (links, 0.25)):
        # Five standard errors: a false alarm in 1.7 million.
        assert abs(values.mean()) < 5 * spread / count**0.5
        assert abs(values.std() - spread) < 5 * spread / (2 * count) ** 0.5
    assert abs(np.corrcoef(logs, links)[0, 1]) < 5 / count**0.5
    few = devices.seconds(np.ones(3))
    np.testing.assert_array_equal(few, devices.seconds(np.ones(count))[:3])
    assert (few != Devices(spread=0.5, seed=8).seconds(np.ones(3))).all()


def test_a_synchronous_round_waits_for_its_slowest_client():
    waits = Synchronous(participation=Uniform(cohort_size=4), seconds=SECONDS)
    assert isinstance(waits, Timed)
    for round in range(5):
        ids = Uniform(cohort_size=4).draw(3, round, N)
        np.testing.assert_array_equal(waits.draw(3, round, N), ids)
        np.testing.assert_array_equal(waits.start_rounds(3, round, N), [round] * 4)
        assert waits.round_seconds(3, round, N) == SECONDS[ids].max()


def test_a_round_can_wait_for_the_fastest_alone():
    selected = Uniform(cohort_size=6)
    waits = Synchronous(participation=selected, seconds=SECONDS, wait_for=4)
    assert waits.max_cohort_size(N) == waits.expected_cohort_size(N) == 4
    for round in range(5):
        ids = selected.draw(0, round, N)
        fastest = sorted(ids, key=lambda i: SECONDS[i])[:4]
        np.testing.assert_array_equal(waits.draw(0, round, N), np.sort(fastest))
        assert waits.round_seconds(0, round, N) == SECONDS[fastest[-1]]
    nobody = Synchronous(participation=Poisson(rate=1e-9), seconds=SECONDS)
    assert nobody.round_seconds(0, 0, N) == 0


def test_turns_vary_by_seed_round_and_client():
    waits = Synchronous(
        participation=Uniform(cohort_size=1), seconds=np.full(500, 2.0), jitter=0.3
    )
    times = {
        (seed, round): waits.round_seconds(seed, round, 500)
        for seed in (0, 1)
        for round in range(200)
    }
    assert len(set(times.values())) == 400
    logs = np.log([t / 2 for t in times.values()])
    assert abs(logs.mean()) < 5 * 0.3 / 20  # five standard errors
    assert abs(logs.std() - 0.3) < 5 * 0.3 / 800**0.5


@pytest.mark.parametrize(("concurrency", "buffer_size"), [(1, 1), (3, 2), (6, 5)])
def test_updates_come_in_the_order_in_which_turns_end(concurrency, buffer_size):
    events = Asynchronous(
        concurrency=concurrency, buffer_size=buffer_size, seconds=SECONDS
    )
    ends = np.cumsum([events.round_seconds(1, t, N) for t in range(60)])
    previous = np.full(N, -1)
    for round in range(60):
        ids = events.draw(1, round, N)
        starts = events.start_rounds(1, round, N)
        assert len(np.unique(ids)) == len(ids) == buffer_size
        assert (starts <= round).all()
        # A client starts anew only after its last update was aggregated.
        assert (starts > previous[ids]).all()
        previous[ids] = round
        for i, start in zip(ids, starts, strict=True):
            earliest = ends[start - 1] if start else 0.0
            latest = ends[start]
            # It started while the model of round `start` was the newest, and arrived
            # after the aggregation before this one and not after this one.
            assert earliest + SECONDS[i] <= ends[round] + 1e-9
            assert round == 0 or latest + SECONDS[i] >= ends[round - 1] - 1e-9
    if concurrency == 1:
        order = [int(events.draw(1, t, N)[0]) for t in range(60)]
        np.testing.assert_allclose(ends, np.cumsum(SECONDS[order]))
        assert all(events.start_rounds(1, t, N)[0] == t for t in range(60))


def test_draws_need_no_earlier_ones_and_no_other_seeds():
    def make():
        return Asynchronous(concurrency=3, buffer_size=2, seconds=SECONDS, jitter=0.2)

    one, other = make(), make()
    late = one.draw(5, 30, N), one.start_rounds(5, 30, N), one.round_seconds(5, 30, N)
    for round in range(31):
        other.draw(6, round, N)
        other.draw(5, round, N)
    np.testing.assert_array_equal(late[0], other.draw(5, 30, N))
    np.testing.assert_array_equal(late[1], other.start_rounds(5, 30, N))
    assert late[2] == other.round_seconds(5, 30, N)


def test_staleness_is_concurrency_over_buffer_size():
    # Every update that arrives was started concurrency arrivals ago, on average: that
    # many turns end between its start and its end.
    events = Asynchronous(
        concurrency=12, buffer_size=4, seconds=np.ones(200), jitter=0.5
    )
    ages = [t - events.start_rounds(0, t, 200) for t in range(50, 450)]
    assert abs(np.mean(ages) - (12 - 1) / 4) < 0.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Devices(step_seconds=0), "step_seconds must be > 0"),
        (lambda: Devices(bytes_per_second=0.0), "bytes_per_second must be > 0, got 0"),
        (
            lambda: Synchronous(participation=Uniform(cohort_size=2), seconds=[1, 0]),
            "seconds must be > 0, got 0",
        ),
        (
            lambda: Asynchronous(concurrency=3, buffer_size=2, seconds=[1, 1, 1]),
            "concurrency must be <= 2",
        ),
        (
            lambda: Asynchronous(concurrency=1, buffer_size=1, seconds=[1, 1]).draw(
                0, 0, 3
            ),
            r"seconds must hold one value per client, shape \(3,\)",
        ),
    ],
)
def test_impossible_times_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 40).astype(np.int32)
    x = (rng.standard_normal((40, 3)) + y[:, None]).astype(np.float32)
    packed = Packed({"x": x, "y": y}, np.arange(0, 41, 4))
    return FederatedData(packed, packed)


def test_every_method_has_a_clock(data, tmp_path):
    model = models.logistic_regression(3, 2)
    work = LocalWork(batch_size=2)
    waits = Synchronous(participation=Uniform(cohort_size=3), seconds=SECONDS)

    def run(**kwargs):
        method = fedavg.make(fedavg.Config(work=work), model.loss)
        return simulate(
            method, data, model, rounds=6, seeds=[0, 4], progress=False,
            eval_every=2, participation=waits, **kwargs,
        )  # fmt: skip

    result = run(run_dir=tmp_path)
    expected = [[waits.round_seconds(s, t, N) for t in range(6)] for s in (0, 4)]
    np.testing.assert_array_equal(result.train["virtual_seconds"], expected)
    seconds, values = result.series("test_loss", over="virtual_seconds")
    np.testing.assert_allclose(seconds, np.cumsum(expected, axis=1)[:, [1, 3, 5]])
    np.testing.assert_array_equal(values, result.evaluations["test_loss"])
    again = run(run_dir=tmp_path, resume=True)
    np.testing.assert_array_equal(again.train["virtual_seconds"], expected)


def test_time_to_a_goal_is_when_it_is_first_reached(data):
    model = models.logistic_regression(3, 2)
    events = Asynchronous(concurrency=3, buffer_size=2, seconds=SECONDS)
    method = fedbuff.make(fedbuff.Config(work=LocalWork(batch_size=2)), model.loss)
    result = simulate(
        method, data, model, rounds=8, seeds=[0, 1], progress=False, eval_every=1,
        participation=events,
    )  # fmt: skip
    seconds, values = result.series("test_loss", over="virtual_seconds")
    goal = float(np.median(values[0]))
    first = np.argmax(values <= goal, axis=1)
    reached = (values <= goal).any(1)
    want = np.where(reached, seconds[np.arange(2), first], np.nan)
    got = result.time_to("test_loss", at_most=goal, over="virtual_seconds")
    np.testing.assert_array_equal(got, want)
    assert np.isnan(result.time_to("test_loss", at_most=-1.0)).all()
    rounds = result.time_to("test_loss", at_least=-1.0)
    np.testing.assert_array_equal(rounds, [1, 1])
    with pytest.raises(ValueError, match="exactly one of at_least and at_most"):
        result.time_to("test_loss")
    assert jax.tree.leaves(result.state.past)[0].shape[:2] == (2, 11)
