"""Soft labels and ensembles against closed forms and a loop over clients."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.algorithms.softmax_rounds import (
    KEY,
    PARAMS,
    TRAIN,
    broken,
    combined,
    deltas,
    shares,
)
from tests.reference import softmax_loss

from fedjax_core import (
    Execution,
    LocalWork,
    local_sgd,
    map_clients,
    mean,
    models,
    plan_round,
    total,
)
from fedjax_core.algorithms import cfd, fd, fedbe, feddf, fedmd, label_logits
from fedjax_core.distillation import (
    distil,
    ensemble,
    informative,
    logits_of_loss,
    logits_of_model,
    predict,
    soft_loss,
    weighted,
    with_outputs,
)
from fedjax_core.types import Stateful

RNG = np.random.default_rng(1)
N_PUBLIC, K = 10, 3
PUBLIC: dict[str, Any] = {"x": RNG.normal(size=(N_PUBLIC, 3)).astype(np.float32)}
LABELS = RNG.dirichlet(np.ones(K), N_PUBLIC).astype(np.float32)
SGD = optax.sgd(0.1)


def softmax(params, x):
    z = x.astype(np.float64) @ params["w"] + params["b"]
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def soft_gradient(params, labels=LABELS):
    error = (softmax(params, PUBLIC["x"]) - labels) / N_PUBLIC
    return {"w": PUBLIC["x"].T @ error, "b": error.sum(0)}


def batch(labels: Any = LABELS):
    return {**PUBLIC, "labels": labels, "example_mask": np.ones(N_PUBLIC, bool)}


def test_the_soft_loss_is_the_cross_entropy_and_its_gradient_that_of_kl():
    soft = soft_loss(softmax_loss, K)
    p = softmax(PARAMS, PUBLIC["x"])

    def kl(params):
        log_p = jax.nn.log_softmax(PUBLIC["x"] @ params["w"] + params["b"][None])
        return (LABELS * (jnp.log(LABELS) - log_p)).sum(1).mean()

    @jax.jit
    def values(labels):
        def mean(params):
            losses = soft(params, batch(labels), KEY)
            return losses.mean(), losses

        return *jax.grad(mean, has_aux=True)(PARAMS), jax.grad(kl)(PARAMS)

    gradient, got, of_kl = values(LABELS)
    np.testing.assert_allclose(got, -(LABELS * np.log(p)).sum(1), rtol=1e-5)
    expected = soft_gradient(PARAMS)
    for name in PARAMS:
        np.testing.assert_allclose(gradient[name], expected[name], atol=1e-6)
        np.testing.assert_allclose(gradient[name], of_kl[name], atol=1e-6)
    # A student that says what the teacher says is at rest.
    at_rest, *_ = values(np.float32(p))
    assert max(np.abs(g).max() for g in jax.tree.leaves(at_rest)) < 1e-6


def test_a_one_hot_target_is_a_label():
    hard = {**PUBLIC, "y": LABELS.argmax(1)}
    one_hot = np.eye(K, dtype=np.float32)[hard["y"]]
    soft, plain = jax.jit(
        lambda params: (
            soft_loss(softmax_loss, K)(params, batch(one_hot), KEY),
            softmax_loss(params, hard, KEY),
        )
    )(PARAMS)
    np.testing.assert_array_equal(soft, plain)


def test_the_network_runs_once_whatever_the_number_of_classes():
    model = models.mlp(3, 50, hidden=(4,))
    params = jax.eval_shape(model.init, KEY)
    data = {**PUBLIC, "labels": jnp.ones((N_PUBLIC, 50)) / 50}

    def gradient(params):
        return jax.grad(lambda w: soft_loss(model.loss, 50)(w, data, KEY).sum())(params)

    text = str(jax.make_jaxpr(gradient)(params))
    # Two layers: forwards, and backwards by weights and, in the second, by inputs.
    assert text.count("dot_general") == 5
    assert f"50,{N_PUBLIC},4]" not in text


def test_logits_of_a_loss_are_log_probabilities_in_every_batch_size():
    expected = np.log(softmax(PARAMS, PUBLIC["x"]))
    for size in (1, 4, 256):
        logits = logits_of_loss(softmax_loss, K)
        got = jax.jit(lambda p, s=size, f=logits: predict(f, p, PUBLIC, s))(PARAMS)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def distilled(loss, optimizer, params, examples, work, **how):
    """What `distil` ends with, compiled."""

    @jax.jit
    def run(params):
        return distil(loss, optimizer, params, examples, LABELS, KEY, work, **how)

    return run(params)


class Net(nn.Module):
    """Dropout and batch normalisation, which differ in training."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(4)(x))
        return nn.Dense(K)(nn.Dropout(0.5, deterministic=not train)(x))


