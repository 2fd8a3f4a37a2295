"""Methods with fair mixing, round by round, against NumPy in float64."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize, nnls
from tests.algorithms.softmax_rounds import (
    EVERYONE,
    MODEL_BYTES,
    START,
    X,
    Y,
    assert_close,
    combined,
    deltas,
    last,
    moved,
    own_rows,
    rounds,
    shares,
    with_and_without,
)
from tests.reference import softmax_gradient, softmax_loss

from fedjax_core import LocalWork, fair, mean
from fedjax_core.algorithms import (
    aaggff_d,
    aaggff_s,
    afl,
    fedavg,
    fedmgda,
    fedopt,
    fedprox,
    propfair,
    term,
)

WORK = LocalWork(batch_size=3, epochs=2)
COMMON: Any = {"client_lr": 0.3, "work": WORK}


def told(params, ids):
    return {i: softmax_gradient(params, X[own_rows(i)], Y[own_rows(i)])[0] for i in ids}


def test_rounds_of_devices_match_algorithm_3_2():
    algorithm = aaggff_d.make(aaggff_d.Config(cdf="weibull", **COMMON), softmax_loss)
    params, H, K = START, np.zeros(8), 8
    for t, (state, metrics, cohort) in enumerate(rounds(algorithm), 1):
        moves = deltas(params, cohort, 0.3)
        ids, c = list(moves), len(moves) / K
        F = np.array(list(told(params, ids).values()))
        r = c * (1 - np.exp(-((F / F.mean()) ** 2)))
        H[ids] += (r - r.mean()) / (c * (1 + r.mean()))
        p = np.exp(np.sqrt(np.log(K)) / ((c + 2) * np.sqrt(t + 1)) * H[ids])
        p /= p.sum()
        params = moved(params, combined(dict(zip(ids, p, strict=True)), moves))
        assert_close(state.params, params)
        np.testing.assert_allclose(state.mixing.excess, H, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(metrics["mixed_loss"], p @ F, rtol=1e-5)
        # A loss and a delta up, the model down once.
        assert metrics["uplink_bytes"] == (MODEL_BYTES + 4) * len(ids)
        assert metrics["downlink_bytes"] == MODEL_BYTES * len(ids)


def test_rounds_of_silos_and_of_afl_match_their_algorithms():
    p, params, alpha, beta = np.full(8, 1 / 8), START, 4.0, 2.0
    B, b, at = alpha * np.eye(8), np.zeros(8), np.array(EVERYONE)
    newton = aaggff_s.make(aaggff_s.Config(cdf="logistic", **COMMON), softmax_loss)
    slots = [[*EVERYONE, 3]] * 3  # client 3 has nothing, but a place
    for state, _, cohort in rounds(newton, slots):
        moves = deltas(params, cohort, 0.3)
        F = np.array([told(params, [i])[i] for i in EVERYONE])
        r = np.zeros(8)
        r[at] = 1 / 8 / (1 + np.exp(1 - F / F.mean()))
        r[3] = r[at].mean()
        g = -r / (1 + p @ r)
        B, b = B + beta * np.outer(g, g), b - g + beta * g * (g @ p)
        ones = np.linalg.solve(B, np.ones(8))
        nu = (ones @ b - 1) / ones.sum()
        p = np.linalg.solve(B, b) - nu * ones
        assert (p > 0).all()
        weight = {i: p[i] / p[at].sum() for i in EVERYONE}
        params = moved(params, combined(weight, moves))
        assert_close(state.params, params)
    p, params = np.full(8, 1 / 8), START
    agnostic = afl.make(afl.Config(mixing_lr=0.02, **COMMON), softmax_loss)
    for state, _, cohort in rounds(agnostic, slots):
        moves = deltas(params, cohort, 0.3)
        F = np.array([told(params, [i])[i] for i in EVERYONE])
        p[at] += 0.02 * F
        p[3] += 0.02 * F.mean()
        p += (1 - p.sum()) / 8
        assert (p > 0).all()
        weight = {i: p[i] / p[at].sum() for i in EVERYONE}
        params = moved(params, combined(weight, moves))
        assert_close(state.params, params)
    for method in (newton, agnostic):
        with pytest.raises(ValueError, match="must have all 8 clients in every round"):
            last(method, [[0, 1]])


@pytest.mark.parametrize("name", ["term", "propfair", "propfair, clients", "fedmgda"])
def test_rounds_match_the_rule(name):
    algorithm: Any = {
        "term": lambda: term.make(term.Config(tilt=2.0, **COMMON), softmax_loss),
        "propfair": lambda: propfair.make(
            propfair.Config(ceiling=6.0, where="server", **COMMON), softmax_loss
        ),
        "propfair, clients": lambda: propfair.make(
            propfair.Config(ceiling=2.2, **COMMON), softmax_loss
        ),
        "fedmgda": lambda: fedmgda.make(
            fedmgda.Config(epsilon=0.1, server_lr=0.3, **COMMON), softmax_loss
        ),
    }[name]()
    params = START
    for state, _, cohort in rounds(algorithm):
        if name == "propfair, clients":
            moves = utility_moves(params, cohort, 2.2)
        else:
            moves = deltas(params, cohort, 0.3)
        q, lr = shares(moves), 1.0
        F = told(params, moves)
        if name == "term":
            q = {i: q[i] * np.exp(2 * F[i]) for i in q}
        if name == "propfair":
            q = {i: q[i] / (6 - F[i]) for i in q}
        if name == "fedmgda":
            q, lr = common(moves, q, 0.1), 0.3
        total = 1 if name == "fedmgda" else sum(q.values())
        weight = {i: q[i] / total for i in q}
        params = moved(params, combined(weight, moves), lr)
        tol = 1e-4 if name == "fedmgda" else 1e-5
        assert_close(state.params, params, rtol=tol, atol=2e-5)


def utility_moves(params, cohort, ceiling):
    """Local SGD on -log(1 - F / M), or F / M where a batch's loss is near M."""
    from tests.reference import visits

    out, seen = {}, set()
    for i, batches in visits(cohort).items():
        local = dict(params)
        for batch in batches:
            loss, grad = softmax_gradient(local, X[batch], Y[batch])
            enough = ceiling - loss >= 0.2
            seen.add(enough)
            scale = 1 / (ceiling - loss) if enough else 1 / ceiling
            local = {k: local[k] - 0.3 * scale * grad[k] for k in local}
        out[i] = {k: local[k] - params[k] for k in params}
    return out


