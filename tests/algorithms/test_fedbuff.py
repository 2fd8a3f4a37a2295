"""FedBuff against the paper in NumPy, and where it is FedAvg."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    COHORTS,
    KEY,
    MODEL_BYTES,
    PARAMS,
    START,
    TRAIN,
    N,
    assert_close,
    broken,
    deltas,
    last,
    moved,
)
from tests.reference import softmax_loss

from fedjax_core import LocalWork, plan_round
from fedjax_core.algorithms import fedavg, fedbuff

WORK = LocalWork(batch_size=4, epochs=2)
# From which round's model each client of `COHORTS` starts.
STARTS = [[0, 0, 0, 0], [0, 1, 1, 0], [2, 0, 1, 2], [0, 3, 3, 1]]


def buffers(algorithm, starts=STARTS, train=TRAIN):
    state = algorithm.init(PARAMS, N)
    step = jax.jit(algorithm.round)
    for t, (ids, start) in enumerate(zip(COHORTS, starts, strict=True)):
        cohort = plan_round(ids, train, algorithm.work, seed=3, round=t)
        start = jnp.array(start, jnp.int32)
        cohort = dataclasses.replace(cohort, start_round=start)
        state, metrics = step(state, cohort, KEY)
        yield state, metrics, cohort


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("most", [1, 5])
def test_buffers_match_the_paper(exponent, most):
    config = fedbuff.Config(
        client_lr=0.3, server_lr=0.7, exponent=exponent, max_staleness=most, work=WORK
    )
    models = [START]
    rounds = buffers(fedbuff.make(config, softmax_loss))
    for t, (state, metrics, cohort) in enumerate(rounds):
        ages = dict(zip(COHORTS[t], np.subtract(t, STARTS[t]), strict=True))
        local = {s: deltas(models[s], cohort, 0.3) for s in set(STARTS[t])}
        counted = [i for i in local[STARTS[t][0]] if ages[i] <= most]
        total = {name: np.zeros_like(x) for name, x in START.items()}
        for i in counted:
            for name in total:
                weight = (1 + ages[i]) ** -exponent
                total[name] += weight * local[t - ages[i]][i][name] / len(counted)
        models.append(moved(models[-1], total, 0.7))
        assert_close(state.params, models[-1])
        np.testing.assert_allclose(
            metrics["staleness"], np.mean([ages[i] for i in counted])
        )
        late = sum(a > most for i, a in ages.items() if i != 3)  # 3 has no examples
        assert metrics["stale_clients"] == late
        assert metrics["valid_clients"] == len(counted)
        trains = sum(i != 3 for i in ages)
        assert metrics["downlink_bytes"] == trains * MODEL_BYTES
        kept = jax.tree.map(lambda x, t=t: x[(t + 1) % (most + 1)], state.past)
        assert_close(kept, models[-1])


def test_without_staleness_it_is_fedavg():
    fresh = fedbuff.make(fedbuff.Config(work=WORK), softmax_loss)
    same = fedavg.make(fedavg.Config(work=WORK, weights="uniform"), softmax_loss)
    assert_close(last(fresh).params, last(same).params, rtol=1e-6, atol=1e-7)


def test_a_buffer_of_nobody_still_hands_out_the_newest_model():
    config = fedbuff.Config(max_staleness=1, work=WORK)
    algorithm = fedbuff.make(
        config, softmax_loss, server_optimizer=optax.sgd(1.0, momentum=0.9)
    )
    late = [STARTS[0], [-9] * 4, [2] * 4, [3] * 4]
    (first, *_), (second, metrics, _), (third, _, cohort), _ = buffers(algorithm, late)
    assert metrics["valid_clients"] == 0
    assert metrics["stale_clients"] == 3
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
    jax.tree.map(np.testing.assert_array_equal, second.opt_state, first.opt_state)
    start = jax.tree.map(lambda x: np.asarray(x, np.float64), second.params)
    updates = deltas(start, cohort, 0.1)
    for name in START:
        mean = np.mean([u[name] for u in updates.values()], axis=0)
        velocity = np.subtract(first.params[name], START[name])
        np.testing.assert_allclose(
            third.params[name], start[name] + 0.9 * velocity + mean, rtol=1e-5,
            atol=1e-6,
        )  # fmt: skip


def test_a_broken_client_is_left_out():
    algorithm = fedbuff.make(fedbuff.Config(work=WORK), softmax_loss)
    states = [next(buffers(algorithm, train=data)) for data in (TRAIN, broken(2))]
    assert states[1][1]["excluded_clients"] == 1
    assert states[1][1]["valid_clients"] == states[0][1]["valid_clients"] - 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states[1][0]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("client_lr", 0.0),
        ("server_lr", -1.0),
        ("exponent", -0.1),
        ("max_staleness", -1),
    ],
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        fedbuff.Config(**{field: value})