def test_a_model_in_evaluation_says_its_logits_and_learns_with_statistics():
    module = Net()
    model = models.classifier(module, (3,))
    params = jax.jit(model.init)(KEY)
    assert isinstance(params, Stateful)
    variables = {"params": params.params, **params.stats}
    outputs: Any = jax.jit(module.apply)(variables, PUBLIC["x"])
    expected = jax.nn.log_softmax(outputs)
    logits = logits_of_model(model)
    got = jax.jit(lambda params: predict(logits, params, PUBLIC, 4))(params)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="logits must be given for a model with runn"):
        logits_of_loss(model.loss, K)(params, PUBLIC)
    work = LocalWork(batch_size=N_PUBLIC)
    new, _ = distilled(model.loss, SGD, params, PUBLIC, work)
    # One full batch with momentum 1/2 from a mean of 0.
    hidden = PUBLIC["x"] @ params.params["Dense_0"]["kernel"]
    moved = new.stats["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(moved, 0.5 * hidden.mean(0), rtol=1e-4, atol=1e-6)


def test_full_batches_are_gradient_descent():
    work = LocalWork(batch_size=N_PUBLIC, epochs=5)
    params, loss = distilled(softmax_loss, SGD, PARAMS, PUBLIC, work)
    expected = {name: np.float64(p) for name, p in PARAMS.items()}
    losses = []
    for _ in range(5):
        losses.append(-(LABELS * np.log(softmax(expected, PUBLIC["x"]))).sum(1).mean())
        gradient = soft_gradient(expected)
        expected = {name: p - 0.1 * gradient[name] for name, p in expected.items()}
    for name in PARAMS:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def test_the_student_may_be_the_mean_over_its_last_steps():
    def after(epochs, average=1):
        work = LocalWork(batch_size=N_PUBLIC, epochs=epochs)
        how = {"average": average}
        return distilled(softmax_loss, SGD, PARAMS, PUBLIC, work, **how)[0]

    mean = (after(4)["w"] + after(5)["w"]) / 2
    np.testing.assert_allclose(after(5, average=2)["w"], mean, rtol=1e-5)


def test_what_a_model_is_least_sure_of_is_selected():
    p = RNG.dirichlet(np.ones(K), 40)
    z, first = jnp.log(p), np.sort(p, 1)[:, ::-1]
    scores = {
        "entropy": -(p * np.log(p)).sum(1),
        "certainty": -first[:, 0],
        "margin": first[:, 1] - first[:, 0],
    }
    for by, score in scores.items():
        expected = np.argsort(-score, kind="stable")[:7]
        np.testing.assert_array_equal(informative(z, 7, by, KEY), expected)
    # Of two classes all rank alike; equals are taken in order.
    p = np.array([0.9, 0.5, 0.6, 0.5, 0.2])
    two = jnp.log(np.stack([p, 1 - p], 1))
    for by in scores:
        np.testing.assert_array_equal(informative(two, 4, by, KEY), [1, 3, 2, 4])
    drawn = np.asarray(informative(z, 39, "random", KEY))
    assert len(set(drawn)) == 39
    with pytest.raises(ValueError, match=r"n must be in \[1, 40\], got 41"):
        informative(z, 41, "margin", KEY)


def visited(work):
    """How often each public example is trained on, and the weights of its visits."""

    def loss(params, batch, key):
        return batch["x"] @ params

    examples = {"x": np.eye(N_PUBLIC, dtype=np.float32)}
    start = jnp.zeros(N_PUBLIC)
    got, _ = distilled(loss, optax.sgd(1.0), start, examples, work)
    return -np.asarray(got)


def test_epochs_see_every_example_once_and_steps_stop_where_they_are_told():
    whole = visited(LocalWork(batch_size=4))
    # Batches of 4, 4 and 2.
    np.testing.assert_allclose(np.sort(whole), [0.25] * 8 + [0.5] * 2, rtol=1e-5)
    twice = visited(LocalWork(batch_size=5, epochs=2))
    np.testing.assert_allclose(twice, 2 / 5, rtol=1e-5)
    dropped = visited(LocalWork(batch_size=4, drop_remainder=True))
    np.testing.assert_allclose(np.sort(dropped), [0] * 2 + [0.25] * 8, rtol=1e-5)
    steps = visited(LocalWork(batch_size=4, steps=4))
    np.testing.assert_allclose(steps.sum(), 4, rtol=1e-5)
    assert (steps >= whole - 1e-6).all(), "one epoch and a batch of the next"
    with pytest.raises(ValueError, match="work must have a step on 10 public exam"):
        visited(LocalWork(batch_size=11, drop_remainder=True))


def test_clients_that_distil_alike_end_with_the_same_bits():
    work = LocalWork(batch_size=4, epochs=2)

    def one(key, params):
        return distil(softmax_loss, optax.adam(0.1), params, PUBLIC, LABELS, key, work)[
            0
        ]

    many = jax.tree.map(lambda p: jnp.stack([p] * 5), PARAMS)
    out = jax.jit(jax.vmap(one, (None, 0)))(KEY, many)
    for leaf in jax.tree.leaves(out):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    other = jax.jit(one)(jax.random.key(1), PARAMS)
    assert np.abs(other["w"] - out["w"][0]).max() > 1e-3, "the order is the key's"


WORK, PLAIN = LocalWork(batch_size=4), Execution()
LOGITS = logits_of_loss(softmax_loss, K)
SCORES = RNG.uniform(0.1, 1, (8, N_PUBLIC)).astype(np.float32)  # by client


def says(params, received):
    (_, public), scores = received
    return weighted(predict(LOGITS, params, public), scores)


PROGRAM = with_outputs(local_sgd(softmax_loss, SGD), says, params=lambda r: r[0][0])


@jax.jit
def passed(cohort):
    return map_clients(
        PROGRAM,
        (PARAMS, PUBLIC),
        cohort,
        KEY,
        reduce={"update": mean("examples"), "outputs": total()},
        each=jnp.asarray(SCORES)[cohort.client_id],
    )


def plan(ids, train=TRAIN, how=PLAIN):
    return plan_round(ids, train, WORK, seed=3, round=0, execution=how)


def numpy_ensemble(ids, cohort):
    moves = deltas({n: np.float64(p) for n, p in PARAMS.items()}, cohort, 0.1)
    total, mass = 0.0, 0.0
    for i in ids:
        local = {name: PARAMS[name] + moves[i][name] for name in PARAMS}
        total += SCORES[i][:, None] * np.log(softmax(local, PUBLIC["x"]))
        mass += SCORES[i][:, None]
    return total / mass


def test_the_weighted_ensemble_streams_and_adds_up_over_passes():
    ids = [2, 0, 5, 7]
    whole = passed(plan(ids))
    expected = numpy_ensemble(ids, plan(ids))
    got = ensemble(whole.update["outputs"])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    # Only the models are sent: what they say of public data the server works out.
    assert whole.metrics["uplink_bytes"] == 4 * 4 * 12
    start = {n: np.float64(p) for n, p in PARAMS.items()}
    moves = combined(shares(ids), deltas(start, plan(ids), 0.1))
    np.testing.assert_allclose(whole.update["update"]["w"], moves["w"], atol=1e-6)
    first = plan(ids).client_id % 2 == 0
    parts = [passed(plan(ids).only(keep)).update["outputs"] for keep in (first, ~first)]
    np.testing.assert_allclose(ensemble(parts[0] + parts[1]), expected, rtol=1e-4)
    assert np.abs(ensemble(parts[0]) - expected).max() > 1e-3


def test_no_round_holds_the_outputs_of_all_clients():
    text = str(jax.make_jaxpr(passed)(plan([2, 0, 5, 7, 1, 6])))
    assert f"f32[{N_PUBLIC},{K}]" in text
    assert f"[6,{N_PUBLIC},{K}]" not in text


def test_blocks_do_not_matter_and_a_broken_client_has_no_say():
    ids = [2, 0, 5, 7]
    blocks = passed(plan(ids, how=Execution(block_size=3)))
    expected = numpy_ensemble(ids, plan(ids))
    got = ensemble(blocks.update["outputs"])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    results = passed(plan(ids, broken(2)))
    assert results.metrics["excluded_clients"] == 1
    got = ensemble(results.update["outputs"])
    expected = numpy_ensemble([0, 5, 7], plan(ids))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    nobody = ensemble(passed(plan([3])).update["outputs"])
    np.testing.assert_array_equal(nobody, np.zeros((N_PUBLIC, K)))


def test_outputs_that_overflow_are_excluded_and_outputs_alone_are_what_is_sent():
    def overflow(params, received):
        return predict(LOGITS, params, received[1]) / 0

    for outputs, excluded in ((overflow, 2), (lambda p, r: LOGITS(p, r[1]), 0)):
        program = with_outputs(local_sgd(softmax_loss, SGD), outputs, alone=True)
        results = jax.jit(
            lambda c, p=program: map_clients(
                p, (PARAMS, PUBLIC), c, KEY, reduce=mean("uniform")
            )
        )(plan([0, 5]))
        assert results.metrics["excluded_clients"] == excluded
        assert results.metrics["uplink_bytes"] == (2 - excluded) * 4 * N_PUBLIC * K
    assert results.update.shape == (N_PUBLIC, K)


METHODS: dict[str, Any] = {
    "fd": (fd, {"num_public": 8}),
    "cfd": (cfd, {"num_public": 8}),
    "feddf": (feddf, {}),
    "fedbe": (fedbe, {}),
    "fedmd": (fedmd, {"num_public": 8}),
    "label_logits": (label_logits, {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_models_with_running_statistics(name):
    module, config = METHODS[name]
    model = models.classifier(Net(), (3,))
    config = module.Config(num_classes=K, **config)
    algorithm = module.make(config, model.loss, logits=logits_of_model(model))
    cohort = plan_round([0, 2], TRAIN, algorithm.work, seed=0, round=0, public=PUBLIC)
    state = jax.eval_shape(lambda: algorithm.init(model.init(KEY), 8))
    # Traced, not run: who averages statistics and who keeps them shows in shapes.
    after, metrics = jax.eval_shape(algorithm.round, state, cohort, KEY)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert isinstance(after.params, Stateful)
    assert metrics["downlink_bytes"].shape == ()