def test_clients_that_nearly_agree_and_very_long_moves_have_their_common_direction():
    reduce = fedmgda.common_direction(1.0, "uniform").finish

    @jax.jit
    def compiled(updates):
        slots = jnp.ones(len(updates), jnp.int32)
        everyone: Any = SimpleNamespace(
            valid=slots > 0, cohort=SimpleNamespace(num_examples=slots)
        )
        return reduce(updates, everyone)

    def direction(updates):
        return np.asarray(compiled(np.asarray(updates, np.float32)))

    np.testing.assert_allclose(direction([[3e20, 4e20], [1, 0]]), [0.8, 0.4], rtol=1e-5)
    rng = np.random.default_rng(0)
    updates = rng.normal(size=20) + 0.03 * rng.normal(size=(12, 20))
    d = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    # The shortest mixture, as least squares with a heavy row for the sum.
    heavy = np.r_[d.T, np.full((1, 12), 1e4)]
    mixture, _ = nnls(heavy, np.r_[np.zeros(20), 1e4])
    shortest = np.linalg.norm(mixture @ d / mixture.sum())
    gain = np.linalg.norm(d.mean(0)) - shortest
    left = np.linalg.norm(direction(updates)) - shortest
    assert left < 0.02 * gain


def common(moves, prior, eps):
    flat = {i: np.r_[d["w"].ravel(), d["b"]] for i, d in moves.items()}
    norms = {i: np.linalg.norm(v) for i, v in flat.items()}
    D = np.array([flat[i] / norms[i] for i in moves])
    start = np.array([prior[i] for i in moves])
    found = minimize(
        lambda x: 50 * np.sum((x @ D) ** 2),
        start,
        bounds=[(max(0, q - eps), min(1, q + eps)) for q in start],
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return {i: x / norms[i] for i, x in zip(moves, found.x, strict=True)}


def test_without_a_preference_they_are_fedavg():
    plain = last(fedavg.make(fedavg.Config(**COMMON), softmax_loss))
    for algorithm in (
        fedavg.make(fedavg.Config(**COMMON), softmax_loss, mixing=fair.static()),
        term.make(term.Config(tilt=0.0, **COMMON), softmax_loss),
    ):
        assert_close(last(algorithm).params, plain.params, rtol=1e-6)


def test_coefficients_plug_into_every_server_and_client():
    # One round: the coefficients do not depend on what is done with the updates.
    mixing = aaggff_d.decider()
    state, _, cohort = next(
        rounds(fedavg.make(fedavg.Config(**COMMON), softmax_loss, mixing=mixing))
    )
    step = {name: state.params[name] - START[name] for name in START}
    for rule, beta1 in (("adam", 0.9), ("yogi", 0.9), ("adagrad", 0.0)):
        config = fedopt.Config(
            rule=rule,  # type: ignore[arg-type]
            server_lr=0.01,
            beta1=beta1,
            beta2=0.999,
            tau=1e-4,
            **COMMON,
        )
        got, _, _ = next(rounds(fedopt.make(config, softmax_loss, mixing=mixing)))
        for name, d in step.items():
            v = {
                "adagrad": 1e-8 + d**2,
                "adam": 0.999e-8 + 0.001 * d**2,
                "yogi": 1e-8 - 0.001 * d**2 * np.sign(1e-8 - d**2),
            }[rule]
            expected = START[name] + 0.01 * (1 - beta1) * d / (np.sqrt(v) + 1e-4)
            np.testing.assert_allclose(got.params[name], expected, rtol=1e-5, atol=1e-6)
    near = fedprox.make(fedprox.Config(mu=0.5, **COMMON), softmax_loss, mixing=mixing)
    got, _, _ = next(rounds(near))
    moves = deltas(START, cohort, 0.3, proximal=0.5)
    weight = np.asarray(
        fair.respond(np.array(list(told(START, moves).values())), high=0.5)
    )
    excess = (weight - weight.mean()) / (0.5 * (1 + weight.mean()))
    p = np.exp(np.sqrt(np.log(8)) / (2.5 * np.sqrt(2)) * excess)
    weights = dict(zip(moves, p / p.sum(), strict=True))
    assert_close(got.params, moved(START, combined(weights, moves)))


def test_excluded_clients_do_not_count():
    for algorithm in (
        aaggff_d.make(aaggff_d.Config(**COMMON), softmax_loss),
        fedmgda.make(fedmgda.Config(**COMMON), softmax_loss),
    ):
        (got, metrics), (others, _) = with_and_without(algorithm)
        assert metrics["excluded_clients"] == 1
        assert metrics["valid_clients"] == 2
        assert_close(got.params, others.params)


def test_a_round_of_nobody_keeps_the_model():
    for algorithm in (
        aaggff_d.make(aaggff_d.Config(**COMMON), softmax_loss),
        fedmgda.make(fedmgda.Config(**COMMON), softmax_loss),
    ):
        state, metrics, _ = next(rounds(algorithm, [[3]]))
        assert_close(state.params, START, rtol=0, atol=0)
        assert metrics["idle"]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="reduce must be None where mixing decides"):
        fedavg.make(
            fedavg.Config(), softmax_loss, mixing=fair.static(), reduce=mean("uniform")
        )
    with pytest.raises(ValueError, match="work must count epochs"):
        term.make(term.Config(work=LocalWork(steps=3)), softmax_loss)
    with pytest.raises(TypeError, match=r"config must be a term.Config"):
        term.make(fedavg.Config(), softmax_loss)  # type: ignore[arg-type]
    for config, field, value, message in (
        (afl.Config(), "mixing_lr", 0.0, "mixing_lr must be > 0"),
        (term.Config(), "tilt", -1.0, "tilt must be >= 0"),
        (propfair.Config(), "ceiling", 0.0, "ceiling must be > 0"),
        (propfair.Config(), "where", "both", "where must be one of"),
        (fedmgda.Config(), "epsilon", 1.5, "epsilon must be in"),
        (aaggff_d.Config(), "cdf", "cauchy", "cdf must be one of"),
        (aaggff_s.Config(), "most", 0.0, "most must be > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **{field: value})
