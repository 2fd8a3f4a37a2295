"""Systems on networks: closed forms, seeds, records, resuming, refusals."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from fedjax_core import NonFiniteUpdateError, Report, RunDirError
from fedjax_core.algorithms.networks import fedavg, fedrelax
from fedjax_core.networks import asynchronous, builders, operators
from fedjax_core.networks.graph import degree, laplacian
from fedjax_core.networks.oracles import least_squares_statistics, quadratic
from fedjax_core.networks.run import System, from_operator, run
from fedjax_core.networks.theory.oversight import validation_error

HOW_TO = Path(__file__).parents[2] / "docs/how-to/run-a-system-on-a-network.md"
CHAIN = builders.chain(2)
RING = builders.cycle(4)


def admm(graph, rho=1.0, eta=0.5, sigma=0.0, traced=None) -> System:
    """Minimises the sum of (w_i - c_i)^2, with noise on messages; c is the world."""
    n, by_node = graph.num_nodes, degree(graph)[:, None]

    def step(c, state, t, key):
        if traced is not None:
            traced.append(c)
        sent, dual = state["sent"], state["dual"]
        move = 2 * (sent - c) + dual + rho * laplacian(graph, sent)
        W = sent - move / (1 / eta + 2 * rho * by_node)
        sent = W + sigma * jax.random.normal(key, W.shape)
        dual = dual + rho * laplacian(graph, sent)
        return {"W": W, "sent": sent, "dual": dual}, {
            "first": W[0, 0],
            "dual": dual[0, 0],
        }

    def init(c, key):
        return {name: jnp.zeros((n, 1)) for name in ("W", "sent", "dual")}

    def evaluate(c, state):
        error = (state["W"] - c.mean())[:, 0] ** 2
        return {"error": error.mean(), "error_of_node": error}

    config = {"rho": rho, "eta": eta, "sigma": sigma}
    return System(
        name="admm",
        config=config,
        world=lambda key: jax.random.normal(key, (n, 1)),
        init=init,
        step=step,
        evaluate=evaluate,
    )


NOISY = admm(RING, eta=0.2, sigma=0.1)


def quietly(system, **how):
    return run(system, progress=False, **how)


@pytest.fixture(scope="module")
def whole():
    """Two seeds, eleven rounds: the last chunk is shorter than the others."""
    return quietly(NOISY, rounds=11, seeds=(3, 8), eval_every=4)


def assert_same(result, other):
    jax.tree.map(np.testing.assert_array_equal, result.state, other.state)
    for name in ("train", "evaluations", "client_metrics"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(result, name), getattr(other, name)
        )
    np.testing.assert_array_equal(result.evaluated, other.evaluated)


def test_admm_on_a_chain_of_two_has_its_closed_form():
    # c = (0, 2), rho = 1, eta = 1/2: w_1 = 1 - 2^(1-n), w_2 = 1 after n rounds, and
    # the dual of node 1 is -(2 - 2^(1-n)); dyadic, so exact.
    system = admm(CHAIN)._replace(world=np.array([[0.0], [2.0]], np.float32))
    result = quietly(system, rounds=12, eval_every=5)
    n = np.arange(1, 13)
    np.testing.assert_array_equal(result.train["first"][0], 1 - 2.0 ** (1 - n))
    np.testing.assert_array_equal(result.train["dual"][0], -(2 - 2.0 ** (1 - n)))
    np.testing.assert_array_equal(result.state["W"][0, :, 0], [1 - 2.0**-11, 1])
    np.testing.assert_array_equal(result.evaluated, [5, 10, 12])
    error = 4.0 ** (1 - result.evaluated) / 2
    np.testing.assert_array_equal(result.evaluations["error"][0], error)
    np.testing.assert_array_equal(
        result.client_metrics["error_of_node"], [[4.0**-11, 0]]
    )


def test_several_seeds_are_single_runs_bit_for_bit(whole):
    single = quietly(NOISY, rounds=11, seeds=8, eval_every=4)
    assert single.seeds == (8,)
    for name, values in single.train.items():
        np.testing.assert_array_equal(values[0], whole.train[name][1])
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a[0], b[1]),
        single.state,
        whole.state,
    )
    assert not np.array_equal(*whole.train["first"])  # another world, other noise


def test_seeds_side_by_side_are_those_in_turn(whole):
    result = quietly(NOISY, rounds=11, seeds=(3, 8), eval_every=4, seeds_axis="vmap")
    np.testing.assert_allclose(result.train["first"], whole.train["first"], rtol=1e-5)


def test_the_world_is_drawn_once_and_never_a_constant():
    drawn, traced = [], []
    system = admm(RING, traced=traced)
    draw: Any = system.world
    system = system._replace(world=lambda key: drawn.append(key) or draw(key))
    first = quietly(system, rounds=1, seeds=(0, 1))
    assert len(drawn) == 1
    once = len(traced)
    result = quietly(system, rounds=11, seeds=(0, 1), eval_every=2)
    assert first.compilations == result.compilations == 1
    assert len(traced) == 2 * once  # six chunks trace as often as one
    quietly(system._replace(world=jnp.zeros((4, 1))), rounds=1)
    assert all(isinstance(c, Tracer) for c in traced)


@pytest.mark.parametrize("at", [4, 8])
def test_an_interrupted_run_goes_on_to_the_same_bits(whole, tmp_path, at):
    how: dict[str, Any] = {"seeds": (3, 8), "eval_every": 4, "run_dir": tmp_path}
    how["checkpoint_every"] = 4

    def interrupt(report):
        if report.round == at:
            raise KeyboardInterrupt

    # Rounds 5 to 8 are in the tables and not yet in a checkpoint.
    with pytest.raises(KeyboardInterrupt):
        quietly(NOISY, rounds=11, callbacks=[interrupt], **how)
    resumed = quietly(NOISY, rounds=11, resume=True, **how)
    assert resumed.timed_rounds == 11 - (at - 4)
    assert_same(resumed, whole)
    again = quietly(NOISY, rounds=11, resume=True, **how)
    assert again.timed_rounds == again.compilations == 0
    assert_same(again, whole)


def test_the_world_is_in_no_checkpoint(tmp_path):
    def step(world, state, t, key):
        return state + world["rate"][0], {"state": state}

    large = {"rate": jnp.arange(1, 100_001.0)}
    system = System("large", None, large, lambda world, key: jnp.zeros(()), step)
    result = quietly(system, rounds=3, run_dir=tmp_path)
    assert result.state.tolist() == [3.0]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 50_000  # of 400,000 bytes

    other = system._replace(world={"rate": large["rate"].at[-1].set(0)})
    with pytest.raises(RunDirError, match="world"):
        quietly(other, rounds=4, run_dir=tmp_path, resume=True)
    assert quietly(system, rounds=4, run_dir=tmp_path, resume=True).rounds == 4


def test_states_and_worlds_of_plain_numbers(tmp_path):
    def step(world, state, t, key):
        return {"sum": state["sum"] + world * t}, {"t": t}

    system = System("sum", None, lambda key: 0.5, lambda *_: {"sum": 1}, step)
    system = system._replace(evaluate=lambda *_: {"one": 1})
    with pytest.raises(TypeError, match="carry"):  # an int that would become a float
        quietly(system, rounds=2)
    system = system._replace(init=lambda *_: {"sum": 1.0})
    for rounds in (3, 5):
        result = quietly(system, rounds=rounds, run_dir=tmp_path, resume=True)
        assert not result.state["sum"].weak_type
    assert result.state["sum"] == 1 + 0.5 * (1 + 2 + 3 + 4)
    assert result.evaluations["one"][0, -1] == 1


def test_results_have_series_and_plots(whole, tmp_path):
    rounds, values = whole.series("error")
    np.testing.assert_array_equal(rounds, [4, 8, 11])
    assert values.shape == (2, 3)
    assert whole.client_metrics["error_of_node"].shape == (2, 4)
    np.testing.assert_allclose(
        whole.client_metrics["error_of_node"].mean(1), values[:, -1], rtol=1e-6
    )
    whole.plot("error", "first", path=tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert "11 rounds, 2 seed(s)" in repr(whole)


def test_callbacks_see_reports_and_can_stop():
    reports = []

    def stop(report):
        reports.append(report)
        return report.round == 8

    result = quietly(NOISY, rounds=11, eval_every=4, callbacks=[stop])
    assert result.rounds == 8
    assert [report.round for report in reports] == [4, 8]
    assert isinstance(reports[0], Report)
    assert reports[0].train["first"].shape == (1, 4)
    assert reports[0].evaluation["error"].shape == (1,)
    # The first report's state is still its own after the run.
    assert reports[0].state["W"][0, 0, 0] == np.float32(result.train["first"][0, 3])


def test_the_round_of_a_state_that_is_not_finite_is_named():
    def step(world, state, t, key):
        broken = (t == 5) & (world > 0)
        return jnp.where(broken, jnp.nan, state + 1), {"state": state}

    # Eight signs of normals: all of one only with probability 2^-7, and keys are fixed.
    system = System("breaks", None, jax.random.normal, lambda *_: jnp.zeros(()), step)
    seeds = tuple(range(8))
    with pytest.raises(NonFiniteUpdateError, match=r"round 6, seed \d: ") as caught:
        quietly(system, rounds=20, seeds=seeds, eval_every=10)
    assert caught.value.result.rounds == 10
    seed = int(re.findall(r"seed (\d)", str(caught.value))[0])
    broken = np.isnan(caught.value.result.state)
    assert seed == np.flatnonzero(broken)[0]
    assert not broken.all()


def linear_nodes(rng):
    X, y = rng.normal(size=(4, 5, 2)), rng.normal(size=(4, 5))
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def test_the_record_is_the_same_for_the_same_seed(tmp_path):
    X, y = linear_nodes(np.random.default_rng(8))
    mask = np.arange(5) < np.array([5, 5, 5, 0])[:, None]
    system = from_operator(
        fedrelax.make(RING, quadratic(*least_squares_statistics(X, y)), alpha=1.0),
        lambda world, key: jax.random.normal(key, (4, 2)),
        name="fedrelax",
        config={"alpha": 1.0},
        world={"X": X, "y": y, "mask": mask},
        measure=lambda world, W: {"gradients": jnp.int32(4)},
        evaluate=lambda world, W: {"validation_error": validation_error(W, **world)},
    )

    def tables(name, seed):
        where = tmp_path / name
        result = quietly(system, rounds=3, seeds=seed, run_dir=where, eval_every=1)
        names = ("metrics.csv", "evaluations.csv", "config.json")
        return result, [(where / table).read_bytes() for table in names]

    (first, record), (again, same), (other, _) = (
        tables("a", 1), tables("b", 1), tables("c", 2)
    )  # fmt: skip
    assert record == same
    assert_same(first, again)
    assert not np.array_equal(first.params, other.params)
    assert first.total("messages") == 3 * 2 * 4
    assert first.total("gradients") == 3 * 4
    W = np.asarray(first.params[0])
    expected = ((np.asarray(y) - np.einsum("nmd,nd->nm", X, W)) ** 2).mean(1)
    expected[3] = np.nan  # a node without rows
    got = first.client_metrics["validation_error"][0]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_an_operator_takes_the_rounds_of_operators_run():
    X, y = linear_nodes(np.random.default_rng(1))
    start = jnp.ones((4, 2))

    def method(statistics):
        return fedrelax.make(RING, quadratic(*statistics), alpha=0.3)

    statistics = least_squares_statistics(X, y)
    expected, history = operators.run(
        method(statistics), start, 7, channel=operators.relay, record=jnp.linalg.norm
    )
    system = from_operator(
        method,
        start,
        name="relax",
        world=statistics,
        measure=lambda world, W: {"norm": jnp.linalg.norm(W)},
        channel=operators.relay,
    )
    result = quietly(system, rounds=7)
    np.testing.assert_allclose(result.params[0], expected, rtol=1e-5)
    np.testing.assert_allclose(result.train["norm"][0], history, rtol=1e-5)


def test_an_operator_runs_through_a_schedule_and_not_beyond(tmp_path):
    X, y = linear_nodes(np.random.default_rng(2))
    method = fedrelax.make(RING, quadratic(*least_squares_statistics(X, y)), alpha=0.3)
    schedule = asynchronous.partially_asynchronous(RING, 9, 3, jax.random.key(0))
    expected, _ = asynchronous.run(method, schedule, jnp.ones((4, 2)))
    system = from_operator(method, jnp.ones((4, 2)), name="late", schedule=schedule)
    result = quietly(system, rounds=9, eval_every=2)
    np.testing.assert_allclose(result.params[0], expected, rtol=1e-5)
    assert result.state.sent.shape == (1, 4, 4, 2)
    with pytest.raises(ValueError, match="rounds must be at most 9"):
        quietly(system, rounds=10)

    # Another schedule is another run, also one that is only longer.
    quietly(system, rounds=2, run_dir=tmp_path)
    for events, words in ((9, "world"), (12, "horizon")):
        other = asynchronous.synchronous(RING, events)
        system = from_operator(method, jnp.ones((4, 2)), name="late", schedule=other)
        with pytest.raises(RunDirError, match=words):
            quietly(system, rounds=9, run_dir=tmp_path, resume=True)

    # Also where the world is drawn.
    def drawn(schedule):
        return from_operator(
            lambda world: method, jnp.ones((4, 2)), name="late", world=lambda key: key,
            schedule=schedule,
        )  # fmt: skip

    quietly(drawn(schedule), rounds=2, run_dir=tmp_path / "drawn")
    with pytest.raises(RunDirError, match="schedule"):
        quietly(
            drawn(asynchronous.synchronous(RING, 9)),
            rounds=9, run_dir=tmp_path / "drawn", resume=True,
        )  # fmt: skip


def test_messages_to_a_server_are_those_of_who_takes_part():
    method = fedavg.make(lambda W, t, key: W, 5, eta=0.1, clients=2)
    result = quietly(from_operator(method, jnp.ones((5, 1)), name="avg"), rounds=3)
    assert result.train["messages"].tolist() == [[4, 4, 4]]
    everyone = fedavg.make(lambda W, t, key: W, 5, eta=0.1)
    W = jnp.ones((5, 1))
    assert operators.num_messages(everyone, W, 0, None) == 10


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"rounds": 0}, ValueError, "rounds must be >= 1, got 0"),
        ({"seeds": (1, 1)}, ValueError, "seeds must be one or more distinct"),
        ({"seeds": 0.5}, TypeError, "seeds must be ints, got 0.5"),
        ({"eval_every": 0}, ValueError, "eval_every must be >= 1"),
        ({"checkpoint_every": 2.0}, TypeError, "checkpoint_every must be an int"),
        ({"callbacks": print}, TypeError, "callbacks must be a list"),
        ({"seeds_axis": "rows"}, ValueError, "seeds_axis must be one of"),
        ({"resume": True}, ValueError, "resume needs a run_dir"),
        ({"system": print}, TypeError, "system must be a System"),
    ],
)
def test_bad_arguments_are_refused(wrong, error, words):
    with pytest.raises(error, match=words):
        quietly(**({"system": NOISY, "rounds": 2} | wrong))


@pytest.mark.parametrize("metrics", [{}, {"rows": np.zeros(3)}])
def test_steps_must_report_scalars(metrics):
    system = NOISY._replace(step=lambda world, state, t, key: (state, metrics))
    with pytest.raises(ValueError, match="admm must report scalars in every round"):
        quietly(system, rounds=2)


def test_the_how_to_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", HOW_TO.read_text("utf-8"), re.S)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 4
    assert (tmp_path / "runs/noisy_admm/error.png").exists()
    assert names["result"].rounds == 100
