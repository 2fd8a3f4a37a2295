"""SGD with momentum, decay of weights and a rate by round, given to methods, in NumPy.

Clients start it anew in every round. Each way through the shared code is here once.
"""

import numpy as np
import optax
from tests.algorithms.personal_rounds import (
    SIZES,
    START,
    N,
    X,
    Y,
    assert_close,
    average,
    rounds,
)
from tests.reference import Tree, softmax_gradient, softmax_loss, visits

from fedjax_core import LocalWork
from fedjax_core.algorithms import apfl, ditto, fedper, fedrep, pfedme, scaffold
from fedjax_core.local import by_round

RATE, MOMENTUM, DECAY, FALL = 0.3, 0.5, 0.1, 0.8
OPTIMIZER = optax.chain(
    optax.add_decayed_weights(DECAY),
    optax.sgd(RATE, MOMENTUM),
    by_round(lambda t: FALL**t),
)
WORK = LocalWork(batch_size=3, epochs=2)


class Sgd:
    """What OPTIMIZER is, of one model in round t."""

    def __init__(self, t: int):
        self.rate, self.velocity = RATE * FALL**t, {k: 0 * x for k, x in START.items()}

    def step(self, model: Tree, gradient: Tree) -> Tree:
        """Moves the parameters that the gradient is of."""
        for k, g in gradient.items():
            self.velocity[k] = MOMENTUM * self.velocity[k] + g + DECAY * model[k]
        return model | {k: model[k] - self.rate * self.velocity[k] for k in gradient}


def gradient(model: Tree, batch: np.ndarray) -> Tree:
    return softmax_gradient(model, X[batch], Y[batch])[1]


def test_parts_are_trained_together_by_it():
    config = fedper.Config(personal=("b",), work=WORK)
    algorithm = fedper.make(config, softmax_loss, client_optimizer=OPTIMIZER)
    shared, own = {"w": START["w"]}, [START["b"]] * N
    for t, (state, _, cohort) in enumerate(rounds(algorithm)):
        sent, weights = [], []
        for i, batches in visits(cohort).items():
            sgd, model = Sgd(t), shared | {"b": own[i]}
            for batch in batches:
                model = sgd.step(model, gradient(model, batch))
            own[i] = model["b"]
            sent.append({"w": model["w"]})
            weights.append(SIZES[i])
        shared = average(sent, weights)
        assert_close({"w": state.params["w"]}, shared)
        np.testing.assert_allclose(state.clients[0].own["b"], own, rtol=1e-4, atol=1e-6)


def test_what_rests_has_no_momentum():
    """FedRep: neither part's velocity moves while the other one is trained."""
    config = fedrep.Config(personal=("b",), head=1, work=WORK)
    algorithm = fedrep.make(config, softmax_loss, client_optimizer=OPTIMIZER)
    shared, own = {"w": START["w"]}, [START["b"]] * N
    for t, (state, _, cohort) in enumerate(rounds(algorithm)):
        sent = []
        for i, batches in visits(cohort).items():
            sgd, model = Sgd(t), shared | {"b": own[i]}
            for s, batch in enumerate(batches):
                part = "b" if s < len(batches) // 2 else "w"
                model = sgd.step(model, {part: gradient(model, batch)[part]})
            own[i] = model["b"]
            sent.append({"w": model["w"]})
        shared = average(sent, [1] * len(sent))
        assert_close({"w": state.params["w"]}, shared)
        np.testing.assert_allclose(state.clients[0].own["b"], own, rtol=1e-4, atol=1e-6)


