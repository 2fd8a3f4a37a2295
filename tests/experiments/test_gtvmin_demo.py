"""Clustered regression on a network: errors by NumPy, and bounds that hold."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from fedjax_core.experiments import gtvmin_demo, report
from fedjax_core.networks import spectrum

TINY = gtvmin_demo.Experiment(
    sizes=(6, 5),
    p_in=0.8,
    p_out=0.05,
    num_features=2,
    num_examples=(1, 8),
    shown=8,
    alphas=(0.1, 1.0),
    rounds=30,
    bounds=(1, 3),
    num_seeds=2,
    graph_seed=1,
)


@pytest.fixture(scope="module")
def graph():
    return gtvmin_demo.build(TINY)


@pytest.fixture(scope="module")
def found(graph):
    return gtvmin_demo.sweep(TINY, graph)


def test_errors_are_those_of_dense_solutions(graph, found):
    L = np.asarray(spectrum.laplacian_matrix(graph))
    label = np.repeat([0, 1], TINY.sizes)
    for seed in range(2):
        for k, m in enumerate(TINY.num_examples):
            with jax.enable_x64(True):
                problem = gtvmin_demo.draw(TINY, graph, jax.random.key(seed), m)
            W_true, (Q, q, _) = jax.tree.map(np.asarray, tuple(problem))
            assert (W_true[label == 1] == W_true[-1]).all()

            def error(W, W_true=W_true):
                return ((W - W_true) ** 2).sum() / (W_true**2).sum()

            def pooled(rows, Q=Q, q=q):
                return np.linalg.solve(Q[rows].sum(0), -q[rows].sum(0) / 2)

            alone = [-np.linalg.pinv(Q[i]) @ q[i] / 2 for i in range(11)]
            oracle = np.stack([pooled(label == 0), pooled(label == 1)])[label]
            everyone = np.tile(pooled(label >= 0), (11, 1))
            for got, W in (
                (found.alone, np.stack(alone)),
                (found.oracle, oracle),
                (found.everyone, everyone),
            ):
                assert got[seed, k] == pytest.approx(error(W), rel=1e-5)
            for a, alpha in enumerate(TINY.alphas):
                whole = np.kron(alpha * L, np.eye(2))
                for i in range(11):
                    whole[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] += Q[i]
                W = np.linalg.solve(whole, -q.ravel() / 2).reshape(11, 2)
                assert found.network[seed, k, a] == pytest.approx(error(W), rel=1e-4)


def test_more_examples_are_the_same_ones_and_more(graph):
    with jax.enable_x64(True):
        key = jax.random.key(0)
        one, eight = (gtvmin_demo.draw(TINY, graph, key, m) for m in (1, 8))
    np.testing.assert_array_equal(one.W_true, eight.W_true)
    for problem, rank in ((one, 1), (eight, 2)):
        assert (np.linalg.matrix_rank(problem.statistics.Q) == rank).all()


def test_the_network_lies_between_alone_and_the_oracle(monkeypatch):
    traced, solve = [], gtvmin_demo.solve
    monkeypatch.setattr(
        gtvmin_demo, "solve", lambda *args: traced.append(args) or solve(*args)
    )
    experiment = gtvmin_demo.PRESETS["smoke"]
    sweep = gtvmin_demo.sweep(experiment, gtvmin_demo.build(experiment))
    assert len(traced) == 1  # one program for all seeds, sizes and alphas
    for k in range(len(experiment.num_examples)):
        alone, network, everyone, oracle = (
            x.mean() for x in gtvmin_demo.errors(sweep, k).values()
        )
        assert oracle < network < min(alone, everyone)
        assert network == sweep.network[:, k].mean(0).min()


def test_methods_are_within_their_bounds(graph):
    with jax.enable_x64(True):
        problem = gtvmin_demo.draw(TINY, graph, jax.random.key(0), 8)
        runs = gtvmin_demo.converge(TINY, graph, problem, 0.1)
        late = gtvmin_demo.converge_asynchronously(TINY, graph, problem, 0.1)
    assert list(late) == [1, 3]
    for run, rounds in (
        *((run, 30) for run in runs.values()),
        *((run, 60) for _, run in late.values()),
    ):
        assert run.bound is not None
        assert run.error.shape == run.bound.shape == (rounds + 1,)
        assert run.error[0] == run.bound[0] == 1
        assert (run.error <= run.bound + 1e-9).all()
        assert run.error[-1] < 1e-2


def test_a_singular_local_problem_leaves_fedrelax_without_a_bound(graph):
    with jax.enable_x64(True):
        problem = gtvmin_demo.draw(TINY, graph, jax.random.key(0), 8)
        # Node 0 has no examples.
        local = jax.tree.map(lambda x: x.at[0].set(0.0), problem.statistics)
        problem = problem._replace(statistics=local)
        runs = gtvmin_demo.converge(TINY, graph, problem, 0.1)
        late = gtvmin_demo.converge_asynchronously(TINY, graph, problem, 0.1)
    assert runs["FedGD"].bound is not None
    assert runs["FedRelax"].bound is None
    for _, run in late.values():
        assert run.bound is None
        assert run.error[-1] < run.error[0]


def test_the_legend_names_methods_without_a_bound():
    from matplotlib.figure import Figure

    error = 0.5 ** np.arange(4)
    runs = {
        "one": gtvmin_demo.Run(error, error),
        "two": gtvmin_demo.Run(error, None),
    }
    axes: Any = Figure().subplots()
    report.draw_runs(axes, runs, ", no contraction proven")
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["one", "two, no contraction proven", "at most, by theory"]


def test_fewer_examples_than_features_can_be_shown(graph, found):
    few = dataclasses.replace(TINY, shown=1)
    drawn = gtvmin_demo.figures(few, graph, found)
    assert list(drawn) == ["gtvmin_demo", "asynchronous"]


def test_a_network_in_parts_ends_in_one_line(tmp_path):
    parts = dataclasses.replace(TINY, p_out=0.0, out=tmp_path)
    with pytest.raises(
        SystemExit, match=r"^fedjax-core: graph must be connected"
    ) as end:
        gtvmin_demo.main(parts)
    assert "\n" not in str(end.value)


def test_it_prints_a_table_and_draws(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    gtvmin_demo.main(dataclasses.replace(TINY, out=out))
    printed = capsys.readouterr().out
    words = (
        "11 nodes",
        "alone",
        "network",
        "oracle",
        "± standard deviation over 2 draws",
    )
    for word in (*words, "by the true parameters"):
        assert word in printed
    for name in ("gtvmin_demo.png", "asynchronous.png"):
        assert (out / name).stat().st_size > 30_000


def test_impossible_settings_are_refused():
    settings: list[tuple[dict[str, Any], str]] = [
        ({"sizes": ()}, "sizes must name at least one"),
        ({"p_in": 1.5}, r"p_in must be in \[0, 1\]"),
        ({"noise_std": 0.0}, "noise_std must be > 0"),
        ({"alphas": ()}, "alphas must not be empty"),
        ({"alphas": (0.0,)}, "alphas must be > 0"),
        ({"num_examples": (12, 0)}, "num_examples must be >= 1"),
        ({"bounds": (1, 2, 3, 0)}, "bounds must be >= 1"),
        ({"shown": 7}, "shown must be one of"),
    ]
    for setting, match in settings:
        with pytest.raises(ValueError, match=match):
            gtvmin_demo.Experiment(**setting)
    with pytest.raises(ValueError, match="graph must be connected"):
        gtvmin_demo.build(dataclasses.replace(TINY, p_out=0.0))
