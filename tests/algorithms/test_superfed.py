"""SuPerFed against the text in NumPy, its regularisers, its lambdas and its warm-up."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.algorithms.personal_rounds import (
    COHORTS,
    EXAMPLES,
    KEY,
    OFFSETS,
    SIZES,
    START,
    N,
    X,
    Y,
    assert_close,
    average,
    rounds,
)
from tests.reference import softmax_gradient, softmax_loss, visits

from fedjax_core import Execution, FederatedData, LocalWork, Packed, Result
from fedjax_core.algorithms import fedavg, fedprox, superfed
from fedjax_core.local import by_round
from fedjax_core.own_models import compile_own_evaluation
from fedjax_core.personal import Mixtures, best_lambda, mix
from fedjax_core.random import stream

WORK = LocalWork(batch_size=3, epochs=2)
CONFIG = superfed.Config(client_lr=0.3, mu=0.2, nu=0.7, warm_up=1, work=WORK)
RATE, MOMENTUM, DECAY, FALL = 0.3, 0.5, 0.1, 0.9
OPTIMIZER = optax.chain(
    optax.add_decayed_weights(DECAY),
    optax.sgd(RATE, MOMENTUM),
    by_round(lambda t: FALL**t),
)


def drawn(key) -> Any:
    """A personal model, like the one of the problem and two layers to be mixed."""
    keys = jax.random.split(key)
    return {
        "w": jax.random.normal(keys[0], START["w"].shape),
        "b": jax.random.normal(keys[1], START["b"].shape),
    }


def flat(tree):
    return np.concatenate([np.ravel(tree[k]) for k in sorted(tree)])


def like(vector, tree):
    cut = np.cumsum([tree[k].size for k in sorted(tree)])[:-1]
    parts = np.split(vector, cut)
    return {
        k: p.reshape(tree[k].shape) for k, p in zip(sorted(tree), parts, strict=True)
    }


def cosine_slopes(f, p):
    """P4 as the specification has it."""
    a, b = flat(f), flat(p)
    na, nb = np.linalg.norm(a), np.linalg.norm(b)
    cos = a @ b / na / nb
    return (
        like(2 * cos / na * (b / nb - cos * a / na), f),
        like(2 * cos / nb * (a / na - cos * b / nb), f),
    )


def client(config, t, key, w, own, batches):
    """Algorithm 2.4 with a number for the whole model, one step after the other."""
    f, p, on = dict(w), dict(own), t >= config.warm_up
    memory = [{k: 0 * x for k, x in w.items()} for _ in range(2)]
    rate = RATE * FALL**t
    for s, batch in enumerate(batches):
        turn = jax.random.fold_in(stream(key, "step"), s)
        lam = float(jax.random.uniform(stream(turn, "lambda"))) * on
        mixed = {k: (1 - lam) * f[k] + lam * p[k] for k in f}
        _, g = softmax_gradient(mixed, X[batch], Y[batch])
        angle = cosine_slopes(f, p)
        steps = []
        for k, (model, part) in enumerate(((f, 1 - lam), (p, lam))):
            slope = {
                n: part * g[n] + config.nu * on * angle[k][n]
                + config.mu * (f[n] - w[n]) * (k == 0)
                + DECAY * model[n]
                for n in f
            }  # fmt: skip
            memory[k] = {n: MOMENTUM * memory[k][n] + slope[n] for n in f}
            steps.append({n: model[n] - rate * memory[k][n] for n in f})
        f, p = steps[0], steps[1] if on else p
    return f, p


def key_of(i):
    return jax.random.fold_in(stream(KEY, "client"), i)


def first_draw(i):
    own = drawn(stream(stream(key_of(i), "init"), "draw"))
    return {k: np.asarray(x, np.float64) for k, x in own.items()}


def make(config, **kwargs):
    return superfed.make(config, softmax_loss, init=drawn, **kwargs)


@pytest.fixture(scope="module")
def run():
    algorithm = make(CONFIG, client_optimizer=OPTIMIZER)
    return algorithm, list(rounds(algorithm))


def test_rounds_match_the_text(run):
    algorithm, states = run
    w, own = START, {}
    for t, (state, metrics, cohort) in enumerate(states):
        orders, sent = visits(cohort), []
        for i, batches in orders.items():
            own.setdefault(i, first_draw(i))
            local, own[i] = client(CONFIG, t, key_of(i), w, own[i], batches)
            sent.append(local)
        w = average(sent, [SIZES[i] for i in orders])
        assert_close(state.params, w, rtol=2e-4)
        for i, model in own.items():
            kept = {k: x[i] for k, x in state.clients[0].own.items()}
            assert_close(kept, model, rtol=2e-4)
        # What goes over the network is what FedAvg sends.
        assert metrics["uplink_bytes"] == 4 * 12 * len(orders)
    state = states[-1][0]
    for i in range(N):
        row = jax.tree.map(lambda x: x[i], state.clients)  # noqa: B023
        found = algorithm.own_models(state, row)
        assert list(found) == [f"personal_{k / 10:g}" for k in range(11)]
        end = own.get(i, w)  # who never took part uses the server's
        for lam in (0, 0.3, 1):
            expected = {k: (1 - lam) * w[k] + lam * end[k] for k in w}
            assert_close(found[f"personal_{lam:g}"], expected, rtol=5e-4)


def test_all_mixtures_are_evaluated_as_each_would_be(run):
    algorithm, states = run
    state = states[-1][0]
    data = FederatedData(Packed(EXAMPLES, OFFSETS), test=Packed(EXAMPLES, OFFSETS))

    def metrics(params, batch):
        return {"loss": softmax_loss(params, batch, None)}

    evaluate = compile_own_evaluation(
        algorithm.own_models, metrics, data, ("test",), Execution()
    )
    one_seed = jax.tree.map(lambda x: x[None], state)
    _, found = evaluate(one_seed._replace(clients=()), one_seed.clients)
    for i in np.flatnonzero(SIZES):
        row = jax.tree.map(lambda x: x[i], state.clients)  # noqa: B023
        own = slice(OFFSETS[i], OFFSETS[i + 1])
        for name, model in algorithm.own_models(state, row).items():
            expected, _ = softmax_gradient(
                jax.tree.map(np.asarray, model), X[own], Y[own]
            )
            got = found[f"test_{name}_loss"][0, i]
            np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_personal_models_start_apart_and_rest_before_they_are_trained(run):
    _, states = run
    state = states[0][0]  # a round of warm-up
    kept = {i: {k: x[i] for k, x in state.clients[0].own.items()} for i in COHORTS[0]}
    for i, model in kept.items():
        assert_close(model, first_draw(i), rtol=1e-7)
    flats = [flat(m) for m in [START, *kept.values()]]
    gaps = [np.abs(a - b).max() for a in flats for b in flats if a is not b]
    assert min(gaps) > 0.1


def test_who_has_only_been_in_the_warm_up_uses_the_server_s_model(run):
    algorithm, states = run
    for t, (state, _, _) in enumerate(states):
        for i in COHORTS[0]:
            row = jax.tree.map(lambda x: x[i], state.clients)  # noqa: B023
            own = algorithm.own_models(state, row)["personal_1"]
            trains = any(i in ids for ids in COHORTS[CONFIG.warm_up : t + 1])
            assert np.array_equal(own["w"], state.params["w"]) != trains


def test_clients_outside_a_cohort_keep_their_model_and_do_not_matter(run):
    algorithm, states = run
    before, cohort = states[0][0], states[1][2]
    after = states[1][0]
    outside = np.setdiff1d(np.arange(N), [i for i in COHORTS[1] if SIZES[i]])
    for a, b in zip(
        jax.tree.leaves(after.clients), jax.tree.leaves(before.clients), strict=True
    ):
        np.testing.assert_array_equal(a[outside], b[outside])
    bent = jax.tree.map(
        lambda x: x if x.dtype == bool else x.at[outside].add(1), before.clients
    )
    moved, _ = jax.jit(algorithm.round)(before._replace(clients=bent), cohort, KEY)
    jax.tree.map(np.testing.assert_array_equal, moved.params, after.params)


def test_the_shared_lambda_is_chosen_on_the_split_that_is_named():
    lambdas, means = (0.0, 0.5, 1.0), {"validation": [1, 3, 2], "test": [1, 2, 3]}
    # The second seed has diverged at 0.5.
    values = {
        f"{split}_personal_{lam:g}_accuracy_client_mean": np.array(
            [[0, x], [0, np.nan if lam == 0.5 else x]]
        )
        for split, row in means.items()
        for lam, x in zip(lambdas, row, strict=True)
    }
    result = Result(
        (0, 1), 2, {}, np.array([1, 2]), values, {}, None, []
    )  # fmt: skip
    np.testing.assert_array_equal(best_lambda(result, lambdas), [0.5, 1])
    np.testing.assert_array_equal(best_lambda(result, lambdas, split="test"), [1, 1])


@pytest.mark.parametrize("mu", [0.0, 0.2])
def test_a_warm_up_without_end_is_fedavg_or_fedprox_to_the_bit(mu):
    config = superfed.Config(client_lr=0.3, mu=mu, nu=2, warm_up=3, work=WORK)
    kind = {"client_lr": 0.3, "work": WORK}
    same = (
        fedprox.make(fedprox.Config(mu=mu, **kind), softmax_loss)
        if mu
        else fedavg.make(fedavg.Config(**kind), softmax_loss)
    )
    for (a, _, _), (b, _, _) in zip(rounds(make(config)), rounds(same), strict=True):
        for name in START:
            np.testing.assert_array_equal(a.params[name], b.params[name])


def test_layers_of_one_number_are_the_whole_model_mixed(monkeypatch):
    """P8, and that parameters of one layer share a number while layers do not."""
    by_layer = dataclasses.replace(CONFIG, mixing="layer", warm_up=0)
    for tree in (  # of Flax, and of NNX, which names paths by a single key
        {"first": {"bias": 0, "kernel": 0}, "second": {"kernel": 0}},
        {"first/bias": 0, "first/kernel": 0, "second/kernel": 0},
    ):
        draws = jax.tree.leaves(superfed._mixing(by_layer, tree, KEY))
        assert draws[0] == draws[1] != draws[2]
    # w and b stand side by side: one layer, so one number.
    whole = dataclasses.replace(by_layer, mixing="model")

    def one_number(config, params, key):
        lam = jax.random.uniform(key)
        same = jax.tree.map(lambda _: lam, params)
        return lam if config.mixing == "model" else same

    monkeypatch.setattr(superfed, "_mixing", one_number)
    for (a, _, _), (b, _, _) in zip(
        rounds(make(by_layer)), rounds(make(whole)), strict=True
    ):
        assert_close(a.params, b.params, rtol=1e-6)


def test_the_ends_and_the_middle_of_a_mixture():
    f, p = drawn(jax.random.key(1)), drawn(jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, mix(f, p, 0), f)
    jax.tree.map(np.testing.assert_array_equal, mix(f, p, 1), p)
    assert_close(mix(f, f, 0.3), f, rtol=1e-6)
    thirds = [flat(mix(f, p, k / 3)) for k in range(4)]
    np.testing.assert_allclose(np.diff(thirds, 2, axis=0), 0, atol=1e-6)
    assert list(Mixtures(f, p, (0.25, 1.0))) == ["personal_0.25", "personal_1"]


def test_both_gradients_are_shares_of_the_one_at_the_mixture(x64):
    f, p = drawn(jax.random.key(1)), drawn(jax.random.key(2))
    batch = {"x": X, "y": Y, "example_mask": np.ones(len(Y), bool)}

    def loss(f, p, lam):
        return softmax_loss(mix(f, p, lam), batch, None).mean()

    of_f, of_p = jax.grad(loss, argnums=(0, 1))(f, p, 0.3)
    mixed = {k: np.asarray(x) for k, x in mix(f, p, 0.3).items()}
    _, g = softmax_gradient(mixed, X, Y)
    for name in g:
        np.testing.assert_allclose(of_f[name], 0.7 * g[name], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(of_p[name], 0.3 * g[name], rtol=1e-9, atol=1e-12)


def test_expected_losses_and_gradients_on_a_quadratic(x64):
    """Means over lambda by quadrature, exact for the polynomials that they are."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5))
    nodes, weights = np.polynomial.legendre.leggauss(4)
    lams, weights = (nodes + 1) / 2, weights / 2

    def expected(f, p):
        at = jax.vmap(lambda lam: 0.5 * jnp.sum(mix(f, p, lam) ** 2))(lams)
        return weights @ at

    np.testing.assert_allclose(expected(a, b), (a @ a + a @ b + b @ b) / 6)
    of_a, of_b = jax.grad(expected, argnums=(0, 1))(a, b)
    np.testing.assert_allclose(of_a, a / 3 + b / 6)
    np.testing.assert_allclose(of_b, a / 6 + b / 3)
    hessian = jax.hessian(lambda z: expected(z[:1], z[1:]))(jnp.zeros(2))
    np.testing.assert_allclose(np.linalg.eigvalsh(hessian), [1 / 6, 1 / 2])


