"""The demos of the slides: NumPy loops of the listings give the same, bounds hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import RunDirError
from fedjax_core.experiments import slide_demos
from fedjax_core.networks import spectrum

SMOKE = slide_demos.PRESETS["smoke"]


@pytest.fixture(scope="module")
def problem():
    with jax.enable_x64(True):
        return slide_demos.draw(SMOKE)


def test_fedgd_through_a_server_is_the_listing(problem):
    with jax.enable_x64(True):
        run = slide_demos.fedgd_with_a_server(SMOKE, problem)
        L = np.asarray(spectrum.laplacian_matrix(problem.graph))
    Q, q = np.asarray(problem.local.Q), np.asarray(problem.local.q)
    n, d = q.shape
    whole = SMOKE.alpha * np.kron(L, np.eye(d))
    for i in range(n):
        whole[i * d : (i + 1) * d, i * d : (i + 1) * d] += Q[i]
    solution = np.linalg.solve(whole, -q.ravel() / 2)
    values = np.linalg.eigvalsh(whole)
    w, errors = np.zeros(n * d), []
    for _ in range(SMOKE.rounds + 1):
        errors.append(np.linalg.norm(w - solution) / np.linalg.norm(solution))
        w = w - (2 * whole @ w + q.ravel()) / (values[0] + values[-1])
    np.testing.assert_allclose(run.error, errors, rtol=1e-7, atol=1e-12)
    assert run.bound is not None
    assert (run.error <= run.bound * (1 + 1e-9)).all()


def test_fedavg_with_all_nodes_and_rows_is_the_listing(problem):
    everything = dataclasses.replace(SMOKE, batch_size=SMOKE.num_examples)
    with jax.enable_x64(True):
        run = slide_demos.fedavg_with_batches(everything, problem)
        again = slide_demos.fedavg_with_batches(everything, problem)
    np.testing.assert_array_equal(run.error, again.error)
    X = np.asarray(problem.X).reshape(-1, SMOKE.num_features)
    best = np.linalg.lstsq(X, np.ravel(problem.y))[0]
    # The first round in NumPy, for the nodes that the run drew: all choices are tried.
    Q, q = np.asarray(problem.local.Q), np.asarray(problem.local.q)
    eta = 0.5 / np.linalg.eigvalsh(Q)[:, -1].max()
    W = np.zeros_like(q)
    for _ in range(SMOKE.local_steps):
        W = W - eta * (2 * np.einsum("nde,ne->nd", Q, W) + q)
    masks = (np.arange(64)[:, None] >> np.arange(6)) & 1
    means = np.stack([W[m == 1].mean(0) for m in masks if m.sum() == 3])
    first = np.linalg.norm(means - best[None], axis=1) / np.linalg.norm(best)
    assert np.abs(first - run.error[1]).min() < 1e-9
    assert run.error[-1] < run.error[1]


def test_without_a_clock_the_bound_holds(problem):
    with jax.enable_x64(True):
        schedule, run = slide_demos.fedgd_without_a_clock(SMOKE, problem)
    assert run.bound is not None
    assert len(run.error) == 2 * SMOKE.rounds + 1 == schedule.num_events + 1
    assert (run.error <= run.bound * (1 + 1e-9)).all()
    assert run.error[-1] < 0.5
    assert not jnp.asarray(schedule.active).all()


def test_it_prints_and_draws(tmp_path, capsys):
    slide_demos.main(dataclasses.replace(SMOKE, out=tmp_path / "out"))
    out = capsys.readouterr().out
    for words in ("through a server", "FedAvg", "without a clock", "at most"):
        assert words in out
    assert (tmp_path / "out" / "slide_demos.png").stat().st_size > 10_000


def test_a_recorded_run_goes_on_and_is_shown_again(problem, tmp_path):
    e = dataclasses.replace(SMOKE, run_dir=tmp_path)
    with jax.enable_x64(True):
        run = slide_demos.fedavg_with_batches(SMOKE, problem)
        slide_demos.fedavg_with_batches(dataclasses.replace(e, rounds=7), problem)
        for _ in range(2):
            longer = slide_demos.fedavg_with_batches(e, problem)
            np.testing.assert_array_equal(longer.error, run.error)
        with pytest.raises(RunDirError, match="alpha"):
            slide_demos.fedavg_with_batches(dataclasses.replace(e, alpha=1.0), problem)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"num_nodes": 2}, r"num_nodes must be in \[5"),
        ({"batch_size": 31}, r"batch_size must be in \[1, 30\]"),
        ({"alpha": 0.0}, "alpha must be > 0"),
        ({"rounds": 0}, "rounds must be >= 1"),
    ],
)
def test_impossible_settings_are_refused(setting, match):
    with pytest.raises(ValueError, match=match):
        slide_demos.Experiment(**setting)
