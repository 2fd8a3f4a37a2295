"""How the frameworks of distributed training reduce to one another."""

import jax
import jax.numpy as jnp
import numpy as np
from tests.algorithms.softmax_rounds import (
    EVERYONE,
    KEY,
    MODEL_BYTES,
    PARAMS,
    SIZES,
    START,
    TRAIN,
    N,
    X,
    Y,
    assert_close,
    own_rows,
)
from tests.reference import softmax_gradient, softmax_loss, visits

from fedjax_core import (
    FederatedData,
    Full,
    LocalWork,
    Model,
    Uniform,
    plan_round,
    simulate,
)
from fedjax_core.algorithms import cfl, fedavg, stc
from fedjax_core.algorithms.networks import consensus
from fedjax_core.networks.graph import Graph
from fedjax_core.transform import identity


def test_distributed_sgd_steps_along_the_gradient_of_the_union_batch():
    # Batches of equal size: the mean of the workers' mean gradients is that of all.
    workers = [i for i, size in enumerate(SIZES) if size >= 3]
    config = stc.Config(client_lr=0.3, work=LocalWork(batch_size=3, steps=1))
    algorithm = stc.make(
        config, softmax_loss, transform=identity(), downlink=identity()
    )
    cohort = plan_round(workers, TRAIN, config.work, seed=3, round=0)
    state, metrics = jax.jit(algorithm.round)(algorithm.init(PARAMS, N), cohort, KEY)
    union = np.concatenate([batch for (batch,) in visits(cohort).values()])
    assert len(union) == 3 * len(workers)
    _, gradient = softmax_gradient(START, X[union], Y[union])
    expected = {name: p - 0.3 * gradient[name] for name, p in START.items()}
    assert_close(state.params, expected)
    assert metrics["uplink_bytes"] == MODEL_BYTES * len(workers)


def test_fedavg_stops_where_the_mean_update_is_short():
    # Algorithm 10, with full batches: the model that it returns has taken the step.
    work, w = LocalWork(batch_size=16, steps=1), START
    norms, models = [], []
    for _ in range(8):
        steps = {}
        for i in EVERYONE:
            rows = own_rows(i)
            _, gradient = softmax_gradient(w, X[rows], Y[rows])
            steps[i] = {k: -0.3 * g for k, g in gradient.items()}
        mean = {k: sum(SIZES[i] * s[k] for i, s in steps.items()) / 34 for k in w}
        norms.append(np.linalg.norm([np.linalg.norm(m) for m in mean.values()]))
        w = {k: w[k] + mean[k] for k in w}
        models.append(w)
    assert np.all(np.diff(norms) < 0)
    short = float(np.mean(norms[3:5]))
    config = cfl.Config(client_lr=0.3, eps1=short, eps2=1e6, max_clusters=1, work=work)
    model = Model(lambda key: PARAMS, softmax_loss, lambda params, batch: {})
    result = simulate(
        cfl.make(config, softmax_loss),
        FederatedData(TRAIN).subset(EVERYONE),
        model,
        rounds=8,
        participation=Full(),
        eval_splits=(),
        eval_every=1,
        progress=False,
        callbacks=[lambda r: bool((r.train["mean_update_norm"][:, -1] < short).all())],
    )
    assert result.rounds == 5
    np.testing.assert_allclose(
        result.train["mean_update_norm"][0], norms[:5], rtol=1e-5
    )
    assert_close(jax.tree.map(lambda x: x[0], result.params), models[4])


def test_edge_servers_change_nothing():
    # A mean of means, weighted by the examples below each, is the mean of all.
    config = fedavg.Config(client_lr=0.2, work=LocalWork(batch_size=4))
    algorithm = fedavg.make(config, softmax_loss)
    step = jax.jit(algorithm.round)

    def after(ids):
        cohort = plan_round(ids, TRAIN, config.work, seed=3, round=0)
        return step(algorithm.init(PARAMS, N), cohort, KEY)[0].params

    edges = [[0, 2, 5], [1, 4, 6, 7]]
    sizes = [sum(SIZES[i] for i in ids) for ids in edges]
    parts = [after(ids) for ids in edges]
    nested = {
        name: sum(n * np.float64(p[name]) for n, p in zip(sizes, parts, strict=True))
        / sum(sizes)
        for name in START
    }
    assert_close(after([i for ids in edges for i in ids]), nested)


def test_gossip_keeps_the_mean_with_metropolis_weights_alone():
    edges = np.array([[0, 1], [1, 2], [1, 3], [3, 4]])
    neighbours = np.bincount(edges.ravel())
    metropolis = 1 / (1 + neighbours[edges].max(1))
    graph = Graph.from_edges(edges, metropolis, num_nodes=5)
    x = jnp.float32(np.random.default_rng(0).normal(size=(5, 3)))
    mixed, _ = consensus.average(graph, x, rounds=1, eta=1.0)
    np.testing.assert_allclose(mixed.mean(0), x.mean(0), atol=1e-6)
    far, _ = consensus.average(graph, x, rounds=200, eta=1.0)
    np.testing.assert_allclose(far, np.tile(x.mean(0), (5, 1)), atol=1e-4)
    plain = (np.asarray(graph.dense()) > 0) + np.eye(5)
    plain = plain / plain.sum(1, keepdims=True) @ np.asarray(x)
    assert np.abs(plain.mean(0) - x.mean(0)).max() > 0.01


def test_gossip_on_a_complete_graph_is_the_mean_of_all():
    edges = np.array([[i, j] for i in range(6) for j in range(i)])
    graph = Graph.from_edges(edges, np.full(len(edges), 1 / 6), num_nodes=6)
    x = jnp.float32(np.random.default_rng(1).normal(size=(6, 4)))
    mixed, _ = consensus.average(graph, x, rounds=1, eta=1.0)
    np.testing.assert_allclose(mixed, np.tile(x.mean(0), (6, 1)), atol=1e-6)


def test_the_gap_between_two_turns_is_one_over_the_participation():
    draw, clients, rounds = Uniform(cohort_size=5), 50, 4000
    turns = [[] for _ in range(clients)]
    for t in range(rounds):
        for i in draw.draw(0, t, clients):
            turns[i].append(t)
    gaps = np.concatenate([np.diff(t) for t in turns])
    # Geometric: deviation sqrt(90) of one; five of the mean's, a chance of 6e-7.
    assert abs(gaps.mean() - 10) < 5 * np.sqrt(90 / len(gaps))
    assert abs((gaps == 1).mean() - 0.1) < 5 * np.sqrt(0.09 / len(gaps))
