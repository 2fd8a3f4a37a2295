"""q-FedAvg against Algorithm 2 of Li et al. in NumPy, and at its edges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.algorithms.softmax_rounds import (
    KEY,
    MODEL_BYTES,
    SIZES,
    START,
    X,
    Y,
    assert_close,
    deltas,
    last,
    moved,
    own_rows,
    rounds,
    with_and_without,
)
from tests.reference import softmax_gradient, softmax_loss

from fedjax_core import LocalWork, Packed, plan_round
from fedjax_core.algorithms import fedavg, qfedavg

WORK = LocalWork(batch_size=3, epochs=2)


def step(moves, losses, sizes, q, lr):
    """The sums of the paper, with L = 1 / lr."""
    lipschitz, numerator, denominator = 1 / lr, np.zeros(1), 0.0
    for i, move in moves.items():
        grad = -lipschitz * move
        numerator = numerator + sizes[i] * losses[i] ** q * grad
        denominator += sizes[i] * (
            q * losses[i] ** (q - 1) * np.sum(grad**2) + lipschitz * losses[i] ** q
        )
    return -numerator / denominator


@pytest.mark.parametrize(
    ("q", "weights"), [(0.5, "uniform"), (1.0, "examples"), (5.0, "uniform")]
)
def test_rounds_match_the_paper(q, weights):
    config = qfedavg.Config(client_lr=0.3, q=q, weights=weights, work=WORK)
    sizes = SIZES if weights == "examples" else [1] * len(SIZES)
    params = START
    for state, metrics, cohort in rounds(qfedavg.make(config, softmax_loss)):
        moves = deltas(params, cohort, 0.3)
        losses = {
            i: softmax_gradient(params, X[own_rows(i)], Y[own_rows(i)])[0]
            for i in moves
        }
        flat = {i: np.concatenate([d["w"].ravel(), d["b"]]) for i, d in moves.items()}
        change = step(flat, losses, sizes, q, 0.3)
        params = moved(params, {"w": change[:9].reshape(3, 3), "b": change[9:]})
        assert_close(state.params, params)
        mean_loss = sum(SIZES[i] * loss for i, loss in losses.items())
        mean_loss /= sum(SIZES[i] for i in losses)
        np.testing.assert_allclose(metrics["loss"], mean_loss, rtol=1e-5)
        norms = [np.linalg.norm(d) for d in flat.values()]
        np.testing.assert_allclose(metrics["delta_norm"], np.mean(norms), rtol=1e-5)
        # A loss and a delta up, the model down once.
        assert metrics["uplink_bytes"] == (MODEL_BYTES + 4) * len(moves)
        assert metrics["downlink_bytes"] == MODEL_BYTES * len(moves)


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_with_q_0_it_is_fedavg(weights):
    got = qfedavg.make(qfedavg.Config(q=0.0, work=WORK, weights=weights), softmax_loss)
    same = fedavg.make(fedavg.Config(work=WORK, weights=weights), softmax_loss)
    assert_close(last(got).params, last(same).params, rtol=1e-6)


def test_equal_losses_weigh_equally():
    # Twins have one loss and one delta; only the length of the step depends on q.
    rows = np.tile(own_rows(2), 2)
    examples = {"x": X[rows].astype(np.float32), "y": Y[rows]}
    train = Packed(examples, np.array([0, 8, 16]))
    work = LocalWork(batch_size=16)
    state, _, _ = next(
        rounds(
            qfedavg.make(qfedavg.Config(q=3.0, work=work), softmax_loss),
            [[0, 1]],
            train,
        )
    )
    loss, gradient = softmax_gradient(START, X[own_rows(2)], Y[own_rows(2)])
    norm2 = sum(np.sum(g**2) for g in gradient.values())
    shorter = 0.1 / (1 + 3 * 0.1 * norm2 / loss)
    assert_close(state.params, moved(START, gradient, -shorter))


def distance(w, batch, key):
    """Half a squared distance, with gradient w - x."""
    del key
    return jnp.square(w - batch["x"]) / 2


def one_round(q, targets, loss_fn=distance):
    """The step from w = 0 in a round with a client at each target."""
    train = Packed({"x": np.array(targets, np.float32)}, np.arange(len(targets) + 1))
    algorithm = qfedavg.make(qfedavg.Config(q=q, work=LocalWork()), loss_fn)
    ids = range(len(targets))
    cohort = plan_round(ids, train, algorithm.work, seed=0, round=0)
    state = algorithm.init(jnp.float32(0.0), len(targets))
    return float(jax.jit(algorithm.round)(state, cohort, KEY)[0].params)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_a_loss_of_0_is_a_client_that_asks_for_nothing(q):
    got = one_round(q, [0.0, 3.0])
    moves, losses = {0: np.array([0.0]), 1: np.array([0.3])}, {0: 1e-10, 1: 4.5}
    np.testing.assert_allclose(got, step(moves, losses, [1, 1], q, 0.1), rtol=1e-5)
    assert one_round(q, [0.0, 0.0]) == 0.0


def test_powers_of_losses_neither_overflow_nor_vanish():
    # To the power of 60 the losses leave the range of float32; the largest leads.
    for scale in (1e-2, 1e2):
        got = one_round(60.0, [scale, 2 * scale])
        # (1 + q L delta^2 / F) with delta = 0.2 scale and F = 2 scale^2.
        np.testing.assert_allclose(got, 0.2 * scale / (1 + 60 * 0.2), rtol=1e-4)


def test_a_negative_loss_is_no_silent_number():
    assert np.isnan(one_round(1.0, [0.0, 3.0], lambda *args: distance(*args) - 1))


def test_excluded_clients_do_not_count():
    algorithm = qfedavg.make(qfedavg.Config(work=WORK), softmax_loss)
    (got, metrics), (others, _) = with_and_without(algorithm)
    assert metrics["excluded_clients"] == 1
    assert metrics["valid_clients"] == 2
    assert_close(got.params, others.params)


def test_a_round_of_nobody_keeps_the_model():
    algorithm = qfedavg.make(qfedavg.Config(work=WORK), softmax_loss)
    state, metrics, _ = next(rounds(algorithm, [[3]]))
    assert_close(state.params, START, rtol=0, atol=0)
    assert metrics["valid_clients"] == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q", -1.0, r"q must be >= 0 and finite, got -1.0"),
        ("client_lr", 0.0, r"client_lr must be > 0 and finite, got 0.0"),
        ("work", LocalWork(steps=3), r"work must count epochs .* steps=3"),
        ("weights", "size", r"one of 'examples', 'uniform', got 'size'"),
    ],
)
def test_a_config_names_what_is_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(qfedavg.Config(), **{field: value})
