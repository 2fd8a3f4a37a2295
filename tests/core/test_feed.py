"""Both feeds hand the same batches to a round, and prefetching hides nothing."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from fedjax_core import Execution, LocalWork, Packed, client_mesh
from fedjax_core.feed import HostFeed, Prefetch, ResidentFeed
from fedjax_core.participation import Poisson, Uniform

SIZES = (3, 5, 0, 8, 1, 4, 6, 3, 7, 2, 9, 1)
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
# Examples that carry their own number, from 1: padding can't pass for one of them.
TRAIN = Packed({"id": np.arange(1, OFFSETS[-1] + 1, dtype=np.int32)}, OFFSETS)
WORKS = (
    LocalWork(batch_size=2, epochs=2),
    LocalWork(batch_size=3, steps=5),
    LocalWork(batch_size=2, drop_remainder=True),
)


def make(kind, participation=None, work=WORKS[0], execution=None, **kwargs):
    return kind(
        train=TRAIN,
        work=work,
        participation=participation or Uniform(cohort_size=5),
        seeds=(3, 2**32 - 1),
        execution=execution or Execution(),
        **kwargs,
    )


def batches(cohort, population=None):
    """Client id -> list of its batches, as the ids of their examples."""
    out = {}
    examples = cohort.examples or population or {}
    slots, rows = np.asarray(cohort.queue.slot), np.asarray(cohort.queue.rows)
    for d in range(slots.shape[0]):
        ids = np.asarray(examples["id"])
        ids = ids[d] if cohort.sharded_examples else ids
        for m in range(int(cohort.queue.blocks[d])):
            for lane, slot in enumerate(slots[d, m]):
                if slot == len(cohort.client_id):
                    continue
                start = int(cohort.queue.row_start[d, m, lane])
                steps = int(cohort.num_steps[slot])
                client = int(cohort.client_id[slot])
                assert client not in out
                out[client] = [
                    [int(ids[i]) for i in row if i >= 0]
                    for row in rows[d, start : start + steps]
                ]
    return out


def pick(cohorts, k, s):
    return jax.tree.map(lambda x: np.asarray(x)[k, s], cohorts)


@pytest.mark.parametrize("work", WORKS, ids=("epochs", "steps", "dropped"))
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("block_size", [1, 2])
def test_both_feeds_serve_the_same_examples(work, devices, block_size):
    mesh = client_mesh(jax.devices()[:devices])
    execution = Execution(block_size=block_size, mesh=mesh)
    resident = make(ResidentFeed, None, work, execution, max_rounds=4)
    host = make(HostFeed, None, work, execution)
    assert isinstance(resident, ResidentFeed)
    population = resident.examples()
    chunk = resident.chunk(5, 3, resident.usual())
    assert jax.tree.leaves(chunk.cohorts)[0].shape[:2] == (4, 2)  # a padding round
    for k in range(3):
        single = host.chunk(5 + k, 1, host.usual())
        for s in range(2):
            cohort = pick(chunk.cohorts, k, s)
            expected = batches(cohort, population)
            assert batches(pick(single.cohorts, 0, s)) == expected
            drawn = chunk.client_ids[k][s]
            np.testing.assert_array_equal(single.client_ids[0][s], drawn)
            for client, steps in expected.items():
                # Whole epochs visit all of a client's examples and no other's.
                visits = [i for batch in steps for i in batch]
                own = set(TRAIN.client(client)["id"].tolist())
                assert set(visits) <= own
                if work is WORKS[0]:
                    assert sorted(visits) == sorted([*own, *own])


def test_rounds_and_seeds_draw_different_orders():
    feed = make(HostFeed)
    usual = feed.usual()
    seen = {
        str(batches(pick(feed.chunk(k, 1, usual).cohorts, 0, s)))
        for k in range(4)
        for s in range(2)
    }
    assert len(seen) == 8


def test_a_chunk_does_not_depend_on_the_one_before():
    feed = make(ResidentFeed, max_rounds=2)
    usual = feed.usual()
    alone = feed.chunk(4, 2, usual)
    for first in (0, 2, 4):
        again = feed.chunk(first, 2, usual)
    for a, b in zip(
        jax.tree.leaves(again.cohorts), jax.tree.leaves(alone.cohorts), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", [ResidentFeed, HostFeed])
def test_an_empty_draw_is_a_round_without_clients(kind):
    feed = make(kind, Poisson(rate=1e-9))
    chunk = feed.chunk(0, 1, feed.usual())
    assert batches(pick(chunk.cohorts, 0, 0), {"id": np.zeros(0)}) == {}
    assert not np.asarray(chunk.cohorts.num_steps).any()


def test_chunks_are_larger_for_smaller_models():
    feed = make(ResidentFeed)
    rounds = [feed.with_chunks_for(n).max_rounds for n in (1, 10**5, 10**8, 10**12)]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[0] > 1
    assert rounds[-1] == 1


class Recorder:
    """A feed that tells who calls it; `fails` are rounds it can't make."""

    def __init__(self, fails=(), seconds=0.0):
        self.fails, self.seconds = fails, seconds
        self.asked: list[int] = []
        self.threads: set[str] = set()

    def usual(self):
        return None

    def chunk(self, first, rounds, usual):
        self.asked.append(first)
        self.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        if first in self.fails:
            raise ValueError(f"round {first}")
        return SimpleNamespace(first=first)


def prefetch(feed: Any, count: int) -> Prefetch:
    return Prefetch(feed, [(i, 1) for i in range(count)])


def feed_threads():
    return [t for t in threading.enumerate() if t.name.startswith("feed")]


def test_chunks_come_in_order_from_one_thread_that_ends():
    feed = Recorder()
    assert [c.first for c in prefetch(feed, 5)] == [0, 1, 2, 3, 4]
    assert feed.asked == [0, 1, 2, 3, 4]
    assert len(feed.threads) == 1
    assert threading.current_thread().name not in feed.threads
    assert not feed_threads()
    assert list(prefetch(Recorder(), 0)) == []


def test_the_next_chunk_is_made_while_this_one_runs():
    feed = Recorder()
    for chunk in prefetch(feed, 3):
        deadline = time.monotonic() + 10
        while len(feed.asked) < min(chunk.first + 2, 3):
            assert time.monotonic() < deadline, "nothing was made ahead"
            time.sleep(0.001)
        assert len(feed.asked) == min(chunk.first + 2, 3)  # one ahead and no more


def test_an_error_ahead_does_not_lose_the_chunks_before_it():
    served = []

    def serve(chunk):
        served.append(chunk.first)
        time.sleep(0.01)  # time enough for the error to be there

    with pytest.raises(ValueError, match="round 2"):
        list(map(serve, prefetch(Recorder(fails=(2,)), 5)))
    assert served == [0, 1]
    assert not feed_threads()


@pytest.mark.parametrize("leave", ["break", "raise"])
def test_leaving_early_ends_the_thread(leave):
    feed = Recorder(seconds=0.02)
    try:
        for chunk in prefetch(feed, 100):
            if chunk.first == 1:
                if leave == "break":
                    break
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert leave == "raise"
    assert not feed_threads()
    made = len(feed.asked)
    assert made <= 3
    time.sleep(0.05)
    assert len(feed.asked) == made


def test_an_error_ahead_is_nobodys_problem_when_the_loop_is_left_before():
    for chunk in prefetch(Recorder(fails=(1,)), 3):
        assert chunk.first == 0
        break
    assert not feed_threads()
