"""Clustered federated learning in the reduced settings whose outcomes are known.

10 classes in 20 dimensions, class means N(0, 1.2^2 I), unit noise, softmax regression
with 3 epochs of batches of 100 at rate 0.1.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.reference import softmax_loss

from fedjax_core import LocalWork, Packed
from fedjax_core.algorithms import cfl
from fedjax_core.attacks import by_mark, random_update
from fedjax_core.data.packed import Dataset
from fedjax_core.data.splits import merge
from fedjax_core.datasets import partition
from fedjax_core.datasets.adversaries import adversaries
from fedjax_core.local import local_sgd
from fedjax_core.plan import Capacity, Draft
from fedjax_core.types import Execution

WORK = LocalWork(batch_size=100, epochs=3)
ROBUST = cfl.Config(eps1=None, eps2=0.0, robust=True, max_clusters=1, work=WORK)


def draw(n: int, dim: int = 20, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    means, y = 1.2 * rng.normal(size=(10, 20)), rng.integers(0, 10, n)
    x = np.zeros((n, dim), np.float32)
    x[:, :20] = means[y] + rng.normal(size=(n, 20))
    examples = {"x": x, "y": y.astype(np.int32)}
    return Dataset(examples, examples)


def params(dim: int = 20):
    return {"w": jnp.zeros((dim, 10)), "b": jnp.zeros(10)}


def cohorts(ids, train: Packed, rounds: int, rows: int):
    """Rounds of the same clients; shapes depend on how many and on `rows` alone."""
    examples = {k: jnp.asarray(v) for k, v in train.examples.items()}
    for t in range(rounds):
        draft = Draft(
            np.asarray(ids), train.offsets, WORK, seed=0, round=t, execution=Execution()
        )
        capacity = Capacity(len(ids), len(ids), rows, 15)
        plan = draft.build(capacity, num_clients=train.num_clients)
        yield dataclasses.replace(jax.tree.map(jnp.asarray, plan), examples=examples)


def test_the_gap_grows_with_the_data():
    # One seed printed 0.31, 0.98 and 1.24 for 20, 100 and 500 points a client.
    sizes, parts = (20, 100, 500), []
    for n in sizes:
        parts.append(partition.label_permutation(draw(20 * n), 20, 4))
    data = merge(*(p.data for p in parts), prefixes=["a", "b", "c"])
    truth = jnp.asarray(np.concatenate([p.cluster for p in parts]), jnp.int32)
    config = cfl.Config(eps2=1e6, max_clusters=1, work=WORK)  # never cuts
    algorithm = cfl.make(config, softmax_loss)
    step, gaps, norms = jax.jit(algorithm.round), [], []
    for k in range(3):
        state, metrics = algorithm.init(params(), 60), {}
        ids = np.arange(20 * k, 20 * k + 20)
        for cohort in cohorts(ids, data.train, 60, rows=20 * 15):
            cohort = dataclasses.replace(cohort, public={"cluster": truth})
            state, metrics = step(state, cohort, jax.random.key(0))
        gaps.append(float(metrics["gap"]))
        norms.append([float(metrics[f"{m}_update_norm"]) for m in ("mean", "max")])
    assert gaps[0] < gaps[1] < gaps[2]
    np.testing.assert_allclose(gaps, [0.31, 0.98, 1.24], atol=0.1)
    mean, largest = np.transpose(norms)
    assert (mean < 0.03).all(), "stationary"
    assert (largest > 0.3).all(), "and yet clients would move"


def removals(kind, num_clients, rounds, dim, points=100):
    """Which clients are removed in which round, of which the first 30 % attack."""
    data = partition.iid(draw(points * num_clients, dim), num_clients)
    bad = np.arange(num_clients) < 0.3 * num_clients
    train = adversaries(data, bad, kind).train
    state = ALGORITHM.init(params(dim), num_clients)
    rows = num_clients * 3 * -(-points // 100)
    for cohort in cohorts(range(num_clients), train, rounds, rows):
        state, _ = STEP(state, cohort, jax.random.key(0))
    return np.asarray(state.tree.removed), bad


ALGORITHM = cfl.make(
    ROBUST,
    softmax_loss,
    program=lambda loss, opt: by_mark(local_sgd(loss, opt), random_update()),
)
STEP = jax.jit(ALGORITHM.round)


@pytest.mark.parametrize("kind", ["label-flip", "noisy", "clean", "byzantine"])
def test_who_is_removed_of_100_clients(kind):
    # 210 parameters are too few to tell random updates from others by 0.02.
    removed, bad = removals(kind, 100, 6, 20)
    if kind in ("clean", "byzantine"):
        assert (removed == -1).all()
    else:
        assert (removed[~bad] == -1).all()
        assert len(set(removed[bad])) == 1, "all at once"
        assert 0 <= removed[0] < 4


def test_random_updates_are_removed_from_large_models():
    # Cosines of random updates have the deviation 1 / sqrt(d); the largest of 20 is
    # below 0.02 from d = 2 ln(20) / 0.02^2 = 15,000 on. Here d = 60,010.
    removed, bad = removals("byzantine", 20, 8, 6000, points=20)
    assert (removed[bad] >= 0).all()
    assert (removed[~bad] == -1).all()
    assert len(set(removed[bad])) > 1, "a few at a time"