cosine_and_slopes = jax.value_and_grad(superfed.squared_cosine, (0, 1))


def test_the_squared_cosine_and_its_gradients(x64):
    f, p = drawn(jax.random.key(1)), drawn(jax.random.key(2))
    value, slopes = cosine_and_slopes(f, p)
    a, b = flat(f), flat(p)
    np.testing.assert_allclose(value, (a @ b) ** 2 / (a @ a) / (b @ b))
    for got, expected in zip(slopes, cosine_slopes(f, p), strict=True):
        np.testing.assert_allclose(flat(got), flat(expected), rtol=1e-10)
    assert abs(flat(slopes[0]) @ a) < 1e-12
    for scale in (-3.0, 0.01):
        scaled = jax.tree.map(lambda x: scale * x, f)  # noqa: B023
        np.testing.assert_allclose(superfed.squared_cosine(scaled, p), value)


def test_there_is_no_force_between_parallel_models_or_at_right_angles(x64):
    f = drawn(jax.random.key(1))
    twice = jax.tree.map(lambda x: -2 * x, f)
    value, slopes = cosine_and_slopes(f, twice)
    np.testing.assert_allclose(value, 1)
    np.testing.assert_allclose(flat(slopes[0]), 0, atol=1e-15)
    ones = {"w": jnp.ones(2)}, {"w": jnp.array([1.0, -1.0])}
    value, slopes = cosine_and_slopes(*ones)
    assert value == 0
    np.testing.assert_array_equal(slopes[0]["w"], 0)
    # A model of norm 0 has no direction, and feels nothing.
    value, slopes = cosine_and_slopes(ones[0], {"w": jnp.zeros(2)})
    assert value == 0
    np.testing.assert_array_equal([s["w"] for s in slopes], np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixing": "both"}, "mixing must be one of"),
        ({"mu": -1}, "mu must be >= 0 and finite, got -1"),
        ({"nu": -1}, "nu must be >= 0 and finite, got -1"),
        ({"warm_up": -1}, "warm_up must be"),
        ({"lambdas": (0.0, 1.1)}, r"lambdas must be in \[0, 1\], got 1.1"),
    ],
)
def test_a_config_names_what_is_wrong(change: dict[str, Any], message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_personal_models_must_be_like_the_server_s():
    def other(key):
        return {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}

    algorithm = superfed.make(CONFIG, softmax_loss, init=other)
    with pytest.raises(ValueError, match="init must draw parameters like the server's"):
        algorithm.init(jax.tree.map(jnp.asarray, START), N)
    with pytest.raises(TypeError, match="init must be a function"):
        superfed.make(CONFIG, softmax_loss, init=None)  # pyright: ignore
