"""Plans: every example as often as it should be, in an order nothing else decides."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.reference import visits

from fedjax_core import Execution, LocalWork, Packed, client_mesh, plan_round
from fedjax_core.plan import Capacity, Draft, fit, pow2, usual_capacity

# Each statistical test fails by chance with at most this probability; seeds are fixed.
FALSE_ALARM = 1e-4


def execution(block_size=1, devices=1):
    return Execution(block_size=block_size, mesh=client_mesh(jax.devices()[:devices]))


def population(sizes):
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Packed({"x": np.arange(offsets[-1], dtype=np.float32)}, offsets)


def draft(ids, sizes, work, *, seed=0, round=0, how=None):
    return Draft(
        np.asarray(ids, np.int64),
        population(sizes).offsets,
        work,
        seed=seed,
        round=round,
        execution=how or Execution(),
    )


def build(d, num_clients):
    return d.build(d.need, num_clients=num_clients)


def orders(ids, sizes, work, **kwargs):
    return visits(build(draft(ids, sizes, work, **kwargs), len(sizes)))


works = st.builds(
    LocalWork,
    batch_size=st.integers(1, 5),
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 7),
    drop_remainder=st.booleans(),
)


@st.composite
def rounds(draw):
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    ids = draw(st.permutations(range(len(sizes))))
    ids = ids[: draw(st.integers(0, len(ids)))]
    how = execution(draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    return ids, sizes, draw(works), how, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rounds())
def test_every_client_walks_through_its_own_examples(case):
    ids, sizes, work, how, seed = case
    d = draft(ids, sizes, work, how=how, seed=seed)
    need = d.need
    # Room to spare must not matter.
    capacity = Capacity(need.slots + 2, need.blocks + 1, need.rows + 3, need.examples)
    cohort = d.build(capacity, num_clients=len(sizes))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    seen = visits(cohort)
    used = 0
    for slot, i in enumerate(ids):
        batch, size = work.batch_size, sizes[i]
        per_epoch = size // batch if work.drop_remainder else -(-size // batch)
        steps = per_epoch * work.epochs
        if work.steps is not None:
            steps = work.steps if per_epoch else 0
        assert cohort.client_id[slot] == i
        assert cohort.num_examples[slot] == size
        assert cohort.num_steps[slot] == steps
        assert cohort.client_mask[slot] == (steps > 0)
        assert (i in seen) == (steps > 0), "clients without work are skipped"
        if not steps:
            continue
        assert len(seen[i]) == steps
        used += sum(len(b) for b in seen[i])
        own = set(range(offsets[i], offsets[i + 1]))
        for first in range(0, steps, per_epoch):
            walk = seen[i][first : first + per_epoch]
            flat = np.concatenate(walk)
            assert len(set(flat)) == len(flat), "no repeat within an epoch"
            assert set(flat) <= own
            if len(walk) == per_epoch:
                kept = per_epoch * batch if work.drop_remainder else size
                assert len(flat) == kept
                assert all(len(b) == batch for b in walk[:-1])
                assert len(walk[-1]) == kept - batch * (per_epoch - 1)
            else:  # stopped in mid-epoch
                assert all(
                    len(b) == min(batch, size - k * batch) for k, b in enumerate(walk)
                )
        # A slot's place in the queue is where the engine will look for its results.
        assert cohort.queue.slot.reshape(-1)[cohort.position[slot]] == slot
    assert set(seen) <= set(ids)
    assert (cohort.queue.rows >= 0).sum() == used, "nothing else is in the rows"
    padding = slice(len(ids), None)
    assert np.all(cohort.client_id[padding] == -1)
    assert not cohort.client_mask[padding].any()
    assert np.all(cohort.state_row[padding] >= len(sizes))
    assert np.sum(cohort.queue.slot < capacity.slots) == len(seen)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rounds())
def test_local_examples_are_the_same_examples(case):
    ids, sizes, work, how, seed = case
    d = draft(ids, sizes, work, how=how, seed=seed)
    there = d.build(d.need, num_clients=len(sizes)).queue.rows
    here = d.build(d.need, num_clients=len(sizes), local=True).queue.rows
    for device, held in enumerate(d.local_examples()):
        assert len(held) <= d.need.examples
        mask = there[device] >= 0
        np.testing.assert_array_equal(mask, here[device] >= 0)
        np.testing.assert_array_equal(held[here[device][mask]], there[device][mask])


def test_the_last_batch_of_an_epoch_is_short_and_masked():
    cohort = plan_round(
        [0], population([5]), LocalWork(batch_size=2, epochs=2), seed=0, round=0
    )
    rows = np.asarray(cohort.queue.rows)[0, :6]
    np.testing.assert_array_equal((rows >= 0).sum(1), [2, 2, 1, 2, 2, 1])
    assert np.all(np.asarray(cohort.queue.rows)[0, 6:] == -1)


def test_drop_remainder_leaves_a_client_smaller_than_a_batch_out():
    work = LocalWork(batch_size=8, drop_remainder=True)
    cohort = plan_round([0, 1], population([3, 17]), work, seed=0, round=0)
    np.testing.assert_array_equal(cohort.num_steps, [0, 2])
    np.testing.assert_array_equal(cohort.client_mask, [False, True])
    assert list(visits(cohort)) == [1]


def test_steps_stop_in_mid_epoch_and_wrap_into_the_next():
    work = LocalWork(batch_size=2, epochs=9, steps=4)
    walk = orders([0], [5], work)[0]
    assert [len(b) for b in walk] == [2, 2, 1, 2]
    # The first epoch is whole, and the same as it would be without the stop.
    whole = orders([0], [5], LocalWork(batch_size=2, epochs=2))[0]
    for a, b in zip(walk, whole, strict=False):
        np.testing.assert_array_equal(a, b)


SIZES = [7, 0, 3, 12, 1, 5, 9, 4]
WORK = LocalWork(batch_size=4, epochs=3)


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_order_does_not_depend_on_the_schedule_or_the_company(block_size, devices):
    alone = {i: orders([i], SIZES, WORK).get(i) for i in range(8)}
    for ids in (range(8), [6, 0, 3], [3, 6, 0], [5, 4, 3, 2, 1, 0]):
        seen = orders(ids, SIZES, WORK, how=execution(block_size, devices))
        for i, walk in seen.items():
            np.testing.assert_equal(walk, alone[i])


def test_batch_size_cuts_the_same_order():
    one = orders([3], SIZES, LocalWork(batch_size=1, epochs=2))[3]
    five = orders([3], SIZES, LocalWork(batch_size=5, epochs=2))[3]
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(five))


def test_order_changes_with_seed_round_and_epoch():
    # A client of 20 examples repeats an order with probability 1 / 20!.
    work = LocalWork(batch_size=20, epochs=3)
    walks = [
        tuple(batch)
        for seed, round in itertools.product([0, 1, 2**32 - 1], [0, 1, 1000])
        for batch in orders([1], [4, 20], work, seed=seed, round=round)[1]
    ]
    assert len(set(walks)) == len(walks) == 27


def test_two_clients_of_a_round_are_not_shuffled_alike():
    walks = orders([0, 1], [20, 20], LocalWork(batch_size=20))
    assert not np.array_equal(walks[0][0], walks[1][0] - 20)


def test_the_global_generator_is_neither_read_nor_changed():
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state(legacy=False)  # noqa: NPY002
    first = orders(range(8), SIZES, WORK)
    after = np.random.get_state(legacy=False)  # noqa: NPY002
    np.testing.assert_equal(after, before)
    np.random.seed(2)  # noqa: NPY002
    np.testing.assert_equal(orders(range(8), SIZES, WORK), first)


def test_shuffles_are_uniform_over_rounds():
    orders_of_4 = list(itertools.permutations(range(4)))
    counts = dict.fromkeys(orders_of_4, 0)
    for round in range(2400):
        walk = orders([1], [2, 4], LocalWork(batch_size=4), round=round)[1][0]
        counts[tuple(walk - 2)] += 1
    assert stats.chisquare(list(counts.values())).pvalue > FALSE_ALARM


@pytest.mark.parametrize("seed", [0, 7])
def test_shuffles_of_successive_epochs_are_uniform_and_independent(seed):
    work = LocalWork(batch_size=3, epochs=7200)
    walks = np.array(orders([0], [3], work, seed=seed)[0])
    code = walks @ [9, 3, 1]  # tells the six orders apart
    _, index = np.unique(code, return_inverse=True)
    # Pairs that overlap would not be independent of each other.
    pairs = np.bincount(index[:-1:2] * 6 + index[1::2], minlength=36)
    assert stats.chisquare(pairs).pvalue > FALSE_ALARM


def test_shuffles_of_neighbouring_seeds_rounds_and_clients_are_independent():
    work = LocalWork(batch_size=3)
    pairs = {
        "seed": np.zeros((6, 6)),
        "round": np.zeros((6, 6)),
        "id": np.zeros((6, 6)),
    }
    code = {p: k for k, p in enumerate(itertools.permutations(range(3)))}

    def draw(seed, round):
        seen = orders([0, 1], [3, 3], work, seed=seed, round=round)
        return code[tuple(seen[0][0])], code[tuple(seen[1][0] - 3)]

    for t in range(1200):
        (a, b), (c, _), (e, _) = draw(2 * t, 5), draw(2 * t + 1, 5), draw(3, 2 * t)
        f, _ = draw(3, 2 * t + 1)
        pairs["seed"][a, c] += 1
        pairs["id"][a, b] += 1
        pairs["round"][e, f] += 1
    for table in pairs.values():
        assert stats.chisquare(table.ravel()).pvalue > FALSE_ALARM / 3


# Capacities.


def test_rounds_of_varying_size_share_few_capacities():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 200, 1000)
    work, how = LocalWork(batch_size=20), execution(4, 8)
    usual = usual_capacity(sizes, work, how, 120)
    seen = set()
    for round, c in enumerate(rng.integers(80, 121, 40)):
        d = draft(rng.choice(1000, c, replace=False), sizes, work, round=round, how=how)
        seen.add(fit([d], usual))
    assert len(seen) <= 4


def test_sizes_grow_by_powers_of_two_when_they_must():
    # Sized for two clients, one of them huge.
    sizes, work = [1000, 1, 1, 1, 1], LocalWork(batch_size=10)
    usual = usual_capacity(np.array(sizes), work, Execution(), 2)
    assert fit([draft([0, 1], sizes, work)], usual) == usual
    grown = fit([draft(range(5), sizes, work)], usual)
    assert grown.slots == 8
    assert grown.blocks == 8
    assert grown.rows == usual.rows
    small = Capacity(1, 1, 1, 1)
    grown = fit([draft([3], sizes, work), draft([0], sizes, work)], small)
    assert grown == Capacity(1, 1, 128, 1024)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rounds(), st.integers(1, 12))
def test_every_round_fits(case, cohort_size):
    ids, sizes, work, how, _ = case
    d = draft(ids, sizes, work, how=how)
    usual = usual_capacity(np.array(sizes), work, how, cohort_size)
    have = fit([d], usual)
    for field in ("slots", "blocks", "rows", "examples"):
        need, got = getattr(d.need, field), getattr(have, field)
        assert max(need, getattr(usual, field)) <= got
        assert got in (getattr(usual, field), pow2(need))


@pytest.mark.parametrize(("n", "p"), [(0, 1), (1, 1), (2, 2), (3, 4), (1025, 2048)])
def test_pow2(n, p):
    assert pow2(n) == p


# Balance.


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_devices_are_busy_equally_long(sizes, block_size, devices):
    d = draft(
        range(len(sizes)),
        sizes,
        LocalWork(batch_size=1),
        how=execution(block_size, devices),
    )
    cohort = build(d, len(sizes))
    slot, blocks = np.asarray(cohort.queue.slot), np.asarray(cohort.queue.blocks)
    steps = np.append(cohort.num_steps, 0)  # padding takes no step
    # A block runs to its longest client.
    busy = steps[slot].max(2).sum(1)
    assert busy.max() - busy.min() <= max(sizes)
    assert blocks.max() - blocks.min() <= 1
    # Blocks in use come first.
    np.testing.assert_array_equal(
        (slot < len(sizes)).any(2), np.arange(slot.shape[1])[None] < blocks[:, None]
    )


def test_the_longest_of_a_lap_goes_where_least_is():
    d = draft(
        range(6), [1, 10, 4, 6, 4, 5], LocalWork(batch_size=1), how=execution(1, 2)
    )
    np.testing.assert_array_equal(d.device_rows, [10 + 4 + 1, 6 + 5 + 4])


# Edges and errors.


def test_a_cohort_of_nobody_has_empty_queues():
    cohort = plan_round(
        [], population(SIZES), WORK, seed=0, round=0, execution=execution(2, 4)
    )
    assert not np.any(cohort.client_mask)
    assert np.all(np.asarray(cohort.queue.blocks) == 0)
    assert np.all(np.asarray(cohort.queue.rows) == -1)


def test_a_cohort_without_examples_has_empty_queues():
    cohort = plan_round([0, 1], population([0, 0]), WORK, seed=0, round=0)
    np.testing.assert_array_equal(cohort.num_steps, [0, 0])
    np.testing.assert_array_equal(cohort.client_id, [0, 1])
    assert np.all(np.asarray(cohort.queue.blocks) == 0)


def test_cohort_size_pads():
    cohort = plan_round([5, 2], population(SIZES), WORK, seed=0, round=0, cohort_size=4)
    np.testing.assert_array_equal(cohort.client_id, [5, 2, -1, -1])
    np.testing.assert_array_equal(cohort.num_examples, [5, 3, 0, 0])
    np.testing.assert_array_equal(cohort.client_mask, [True, True, False, False])
    assert cohort.num_clients == 8


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an int, got 2.0"),
        ({"epochs": 0}, ValueError, "epochs must be >= 1, got 0"),
        ({"epochs": 1.0}, TypeError, "epochs must be an int, got 1.0"),
        ({"steps": -1}, ValueError, "steps must be >= 1, got -1"),
        ({"steps": True}, TypeError, "steps must be an int"),
    ],
)
def test_impossible_work_is_refused(work, error, message):
    with pytest.raises(error, match=message):
        LocalWork(**work)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([0, 8], "0..7, got 8"), ([-1], "0..7, got -1"), ([2, 5, 2], "got 2 twice")],
)
def test_ids_that_are_no_clients_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        plan_round(ids, population(SIZES), WORK, seed=0, round=0)


def test_max_steps_below_a_client_s_steps_is_refused():
    how = Execution(max_steps=9)
    draft([3], SIZES, WORK, how=how)
    how = Execution(max_steps=8)
    with pytest.raises(ValueError, match=r"max_steps must be at least 9.*got 8"):
        draft([3], SIZES, WORK, how=how)
