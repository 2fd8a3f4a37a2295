"""FedAUX against the paper in NumPy, and where it is another method."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from tests.algorithms.distillation_rounds import (
    COMMON,
    DISTIL_LR,
    N_PUBLIC,
    PUBLIC,
    clients,
    learn,
    logits,
    softmax,
)
from tests.algorithms.softmax_rounds import (
    COHORTS,
    MODEL_BYTES,
    PARAMS,
    SIZES,
    START,
    TRAIN,
    N,
    assert_close,
    combined,
    rounds,
    shares,
)
from tests.reference import softmax_loss

from fedjax_core import (
    Execution,
    FederatedData,
    Packed,
    client_mesh,
    models,
    pretrain,
    privacy,
    simulate,
)
from fedjax_core.algorithms import fedaux, fedavg, fedbe, feddf

RNG = np.random.default_rng(2)
SCORES = RNG.uniform(0.01, 1, (N, N_PUBLIC)).astype(np.float32)
PROTOTYPE = np.array([0, 0, 1, 1, 0, 1, 0, 1], np.int32)
OURS = PUBLIC | {"scores": SCORES, "prototype": PROTOTYPE}
CONFIG = fedaux.Config(**COMMON)
FEDAUX = fedaux.make(CONFIG, softmax_loss, distil_optimizer=optax.sgd(DISTIL_LR))
MIXED = fedaux.make_mixed(
    CONFIG, [softmax_loss] * 2, distil_optimizer=optax.sgd(DISTIL_LR)
)


def last(algorithm, params=PARAMS, cohorts=COHORTS[:2], **public):
    """The model after some rounds."""
    *_, (state, _, _) = rounds(algorithm, cohorts, params=params, public=OURS | public)
    return state.params


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def federated(models, cohort):
    """A round of Algorithm 15: models by prototype, of which a client has one."""
    of = PROTOTYPE if len(models) > 1 else np.zeros(N, int)
    trained = [clients(params, cohort) for params in models]
    local = {i: trained[of[i]][i] for i in trained[0]}
    num = sum(SCORES[i][:, None] * logits(w) for i, w in local.items())
    teacher = softmax(num / sum(SCORES[i][:, None] for i in local))
    new = []
    for p, params in enumerate(models):
        own = {i: w for i, w in local.items() if of[i] == p}
        mean = combined(shares(own), own) if own else params
        new.append(learn(mean, teacher))
    return new


def test_rounds_match_the_paper():
    models = [START]
    for state, metrics, cohort in rounds(FEDAUX, public=OURS):
        models = federated(models, cohort)
        assert_close(state.params, models[0], rtol=1e-4, atol=5e-6)
        there = sum(SIZES[i] > 0 for i in cohort.client_id)
        # Models alone are sent: public data and scores are the server's.
        sent = MODEL_BYTES * there
        assert metrics["uplink_bytes"] == metrics["downlink_bytes"] == sent
        assert 0 < metrics["distil_loss"] < 5


def test_rounds_of_two_prototypes_match_the_paper():
    models = [START, {name: -p for name, p in START.items()}]
    params = (PARAMS, {name: -p for name, p in PARAMS.items()})
    # In the last round nobody has the first prototype.
    cohorts = [*COHORTS[:2], [2, 5, 7]]
    for state, metrics, cohort in rounds(MIXED, cohorts, params=params, public=OURS):
        models = federated(models, cohort)
        for got, expected in zip(state.params, models, strict=True):
            assert_close(got, expected, rtol=1e-4, atol=5e-6)
        steps = np.asarray(cohort.num_steps)
        assert metrics["local_steps"] == steps.sum()
        assert metrics["valid_clients"] == (steps > 0).sum()
        assert metrics["downlink_bytes"] == MODEL_BYTES * (steps > 0).sum()
        assert metrics["failure"].shape == steps.shape
        assert 0 < metrics["train_loss"] < 5


def test_several_prototypes_of_which_all_have_one_are_fedaux():
    params = last(MIXED, (PARAMS, PARAMS), prototype=np.zeros(N, np.int32))
    assert_close(params[0], last(FEDAUX))


def test_with_equal_scores_it_is_feddf():
    same = feddf.make(
        feddf.Config(**COMMON), softmax_loss, distil_optimizer=optax.sgd(DISTIL_LR)
    )
    expected = last(same)
    assert_same(last(FEDAUX, scores=np.ones_like(SCORES)), expected)
    # The scale of scores is of no account, which clients differ by is.
    assert_close(last(FEDAUX, scores=np.full_like(SCORES, 0.3)), expected)
    assert_close(last(FEDAUX, scores=7 * SCORES), last(FEDAUX))
    assert np.abs(last(FEDAUX)["w"] - expected["w"]).max() > 1e-4


def test_who_alone_is_certain_teaches_alone():
    certain = np.full_like(SCORES, 1e-8)
    certain[5] = 1.0
    ((state, _, cohort),) = rounds(
        FEDAUX, COHORTS[:1], public=OURS | {"scores": certain}
    )
    local = clients(START, cohort)
    expected = learn(combined(shares(local), local), softmax(logits(local[5])))
    assert_close(state.params, expected, rtol=1e-4, atol=5e-6)


def test_without_distillation_it_is_fedavg():
    still = fedaux.make(CONFIG, softmax_loss, distil_optimizer=optax.set_to_zero())
    config = fedavg.Config(client_lr=0.3, work=CONFIG.work)
    assert_close(last(still), last(fedavg.make(config, softmax_loss)), rtol=1e-6)


@pytest.mark.parametrize("method", [fedaux, fedbe, feddf])
def test_seeds_on_two_devices_resume_to_the_bits_of_single_runs(method, tmp_path):
    model = models.logistic_regression(3, 3)
    run = functools.partial(
        simulate,
        method.make(method.Config(**COMMON), model.loss),
        FederatedData(TRAIN, public=PUBLIC | {"scores": SCORES}),
        model,
        cohort_size=3,
        progress=False,
        execution=Execution(mesh=client_mesh(jax.devices()[:2])),
    )
    run(rounds=2, seeds=[5, 3], run_dir=tmp_path)
    both = run(rounds=4, seeds=[5, 3], run_dir=tmp_path, resume=True)
    assert both.timed_rounds == 2
    alone = run(rounds=4, seeds=3)
    jax.tree.map(
        lambda got, expected: np.testing.assert_array_equal(got[1], expected[0]),
        both.state.params,
        alone.state.params,
    )


def test_scores_that_are_not_there_are_named():
    other = dataclasses.replace(CONFIG, scores="certainty")
    algorithm = fedaux.make(other, softmax_loss)
    data, model = FederatedData(TRAIN, public=OURS), models.logistic_regression(3, 3)
    with pytest.raises(ValueError, match=r"scores must be one of .* got 'certainty'"):
        algorithm.needs(model, data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scores": SCORES[:2]}, f"scores must have a row for each of {N} clients"),
        (
            {"scores": SCORES[:, :1]},
            f"scores must be > 0 for each of {N_PUBLIC}",
        ),
        ({"scores": 0 * SCORES}, r"scores must be > 0 .* a least one of 0.0"),
        ({"prototype": PROTOTYPE[:3]}, "prototype must have a row for each of"),
        ({"prototype": None}, "prototype must have a row for each of"),
        ({"x": None}, "data must have 1 public inputs"),
        ({"prototype": PROTOTYPE + 1}, r"prototype must be in \[0, 1\], got 2"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_tables_that_do_not_fit_are_named_before_the_first_round(wrong, message):
    data = FederatedData(TRAIN, public=OURS | wrong)
    with pytest.raises(ValueError, match=message):
        MIXED.needs(models.logistic_regression(3, COMMON["num_classes"]), data)


def test_a_model_of_other_classes_is_named():
    data, model = FederatedData(TRAIN, public=OURS), models.logistic_regression(3, 4)
    FEDAUX.needs(models.logistic_regression(3, COMMON["num_classes"]), data)
    with pytest.raises(ValueError, match="num_classes must be that of the model, 4"):
        simulate(FEDAUX, data, model, rounds=1, cohort_size=2)


def test_preparation_scores_by_features():
    sizes = np.array([3, 0, 5])
    x = RNG.normal(size=(8, 4)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    data = FederatedData(Packed({"x": x, "y": np.zeros(8, np.int32)}, offsets))
    negatives, queries = RNG.normal(size=(2, 6, 4)).astype(np.float32)
    model = models.mlp(4, 3, hidden=(2,))
    params = jax.tree.map(np.asarray, model.init(jax.random.key(1)))
    config = privacy.CertaintyConfig(epsilon=None)
    got = fedaux.prepare(
        config,
        lambda x: pretrain.features(model, "Dense_1", params, x),
        data,
        negatives,
        queries,
        jax.random.key(0),
    )

    def features(x):
        body = params["Dense_0"]
        return np.maximum(x @ body["kernel"] + body["bias"], 0)

    known = [features(negatives), features(queries)]
    own = np.zeros((3, 5, 2))
    own[0, :3], own[2] = features(x[:3]), features(x[3:])
    mask = np.arange(5) < sizes[:, None]
    expected = privacy.certainty(config, jax.random.key(0), own, mask, *known)
    np.testing.assert_allclose(got.scores, expected.scores, rtol=1e-5)
    assert got.scores.shape == (3, 6)


def test_preparation_costs_what_the_paper_prints():
    down, up = fedaux.preparation_bytes((), 512, 12_000)
    assert (down, up) == (24_576_000, 2048)
    model = jax.eval_shape(models.resnet8(100, norm="group").init, jax.random.key(0))
    assert fedaux.preparation_bytes(model, 512, 12_000)[0] - down == 19_797_648