def test_both_of_two_models_are_trained_by_it():
    config = ditto.Config(prox=0.4, work=WORK)
    algorithm = ditto.make(config, softmax_loss, client_optimizer=OPTIMIZER)
    w, own = START, [START] * N
    for t, (state, _, cohort) in enumerate(rounds(algorithm)):
        sent = []
        for i, batches in visits(cohort).items():
            (of_w, of_v), model, v = (Sgd(t), Sgd(t)), w, own[i]
            for batch in batches:
                slope = gradient(v, batch)
                v = of_v.step(v, {k: slope[k] + 0.4 * (v[k] - w[k]) for k in v})
                model = of_w.step(model, gradient(model, batch))
            own[i] = v
            sent.append(model)
        w = average(sent, [1] * len(sent))
        assert_close(state.params, w)
        for k in w:
            expected = [model[k] for model in own]
            got = state.clients[0].own[k]
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_adaptive_weights_stay_with_their_own_rule():
    """APFL: decay and momentum are for models; a weight takes one step of plain SGD."""
    config = apfl.Config(client_lr=0.2, alpha=0.3, adaptive=True, work=WORK)
    algorithm = apfl.make(config, softmax_loss, client_optimizer=OPTIMIZER)
    w, own, alphas = START, [START] * N, [0.3] * N
    for t, (state, _, cohort) in enumerate(rounds(algorithm)):
        sent = []
        for i, batches in visits(cohort).items():
            (of_w, of_v), model, v = (Sgd(t), Sgd(t)), w, own[i]
            for s, batch in enumerate(batches):
                a = alphas[i]
                mixed = {k: a * v[k] + (1 - a) * model[k] for k in v}
                slope, of_model = gradient(mixed, batch), gradient(model, batch)
                if s == 0:
                    along = sum(np.sum((v[k] - model[k]) * slope[k]) for k in v)
                    alphas[i] = np.clip(a - 0.2 * along, 0, 1)
                v = of_v.step(v, {k: a * slope[k] for k in v})
                model = of_w.step(model, of_model)
            own[i] = v
            sent.append(model)
        w = average(sent, [1] * len(sent))
        assert_close(state.params, w)
        got = state.clients[0].own
        np.testing.assert_allclose(got["alpha"], alphas, rtol=1e-4)
        np.testing.assert_allclose(got["v"]["w"], [m["w"] for m in own], rtol=1e-3)
    assert len(set(alphas)) > 3


def test_it_solves_the_proximal_problem():
    config = pfedme.Config(client_lr=0.1, prox=2.0, personal_steps=2, work=WORK)
    algorithm = pfedme.make(config, softmax_loss, client_optimizer=OPTIMIZER)
    start = START
    for t, (state, _, cohort) in enumerate(rounds(algorithm)):
        sent = []
        for batches in visits(cohort).values():
            sgd, w, theta = Sgd(t), start, start
            for batch in batches:
                for _ in range(2):
                    slope = gradient(theta, batch)
                    pulled = {k: slope[k] + 2 * (theta[k] - w[k]) for k in w}
                    theta = sgd.step(theta, pulled)
                w = {k: w[k] - 0.2 * (w[k] - theta[k]) for k in w}
            sent.append(w)
        start = average(sent, [1] * len(sent))
        assert_close(state.params, start)


def test_control_variates_are_mean_gradients_whatever_the_optimiser():
    algorithm = scaffold.make(
        scaffold.Config(work=WORK), softmax_loss, client_optimizer=OPTIMIZER
    )
    zeros = {k: 0 * x for k, x in START.items()}
    w, c, own = START, zeros, [zeros] * N
    for t, (state, _, cohort) in enumerate(rounds(algorithm)):
        sent, moved = [], []
        for i, batches in visits(cohort).items():
            sgd, model, total = Sgd(t), w, zeros
            for batch in batches:
                g = gradient(model, batch)
                total = {k: total[k] + g[k] / len(batches) for k in g}
                model = sgd.step(model, {k: g[k] - own[i][k] + c[k] for k in g})
            moved.append({k: total[k] - own[i][k] for k in total})
            own[i] = total
            sent.append(model)
        w = average(sent, [1] * len(sent))
        c = {k: c[k] + sum(m[k] for m in moved) / N for k in c}
        assert_close(state.params, w)
        assert_close(state.control, c)
